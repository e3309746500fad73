"""Interfaces, names, the port and versions: will the ranks of all machines find and understand each other?"""

from __future__ import annotations

import errno
import ipaddress
import platform
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil
import torch

from lockstep.comm.network import GLOO_INTERFACE, gloo_interface, is_local
from lockstep.env import DEFAULT_MASTER_PORT
from lockstep.study.doctor.findings import HANG, NOTE, SLOW, WRONG, Facts, NotChecked, Plan, Problem, check, listed
from lockstep.study.doctor.task import in_time

_SECTION = "Network"
_RESOLVE_S = 2.0
_ANYWHERE = "192.0.2.1"
"""An address for documentation: asked for the route to it, nothing is sent."""

_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_INFINIBAND = Path("/sys/class/infiniband")
_SLOW_MBPS = 1000
_CONTAINERS = ("docker", "br-", "virbr", "veth", "vmnet", "vboxnet", "cni", "flannel", "cali", "kube", "lxc", "lxd")
_VIRTUAL = (*_CONTAINERS, "podman", "ifb", "dummy", "tun", "tap", "wg", "zt", "tailscale")
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
        return any(map(is_loopback, self.addresses))

    @property
    def is_usable(self) -> bool:
        """Whether it is up and has an address."""
        return self.is_up and bool(self.addresses)


@dataclass(frozen=True)
class Network(Facts):
    """The interfaces, and what tells the backends which to take.

    Attributes:
        plan: The run.
        interfaces: In the system's order.
        gloo: What Gloo will use, if that is known.
        environ: The variables that name interfaces, those that are set.
        has_infiniband: Whether a port of an InfiniBand or RoCE card is active.
        gradient_bytes: Of all gradients, where a task says.
    """

    section, topic = _SECTION, "network"

    plan: Plan
    interfaces: tuple[Interface, ...]
    gloo: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    has_infiniband: bool = False
    gradient_bytes: int | None = None

    @property
    def nccl(self) -> list[Interface]:
        """What NCCL will use; the first one also for its rendezvous."""
        return nccl_interfaces(self.interfaces, self.environ.get(_NCCL_INTERFACE))

    @property
    def chosen(self) -> Interface | None:
        """What the backend of a job of several machines will use."""
        if self.plan.machines == 1:
            return None
        named = [interface for interface in self.interfaces if interface.name == self.gloo]
        return next(iter(self.nccl if self.plan.on_gpus else named), None)

    @property
    def missing(self) -> dict[str, str]:
        """The variables that name an interface which is not there, with their values."""
        usable = {interface.name for interface in self.interfaces if interface.is_usable}
        found = {}
        gloo, nccl = self.environ.get(GLOO_INTERFACE), self.environ.get(_NCCL_INTERFACE)
        if gloo is not None and any(name.strip() not in usable for name in gloo.split(",")):
            found[GLOO_INTERFACE] = gloo
        if nccl is not None and not self.nccl:
            found[_NCCL_INTERFACE] = nccl
        return found

    @property
    def paste(self) -> str:
        """The line that names the fastest interface that leads outside."""
        usable = [one for one in self.interfaces if one.is_usable and not one.is_loopback]
        outside = [one for one in usable if not one.name.startswith(_VIRTUAL)]
        best = max(outside, key=lambda one: one.speed_mbps, default=Interface("eth0"))
        return f"export {GLOO_INTERFACE}={best.name} {_NCCL_INTERFACE}={best.name}"

    @property
    def summary(self) -> str:
        """What Gloo and NCCL will take."""
        nccl = listed([interface.name for interface in self.nccl]) or "none"
        cards = "InfiniBand, rendezvous over " if self.has_infiniband else ""
        return f"Gloo takes {self.gloo or 'what this host name leads to'}; NCCL would take {cards}{nccl}"


