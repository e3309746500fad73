"""The evaluations of a run: when they are made, what they found, and which was the best."""

from __future__ import annotations

from typing import final

from lockstep import progress
from lockstep.data.same_stream import require_same_length
from lockstep.train.evaluate import Evaluator
from lockstep.train.log import Log
from lockstep.train.loop import Loop
from lockstep.train.progress import Display, format_metrics
from lockstep.train.record import Record
from lockstep.train.result import Evaluation
from lockstep.train.task import Task, build_dataset


@final
class Evaluations:
    """Evaluates the model of a loop, if the task has what to evaluate it on.

    Collective: every rank makes one, and evaluates.

    Args:
        task: Says on what.
        loop: That trains.
        keep_best: Whether one that finds the lowest loss so far is worth a checkpoint.

    Attributes:
        made: In this call, in order.
        best: Of the whole run.
        has_new_best: Whether the last one is to be kept.
        is_owed: Whether a run that was stopped has not come to one.
    """

    def __init__(self, task: Task, loop: Loop, *, keep_best: bool) -> None:
        self._loop, self._keep_best = loop, keep_best
        self.made: list[Evaluation] = []
        self.best: Evaluation | None = None
        self.has_new_best = self.is_owed = False
        self._evaluator = None
        if task.eval_dataset is not None:
            samples = build_dataset(task, evaluation=True)
            require_same_length(samples, "eval_dataset", group=loop.group, device=loop.device)
            self._evaluator = Evaluator(task, loop, samples)

    @property
    def are_wanted(self) -> bool:
        """Whether there is what to evaluate on."""
        return self._evaluator is not None

    def restore(self, best: dict[str, object] | None, *, is_owed: bool) -> None:
        """Go on from what a checkpoint says."""
        self.is_owed = is_owed and self.are_wanted
        if best is not None:
            self.best = Evaluation(**best)  # type: ignore[arg-type]

    def loss_after(self, step: int) -> float | None:
        """Return the loss that an evaluation after ``step`` steps found, if the last one was then."""
        return self.made[-1].metrics["loss"] if self.made and self.made[-1].step == step else None

    def make(self, num_steps: int, display: Display, record: Record, log: Log | None, losses: list[float]) -> None:
        """Evaluate, and tell what was found. The device is at rest.

        Args:
            num_steps: Of the whole run.
            display: To whom it is told,
            record: ... and to whom,
            log: ... and to whom, if there is one.
            losses: Of training so far.
        """
        assert self._evaluator is not None
        progress.now.phase = "evaluation"
        step = self._loop.num_steps_done
        found = Evaluation(step, self._evaluator.run())
        self.made.append(found)
        if self.best is None or found.metrics["loss"] < self.best.loss:
            self.best = found
            self.has_new_best = self._keep_best
        epoch = "" if self._loop.epoch is None else f"epoch {self._loop.epoch:.1f}  "
        skipped = self._evaluator.skipped
        without = f"  without {len(skipped)} that cannot be read" if skipped else ""
        what = f"evaluation: {format_metrics(found.metrics)}{without}"
        display.say(f"{epoch}step {step}/{num_steps}  {what}")
        record.event("evaluation", what, found.metrics)
        if log is not None:
            log.losses(losses)
            log.evaluation(found.step, found.metrics)
            for bad in skipped:
                log.skipped(bad._replace(step=step - 1), evaluation=True)
