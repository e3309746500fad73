"""The record of a run of ``fit``: each step, written to the run folder and sent to display and sinks by a thread."""

import inspect
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from lockstep.accelerator import HostCopy, synchronize
from lockstep.activity import one_line
from lockstep.comm.clocks import measure_clock_offsets
from lockstep.comm.collectives import all_gather_object
from lockstep.comm.store import StatusKeys
from lockstep.comm.world import World
from lockstep.data.batch_iterator import Copy
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.telemetry import aggregator, record, stragglers
from lockstep.telemetry.cost import Price, Usage
from lockstep.telemetry.live_view import summary
from lockstep.telemetry.metrics import Snapshot, SnapshotSink
from lockstep.telemetry.provenance import Provenance, gather
from lockstep.telemetry.record import EventName, RunFolder
from lockstep.telemetry.recorder import PERIOD_S, StepRecorder, has_timeline
from lockstep.telemetry.resources import MachineSampler
from lockstep.telemetry.sinks import MetricsSink, RunInfo, open_sinks, parse_targets
from lockstep.telemetry.step_times import Number, StepMarks, StepTimes
from lockstep.train.settings import FitSettings
from lockstep.train.task import Task
from lockstep.train.timing import StepRecord
from lockstep.train.trainer import Trainer

# Events that pause the training.
_PAUSES = ("evaluation", "checkpoint", "profile")

# Interval of copies of the loss from a device if there is only a display; a run folder gets the loss of every step.
_LOSS_EVERY_S = 0.5

# With more ranks, snapshots are made less often.
_RANKS_A_SECOND = 64


