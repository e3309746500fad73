"""What this host's name leads to: what Gloo and torchrun tell the other machines."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import listed


@dataclass(frozen=True)
class HostFacts:
    """Names and addresses.

    Attributes:
        name: This host's.
        addresses: What it leads to, in the resolver's order; empty if nowhere.
        own_address: This machine's address for others, if it has one.
        interface: The interface of that address.
        machines: Of the job.
        master_addr: Where the ranks meet, if that was said.
        master_addresses: What that leads to.
        gloo_is_told: Whether ``GLOO_SOCKET_IFNAME`` is set, so that Gloo does not ask for the name.
    """

    name: str
    addresses: tuple[str, ...]
    own_address: str | None = None
    interface: str | None = None
    machines: int = 1
    master_addr: str | None = None
    master_addresses: tuple[str, ...] = ()
    gloo_is_told: bool = False


def look(facts: HostFacts) -> list[Finding]:
    """Return what keeps machines from finding each other by name."""
    return [*_own_name(facts), *_master(facts)]


def seen(facts: HostFacts) -> str:
    """Say in a line what the name leads to."""
    outside = f"; others reach this machine at {facts.own_address}" if facts.own_address else ""
    return f"{facts.name} leads to {listed(list(facts.addresses)) or 'nowhere'}{outside}"


def _own_name(facts: HostFacts) -> list[Finding]:
    alone = facts.machines == 1
    address = facts.own_address or "ADDRESS"
    entry = f"echo '{address} {facts.name}' | sudo tee -a /etc/hosts  # and delete the name from the line of 127.0.x.x"
    interface = facts.interface or "eth0"
    fix = (
        "Start the ranks with `lockstep run --nnodes`, which goes round it; for other launchers name the interface for "
        "Gloo, and give torchrun an address (--local-addr); or give the name its address."
    )
    if not facts.addresses:
        return [
            Finding(
                Kind.HOSTNAME_UNRESOLVED,
                Severity.NOTE if alone else Severity.HANG,
                f"The name of this host, {facts.name}, leads to no address.",
                "Of no account on one machine with lockstep, which takes the loopback interface; torchrun may fail."
                if alone
                else "The other machines are told a name that they cannot find either: the start fails or waits.",
                fix,
                f"export GLOO_SOCKET_IFNAME={interface}\n{entry}",
            )
        ]
    if not is_loopback(facts.addresses[0]):
        return []
    if facts.gloo_is_told and not alone:
        severity, cost = Severity.NOTE, "Gloo is told its interface; torchrun still tells other machines this name."
    elif alone:
        severity, cost = Severity.NOTE, "Of no account on one machine; a job of several would wait on its own address."
    else:
        severity = Severity.HANG
        cost = (
            "Gloo and torchrun tell the other machines an address that leads each to itself: all wait till time is up."
        )
    return [
        Finding(
            Kind.HOSTNAME_LOOPBACK,
            severity,
            f"The name of this host, {facts.name}, leads to {facts.addresses[0]}, which no other machine can reach"
            f"{f'; its address for them is {facts.own_address}' if facts.own_address else ''}.",
            cost,
            fix,
            f"export GLOO_SOCKET_IFNAME={interface}\n{entry}",
        )
    ]


def _master(facts: HostFacts) -> list[Finding]:
    if facts.master_addr is None or facts.machines == 1:
        return []
    if facts.master_addresses and not is_loopback(facts.master_addresses[0]):
        return []
    where = facts.master_addresses[0] if facts.master_addresses else "no address"
    return [
        Finding(
            Kind.MASTER_ADDRESS,
            Severity.HANG,
            f"The ranks are to meet at {facts.master_addr}, which leads to {where} on this machine.",
            "Machines other than the first wait there for somebody who never comes.",
            "Give the first machine's address in the network that all of them share.",
            f"export MASTER_ADDR={facts.own_address or 'ADDRESS'}  # the first machine's",
        )
    ]


def is_loopback(address: str) -> bool:
    """Say whether an address leads to its own machine."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
