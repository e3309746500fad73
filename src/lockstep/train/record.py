"""What a run tells of itself as it goes: taken down on every rank, always, and handed to whoever wants it.

[Note: who gets it]
Each step is measured by a `Recorder`. From there its figures go into the file of this rank, if the run has a folder
(docs/metrics.md), and into `Figures`, which every rank posts once a second on a board; rank zero makes snapshots of all
ranks' figures for the display and the sinks (docs/live.md). All of that happens in a thread beside training.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from functools import partial
from typing import final

from lockstep.comm.board import Board
from lockstep.comm.collectives import all_gather_object
from lockstep.comm.world import World
from lockstep.telemetry.live.aggregator import Aggregator, RunInfo, decode, encode, with_waits
from lockstep.telemetry.live.beats import PERIOD_S, Beats, guarded
from lockstep.telemetry.live.delivery import Direct, Threaded
from lockstep.telemetry.live.figures import Figures
from lockstep.telemetry.live.snapshot import RankFigures, Snapshot, SnapshotSink
from lockstep.telemetry.live.words import summary
from lockstep.telemetry.record.machine import MachineSampler
from lockstep.telemetry.record.names import Event
from lockstep.telemetry.record.shared_sample import SharedSample
from lockstep.train.loop import Loop
from lockstep.train.recorded_file import RecordedFile
from lockstep.train.recording import Recorder
from lockstep.train.run_dir import RunDir
from lockstep.train.settings import FitSettings
from lockstep.train.step_record import StepRecord
from lockstep.train.task import Task

_RANKS_A_SECOND = 64
"""With more ranks than that, snapshots are made less often."""


@final
class Record:
    """Takes what happens in a run, on every rank.

    Collective: every rank makes one, at the same place. Blocks until all have, if there is a folder.

    Args:
        task, settings, world, loop: Of the run.
        num_steps: Of the whole run.

    Raises:
        ConfigurationError: On every rank: a rank cannot write into the folder.
    """

    def __init__(self, task: Task, settings: FitSettings, world: World, loop: Loop, *, num_steps: int) -> None:
        self._world, self._loop = world, loop
        num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self._num_ranks = 1 if loop.group is None else world.world_size
        device = ", ".join(str(each) for each in loop.devices)
        first_step = loop.num_steps_done
        self._figures = Figures(world.rank, self._num_ranks, host=platform.node(), device=device, first_step=first_step)
        self._sample = SharedSample(MachineSampler(loop.devices))
        self._folder = self._file = None
        if settings.run_dir is not None:
            self._folder = RunDir(task, settings, world, loop, num_steps=num_steps, sample=self._sample)
            self._file = RecordedFile(self._folder.writer, loop.plan.order.steps_per_epoch)
        self._recorder = Recorder(loop, self._figures, self._file)
        info = RunInfo(
            num_steps,
            first_step,
            num_restarts=num_restarts,
            steps_per_epoch=loop.plan.order.steps_per_epoch,
            num_skipped=lambda: len(loop.finite.found),
            counts=task.counts,
        )
        self._aggregator = Aggregator(self._figures, Board(world, self._num_ranks), info, world_size=self._num_ranks)
        self._beats: Beats | None = None
        self._num_beats = 0
        self._is_over = False
        if num_restarts:
            self.event("restart", f"started again, for the {_th(num_restarts)} time")
        if first_step:
            self.event("resume", f"went on after step {first_step}")

    def deliver(self, display: SnapshotSink | None, sinks: Iterable[SnapshotSink] = ()) -> None:
        """Have ``display`` and ``sinks`` get snapshots from now on, if this is rank zero."""
        if self._world.is_rank_zero:
            self._aggregator.deliveries += [] if display is None else [Direct(display)]
            self._aggregator.deliveries += [Threaded(sink) for sink in sinks]

    def start(self) -> None:
        """Begin to tell: snapshots are made from now on."""
        self._beats = Beats(self.beat, PERIOD_S * max(1.0, self._num_ranks / _RANKS_A_SECOND))

    def begin(self) -> None:
        """A step is about to begin."""
        self._recorder.begin()

    def step(self, record: StepRecord) -> None:
        """Take a step that has just ended on the host. Does not block."""
        self._recorder.step(record)

    def pause(self) -> None:
        """Training stands still from now on, for the event that comes next."""
        self._recorder.pause()

    def event(self, event: Event, text: str, metrics: Mapping[str, float] | None = None) -> None:
        """Take an event, for which training stood still since `pause` if that was called. Does not block.

        Args:
            event: What it is.
            text: In words.
            metrics: What an evaluation found.
        """
        self._recorder.event(event, text, metrics)

    def finish(self, event: Event, text: str) -> str | None:
        """Take notice that the run is over; return where the time of its steps went, on rank zero.

        Collective: every rank. Blocks for some small messages, and until the device is done.
        """
        if self._folder is not None:
            self._folder.finish()
        self.event(event, text)
        self._stop()
        figures = self._figures.whole_run()
        if self._num_ranks > 1:
            group, device = self._world.group, self._world.device
            ranks = [decode(each) for each in all_gather_object(encode(figures), group=group, device=device)]
        else:
            ranks = [figures]
        return self._summary(with_waits(ranks))

    def close(self) -> None:
        """Hand on what is left. Blocks until the device is done, unless there is an error, and some seconds at most."""
        self._stop()
        if self._file is not None:
            self._file.close()
        self._aggregator.close()

    def _stop(self) -> None:
        """End the thread, take in what is left, and make the last snapshot, once."""
        if self._is_over:
            return
        self._is_over = True
        has_ended = self._beats is None or self._beats.stop()
        if guarded(self._recorder.finish) and has_ended:
            guarded(partial(self._aggregator.beat, is_last=True))

    def beat(self) -> None:
        """Take in what has been done by now, and tell of it. For a thread beside training."""
        self._recorder.drain()
        if self._num_beats % 2 == 0:
            self._figures.machine(self._sample())
        self._num_beats += 1
        self._aggregator.beat()

    def _summary(self, ranks: tuple[RankFigures, ...]) -> str | None:
        step = self._figures.num_done
        whole = Snapshot(time=0.0, step=step, num_steps=step, ranks=ranks, world_size=self._num_ranks)
        return summary(whole) if self._world.is_rank_zero else None


def _th(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
