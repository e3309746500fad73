"""The record of a run by ``fit``: each step, measured beside the training, into the run's folder and to who watches."""

from __future__ import annotations

import inspect
import json
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lockstep import activity
from lockstep.comm.clocks import ClockOffset, machine_name, measure_clock_offsets
from lockstep.comm.collectives import Group, all_gather_object
from lockstep.comm.store import StatusKeys
from lockstep.comm.world import World
from lockstep.data.batch_iterator import Copy
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.bucket_events import BucketStamps, StepStamps
from lockstep.run_folder import hide_secrets
from lockstep.telemetry.aggregator import (
    Aggregator,
    DirectDispatch,
    RankMetrics,
    RunConstants,
    ThreadedDispatch,
    decode,
    encode,
    with_waits,
)
from lockstep.telemetry.live_view import summary
from lockstep.telemetry.metrics import RankFigures, Snapshot, SnapshotSink
from lockstep.telemetry.provenance import gather
from lockstep.telemetry.resources import MachineSampler, SharedSample
from lockstep.telemetry.run_record import (
    EVENT,
    PERIOD_S,
    RANK_FILES,
    RUN_FILE,
    VERSION,
    Downsampler,
    Event,
    LineWriter,
    Measured,
    OutlierSteps,
    PeriodicThread,
    guarded,
    has_timeline,
    spike_line,
)
from lockstep.telemetry.sinks.factory import Plain, RunInfo, Sinks, open_sinks, parse_targets
from lockstep.telemetry.stragglers import (
    Pace,
    StepTimes,
    Straggler,
    StragglerReporter,
    ends_window,
    is_looked_at,
    pace_of,
)
from lockstep.train.export import whole_file
from lockstep.train.settings import FitSettings
from lockstep.train.task import Task
from lockstep.train.timing import Mark, StepBegin, StepRecord, seconds_between
from lockstep.train.trainer import Trainer

# The files of a recorded run: each rank's own, and what rank zero keeps of the run as a whole in ``run.json``.

Session = dict[str, Any]

COMMAND_VARIABLE = "LOCKSTEP_COMMAND"
"""Where the command line tells its processes how it was called."""


@dataclass(frozen=True)
class Opened:
    """A rank's file, or why it cannot be written."""

    writer: LineWriter | None
    error: str


def open_rank_file(
    folder: Path,
    rank: int,
    devices: Sequence[torch.device],
    *,
    fresh: bool,
    sample: Callable[[], dict[str, Any]] | None = None,
) -> Opened:
    """Return the file of a rank, to which the figures of its machine are written from now on, by ``sample``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sample = sample or MachineSampler(devices)
        return Opened(LineWriter(folder / f"rank-{rank}.jsonl", fresh=fresh, sample=sample), "")
    except ConfigurationError as failure:
        return Opened(None, str(failure))
    except OSError as failure:
        error = f"Cannot record the run in {folder}: {failure.strerror}.\nName another folder (--run-dir DIR)."
        return Opened(None, error)


def describe_rank(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return what a rank tells of itself, with a name for the session, of which the first rank's counts."""
    return {
        "host": platform.node(),
        "machine": machine_name(),
        "pid": os.getpid(),
        "device": ", ".join(str(device) for device in devices),
        "run": f"{time.time():.6f}-{os.getpid()}",
    }


def meet(opened: Opened, mine: dict[str, Any], gather: Callable[[Any], list[Any]]) -> tuple[LineWriter, list[Any]]:
    """Return the file of this rank, and what each rank tells of itself.

    Collective if ``gather`` is: every rank.

    Raises:
        ConfigurationError: On every rank: a rank cannot write its file.
    """
    ranks = gather({**mine, "error": opened.error})
    if errors := [f"Rank {rank}: {each['error']}" for rank, each in enumerate(ranks) if each["error"]]:
        if opened.writer is not None:
            opened.writer.close()
        raise ConfigurationError(errors[0])
    assert opened.writer is not None
    return opened.writer, ranks


def how_called() -> dict[str, str]:
    """Return how this process was called, for the record of the run."""
    command = os.environ.get(COMMAND_VARIABLE) or hide_secrets(sys.orig_argv)
    return {"command": command, "working_directory": str(Path.cwd())}


