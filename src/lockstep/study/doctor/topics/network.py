"""Network interfaces: which one Gloo and NCCL will take, and whether others can be reached by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import listed, plural
from lockstep.study.doctor.topics.nccl_choice import nccl_interfaces

_SLOW_MBPS = 1000

_VIRTUAL = (
    "docker",
    "br-",
    "virbr",
    "veth",
    "vmnet",
    "vboxnet",
    "cni",
    "flannel",
    "cali",
    "kube",
    "tun",
    "tap",
    "wg",
    "zt",
)
_VIRTUAL_NAMES = (*_VIRTUAL, "tailscale", "lxc", "lxd", "podman", "ifb", "dummy")
"""How the names of interfaces begin that lead to containers, virtual machines and tunnels, not to other machines."""


@dataclass(frozen=True)
class Interface:
    """One network interface, in the system's order."""

    name: str
    addresses: tuple[str, ...] = ()
    is_up: bool = True
    speed_mbps: int = 0

    @property
    def is_loopback(self) -> bool:
        """Whether it leads nowhere but here."""
        return any(address.startswith("127.") or address == "::1" for address in self.addresses)

    @property
    def is_virtual(self) -> bool:
        """Whether its name is that of a bridge or a tunnel."""
        return self.name.startswith(_VIRTUAL_NAMES)

    @property
    def is_usable(self) -> bool:
        """Whether it is up and has an address."""
        return self.is_up and bool(self.addresses)


@dataclass(frozen=True)
class InfinibandPort:
    """A port of an InfiniBand or RoCE card, such as ``mlx5_0`` port 1 in state ``ACTIVE`` at ``200 Gb/sec``."""

    device: str
    port: int
    state: str
    rate: str = ""


@dataclass(frozen=True)
class NetworkFacts:
    """The interfaces, and what tells the backends which to take.

    Attributes:
        interfaces: In the system's order.
        gloo: What Gloo will use, if that is known.
        gloo_reason: Why, in a few words.
        environ: The variables ``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME`` and ``NCCL_IB_DISABLE`` that are set.
        infiniband: All ports.
        machines: Of the job.
        on_gpus: Whether NCCL will serve it.
        model_bytes: Of the gradients, where a task tells.
    """

    interfaces: tuple[Interface, ...]
    gloo: str | None = None
    gloo_reason: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    infiniband: tuple[InfinibandPort, ...] = ()
    machines: int = 1
    on_gpus: bool = False
    model_bytes: int | None = None

    @property
    def nccl(self) -> list[Interface]:
        """What NCCL will use; the first one also for meeting."""
        return nccl_interfaces(self.interfaces, self.environ.get("NCCL_SOCKET_IFNAME"))

    @property
    def chosen(self) -> Interface | None:
        """What the backend of this job will use."""
        if self.on_gpus:
            return next(iter(self.nccl), None)
        return next((interface for interface in self.interfaces if interface.name == self.gloo), None)

    @property
    def best(self) -> Interface | None:
        """The fastest interface that leads outside."""
        real = [
            found for found in self.interfaces if found.is_usable and not found.is_loopback and not found.is_virtual
        ]
        return max(real, key=lambda found: found.speed_mbps, default=None)


def look(facts: NetworkFacts) -> list[Finding]:
    """Return what is wrong with the choice of interfaces; between machines it matters most."""
    found = _named_but_missing(facts)
    if facts.machines > 1 and not found:
        found += _leads_nowhere(facts)
    if facts.machines > 1:
        found += _slow(facts)
    return found + _infiniband(facts)


def seen(facts: NetworkFacts) -> str:
    """Say in a line what Gloo and NCCL will take."""
    names = [interface.name for interface in facts.nccl]
    active = sum(port.state == "ACTIVE" for port in facts.infiniband)
    nccl = (
        f"{plural(active, 'InfiniBand port')}, meeting over {listed(names[:1])}" if active else listed(names) or "none"
    )
    gloo = f"{facts.gloo or 'what this host name leads to'}{facts.gloo_reason and f' ({facts.gloo_reason})'}"
    return f"Gloo takes {gloo}; NCCL would take {nccl}"


def _paste(facts: NetworkFacts) -> str:
    name = facts.best.name if facts.best else "eth0"
    return f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"


