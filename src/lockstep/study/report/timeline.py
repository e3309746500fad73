"""A few steps with all ranks on one clock, and the critical path through them: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.study.report.lines import Timeline
from lockstep.study.report.read import Recorded

MOST_STEPS = 3


@dataclass(frozen=True)
class Bar:
    """What a rank did from when to when; seconds after the beginning of the window."""

    rank: int
    step: int
    phase: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class BucketBar:
    """A bucket of a rank: when it was ready, left, and was reduced; seconds after the beginning of the window."""

    rank: int
    step: int
    number: int
    size_bytes: int
    ready_s: float
    sent_s: float
    done_s: float


@dataclass(frozen=True)
class Window:
    """Some steps that follow each other.

    Args:
        steps: Their numbers.
        bars: What the ranks did. ``waiting`` is waiting for gradients, within backward.
        buckets: Where they were recorded.
        critical: The bars that the steps could not have been shorter without.
        end_s: When the last rank was done.
    """

    steps: tuple[int, ...]
    bars: tuple[Bar, ...]
    buckets: tuple[BucketBar, ...]
    critical: tuple[Bar, ...]
    end_s: float


def find_window(run: Recorded) -> Window | None:
    """Return a window of typical length; None if no step has a timeline of every rank."""
    by_rank = {rank: {each.step: each for each in record.timelines} for rank, record in run.ranks.items()}
    if not by_rank or not all(by_rank.values()):
        return None
    common = sorted(set.intersection(*(set(steps) for steps in by_rank.values())))
    groups = _groups(common)
    if not groups:
        return None
    lengths = {
        group[0]: sum(max(by_rank[rank][step].end_s for rank in by_rank) for step in group) / len(group)
        for group in groups
    }
    later = groups[1:] or groups  # the first steps are still finding their way
    typical = sorted(later, key=lambda group: (lengths[group[0]], group[0]))[len(later) // 2]
    return make_window([{rank: by_rank[rank][step] for rank in by_rank} for step in typical[:MOST_STEPS]])


def make_window(steps: Sequence[dict[int, Timeline]]) -> Window:
    """Return the timelines of some steps, by rank, as one window."""
    zero = min(timeline.time for timelines in steps for timeline in timelines.values())
    bars: list[Bar] = []
    buckets: list[BucketBar] = []
    critical: list[Bar] = []
    for timelines in steps:
        own = {rank: _bars(rank, timeline, timeline.time - zero) for rank, timeline in timelines.items()}
        for rank, timeline in timelines.items():
            begin_s = timeline.time - zero
            bars += own[rank]
            buckets += [
                BucketBar(
                    rank,
                    timeline.step,
                    each.number,
                    each.size_bytes,
                    begin_s + each.ready_s,
                    begin_s + each.sent_s,
                    begin_s + each.done_s,
                )
                for each in timeline.buckets
            ]
        critical += own[_last_rank(timelines)]
    end_s = max((bar.end_s for bar in bars), default=0.0)
    numbers = tuple(next(iter(timelines.values())).step for timelines in steps)
    return Window(numbers, tuple(bars), tuple(buckets), tuple(critical), end_s)


def _groups(steps: Sequence[int]) -> list[list[int]]:
    """Return runs of numbers that follow each other."""
    groups: list[list[int]] = []
    for step in steps:
        if groups and groups[-1][-1] == step - 1:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _last_rank(timelines: dict[int, Timeline]) -> int:
    """Return the rank that all wait for: it waits least; without such figures, the one that is done last."""
    waits = {rank: each.waited[1] - each.waited[0] for rank, each in timelines.items() if each.waited is not None}
    if len(waits) == len(timelines):
        return min(waits, key=lambda rank: waits[rank])
    return max(timelines, key=lambda rank: timelines[rank].time + timelines[rank].end_s)


def _bars(rank: int, timeline: Timeline, shift_s: float) -> list[Bar]:
    found = []
    for phase, begin_s, end_s in timeline.spans:
        if phase == "communication":
            found.append(Bar(rank, timeline.step, "waiting", shift_s + begin_s, shift_s + end_s))
            continue
        if phase == "backward" and timeline.waited is not None and begin_s <= timeline.waited[0] <= end_s:
            until_s = min(timeline.waited[1], end_s)
            found.append(Bar(rank, timeline.step, phase, shift_s + begin_s, shift_s + timeline.waited[0]))
            found.append(Bar(rank, timeline.step, "waiting", shift_s + timeline.waited[0], shift_s + until_s))
            continue
        found.append(Bar(rank, timeline.step, phase, shift_s + begin_s, shift_s + end_s))
    return found
