"""Interfaces, names and versions: will the ranks of all machines reach and understand each other?"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch

from lockstep.base.accelerator import default_device, nccl_version
from lockstep.base.activity import in_time
from lockstep.base.env import is_loopback
from lockstep.comm.network import GLOO_INTERFACE
from lockstep.study.doctor.findings import Plan, Problem, Severity, check, cost, fix, listed, paste
from lockstep.study.links import Link, cable_bytes, format_rate
from lockstep.telemetry import provenance

_RESOLVE_S = 2.0

_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_SLOW_MBPS = 1000
# The gradients of 100 million parameters as float32.
_EXAMPLE_BYTES = 400_000_000
# Prefixes of interfaces that lead to containers, virtual machines and tunnels, not to other machines.
_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "kube", "podman", "tun", "wg", "tailscale")


@dataclass(frozen=True)
class Interface:
    """A network interface that is up and has an address."""

    name: str
    addresses: tuple[str, ...] = ()
    speed_mbps: int = 0

    @property
    def is_loopback(self) -> bool:
        """Whether it leads to this machine only."""
        return any(map(is_loopback, self.addresses))


@dataclass(frozen=True)
class Network:
    """The interfaces and the names of this machine.

    Attributes:
        plan: The run.
        interfaces: The interfaces that are up, in the system's order.
        gloo: Gloo's interface; empty if unknown.
        environ: The variables that name interfaces, if set.
        host: The name of this host, which Gloo and torchrun give to the other machines.
        addresses: The addresses of that name, in the resolver's order; empty if it has none.
        own_address: This machine's address for others; ``ADDRESS`` if it has none.
        master_addresses: The addresses of the rendezvous host.
    """

    plan: Plan
    interfaces: tuple[Interface, ...]
    gloo: str
    environ: Mapping[str, str]
    host: str
    addresses: tuple[str, ...]
    own_address: str
    master_addresses: tuple[str, ...]

    @property
    def nccl(self) -> list[Interface]:
        """NCCL's interfaces; it uses the first one for its rendezvous, too."""
        return nccl_interfaces(self.interfaces, self.environ.get(_NCCL_INTERFACE))

    @property
    def chosen(self) -> Interface | None:
        """The backend's interface in a job of several machines."""
        # The ranks of one machine use the loopback interface or shared memory.
        named = [interface for interface in self.interfaces if interface.name == self.gloo]
        candidates = self.nccl if self.plan.on_gpus else named
        return candidates[0] if candidates and self.plan.machines > 1 else None

    @property
    def missing(self) -> dict[str, str]:
        """The variables that name a missing interface, with their values."""
        names = {interface.name for interface in self.interfaces}
        # Gloo needs every interface in its list; NCCL's value is a rule that fits some interfaces or none.
        is_there = {
            GLOO_INTERFACE: names.issuperset(self.environ.get(GLOO_INTERFACE, "").replace(" ", "").split(",")),
            _NCCL_INTERFACE: bool(self.nccl),
        }
        return {name: value for name, value in self.environ.items() if not is_there[name]}

    @property
    def best(self) -> str:
        """The name of the fastest interface that leads to other machines."""
        return best_of(self.interfaces).name

    @property
    def seen(self) -> dict[str, str]:
        """A line about the interfaces and this host's name."""
        nccl = listed([interface.name for interface in self.nccl]) or "none"
        resolved = f"{self.host} resolves to {listed(self.addresses) or 'no address'}"
        return {"network": f"Gloo uses {self.gloo or 'the interface of this host name'}, NCCL {nccl}; {resolved}"}


def best_of(interfaces: Sequence[Interface]) -> Interface:
    """Return the fastest interface that leads to other machines."""
    outside = [one for one in interfaces if not (one.is_loopback or one.name.startswith(_VIRTUAL))]
    return max(outside, key=lambda one: one.speed_mbps, default=Interface("eth0", ("ADDRESS",)))


