"""All figures as tables: for those who do not see the drawings, and for what drawings leave out."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from lockstep.study.report.machine_plots import LOADS, memory_of
from lockstep.study.report.plots import PART_COLOURS
from lockstep.study.report.plotting import MIB
from lockstep.study.report.timeline_plot import COLOURS
from lockstep.study.report.traffic_plots import bus_bytes_per_s
from lockstep.study.report.view import View, setting_values

_MOST_EVENTS = 200
_MOST_BARS = 400


@dataclass(frozen=True)
class Table:
    """A table under a heading; the rows named in ``differs`` are those in which two runs are not alike."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_text: bool = False
    differs: frozenset[str] = field(default_factory=frozenset)


def figures(views: Sequence[View]) -> list[Table]:
    """Return the tables of what was measured."""
    found = []
    for view in views:
        found += [*_parts(view), *_spread(view), *_machine(view), *_buckets(view), *_timeline(view), *_events(view)]
    return found


def about(views: Sequence[View]) -> list[Table]:
    """Return the tables of what was run, and where."""
    columns = ["", *(view.label or "this run" for view in views)]
    found = []
    for heading, facts in (
        ("Settings", [_plain(setting_values(view.run.last)) for view in views]),
        ("Machine and versions", [_machine_facts(view) for view in views]),
        ("Ranks", [_ranks(view) for view in views]),
    ):
        names = list(dict.fromkeys(name for each in facts for name in each))
        rows = [[name, *(each.get(name, "") for each in facts)] for name in names]
        differs = frozenset(row[0] for row in rows if len(set(row[1:])) > 1)
        if rows:
            found.append(Table(heading, columns, rows, is_text=True, differs=differs))
    return found


def _parts(view: View) -> list[Table]:
    if view.figures is None:
        return []
    columns = ["rank", *(text for text, _ in PART_COLOURS.values()), "all", "comes last"]
    rows = [
        [str(rank), *(f"{s * 1e3:.2f}" for s in parts.by_name().values()), f"{parts.total_s * 1e3:.2f}", f"{last:.0%}"]
        for (rank, parts), last in zip(view.figures.by_rank.items(), view.figures.last_share.values(), strict=True)
    ]
    critical = view.figures.critical
    whole = [*(f"{s * 1e3:.2f}" for s in critical.by_name().values()), f"{critical.total_s * 1e3:.2f}", ""]
    return [Table(view.named("Milliseconds per step, by rank"), columns, [*rows, ["critical path", *whole]])]


def _spread(view: View) -> list[Table]:
    """Return minimum, median and maximum over the ranks of each figure, and whose the extremes are."""
    if len(view.run.ranks) < 2:
        return []
    rows = []
    for what, values, digits in _figures_by_rank(view):
        ordered = sorted((value, rank) for rank, value in values.items())
        if not ordered:
            continue
        (low, low_rank), (high, high_rank), middle = ordered[0], ordered[-1], median(values.values())
        cells = (
            f"{low:,.{digits}f} (rank {low_rank})",
            f"{middle:,.{digits}f}",
            f"{high:,.{digits}f} (rank {high_rank})",
        )
        rows.append([what, *cells])
    return [Table(view.named("Each figure over the ranks"), ["", "least", "median", "most"], rows)] if rows else []


def _figures_by_rank(view: View) -> list[tuple[str, dict[int, float], int]]:
    """Return what is known of each rank: in words with its unit, by rank, and how many digits matter."""
    found: list[tuple[str, dict[int, float], int]] = []
    if view.figures is not None:
        by_rank, last_share = view.figures.by_rank, view.figures.last_share
        for name, (text, _) in PART_COLOURS.items():
            found.append((f"{text}, ms", {rank: getattr(parts, name) * 1e3 for rank, parts in by_rank.items()}, 2))
        found.append(("comes last, % of steps", {rank: share * 100 for rank, share in last_share.items()}, 0))
    memory = {rank: memory_of(view, rank) for rank in view.run.ranks}
    for place, text in enumerate(("memory at its peak, MiB", "memory at the end, MiB")):
        found.append(
            (text, {rank: size / MIB for rank, each in memory.items() if (size := each[place]) is not None}, 0)
        )
    for name, (text, unit) in LOADS.items():
        found.append((f"{text}, {unit}", _means(view, name), 0))
    return found