def nccl_interfaces(interfaces: tuple[Interface, ...], chosen: str | None) -> list[Interface]:
    """Return the interfaces that NCCL uses for sockets, in its order; the first is the one that ranks meet over.

    Args:
        interfaces: All of the machine.
        chosen: The value of ``NCCL_SOCKET_IFNAME``, if it is set: prefixes, or exact names behind ``=``; behind ``^``
            those that are not to be used.

    Source: NCCL's manual, "Environment variables": without a choice, those that begin with ``ib`` come first, and
    ``docker`` and ``lo`` are used only where there is nothing else.
    """
    usable = [interface for interface in interfaces if interface.is_usable]
    if chosen:
        rule = chosen.removeprefix("^")
        names = tuple(part.strip() for part in rule.removeprefix("=").split(",") if part.strip())
        matching = [one for one in usable if (one.name in names if rule[:1] == "=" else one.name.startswith(names))]
        return [one for one in usable if one not in matching] if chosen.startswith("^") else matching
    last = ("docker", "lo")
    by_preference = [
        [one for one in usable if one.name.startswith("ib")],
        [one for one in usable if not one.name.startswith(last)],
        *([one for one in usable if one.name.startswith(prefix)] for prefix in last),
    ]
    return next(filter(None, by_preference), [])


def read_network(plan: Plan, environ: Mapping[str, str], gradient_bytes: int | None) -> Network:
    """Return the interfaces and which the backends will take."""
    interfaces = read_interfaces()
    gloo: str | None = environ.get(GLOO_INTERFACE, "").split(",")[0].strip() or None
    if gloo is None:
        one_machine = plan.machines == 1
        try:  # looks names up, so it may take long
            gloo = in_time(_RESOLVE_S, lambda: gloo_interface(plan.master_addr or _ANYWHERE, one_machine=one_machine))
        except (OSError, TimeoutError):
            gloo = None
    if gloo is None:
        gloo = _interface_of(_resolve(socket.gethostname())[:1], interfaces)
    named = {name: environ[name] for name in (GLOO_INTERFACE, _NCCL_INTERFACE) if name in environ}
    ports = [(port / "state").read_text() for port in _INFINIBAND.glob("*/ports/*") if (port / "state").exists()]
    return Network(plan, interfaces, gloo, named, any("ACTIVE" in port for port in ports), gradient_bytes)


def read_interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces in the order of their numbers, with their IP addresses."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    found = []
    for _, name in sorted(socket.if_nameindex()):
        own = tuple(address.address for address in addresses.get(name, ()) if address.family in families)
        state = states.get(name)
        found.append(Interface(name, own, state is not None and state.isup, 0 if state is None else state.speed))
    return tuple(found)


def _resolve(name: str) -> tuple[str, ...]:
    """Return the addresses that ``name`` leads to, in the resolver's order; none if it does not answer in time."""
    try:
        answers = in_time(_RESOLVE_S, lambda: socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM))
    except (OSError, TimeoutError):
        return ()
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


def _interface_of(addresses: tuple[str, ...], interfaces: tuple[Interface, ...]) -> str | None:
    return next((one.name for one in interfaces for own in one.addresses if own.partition("%")[0] in addresses), None)