def start_line(name: str, rank: int, described: dict[str, Any], *, began_at: float, first_step: int) -> dict[str, Any]:
    """Return the line of kind ``start``; see ``START`` in lockstep.telemetry.run_record."""
    mine = {key: described[key] for key in ("host", "pid", "device")}
    return {"kind": "start", "run": name, "rank": rank, **mine, "time": began_at, "first_step": first_step}


def clocks_line(offsets: Sequence[ClockOffset], at: float) -> dict[str, Any]:
    """Return how far the ranks' clocks were apart at a time, as ``run.json`` tells it."""
    return {
        "time": at,
        "offsets_s": [offset.offset_s for offset in offsets],
        "errors_s": [offset.error_s for offset in offsets],
    }


class RunFile:
    """What rank zero keeps of the sessions of a run.

    Args:
        folder: Of the run.
        session: Of this start; may change until it is written.
        world_size: Ranks of this start.
        fresh: Whether the run begins anew: what was there before is forgotten.
    """

    def __init__(self, folder: Path, session: Session, *, world_size: int, fresh: bool) -> None:
        self._path = folder / RUN_FILE
        self.session = session
        if fresh:
            _forget_ranks(folder, world_size)
        self._before = [] if fresh else _sessions_in(self._path)

    def write(self) -> None:
        """Write all sessions. Blocks for the disk; what cannot be written is missing."""
        record = {"version": VERSION, "sessions": [*self._before, self.session]}
        with suppress(OSError), whole_file(self._path) as path:
            path.write_text(json.dumps(record, indent=1), encoding="utf-8")


def _forget_ranks(folder: Path, world_size: int) -> None:
    """Remove what ranks have left that an earlier run in this folder had and this one has not."""
    for path in folder.glob(RANK_FILES):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal() and int(number) >= world_size:
            with suppress(OSError):
                path.unlink()


def _sessions_in(path: Path) -> list[Session]:
    """Return what is known of the sessions before; nothing if the file is gone or broken."""
    try:
        sessions: list[Session] = json.loads(path.read_text(encoding="utf-8"))["sessions"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return sessions


# The lines that are recorded of a step: pure functions of what was measured.


def step_line(pending: Pending, measured: Measured, began_s: float, steps_per_epoch: int | None) -> dict[str, Any]:
    """Return the line of kind ``step``; see ``STEP`` in lockstep.telemetry.run_record."""
    record = pending.record
    values = pending.numbers()
    interval_s = pending.interval_s
    total_s = round(measured.total_s, 7)
    return {
        "kind": "step",
        "step": record.step,
        "num_steps": 1,
        "epoch": round(record.step / steps_per_epoch, 6) if steps_per_epoch else None,
        "time": round(began_s, 6),
        "interval_s": _short(interval_s),
        "total_s": total_s,
        "slowest_s": total_s,
        "slowest_step": record.step,
        "data_wait_s": _short(measured.data_wait_s),
        "copy_s": _short(measured.copy_s),
        "forward_s": _short(measured.forward_s),
        "backward_s": _short(measured.backward_s),
        "exposed_s": _short(measured.exposed_s),
        "hidden_s": _short(measured.hidden_s),
        "optimizer_s": _short(measured.optimizer_s),
        "loss": values.loss,
        "learning_rate": pending.learning_rate,
        "grad_norm": values.grad_norm,
        "samples": record.num_samples,
        "samples_per_s": round(record.num_samples / (interval_s or total_s), 3),
        "counts": values.counted,
        "tokens_per_s": None if values.counted is None else round(values.counted / (interval_s or total_s), 3),
    }


def timeline_line(pending: Pending, began_s: float) -> dict[str, Any]:
    """Return the line of kind ``timeline``; see ``TIMELINE`` in lockstep.telemetry.run_record."""
    start = pending.record.watch.start

    def since(mark: Mark) -> float:
        return round(seconds_between(start, mark), 7)

    stamps = pending.stamps
    buckets = [] if stamps is None else bucket_rows(stamps, since)
    waited = None if stamps is None else stamps.waited
    return {
        "kind": "timeline",
        "step": pending.record.step,
        "time": round(began_s, 6),
        "spans": [
            [name[:-2], round(begin, 7), round(end, 7)]
            for name, begin, end in pending.record.watch.spans()
            if end > begin
        ],
        "buckets": buckets,
        "waited_from": None if waited is None else since(waited[0]),
        "waited_until": None if waited is None else since(waited[1]),
    }


def bucket_rows(stamps: StepStamps, since: Callable[[Mark], float]) -> list[list[float]]:
    """Return the buckets of a timeline; ``since`` tells when a moment was, after the beginning of the step."""
    return [
        [each.position, each.size_bytes, since(each.ready), since(each.sent), since(each.done)]
        for each in stamps.buckets
        if each.sent is not None and each.done is not None
    ]


def hidden_s(stamps: StepStamps | None, start: Mark) -> float | None:
    """Return the time in which buckets were on their way while this rank still worked on backward."""
    if stamps is None or stamps.waited is None:
        return None
    until = seconds_between(start, stamps.waited[0])
    hidden = reached = 0.0
    for each in stamps.buckets:
        if each.sent is not None and each.done is not None:
            sent, done = seconds_between(start, each.sent), min(until, seconds_between(start, each.done))
            hidden += max(0.0, done - max(sent, reached))
            reached = max(reached, done)
    return hidden


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 7)


