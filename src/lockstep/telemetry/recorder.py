"""The recorder of a rank: takes steps and events, writes the run folder, and feeds subscribers on rank zero.

[Note: in another thread]
The training thread only appends to a queue. Another thread calls `Recorder.drain` about once a second. It checks,
without waiting, whether the device has completed a step, and evaluates a few steps at a time, as the training thread
cannot run Python meanwhile. It also writes the file, posts the figures of this rank, and on rank zero gathers those of
all. Each subscriber is called in one more thread. At the end of the run a thread is abandoned if the store, the disk or
a service hangs.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from operator import or_
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.base import activity
from lockstep.base.accelerator import mark_on, start_thread, synchronize
from lockstep.base.rank_files import RecoveryReport, read_object, replace_file
from lockstep.base.record_files import keep_rest_aside
from lockstep.comm.collectives import Group, all_gather_object, device_for, is_initialized
from lockstep.comm.rendezvous import JOINS
from lockstep.comm.store import StatusKeys
from lockstep.errors import ConfigurationError
from lockstep.telemetry import ranges, record
from lockstep.telemetry.figures import RANK_METRICS, RankFigures, Snapshot, with_waits
from lockstep.telemetry.record import Downsampler, Event, Line, StepLine, Timeline, guarded, num_restarts
from lockstep.telemetry.resources import MachineSampler
from lockstep.telemetry.sinks import Delivery, MetricsSink, Subscriber, open_sinks, run_info
from lockstep.telemetry.step_times import TIMES, Mark, StepMarks, StepTimes, combine, seconds_between

PERIOD_S = 1.0
# Until the first beat, as a run may be short.
_FIRST_S = 0.3
# With more ranks, snapshots are made less often.
_RANKS_A_SECOND = 64
# So long ranks keep events that rank zero delivers.
_KEPT_S = 10.0
_JOIN_S = 8.0
# So many steps are evaluated at a time; in the pause, the training thread gets the interpreter lock.
_PIECE, _PIECE_PAUSE_S = 32, 0.001
# While the disk or the store hangs, so many are kept; then the oldest are dropped.
_MOST_WAITING = 100_000
# The first step with a timeline, and the number of such steps in a row.
_TIMELINE_FIRST, _TIMELINE_STEPS = 4, 4


def has_timeline(step: int) -> bool:
    """Return whether a step has a timeline: four of 64 steps, fewer from step 4096 on; the same on every rank."""
    # The report draws the timelines of all ranks together, so all must record the same steps.
    period = max(64, 1 << (step.bit_length() - 6)) if step >= 4096 else 64
    return (step - _TIMELINE_FIRST) % period < _TIMELINE_STEPS


def learning_rate_of(optimizer: Optimizer) -> float | None:
    """Return the learning rate of the first group; None if there is none, or if it is on the device."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None or (isinstance(rate, Tensor) and not rate.is_cpu) else float(rate)


# --- the times of a step, in the training thread ----------------------------------------------------------------------

# A mark, the time of the host, its time in our collectives so far, and its use of cores so far; a tuple for speed.
Moment = tuple[Mark, float, float, bytes]


def moment(device: torch.device) -> Moment:
    """Return the present moment, on the stream of ``device``. Does not block."""
    at = time.perf_counter()
    # On CPU, the time of the host is also the mark, which saves a call.
    return (at if device.type == "cpu" else mark_on(device)), at, activity.now.waited_s, activity.core_use()


class StepTimer:
    """Takes down the phases of one step where they begin, as marks: no call waits for the device.

    A phase lasts until the next one begins. During profiling (`ranges.now`), it is also a range in the
    trace. The first phase is ``data_wait``.

    Args:
        device: The device whose time is measured.
        number: The number of the step, counted from 0.

    Attributes:
        marks: The step so far.
    """

    def __init__(self, device: torch.device, number: int = 0) -> None:
        self._device = device
        self._range = ExitStack()
        self._since = moment(device)
        mark, at, *_ = self._since
        self.marks = StepMarks(number, mark, at, time.time(), mark)
        self._phase, activity.now.phase = "data_wait", "loader"
        if ranges.now:
            self.name_phase("data_wait")

    def begin(self, phase: str, *, at: Mark | None = None) -> None:
        """End the phase before, now or at the mark ``at``, and begin ``phase``, one of `PHASES`; "" after the last."""
        since, self._since = self._since, moment(self._device)
        if at is not None:  # the host's waits and its use of cores until now belong to the phase that ends
            self._since = (at, *self._since[1:])
        add_span(self.marks, self._phase, since, self._since)
        self.marks.end = self._since[0]
        self._phase = phase
        activity.now.phase = "loader" if phase == "data_wait" else phase
        # A range of the trace cannot begin earlier: at a mark, that of the phases before goes on.
        if at is None and ranges.now:
            self.name_phase(phase)

    def name_phase(self, name: str) -> None:
        """End the profiler's range of the phase, and begin another; none if ``name`` is empty."""
        self._range.close()
        if ranges.now and name:
            self._range.enter_context(ranges.around(name))


