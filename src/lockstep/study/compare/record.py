"""The figures as JSON; its shape is described in docs/design/compare.md."""

import json
from dataclasses import asdict
from math import isfinite
from typing import Any

from lockstep.study.compare.figures import Comparison, Contender
from lockstep.study.compare.verdict import Verdict
from lockstep.telemetry.provenance import Provenance

VERSION = 1
"""Grows when a name or a meaning changes; new names leave it as it is."""


def to_json(comparison: Comparison, verdict: Verdict, provenance: Provenance) -> str:
    """Return all figures, raw and summarized."""
    record = {
        "version": VERSION,
        "setup": asdict(comparison.setup),
        "provenance": asdict(provenance),
        "contenders": [_contender(comparison, contender) for contender in comparison.contenders],
        "left_out": [asdict(left) for left in comparison.left_out],
        "verdict": asdict(verdict),
    }
    return json.dumps(_finite(record), indent=2, allow_nan=False) + "\n"


def _contender(comparison: Comparison, contender: Contender) -> dict[str, Any]:
    memory = contender.memory
    return {
        "strategy": contender.strategy,
        "num_threads": contender.num_threads,
        "samples_per_s": asdict(contender.rate),
        "speed_up": asdict(contender.speed_over(comparison.single)),
        "efficiency": contender.speed_over(comparison.single).median / comparison.setup.num_devices,
        "step": asdict(contender.step),
        "peak_bytes": None if memory is None else list(memory.peak_bytes),
        "imbalance": None if memory is None else memory.imbalance,
        "last_loss": contender.losses[-1],
        "loss_difference": contender.losses[-1] - comparison.single.losses[-1],
        "turns": [asdict(turn) for turn in contender.turns],
        "losses": list(contender.losses),
    }


def _finite(value: Any) -> Any:
    """Replace what JSON has no number for, such as the loss of a run that diverged, by null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
