"""Torch's own record of the collectives that a process has called, if it keeps one (its flight recorder)."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any, NamedTuple

from lockstep.telemetry.imported import imported


class Call(NamedTuple):
    """A collective that this process has called."""

    name: str
    numel: int
    is_over: bool


def calls_so_far() -> list[Call]:
    """Return the collectives of this process that torch remembers, oldest first; none if it keeps no record."""
    c10d = imported("torch._C._distributed_c10d") or sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with contextlib.suppress(Exception):  # an interface of torch's own, which changes
            entries = [entry for entry in json.loads(getattr(c10d, name)())["entries"] if not entry.get("is_p2p")]
            entries.sort(key=lambda entry: (entry["time_created_ns"], entry["record_id"]))
            if entries:
                return [_call(entry) for entry in entries]
    return []


def awaited(calls: list[Call]) -> int | None:
    """Return the place of the collective that holds up the others: the first of the last that are not over.

    Where torch does not say which are over, it is the last.
    """
    if not calls:
        return None
    place = len(calls) - 1
    if any(call.is_over for call in calls):
        while place > 0 and not calls[place].is_over and not calls[place - 1].is_over:
            place -= 1
    return place


def _call(entry: dict[str, Any]) -> Call:
    numel = sum(_numel(size) for size in entry["input_sizes"])
    is_over = bool(entry.get("retired")) or entry.get("state") == "completed"  # Gloo says the one, NCCL both
    return Call(entry["profiling_name"].rpartition(":")[2], numel, is_over)


def _numel(size: list[int]) -> int:
    total = 1
    for length in size:
        total *= length
    return total