def _named_but_missing(facts: NetworkFacts) -> list[Finding]:
    there = listed([interface.name for interface in facts.interfaces if interface.is_usable], 8)
    missing = {}
    gloo = facts.environ.get("GLOO_SOCKET_IFNAME")
    if gloo is not None:
        usable = {interface.name for interface in facts.interfaces if interface.is_usable}
        if any(name.strip() not in usable for name in gloo.split(",")):
            missing["GLOO_SOCKET_IFNAME"] = gloo
    nccl = facts.environ.get("NCCL_SOCKET_IFNAME")
    if nccl is not None and not facts.nccl:
        missing["NCCL_SOCKET_IFNAME"] = nccl
    return [
        Finding(
            Kind.INTERFACE_MISSING,
            Severity.HANG if facts.machines > 1 or (facts.on_gpus and name[0] == "N") else Severity.NOTE,
            f"{name}={value}, but no interface of that name is up here; there are {there}.",
            "The ranks cannot connect: the run fails at the start, or waits until its time is up."
            if facts.machines > 1 or (facts.on_gpus and name[0] == "N")
            else "What does not need it is not harmed, such as shm, which lockstep uses for CPU ranks of one machine.",
            "Name one that is there, or unset it.",
            f"unset {name}" if facts.machines == 1 else _paste(facts),
        )
        for name, value in missing.items()
    ]


def _leads_nowhere(facts: NetworkFacts) -> list[Finding]:
    chosen = facts.chosen
    backend = "NCCL" if facts.on_gpus else "Gloo"
    if chosen is None:
        return []
    if chosen.is_loopback:
        return [
            Finding(
                Kind.INTERFACE_LOOPBACK,
                Severity.HANG,
                f"{backend} will use {chosen.name}, which leads to this machine only, but {facts.machines} machines "
                "are to take part.",
                "Each machine tells the others an address that leads them to themselves: they wait until time is up.",
                "Name the interface that the machines reach each other by.",
                _paste(facts),
            )
        ]
    if chosen.is_virtual:
        return [
            Finding(
                Kind.INTERFACE_VIRTUAL,
                Severity.HANG,
                f"{backend} will use {chosen.name}, which looks like a bridge to containers or a tunnel.",
                "If the other machines cannot reach its address, all wait until time is up; if they can, it is slow.",
                "Name the interface that the machines reach each other by.",
                _paste(facts),
            )
        ]
    names = {interface.name for interface in facts.nccl[:1]} | {facts.gloo or chosen.name}
    if facts.on_gpus and len(names) > 1:
        return [
            Finding(
                Kind.INTERFACES_DIFFER,
                Severity.NOTE,
                f"NCCL will use {facts.nccl[0].name}, Gloo {facts.gloo}.",
                "A firewall has to let both pass; a job that meets over one can wait on the other.",
                "Name one for both.",
                _paste(facts),
            )
        ]
    return []


def _slow(facts: NetworkFacts) -> list[Finding]:
    chosen = facts.chosen
    carries_ib = facts.on_gpus and any(port.state == "ACTIVE" for port in facts.infiniband)
    if chosen is None or chosen.is_loopback or carries_ib or not 0 < chosen.speed_mbps <= _SLOW_MBPS:
        return []
    num_bytes = facts.model_bytes or 400_000_000
    whose = "this task's gradients" if facts.model_bytes else "a model of 100 million parameters"
    # A ring sends and receives 2(n-1)/n times the bytes at each machine.
    seconds = 2 * (facts.machines - 1) / facts.machines * num_bytes * 8 / (chosen.speed_mbps * 1e6)
    return [
        Finding(
            Kind.INTERFACE_SLOW,
            Severity.SLOW,
            f"{chosen.name} runs at {chosen.speed_mbps} Mbit/s.",
            f"Averaging {num_bytes / 1e6:.0f} MB of {whose} takes {seconds:.2g} s of each step at least.",
            "Use a faster network; on this one exchange less: accumulate, and round gradients on the way.",
            "lockstep train TASK.py --accumulate 8 --wire bf16",
        )
    ]


def _infiniband(facts: NetworkFacts) -> list[Finding]:
    down = [port for port in facts.infiniband if port.state != "ACTIVE"]
    disabled = facts.environ.get("NCCL_IB_DISABLE") == "1" and len(down) < len(facts.infiniband)
    if not (down or disabled):
        return []
    severity = Severity.SLOW if facts.machines > 1 and facts.on_gpus else Severity.NOTE
    if disabled:
        return [
            Finding(
                Kind.INFINIBAND_DOWN,
                severity,
                "NCCL_IB_DISABLE=1, although there are InfiniBand ports that are active.",
                "NCCL goes over sockets: a tenth of the bandwidth or less, and more load for the CPU.",
                "Unset it, unless it goes round a fault that is still there.",
                "unset NCCL_IB_DISABLE",
            )
        ]
    names = [f"{port.device} port {port.port} is {port.state}" for port in down]
    return [
        Finding(
            Kind.INFINIBAND_DOWN,
            severity,
            f"{len(down)} of {plural(len(facts.infiniband), 'InfiniBand port')} cannot be used: {listed(names)}.",
            "NCCL has less bandwidth between machines, or falls back to sockets.",
            "Look at the cable and the switch, and that the subnet manager runs.",
            f"ibstat {down[0].device}",
        )
    ]
