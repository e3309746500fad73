"""What comes of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.bad_sample import BadSample
from lockstep.train.not_finite import NotFinite


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation after ``step`` steps found: the loss and the task's metrics, by name."""

    step: int
    metrics: dict[str, float]

    @property
    def loss(self) -> float:
        """Its loss, infinite if that is NaN: then any other is better."""
        loss = self.metrics["loss"]
        return math.inf if math.isnan(loss) else loss


@dataclass(frozen=True)
class FitResult:
    """What came of a run, the same on every rank.

    Args:
        first_step: Steps done before this call, in a run that was resumed.
        num_steps: Steps done in all.
        losses: Mean over the global batch, for each step of this call.
        evaluations: In the order they were made, in this call.
        best: The evaluation with the lowest loss of the whole run.
        num_samples: Samples trained on in this call, over all devices.
        skipped_samples: Samples that training went without in this call, as they could not be read, over all devices.
        first_skipped: The first few of them: which, in which step, and why.
        not_finite: The steps of this call that were skipped or gone back from, as their gradient was NaN or infinite.
        samples_per_s: Over all devices; without the first step, evaluations and checkpoints.
        num_counted: What the losses of this call were means over if not samples, such as tokens; None if samples.
        tokens_per_s: Likewise, a second, whatever it is that the task counts.
        seconds: Of the whole call after the model was made, evaluations and all.
        checkpoint: The newest one.
        stopped: What stopped the run before its end: a signal, such as ``SIGTERM``, or ``another machine`` that
            joins; or None. The same call goes on from `checkpoint`.
        exit_code: What a script that ends now should pass to ``sys.exit``: 75 for a stopped run, which tells a
            scheduler to start it again (after Ctrl-C 130; 0 under ``lockstep run``, which then sees to that); else 0.
    """

    first_step: int
    num_steps: int
    losses: list[float]
    evaluations: list[Evaluation]
    best: Evaluation | None
    num_samples: int
    samples_per_s: float
    seconds: float
    checkpoint: Path | None
    skipped_samples: int = 0
    first_skipped: tuple[BadSample, ...] = ()
    stopped: str | None = None
    exit_code: int = 0
    not_finite: tuple[NotFinite, ...] = ()
    num_counted: float | None = None
    tokens_per_s: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """What the last evaluation found, by name; empty if there was none."""
        return self.evaluations[-1].metrics if self.evaluations else {}