# What a step took by what it went into, from what it left behind: pure functions.


def measure(pending: Pending) -> Measured:
    """Return the seconds of a step that is known; waiting is taken out of the phases in which it happened."""
    watch = pending.record.watch
    laps, waited = watch.laps, watch.waited_s
    parts = {"data_wait_s": 0.0, "forward_s": 0.0, "backward_s": 0.0, "communication_s": 0.0, "optimizer_s": 0.0}
    elsewhere_s = 0.0
    before = laps[0][1]
    on_host = isinstance(before, float)
    for index in range(1, len(laps)):
        phase, mark = laps[index]
        took_s = mark - before if on_host else seconds_between(before, mark)  # type: ignore[operator]
        before = mark
        if phase != "communication_s" and (waited_s := waited[index] - waited[index - 1]):
            took_s -= waited_s
            elsewhere_s += waited_s
        parts[phase] += took_s
    data_wait_s, forward_s, backward_s, communication_s, optimizer_s = parts.values()
    in_backward_s = waited_in_backward_s(pending)
    return Measured(
        data_wait_s + forward_s + backward_s + communication_s + optimizer_s + elsewhere_s,
        data_wait_s,
        forward_s,
        max(0.0, backward_s - in_backward_s) if in_backward_s else backward_s,
        optimizer_s,
        None if in_backward_s is None else in_backward_s + communication_s + elsewhere_s,
        sum(seconds_between(*copy) for copy in pending.copies) if pending.copies else None,
        hidden_s(pending.stamps, laps[0][1]) if pending.closely else None,
    )


def waited_in_backward_s(pending: Pending) -> float | None:
    """Return how long backward waited for communication after its own work, if that is known."""
    stamps = pending.stamps
    if stamps is None:
        return pending.exposed_s
    if stamps.exposed_s is not None:
        return stamps.exposed_s
    return None if stamps.waited is None else seconds_between(*stamps.waited)


# The file of a rank: the lines of its steps and events, on their way to a thread that writes them.


class RecordedFile:
    """Takes steps and events in their order.

    Args:
        writer: Of the file.
        steps_per_epoch: None for a stream.
    """

    def __init__(self, writer: LineWriter, steps_per_epoch: int | None) -> None:
        self._writer, self._steps_per_epoch = writer, steps_per_epoch
        self._thinner, self._begins = Downsampler(), StepBegin()

    def step(self, pending: Pending, measured: Measured) -> None:
        """Take a step that is known."""
        began_s = self._begins.of(
            pending.record.watch.start,
            wall_s=pending.wall_s,
            began_at=pending.began_at,
            total_s=measured.total_s,
        )
        line = self._thinner.add(step_line(pending, measured, began_s, self._steps_per_epoch))
        if line is not None:
            self._writer.add(line)
        if pending.closely:
            self._writer.add(timeline_line(pending, began_s))

    def event(self, line: Mapping[str, Any]) -> None:
        """Take an event."""
        self._writer.add({"kind": "event", **{name: line[name] for name in EVENT}})
        if line["seconds"] is not None:
            self._begins.forget()

    def close(self) -> None:
        """Write what is left. Blocks some seconds at most, for the disk."""
        if (rest := self._thinner.rest()) is not None:
            self._writer.add(rest)
        self._writer.close()


# Takes the steps of this rank as they are done, for whoever wants to know of them; see docs/reference/metrics.md.
#
# [Note: no waiting]
# What a step leaves behind is put into a queue, and that is all that is done in the thread that trains. Another thread
# comes by now and then (`Recorder.drain`), looks whether the device has come to the step's end, for which nobody waits,
# and works out what it took: a few steps at a time, for while it runs Python, the one that trains cannot. On CUDA the
# loss is copied to pinned memory on the step's own stream: of every step if there is a file, else now and then.

