"""What rank zero prints of a run: its plan first, then a live view or lines, and what it found out."""

from __future__ import annotations

import os
import sys
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from typing_extensions import override

from lockstep.data.loader import BadSample
from lockstep.telemetry import live_view
from lockstep.telemetry.metrics import Snapshot, SnapshotSink
from lockstep.train.nonfinite import NonFiniteStep
from lockstep.train.plan import Plan
from lockstep.train.recording import RunRecord
from lockstep.train.settings import FitSettings, ViewName
from lockstep.train.task import Task
from lockstep.train.trainer import Trainer

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
        smallest, rest = divmod(order.batch_size, settings.reproducible)
        samples = f"{smallest} or {smallest + 1}" if rest else f"{smallest}"
        parts = f" = {settings.reproducible} virtual shards x {samples} samples"
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
    more = f"\n  and {len(different) - NUM_NAMED} others; the run folder has all" * (len(different) > NUM_NAMED)
    return f"{number} skipped, as they could not be read:{names}{more}"


def describe_not_finite(steps: Sequence[NonFiniteStep]) -> str:
    """Return in which steps the gradient was not finite, so that they were skipped."""
    number = f"{len(steps)} step{'s' * (len(steps) > 1)}"
    names = "".join(f"\n  {bad.headline}" for bad in steps[:NUM_NAMED])
    more = f"\n  and {len(steps) - NUM_NAMED} others; the run folder has all" * (len(steps) > NUM_NAMED)
    return f"{number} skipped, as the gradient was not finite:{names}{more}"


def describe_stop(signal_name: str, step: int, num_steps: int, checkpoint: Path | None) -> str:
    """Return that a run was stopped by a signal, and how to go on with it."""
    by = "Ctrl-C" if signal_name == "SIGINT" else signal_name
    where = f"after step {step} of {num_steps}, saved in {checkpoint}"
    return f"Stopped by {by} {where}.\nThe same command goes on from there."


def _parts(plan: Plan, num_devices: int) -> str:
    sizes = [len(plan.division.positions(plan.batch_size, share)) for share in range(plan.division.num_shares)]
    if len(set(sizes)) == 1 or len(sizes) != num_devices:  # torch's DataParallel divides the batch itself
        return f"{num_devices} devices x {plan.batch_size // num_devices} samples"
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


# What rank zero shows of a run: a live view on a terminal or in a notebook, lines in a pipe, nothing when quiet.

_LINE_S = 10.0


class Display(SnapshotSink):
    """Shows a run: snapshots now and then, from a thread beside training, and lines that stay."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Print a line that stays."""


class _Printing(Display):
    """Prints lines that stay to standard output."""

    @override
    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")  # in one piece: other threads print as well
        sys.stdout.flush()


class Live(_Printing):
    """A view that is drawn anew in place."""

    def __init__(self, view: live_view.LiveView) -> None:
        self._view = view

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._view.update(snapshot)

    @override
    def close(self) -> None:
        self._view.close()


class Lines(_Printing):
    """A line now and then, in a pipe or a file."""

    every_s = _LINE_S
    """Seconds between two lines."""

    def __init__(self) -> None:
        self._shown_at = time.perf_counter()
        self._rates = live_view.LastRates()

    @override
    def update(self, snapshot: Snapshot) -> None:
        snapshot = self._rates.filled(snapshot)
        now_s = time.perf_counter()
        if now_s - self._shown_at >= self.every_s and snapshot.loss is not None and not snapshot.is_last:
            self._shown_at = now_s
            self.say(live_view.line(snapshot))

    @override
    def close(self) -> None:
        """Do nothing."""


class Silence(Display):
    """Nothing at all."""

    @override
    def update(self, snapshot: Snapshot) -> None:
        """Do nothing."""

    @override
    def say(self, text: str) -> None:
        """Do nothing."""

    @override
    def close(self) -> None:
        """Do nothing."""


class Said(_Printing):
    """Only the lines that stay, and no progress."""

    @override
    def update(self, snapshot: Snapshot) -> None:
        """Do nothing."""

    @override
    def close(self) -> None:
        """Do nothing."""


def make_display(view: ViewName = "auto", *, silent: bool) -> Display:
    """Return what suits where the output goes, unless ``view`` says what it is to be; nothing if ``silent``."""
    if silent:
        return Silence()
    if view == "none":
        return Said()
    if view == "auto" and "CI" in os.environ:
        return Lines()
    if view != "lines" and (live := live_view.open_live_view()) is not None:
        return Live(live)
    return Lines()


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics as words and numbers."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


class RunLogger:
    """Shows and records what a trainer has found out, each thing once.

    Args:
        trainer: That finds out.
        display: Of this rank.
        record: Of this rank.
    """

    def __init__(self, trainer: Trainer, display: Display, record: RunRecord) -> None:
        self._trainer, self._display, self._record = trainer, display, record
        self._num_caveats = self._num_skipped = self._num_not_finite = 0

    def report(self) -> None:
        """Report what is new: why the bits may differ after all, samples and steps that were left out, remarks."""
        trainer, skipped = self._trainer, self._trainer.bad_samples.skipped
        for caveat in trainer.caveats[self._num_caveats :]:
            self._display.say(f"the same bits cannot be promised: {caveat}")
        self._num_caveats = len(trainer.caveats)
        for number, bad in enumerate(skipped[self._num_skipped :], self._num_skipped):
            if number < NUM_NAMED:
                self._display.say(f"step {bad.step + 1}  skipped {bad.name}")
            self._record.event("skipped", f"step {bad.step + 1}: sample left out: {bad.name}")
        self._num_skipped = len(skipped)
        for found in trainer.nonfinite.found[self._num_not_finite :]:
            self._display.say(f"step {found.step + 1}  skipped  {found.headline}")
            self._record.event("skipped", f"step {found.step + 1}: skipped: {found.headline}")
        self._num_not_finite = len(trainer.nonfinite.found)
        while trainer.remarks:
            remark = trainer.remarks.pop(0)
            self._display.say(remark)
            self._record.event("remark", remark)

    def report_slow_rank(self, text: str) -> None:
        """Report a rank that keeps the others waiting."""
        self._display.say(text)
        self._record.event("straggler", text)
