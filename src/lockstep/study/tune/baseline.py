"""A recorded run with the settings to begin with: where its time goes, and what the advice promises for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.study.report.advice import Advice, advise, find_facts
from lockstep.study.report.view import view_run
from lockstep.study.tune.ask import Ask
from lockstep.study.tune.bf16 import bf16_speed
from lockstep.study.tune.candidates import Known, to_strategy
from lockstep.study.tune.values import Values, differences
from lockstep.train.fit import fit_with
from lockstep.train.settings import FitSettings
from lockstep.train.task import Task

FEWEST, MOST = 9, 300
"""Steps: the first five are left out of all figures; the timelines of buckets are of the fifth to the eighth."""

_SECONDS = 5.0
_PART = 0.15
"""Of all the time, that a recorded run may take."""

_NOT_THERE = ("devices", "epochs", "steps", "checkpoint", "export", "run_dir", "resume", "keep_best")
"""Settings of a run that the recorded one is without."""


def num_recorded(step_s: float, ask: Ask) -> int | None:
    """Return how many steps to record; None if there is no time for it."""
    wanted = min(max(FEWEST, math.ceil(min(_SECONDS, _PART * ask.seconds) / max(step_s, 1e-6))), MOST)
    return wanted if FEWEST * step_s <= max(_PART * ask.seconds, 0.3 * ask.longest_s) else None


def record_run(task: Task, base: Values, folder: Path, num_steps: int) -> None:
    """Train ``num_steps`` steps as ``lockstep train`` does, and record them. Collective: every rank."""
    values = {name: value for name, value in base.items() if name not in _NOT_THERE}
    fit_with(task, FitSettings(**values, steps=num_steps, run_dir=folder, quiet=True))


def describe(folder: Path, base: Values, ask: Ask, num_samples: int | None) -> dict[str, Any]:
    """Return what the record says, as a part of the journal's entry.

    Args:
        folder: With the record.
        base: The settings that were recorded.
        ask: What tuning is to do.
        num_samples: Of the data set; None for a stream.
    """
    view = view_run(folder)
    if view.figures is None:
        return {"skipped": "the recorded run has no steps that all ranks have in common"}
    facts = find_facts(view.run, view.device, view.figures, view.traffic)
    facts = replace(facts, bf16_speed=bf16_speed(torch.device(view.device)))
    parts, step_s = view.figures.critical, view.figures.critical.total_s
    return {
        "parts": parts.by_name(),
        "wait_share": parts.data_wait_s / step_s if step_s else None,
        "gradient_bytes": view.run.last.get("gradient_bytes"),
        "samples_per_s": view.figures.samples_per_s,
        "advice": [_entry(advice, base, ask, num_samples) for advice in advise(facts)],
    }


def _entry(advice: Advice, base: Values, ask: Ask, num_samples: int | None) -> dict[str, Any]:
    changes = _as_settings(advice.settings, base, ask)
    if num_samples is not None and changes.get("global_batch_size", 0) > num_samples:
        changes = {}
    return {
        "cause": advice.cause,
        "change": advice.change,
        "gain": advice.gain,
        "at_most": advice.at_most,
        "changes": changes,
    }


def _as_settings(settings: Mapping[str, Any], base: Values, ask: Ask) -> Values:
    """Return advised settings as changes to try here; none if it is no setting, or not to be had in these processes."""
    wanted: Values = dict(settings)
    if wanted.pop("devices", None) == 1:
        wanted["strategy"] = "single"
    elif "devices" in settings:
        return {}
    strategy = wanted.pop("strategy", None)
    if strategy is not None:
        known = Known(ask.num_devices, ask.on_cuda, ask.num_cores, ask.global_batch_size, ask.strategies)
        wanted = {**to_strategy(base, strategy, known), **wanted}
    is_unknown = "global_batch_size" in wanted and wanted["global_batch_size"] is None
    return {} if is_unknown else differences(base, {**base, **wanted})