_PAUSES = ("evaluation", "checkpoint", "profile")
"""Events for which training stands still."""

_PIECE, _PIECE_PAUSE_S = 32, 0.001
_BEHIND = 50_000
"""So many steps in the queue, and there are no pauses any more."""
_LOSS_EVERY_S = 0.5


class StepValues(NamedTuple):
    """What a step computed, as far as it was read from the device."""

    loss: float | None
    grad_norm: float | None
    counted: float | None


class Pending(NamedTuple):
    """A step whose figures the device may still owe."""

    record: StepRecord
    wall_s: float
    began_at: float
    values: Sequence[Tensor]
    arrived: torch.cuda.Event | None
    learning_rate: float | None
    stamps: StepStamps | None
    closely: bool
    exposed_s: float | None
    copies: Sequence[Copy]
    interval_s: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether the device has come to the end of all that is to be read."""
        if not self.record.watch.is_over or (self.arrived is not None and not self.arrived.query()):
            return False
        return all(end.query() for _, end in self.copies)

    def numbers(self) -> StepValues:
        """Return what was computed, if it is to be had; see ``is_known``."""
        if not self.values:
            return StepValues(None, None, None)
        loss, *others = map(float, self.values)
        norm = others.pop(0) if self.record.grad_norm is not None else None
        return StepValues(loss, norm, others.pop(0) if others else None)


class Recorder:
    """Takes the steps and events of this rank. One thread trains, another one calls `drain`.

    Args:
        loop: That is driven.
        figures: Gets what each step took.
        file: Gets the lines, if the run is recorded.
    """

    def __init__(self, loop: Trainer, figures: RankMetrics, file: RecordedFile | None = None) -> None:
        self._loop, self._figures, self._file = loop, figures, file
        self._spikes = OutlierSteps()
        self._device = loop.device
        self._is_alone = len(loop.devices) == 1 and (loop.group is None or loop.group.size() == 1)
        stamps = BucketStamps(loop.device)
        self._stamps = stamps if loop.strategy.stamp_buckets(stamps) else None
        self._copies: list[Copy] = []
        loop.feed.copies = self._copies
        self._open: Pending | None = None  # the last step, until it is known how long it lasted
        self._queue: deque[tuple[Pending, float | None] | dict[str, Any]] = deque()
        self._draining = threading.Lock()
        self._began_at = self._wall_s = 0.0
        self._loss_at = float("-inf")
        self._is_closely = False
        self._has_ended = False
        self._paused_at: float | None = None

    def begin(self) -> None:
        """A step is about to begin."""
        self._paused_at = None
        self._is_closely = has_timeline(self._loop.num_steps_done)
        if self._stamps is not None:
            self._stamps.closely = self._is_closely
        self._wall_s, self._began_at = time.time(), time.perf_counter()
        self._release(self._began_at)

    def step(self, record: StepRecord) -> None:
        """Take a step that has just ended on the host. Does not block."""
        values, arrived = self._values_of(record)
        rate = self._loop.optimizer.param_groups[0]["lr"]
        if isinstance(rate, Tensor):
            rate = None if rate.is_cuda else float(rate)
        stamps = None if self._stamps is None else self._stamps.take()
        exposed_s = self._own_exposed_s() if stamps is None else None
        copies = self._copies[:]
        self._copies.clear()
        self._open = Pending(
            record, self._wall_s, self._began_at, values, arrived, rate, stamps, self._is_closely, exposed_s, copies
        )

    def pause(self) -> None:
        """Training stands still from now on, for the event that comes next."""
        self._paused_at = time.perf_counter()
        self._release(self._paused_at)

    def event(self, event: Event, text: str, metrics: Mapping[str, float] | None = None) -> None:
        """Take an event, for which training stood still since `pause` if that was called."""
        seconds = None
        if event in _PAUSES and self._paused_at is not None:
            seconds, self._paused_at = time.perf_counter() - self._paused_at, None
        line: dict[str, Any] = {"kind": "event", "event": event, "step": self._loop.num_steps_done}
        line |= {"time": time.time() - (seconds or 0.0), "seconds": seconds, "text": text}
        self._queue.append(line if metrics is None else {**line, "metrics": dict(metrics)})
        self._has_ended |= event in ("end", "stop")

    def finish(self) -> None:
        """Take in what is left, as there are no more steps. Blocks for the device, unless an error is on its way."""
        error = sys.exc_info()[1]
        has_failed = error is not None and not self._has_ended  # not one that fit was called in the handler of
        if error is not None and has_failed:
            first = (str(error).splitlines() or [""])[0]
            self.event("error", f"{type(error).__name__}: {first}")
        self._release(None)
        if not has_failed and self._queue and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.drain(at_once=True)

    def drain(self, *, at_once: bool = False) -> None:
        """Take in the steps that the device is done with, and the events between them; ``at_once`` without pauses."""
        with self._draining:
            self._drain(at_once=at_once)

    def _drain(self, *, at_once: bool) -> None:
        count = 0
        while self._queue:
            item = self._queue[0]
            if isinstance(item, dict):
                self._take_event(item)
            elif item[0].is_known:
                self._take(*item)
            else:
                return
            self._queue.popleft()
            count += 1
            if not at_once and count % _PIECE == 0 and len(self._queue) < _BEHIND:
                time.sleep(_PIECE_PAUSE_S)

    def _take(self, pending: Pending, interval_s: float | None) -> None:
        measured, numbers, record = measure(pending), pending.numbers(), pending.record
        self._figures.step(
            record.step,
            measured,
            interval_s=interval_s,
            num_samples=record.num_samples,
            num_tokens=numbers.counted,
            loss=numbers.loss,
            learning_rate=pending.learning_rate,
            grad_norm=numbers.grad_norm,
        )
        if pending.closely and pending.stamps is not None:
            for stamp in pending.stamps.buckets:
                if stamp.sent is not None and stamp.done is not None:
                    self._figures.bucket(stamp.position, stamp.size_bytes, seconds_between(stamp.sent, stamp.done))
        if self._file is not None:
            self._file.step(pending._replace(interval_s=interval_s), measured)
        if (text := self._spikes.check(measured)) is not None:
            self._take_event(spike_line(record.step, pending.wall_s, text))

    def _take_event(self, line: dict[str, Any]) -> None:
        self._figures.event(line)
        if self._file is not None:
            self._file.event(line)

    def _values_of(self, record: StepRecord) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Return what is to be read of the step, and the event after which it is on the host."""
        values = [value for value in (record.loss, record.grad_norm, record.count) if value is not None]
        if self._device.type != "cuda":
            return values, None
        if self._file is None and self._began_at - self._loss_at < _LOSS_EVERY_S:
            return [], None
        self._loss_at = self._began_at
        there = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
        there.copy_(torch.stack([value.detach().double() for value in values]), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(self._device))
        return list(there), arrived

    def _release(self, until: float | None) -> None:
        """Take notice that the last step lasted ``until`` now."""
        if self._open is not None:
            interval_s = None if until is None else until - self._open.began_at
            self._queue.append((self._open, interval_s))
            self._open = None

    def _own_exposed_s(self) -> float | None:
        """Return what is known of exposed communication without buckets."""
        exposed_s = self._loop.strategy.exposed_s
        if exposed_s is not None and self._device.type == "cpu":
            return exposed_s * self._loop.settings.accumulate
        return 0.0 if self._is_alone else None