def add_span(step: StepMarks, phase: str, begin: Moment, end: Moment) -> None:
    """Add a phase to ``step``."""
    step.spans.append((phase, begin[0], end[0], end[2] - begin[2]))
    step.core_uses.append((begin[3], end[3]))


# --- the figures of one rank ------------------------------------------------------------------------------------------

_FIGURES = frozenset(metric.name.removeprefix("rank/") for metric in RANK_METRICS)


class RankMeans:
    """The figures of this rank; used by one thread.

    Args:
        rank: Of this process.
        device: Its device.
        first_step: Number of steps done before.
    """

    def __init__(self, rank: int, device: str, first_step: int = 0) -> None:
        self.num_done = self._sampled_at = first_step
        self.rank = rank
        self._who: dict[str, Any] = {"host": platform.node(), "device": device}
        # The steps since the last `read`. Not their marks, whose events would serve again later.
        self._new: list[StepLine] = []
        self._values: dict[str, Any] = {}
        self._machine: Line = {}
        self._logged: dict[str, float] = {}
        self._step_sent: float | None = None
        # Over all steps but the first, which allocates and compiles, and counts only until there is another.
        self._whole, self._num_steps, self._is_first = StepTimes(total_s=0.0), 0, True

    def add(self, line: StepLine) -> None:
        """Add a step."""
        self.num_done = line.step + 1
        if self._is_first and (self._new or self._num_steps):
            self._new, self._num_steps, self._is_first = [], 0, False
        self._new.append(line)

    def machine(self, line: Line) -> None:
        """Set the figures of the machine to those of a line of kind ``machine``."""
        before, self._machine = self._machine, {name: line[name] for name in line if name in _FIGURES}
        self._who["link_peer"] = line.get("link_peer")
        sent, sent_before = self._machine.get("sent_bytes"), before.get("sent_bytes")
        if sent is not None and sent_before is not None and self.num_done > self._sampled_at:
            self._step_sent = (sent - sent_before) / (self.num_done - self._sampled_at)
        self._sampled_at = self.num_done

    def read(self) -> tuple[RankFigures, dict[str, Any]]:
        """Return the figures since the last call, and the fields that they add to a `Snapshot`."""
        new, self._new = self._new, []
        of_run: dict[str, Any] = {"logged": self._logged}
        for line in new:
            self._logged |= line.logged
            if line.loss is not None:
                of_run |= {"loss": line.loss, "learning_rate": line.learning_rate, "grad_norm": line.grad_norm}
        # While a rank evaluates or saves, it keeps the times and rates of its last steps; ``num_steps`` is 0.
        if new:
            merged = StepLine.merged(new)
            weights = self._num_steps, len(new)
            both = [self._whole, merged.times]
            self._whole = combine(both, lambda values: fmean(values, weights) if len(values) == 2 else values[0])
            self._num_steps += len(new)
            self._values = {**_values_of(merged.times), "slowest_s": merged.slowest_s}
            if lasted_s := sum(line.lasted_s for line in new):
                if samples := sum(line.samples for line in new):
                    of_run["samples_per_s"] = samples / lasted_s
                # Not every step's count is copied from the device: the mean of the known ones is used.
                if merged.counts is not None:
                    of_run["tokens_per_s"] = merged.counts * len(new) / lasted_s
        values = {"age_s": 0.0, **self._values, **self._machine, "step_sent_bytes": self._step_sent}
        return RankFigures(rank=self.rank, **self._who, step=self.num_done, num_steps=len(new), values=values), of_run

    def whole_run(self) -> RankFigures:
        """Return the means over all steps that were read."""
        values = _values_of(self._whole) if self._num_steps else {}
        return RankFigures(rank=self.rank, **self._who, step=self.num_done, num_steps=self._num_steps, values=values)


