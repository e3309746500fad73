"""The facts of interfaces, names and the port."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from lockstep.comm.network import GLOO_INTERFACE, gloo_interface, is_local
from lockstep.env import DEFAULT_MASTER_PORT
from lockstep.study.doctor.finding import NotChecked
from lockstep.study.doctor.gather.in_time import in_time
from lockstep.study.doctor.plan import Plan
from lockstep.study.doctor.topics.hostname import HostFacts
from lockstep.study.doctor.topics.network import InfinibandPort, Interface, NetworkFacts
from lockstep.study.doctor.topics.port import PortFacts

INFINIBAND = Path("/sys/class/infiniband")
_VARIABLES = (GLOO_INTERFACE, "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE")
_RESOLVE_S = 2.0
_ANYWHERE = "192.0.2.1"
"""An address for documentation: asked for the route to it, nothing is sent."""


def network_facts(plan: Plan, environ: Mapping[str, str], model_bytes: int | None) -> NetworkFacts:
    """Return the interfaces and which the backends will take."""
    interfaces = find_interfaces()
    told = environ.get(GLOO_INTERFACE)
    one_machine = plan.machines == 1
    gloo: str | None
    if told:
        gloo, reason = told.split(",")[0].strip(), f"{GLOO_INTERFACE} says so"
    else:
        # Looks names up, so it may take long.
        gloo = in_time(_RESOLVE_S, lambda: gloo_interface(plan.master_addr or _ANYWHERE, one_machine=one_machine)).value
        reason = "lockstep's choice on one machine" if one_machine else "lockstep's choice" if gloo else ""
    if gloo is None:
        gloo = _interface_of(_resolve(socket.gethostname())[:1], interfaces)
    return NetworkFacts(
        interfaces=interfaces,
        gloo=gloo,
        gloo_reason=reason,
        environ={name: environ[name] for name in _VARIABLES if name in environ},
        infiniband=find_infiniband(),
        machines=plan.machines,
        on_gpus=plan.on_gpus,
        model_bytes=model_bytes,
    )


def host_facts(plan: Plan, environ: Mapping[str, str], interfaces: tuple[Interface, ...]) -> HostFacts:
    """Return what this host's name and the meeting place lead to. Blocks some seconds if a name server is silent."""
    name = socket.gethostname()
    own = _own_address(plan.master_addr)
    return HostFacts(
        name=name,
        addresses=_resolve(name),
        own_address=own,
        interface=_interface_of((own,) if own else (), interfaces),
        machines=plan.machines,
        master_addr=plan.master_addr,
        master_addresses=_resolve(plan.master_addr) if plan.master_addr else (),
        gloo_is_told=GLOO_INTERFACE in environ,
    )


def port_facts(plan: Plan) -> tuple[PortFacts | None, list[NotChecked]]:
    """Return whether the port is free, if it is one of this machine."""
    if plan.is_running:
        return None, [NotChecked("whether the port is free", "this job's own ranks hold it")]
    if plan.master_addr is not None and plan.machines > 1 and not is_local(plan.master_addr):
        return None, [NotChecked("whether the port is free", f"it is one of {plan.master_addr}, another machine")]
    port = plan.master_port or DEFAULT_MASTER_PORT
    problem = None
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        problem = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
    with socket.create_server(("", 0)) as free:
        free_port = free.getsockname()[1]
    holder = _holder(port) if problem else ""
    return PortFacts(port, problem, holder, free_port, plan.master_port is not None), []


def find_interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces in the order of their numbers, with their IP addresses."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    found = []
    for _, name in sorted(socket.if_nameindex()):
        own = tuple(address.address for address in addresses.get(name, ()) if address.family in families)
        state = states.get(name)
        found.append(Interface(name, own, state is not None and state.isup, 0 if state is None else state.speed))
    return tuple(found)


def find_infiniband(root: Path = INFINIBAND) -> tuple[InfinibandPort, ...]:
    """Return the ports of all InfiniBand and RoCE cards."""
    found = []
    for port in sorted(root.glob("*/ports/*")):
        try:
            state = (port / "state").read_text().strip().rpartition(": ")[2]
            rate = (port / "rate").read_text().strip()
        except OSError:
            continue
        found.append(InfinibandPort(port.parent.parent.name, int(port.name), state, rate))
    return tuple(found)


def _resolve(name: str) -> tuple[str, ...]:
    def ask() -> tuple[str, ...]:
        try:
            answers = socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM)
        except OSError:
            return ()
        return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))

    return in_time(_RESOLVE_S, ask).value or ()


def _own_address(towards: str | None) -> str | None:
    """Return the address from which this machine would send to ``towards``, or out."""
    target = _resolve(towards)[:1] if towards else ()
    address = target[0] if target and not target[0].startswith("127.") else _ANYWHERE
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # Sends nothing; the system only looks up the route.
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if own.startswith("127.") else own


def _interface_of(addresses: tuple[str, ...], interfaces: tuple[Interface, ...]) -> str | None:
    return next(
        (found.name for found in interfaces for own in found.addresses if own.partition("%")[0] in addresses), None
    )


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                return f"process {connection.pid}" if connection.pid else ""
    except (psutil.Error, OSError):  # other users' may be hidden
        pass
    return ""
