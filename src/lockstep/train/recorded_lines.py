"""The lines that are recorded of a step: pure functions of what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.train.stopwatch import Mark, seconds_between

if TYPE_CHECKING:
    from lockstep.train.recording import Pending


def step_line(pending: Pending, began_s: float, steps_per_epoch: int | None) -> dict[str, Any]:
    """Return the line of kind ``step``; see ``STEP`` in lockstep.telemetry.record.names."""
    record, times, waited = pending.record, pending.record.times, pending.record.waited
    loss, *norm = map(float, pending.values)
    in_backward_s = _waited_s(pending)
    elsewhere_s = waited.data_wait_s + waited.forward_s + waited.backward_s + waited.optimizer_s
    exposed_s = None if in_backward_s is None else in_backward_s + times.communication_s + elsewhere_s
    interval_s = pending.interval_s
    total_s = round(times.total_s, 7)
    return {
        "kind": "step",
        "step": record.step,
        "num_steps": 1,
        "epoch": round(record.step / steps_per_epoch, 6) if steps_per_epoch else None,
        "time": round(began_s, 6),
        "interval_s": _short(interval_s),
        "total_s": total_s,
        "slowest_s": total_s,
        "slowest_step": record.step,
        "data_wait_s": round(times.data_wait_s - waited.data_wait_s, 7),
        "copy_s": _short(sum(seconds_between(*copy) for copy in pending.copies)) if pending.copies else None,
        "forward_s": round(times.forward_s - waited.forward_s, 7),
        "backward_s": round(max(0.0, times.backward_s - waited.backward_s - (in_backward_s or 0.0)), 7),
        "exposed_s": _short(exposed_s),
        "hidden_s": _short(_hidden_s(pending)) if pending.closely else None,
        "optimizer_s": round(times.optimizer_s - waited.optimizer_s, 7),
        "loss": loss,
        "learning_rate": pending.learning_rate,
        "grad_norm": norm[0] if norm else None,
        "samples": record.num_samples,
        "samples_per_s": round(record.num_samples / (interval_s or total_s), 3),
    }


def timeline_line(pending: Pending, began_s: float) -> dict[str, Any]:
    """Return the line of kind ``timeline``; see ``TIMELINE`` in lockstep.telemetry.record.names."""
    start = pending.record.watch.start

    def since(mark: Mark) -> float:
        return round(seconds_between(start, mark), 7)

    stamps = pending.stamps
    whole = [] if stamps is None else [each for each in stamps.buckets if each.sent is not None]
    buckets = [
        [each.position, each.size_bytes, since(each.ready), since(each.sent), since(each.done)]
        for each in whole
        if each.sent is not None and each.done is not None
    ]
    waited = None if stamps is None else stamps.waited
    return {
        "kind": "timeline",
        "step": pending.record.step,
        "time": round(began_s, 6),
        "spans": [
            [name[:-2], round(begin, 7), round(end, 7)]
            for name, begin, end in pending.record.watch.spans()
            if end > begin
        ],
        "buckets": buckets,
        "waited_from": None if waited is None else since(waited[0]),
        "waited_until": None if waited is None else since(waited[1]),
    }


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 7)


def _waited_s(pending: Pending) -> float | None:
    """Return how long backward waited for communication after its own work, if that is known."""
    stamps = pending.stamps
    if stamps is None:
        return pending.exposed_s
    if stamps.exposed_s is not None:
        return stamps.exposed_s
    return None if stamps.waited is None else seconds_between(*stamps.waited)


def _hidden_s(pending: Pending) -> float | None:
    """Return the time in which buckets were on their way while this rank still worked on backward."""
    stamps = pending.stamps
    if stamps is None or stamps.waited is None:
        return None
    start = pending.record.watch.start
    until = seconds_between(start, stamps.waited[0])
    hidden_s = reached = 0.0
    for each in stamps.buckets:
        if each.sent is not None and each.done is not None:
            sent, done = seconds_between(start, each.sent), min(until, seconds_between(start, each.done))
            hidden_s += max(0.0, done - max(sent, reached))
            reached = max(reached, done)
    return hidden_s