def nccl_interfaces(interfaces: tuple[Interface, ...], chosen: str | None) -> list[Interface]:
    """Return the interfaces that NCCL uses for sockets, in its order; it uses the first one for its rendezvous.

    Args:
        interfaces: All of the machine.
        chosen: The value of ``NCCL_SOCKET_IFNAME``, if it is set: prefixes, or exact names after ``=``; after ``^``
            the interfaces that are excluded.

    Source: NCCL's manual, "Environment variables": without a choice, interfaces that begin with ``ib`` come first, and
    ``docker`` and ``lo`` are used only if there is no other.
    """
    if not chosen:
        outside = [one for one in interfaces if not one.name.startswith(("docker", "lo"))] or interfaces
        return sorted(outside, key=lambda one: (one.name.startswith("lo"), not one.name.startswith("ib")))
    names = tuple(filter(None, chosen.strip("^=").replace(" ", "").split(",")))
    matching = [one for one in interfaces if (one.name in names if "=" in chosen else one.name.startswith(names))]
    return [one for one in interfaces if one not in matching] if chosen.startswith("^") else matching


def read_network(plan: Plan, environ: Mapping[str, str]) -> Network:
    """Return the interfaces and names. Blocks some seconds at most."""
    interfaces, host = read_interfaces(), socket.gethostname()
    addresses, master = _resolve(host), _resolve(plan.master_addr)
    own_address = next((address for address in addresses if not is_loopback(address)), best_of(interfaces).addresses[0])
    # Gloo uses the first of several; without a choice, the one with the host's address.
    gloo = environ.get(GLOO_INTERFACE, "").split(",")[0].strip()
    gloo = gloo or next((one.name for one in interfaces if own_address in one.addresses), "")
    named = {name: environ[name] for name in (GLOO_INTERFACE, _NCCL_INTERFACE) if name in environ}
    return Network(plan, interfaces, gloo, named, host, addresses, own_address, master)


def read_interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces that are up and have an IP address."""
    states, families = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    interfaces = []
    for name, all_addresses in psutil.net_if_addrs().items():
        addresses = tuple(address.address for address in all_addresses if address.family in families)
        if addresses and name in states and states[name].isup:
            interfaces.append(Interface(name, addresses, states[name].speed))
    return tuple(interfaces)


def _resolve(name: str | None) -> tuple[str, ...]:
    """Return the addresses of ``name``, in the resolver's order; none if it does not answer in time."""
    answers = []
    with suppress(OSError, TimeoutError):
        if name is not None:
            answers = in_time(_RESOLVE_S, lambda: socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM))
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


@check(Network, Severity.HANG)
@cost("The backend cannot connect: the run fails at the start, or waits until the time-out.")
@fix("Name an interface that exists, or unset the variable.")
@paste("export GLOO_SOCKET_IFNAME={best} NCCL_SOCKET_IFNAME={best}")
def interface_missing(facts: Network) -> Iterator[Problem]:
    """``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names an interface that does not exist or is down.

    Often the value comes from another machine, whose interfaces have other names. NCCL takes the value as a prefix,
    after ``=`` as a whole name, and after ``^`` as an exclusion. CPU ranks on one machine need no interface.
    """
    existing = listed([interface.name for interface in facts.interfaces], 8)
    is_alone = facts.plan.machines == 1
    for name, value in facts.missing.items():
        if not is_alone or (facts.plan.on_gpus and name == _NCCL_INTERFACE):
            text = f"{name}={value}, but no interface of that name is up; this machine has {existing}."
            yield Problem(text, paste=f"unset {name}" if is_alone else "")