def _values_of(means: StepTimes) -> dict[str, float | None]:
    """Return times by the names of `RANK_METRICS`; what a rank waited for others follows from the figures of all."""
    parts = {name: getattr(means, name) for name in TIMES if name not in ("total_s", "peers_s")}
    return {"step_s": means.total_s, "own_s": means.total_s - means.part("exposed"), **parts}


# --- the recorder -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The rank of this process, and the group of the ranks.

    Attributes:
        rank, num_ranks: Of the job.
        group: The group for collectives; ``None`` to record without collectives.
        name: The name of the session, if there is no group.
    """

    rank: int
    num_ranks: int
    group: Group | None = None
    name: str | None = None

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank, or only this one's. Collective if there is a group: every rank."""
        group = self.group
        return [value] if group is None else all_gather_object(value, group=group, device=device_for(group))


# [Note: the record of a recovery]
# All ranks that take part in a recovery record it, as any of them, rank zero too, may be the next that is lost. A
# process that takes the place of a lost rank continues its file and its session. The others do not wait for it, so it
# opens its record without collectives.

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
# The recovery in which this process has joined a running job.
_joined: Event | None = None


def is_late() -> bool:
    """Return whether this process took the place of a lost rank, or is about to."""
    return _joined is not None or JOINS in os.environ


def end_recoveries() -> None:
    """Make records that are created from now on those of a process that has begun with the others."""
    global _joined
    _joined = None


def num_recorded() -> int:
    """Return the number of steps done by the records of this process, or by those of the ranks that it has joined."""
    return max([0 if _joined is None else _joined.step, *(recorder.num_done() for recorder in _recorders)])


def record_recovery(report: RecoveryReport, place: Place, num_done: int, *, joins: bool) -> None:
    """Record a recovery in all records of this process, which go on with the ranks of ``place``.

    On every rank, in the same order.

    Args:
        report: Of the recovery.
        place: This rank, and the group of all that go on.
        num_done: Number of steps done, as `num_recorded` counts them, without those of the attempt that failed.
        joins: Whether this process took the place of a lost rank; then it is also in a record that is created later.
    """
    global _joined
    reason, _, cause = report.why.partition("\n")
    text = "; ".join(filter(None, (reason, report.text, f"{report.num_bytes:,} bytes copied")))
    text = "\n".join(filter(None, (text, cause)))
    event = Event(event="recovery", step=num_done, time=report.lost_at_s, seconds=report.seconds, text=text)
    _joined = event if joins else _joined
    for recorder in _recorders:
        recorder.go_on(event, place)


