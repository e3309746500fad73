"""What `fit` returns, and the losses and the throughput of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoints.model_state import load_state_dict, plain_names
from lockstep.comm.fully_shard import whole
from lockstep.data.loader import BadSample
from lockstep.parallel.compile import has_compiled
from lockstep.train.evaluate import Evaluation
from lockstep.train.skipping import NonFiniteStep
from lockstep.train.trainer import StepRecord

# Number of losses that stay on the device before they are read.
_MAX_UNREAD = 4096


@dataclass(frozen=True)
class FitResult:
    """The result of a run, the same on every rank.

    Args:
        first_step: Number of steps done before this call, in a resumed run.
        num_steps: Total number of steps done.
        losses: Mean over the global batch, for each step of this call; with ``local-sgd`` and ``diloco`` over the share
            of this rank, or of this machine.
        evaluations: The evaluations of this call, in order.
        best: The best evaluation of the whole run, by the metric of ``keep_best``; by default by the loss.
        num_samples: Samples trained on in this call, over all devices.
        skipped_samples: Number of samples that were skipped in this call, because they could not be read, over all
            devices.
        first_skipped: The first of them: sample, step and reason.
        not_finite: The steps of this call that were skipped, because their gradient was NaN or infinite.
        samples_per_s: Over all devices; without the first step, evaluations and checkpoints.
        num_counted: Number of items, such as tokens, that the losses of this call were means over; None: of samples.
        tokens_per_s: Number of these items per second.
        model: The model with the weights at the end, without wrappers: what `Task.model` returned. With fsdp, it has
            the shards of this rank. None in a copy that was sent to another process.
        seconds: Duration of the call after the model was created, including evaluations.
        checkpoint: The newest checkpoint; a string if it is in an object store.
        stopped: Why the run was stopped before its end: a signal, such as ``SIGTERM``, or ``another machine`` that
            joins; or None. The same call continues from `checkpoint`.
        exit_code: The argument for ``sys.exit`` of a script that ends now: 75 for a stopped run, so that a scheduler
            starts it again (130 after Ctrl-C; 0 under ``lockstep run``, which restarts it itself); else 0.
    """

    first_step: int
    num_steps: int
    losses: list[float] = field(repr=False)
    evaluations: list[Evaluation]
    best: Evaluation | None
    num_samples: int
    samples_per_s: float
    seconds: float
    checkpoint: Path | str | None
    skipped_samples: int = 0
    first_skipped: tuple[BadSample, ...] = ()
    stopped: str | None = None
    exit_code: int = 0
    not_finite: tuple[NonFiniteStep, ...] = ()
    num_counted: float | None = None
    tokens_per_s: float | None = None
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    def load(self, model: nn.Module) -> nn.Module:
        """Load the weights at the end into another ``model``; return it. Collective with fsdp: every rank."""
        assert self.model is not None, "the result was sent to another process"
        state = {name: whole(value) for name, value in plain_names(self.model.state_dict()).items()}
        load_state_dict(model, None, {"model": state})
        return model

    def __getstate__(self) -> dict[str, Any]:
        # Engines have hooks in the model, which cannot be sent.
        return {**vars(self), "model": None}

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last evaluation, by name; empty if there was none."""
        return self.evaluations[-1].metrics if self.evaluations else {}


class Throughput:
    """Collects the loss of every step without waiting for it, and measures the throughput.

    Attributes:
        losses: The losses read so far.
        num_samples: Samples of all steps.
        num_counted: Number of items, such as tokens, that the losses read so far were means over.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.num_samples, self.num_counted = 0, 0.0
        # Not the records: a step's timer holds its events.
        self._unread: list[tuple[Tensor, Tensor | None]] = []
        self._took: list[tuple[int, float]] = []  # samples and seconds of each stretch of training

    def add(self, record: StepRecord) -> None:
        """Add a step that ends now. Blocks every 4096 steps until the device has finished it."""
        self.num_samples += record.num_samples
        self._unread.append((record.loss, record.count))
        if len(self._unread) >= _MAX_UNREAD:
            self.read()
        self._took.append((record.num_samples, time.perf_counter() - record.timer.marks.began_at))

    def read(self) -> list[float]:
        """Return all losses so far. Blocks until the device has finished the last step."""
        unread, self._unread = self._unread, []
        if unread:
            self.losses += torch.stack([loss for loss, _ in unread]).tolist()
        if counts := [count for _, count in unread if count is not None]:
            self.num_counted += float(torch.stack(counts).sum())
        return self.losses

    def stop(self) -> None:
        """Wait for the device, and count the wait as training, before something else begins."""
        started_at = time.perf_counter()
        self.read()
        self._took.append((0, time.perf_counter() - started_at))

    def compiling(self) -> str:
        """Return what to say of a first step that compiled, if it took much longer than the others."""
        (_, first_s), *others = self._took
        num_others = sum(num_samples > 0 for num_samples, _ in others)
        is_slow = first_s * num_others > 2 * sum(seconds for _, seconds in others)
        return f", of which the first took {first_s:.1f} s (compiling)" if is_slow and has_compiled() else ""

    def state(self) -> dict[str, Any]:
        """Return what a rank that takes the place of a lost one continues. Blocks as `read` does."""
        counts = {"num_samples": self.num_samples, "losses": self.read(), "num_counted": self.num_counted}
        return {**counts, "samples_per_s": self.samples_per_s}

    def load(self, state: dict[str, Any]) -> None:
        """Continue the `state` of another rank."""
        self.losses, self.num_samples, self.num_counted = state["losses"], state["num_samples"], state["num_counted"]
        rate = state["samples_per_s"]
        self._unread, self._took = [], [(0, 0.0), (self.num_samples, self.num_samples / rate if rate else 0.0)]

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batches per second of training."""
        took = self._took[1:]  # the first step also allocates and compiles
        if not any(num_samples for num_samples, _ in took):
            took = self._took[:1]
        elapsed_s = sum(seconds for _, seconds in took)
        return sum(num_samples for num_samples, _ in took) / elapsed_s if elapsed_s else 0.0

    @property
    def counted_per_s(self) -> float:
        """Number of items that the losses were means over, per second."""
        return self.samples_per_s * self.num_counted / self.num_samples
