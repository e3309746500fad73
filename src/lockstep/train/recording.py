"""What only `fit` knows of its run: the plan, the settings, pauses and the end; telemetry/recorder.py records it."""

import inspect
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from lockstep.base.accelerator import HostCopy, synchronize
from lockstep.base.activity import one_line
from lockstep.comm.collectives import all_gather_object
from lockstep.comm.world import World
from lockstep.data.loader import Copy
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.telemetry import figures
from lockstep.telemetry.cost import Price, Usage
from lockstep.telemetry.live_view import summary
from lockstep.telemetry.provenance import gather
from lockstep.telemetry.record import Event, EventName
from lockstep.telemetry.recorder import Place, Recorder, has_timeline, learning_rate_of
from lockstep.telemetry.sinks import Subscriber
from lockstep.telemetry.step_times import Number, StepMarks, StepTimes
from lockstep.train.settings import FitSettings
from lockstep.train.task import Task
from lockstep.train.trainer import StepRecord, Trainer

# Events that pause the training.
_PAUSES = ("evaluation", "checkpoint", "profile")

# Interval of copies of the loss from a device if there is only a display; a run folder gets the loss of every step.
_LOSS_EVERY_S = 0.5

# Steps of a window in which the ranks are compared. The first steps allocate, compile and find the order of gradients.
_WINDOW, _WARM_UP, _PERIOD = 10, 2, 50


def window_of(step: int) -> range:
    """Return the first window that ends at ``step`` or later, counted from 0: two at the start, then one per fifty."""
    end = step // _PERIOD * _PERIOD + _PERIOD - 1
    if step < _WARM_UP + 2 * _WINDOW:
        end = _WARM_UP + (1 if step < _WARM_UP + _WINDOW else 2) * _WINDOW - 1
    return range(end - _WINDOW + 1, end + 1)


