"""The record of a run, written and read here: a file of JSON lines per rank, and ``run.json``. Imports no torch.

[Note: one schema]
Each kind of line is a class below: its fields are the names in the file, which dashboards depend on, and which
docs/reference/metrics.md explains. ``to_line`` writes it and ``read`` checks what it reads, as a record may come from
any source. `VERSION` is increased if a name or a meaning changes, not if one is added.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.base.activity import log, one_line, plural
from lockstep.base.record_files import hide_secrets, open_record
from lockstep.errors import ConfigurationError
from lockstep.telemetry.step_times import PHASES, Mark, StepMarks, StepTimes, combine, mean_of_known, seconds_between

# A line of the file, or an entry of ``run.json``.
Line = Mapping[str, Any]

VERSION = 1

RUN_FILE = "run.json"
RANK_FILES = "rank-*.jsonl"

# A name in ``EVENTS``.
EventName = str

EVENTS = {
    "resume": "the run resumed from a checkpoint",
    "restart": "all ranks were restarted, after a failure or with other machines",
    "recovery": "a rank was lost and the others went on; the time is from the loss until all had the state again",
    "evaluation": "the model was evaluated",
    "checkpoint": "a checkpoint was taken; the time is the pause of training",
    "skipped": "a step was skipped or undone, or a sample left out",
    "straggler": "a rank kept the others waiting in every step",
    "profile": "torch.profiler recorded steps, which were slower; the time is that of writing the trace",
    "remark": "a note of the engine or the loader",
    "stop": "a signal stopped the run gracefully",
    "error": "the run ended with an error on this rank",
    "end": "the run is complete",
}


def kind_of(device: str) -> str:
    """Return the word for a device such as ``cuda:0`` in messages: GPU, CPU, or another type in capitals."""
    return "GPU" if device.startswith(("cuda", "xpu")) else device.partition(":")[0].upper()


# --- the lines --------------------------------------------------------------------------------------------------------

# Fields that may be negative, NaN or infinite; all other numbers are durations, times or counts.
_ANY_NUMBER = ("loss", "learning_rate", "grad_norm")


def _read(cls: type, line: Line) -> dict[str, Any]:
    """Return the numbers of a line that are fields of ``cls``, without unknown ones.

    Raises:
        ValueError, TypeError: A value is not possible.
    """
    values: dict[str, Any] = {}
    for attribute in fields(cls):
        if attribute.type in _NUMBERS and (value := line.get(attribute.name)) is not None:
            number = float(value)  # NaN and infinity are strings in JSON
            if attribute.name not in _ANY_NUMBER and not 0 <= number < math.inf:
                raise ValueError(f"{attribute.name} is out of range")
            values[attribute.name] = int(number) if attribute.type == "int" else number
    return values


# The types of fields that are numbers, as annotations.
_NUMBERS = ("int", "float", "float | None")


def _written(item: Any) -> dict[str, Any]:
    """Return the fields of a line, with times rounded to a tenth of a microsecond."""
    values = {attribute.name: getattr(item, attribute.name) for attribute in fields(item)}
    times = {name: value for name, value in values.items() if isinstance(value, float) and name not in _ANY_NUMBER}
    return values | {name: round(value, 7) for name, value in times.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """A line of kind ``step``: one step of a rank, or the means of several in a row.

    Attributes:
        step: The (first) step, counted from 0.
        num_steps: The number of steps.
        epoch: Passes over the data set before it.
        time: When it began, in Unix time.
        interval_s: From its beginning to that of the next step; None if unknown.
        slowest_s, slowest_step: The longest step.
        times: Its parts.
        loss, learning_rate, grad_norm, samples: Of the last step; samples of the global batch.
        counts: What the loss is a mean over, such as tokens, if that is not samples.
        logged: What a callback has logged, by name: the last values.
    """

    step: int
    num_steps: int = 1
    epoch: float | None = None
    time: float
    interval_s: float | None = None
    slowest_s: float = 0.0
    slowest_step: int = 0
    times: StepTimes
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    samples: float
    counts: float | None = None
    logged: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, step: StepMarks, began_s: float, steps_per_epoch: int | None = None) -> StepLine:
        """Return the line of a step that began at ``began_s``, in Unix time."""
        times = step.times()
        return cls(
            step=step.number,
            epoch=step.number / steps_per_epoch if steps_per_epoch else None,
            time=round(began_s, 6),
            interval_s=step.interval_s,
            slowest_s=times.total_s,
            slowest_step=step.number,
            times=times,
            loss=step.loss,
            learning_rate=step.learning_rate,
            grad_norm=None if step.grad_norm is None else float(step.grad_norm),
            samples=step.samples,
            counts=None if step.counted is None else float(step.counted),
            logged={name: float(value) for name, value in step.logged.items()},
        )

    @classmethod
    def merged(cls, lines: Sequence[StepLine]) -> StepLine:
        """Return one line for several: mean times, the last loss, the longest step."""
        first, slowest = lines[0], max(lines, key=lambda line: line.slowest_s)
        return replace(
            lines[-1],
            step=first.step,
            num_steps=len(lines),
            epoch=first.epoch,
            time=first.time,
            interval_s=mean_of_known(line.interval_s for line in lines),
            slowest_s=slowest.slowest_s,
            slowest_step=slowest.slowest_step,
            times=combine([line.times for line in lines]),
            counts=mean_of_known(line.counts for line in lines),
            logged={name: value for line in lines for name, value in line.logged.items()},
        )

    @classmethod
    def read(cls, line: Line) -> StepLine:
        """Return the line as written."""
        logged = {name: float(value) for name, value in line.get("logged", {}).items()}
        return cls(times=StepTimes(**_read(StepTimes, line)), logged=logged, **_read(cls, line))

    def to_line(self) -> Line:
        """Return the line to write."""
        lasted_s = self.lasted_s or 1e-9
        line = {"kind": "step", **_written(self), **_written(self.times)}
        line["samples_per_s"] = float(f"{self.samples / lasted_s:.7g}")
        line["tokens_per_s"] = None if self.counts is None else float(f"{self.counts / lasted_s:.7g}")
        if not self.logged:
            del line["logged"]
        del line["times"], line["peers_s"]  # what a rank waited for others is only known with the lines of all
        return line

    @property
    def lasted_s(self) -> float:
        """Seconds from its beginning to that of the next step, if known."""
        return self.times.total_s if self.interval_s is None else self.interval_s


class Bucket(NamedTuple):
    """The exchange of a bucket; times in seconds after the beginning of the step."""

    number: int
    size_bytes: int
    ready_s: float
    sent_s: float
    done_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A line of kind ``timeline``: marks of a step, in seconds after its beginning.

    Attributes:
        spans: Phase, begin and end.
        waited_from, waited_until: The wait for gradients after this rank's own work; None if unknown.
    """

    step: int
    time: float
    spans: Sequence[tuple[str, float, float]]
    buckets: Sequence[Bucket]
    waited_from: float | None = None
    waited_until: float | None = None

    @classmethod
    def of(cls, step: StepMarks, began_s: float) -> Timeline:
        """Return the line of a step that began at ``began_s``, in Unix time."""

        def since(mark: Mark) -> float:
            return round(seconds_between(step.begin, mark), 7)

        spans = [(phase, since(begin), since(end)) for phase, begin, end, _ in step.spans]
        spans = [span for span in spans if span[2] > span[1]]
        buckets = [
            Bucket(bucket.position, bucket.size_bytes, since(bucket.ready), since(bucket.sent), since(bucket.done))
            for reduction in step.reductions
            for bucket in reduction.buckets
            if bucket.sent is not None and bucket.done is not None
        ]
        waited = step.reductions[-1].waited if step.reductions else None
        begin, end = (None, None) if waited is None else map(since, waited)
        time = round(began_s, 6)
        return cls(step=step.number, time=time, spans=spans, buckets=buckets, waited_from=begin, waited_until=end)

    @classmethod
    def read(cls, line: Line) -> Timeline:
        """Return the line as written."""
        spans = [(PHASES[PHASES.index(phase)], float(begin), float(end)) for phase, begin, end in line["spans"]]
        buckets = [Bucket(int(number), int(size), *map(float, times)) for number, size, *times in line["buckets"]]
        return cls(spans=spans, buckets=buckets, **_read(cls, line))

    def to_line(self) -> Line:
        """Return the line to write."""
        return {"kind": "timeline", **_written(self)}

    @property
    def waited(self) -> tuple[float, float] | None:
        """Begin and end of the wait for gradients, if known."""
        return None if self.waited_from is None or self.waited_until is None else (self.waited_from, self.waited_until)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A line of kind ``machine``, of resources.py: known figures by name, and the other end of the slowest link."""

    time: float
    figures: Mapping[str, float]
    link_peer: str = ""

    @classmethod
    def read(cls, line: Line) -> Machine:
        """Return the line as written."""
        names = line.keys() - {"kind", "time", "link_peer"}
        figures = {name: float(line[name]) for name in names if line[name] is not None}
        finite = {name: value for name, value in figures.items() if math.isfinite(value)}
        return cls(figures=finite, link_peer=str(line.get("link_peer") or ""), **_read(cls, line))


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of kind ``event``.

    Attributes:
        event: A name in `EVENTS`.
        step: Number of steps done.
        time: When it began, in Unix time; by default now.
        seconds: The pause of training, if there was one.
        text: What happened, in words.
        metrics: The results of an evaluation by name; None for other events.
    """

    event: EventName
    step: int
    time: float = field(default_factory=time.time)
    seconds: float | None = None
    text: str = ""
    metrics: Mapping[str, float] | None = None

    @classmethod
    def read(cls, line: Line) -> Event:
        """Return the line as written."""
        if line["event"] not in (*EVENTS, "spike"):  # which earlier versions recorded
            raise ValueError("there is no such event")
        metrics = line.get("metrics") and {name: float(value) for name, value in line["metrics"].items()}
        text = str(line.get("text", ""))[:2000]
        return cls(**_read(cls, line), event=line["event"], text=text, metrics=metrics)

    def to_line(self) -> Line:
        """Return the line to write."""
        return {"kind": "event", **_written(self)}


