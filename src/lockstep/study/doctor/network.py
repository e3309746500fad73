"""Interfaces, names, the port and versions: will the ranks of all machines find and understand each other?"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from lockstep.accelerator import default_device, nccl_version
from lockstep.comm.network import GLOO_INTERFACE, is_local, reachable_address
from lockstep.env import DEFAULT_MASTER_PORT, is_loopback
from lockstep.study.doctor.findings import HANG, NOTE, SLOW, WRONG, NotChecked, Plan, Problem, check, in_time, listed
from lockstep.study.links import Link, cable_bytes, format_rate, given_link
from lockstep.telemetry import provenance

_RESOLVE_S = 2.0
# An address for documentation: asked for the route to it, nothing is sent.
_ANYWHERE = "192.0.2.1"

_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_INFINIBAND = Path("/sys/class/infiniband")
_SLOW_MBPS = 1000
# Of the gradients of 100 million parameters as float32.
_EXAMPLE_BYTES = 400_000_000
# How the names of interfaces begin that lead to containers, virtual machines and tunnels, not to other machines.
_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "kube", "podman", "tun", "wg", "tailscale")


@dataclass(frozen=True)
class Interface:
    """One network interface that is up and has an address."""

    name: str
    addresses: tuple[str, ...] = ()
    speed_mbps: int = 0

    @property
    def is_loopback(self) -> bool:
        """Whether it leads nowhere but here."""
        return any(map(is_loopback, self.addresses))


@dataclass(frozen=True)
class Network:
    """The interfaces, what makes the backends take one of them, and what names lead to.

    Attributes:
        plan: The run.
        interfaces: Those that are up, in the system's order.
        gloo: What Gloo will use, if that is known.
        environ: The variables that name interfaces, those that are set.
        has_infiniband: Whether a port of an InfiniBand or RoCE card is active.
        host: The name of this host, by which Gloo and torchrun make it known to the other machines.
        addresses: What that name leads to, in the resolver's order; empty if nowhere.
        own_address: This machine's address for others, if it has one.
        master_addresses: What the address leads to at which the ranks meet.
    """

    plan: Plan
    interfaces: tuple[Interface, ...]
    gloo: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    has_infiniband: bool = False
    host: str = ""
    addresses: tuple[str, ...] = ()
    own_address: str | None = None
    master_addresses: tuple[str, ...] = ()

    @property
    def nccl(self) -> list[Interface]:
        """What NCCL will use; the first one also for its rendezvous."""
        return nccl_interfaces(self.interfaces, self.environ.get(_NCCL_INTERFACE))

    @property
    def chosen(self) -> Interface | None:
        """What the backend of a job of several machines will use."""
        # The ranks of one machine meet over the loopback interface, or in shared memory.
        named = [interface for interface in self.interfaces if interface.name == self.gloo]
        found = self.nccl if self.plan.on_gpus else named
        return found[0] if found and self.plan.machines > 1 else None

    @property
    def missing(self) -> dict[str, str]:
        """The variables that name an interface which is not there, with their values."""
        names = {interface.name for interface in self.interfaces}
        # Gloo needs every interface that is named; NCCL's value is a rule, which fits some or none.
        is_there = {
            GLOO_INTERFACE: names.issuperset(self.environ.get(GLOO_INTERFACE, "").replace(" ", "").split(",")),
            _NCCL_INTERFACE: bool(self.nccl),
        }
        return {name: value for name, value in self.environ.items() if not is_there[name]}

    @property
    def best(self) -> str:
        """The fastest interface that leads outside."""
        outside = [one for one in self.interfaces if not (one.is_loopback or one.name.startswith(_VIRTUAL))]
        return max(outside, key=lambda one: one.speed_mbps, default=Interface("eth0")).name

    @property
    def paste(self) -> str:
        """The line that names the interface that should be used."""
        return f"export {GLOO_INTERFACE}={self.best} {_NCCL_INTERFACE}={self.best}"

    @property
    def summary(self) -> str:
        """What Gloo and NCCL will take, and what this host's name leads to."""
        nccl = listed([interface.name for interface in self.nccl]) or "none"
        leads = f"{self.host} leads to {listed(self.addresses) or 'nowhere'}"
        return f"Gloo takes {self.gloo or 'what this host name leads to'}, NCCL would take {nccl}; {leads}"