@check(Network, Severity.HANG)
@cost("If the other machines cannot reach its address, all ranks wait until the time-out; if they can, it is slow.")
@fix("Name the interface that connects the machines.")
@paste("export GLOO_SOCKET_IFNAME={best} NCCL_SOCKET_IFNAME={best}")
def interface_local(facts: Network) -> Iterator[Problem]:
    """In a job of several machines, the backend's interface leads to this machine only, to containers, or to a tunnel.

    This is known from its name: a bridge (``docker0``, ``virbr0``, ``br-...``), a container's interface (``veth...``)
    or a tunnel (``tun``, ``wg``, ``tailscale``). NCCL itself excludes only ``docker`` and ``lo``.
    """
    chosen, backend = facts.chosen, "NCCL" if facts.plan.on_gpus else "Gloo"
    if chosen is None or facts.missing:  # `interface_missing` reports a name that does not exist
        return
    if chosen.is_loopback:
        where = f"which leads to this machine only, but the job has {facts.plan.machines} machines"
        yield Problem(f"{backend} will use {chosen.name}, {where}.")
    elif chosen.name.startswith(_VIRTUAL):
        yield Problem(f"{backend} will use {chosen.name}: by its name, a bridge to containers or a tunnel.")


@check(Network, Severity.HANG)
@cost("A job of several machines waits until the time-out: the other machines get an address that is their own.")
@fix("Start the ranks with `lockstep run --nnodes`; or name Gloo's interface, and correct /etc/hosts.")
@paste("export GLOO_SOCKET_IFNAME={best}", "echo '{own_address} {host}' | sudo tee -a /etc/hosts")
def hostname_loopback(facts: Network) -> Iterator[Problem]:
    """The host name resolves to a loopback address, mostly because ``/etc/hosts`` says 127.0.1.1, or to none.

    Gloo binds to the address of the host name, and torchrun gives it to the other machines. On one machine, or if
    ``GLOO_SOCKET_IFNAME`` is set, this does no harm. ``lockstep run --nnodes`` finds the interface by itself. With
    torchrun, give an address (``--local-addr``) as well; or add the address to ``/etc/hosts``, and delete the name from
    the line of 127.0.x.x.
    """
    is_named = GLOO_INTERFACE in facts.environ and bool(facts.addresses)
    first = next(iter(facts.addresses), "")  # the one that Gloo and torchrun use
    if facts.plan.machines > 1 and not is_named and (not first or is_loopback(first)):
        where = f"{first}, which other machines cannot reach" if first else "no address"
        yield Problem(f"The name of this host, {facts.host}, resolves to {where}.")


@check(Network, Severity.HANG)
@cost("The other machines wait until the time-out, or fail at the start.")
@fix("Use the IP address of the first machine in the network that all machines share.")
@paste("export MASTER_ADDR={own_address}  # if this is the first machine: its address")
def master_address(facts: Network) -> Iterator[Problem]:
    """In a job of several machines, the rendezvous is at a loopback address, or at a name without an address."""
    plan, first = facts.plan, next(iter(facts.master_addresses), "")
    if plan.master_addr is None or plan.machines == 1:
        return
    if not first:
        paste = f"getent hosts {plan.master_addr}  # then, with the first machine's IP address: export MASTER_ADDR=..."
        yield Problem(f"The name of the rendezvous host, {plan.master_addr}, cannot be resolved here.", paste=paste)
    elif is_loopback(first):
        yield Problem(f"The rendezvous host, {plan.master_addr}, resolves to {first}, a loopback address.")


# The ranks of a job that has started.


@dataclass(frozen=True)
class Job:
    """The ranks of a running job.

    Attributes:
        plan: The run.
        ranks: The versions of each rank, by name, and its processor; see `read_versions`.
        link: The measured link between machines.
        error: Why the ranks could not connect: the message of `lockstep.init`.
    """

    plan: Plan
    ranks: Sequence[Mapping[str, str]] = ()
    link: Link | None = None
    error: str = ""

    @property
    def seen(self) -> dict[str, str]:
        """A line about the first rank's versions and the number of ranks compared, and one about the link."""
        lines = {}
        for first in self.ranks[:1]:
            compared = f"; {len(self.ranks)} ranks compared" if len(self.ranks) > 1 else ""
            lines["versions"] = ", ".join(f"{name} {first[name]}" for name in _VERSIONS if name in first) + compared
        if self.link is not None:
            lines["link"] = f"all-reduces between {self.plan.machines} machines run at {self.link.source}"
        return lines