# --- fewer lines for long runs ----------------------------------------------------------------------------------------


class Downsampler:
    """Merges the lines of single steps into the lines to write.

    Args:
        singly: After so many lines, each line covers twice as many steps as before.
    """

    def __init__(self, singly: int = 8192) -> None:
        self._singly = singly
        self._num_lines = 0
        self._held: list[StepLine] = []

    def add(self, line: StepLine) -> StepLine | None:
        """Add the line of a step; return a line to write if there are enough steps for one."""
        self._held.append(line)
        return self.rest() if len(self._held) >= 2 ** (self._num_lines // self._singly) else None

    def rest(self) -> StepLine | None:
        """Return one line for the steps not yet written, if any."""
        lines, self._held = self._held, []
        self._num_lines += bool(lines)
        return StepLine.merged(lines) if len(lines) > 1 else next(iter(lines), None)


# --- the file ---------------------------------------------------------------------------------------------------------


def guarded(act: Callable[[], None], consequence: str = "this run is no longer recorded") -> bool:
    """Call ``act``. If it raises, print the ``consequence`` and return False, as it must not end the run."""
    try:
        act()
    except Exception as error:
        log(f"{consequence}: {one_line(error)}")
        return False
    return True


# Kept, as `json.dumps` would make one for each line.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class LineWriter:
    """A file of JSON lines. If writing fails, as on a full disk, this is reported once, and the run continues.

    Args:
        path: The file; its folder is created if it does not exist.
        fresh: Whether the run begins: then an earlier record is kept aside.

    Raises:
        ConfigurationError: The file cannot be opened.
    """

    def __init__(self, path: Path, *, fresh: bool) -> None:
        try:
            # `os.write` has no buffer that a forked process could write a second time.
            self._file = open_record(path, fresh=fresh)
        except OSError as error:
            text = f"Cannot record the run in {path.parent}: {error.strerror}.\nName another folder (--run-dir DIR)."
            raise ConfigurationError(text) from error
        self._path, self._is_well = path, True
        # A killed process may have left a part of a line.
        with path.open("rb") as file:
            file.seek(-min(1, path.stat().st_size), os.SEEK_END)
            self._is_cut = file.read(1) not in (b"", b"\n")

    def add(self, line: Line) -> None:
        """Write ``line``. Blocks for the disk."""
        if self._is_well:
            data = ("\n" * self._is_cut + to_json(line)).encode()
            self._is_well = guarded(partial(self._write, data), f"{self._path} is no longer written")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]
        self._is_cut = False


