"""The port at which the ranks meet: is it free?"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind


@dataclass(frozen=True)
class PortFacts:
    """One port of this machine.

    Attributes:
        port: Its number.
        problem: Why it cannot be listened at; ``None`` if it can.
        holder: Who listens there, if the system tells.
        free_port: One that is free.
        was_chosen: Whether the run asks for this port; otherwise it is torchrun's default.
    """

    port: int
    problem: str | None = None
    holder: str = ""
    free_port: int = 0
    was_chosen: bool = False


def look(facts: PortFacts) -> list[Finding]:
    """Return whether somebody else has the port."""
    if facts.problem is None:
        return []
    holder = f" by {facts.holder}" if facts.holder else ""
    return [
        Finding(
            Kind.PORT_TAKEN,
            Severity.HANG if facts.was_chosen else Severity.NOTE,
            f"Port {facts.port} on this machine {facts.problem}{holder}.",
            "The run cannot begin there; if another job's ranks hold it, they may answer, and all wait."
            if facts.was_chosen
            else "Of no account to `lockstep run`, which finds a free one; torchrun takes this one by default.",
            "Choose another, the same on every machine; on one machine `lockstep run` without a port finds one.",
            f"export MASTER_PORT={facts.free_port}",
        )
    ]


def seen(facts: PortFacts) -> str:
    """Say in a line whether it is free."""
    default = "" if facts.was_chosen else " (torchrun's default; lockstep run finds a free one)"
    return f"{facts.port} {'is free' if facts.problem is None else facts.problem}{default}"