def is_loopback(address: str) -> bool:
    """Say whether an address leads to its own machine."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


@check(Network)
def interface_missing(facts: Network) -> Iterator[Problem]:
    """``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names an interface that is not there, or not up.

    Often it was copied from another machine, whose cards have other names. NCCL takes the value as the beginning of a
    name, behind ``=`` as a whole name, and behind ``^`` as what not to take. For CPU ranks on one machine it is a note:
    lockstep's backend ``shm`` needs no interface.

    Cost: What needs it cannot connect: the run fails at the start, or waits until its time is up.
    Fix: Name one that is there, or unset it.
    """
    there = listed([interface.name for interface in facts.interfaces if interface.is_usable], 8)
    alone = facts.plan.machines == 1
    for name, value in facts.missing.items():
        is_needed = not alone or (facts.plan.on_gpus and name == _NCCL_INTERFACE)
        found = f"{name}={value}, but no interface of that name is up here; there are {there}."
        yield Problem(HANG if is_needed else NOTE, found, f"unset {name}" if alone else facts.paste)


@check(Network)
def interface_local(facts: Network) -> Iterator[Problem]:
    """For several machines, the interface that will be used leads nowhere but here, to containers, or into a tunnel.

    Known by its name: a bridge (``docker0``, ``virbr0``, ``br-...``), a container's cable (``veth...``) or a tunnel
    (``tun``, ``wg``, ``tailscale``). NCCL leaves out only ``docker`` and ``lo`` by itself.

    Cost: If the other machines cannot reach its address, all wait until time is up; if they can, it is slow.
    Fix: Name the interface that the machines reach each other by.
    """
    chosen, backend = facts.chosen, "NCCL" if facts.plan.on_gpus else "Gloo"
    if chosen is None or facts.missing:
        return
    if chosen.is_loopback:
        where = f"which leads to this machine only, but {facts.plan.machines} machines are to take part"
        yield Problem(HANG, f"{backend} will use {chosen.name}, {where}.", facts.paste)
    elif chosen.name.startswith(_VIRTUAL):
        where = "which looks like a bridge to containers or a tunnel"
        yield Problem(HANG, f"{backend} will use {chosen.name}, {where}.", facts.paste)


@check(Network)
def interface_slow(facts: Network) -> Iterator[Problem]:
    """The interface runs at 1 Gbit/s or less.

    The time is worked out from the size of the gradients, where a task tells it, for a ring between the machines:
    ``2 (n-1)/n`` times the bytes, divided by the speed.

    Cost: Each step waits for the gradients of all machines.
    Fix: Use a faster network; on this one exchange less: accumulate, and round gradients on the way.
    """
    chosen, machines = facts.chosen, facts.plan.machines
    if chosen is None or chosen.is_loopback or (facts.plan.on_gpus and facts.has_infiniband):
        return
    if 0 < chosen.speed_mbps <= _SLOW_MBPS:
        num_bytes = facts.gradient_bytes or 400_000_000
        whose = "this task's gradients" if facts.gradient_bytes else "a model of 100 million parameters"
        seconds = 2 * (machines - 1) / machines * num_bytes * 8 / (chosen.speed_mbps * 1e6)
        takes = f"averaging {num_bytes / 1e6:.0f} MB of {whose} takes {seconds:.2g} s of each step at least"
        found = f"{chosen.name} runs at {chosen.speed_mbps} Mbit/s: {takes}."
        yield Problem(SLOW, found, "lockstep train TASK.py --accumulate 8 --wire bf16")


@dataclass(frozen=True)
class Host(Facts):
    """What this host's name leads to, which Gloo and torchrun tell the other machines.

    Attributes:
        plan: The run.
        name: This host's.
        addresses: What it leads to, in the resolver's order; empty if nowhere.
        own_address: This machine's address for others, if it has one.
        interface: The interface of that address.
        master_addresses: What the address leads to at which the ranks meet.
        gloo_is_told: Whether ``GLOO_SOCKET_IFNAME`` is set, so that Gloo does not ask for the name.
    """

    section, topic = _SECTION, "host name"

    plan: Plan
    name: str
    addresses: tuple[str, ...]
    own_address: str | None = None
    interface: str | None = None
    master_addresses: tuple[str, ...] = ()
    gloo_is_told: bool = False

    @property
    def summary(self) -> str:
        """What the name leads to."""
        outside = f"; others reach this machine at {self.own_address}" if self.own_address else ""
        return f"{self.name} leads to {listed(list(self.addresses)) or 'nowhere'}{outside}"


def read_host(plan: Plan, environ: Mapping[str, str], interfaces: tuple[Interface, ...]) -> Host:
    """Return what this host's name and the master address lead to. Blocks some seconds if a name server is silent."""
    name, master = socket.gethostname(), _resolve(plan.master_addr) if plan.master_addr else ()
    own = _own_address(master[0] if master and not is_loopback(master[0]) else _ANYWHERE)
    interface = _interface_of((own,) if own else (), interfaces)
    return Host(plan, name, _resolve(name), own, interface, master, GLOO_INTERFACE in environ)


