"""What it means when a loader process is gone, in words that help; torch only says that it is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from lockstep.errors import LoaderDied

_TORCH_SAYS = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\)")
_SIGNAL = re.compile(r"is killed by signal: (?P<signal>[^.]+)\.")
_STATUS = re.compile(r"with exit code (?P<status>\d+)")

_MEANINGS = {
    "Killed": (
        "was killed, most likely because the machine ran out of memory",
        "Each loader process has its own copy of what the data set keeps in memory: use fewer of them (workers, "
        "--workers), or keep less. The kernel's log (dmesg) tells whether it was that.",
    ),
    "Bus error": (
        "died of a bus error, most likely because shared memory (/dev/shm) is full",
        "Make it larger (docker run --shm-size=8g, or --ipc=host), or use fewer loader processes (workers, --workers). "
        "If it is not full, a memory-mapped file was cut short while it was read.",
    ),
    "Segmentation fault": (
        "crashed in a library that is not written in Python",
        "Find the line with workers=0 (--workers 0) and `python -X faulthandler`.",
    ),
}


@contextlib.contextmanager
def naming_dead_loaders(rank: int) -> Iterator[None]:
    """Within, have the death of a loader process raised as what probably happened, and what to do.

    Torch raises it from a signal handler, so it may come up anywhere, not only where a batch is waited for.

    Raises:
        LoaderDied: A loader process of ``rank`` is gone.
    """
    try:
        yield
    except RuntimeError as error:
        explained = explain(error, rank)
        if explained is None:
            raise
        raise explained from None


def explain(error: RuntimeError, rank: int) -> LoaderDied | None:
    """Return what torch's ``error`` about a loader process means, or None if it is about something else."""
    said = _TORCH_SAYS.match(str(error))
    if said is None:
        return None
    text = f"{error} {error.__cause__ or ''}"
    who = f"A loader process of rank {rank} (pid {said['pids']})"
    if (signal := _SIGNAL.search(text)) is not None:
        what, advice = _MEANINGS.get(
            signal["signal"],
            (f"was ended by a signal: {signal['signal']}", "Find out what sent it; nothing in the run did."),
        )
    elif (status := _STATUS.search(text)) is not None:
        what = f"ended itself with exit status {status['status']}"
        advice = "Something that the data set calls ends the process: find it with workers=0 (--workers 0)."
    else:
        what, advice = "is gone", "Find out why with workers=0 (--workers 0), which loads in the process that trains."
    return LoaderDied(f"{who} {what}.\n{advice}")
