"""What rank zero prints of a run: its plan first, then a live view or lines, and what it found out."""

import os
import sys
import time
from collections.abc import Mapping
from typing import final

import torch
from typing_extensions import override

from lockstep.telemetry import live_view
from lockstep.telemetry.metrics import Snapshot, SnapshotSink
from lockstep.train.plan import Plan
from lockstep.train.settings import FitSettings, ViewName
from lockstep.train.task import Task

# Seconds between two lines of progress.
_LINE_S = 10.0


def plural(number: int, noun: str) -> str:
    """Return the number with its noun, which takes an s."""
    return f"{number} {noun}{'s' * (number != 1)}"


def describe_plan(
    task: Task, settings: FitSettings, plan: Plan, device: torch.device, *, num_devices: int
) -> list[str]:
    """Return the lines that rank zero prints first; all ``num_devices`` are of the kind of ``device``."""
    division, order, rate = plan.division, plan.order, plan.learning_rate
    kind = "GPU" if device.type == "cuda" else device.type.upper()
    size = "a stream of samples" if order.num_samples is None else f"{order.num_samples:,} samples"
    length = plural(plan.num_steps, "step")
    if order.steps_per_epoch is not None:
        epochs = plan.num_steps / order.steps_per_epoch
        length += f" = {epochs:.4g} epoch{'s' * (epochs != 1)}"
    on = plural(num_devices, kind)
    lines = [f"{task.name}: strategy {settings.strategy} on {on}, {settings.precision}, {size}, {length}"]

    micro = f", in {division.accumulate} micro-batches" if division.accumulate > 1 else ""
    if settings.reproducible is not None:
        smallest, rest = divmod(order.batch_size, settings.reproducible)
        samples = f"{smallest} or {smallest + 1}" if rest else f"{smallest}"
        lines.append(f"global batch {order.batch_size} = {settings.reproducible} virtual shards x {samples} samples")
        threads = plural(settings.threads or 1, "CPU thread")
        lines.append(
            f"reproducible: the same bits on 1 to {settings.reproducible} devices of this kind with {threads} each"
        )
    elif num_devices > 1:
        sizes = [len(division.positions(order.batch_size, share)) for share in range(division.num_shares)]
        parts = f"devices with {' + '.join(map(str, sizes))} samples"
        if len(set(sizes)) == 1 or len(sizes) != num_devices:  # torch's DataParallel divides the batch itself
            parts = f"devices x {order.batch_size // num_devices} samples"
        lines.append(f"global batch {order.batch_size} = {num_devices} {parts}{micro}")
    else:
        lines.append(f"global batch {order.batch_size}{micro}")

    scaling = "not scaled with the global batch"
    if settings.lr_scaling != "none":
        rule = {"linear": "linear scaling", "sqrt": "square-root scaling"}[settings.lr_scaling]
        scaling = f"{rule} from base batch {plan.base_batch_size} to {order.batch_size}"
    decay = "the task's own schedule" if callable(rate.decay) else rate.decay
    warmup = f"warm-up over {plural(rate.warmup, 'step')}, then" if rate.warmup else "no warm-up,"
    return [*lines, f"learning rate x {rate.scale:.4g}: {scaling}; {warmup} {decay}"]


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics as words and numbers."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


@final
class Display(SnapshotSink):
    """Shows a run: a live view on a terminal or in a notebook, else lines now and then; and lines that stay.

    Args:
        view: What to show of the progress; "auto" takes what suits where the output goes.
        silent: Whether to print nothing at all.
    """

    def __init__(self, view: ViewName = "auto", *, silent: bool) -> None:
        self._silent = silent
        # A terminal of a CI service keeps every frame of a live view.
        may_draw = view == "live" or (view == "auto" and "CI" not in os.environ)
        self._live = live_view.open_live_view() if may_draw and not silent else None
        self._has_lines = view != "none" and not silent
        self._shown_at = time.perf_counter()
        self._rates = live_view.LastRates()

    def log(self, text: str) -> None:
        """Print a line that stays."""
        if not self._silent:
            sys.stdout.write(f"{text}\n")  # in one piece: other threads print as well
            sys.stdout.flush()

    @override
    def update(self, snapshot: Snapshot) -> None:
        if self._live is not None:
            self._live.update(snapshot)
        elif self._has_lines:
            snapshot = self._rates.filled(snapshot)
            now_s = time.perf_counter()
            if now_s - self._shown_at >= _LINE_S and snapshot.loss is not None and not snapshot.is_last:
                self._shown_at = now_s
                self.log(live_view.line(snapshot))

    @override
    def close(self) -> None:
        if self._live is not None:
            self._live.close()