def _means(view: View, name: str) -> dict[int, float]:
    """Return the mean of a figure of ``machine`` lines by rank, without what was before the first step."""
    found = {}
    for rank, record in sorted(view.run.ranks.items()):
        lines = record.machine[1:] or record.machine
        if values := [line.figures[name] for line in lines if name in line.figures]:
            found[rank] = fmean(values)
    return found


def _machine(view: View) -> list[Table]:
    known = {name: means for name in LOADS if (means := _means(view, name))}
    columns = ["rank", "peak MiB", "MiB at the end", *(", ".join(LOADS[name]) for name in known)]
    rows = []
    for rank in sorted(view.run.ranks):
        sizes = ["-" if size is None else f"{size / MIB:,.0f}" for size in memory_of(view, rank)]
        loads = [f"{means[rank]:.0f}" if rank in means else "-" for means in known.values()]
        rows.append([str(rank), *sizes, *loads])
    return [Table(view.named("Memory and load, by rank"), columns, rows)] if rows else []


def _buckets(view: View) -> list[Table]:
    traffic = view.traffic
    if traffic is None:
        return []
    rows = []
    for number, size in enumerate(traffic.sizes_bytes):
        times = sorted(trip.wire_s for trip in traffic.trips if trip.number == number)
        seconds = [f"{time_s * 1e3:.3g}" for time_s in (times[0], times[len(times) // 2], times[-1])]
        bus = bus_bytes_per_s(traffic, number, len(view.run.ranks)) / 1e9
        rows.append([str(number), f"{size / MIB:.3g}", *seconds, f"{bus:.3g}"])
    heading = view.named("Buckets of gradients on their way")
    return [Table(heading, ["bucket", "MiB", "best ms", "median ms", "slowest ms", "bus GB/s"], rows)]


def _timeline(view: View) -> list[Table]:
    if view.window is None:
        return []
    critical = set(view.window.critical)
    bars = sorted(view.window.bars, key=lambda bar: (bar.begin_s, bar.rank))[:_MOST_BARS]
    rows = [
        [
            str(bar.rank),
            str(bar.step + 1),
            COLOURS[bar.phase][0],
            f"{bar.begin_s * 1e3:.3f}",
            f"{bar.end_s * 1e3:.3f}",
            "yes" if bar in critical else "",
        ]
        for bar in bars
    ]
    columns = ["rank", "step", "what", "from ms", "to ms", "on the critical path"]
    return [Table(view.named("The timeline"), columns, rows)]


def _events(view: View) -> list[Table]:
    events = view.run.events
    if not events:
        return []
    left_out = f" (the last {_MOST_EVENTS} of {len(events)})" if len(events) > _MOST_EVENTS else ""
    rows = [
        [
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(max(0.0, min(event.time, 2e10)))),
            str(event.step),
            event.event,
            "" if event.seconds is None else f"{event.seconds:.3g} s",
            event.text,
        ]
        for event in events[-_MOST_EVENTS:]
    ]
    columns = ["time (UTC)", "after step", "event", "stood still", "what happened"]
    return [Table(view.named(f"Events{left_out}"), columns, rows, is_text=True)]


def _plain(settings: dict[str, Any]) -> dict[str, str]:
    """Return settings as texts; those that were left at nothing are left out."""
    return {str(name): _text(value) for name, value in settings.items() if value is not None}


def _machine_facts(view: View) -> dict[str, str]:
    found: dict[str, str] = {}
    provenance = view.run.last.get("provenance")
    if isinstance(provenance, dict):
        found["recorded"] = _text(provenance.get("when"))
        for group in ("versions", "machine", "commits"):
            facts = provenance.get(group)
            if isinstance(facts, dict):
                suffix = " commit" if group == "commits" else ""
                found.update({f"{name}{suffix}": _text(value) for name, value in facts.items()})
    for name in ("backend", "global_batch_size", "num_parameters", "gradient_bytes", "workers", "num_restarts"):
        if view.run.last.get(name) is not None:
            found[name.replace("_", " ")] = _text(view.run.last[name])
    return found


def _ranks(view: View) -> dict[str, str]:
    return {f"rank {rank}": f"{record.device} on {record.host}" for rank, record in sorted(view.run.ranks.items())}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else json.dumps(value)