def _own_address(towards: str) -> str | None:
    """Return the address from which this machine would send to ``towards``."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # sends nothing; the system only looks up the route
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if is_loopback(own) else own


@check(Host)
def hostname_loopback(facts: Host) -> Iterator[Problem]:
    """The name of the host leads to a loopback address, mostly because ``/etc/hosts`` says 127.0.1.1, or nowhere.

    Gloo binds to what the name leads to, and torchrun tells it to the other machines. On one machine that does no harm.
    ``lockstep run --nnodes`` looks for the interface that leads to the first machine and goes round it.

    Cost: A job of several machines waits till time is up: each is told an address that leads it to itself, or nowhere.
    Fix: Start the ranks with `lockstep run --nnodes`, which goes round it; for other launchers name the interface for
        Gloo, and give torchrun an address (--local-addr); or give the name its address.
    """
    if facts.addresses and not is_loopback(facts.addresses[0]):
        return
    own = f"; its address for them is {facts.own_address}" if facts.own_address else ""
    where = f"{facts.addresses[0]}, which no other machine can reach{own}" if facts.addresses else "no address"
    entry = f"{facts.own_address or 'ADDRESS'} {facts.name}"
    hosts = f"echo '{entry}' | sudo tee -a /etc/hosts  # and delete the name from the line of 127.0.x.x"
    is_harmless = facts.plan.machines == 1 or (facts.gloo_is_told and bool(facts.addresses))
    found = f"The name of this host, {facts.name}, leads to {where}."
    yield Problem(NOTE if is_harmless else HANG, found, f"export {GLOO_INTERFACE}={facts.interface or 'eth0'}\n{hosts}")


@check(Host)
def master_address(facts: Host) -> Iterator[Problem]:
    """For several machines, the address where the ranks are to meet leads to this machine's loopback, or nowhere.

    Cost: Machines other than the first wait there for somebody who never comes.
    Fix: Give the first machine's address in the network that all of them share.
    """
    where, plan = next(iter(facts.master_addresses), ""), facts.plan
    if plan.master_addr is not None and plan.machines > 1 and (not where or is_loopback(where)):
        leads = f"leads to {where or 'no address'} on this machine"
        found = f"The ranks are to meet at {plan.master_addr}, which {leads}."
        yield Problem(HANG, found, f"export MASTER_ADDR={facts.own_address or 'ADDRESS'}  # the first machine's")


@dataclass(frozen=True)
class Port(Facts):
    """The port at which the ranks meet.

    Attributes:
        port: Its number.
        problem: Why it cannot be listened at; ``None`` if it can.
        free_port: One that is free.
        was_chosen: Whether the run asks for this port; otherwise it is torchrun's default.
    """

    section, topic = _SECTION, "port"

    port: int
    problem: str | None = None
    free_port: int = 0
    was_chosen: bool = False

    @property
    def summary(self) -> str:
        """Whether it is free."""
        default = "" if self.was_chosen else " (torchrun's default; lockstep run finds a free one)"
        return f"{self.port} {self.problem or 'is free'}{default}"


def read_port(plan: Plan) -> Port | NotChecked:
    """Return whether the port is free, if it is one of this machine."""
    if plan.is_running:
        return NotChecked("whether the port is free", "this job's own ranks hold it")
    if plan.master_addr is not None and plan.machines > 1 and not is_local(plan.master_addr):
        return NotChecked("whether the port is free", f"it is one of {plan.master_addr}, another machine")
    port, problem = plan.master_port or DEFAULT_MASTER_PORT, None
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        problem = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
    with socket.create_server(("", 0)) as free:
        return Port(port, problem, free.getsockname()[1], plan.master_port is not None)


@check(Port)
def port_taken(facts: Port) -> Iterator[Problem]:
    """Somebody listens at the port that the ranks are to meet at, often a job that was thought to have ended.

    Without a port ``lockstep run`` takes a free one on one machine, so that torchrun's 29500 being taken is a note.

    Cost: The run cannot begin there; if another job's ranks hold it, they may answer, and all wait.
    Fix: Choose another, the same on every machine; on one machine `lockstep run` without a port finds one.
    """
    if facts.problem is not None:
        found = f"Port {facts.port} on this machine {facts.problem}."
        yield Problem(HANG if facts.was_chosen else NOTE, found, f"export MASTER_PORT={facts.free_port}")


@dataclass(frozen=True)
class Rendezvous(Facts):
    """That the ranks of this job did not come together: the message of `lockstep.init`."""

    section, topic = _SECTION, "rendezvous"

    error: str


@check(Rendezvous)
def ranks_do_not_meet(facts: Rendezvous) -> Iterator[Problem]:
    """Started as the ranks of a job, they did not come together within 20 s.

    The message is the one that ``lockstep.init`` would end with.

    Cost: No run can begin: ranks wait for each other.
    Fix: Look at the other ranks' output, and whether this machine reaches the first one.
    """
    found = " ".join(facts.error.split())
    yield Problem(HANG, found, "ping -c 1 $MASTER_ADDR && nc -vz $MASTER_ADDR $MASTER_PORT")


_VERSIONS = {"torch": HANG, "lockstep": HANG, "nccl": HANG, "cuda": WRONG, "python": NOTE, "driver": NOTE}
"""How bad it is if ranks differ in it."""


@dataclass(frozen=True)
class Versions(Facts):
    """The versions of all ranks, by name, and what they compute on; see `read_versions`."""

    section, topic = "Software and storage", "versions"

    ranks: tuple[Mapping[str, str], ...]

    def by_value(self, name: str) -> dict[str, list[str]]:
        """Return the ranks by their version of ``name``."""
        values: dict[str, list[str]] = {}
        for rank, versions in enumerate(self.ranks):
            values.setdefault(versions[name] or "none", []).append(str(rank))
        return values

    def differences(self, name: str) -> str:
        """Say who has which ``name``; nothing if all have the same."""
        values = self.by_value(name)
        who = [f"{value} on rank{'s' * (len(ranks) > 1)} {listed(ranks)}" for value, ranks in values.items()]
        return "; ".join(who) if len(values) > 1 else ""

    @property
    def summary(self) -> str:
        """Those of the first rank, and how many were compared."""
        compared = f"; {len(self.ranks)} ranks compared" if len(self.ranks) > 1 else ""
        return ", ".join(f"{name} {self.ranks[0][name]}" for name in _VERSIONS if self.ranks[0][name]) + compared


def read_versions(*, on_gpus: bool) -> dict[str, str]:
    """Return the versions of this process, and its processor; empty for what it does not have."""
    try:
        own = metadata.version("lockstep-torch")
    except metadata.PackageNotFoundError:
        own = ""
    has_cuda = torch.cuda.is_available()
    cpu = _line(Path("/proc/cpuinfo"), "model name").partition(":")[2].strip()
    return {
        "torch": torch.__version__,
        "lockstep": own,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else "",
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        "driver": _line(Path("/sys/module/nvidia/version"), ""),
        "processor": torch.cuda.get_device_name() if on_gpus and has_cuda else cpu,
    }


def _line(file: Path, beginning: str) -> str:
    """Return the first line of ``file`` that begins so; empty if there is none."""
    try:
        return next((line.strip() for line in file.read_text().splitlines() if line.startswith(beginning)), "")
    except OSError:
        return ""


@check(Versions)
def versions_differ(facts: Versions) -> Iterator[Problem]:
    """Started as the ranks of a job: torch, NCCL, CUDA, the driver, Python or lockstep are not the same on all of them.

    torch, NCCL and lockstep must be; another CUDA rounds otherwise.

    Cost: Ranks may not understand each other, or make other collectives in another order: the start fails, or all wait.
    Fix: Install the same everywhere.
    """
    for name, severity in _VERSIONS.items():
        differences = facts.differences(name)
        if differences:
            packages = {"torch": "torch=={}", "lockstep": "lockstep-torch=={}"}
            most_common = max(facts.by_value(name).items(), key=lambda item: len(item[1]))[0]
            install = packages.get(name, "torch  # which brings NCCL and CUDA").format(most_common)
            found = f"The ranks have different versions of {name}: {differences}."
            yield Problem(severity, found, f"python -m pip install {install}")


@check(Versions)
def machines_differ(facts: Versions) -> Iterator[Problem]:
    """Started as the ranks of a job: they compute on different processors or GPUs.

    Cost: Every step takes as long as on the slowest, and roundings may differ between them.
    Fix: Use machines that are alike, or give the faster ranks larger parts of each batch.
    """
    differences = facts.differences("processor")
    if differences:
        found = f"The ranks compute on different processors: {differences}."
        yield Problem(SLOW, found, "lockstep train TASK.py --shares 2,1")
