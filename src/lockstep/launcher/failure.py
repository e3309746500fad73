"""Say what happened when ranks failed: who was first, with its traceback, and one line for each other."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.launcher.meanings import meaning_of

_LIKELY = {
    signal.SIGKILL: "most likely the machine ran out of memory.\n"
    "Look for 'Out of memory' in `dmesg`; use fewer ranks, a smaller batch or fewer DataLoader workers.",
    signal.SIGSEGV: "native code touched memory that is not its own.\n"
    "An extension module or a driver may be broken; the Python stack says who called it.",
    signal.SIGBUS: "most likely shared memory is full.\n"
    "Look at `df /dev/shm`; use fewer DataLoader workers, or more shared memory (docker run --shm-size).",
    signal.SIGABRT: "native code gave up.\nIts own message is further up.",
    signal.SIGTERM: "something outside the job asked it to end.\nA scheduler, a time limit or `kill` does that.",
}


_SHORT_OF_MEMORY = (
    "the kernel ended it, as memory ran out.\nUse fewer ranks, a smaller batch or fewer DataLoader workers."
)
_NOT_SHORT = (
    "something outside the job did that, such as a scheduler or `kill -9`.\n"
    "The kernel has ended nothing for lack of memory meanwhile."
)

_ECHOES = (
    "CollectiveError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "BrokenPipeError",
    "ConnectionResetError",
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited",
    "gloo/transport",
    "NCCL error",
)
"""What errors say that tell no more than that another rank is gone or silent."""

_LINE_LIMIT = 200


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        exit_code: As of ``subprocess``: negative for a signal.
        ended_at_ns: When it was gone, in nanoseconds since the epoch; ``None`` if unknown.
        failed_at_ns: When its exception was raised; ``None`` if it left none.
        message: The last line of its traceback, such as ``ValueError: boom``.
        error_type: The name of the exception's class.
        where: File and line of the exception, in the user's code.
        trace: Its whole traceback.
        crash: The Python stack that a fatal signal left.
        place: A sentence that says in which step, at which line and on which machine.
        facts: A sentence with figures, such as those of memory.
        was_short: Whether the kernel has ended processes for lack of memory meanwhile; ``None`` if it does not say.
    """

    rank: int
    pid: int
    exit_code: int
    ended_at_ns: int | None = None
    failed_at_ns: int | None = None
    message: str = ""
    error_type: str = ""
    where: str = ""
    trace: str = ""
    crash: str = ""
    place: str = ""
    facts: str = ""
    was_short: bool | None = None


def first_of(ends: list[RankEnd]) -> RankEnd:
    """Return the rank that failed before the others, and made them fail."""
    first_gone = min((end.ended_at_ns for end in ends if end.ended_at_ns is not None), default=None)
    return min(ends, key=lambda end: (_blame(end, first_gone), end.failed_at_ns or end.ended_at_ns or 0, end.rank))


def _blame(end: RankEnd, first_gone_ns: int | None) -> int:
    """Say how likely a rank is the cause: 0 for its own fault, 1 for noticing another's, 2 for being stopped.

    Time alone does not tell: the kernel closes a killed process's connections, which its peers notice at once, well
    before it has taken down its memory and reports the end.
    """
    if end.exit_code == -signal.SIGTERM and not end.message:
        # The launcher stops the others only after one has ended, so the first to go was stopped from outside.
        return 0 if end.ended_at_ns is not None and end.ended_at_ns == first_gone_ns else 2
    return 1 if is_echo(end) else 0


def is_echo(end: RankEnd) -> bool:
    """Tell whether a rank's error says no more than that another rank is gone or silent."""
    return any(mark in f"{end.error_type}: {end.message}" for mark in _ECHOES)


def tidy_crash(stack: str, *, own_folder: str) -> str:
    """Return what faulthandler wrote without our own frames and the list of extension modules."""
    lines = stack.splitlines()
    return "\n".join(line for line in lines if own_folder not in line and not line.startswith("Extension modules:"))


def describe(ends: list[RankEnd], local_ranks: range) -> str:
    """Return the whole report, the cause on its first line.

    Args:
        ends: The ranks of this machine that did not end well.
        local_ranks: All ranks of this machine.
    """
    first = first_of(ends)
    by_rank = {end.rank: end for end in ends}
    others = lines(ends, [rank for rank in local_ranks if rank != first.rank])
    elsewhere = _elsewhere([rank for rank in local_ranks if rank not in by_rank]) if is_echo(first) else ""
    top = [headline(first), first.place, first.facts, _WENT_ON if first.exit_code == 0 else ""]
    trace, meaning = (first.trace or first.crash).rstrip(), "" if elsewhere else meaning_of(first.message)
    parts = ["\n".join(filter(None, top)), trace, meaning, others, elsewhere]
    return "\n\n".join(part for part in parts if part)


_WENT_ON = "The program caught that and went on to its end, while other ranks waited for this one."


def lines(ends: list[RankEnd], ranks: Iterable[int]) -> str:
    """Return a line for each of ``ranks``."""
    by_rank = {end.rank: end for end in ends}
    return "\n".join(f"rank {rank}: {_line(by_rank.get(rank))}" for rank in ranks)


def _elsewhere(finished: list[int]) -> str:
    if not finished:  # No rank of this machine is the cause.
        return "It says only that another rank is gone: look at the other machines."
    ranks = f"rank{'s' * (len(finished) > 1)} {', '.join(map(str, finished))}"
    return f"It says only that another rank is gone: {ranks} finished while others waited, or look at other machines."


def headline(end: RankEnd) -> str:
    """Say in one line, or two with what to do, why a rank ended."""
    if end.error_type == "SystemExit":
        return f"Rank {end.rank} left with exit code {end.exit_code} ({end.message} at {end.where})."
    if end.message:
        # The rest of a long message stands in the traceback below.
        return f"Rank {end.rank} failed: {end.message.splitlines()[0]}"
    if end.exit_code - 128 in _LIKELY:  # a shell, or a wrapper like it, tells a signal this way
        return f"Rank {end.rank} left with exit code {end.exit_code}: {_a_child(end.exit_code - 128)}"
    if end.exit_code >= 0:
        return (
            f"Rank {end.rank} left with exit code {end.exit_code}, without an exception.\n"
            "What it wrote before is further up."
        )
    likely = _likely(-end.exit_code)
    if end.exit_code == -signal.SIGKILL and end.was_short is not None:
        likely = _SHORT_OF_MEMORY if end.was_short else _NOT_SHORT
    return f"Rank {end.rank} {_killed_by(-end.exit_code)}: {likely}"


def brief(end: RankEnd) -> str:
    """Say in a few words how a rank ended, to be put behind its name."""
    return f"failed: {_line(end)}" if end.message else _line(end)


def _line(end: RankEnd | None) -> str:
    if end is None:
        return "finished"
    if end.message:
        text = end.message.splitlines()[0]
        text = text if len(text) <= _LINE_LIMIT else f"{text[:_LINE_LIMIT]} ..."
        return f"{text} ({end.where})" if end.where else text
    if end.exit_code == -signal.SIGTERM:
        return "stopped by the launcher"
    return f"left with exit code {end.exit_code}" if end.exit_code >= 0 else _killed_by(-end.exit_code)


def _a_child(number: int) -> str:
    return f"what it ran {_killed_by(number)}, {_likely(number)}"


def _killed_by(number: int) -> str:
    try:
        return f"was killed by {signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"was killed by signal {number}"


def _likely(number: int) -> str:
    return _LIKELY.get(number, "what it wrote before is further up.")  # type: ignore[call-overload, no-any-return]