# What must be equal on all ranks: how bad it is if not, and the line to type, with the most common version.
_VERSIONS = {
    "torch": (Severity.HANG, "python -m pip install torch=={}"),
    "lockstep": (Severity.HANG, "python -m pip install lockstep-torch=={}"),
    "nccl": (Severity.HANG, "python -m pip install torch  # which brings NCCL"),
    "cuda": (Severity.WRONG, "python -m pip install torch  # which brings CUDA"),
    "processor": (Severity.SLOW, "lockstep train TASK.py --shares 2,1"),
}


def read_versions() -> dict[str, str]:
    """Return the versions of this process, and its processor."""
    device = default_device()
    name = provenance.cpu_model() if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    return provenance.versions() | {"processor": name} | ({"nccl": nccl_version()} if device.type == "cuda" else {})


@check(Job, Severity.SLOW)
@cost("Each step waits for the gradients of all machines.")
@fix("Use a faster network, or follow the advice of `lockstep predict` for this one.")
def link_slow(job: Job) -> Iterator[Problem]:
    """As the ranks of a job on several machines without GPUs: all-reduces between them run at 1 Gbit/s or less.

    Measured with messages of up to 64 MB for about three seconds. The time is that of a ring between the machines:
    ``2 (n-1)/n`` times the bytes, divided by the rate.
    """
    if job.link is not None and job.link.bytes_per_s * 8 <= _SLOW_MBPS * 1e6:
        rate, machines = job.link.bytes_per_s, job.plan.machines
        seconds = cable_bytes(_EXAMPLE_BYTES, machines) / rate
        takes = f"averaging the gradients of 100 million parameters takes {seconds:.2g} s of each step"
        text = f"All-reduces between the machines run at {format_rate(rate)}: {takes}."
        yield Problem(text, paste=f"lockstep predict TASK.py --machines {machines} --link {rate / 1e6:.3g}MB/s")


@check(Job, Severity.HANG)
@cost("The run cannot start: ranks wait for each other.")
@fix("Read the output of the other ranks, and check whether this machine can reach the first one.")
def ranks_do_not_meet(job: Job) -> Iterator[Problem]:
    """As the ranks of a job: they did not connect to each other within 20 s.

    The message is that of ``lockstep.init``.
    """
    if job.error:
        host, port = job.plan.master_addr, job.plan.master_port
        yield Problem(" ".join(job.error.split()), paste=f"getent hosts {host} && nc -vz {host} {port}")


@check(Job, Severity.HANG)
@cost("Ranks may not understand each other, or call other collectives: the start fails, or all wait.")
@fix("Install the same versions on all machines; give faster ranks larger parts of each batch.")
def versions_differ(job: Job) -> Iterator[Problem]:
    """As the ranks of a job: they differ in torch, NCCL, CUDA, lockstep, processor or GPU.

    torch, NCCL and lockstep must be equal; another CUDA rounds differently; all ranks wait for a slower processor or
    GPU.
    """
    for name, (severity, line) in _VERSIONS.items():
        by_value: dict[str, list[str]] = {}
        for rank, versions in enumerate(job.ranks):
            by_value.setdefault(versions.get(name, "none"), []).append(str(rank))
        if len(by_value) > 1:
            who = "; ".join(f"{value} on rank{'s' * (len(r) > 1)} {listed(r)}" for value, r in by_value.items())
            most_common = max(by_value, key=lambda value: len(by_value[value]))
            noun = name if name == "processor" else f"version of {name}"
            text = f"The ranks differ in their {noun}: {who}."
            yield Problem(text, severity=severity, paste=line.format(most_common))