def nccl_interfaces(interfaces: tuple[Interface, ...], chosen: str | None) -> list[Interface]:
    """Return the interfaces that NCCL uses for sockets, in its order; the first is the one that ranks meet over.

    Args:
        interfaces: All of the machine.
        chosen: The value of ``NCCL_SOCKET_IFNAME``, if it is set: prefixes, or exact names behind ``=``; behind ``^``
            those that are not to be used.

    Source: NCCL's manual, "Environment variables": without a choice, those that begin with ``ib`` come first, and
    ``docker`` and ``lo`` are used only where there is nothing else.
    """
    if not chosen:
        outside = [one for one in interfaces if not one.name.startswith(("docker", "lo"))] or interfaces
        return sorted(outside, key=lambda one: (one.name.startswith("lo"), not one.name.startswith("ib")))
    names = tuple(filter(None, chosen.strip("^=").replace(" ", "").split(",")))
    matching = [one for one in interfaces if (one.name in names if "=" in chosen else one.name.startswith(names))]
    return [one for one in interfaces if one not in matching] if chosen.startswith("^") else matching


def read_network(plan: Plan, environ: Mapping[str, str]) -> Network:
    """Return the interfaces, which the backends will take, and what names lead to. Blocks some seconds at most."""
    interfaces, host = read_interfaces(), socket.gethostname()
    addresses = _resolve(host)
    master = _resolve(plan.master_addr) if plan.master_addr else ()
    own = next((address for address in addresses if not is_loopback(address)), None)
    if own is None:
        towards = master[0] if master and not is_loopback(master[0]) else _ANYWHERE
        with suppress(OSError, TimeoutError):  # asks name servers, which may take long
            own = in_time(_RESOLVE_S, lambda: reachable_address(towards))
    # Of several, Gloo makes its connections over the first; without a choice, over the one with the host's address.
    gloo = environ.get(GLOO_INTERFACE, "").split(",")[0].strip()
    gloo = gloo or next((one.name for one in interfaces if own in one.addresses), "")
    named = {name: environ[name] for name in (GLOO_INTERFACE, _NCCL_INTERFACE) if name in environ}
    has_infiniband = any("ACTIVE" in state.read_text() for state in _INFINIBAND.glob("*/ports/*/state"))
    return Network(plan, interfaces, gloo or None, named, has_infiniband, host, addresses, own, master)


def read_interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces that are up and have an IP address."""
    states, families = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    found = []
    for name, all_addresses in psutil.net_if_addrs().items():
        addresses = tuple(address.address for address in all_addresses if address.family in families)
        if addresses and name in states and states[name].isup:
            found.append(Interface(name, addresses, states[name].speed))
    return tuple(found)


def _resolve(name: str) -> tuple[str, ...]:
    """Return the addresses that ``name`` leads to, in the resolver's order; none if it does not answer in time."""
    try:
        answers = in_time(_RESOLVE_S, lambda: socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM))
    except (OSError, TimeoutError):
        return ()
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


@check(Network)
def interface_missing(facts: Network) -> Iterator[Problem]:
    """``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names an interface that is not there, or not up.

    Often it was copied from another machine, whose cards have other names. NCCL takes the value as the beginning of a
    name, behind ``=`` as a whole name, and behind ``^`` as what not to take. CPU ranks on one machine need none.

    Cost: What needs it cannot connect: the run fails at the start, or waits until its time is up.
    Fix: Name one that is there, or unset it.
    """
    there = listed([interface.name for interface in facts.interfaces], 8)
    is_alone = facts.plan.machines == 1
    for name, value in facts.missing.items():
        if not is_alone or (facts.plan.on_gpus and name == _NCCL_INTERFACE):
            found = f"{name}={value}, but no interface of that name is up here; there are {there}."
            yield Problem(HANG, found, f"unset {name}" if is_alone else facts.paste)


@check(Network)
def interface_local(facts: Network) -> Iterator[Problem]:
    """For several machines, the interface that will be used leads nowhere but here, to containers, or into a tunnel.

    Known by its name: a bridge (``docker0``, ``virbr0``, ``br-...``), a container's cable (``veth...``) or a tunnel
    (``tun``, ``wg``, ``tailscale``). NCCL leaves out only ``docker`` and ``lo`` by itself.

    Cost: If the other machines cannot reach its address, all wait until time is up; if they can, it is slow.
    Fix: Name the interface that the machines reach each other by.
    """
    chosen, backend = facts.chosen, "NCCL" if facts.plan.on_gpus else "Gloo"
    if chosen is None or facts.missing:  # a name that is not there is the business of `interface_missing`
        return
    if chosen.is_loopback:
        where = f"which leads to this machine only, but {facts.plan.machines} machines are to take part"
        yield Problem(HANG, f"{backend} will use {chosen.name}, {where}.", facts.paste)
    elif chosen.name.startswith(_VIRTUAL):
        where = "which by its name is a bridge to containers or a tunnel"
        yield Problem(HANG, f"{backend} will use {chosen.name}, {where}.", facts.paste)