# The folder in which a run is recorded: whose files are in it, and what is known of the run as a whole.


@final
class RunDir:
    """The folder of a run: each rank writes its own steps, rank zero also keeps ``run.json``.

    Collective: every rank makes one. Blocks until all have.

    Args:
        task, settings, world, loop: Of the run; the settings name the folder. It is made if it is not there; the ranks
            of several machines may have one each.
        num_steps: Of the whole run.
        sample: Tells of this rank's machine.

    Attributes:
        writer: Of this rank's file.

    Raises:
        ConfigurationError: On every rank: a rank cannot write there.
    """

    def __init__(
        self,
        task: Task,
        settings: FitSettings,
        world: World,
        loop: Trainer,
        *,
        num_steps: int,
        sample: Callable[[], dict[str, Any]],
    ) -> None:
        assert settings.run_dir is not None
        folder = Path(settings.run_dir)
        self._world, self._loop = world, loop
        num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        first_step = loop.num_steps_done
        fresh = not first_step and not num_restarts
        provenance = asdict(gather(_file_of(task))) if world.is_rank_zero else {}
        opened = open_rank_file(folder, world.rank, loop.devices, fresh=fresh, sample=sample)
        began_at = time.time()
        mine = describe_rank(loop.devices)
        gather_all = partial(all_gather_object, group=world.group, device=world.device)
        self.writer, ranks = meet(opened, mine, gather_all)
        name = ranks[0]["run"]
        self.writer.add(start_line(name, world.rank, mine, began_at=began_at, first_step=first_step))
        self._file: RunFile | None = None
        offsets = measure_clock_offsets(world.group, world.device)
        if world.is_rank_zero:
            parameters = [parameter for group in loop.optimizer.param_groups for parameter in group["params"]]
            session = {
                "run": name,
                "began_at": began_at,
                "first_step": first_step,
                "num_steps": num_steps,
                "num_restarts": num_restarts,
                "task": task.name,
                "counts": task.counts,
                **how_called(),
                "settings": {name: _json_value(value) for name, value in asdict(settings).items()},
                "global_batch_size": loop.plan.batch_size,
                "num_parameters": sum(parameter.numel() for parameter in parameters),
                "gradient_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
                "backend": world.backend if loop.group is not None else None,
                "ranks": [{name: rank[name] for name in ("host", "pid", "device", "machine")} for rank in ranks],
                "clocks": {"start": clocks_line(offsets, began_at)},
                "provenance": provenance,
            }
            self._file = RunFile(folder, session, world_size=world.world_size, fresh=fresh)
            self._file.write()

    def finish(self) -> None:
        """Take down what is known at the end. Collective: every rank. Blocks for some small messages."""
        offsets = measure_clock_offsets(self._world.group, self._world.device)
        if self._file is not None:
            self._file.session["clocks"]["end"] = clocks_line(offsets, time.time())
            self._file.session["workers"] = self._loop.workers
            self._file.write()