def to_json(line: Line) -> str:
    """Return ``line`` as one line of JSON. NaN and infinities, which JSON does not have, become strings."""
    try:
        return _ENCODER.encode(line) + "\n"
    except ValueError:
        return _ENCODER.encode(json.loads(json.dumps(line), parse_constant=lambda name: str(float(name)))) + "\n"


def how_called() -> dict[str, str]:
    """Return the command line and the working directory of this process, without secrets."""
    # A command sets the variable for its processes.
    command = os.environ.get("LOCKSTEP_COMMAND") or hide_secrets(sys.orig_argv)
    return {"command": command, "working_directory": str(Path.cwd())}


def config_of(session: Line) -> dict[str, str | int | float]:
    """Return settings, sizes, versions, commits and the machine of a session by name, without what is unknown."""
    settings, provenance = session.get("settings"), session.get("provenance") or {}
    values = {**(settings if isinstance(settings, dict) else {}), **session, "recorded": provenance.get("when")}
    for group, facts in provenance.items():
        if isinstance(facts, dict):
            values |= {f"{group.removesuffix('s')}/{name}": fact for name, fact in facts.items()}
    config = {name: value for name, value in values.items() if name not in _OF_SESSION and value is not None}
    return {name: value if isinstance(value, int | float) else str(value) for name, value in config.items()}