@check(Network)
def interface_slow(facts: Network) -> Iterator[Problem]:
    """The interface runs at 1 Gbit/s or less.

    The time is that of a ring between the machines: ``2 (n-1)/n`` times the bytes, divided by 90 % of the speed. It may
    take longer: the card does not know what lies behind it. Started as the ranks of a job, the doctor measures it.

    Cost: Each step waits for the gradients of all machines.
    Fix: Use a faster network, or what `lockstep predict` advises for this one.
    """
    chosen, machines = facts.chosen, facts.plan.machines
    if chosen is None or chosen.is_loopback or (facts.plan.on_gpus and facts.has_infiniband):
        return
    # Virtual machines often do not know the speed, and report 0.
    if 0 < chosen.speed_mbps <= _SLOW_MBPS:
        link = given_link(f"{chosen.speed_mbps}Mb")
        found = f"{chosen.name} runs at {chosen.speed_mbps} Mbit/s by its own account: {_takes(link, machines)}."
        yield Problem(SLOW, found, f"lockstep predict TASK.py --machines {machines} --link {chosen.speed_mbps}Mb")


def _takes(link: Link, machines: int) -> str:
    seconds = cable_bytes(_EXAMPLE_BYTES, machines) / link.bytes_per_s
    return f"averaging the gradients of 100 million parameters takes {seconds:.2g} s of each step"


@dataclass(frozen=True)
class ProbedLink:
    """What all-reduces between the machines of this job get of the link."""

    link: Link
    machines: int


@check(ProbedLink)
def link_slow(facts: ProbedLink) -> Iterator[Problem]:
    """Started as a job on several machines without GPUs: all-reduces between them run at 1 Gbit/s or less.

    Measured with messages of up to 64 MB for about three seconds. What the cards are rated for is not asked: a switch,
    a cable or a virtual network may give less.

    Cost: Each step waits for the gradients of all machines.
    Fix: Use a faster network, or what `lockstep predict` advises for this one.
    """
    if facts.link.bytes_per_s * 8 <= _SLOW_MBPS * 1e6:
        found = f"All-reduces between the machines run at {format_rate(facts.link.bytes_per_s)}"
        paste = f"lockstep predict TASK.py --machines {facts.machines} --link {facts.link.bytes_per_s / 1e6:.3g}MB/s"
        yield Problem(SLOW, f"{found}: {_takes(facts.link, facts.machines)}.", paste)


@check(Network)
def hostname_loopback(facts: Network) -> Iterator[Problem]:
    """The name of the host leads to a loopback address, mostly because ``/etc/hosts`` says 127.0.1.1, or nowhere.

    Gloo binds to what the name leads to, and torchrun gives it to the other machines. On one machine, or with Gloo's
    interface named, that does no harm.
    ``lockstep run --nnodes`` finds the interface that leads to the first machine and goes round it.

    Cost: A job of several machines waits till time is up: each gets an address that leads it to itself, or nowhere.
    Fix: Start the ranks with `lockstep run --nnodes`, which goes round it; for other launchers name the interface for
        Gloo, and give torchrun an address (--local-addr); or give the name its address.
    """
    is_named = GLOO_INTERFACE in facts.environ and bool(facts.addresses)
    # Gloo and torchrun take the first address, whatever comes behind it.
    if facts.plan.machines == 1 or is_named or (facts.addresses and not is_loopback(facts.addresses[0])):
        return
    own = facts.own_address or "ADDRESS"
    where = f"{facts.addresses[0]}, which no other machine can reach" if facts.addresses else "no address"
    hosts = f"echo '{own} {facts.host}' | sudo tee -a /etc/hosts  # and delete the name from the line of 127.0.x.x"
    found = f"The name of this host, {facts.host}, leads to {where}."
    yield Problem(HANG, found, f"export {GLOO_INTERFACE}={facts.best}\n{hosts}")


@check(Network)
def master_address(facts: Network) -> Iterator[Problem]:
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
class Port:
    """The port at which the ranks meet.

    Attributes:
        port: Its number.
        problem: Why it cannot be bound; ``None`` if it can.
        free_port: One that is free.
        was_chosen: Whether the run asks for this port; otherwise it is torchrun's default.
    """

    port: int
    problem: str | None = None
    free_port: int = 0
    was_chosen: bool = False


