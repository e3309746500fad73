"""How the job ended on the other machines: the launchers tell each other before they leave, so all name the cause."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.comm.bulletin import Bulletin
from lockstep.launcher.failure import RankEnd, headline, is_echo
from lockstep.telemetry.resources import OF_EACH

_ENDED, _READ = "ended", "read"
_LIMIT_S = 3.0
_PAUSE_S = 0.1


@dataclass(frozen=True)
class Ending:
    """How the job ended on one machine.

    Attributes:
        rank: The rank that failed first there.
        is_echo: Whether that only noticed that another was gone.
        says: Why that rank ended, and where it was.
        hang: The watchdog's report, if that ended the job.
        memory: What its ranks held, as `Resources.of_each` says it.
    """

    rank: int
    is_echo: bool
    says: str
    hang: str = ""
    memory: str = ""


def ending_of(first: RankEnd) -> Ending:
    """Return what to tell the other machines of the rank that failed first on this one."""
    return Ending(first.rank, is_echo(first), "\n".join(filter(None, (headline(first), first.place))))


def exchange(bulletin: Bulletin | None, mine: Ending, *, num_nodes: int) -> list[Ending]:
    """Tell the other machines how the job ended here, and return what they tell.

    Blocks until all have told, and if this machine hosts the store in which they do, until all have read it; at most
    three seconds.
    """
    if bulletin is None:
        return []
    is_host = bulletin.is_host()
    bulletin.post(_ENDED, asdict(mine))
    deadline = time.monotonic() + _LIMIT_S
    notes = _await(bulletin, _ENDED, num_nodes - 1, deadline)
    if is_host:
        _await(bulletin, _READ, num_nodes - 1, deadline)
    else:
        bulletin.post(_READ, True)
    return [Ending(**note) for note in notes]


def _await(bulletin: Bulletin, topic: str, count: int, deadline: float) -> list[Any]:
    while True:
        notes = bulletin.others(topic)
        if len(notes) >= count or time.monotonic() >= deadline:
            return notes
        time.sleep(_PAUSE_S)


def cause_elsewhere(mine: Ending, others: list[Ending]) -> Ending | None:
    """Return how the job ended on the machine that is the cause; ``None`` if that is this one, or nobody says."""
    if not mine.is_echo or mine.hang:
        return None
    causes = [other for other in others if other.hang or not other.is_echo]
    return min(causes, key=lambda other: (not other.hang, other.rank), default=None)


def retold(cause: Ending, lines: str) -> str:
    """Return the report of this machine, with a line for each of its ranks; the cause lies elsewhere."""
    return f"{cause.says}\nThe report of that machine has more.\n\n{lines}"


def with_memory(ends: list[RankEnd], others: list[Ending]) -> list[RankEnd]:
    """Return how ranks ended, for one that had no memory left with what the ranks of other machines held as well."""
    there = [line for other in others for line in other.memory.splitlines() if line.startswith("rank ")]
    if not there:
        return ends
    more = "\n".join(["Of the other machines:", *there])
    return [replace(end, facts=f"{end.facts}\n{more}") if end.facts.startswith(OF_EACH) else end for end in ends]
