"""A run in words, before it starts: what is trained, on what, and by which rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.data.bad_sample import BadSample
from lockstep.train.not_finite import NotFinite
from lockstep.train.plan import Plan
from lockstep.train.settings import FitSettings
from lockstep.train.task import Task

NUM_NAMED = 5
"""So many samples that could not be read are named one by one."""


def describe_plan(
    task: Task, settings: FitSettings, plan: Plan, device: torch.device, *, num_devices: int
) -> list[str]:
    """Return the lines that rank zero prints first; all ``num_devices`` are of the kind of ``device``."""
    division, order = plan.division, plan.order
    kind = "GPU" if device.type == "cuda" else device.type.upper()
    on = f"{num_devices} {kind}s" if num_devices > 1 else f"1 {kind}"
    parts = f" = {_parts(plan, num_devices)}" if num_devices > 1 else ""
    if settings.reproducible is not None:
        parts = f" = {settings.reproducible} virtual shards x {order.batch_size // settings.reproducible} samples"
    micro = f", in {division.accumulate} micro-batches" if division.accumulate > 1 else ""
    size = "a stream of samples" if order.num_samples is None else f"{order.num_samples:,} samples"
    return [
        f"{task.name}: strategy {settings.strategy} on {on}, {settings.precision}, {size}, {_length(plan)}",
        f"global batch {order.batch_size}{parts}{micro}",
        *([] if settings.reproducible is None else [_same_bits(settings.reproducible, settings)]),
        f"learning rate x {plan.learning_rate.scale:.4g}: {_scaling(settings, plan)}; {_schedule(plan)}",
    ]


def describe_skipped(skipped: Sequence[BadSample]) -> str:
    """Return which samples a run went without."""
    number = f"{len(skipped)} sample{'s' * (len(skipped) > 1)}"
    times = Counter(bad.sample for bad in skipped)
    different = list({bad.sample: bad for bad in skipped}.values())
    names = "".join(
        f"\n  {bad.name}" + f" ({times[bad.sample]} times)" * (times[bad.sample] > 1) for bad in different[:NUM_NAMED]
    )
    more = f"\n  and {len(different) - NUM_NAMED} others; the log file has all" * (len(different) > NUM_NAMED)
    return f"{number} skipped, as they could not be read:{names}{more}"


def describe_not_finite(steps: Sequence[NotFinite]) -> str:
    """Return in which steps the gradient was not finite, so that they were skipped or gone back from."""
    number = f"{len(steps)} step{'s' * (len(steps) > 1)}"
    names = "".join(f"\n  {bad.headline}" for bad in steps[:NUM_NAMED])
    more = f"\n  and {len(steps) - NUM_NAMED} others; the log file has all" * (len(steps) > NUM_NAMED)
    done = "skipped" if steps[0].back_to is None else "undone, back to the last good state"
    return f"{number} {done}, as the gradient was not finite:{names}{more}"


def describe_stop(signal_name: str, step: int, num_steps: int, checkpoint: Path | None) -> str:
    """Return that a run was stopped by a signal, and how to go on with it."""
    by = "Ctrl-C" if signal_name == "SIGINT" else signal_name
    where = f"after step {step} of {num_steps}, saved in {checkpoint}"
    return f"Stopped by {by} {where}.\nThe same command goes on from there."


def _parts(plan: Plan, num_devices: int) -> str:
    if plan.division.proportions is None:
        return f"{num_devices} devices x {plan.batch_size // num_devices} samples"
    sizes = [len(plan.division.positions(plan.batch_size, share)) for share in range(num_devices)]
    return f"{num_devices} devices with {' + '.join(map(str, sizes))} samples"


def _same_bits(num_virtual_shards: int, settings: FitSettings) -> str:
    threads = settings.threads or 1
    each = f"{threads} CPU thread{'s' * (threads > 1)} each"
    return f"reproducible: the same bits on 1 to {num_virtual_shards} devices of this kind with {each}"


def _length(plan: Plan) -> str:
    steps = f"{plan.num_steps} step{'s' * (plan.num_steps > 1)}"
    if plan.order.steps_per_epoch is None:
        return steps
    epochs = plan.num_steps / plan.order.steps_per_epoch
    return f"{steps} = {epochs:.4g} epoch{'s' * (epochs != 1)}"


def _scaling(settings: FitSettings, plan: Plan) -> str:
    if settings.lr_scaling == "none":
        return "not scaled with the global batch"
    rule = {"linear": "linear scaling", "sqrt": "square-root scaling"}[settings.lr_scaling]
    return f"{rule} from base batch {plan.base_batch_size} to {plan.batch_size}"


def _schedule(plan: Plan) -> str:
    rate = plan.learning_rate
    decay = "the task's own schedule" if callable(rate.decay) else rate.decay
    steps = f"{rate.warmup} step{'s' * (rate.warmup > 1)}"
    return f"warm-up over {steps}, then {decay}" if rate.warmup else f"no warm-up, {decay}"