def read_port(plan: Plan) -> Port | NotChecked:
    """Return whether the port is free, if it is one of this machine."""
    if plan.is_running:  # binding it would tell nothing
        return NotChecked("whether the port is free", "this job's own ranks hold it")
    if plan.master_addr is not None and plan.machines > 1 and not is_local(plan.master_addr):
        return NotChecked("whether the port is free", f"it is one of {plan.master_addr}, another machine")
    port, problem = plan.master_port or DEFAULT_MASTER_PORT, None
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        problem = f"cannot be used: {os.strerror(error.errno or 0)}"
    with socket.create_server(("", 0)) as free:  # to be named in the fix
        return Port(port, problem, free.getsockname()[1], plan.master_port is not None)


@check(Port)
def port_taken(facts: Port) -> Iterator[Problem]:
    """The port where the ranks are to meet is in use, often by a job that was thought to have ended.

    Without a port ``lockstep run`` takes a free one on one machine, so that torchrun's 29500 being taken is a note.

    Cost: The run cannot begin there; if another job's ranks hold it, they may answer, and all wait.
    Fix: Choose another, the same on every machine; on one machine `lockstep run` without a port finds one.
    """
    if facts.problem is not None:
        found = f"Port {facts.port} on this machine {facts.problem}."
        yield Problem(HANG if facts.was_chosen else NOTE, found, f"export MASTER_PORT={facts.free_port}")


@dataclass(frozen=True)
class Rendezvous:
    """That the ranks of this job did not come together: the message of `lockstep.init`."""

    error: str


@check(Rendezvous)
def ranks_do_not_meet(facts: Rendezvous) -> Iterator[Problem]:
    """Started as the ranks of a job, they did not come together within 20 s.

    The message is the one that ``lockstep.init`` would end with.

    Cost: No run can begin: ranks wait for each other.
    Fix: Read the other ranks' output, and check whether this machine reaches the first one.
    """
    found = " ".join(facts.error.split())
    yield Problem(HANG, found, "ping -c 1 $MASTER_ADDR && nc -vz $MASTER_ADDR $MASTER_PORT")


# How bad it is if ranks differ in it, and the line to paste, with the most common version.
_VERSIONS = {
    "torch": (HANG, "python -m pip install torch=={}"),
    "lockstep": (HANG, "python -m pip install lockstep-torch=={}"),
    "nccl": (HANG, "python -m pip install torch  # which brings NCCL"),
    "cuda": (WRONG, "python -m pip install torch  # which brings CUDA"),
    "processor": (SLOW, "lockstep train TASK.py --shares 2,1"),
}


@dataclass(frozen=True)
class Versions:
    """The versions of all ranks, by name, and what they compute on; see `read_versions`."""

    ranks: tuple[Mapping[str, str], ...]

    @property
    def summary(self) -> str:
        """Those of the first rank, and how many were compared."""
        compared = f"; {len(self.ranks)} ranks compared" if len(self.ranks) > 1 else ""
        return ", ".join(f"{name} {self.ranks[0][name]}" for name in _VERSIONS if name in self.ranks[0]) + compared


def read_versions() -> dict[str, str]:
    """Return the versions of this process, and its processor."""
    device = default_device()
    name = provenance.cpu_model() if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    nccl = {"nccl": nccl_version()} if device.type == "cuda" else {}
    return provenance.versions() | {"processor": name} | nccl


@check(Versions)
def versions_differ(facts: Versions) -> Iterator[Problem]:
    """Started as the ranks of a job: they differ in torch, NCCL, CUDA, lockstep, processor or GPU.

    torch, NCCL and lockstep must be the same; another CUDA rounds otherwise; a slower processor or GPU is waited for.

    Cost: Ranks may not understand each other, or make other collectives in another order: the start fails, or all wait.
    Fix: Install the same everywhere; give faster ranks larger parts of each batch.
    """
    for name, (severity, paste) in _VERSIONS.items():
        by_value: dict[str, list[str]] = {}
        for rank, versions in enumerate(facts.ranks):
            by_value.setdefault(versions.get(name, "none"), []).append(str(rank))
        if len(by_value) > 1:
            who = "; ".join(f"{value} on rank{'s' * (len(r) > 1)} {listed(r)}" for value, r in by_value.items())
            most_common = max(by_value, key=lambda value: len(by_value[value]))
            noun = name if name == "processor" else f"version of {name}"
            yield Problem(severity, f"The ranks differ in their {noun}: {who}.", paste.format(most_common))
