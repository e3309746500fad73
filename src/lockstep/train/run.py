"""A run: the loop, and what goes on around its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import activity
from lockstep.comm.collectives import all_gather_object
from lockstep.comm.world import World
from lockstep.data.stream import check_same_length
from lockstep.telemetry.run_record import Event
from lockstep.train.display import (
    NUM_NAMED,
    RunLogger,
    describe_not_finite,
    describe_plan,
    describe_skipped,
    describe_stop,
    make_display,
)
from lockstep.train.evaluate import Evaluations, FitResult
from lockstep.train.export import check_export, export_weights
from lockstep.train.plan import devices_of
from lockstep.train.recording import RunRecord, SlowRanks, Throughput, make_sinks
from lockstep.train.settings import FitSettings
from lockstep.train.stopping import StopSignals, exit_code_of
from lockstep.train.task import Task
from lockstep.train.trainer import Trainer

if TYPE_CHECKING:
    from lockstep.train.checkpoint import Checkpoints


class Run:
    """Trains a task once through, with all that its settings ask for.

    Collective for ``ddp`` and ``torch-ddp``: every rank makes one and calls its methods in the same order.
    """

    def __init__(
        self,
        task: Task,
        settings: FitSettings,
        world: World,
        signals: StopSignals,
        checkpoints: Checkpoints | None,
    ) -> None:
        self._task, self._settings, self._world = task, settings, world
        self._signals, self._checkpoints = signals, checkpoints
        if settings.export is not None:
            check_export(Path(settings.export))
        self._loop = Trainer(task, settings, world, strategy=settings.strategy, devices=devices_of(settings, world))
        group, device = self._loop.group, self._loop.device
        check_same_length(self._loop.samples, "dataset", group=group, device=device)
        self._evaluations = Evaluations(task, self._loop, keep_best=settings.keep_best)
        self._checkpoint: Path | None = None
        self._saved: tuple[int, float | None] | None = None
        if checkpoints is not None:
            self._loop.wishes.stop_asked = lambda: signals.asked() is not None
            self._loop.wishes.failure_seen = lambda: checkpoints.failed
        resumed = self._resume()
        self._first_step = self._loop.num_steps_done
        self.num_steps = max(self._loop.plan.num_steps, self._first_step)
        """Of the whole run."""
        self._history = Throughput()
        self._record = RunRecord(task, settings, world, self._loop, num_steps=self.num_steps)
        self._started_at = time.perf_counter()
        sinks = make_sinks(task, settings, world, self._loop, num_steps=self.num_steps)
        self._display = make_display(settings.view, silent=settings.quiet or not world.is_rank_zero)
        self._telling = RunLogger(self._loop, self._display, self._record)
        self._slow_ranks = SlowRanks(group, device, self._telling.slow)
        num_devices = len(self._loop.devices) if self._loop.group is None else world.world_size
        plan = describe_plan(task, settings, self._loop.plan, self._loop.device, num_devices=num_devices)
        for line in (*plan, *resumed, *sinks.remarks):
            self._display.say(line)
        self._telling.tell()
        self._record.deliver(None if settings.quiet else self._display, [sink for _, sink in sinks.sinks])
        self._record.start()

    @property
    def num_steps_done(self) -> int:
        """Of the whole run, up to now."""
        return self._loop.num_steps_done

    @property
    def has_steps_left(self) -> bool:
        """Whether there is more to train."""
        return self.num_steps_done < self.num_steps

    @property
    def has_new_best(self) -> bool:
        """Whether the last evaluation found what is worth a checkpoint."""
        return self._evaluations.has_new_best

    def is_due(self, every: int | None) -> bool:
        """Return whether something is to be done now that is done every so many steps, each epoch if None, and last."""
        every = every or self._loop.plan.order.steps_per_epoch or self.num_steps
        return not self.has_steps_left or self.num_steps_done % every == 0

    def step(self) -> None:
        """Train on the next global batch."""
        self._history.start()
        self._record.begin()
        self._slow_ranks.before_step()
        record = self._loop.step()
        self._record.step(record)
        self._telling.tell()
        self._history.add(record)
        self._slow_ranks.after_step(record)

    def beside(self, event: Event, act: Callable[[], str]) -> None:
        """Do something for which training stands still, and tell what it says of it. Collective: every rank."""
        self._settle()
        text = act()
        self._display.say(text)
        self._record.event(event, text)

    def evaluate(self) -> None:
        """Evaluate the model, if the task has what to evaluate it on."""
        if self._evaluations.are_wanted:
            self._settle()
            self._evaluations.make(self.num_steps, self._display, self._record)

    def save(self, *, owes_evaluation: bool = False) -> None:
        """Start to write a checkpoint, if there is a folder for them and none of the same was written.

        Collective: every rank. Blocks rank zero until the one before is on disk and the state is copied.
        """
        loss = self._evaluations.loss_after(self.num_steps_done)
        self._evaluations.has_new_best = False
        if self._checkpoints is None or self._saved == (self.num_steps_done, loss):
            return
        self._settle()
        activity.now.phase = "checkpoint"
        self._loop.drift.before_keeping(self.num_steps_done)
        state = self._loop.state_dict() | self._own_state(owes_evaluation)
        self._checkpoint = self._checkpoints.save(state, step=self.num_steps_done, loss=loss)
        self._saved = (self.num_steps_done, loss)
        self._record.event("checkpoint", f"checkpoint after step {self.num_steps_done}")

    def _own_state(self, owes_evaluation: bool) -> dict[str, Any]:
        best = self._evaluations.best
        return {"best": None if best is None else asdict(best), "owes_evaluation": owes_evaluation}

    def is_to_stop(self) -> bool:
        """Return whether the run is to stop after this step; the same on every rank.

        Collective: every rank.

        Raises:
            CheckpointError: On every rank: a checkpoint could not be written.
        """
        if self._checkpoints is None:
            return False
        stop, failed = self._loop.heard()
        if failed:
            self._checkpoints.agree()
        return stop

    def stop(self) -> FitResult:
        """Save, and return what came of the run so far.

        Collective: every rank. Blocks until the checkpoint is on disk.
        """
        assert self._checkpoints is not None
        self.save(owes_evaluation=self._evaluations.are_wanted and self.is_due(self._settings.eval_every))
        self._checkpoints.finish()
        names = all_gather_object(self._signals.asked(), group=self._world.group, device=self._world.device)
        name: str = next(name for name in names if name is not None)
        text = describe_stop(name, self.num_steps_done, self.num_steps, self._checkpoint)
        self._tell_end("stop", text)
        if not self._signals.has_launcher:  # which says it itself
            self._display.say(text)
        self._signals.report(text)
        losses = self._history.read()
        return self._result(losses, stopped=name)

    def catch_up(self) -> None:
        """Evaluate what a run that was stopped did not come to. Collective: every rank."""
        if self._evaluations.is_owed:
            self.evaluate()
            if self.has_new_best:
                self.save()

    def finish(self) -> FitResult:
        """Export the weights, hand the model to the task, and return what came of it.

        Collective: every rank. Files are written once it returns.
        """
        if not self._evaluations.made:
            self.evaluate()
            if self.has_new_best:
                self.save()
        if self._first_step < self.num_steps:
            self._settle()
        losses = self._history.losses
        seconds = time.perf_counter() - self._started_at
        if losses:
            rate = self._history.in_words(self._task.counts)
            self._display.say(f"{len(losses)} steps in {seconds:.1f} s, {rate}, last loss {losses[-1]:.4f}")
        skipped, not_finite = self._loop.bad_samples.skipped, self._loop.finite.found
        if skipped:
            self._display.say(describe_skipped(skipped))
        if not_finite:
            self._display.say(describe_not_finite(not_finite))
        model = self._loop.model if self._settings.export is not None or self._task.after is not None else None
        if self._world.is_rank_zero and self._settings.export is not None:
            assert model is not None
            export_weights(model, Path(self._settings.export))
            self._display.say(f"weights written to {self._settings.export}")
        if self._checkpoints is not None:
            self._checkpoints.finish()
        self._tell_end("end", f"{self.num_steps_done} steps done")
        self._world.barrier()  # now every rank finds the files
        if self._world.is_rank_zero and self._task.after is not None:
            self._display.close()
            assert model is not None
            self._task.after(model.eval())
        return self._result(losses)

    def _tell_end(self, event: Event, text: str) -> None:
        """Tell that there are no more steps, and where their time went. Collective: every rank."""
        where = self._record.finish(event, text)
        if where is not None and self._first_step < self.num_steps_done:
            self._display.say(where)

    def _result(self, losses: list[float], *, stopped: str | None = None) -> FitResult:
        skipped, counted = self._loop.bad_samples.skipped, self._history.counted
        num_counted, tokens_per_s = (None, None) if counted is None else counted
        return FitResult(
            first_step=self._first_step,
            num_steps=self.num_steps_done,
            losses=losses,
            evaluations=self._evaluations.made,
            best=self._evaluations.best,
            num_samples=self._history.num_samples - len(skipped),
            samples_per_s=self._history.samples_per_s,
            seconds=time.perf_counter() - self._started_at,
            checkpoint=self._checkpoint,
            skipped_samples=len(skipped),
            first_skipped=tuple(skipped[:NUM_NAMED]),
            not_finite=tuple(self._loop.finite.found),
            stopped=stopped,
            exit_code=exit_code_of(stopped, has_launcher=self._signals.has_launcher),
            num_counted=num_counted,
            tokens_per_s=tokens_per_s,
        )

    def close(self) -> None:
        """Leave the terminal as it was, and end the loader's processes."""
        try:
            self._record.close()
        finally:
            self._display.close()
        self._slow_ranks.close()
        self._loop.close()

    def _settle(self) -> None:
        """Wait for the device, and count that as training: something else comes next."""
        self._record.pause()
        self._history.stop()
        self._loop.settle()
        self._telling.tell()

    def _resume(self) -> list[str]:
        """Go on from the newest checkpoint, if there is one; return what the user should know of it."""
        if self._checkpoints is None:
            return []
        state = self._checkpoints.load(required=self._settings.resume is True)
        lines = [f"passed over the checkpoint {why}" for why in self._checkpoints.passed_over]
        if state is not None:
            self._loop.load_state_dict(state)
            num_steps_done = self.num_steps_done
            self._checkpoint, self._saved = self._checkpoints.path(num_steps_done), (num_steps_done, None)
            self._evaluations.restore(state["best"], is_owed=state["owes_evaluation"])
            num_steps = max(self._loop.plan.num_steps, num_steps_done)
            lines.append(f"resumed after step {num_steps_done} of {num_steps}")
        return lines