@final
class RunRecord:
    """Records steps and events on every rank, and passes them to the run folder, the display and the sinks.

    Collective: every rank creates one at the same point. Blocks until all have, if there is a folder.

    Args:
        task, settings, world, trainer: Of the run. The settings name the folder, which is created if needed; each
            machine may have its own.
        num_steps: Number of steps of the whole run.

    Raises:
        ConfigurationError: On every rank: a rank cannot write into the folder.
    """

    def __init__(self, task: Task, settings: FitSettings, world: World, trainer: Trainer, *, num_steps: int) -> None:
        self._task, self._settings, self._num_steps = task, settings, num_steps
        self._world, self._trainer, self._device = world, trainer, trainer.device
        restarts = record.num_restarts()
        self._is_fresh = not trainer.num_steps_done and not restarts
        self._num_ranks = 1 if trainer.group is None else world.world_size
        self._is_alone = len(trainer.devices) == 1 and self._num_ranks == 1
        devices = ", ".join(str(each) for each in trainer.devices)
        first_step = trainer.num_steps_done
        self._metrics = aggregator.RankMetrics(world.rank, host=platform.node(), device=devices, first_step=first_step)
        self._folder = None if settings.run_dir is None else self._open_folder(Path(settings.run_dir))
        writer = None if self._folder is None else self._folder.writer
        steps_per_epoch = trainer.plan.order.steps_per_epoch
        self._sampler = MachineSampler(trainer.devices)
        self._recorder = StepRecorder(
            writer, self._metrics, sample=self._sampler, device=self._device, steps_per_epoch=steps_per_epoch
        )
        stamps = BucketStamps(self._device)
        self._stamps = stamps if trainer.strategy.stamp_buckets(stamps) else None
        self._copies: list[Copy] = []
        trainer.batches.copies = self._copies
        self._last: StepMarks | None = None  # until its duration is known
        self._loss_at = float("-inf")
        self._paused_at: float | None = None
        self._has_timeline = has_timeline(first_step)
        if self._stamps is not None:
            self._stamps.closely = self._has_timeline
        constants = Snapshot(num_steps=num_steps, num_restarts=restarts, counts=task.counts, world_size=self._num_ranks)
        self._aggregator = aggregator.Aggregator(
            self._metrics,
            StatusKeys(world.rank, self._num_ranks),
            constants,
            steps_per_epoch=steps_per_epoch,
            num_skipped=lambda: len(trainer.nonfinite.found),
        )
        self._is_over = self._has_ended = False
        self._num_taken = 0
        self._window: list[StepMarks] = []  # steps whose times the ranks compare
        if restarts:
            self.event("restart", f"start {restarts + 1} of this run")
        if first_step:
            self.event("resume", f"resumed after step {first_step}")

    def deliver(self, display: SnapshotSink | None, sinks: Iterable[SnapshotSink] = ()) -> None:
        """Start to measure, and to send snapshots to ``display`` and ``sinks`` if this is rank zero."""
        if self._world.is_rank_zero:
            shown = [*sinks] if display is None else [display, *sinks]
            self._aggregator.deliveries += [aggregator.SinkThread(each) for each in shown]
        self._recorder.start(self._aggregator.beat, PERIOD_S * max(1.0, self._num_ranks / _RANKS_A_SECOND))

    def step(self, done: StepRecord) -> None:
        """Record a step that has just ended on the host. Does not block."""
        step = done.timer.marks
        self._release(step.began_at)
        self._paused_at = None
        numbers = self._numbers(done)
        rate = self._trainer.optimizer.param_groups[0]["lr"]
        if isinstance(rate, Tensor):
            rate = float(rate) if rate.is_cpu else None
        step.number, step.samples, step.learning_rate = done.step, done.num_samples, rate
        step.losses = [numbers["loss"]] if numbers else []
        step.grad_norm, step.counted = numbers.get("grad_norm"), numbers.get("count")
        stamps = None if self._stamps is None else self._stamps.take()
        if stamps is not None:
            step.reductions = [stamps]
        if self._is_alone:
            step.exposed_s = 0.0
        step.copies, step.has_timeline = self._copies[:], self._has_timeline
        self._last = step
        self._copies.clear()
        self._has_timeline = has_timeline(done.step + 1)
        if self._stamps is not None:
            self._stamps.closely = self._has_timeline

    def compare_ranks(self, reporter: stragglers.StragglerReporter) -> None:
        """Report a straggler, a rank for which the others wait in each step. Called after each recorded step.

        Collective after some steps, the same on every rank: every rank of the group. Then it blocks until the device
        has finished the step.
        """
        number, self._num_taken = self._num_taken, self._num_taken + 1
        group = self._trainer.group
        if group is not self._trainer.strategy.step_group:  # between exchanges ranks do not wait for each other
            group = None
        if group is None or self._last is None or not stragglers.is_looked_at(number):
            return
        self._window.append(self._last)
        if stragglers.ends_window(number):
            synchronize(self._device)
            mine = asdict(stragglers.pace_of([_times_of(step) for step in self._window]))
            self._window.clear()
            paces = all_gather_object(mine, group=group, device=self._device)
            reporter.judge({rank: stragglers.Pace(**pace) for rank, pace in enumerate(paces)})

    def _numbers(self, done: StepRecord) -> dict[str, Number]:
        """Return loss, norm and count of a step, with the state of their copies to the host."""
        maybe = {"loss": done.loss, "grad_norm": done.grad_norm, "count": done.count}
        values = {name: value for name, value in maybe.items() if value is not None}
        if self._device.type == "cpu":
            return {name: Number(value, None) for name, value in values.items()}
        # Copied on the stream of the step, so that nothing waits: in every step if there is a file, otherwise from time
        # to time, for the display.
        if self._folder is None and done.timer.marks.began_at - self._loss_at < _LOSS_EVERY_S:
            return {}
        self._loss_at = done.timer.marks.began_at
        copy = HostCopy(torch.stack([value.detach().to(done.loss.dtype) for value in values.values()]))
        return {name: Number(copy.value, copy.arrived, place) for place, name in enumerate(values)}

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
        began_s = time.time() - (seconds or 0.0)
        step = self._trainer.num_steps_done
        self._recorder.event(event, text, step=step, time_s=began_s, seconds=seconds, metrics=metrics)
        self._has_ended |= event in ("end", "stop")

    def finish(self, event: EventName, text: str) -> str | None:
        """Record the end of the run; return a summary of time and resources, on rank zero.

        Collective: every rank. Blocks for some small messages, and until the device has finished.
        """
        group, device = self._world.group, self._world.device
        if self._folder is not None:
            offsets = measure_clock_offsets(group, device)
            self._folder.describe(offsets, "end", workers=self._trainer.settings.workers)
        self.event(event, text)
        self._stop()
        mine = asdict(self._metrics.whole_run()), asdict(self._sampler.used)
        gathered, used = zip(*all_gather_object(mine, group=group, device=device), strict=True)
        known = aggregator.with_waits(map(aggregator.decode, gathered))
        done = self._metrics.num_done
        whole = Snapshot(step=done, num_steps=done, ranks=known, world_size=self._num_ranks)
        total = sum((Usage(**each) for each in used), Usage()).text(Price.read(self._settings.price))
        return "\n".join(filter(None, (summary(whole), f"used {total}"))) if self._world.is_rank_zero else None

    def close(self) -> None:
        """Deliver the rest. Blocks, for some seconds at most, until the device has finished; not after an error."""
        self._stop()
        self._aggregator.close()

    def _stop(self) -> None:
        """End the thread, record the last step, and make the last snapshot; once."""
        if self._is_over:
            return
        self._is_over = True
        error = None if self._has_ended else sys.exc_info()[1]  # not an error during whose handling fit was called
        if error is not None:
            self.event("error", one_line(error))
        self._release(None)
        self._recorder.finish(waits=error is None)

    def _release(self, until: float | None) -> None:
        """Pass the last step, which lasted until ``until``, to the recorder."""
        if self._last is not None:
            self._last.interval_s = None if until is None else until - self._last.began_at
            self._recorder.add(self._last)
            self._last = None

    def _open_folder(self, folder: Path) -> RunFolder:
        """Open the files of this rank; rank zero also writes ``run.json``. Collective: every rank."""
        world, trainer, settings = self._world, self._trainer, self._settings
        opened = RunFolder(
            folder,
            world.rank,
            world.world_size,
            device=", ".join(str(device) for device in trainer.devices),
            first_step=trainer.num_steps_done,
            fresh=self._is_fresh,
            gather=partial(all_gather_object, group=world.group, device=world.device),
        )
        given = asdict(settings).items()
        opened.describe(
            measure_clock_offsets(world.group, world.device),
            "start",
            num_steps=self._num_steps,
            task=self._task.name,
            counts=self._task.counts,
            settings={name: str(value) if isinstance(value, Path) else value for name, value in given},
            global_batch_size=trainer.plan.batch_size,
            steps_per_epoch=trainer.plan.order.steps_per_epoch,
            num_parameters=sum(parameter.numel() for parameter in self._parameters()),
            gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in self._parameters()),
            backend=world.backend if trainer.group is not None else None,
            provenance=asdict(self._provenance()) if world.is_rank_zero else {},
        )
        return opened

    def open_sinks(self) -> list[MetricsSink]:
        """Open the sinks of a run that begins or resumes; only rank zero has any.

        Collective: every rank. Blocks until rank zero has opened them; see `telemetry.sinks.open_sinks`.

        Raises:
            ConfigurationError: On every rank: a sink cannot be opened; says why.
        """
        targets = parse_targets(self._settings.log_to or ())
        return open_sinks(targets, self._run_info, self._world) if targets else []

    def _run_info(self) -> RunInfo:
        """Return the configuration of the run: the settings as given, and values derived from them."""
        settings, trainer, origin = self._settings, self._trainer, self._provenance()
        # In the folder of the checkpoints, so that a run that resumes from them also continues in the same sinks.
        in_store = "://" in str(settings.checkpoint)
        memory = settings.run_dir if in_store else settings.checkpoint or settings.run_dir
        if memory is not None:
            with suppress(OSError):  # then sinks start a new run
                Path(memory).mkdir(parents=True, exist_ok=True)
        config = {
            **{name: _plain(value) for name, value in asdict(settings).items() if value is not None},
            "task": self._task.name,
            "global_batch_size": trainer.plan.batch_size,
            "num_steps": self._num_steps,
            "num_parameters": sum(parameter.numel() for parameter in self._parameters()),
            "world_size": self._world.world_size,
            "num_devices": len(trainer.devices) if trainer.group is None else self._world.world_size,
            "device": str(trainer.device),
            "backend": self._world.backend if trainer.group is not None else "none",
            "host": platform.node(),
            "command": record.how_called()["command"],
            **{f"version/{name}": version for name, version in origin.versions.items()},
            **{f"commit/{name}": commit for name, commit in origin.commits.items()},
            **{f"machine/{name}": fact for name, fact in origin.machine.items() if name != "load"},
        }
        return RunInfo(
            name=self._task.name,
            config=config,
            first_step=trainer.num_steps_done,
            is_fresh=self._is_fresh,
            memory=None if memory is None else Path(memory),
        )

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._trainer.optimizer.param_groups for parameter in group["params"]]

    def _provenance(self) -> Provenance:
        """Return versions, machine and commits. Blocks for some calls of git."""
        path = None
        with suppress(OSError, TypeError):
            path = Path(inspect.getfile(self._task.loss))
        return gather(path)


def _plain(value: object) -> str | int | float | bool:
    if isinstance(value, (str, int, float, bool)):
        return value
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _times_of(step: StepMarks) -> StepTimes:
    found = step.times()
    if found.exposed_s is not None:
        return found
    # If work and waiting in forward and backward cannot be separated, none of it counts as work.
    own_s = sum(part or 0.0 for part in (found.data_wait_s, found.optimizer_s, found.core_wait_s))
    return replace(found, forward_s=None, backward_s=None, exposed_s=found.total_s - own_s)