# What differs between any two sessions, or is shown by its parts.
_OF_SESSION = ("run", "began_at", "ranks", "clocks", "settings", "provenance")


def num_restarts() -> int:
    """Return how often the launcher has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


# --- the record as data, with a list of missing or broken parts -------------------------------------------------------


@dataclass
class RankRecord:
    """The record of one rank, with times on the clock of the first rank; see `_align_clocks`."""

    rank: int
    host: str = ""
    device: str = ""
    steps: list[StepLine] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    machine: list[Machine] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure of the machine, without its first line, which is before any step."""
        return mean_of_known(line.figures.get(name) for line in self.machine[1:])


@dataclass(frozen=True)
class Recorded:
    """A recorded run.

    Args:
        folder: Its folder.
        sessions: The starts of the run in ``run.json``, in order.
        ranks: By number.
        gaps: Sentences on missing or broken parts.
        machine: Lines of all ranks and starts, including ranks of earlier starts only.
    """

    folder: Path
    sessions: list[dict[str, Any]]
    ranks: dict[int, RankRecord]
    gaps: list[str]
    machine: list[Machine] = field(default_factory=list)

    @property
    def last(self) -> dict[str, Any]:
        """The last session."""
        return self.sessions[-1]

    @property
    def config(self) -> dict[str, Any]:
        """The known facts about the last session, with its settings; see `config_of`."""
        return {**config_of(self.last)}

    @property
    def zero(self) -> RankRecord:
        """The first rank with a record."""
        return self.ranks[min(self.ranks)] if self.ranks else RankRecord(0)

    @property
    def events(self) -> list[Event]:
        """Events of the run: those of the first rank, and errors and recoveries of other ranks."""
        events: dict[tuple[str, int, str], Event] = {}
        for number in sorted(self.ranks):
            for event in self.ranks[number].events:
                # A rank that took part in a recovery may be lost before its line is written.
                if number == self.zero.rank or event.event in ("error", "recovery"):
                    text = event.text if event.event in ("recovery", "evaluation") else ""  # several in a step
                    events.setdefault((event.event, event.step, text), event)
        return sorted(events.values(), key=lambda event: event.time)