def _file_of(task: Task) -> Path | None:
    with suppress(OSError, TypeError):
        return Path(inspect.getfile(task.loss))
    return None


def _json_value(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


# The losses of a run, read from the device a few at a time, and how fast it goes.

_MAX_UNREAD = 256


@dataclass
class Throughput:
    """Takes every step's loss without waiting for it, and measures the throughput.

    The first step, which also allocates and compiles, is left out of the throughput as soon as there is a second.
    """

    losses: list[float] = field(default_factory=list)
    num_samples: int = 0
    num_counted: float = 0.0
    _unread: list[Tensor] = field(default_factory=list)
    _unread_counts: list[Tensor] = field(default_factory=list)
    _num_timed: int = 0
    _elapsed_s: float = 0.0
    _first: tuple[int, float] | None = None
    _started_at: float = 0.0

    def start(self) -> None:
        """Start the clock: a step begins."""
        self._started_at = time.perf_counter()

    def add(self, record: StepRecord) -> None:
        """Add a step that ends now. Blocks every 256 steps until the device has come to it."""
        self.num_samples += record.num_samples
        self._unread.append(record.loss)
        if record.count is not None:
            self._unread_counts.append(record.count)
        if len(self._unread) >= _MAX_UNREAD:
            self.read()
        self._count(record.num_samples)

    def read(self) -> list[float]:
        """Return all losses so far. Blocks until the device has come to the last step."""
        if self._unread:
            self.losses += torch.stack(self._unread).tolist()
            self._unread = []
        if self._unread_counts:
            self.num_counted += float(torch.stack(self._unread_counts).sum())
            self._unread_counts = []
        return self.losses

    def stop(self) -> None:
        """Wait for the device, and count that as training: something else comes next."""
        self._started_at = time.perf_counter()
        self.read()
        self._count(0)

    def _count(self, num_samples: int) -> None:
        elapsed_s = time.perf_counter() - self._started_at
        if self._first is None:
            self._first = (num_samples, elapsed_s)
            return
        self._num_timed += num_samples
        self._elapsed_s += elapsed_s

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batches per second of training."""
        num_samples, elapsed_s = self._num_timed, self._elapsed_s
        if num_samples == 0 and self._first is not None:
            num_samples, elapsed_s = self._first
        return num_samples / elapsed_s if elapsed_s else 0.0

    @property
    def counted(self) -> tuple[float, float] | None:
        """What the losses were means over if not samples, such as tokens: how many, and how many a second.

        None if they were means over samples. Blocks until the device has come to the last step.
        """
        self.read()
        if not self.num_counted:
            return None
        return self.num_counted, self.samples_per_s * self.num_counted / self.num_samples

    def in_words(self, counts: str) -> str:
        """Return the throughput in words; ``counts`` is what the losses count if not samples."""
        text = f"{self.samples_per_s:,.0f} samples/s"
        return text if self.counted is None else f"{text}, {self.counted[1]:,.0f} {counts}/s"


# The sinks that settings ask for, and what they are told of the run.


def make_sinks(task: Task, settings: FitSettings, world: World, loop: Trainer, *, num_steps: int) -> Sinks:
    """Return the sinks of a run that is about to begin, or to go on; only rank zero has any.

    Collective: every rank. Blocks until rank zero has opened them; see `open_sinks`.

    Raises:
        ConfigurationError: On every rank: one of them cannot be opened; says why.
    """
    if not settings.log_to:
        return Sinks()
    targets = parse_targets(settings.log_to)
    return open_sinks(targets, lambda: facts_of(task, settings, world, loop, num_steps=num_steps), world)


def facts_of(task: Task, settings: FitSettings, world: World, loop: Trainer, *, num_steps: int) -> RunInfo:
    """Return what a run is; takes a moment, as it asks for commits."""
    first_step = loop.num_steps_done
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    is_fresh = not first_step and not num_restarts
    # Where checkpoints are, for whoever goes on with them is to go on here, too.
    memory = settings.checkpoint or settings.run_dir
    if memory is not None:
        with suppress(OSError):  # then nothing is remembered
            Path(memory).mkdir(parents=True, exist_ok=True)
    return RunInfo(
        name=task.name,
        config=_config(task, settings, world, loop, num_steps),
        first_step=first_step,
        is_fresh=is_fresh,
        memory=None if memory is None else Path(memory),
    )


def _config(task: Task, settings: FitSettings, world: World, loop: Trainer, num_steps: int) -> dict[str, Plain]:
    """Return all that a run depends on, by name: the settings as they were given, and then what became of them."""
    given = {name: _plain_value(value) for name, value in asdict(settings).items() if value is not None}
    origin = gather(_file_of(task))
    num_parameters = sum(each.numel() for group in loop.optimizer.param_groups for each in group["params"])
    return {
        **given,
        "task": task.name,
        "global_batch_size": loop.plan.batch_size,
        "num_steps": num_steps,
        "num_parameters": num_parameters,
        "world_size": world.world_size,
        "num_devices": len(loop.devices) if loop.group is None else world.world_size,
        "device": str(loop.device),
        "backend": world.backend if loop.group is not None else "none",
        "host": platform.node(),
        "command": how_called()["command"],
        **{f"version/{name}": version for name, version in origin.versions.items()},
        **{f"commit/{name}": commit for name, commit in origin.commits.items()},
        **{f"machine/{name}": fact for name, fact in origin.machine.items() if name != "load"},
    }


def _plain_value(value: object) -> Plain:
    if isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return ", ".join(str(each) for each in value)
    return str(value)


# What a run tells of itself as it goes: taken down on every rank, always, and handed to whoever wants it.
#
# [Note: who gets it]
# Each step is measured by a `Recorder`. From there its figures go into the file of this rank, if the run has a folder
# (docs/reference/metrics.md), and into `Figures`, which every rank posts once a second on a board; rank zero makes
# snapshots of all ranks' figures for the display and the sinks (docs/watching.md). All of that happens in a thread
# beside training.

_RANKS_A_SECOND = 64
"""With more ranks than that, snapshots are made less often."""


@final
class RunRecord:
    """Takes what happens in a run, on every rank.

    Collective: every rank makes one, at the same place. Blocks until all have, if there is a folder.

    Args:
        task, settings, world, loop: Of the run.
        num_steps: Of the whole run.

    Raises:
        ConfigurationError: On every rank: a rank cannot write into the folder.
    """

    def __init__(self, task: Task, settings: FitSettings, world: World, loop: Trainer, *, num_steps: int) -> None:
        self._world, self._loop = world, loop
        num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self._num_ranks = 1 if loop.group is None else world.world_size
        device = ", ".join(str(each) for each in loop.devices)
        first_step = loop.num_steps_done
        self._figures = RankMetrics(
            world.rank, self._num_ranks, host=platform.node(), device=device, first_step=first_step
        )
        self._sample = SharedSample(MachineSampler(loop.devices))
        self._folder = self._file = None
        if settings.run_dir is not None:
            self._folder = RunDir(task, settings, world, loop, num_steps=num_steps, sample=self._sample)
            self._file = RecordedFile(self._folder.writer, loop.plan.order.steps_per_epoch)
        self._recorder = Recorder(loop, self._figures, self._file)
        info = RunConstants(
            num_steps,
            first_step,
            num_restarts=num_restarts,
            steps_per_epoch=loop.plan.order.steps_per_epoch,
            num_skipped=lambda: len(loop.finite.found),
            counts=task.counts,
        )
        self._aggregator = Aggregator(
            self._figures, StatusKeys(world, self._num_ranks), info, world_size=self._num_ranks
        )
        self._beats: PeriodicThread | None = None
        self._num_beats = 0
        self._is_over = False
        if num_restarts:
            self.event("restart", f"started again, for the {_ordinal(num_restarts)} time")
        if first_step:
            self.event("resume", f"went on after step {first_step}")

    def deliver(self, display: SnapshotSink | None, sinks: Iterable[SnapshotSink] = ()) -> None:
        """Have ``display`` and ``sinks`` get snapshots from now on, if this is rank zero."""
        if self._world.is_rank_zero:
            self._aggregator.deliveries += [] if display is None else [DirectDispatch(display)]
            self._aggregator.deliveries += [ThreadedDispatch(sink) for sink in sinks]

    def start(self) -> None:
        """Begin to tell: snapshots are made from now on."""
        self._beats = PeriodicThread(self.beat, PERIOD_S * max(1.0, self._num_ranks / _RANKS_A_SECOND))

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


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


# In ``fit``: compares the ranks' steps now and then, and tells of a rank that keeps the others waiting in each.


class SlowRanks:
    """Looks at some steps of this rank, and then exchanges with the others what they took.

    Args:
        group: The ranks that train together; None: only this process, and nothing is done.
        device: Of this rank.
        say: Called on every rank with a line about a slow one.
    """

    def __init__(self, group: Group | None, device: torch.device, say: Callable[[str], None]) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._device = device
        self._say = say
        self._step = 0
        self._teller = StragglerReporter(self._tell)
        self._number = 0
        self._records: list[tuple[StepRecord, list[tuple[object, object]]]] = []
        self._launcher_asked, activity.callbacks.wants_pace = activity.callbacks.wants_pace, False

    def close(self) -> None:
        """Leave the comparison to the launcher again, if it asked for it before."""
        activity.callbacks.wants_pace, activity.callbacks.waits = self._launcher_asked, None

    def before_step(self) -> None:
        """Have the engine say when this rank's own work is done, if the step is one that is looked at."""
        activity.callbacks.waits = [] if self._group is not None and is_looked_at(self._number) else None

    def after_step(self, record: StepRecord) -> None:
        """Take what the step took. Collective after some steps, the same on every rank: every rank of the group.

        Blocks then until the device has come to the end of the step.
        """
        waits, activity.callbacks.waits = activity.callbacks.waits, None
        if waits:  # engines that do not say what they wait for cannot be compared
            self._records.append((record, waits))
        if self._group is not None and ends_window(self._number):
            self._step = record.step + 1
            self._compare(self._group)
        self._number += 1

    def _tell(self, text: str, straggler: Straggler) -> None:
        self._say(text)

    def _compare(self, group: Group) -> None:
        records, self._records = self._records, []
        mine = asdict(pace_of([_times_of(*each) for each in records])) if len(records) > 1 else None
        paces = all_gather_object(mine, group=group, device=self._device)
        if all(paces):
            self._teller.judge({rank: Pace(**pace) for rank, pace in enumerate(paces)})


def _times_of(record: StepRecord, waits: list[tuple[object, object]]) -> StepTimes:
    times, waited = record.times, record.waited
    exposed_s = sum(seconds_between(start, end) for start, end in waits)
    backward_s = times.backward_s - waited.backward_s
    in_forward_s = max(0.0, exposed_s - backward_s)  # of an engine that exchanges in forward, too
    own = {
        "loader": times.data_wait_s - waited.data_wait_s,
        "forward": max(0.0, times.forward_s - waited.forward_s - in_forward_s),
        "backward": max(0.0, backward_s - exposed_s),
        "optimizer": times.optimizer_s - waited.optimizer_s,
    }
    return StepTimes(**own, waits=times.total_s - sum(own.values()))
