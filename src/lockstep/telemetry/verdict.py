"""Decide whether a job hangs: a pure function of what was seen of each rank. The rule: docs/design/watchdog.md."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from lockstep.telemetry.life import WAKES_UP
from lockstep.telemetry.seen import RankSeen, is_debugged, operation, place

GRACE = 5.0
"""A rank that may be only slow can keep the others waiting this many times longer than one that does nothing."""


_ONE_TO_ONE = {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv"}
"""Calls of different names that belong together."""


class Verdict(IntEnum):
    """What is to be done about the ranks."""

    FINE = 0
    SUSPECT = 1
    """To be told of, as it may resolve itself."""
    HANGS = 2
    """It will not resolve itself."""


def judge(ranks: Sequence[RankSeen], patience_s: float, *, is_strict: bool, sees_all: bool = True) -> Verdict:
    """Decide whether some ranks wait for others that will not come.

    Args:
        ranks: What is seen of each.
        patience_s: How long a rank may wait for another that does nothing.
        is_strict: Whether one that computes, or a transfer, may take ``GRACE`` times as long at most; else without end.
        sees_all: Whether ``ranks`` are all of the job.
    """
    if not ranks or any(is_debugged(seen) for seen in ranks):
        return Verdict.FINE
    waiting = [seen for seen in ranks if operation(seen) is not None]
    others = [seen for seen in ranks if operation(seen) is None]
    if not waiting:
        return _nobody_waits(ranks, patience_s, is_strict=is_strict)
    waits_s = min(seen.still_s for seen in waiting)
    if waits_s < patience_s:
        return Verdict.FINE
    is_long = waits_s >= GRACE * patience_s
    at_last = (Verdict.HANGS if is_strict else Verdict.SUSPECT) if is_long else Verdict.FINE
    if not others:
        calls = {_what(seen) for seen in waiting}
        # A transfer may simply be slow where all are in the same call, but then something of it is seen.
        is_moving = any(seen.is_busy or seen.life not in ("", WAKES_UP) for seen in waiting)
        if len(calls) > 1 and sees_all and not (calls <= _ONE_TO_ONE and is_moving):
            return Verdict.HANGS
        return Verdict.HANGS if is_long and sees_all and not is_moving else at_last
    return max(at_last, min(_of_other(seen, patience_s) for seen in others))


def _of_other(seen: RankSeen, patience_s: float) -> Verdict:
    """Judge a rank that the others wait for."""
    if seen.has_left or seen.is_stopped:
        return Verdict.HANGS
    if seen.is_busy or seen.idle_s < patience_s:
        return Verdict.FINE
    if seen.life and seen.idle_s < GRACE * patience_s:
        return Verdict.SUSPECT
    return Verdict.HANGS


def _nobody_waits(ranks: Sequence[RankSeen], patience_s: float, *, is_strict: bool) -> Verdict:
    """Judge ranks that are all in code of their own: several that trained and now do nothing at all are stuck."""
    living = [seen for seen in ranks if not seen.has_left]
    if len(living) < 2 or any(seen.is_busy or seen.life or seen.idle_s < patience_s for seen in living):
        return Verdict.FINE
    if not is_strict and not any(seen.has_trained for seen in living):
        return Verdict.FINE  # It may be no training at all, but a service that waits for requests.
    return Verdict.HANGS if all(seen.idle_s >= GRACE * patience_s for seen in living) else Verdict.SUSPECT


def _what(seen: RankSeen) -> str:
    """Return what tells calls apart: the operation, not the bucket or the line.

    A rank may be a bucket ahead, and ``if rank == 0: broadcast(...)`` with ``else: broadcast(...)`` is one call.
    """
    name = operation(seen) or ""
    if name.startswith("all_reduce of bucket "):
        return "all_reduce of bucket"
    # What was found by the user's line only may be anything.
    return place(seen) if name in ("wait", "synchronize") else name.partition(":")[0]