def read_run(folder: Path) -> Recorded:
    """Read the record in ``folder``.

    Raises:
        ConfigurationError: There is no such folder, nothing was recorded in it, or a newer version of Lockstep did.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"There is no folder {folder}.\nName the folder given as --run-dir or --monitor.")
    numbered = ((path.stem.removeprefix("rank-"), path) for path in folder.glob(RANK_FILES))
    files = {int(number): path for number, path in numbered if number.isdecimal()}
    if not files and not (folder / RUN_FILE).exists():
        raise ConfigurationError(
            f"No run was recorded in {folder}: it holds no {RUN_FILE} and no {RANK_FILES}.\n"
            "Record one with lockstep train TASK.py --run-dir DIR, or lockstep run --monitor DIR SCRIPT.py."
        )
    gaps: list[str] = []
    sessions = _sessions(folder / RUN_FILE, gaps)
    # The folder may hold files of an earlier run with more ranks.
    runs = {str(session.get("run")) for session in sessions} if sessions else None
    sessions = sessions or [{}]
    ranks: dict[int, RankRecord] = {}
    for number, path in sorted(files.items()):
        record = _rank(path, number, runs, gaps)
        if record.steps or record.timelines or record.events or record.machine:
            ranks[number] = record
    if ranks:
        _align_clocks(ranks)
    # Records that `lockstep.monitor` renamed when ranks were restarted.
    renamed = (_rank(path, 0, runs, gaps) for path in folder.glob(f"before-restart-*.{RANK_FILES}"))
    machine = [line for record in (*ranks.values(), *renamed) for line in record.machine]
    last_ranks = sessions[-1].get("ranks")
    expected = range(len(last_ranks) if isinstance(last_ranks, list) else max(ranks, default=0) + 1)
    for former in [number for number in ranks if number not in expected]:
        gaps.append(f"Rank {former} took part in earlier sessions only, and is not included.")
        del ranks[former]
    if missing := [number for number in expected if number not in ranks]:
        names = ", ".join(map(str, missing))
        gaps.append(f"There is no record of rank {names}: its file is missing, or belongs to another run.")
    return Recorded(folder, sessions, ranks, gaps, machine)


# As characters, or as escapes of JSON with an odd number of backslashes; but for tab and newline.
_CONTROLS = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u00(?:[01]\w|7f|[89]\w)|[bfr])|[\x7f-\x9f]", re.IGNORECASE)


def _parse(text: bytes) -> Any:
    """Return the content of a piece of JSON without control characters, as a record may come from any source.

    In a terminal, these could move the cursor, change the title, or hide lines.
    """
    line = text.decode()
    # Most lines only hold numbers, so only the lines are searched that can contain such a character.
    is_plain = line.isprintable() and "\\" not in line
    return json.loads(line if is_plain else _CONTROLS.sub("\\1\ufffd", line))


def _sessions(path: Path, gaps: list[str]) -> list[dict[str, Any]]:
    try:
        content = _parse(path.read_bytes())
        sessions = [session for session in content["sessions"] if isinstance(session, dict)]
        version = content.get("version")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        gaps.append(f"{path.name} is missing or broken: settings and machine are unknown.")
        return []
    if not isinstance(version, int) or version > VERSION:
        raise ConfigurationError(
            f"{path} was written by another version of Lockstep (format {version!r}, this one reads {VERSION}).\n"
            "Use the version that recorded the run."
        )
    return sessions


def _rank(path: Path, number: int, runs: set[str] | None, gaps: list[str]) -> RankRecord:
    """Read the file of a rank, without lines of other runs."""
    rank = RankRecord(number)
    kinds: dict[Any, tuple[list[Any], Callable[[Line], Any]]] = {
        "step": (rank.steps, StepLine.read),
        "timeline": (rank.timelines, Timeline.read),
        "machine": (rank.machine, Machine.read),
        "event": (rank.events, Event.read),
    }
    bad, is_ours = [], runs is None
    for place, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text:
            continue
        try:
            line = _parse(text)
            if line["kind"] == "start":
                is_ours = runs is None or str(line["run"]) in runs
                if is_ours:
                    rank.host, rank.device = str(line["host"]), str(line["device"])
            elif is_ours:
                entries, read = kinds[line["kind"]]
                entries.append(read(line))
        # A broken line may raise any of these: json recurses on nested lists, int() fails for infinity.
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            bad.append(place)
    if bad:
        gaps.append(f"{path.name}: {plural(len(bad), 'line')} cannot be read; the first is line {bad[0]}.")
    # Of steps that were repeated after a restart or a recovery, the last one counts.
    rank.steps = sorted({step.step: step for step in rank.steps}.values(), key=lambda step: step.step)
    rank.timelines = sorted({line.step: line for line in rank.timelines}.values(), key=lambda line: line.time)
    return rank


def _align_clocks(ranks: Mapping[int, RankRecord]) -> None:
    """Convert the times of ranks on other machines to the clock of the first rank.

    All ranks leave the reduction of a step at the same moment, whatever their clocks say: each time is shifted by the
    difference at the last such moment before it. Without timelines, as with fsdp, the clocks are taken to agree.
    """
    first = ranks[min(ranks)]
    ends = {line.step: line.time + line.waited[1] for line in first.timelines if line.waited}

    def shifted(entry: Any) -> Any:
        return replace(entry, time=entry.time - ahead_s[max(0, bisect(moments, entry.time) - 1)])

    for record in ranks.values():
        timelines = [line for line in record.timelines if line.waited and line.step in ends]
        if record.host != first.host and timelines:
            moments = [line.time for line in timelines]
            ahead_s = [line.time + line.waited[1] - ends[line.step] for line in timelines if line.waited]
            for entries in (record.steps, record.timelines, record.machine, record.events):
                entries[:] = map(shifted, entries)
