"""Which network interfaces NCCL takes, by the rules of its manual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

_LAST_RESORTS = ("docker", "lo")


class HasName(Protocol):
    """What the rules look at."""

    @property
    def name(self) -> str:
        """Such as ``eth0``."""

    @property
    def is_usable(self) -> bool:
        """Whether it is up and has an address."""


_Interface = TypeVar("_Interface", bound=HasName)


def nccl_interfaces(interfaces: Sequence[_Interface], chosen: str | None) -> list[_Interface]:
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
        return [interface for interface in usable if is_chosen(interface.name, chosen)]
    by_preference = (
        [interface for interface in usable if interface.name.startswith("ib")],
        [interface for interface in usable if not interface.name.startswith(_LAST_RESORTS)],
        [interface for interface in usable if interface.name.startswith("docker")],
        [interface for interface in usable if interface.name.startswith("lo")],
    )
    return next((group for group in by_preference if group), [])


def is_chosen(name: str, chosen: str) -> bool:
    """Say whether ``NCCL_SOCKET_IFNAME=chosen`` lets NCCL use the interface ``name``."""
    excludes = chosen.startswith("^")
    rule = chosen.removeprefix("^")
    is_exact = rule.startswith("=")
    names = [part.strip() for part in rule.removeprefix("=").split(",") if part.strip()]
    matches = name in names if is_exact else name.startswith(tuple(names))
    return matches != excludes
