"""The lines that are recorded of a step that was seen from outside: pure functions. What was not seen is null."""

from __future__ import annotations

from typing import Any

from lockstep.observe.engine import Engine
from lockstep.observe.step import Step, Value
from lockstep.train.recorded_lines import bucket_rows
from lockstep.train.stopwatch import Mark, seconds_between


def step_line(step: Step, engine: Engine, began_s: float, *, num_ranks: int) -> dict[str, Any]:
    """Return the line of kind ``step``; see ``STEP`` in lockstep.telemetry.record.names.

    Args:
        step: Known.
        engine: That exchanges gradients.
        began_s: When it began, in Unix time.
        num_ranks: That train together, each with as many samples.
    """
    total_s = round(seconds_between(step.begin, step.end), 7)
    waited_s = engine.waited_s(step)
    elsewhere_s = sum(waited for _, _, _, waited in step.spans)
    backward_s = max(0.0, step.seconds(["backward"]) - (waited_s or 0.0))
    samples = step.samples * num_ranks
    losses = [_number(value) for value in step.losses]
    return {
        "kind": "step",
        "step": step.number,
        "num_steps": 1,
        "epoch": None,
        "time": round(began_s, 6),
        "interval_s": _short(step.interval_s),
        "total_s": total_s,
        "slowest_s": total_s,
        "slowest_step": step.number,
        "data_wait_s": _short(step.seconds(["data_wait"]) if step.sees_batches else None),
        "copy_s": None,
        "forward_s": _short(step.seconds(["forward"]) if step.has_forward else None),
        "backward_s": _short(backward_s if step.has_backward else None),
        "exposed_s": _short(None if waited_s is None else waited_s + elsewhere_s),
        "hidden_s": _short(engine.hidden_s(step)),
        "optimizer_s": _short(step.seconds(["optimizer"])),
        "loss": sum(losses) / len(losses) if losses else None,
        "learning_rate": step.learning_rate,
        "grad_norm": None if step.grad_norm is None else _number(step.grad_norm),
        "samples": samples,
        "samples_per_s": round(samples / (step.interval_s or total_s or 1e-9), 3),
        "counts": None,
        "tokens_per_s": None,
    }


def timeline_line(step: Step, engine: Engine, began_s: float) -> dict[str, Any]:
    """Return the line of kind ``timeline``; see ``TIMELINE`` in lockstep.telemetry.record.names."""

    def since(mark: Mark) -> float:
        return round(seconds_between(step.begin, mark), 7)

    spans = [(phase, since(begin), since(end)) for phase, begin, end, _ in step.spans]
    waited = engine.last_wait(step)
    return {
        "kind": "timeline",
        "step": step.number,
        "time": round(began_s, 6),
        "spans": [[phase, begin, end] for phase, begin, end in spans if end > begin],
        "buckets": [row for stamps in step.stamps for row in bucket_rows(stamps, since)],
        "waited_from": None if waited is None else since(waited[0]),
        "waited_until": None if waited is None else since(waited[1]),
    }


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 7)


def _number(value: Value) -> float:
    return float(value.number)
