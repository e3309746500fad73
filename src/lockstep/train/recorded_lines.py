"""The lines that are recorded of a step: pure functions of what was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.parallel.ddp.bucket_stamps import StepStamps
from lockstep.telemetry.record.measured import Measured
from lockstep.train.stopwatch import Mark, seconds_between

if TYPE_CHECKING:
    from lockstep.train.recording import Pending


def step_line(pending: Pending, measured: Measured, began_s: float, steps_per_epoch: int | None) -> dict[str, Any]:
    """Return the line of kind ``step``; see ``STEP`` in lockstep.telemetry.record.names."""
    record = pending.record
    values = pending.numbers()
    interval_s = pending.interval_s
    total_s = round(measured.total_s, 7)
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
        "data_wait_s": round(measured.data_wait_s, 7),
        "copy_s": _short(measured.copy_s),
        "forward_s": round(measured.forward_s, 7),
        "backward_s": round(measured.backward_s, 7),
        "exposed_s": _short(measured.exposed_s),
        "hidden_s": _short(measured.hidden_s),
        "optimizer_s": round(measured.optimizer_s, 7),
        "loss": values.loss,
        "learning_rate": pending.learning_rate,
        "grad_norm": values.grad_norm,
        "samples": record.num_samples,
        "samples_per_s": round(record.num_samples / (interval_s or total_s), 3),
        "counts": values.counted,
        "tokens_per_s": None if values.counted is None else round(values.counted / (interval_s or total_s), 3),
    }


def timeline_line(pending: Pending, began_s: float) -> dict[str, Any]:
    """Return the line of kind ``timeline``; see ``TIMELINE`` in lockstep.telemetry.record.names."""
    start = pending.record.watch.start

    def since(mark: Mark) -> float:
        return round(seconds_between(start, mark), 7)

    stamps = pending.stamps
    buckets = [] if stamps is None else bucket_rows(stamps, since)
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


def bucket_rows(stamps: StepStamps, since: Callable[[Mark], float]) -> list[list[float]]:
    """Return the buckets of a timeline; ``since`` tells when a moment was, after the beginning of the step."""
    return [
        [each.position, each.size_bytes, since(each.ready), since(each.sent), since(each.done)]
        for each in stamps.buckets
        if each.sent is not None and each.done is not None
    ]


def hidden_s(stamps: StepStamps | None, start: Mark) -> float | None:
    """Return the time in which buckets were on their way while this rank still worked on backward."""
    if stamps is None or stamps.waited is None:
        return None
    until = seconds_between(start, stamps.waited[0])
    hidden = reached = 0.0
    for each in stamps.buckets:
        if each.sent is not None and each.done is not None:
            sent, done = seconds_between(start, each.sent), min(until, seconds_between(start, each.done))
            hidden += max(0.0, done - max(sent, reached))
            reached = max(reached, done)
    return hidden


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 7)