class Recorder:
    """Records the steps and events of this rank, and passes those of the run to subscribers on rank zero.

    ``fit`` and ``monitor`` give it the `StepMarks` of each step; see [Note: in another thread].

    Collective if there is a folder and ``place`` has a group: every rank creates one at the same point.

    Args:
        place: This rank.
        devices: Of this process; it reads the events of the first.
        run: A snapshot with the values of the run that do not change.
        first_step: Number of steps done before.
        run_dir: The folder of the record, created if it does not exist; each machine may have its own. None if the run
            is not recorded. When the run begins, the record of an earlier run is kept in a folder within it.
        log_to: The sinks; rank zero opens them.
        memory: The folder in which sinks keep what they need to continue; by default ``run_dir``.
        facts: Returns what else ``run.json`` and the sinks say about the session; called on rank zero.
        steps_per_epoch: None for a stream.
        num_skipped: Returns the number of steps skipped so far.

    Attributes:
        place: This rank; after a recovery, with another group.
        num_done: Returns the number of steps done.
        on_recovery: Called with the number of steps that count as done from then on.
        keys: Where the ranks post their figures; None if nobody reads them.
        means: The figures of this rank.
        sampler: Samples this process and its devices.
        sinks: The open sinks; only rank zero has any.

    Raises:
        ConfigurationError: On every rank: a rank cannot write into the folder, or a sink cannot be opened.
    """

    def __init__(
        self,
        place: Place,
        devices: Sequence[torch.device],
        run: Snapshot,
        *,
        first_step: int = 0,
        run_dir: Path | None = None,
        log_to: Sequence[str] = (),
        memory: str | Path | None = None,
        facts: Callable[[], dict[str, Any]] = dict,
        steps_per_epoch: int | None = None,
        num_skipped: Callable[[], int] = lambda: 0,
    ) -> None:
        self.place, self._device, self._first_step, self._run_dir = place, devices[0], first_step, run_dir
        self.num_done: Callable[[], int] = lambda: first_step
        self.on_recovery: Callable[[int], None] = lambda num_done: None
        self._steps_per_epoch, self._num_skipped = steps_per_epoch, num_skipped
        # Replaced by the recording thread only; the training thread sets the number of ranks, at a recovery.
        self._run = replace(run, num_restarts=num_restarts())
        self._world_size = run.world_size
        self._device_names = ", ".join(map(str, devices))
        self.means = RankMeans(place.rank, self._device_names, first_step)
        self.sampler = MachineSampler(devices)
        self._writer: record.LineWriter | None = None
        self.sinks: list[MetricsSink] = []
        self._of_lead = log_to, memory, facts
        if run_dir is not None or log_to:
            about = {"num_steps": run.num_steps, "world_size": place.num_ranks, "device": str(self._device)}
            self._open(log_to, memory, about | facts() if place.rank == 0 else {})
        self._queue: deque[StepMarks | Event] = deque(maxlen=_MOST_WAITING)
        self._downsampler = Downsampler()
        self._last: StepMarks | None = None
        self._last_begin: tuple[Mark, float] | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        # Of the run, on rank zero.
        self.keys: StatusKeys | None = None
        self._deliveries: list[Delivery] = []
        self._events: list[Event] = []
        self._num_reports = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._began_s = time.perf_counter()
        # Number of steps, and time, when the first steps, which allocate and compile, were found to be done.
        self._first_done = first_step, 0.0
        restarts = self._run.num_restarts
        if _joined is not None:
            self.event(replace(_joined, step=first_step))
        elif restarts:
            self.event(Event(event="restart", text=f"start {restarts + 1} of this run", step=first_step))
        if first_step and not is_late():
            self.event(Event(event="resume", text=f"resumed after step {first_step}", step=first_step))
        _recorders.add(self)

    def _open(self, log_to: Sequence[str], memory: str | Path | None, facts: dict[str, Any]) -> None:
        """Open the file of this rank and the sinks, and describe the session in ``run.json``. Collective."""
        place, folder, restarts = self.place, self._run_dir, self._run.num_restarts
        is_fresh = not (self._first_step or restarts or is_late())
        began_at, problem = time.time(), None
        self._before: list[Any] = []
        if folder is not None and not is_fresh:
            self._before = read_object(folder / record.RUN_FILE).get("sessions", [])
        goes_on = self._before.pop() if self._before and is_late() else {}
        if is_late():
            place = replace(place, group=None, name=goes_on.get("run", place.name))
        # A rank that cannot open them takes part in the exchange, so that all ranks raise, and none waits for it.
        try:
            if folder is not None:
                # Of a rank that comes late, not its rank in the group, which is lower if another one is still missing.
                number = os.environ["RANK"] if is_late() else place.rank
                self._writer = record.LineWriter(path := folder / f"rank-{number}.jsonl", fresh=is_fresh)
        except ConfigurationError as error:
            problem = f"Rank {place.rank}: {error}"
        if place.rank == 0 and problem is None and log_to:
            info = run_info(facts, memory or folder, self._first_step, is_fresh=is_fresh)
            self.sinks, problem = open_sinks(log_to, info)
        about = {"host": platform.node(), "pid": os.getpid(), "device": self._device_names}
        # The number of the machine by torchrun, as containers may have equal host names.
        own_facts = {**about, "node": os.environ.get("GROUP_RANK", "0")}
        gathered = place.gather([own_facts, place.name or f"{began_at:.6f}-{os.getpid()}", problem])
        if problems := [problem for *_, problem in gathered if problem is not None]:
            for sink in self.sinks:
                sink.close()
            if self._writer is not None:
                self._writer.close()
                if path.stat().st_size == 0:  # the folder may be another run's
                    path.unlink()
            raise ConfigurationError(problems[0])
        if folder is None or self._writer is None:
            return
        run = {"run": gathered[0][1], "first_step": self._first_step}  # the name that rank 0 proposes
        self._writer.add({"kind": "start", **run, "rank": place.rank, **about, "time": began_at})
        # Without a group, rank zero knows only itself.
        ranks = [rank for rank, *_ in gathered] + [{} for _ in range(place.num_ranks - len(gathered))]
        session = {**run, "began_at": began_at, "num_restarts": restarts, "ranks": ranks}
        self._session: dict[str, Any] = goes_on or {**session, **record.how_called(), **facts}
        if is_fresh and place.rank == 0:
            keep_rest_aside(folder, place.num_ranks)
        self._describe()

    def _describe(self) -> None:
        """Write ``run.json`` on rank zero; ignore errors."""
        if self.place.rank != 0 or self._run_dir is None:
            return
        content = {"version": record.VERSION, "sessions": [*self._before, self._session]}
        with suppress(OSError):
            replace_file(self._run_dir / record.RUN_FILE, json.dumps(content, indent=1))

    # --- in the training thread: nothing blocks ---

    def add(self, step: StepMarks) -> None:
        """Add a step, which the device may not have completed."""
        self._last = step
        self._queue.append(step)

    def event(self, event: Event) -> None:
        """Add an event."""
        self._queue.append(event)

    def recent_events(self) -> list[Event]:
        """Return the events that rank zero may not have delivered."""
        return [*self._events, *(item for item in list(self._queue) if isinstance(item, Event))]

    # --- begin and end ---

    def subscribe(self, display: Subscriber | None, recent: Iterable[Event] = ()) -> None:
        """Pass the figures and events of all ranks to the sinks and to ``display``, if this is rank zero.

        Before `start`, and on every rank, in the same order. ``recent``: the `recent_events` of another rank.
        """
        self._events += recent
        if self.place.rank == 0:
            self._deliveries = [Delivery(target) for target in (display, *self.sinks) if target is not None]
        self._meet()

    def _meet(self) -> None:
        # A script may have no process group.
        self.keys = StatusKeys(self.place.rank, self._world_size if is_initialized() else 1)

    def go_on(self, event: Event, place: Place) -> None:
        """Record a recovery, after which the ranks of ``place`` go on. On every rank, in the same order."""
        self.place = place if self.place.group is not None else replace(place, group=None)
        self.means.rank = place.rank
        if place.rank != 0:  # another rank delivers, and not this one any more
            self.close()
            self._deliveries = []
        self.on_recovery(event.step)
        self.event(event)
        self._world_size = place.num_ranks
        if self.keys is not None:
            self._meet()

    def lead(self, display: Subscriber | None) -> None:
        """Do what rank zero does, as this rank has become it: open the sinks, and pass all figures and events on."""
        log_to, memory, facts = self._of_lead
        self._session = getattr(self, "_session", {}) | facts()
        if log_to:
            info = run_info(self._session, memory or self._run_dir, self.num_done(), is_fresh=False)
            self.sinks, problem = open_sinks(log_to, info)
            if problem is not None:
                activity.log(problem)
        self.subscribe(display)

    def start(self) -> threading.Thread:
        """Start the recording thread."""
        period_s = PERIOD_S * max(1.0, self._world_size / _RANKS_A_SECOND)
        self._thread = start_thread(lambda: self._work(period_s), name="lockstep-recorder", device=self._device)
        return self._thread

    def finish(self, *, waits: bool, **facts: Any) -> None:
        """Record all remaining steps and events, and close the files. Blocks some seconds at most for that.

        Args:
            waits: Whether to block until the device has completed the last step; not after an error.
            facts: For ``run.json``.
        """
        if waits and self._last is not None:
            for mark in self._last.device_marks:
                synchronize(mark)
        _recorders.discard(self)
        thread = self._thread or self.start()
        self._over.set()
        thread.join(_JOIN_S)
        if self._run_dir is not None:
            self._session |= facts
            self._describe()

    def close(self) -> None:
        """Close the subscribers. Blocks some seconds at most."""
        for delivery in self._deliveries:
            delivery.close()

    # --- in the recording thread ---

    def _work(self, period_s: float) -> None:
        is_last = self._over.wait(min(_FIRST_S, period_s))
        while guarded(partial(self._beat, is_last)) and not is_last:
            is_last = self._over.wait(period_s)
        if self._writer is not None:
            self._writer.close()

    def _beat(self, is_last: bool) -> None:
        self.drain(at_once=is_last)
        if is_last or self._num_reports % 2 == 0:
            with suppress(Exception):  # the figures of the machine are not available
                line = self.sampler()
                self.means.machine(line)
                self._write(line)
        if is_last and (rest := self._downsampler.rest()) is not None:
            self._write(rest.to_line())
        self.report(is_last=is_last)

    def drain(self, *, at_once: bool = False) -> None:
        """Record the steps that the device has completed, and the events between them. Does not wait for the device.

        Args:
            at_once: Record all events, without pauses, as the run ends. Steps that the device has not completed are
                dropped, as an error may have stopped the device.
        """
        count = 0
        while self._queue:
            item = self._queue[0]
            if not isinstance(item, StepMarks):
                self._events.append(item)
                self._write(item.to_line())
                if item.seconds is not None:
                    self._last_begin = None  # the device is idle: the next step begins when the host launches it
            elif all(mark.query() for mark in item.device_marks):
                self._record_step(item)
            elif not at_once:
                return  # the device has not completed later steps, either
            self._queue.popleft()
            count += 1
            if not at_once and count % _PIECE == 0:
                time.sleep(_PIECE_PAUSE_S)

    def _record_step(self, step: StepMarks) -> None:
        began_s = self._begin_of(step)
        line = StepLine.of(step, began_s, self._steps_per_epoch)
        self.means.add(line)
        if (merged := self._downsampler.add(line)) is not None:
            self._write(merged.to_line())
        if step.has_timeline:
            self._write(Timeline.of(step, began_s).to_line())

    def _write(self, line: Line) -> None:
        if self._writer is not None:
            self._writer.add(line)

    def _begin_of(self, step: StepMarks) -> float:
        """Return when a step began, in Unix time of this host; called for each step in order.

        On CUDA, a step begins when the device reaches it, possibly long after the host launched it. The device only
        measures time between events, so the time is that of the step before plus the difference; not earlier than the
        launch by the host, and not later than when the host found the step completed.
        """
        if isinstance(step.begin, float):
            return step.wall_s + (step.begin - step.began_at)
        began_s = step.wall_s
        if self._last_begin is not None:
            before, before_s = self._last_begin
            latest_s = time.time() - seconds_between(step.begin, step.end)
            began_s = max(began_s, min(before_s + seconds_between(before, step.begin), latest_s))
        self._last_begin = step.begin, began_s
        return began_s

    # --- the figures of all ranks ---

    def report(self, *, is_last: bool = False) -> None:
        """Post the figures; on rank zero, gather and deliver. Blocks some seconds if the store does not answer."""
        figures, of_run = self.means.read()
        events, self._events = self._events, []
        self._num_reports += 1
        if self.place.rank != 0 and self.keys is not None:
            self.keys.post([self._num_reports, asdict(figures)])
        if not self._deliveries:
            # The run is only recorded. If rank zero dies, it may not have delivered these, and this rank may lead.
            since = time.time() - _KEPT_S
            self._events = [event for event in events if event.time + (event.seconds or 0.0) > since]
            return
        self._run = replace(
            self._run,
            time=time.time(),
            step=figures.step,
            epoch=figures.step / self._steps_per_epoch if self._steps_per_epoch else None,
            num_skipped_steps=self._num_skipped(),
            elapsed_s=time.perf_counter() - self._began_s,
            left_s=self._left_s(figures.step),
            ranks=with_waits((figures, *self._others())),
            world_size=self._world_size,  # after the others were read: a recovery may have come meanwhile
            event_counts=Counter(self._run.event_counts) + Counter(event.event for event in events),
            evaluation=reduce(or_, (dict(event.metrics or {}) for event in events), dict(self._run.evaluation)),
            is_last=is_last,
            **of_run,
        )
        for delivery in self._deliveries:
            delivery.give(self._run, events)

    def _left_s(self, step: int) -> float | None:
        """Return the remaining seconds at the mean pace since the first steps, including pauses; None before."""
        (first, first_s), now_s = self._first_done, time.perf_counter()
        if step > first == self._first_step:
            self._first_done = step, now_s
            return None
        if step <= first or not self._run.num_steps:
            return None
        return (now_s - first_s) / (step - first) * (self._run.num_steps - step)

    def _others(self) -> list[RankFigures]:
        """Return the last figures of the other ranks, with their age."""
        now_s = time.monotonic()
        ranks = []
        for rank, note in sorted({} if self.keys is None else self.keys.read().items()):
            try:
                number, values = note
                figures = RankFigures(**values)
            except (TypeError, ValueError):  # other programs can write to the store: a wrong note is ignored
                continue
            if rank not in self._seen or number != self._seen[rank][0]:
                self._seen[rank] = number, now_s
            if figures.rank == rank:
                ranks.append(replace(figures, values={**figures.values, "age_s": now_s - self._seen[rank][1]}))
        return ranks
