"""The timelines of all recorded steps as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Source: the Trace Event Format, with complete events (``X``), instants (``i``), counters (``C``) and names (``M``).
"""

from __future__ import annotations

import json
from typing import Any

from lockstep.study.report.read import Recorded
from lockstep.study.report.timeline import make_window

_WORK, _BUCKETS, _EVENTS = 0, 1, 2
"""Threads of each rank's process."""


def to_trace(run: Recorded) -> str:
    """Return the trace as JSON. Times are microseconds after the first step; a process is a rank."""
    zero = min((step.time for record in run.ranks.values() for step in record.steps), default=0.0)
    entries: list[dict[str, Any]] = []
    for rank, record in sorted(run.ranks.items()):
        entries += _names(rank, f"rank {rank} ({record.device} on {record.host})")
        for timeline in record.timelines:
            window = make_window([{rank: timeline}])
            shift_us = (timeline.time - zero) * 1e6
            for bar in window.bars:
                arguments = {"step": bar.step + 1}
                entries.append(
                    _span(rank, _WORK, bar.phase.replace("_", " "), shift_us, bar.begin_s, bar.end_s, arguments)
                )
            for bucket in window.buckets:
                arguments = {"step": bucket.step + 1, "bytes": bucket.size_bytes}
                name = f"bucket {bucket.number}"
                entries.append(_span(rank, _BUCKETS, name, shift_us, bucket.sent_s, bucket.done_s, arguments))
        for event in record.events:
            entries.append(
                {
                    "ph": "i",
                    "s": "p",
                    "pid": rank,
                    "tid": _EVENTS,
                    "name": event.event,
                    "ts": (event.time - zero) * 1e6,
                    "args": {"text": event.text, "step": event.step},
                }
            )
        for line in record.machine:
            sizes = {name: value for name, value in line.figures.items() if name.endswith("_bytes")}
            counter = {"ph": "C", "pid": rank, "name": "memory", "ts": (line.time - zero) * 1e6, "args": sizes}
            entries.append(counter)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": entries})


def _span(
    rank: int, thread: int, name: str, shift_us: float, begin_s: float, end_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    begin_us, length_us = shift_us + begin_s * 1e6, max(0.0, end_s - begin_s) * 1e6
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": begin_us, "dur": length_us, "args": arguments}


def _names(rank: int, name: str) -> list[dict[str, Any]]:
    threads = {_WORK: "step", _BUCKETS: "buckets", _EVENTS: "events"}
    return [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
        *(
            {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": text}}
            for thread, text in threads.items()
        ),
    ]