@final
class RunRecord:
    """Records steps and events on every rank, and passes them to the run folder, the display and the sinks.

    Collective: every rank creates one at the same point. Blocks until all have, if there is a folder.

    Args:
        task, settings, world, trainer: Of the run. The settings name the folder, which is created if needed; each
            machine may have its own.
        num_steps: Number of steps of the whole run.
        began_with: Number of steps done when the ranks began together.

    Attributes:
        sinks: The sinks of the run; only rank zero has any.
        compares: Whether `compare_ranks` is due after the last step.

    Raises:
        ConfigurationError: On every rank: a rank cannot write into the folder, or a sink cannot be opened.
    """

    def __init__(
        self, task: Task, settings: FitSettings, world: World, trainer: Trainer, *, num_steps: int, began_with: int
    ) -> None:
        self._settings, self._world, self._trainer, self._device = settings, world, trainer, trainer.device
        self._num_ranks = 1 if trainer.group is None else world.world_size
        self._began_with = began_with
        self._place = Place(world.rank, world.world_size, world.group)
        # In the folder of the checkpoints, so that a run that resumes from them also continues in the same sinks.
        self._recorder = Recorder(
            self._place,
            trainer.devices,
            figures.Snapshot(num_steps=num_steps, counts=task.counts, world_size=self._num_ranks),
            first_step=trainer.num_steps_done,
            run_dir=None if settings.run_dir is None else Path(settings.run_dir),
            log_to=settings.log_to or (),
            memory=None if "://" in str(settings.checkpoint) else settings.checkpoint,
            facts=partial(_facts, task, settings, world, trainer),
            steps_per_epoch=trainer.plan.order.steps_per_epoch,
            num_skipped=lambda: len(trainer.updater.nonfinite.found),
        )
        self._recorder.num_done, self._recorder.on_recovery = lambda: trainer.num_steps_done, self._recovered
        self.sinks = self._recorder.sinks
        self._stamps = BucketStamps(self._device)
        if trainer.strategy.ours is not None:
            trainer.strategy.ours.stamp_buckets(self._stamps)
        self._stamps.closely = has_timeline(trainer.num_steps_done)
        self._copies: list[Copy] = []
        trainer.batches.copies = self._copies
        self._last: StepMarks | None = None  # until its duration is known
        self._loss_at = float("-inf")
        self._paused_at: float | None = None
        self._is_over = False
        # The next steps whose times the ranks compare, and those of them that are done.
        self._window, self._compared = window_of(0), list[StepMarks]()
        self.compares = False

    def recent_events(self) -> list[dict[str, Any]]:
        """Return what rank zero may not have delivered."""
        return [asdict(event) for event in self._recorder.recent_events()]

    def deliver(self, display: Subscriber | None, recent: Iterable[Mapping[str, Any]]) -> None:
        """Start to measure, and to pass figures and events to ``display`` and the sinks if this is rank zero.

        ``recent`` are those of another rank.
        """
        self._recorder.subscribe(display, (Event(**event) for event in recent))
        self._recorder.start()

    def on_step_end(self, done: StepRecord) -> None:
        """Record a step that has just ended on the host. Does not block."""
        step = done.timer.marks
        self._release(step.began_at)
        self._paused_at = None
        numbers = self._numbers(done)
        step.samples = done.num_samples
        step.learning_rate = learning_rate_of(self._trainer.optimizer)
        step.losses = [numbers["loss"]] if numbers else []
        step.grad_norm, step.counted = numbers.get("grad_norm"), numbers.get("count")
        if (stamps := self._stamps.take()) is not None:
            step.reductions = [stamps]
        if len(self._trainer.devices) == 1 and self._num_ranks == 1:
            step.exposed_s = 0.0
        step.copies, step.has_timeline = self._copies[:], self._stamps.closely
        self._last = step
        self._copies.clear()
        # Single buckets get time stamps only in steps with a timeline.
        self._stamps.closely = has_timeline(done.step + 1)
        group, number = self._trainer.group, done.step - self._began_with
        if number > self._window[-1]:
            self._window = window_of(number)
        # Between exchanges ranks do not wait for each other.
        is_compared = number in self._window and group is not None and group is self._trainer.strategy.step_group
        if is_compared:
            self._compared.append(step)
        self.compares = is_compared and number == self._window[-1]

    def log(self, name: str, value: float | torch.Tensor) -> None:
        """Record a number with the last step, or if there is none since the last pause, as a metric. Does not block."""
        copy = None if isinstance(value, int | float) else HostCopy(value.reshape(1))
        if self._last is None:
            number = float(value) if copy is None else float(copy.read())
            self.event("evaluation", f"{name} {number:.4g}", {name: number})
        else:
            self._last.logged[name] = Number(value) if copy is None else Number(copy.value, copy.arrived, 0)

    def _numbers(self, done: StepRecord) -> dict[str, Number]:
        """Return loss, norm and count of a step, with the state of their copies to the host."""
        maybe = {"loss": done.loss, "grad_norm": done.grad_norm, "count": done.count}
        values = {name: value for name, value in maybe.items() if value is not None}
        if self._device.type == "cpu":
            return {name: Number(value, None) for name, value in values.items()}
        # Copied on the stream of the step, so that nothing waits: in every step if there is a file, otherwise from time
        # to time, for the display.
        began_at = done.timer.marks.began_at
        if self._settings.run_dir is None and began_at - self._loss_at < _LOSS_EVERY_S:
            return {}
        self._loss_at = began_at
        copy = HostCopy(torch.stack([value.detach().to(done.loss.dtype) for value in values.values()]))
        return {name: Number(copy.value, copy.arrived, place) for place, name in enumerate(values)}

    def compare_ranks(self, reporter: figures.StragglerReporter) -> None:
        """Report a straggler, a rank for which the others wait in each step.

        Collective: every rank of the group. Blocks until the device has finished the step.
        """
        assert self._trainer.group is not None, "there are no times otherwise"
        synchronize(self._device)
        pace = figures.pace_of([_times_of(step) for step in self._compared])
        reporter.judge(dict(enumerate(all_gather_object(pace, group=self._trainer.group, device=self._device))))
        self._compared.clear()

    def reconnect(self, display: Subscriber | None = None) -> None:
        """Go on with the ranks of another generation of the world; ``display``: if this has become rank zero."""
        world = self._world
        self._place = Place(world.rank, world.world_size, world.group)
        self._num_ranks = world.world_size
        self._compared.clear()  # of which a rank that came late has fewer
        if display is not None:
            self._recorder.lead(display)
            self.sinks = self._recorder.sinks

    def _recovered(self, _num_done: int) -> None:
        self._release(None)

    def pause(self) -> None:
        """Begin a pause of the training for the next event."""
        self._paused_at = time.perf_counter()
        self._release(self._paused_at)

    def event(self, event: EventName, text: str, metrics: Mapping[str, float] | None = None) -> None:
        """Record an event, which ends a `pause`. Does not block.

        Args:
            event: The kind of event.
            text: Its description.
            metrics: The metrics of an evaluation.
        """
        seconds = None
        if event in _PAUSES and self._paused_at is not None:
            seconds, self._paused_at = time.perf_counter() - self._paused_at, None
        began_s, step = time.time() - (seconds or 0.0), self._trainer.num_steps_done
        self._recorder.event(Event(event=event, step=step, time=began_s, seconds=seconds, text=text, metrics=metrics))

    def finish(self, event: EventName, text: str) -> str | None:
        """Record the end of the run; return a summary of time and resources, on rank zero.

        Collective: every rank. Blocks for some small messages, and until the device has finished.
        """
        recorder = self._recorder
        if not self._is_over:  # else a rank was lost after that
            self.event(event, text)
            self._is_over = True
            self._release(None)
            recorder.finish(waits=True, workers=self._trainer.settings.workers)
        measured = asdict(recorder.means.whole_run()), asdict(recorder.sampler.used)
        gathered, used = zip(*self._place.gather(measured), strict=True)
        done = recorder.means.num_done
        ranks = figures.with_waits(figures.RankFigures(**rank) for rank in gathered)
        whole = figures.Snapshot(step=done, num_steps=done, ranks=ranks, world_size=self._num_ranks)
        # A rank that came late has the device of one that was lost.
        device_s = max(usage["device_s"] for usage in used)
        total = sum((Usage(device_s, usage["energy_j"]) for usage in used), Usage())
        used_text = f"used {total.text(Price.read(self._settings.price))}"
        return "\n".join(filter(None, (summary(whole), used_text))) if self._world.is_rank_zero else None

    def close(self) -> None:
        """Deliver the rest. Blocks, for some seconds at most, until the device has finished; not after an error."""
        if not self._is_over:
            self._is_over = True
            error = sys.exc_info()[1]
            if error is not None:
                self.event("error", one_line(error))
            self._release(None)
            self._recorder.finish(waits=error is None)
        self._recorder.close()

    def _release(self, until: float | None) -> None:
        """Pass the last step, which lasted until ``until``, to the recorder."""
        if self._last is not None:
            self._last.interval_s = None if until is None else until - self._last.began_at
            self._recorder.add(self._last)
            self._last = None


def _facts(task: Task, settings: FitSettings, world: World, trainer: Trainer) -> dict[str, Any]:
    """Return the configuration of the run, for its record and its sinks. Blocks for some calls of git."""
    path = None
    with suppress(OSError, TypeError):
        path = Path(inspect.getfile(task.loss))
    values = asdict(settings).items()
    parameters = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    return {
        "task": task.name,
        "counts": task.counts,
        "parameters": dict(task.parameters),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in values},
        "global_batch_size": trainer.plan.order.batch_size,
        "steps_per_epoch": trainer.plan.order.steps_per_epoch,
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "gradient_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "num_devices": len(trainer.devices) if trainer.group is None else world.world_size,
        "backend": world.backend if trainer.group is not None else None,
        "provenance": asdict(gather(path)),
    }


def _times_of(step: StepMarks) -> StepTimes:
    times = step.times()
    if times.exposed_s is not None:
        return times
    # If work and waiting in forward and backward cannot be separated, none of it counts as work.
    own_s = times.part("data_wait") + times.part("optimizer") + times.part("core_wait")
    return replace(times, forward_s=None, backward_s=None, exposed_s=times.total_s - own_s)
