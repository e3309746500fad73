"""What a step took by what it went into, from what it left behind: pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.telemetry.record.measured import Measured
from lockstep.train.recorded_lines import hidden_s
from lockstep.train.stopwatch import seconds_between

if TYPE_CHECKING:
    from lockstep.train.recording import Pending


def measure(pending: Pending) -> Measured:
    """Return the seconds of a step that is known; waiting is taken out of the phases in which it happened."""
    watch = pending.record.watch
    laps, waited = watch.laps, watch.waited_s
    parts = {"data_wait_s": 0.0, "forward_s": 0.0, "backward_s": 0.0, "communication_s": 0.0, "optimizer_s": 0.0}
    elsewhere_s = 0.0
    before = laps[0][1]
    on_host = isinstance(before, float)
    for index in range(1, len(laps)):
        phase, mark = laps[index]
        took_s = mark - before if on_host else seconds_between(before, mark)  # type: ignore[operator]
        before = mark
        if phase != "communication_s" and (waited_s := waited[index] - waited[index - 1]):
            took_s -= waited_s
            elsewhere_s += waited_s
        parts[phase] += took_s
    data_wait_s, forward_s, backward_s, communication_s, optimizer_s = parts.values()
    in_backward_s = waited_in_backward_s(pending)
    return Measured(
        data_wait_s + forward_s + backward_s + communication_s + optimizer_s + elsewhere_s,
        data_wait_s,
        forward_s,
        max(0.0, backward_s - in_backward_s) if in_backward_s else backward_s,
        optimizer_s,
        None if in_backward_s is None else in_backward_s + communication_s + elsewhere_s,
        sum(seconds_between(*copy) for copy in pending.copies) if pending.copies else None,
        hidden_s(pending.stamps, laps[0][1]) if pending.closely else None,
    )


def waited_in_backward_s(pending: Pending) -> float | None:
    """Return how long backward waited for communication after its own work, if that is known."""
    stamps = pending.stamps
    if stamps is None:
        return pending.exposed_s
    if stamps.exposed_s is not None:
        return stamps.exposed_s
    return None if stamps.waited is None else seconds_between(*stamps.waited)
