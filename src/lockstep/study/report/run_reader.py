"""Read the record of a run: its files, their lines, and the clocks of the machines that wrote them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import ConfigurationError
from lockstep.telemetry.run_record import EVENTS, RANK_FILES, RUN_FILE, VERSION

# The ranks' clocks on one: what was measured at the beginning and at the end of each session, and a line between.


@dataclass(frozen=True)
class Reading:
    """How far a rank's clock is ahead of rank zero's, within an error, at a time; all in seconds."""

    time: float
    offset_s: float
    error_s: float


@dataclass(frozen=True)
class Clock:
    """A rank's clock, by sessions in their order; each has the readings of its beginning and maybe its end."""

    sessions: Sequence[Sequence[Reading]]

    def offset_s(self, time: float) -> float:
        """Return how far the clock is ahead at ``time``: on a line through the readings of that session."""
        begun = [readings for readings in self.sessions if readings and readings[0].time <= time]
        readings = begun[-1] if begun else next((each for each in self.sessions if each), [])
        if not readings:
            return 0.0
        first, last = readings[0], readings[-1]
        if last.time <= first.time:
            return first.offset_s
        share = min(1.0, max(0.0, (time - first.time) / (last.time - first.time)))
        return first.offset_s + share * (last.offset_s - first.offset_s)

    @property
    def error_s(self) -> float:
        """The largest error of any reading."""
        return max((reading.error_s for readings in self.sessions for reading in readings), default=0.0)


def clock_of(sessions: Sequence[dict[str, Any]], rank: int) -> Clock:
    """Return the clock of a rank as ``run.json`` tells it; a session that tells nothing has no readings."""
    return Clock([_readings(session.get("clocks"), rank) for session in sessions])


def _readings(clocks: Any, rank: int) -> list[Reading]:
    found = []
    for name in ("start", "end"):
        clock = clocks.get(name) if isinstance(clocks, dict) else None
        if isinstance(clock, dict):
            time = clock.get("time")
            offset_s, error_s = (_at(clock.get(key), rank) for key in ("offsets_s", "errors_s"))
            if isinstance(time, (int, float)) and offset_s is not None:
                found.append(Reading(float(time), offset_s, error_s or 0.0))
    return found


def _at(values: Any, rank: int) -> float | None:
    value = values[rank] if isinstance(values, list) and rank < len(values) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# The lines of a record as data. What cannot be what it claims to be is refused, so that all else can rely on it.

Line = Mapping[str, Any]


class Unfit(Exception):
    """A line that cannot be read; the message says why."""


@dataclass(frozen=True)
class Step:
    """A line of kind ``step``; see lockstep.telemetry.run_record."""

    step: int
    num_steps: int
    time: float
    interval_s: float | None
    total_s: float
    slowest_s: float
    slowest_step: int
    data_wait_s: float
    forward_s: float
    backward_s: float
    exposed_s: float | None
    hidden_s: float | None
    optimizer_s: float
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    samples: float
    counts: float | None = None

    @property
    def own_s(self) -> float:
        """Seconds of this rank's own work."""
        return self.data_wait_s + self.forward_s + self.backward_s + self.optimizer_s

    @property
    def lasted_s(self) -> float:
        """Seconds from its beginning to that of the next, as far as known."""
        return self.total_s if self.interval_s is None else self.interval_s


@dataclass(frozen=True)
class Bucket:
    """A bucket on its way; moments in seconds after the beginning of the step."""

    number: int
    size_bytes: int
    ready_s: float
    sent_s: float
    done_s: float


@dataclass(frozen=True)
class Timeline:
    """A line of kind ``timeline``; spans are of phase, begin and end."""

    step: int
    time: float
    spans: tuple[tuple[str, float, float], ...]
    buckets: tuple[Bucket, ...]
    waited: tuple[float, float] | None

    @property
    def end_s(self) -> float:
        """When the step ended, in seconds after its beginning."""
        return max((end for _, _, end in self.spans), default=0.0)


@dataclass(frozen=True)
class Machine:
    """A line of kind ``machine``; figures by name, those that are not known are left out."""

    time: float
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Event:
    """A line of kind ``event``."""

    event: str
    step: int
    time: float
    seconds: float | None
    text: str


PHASES = ("data_wait", "forward", "backward", "communication", "optimizer")


def number(line: Line, name: str) -> float | None:
    """Return a number of a line, which may be NaN or infinite; None if it is not known."""
    value = line.get(name)
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise Unfit(f"{name} is no number")


def finite(line: Line, name: str, *, at_least: float = -math.inf) -> float:
    """Return a number that has to be there."""
    value = number(line, name)
    if value is None or not math.isfinite(value) or value < at_least:
        raise Unfit(f"{name} is missing or out of range")
    return value


def seconds(line: Line, name: str) -> float | None:
    """Return a duration or a number of things, or None if it is not known."""
    value = number(line, name)
    if value is not None and not 0 <= value < math.inf:
        raise Unfit(f"{name} is out of range")
    return value


def _part(line: Line, name: str) -> float:
    """Return what a step spent on something; 0 where that could not be seen, so that it is among other things."""
    return 0.0 if name in line and line[name] is None else finite(line, name)


def step_of(line: Line) -> Step:
    """Read a line of kind ``step``."""
    total_s = finite(line, "total_s", at_least=0)
    step = int(finite(line, "step", at_least=0))
    return Step(
        step=step,
        num_steps=int(number(line, "num_steps") or 1),
        time=finite(line, "time"),
        interval_s=seconds(line, "interval_s"),
        total_s=total_s,
        slowest_s=seconds(line, "slowest_s") or total_s,
        slowest_step=int(number(line, "slowest_step") or step),
        data_wait_s=_part(line, "data_wait_s"),
        forward_s=_part(line, "forward_s"),
        backward_s=_part(line, "backward_s"),
        exposed_s=seconds(line, "exposed_s"),
        hidden_s=seconds(line, "hidden_s"),
        optimizer_s=finite(line, "optimizer_s"),
        loss=number(line, "loss"),
        learning_rate=number(line, "learning_rate"),
        grad_norm=number(line, "grad_norm"),
        samples=finite(line, "samples", at_least=0),
        counts=seconds(line, "counts"),
    )


def timeline_of(line: Line) -> Timeline:
    """Read a line of kind ``timeline``."""
    spans, buckets = [], []
    for span in _rows(line, "spans", 3):
        begin, end = (_moment(value) for value in span[1:])
        if span[0] not in PHASES or end < begin:
            raise Unfit("spans are not of phase, begin and end")
        spans.append((str(span[0]), begin, end))
    for row in _rows(line, "buckets", 5):
        moments = [_moment(value) for value in row]
        buckets.append(Bucket(int(moments[0]), int(moments[1]), *moments[2:]))
    begin_s, end_s = number(line, "waited_from"), number(line, "waited_until")
    waited = None if begin_s is None or end_s is None else (begin_s, end_s)
    return Timeline(int(finite(line, "step", at_least=0)), finite(line, "time"), tuple(spans), tuple(buckets), waited)


def _rows(line: Line, name: str, width: int) -> list[list[Any]]:
    rows = line.get(name)
    if not isinstance(rows, list) or any(not isinstance(row, list) or len(row) != width for row in rows):
        raise Unfit(f"{name} is no list of {width} values each")
    return rows


def _moment(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Unfit("a moment is no number")
    return float(value)


def machine_of(line: Line) -> Machine:
    """Read a line of kind ``machine``."""
    names = [name for name in line if name not in ("kind", "time")]
    figures = {name: value for name in names if (value := number(line, name)) is not None and math.isfinite(value)}
    return Machine(finite(line, "time"), figures)


def event_of(line: Line) -> Event:
    """Read a line of kind ``event``."""
    name = line.get("event")
    if name not in EVENTS:
        raise Unfit("no such event")
    step = int(finite(line, "step", at_least=0))
    return Event(str(name), step, finite(line, "time"), seconds(line, "seconds"), str(line.get("text", ""))[:2000])


# A folder in which a run was recorded, as data, with a list of what is missing or broken in it.

Entry = TypeVar("Entry", Step, Timeline, Machine, Event)


@dataclass
class RankRecord:
    """What one rank has recorded, its clock set to rank zero's."""

    rank: int
    host: str = ""
    device: str = ""
    steps: list[Step] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    machine: list[Machine] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True)
class Recorded:
    """A run as it was recorded.

    Args:
        folder: Where.
        sessions: What ``run.json`` says of each start of the run, the last one last.
        ranks: By number.
        gaps: What is missing or broken, in words.
        clock_error_s: How far the ranks' clocks may still be apart, at most.
    """

    folder: Path
    sessions: list[dict[str, Any]]
    ranks: dict[int, RankRecord]
    gaps: list[str]
    clock_error_s: float = 0.0

    @property
    def last(self) -> dict[str, Any]:
        """The last session."""
        return self.sessions[-1]

    @property
    def events(self) -> list[Event]:
        """Events of the run: rank zero's, and of others what only they have."""
        found = [event for rank in sorted(self.ranks) for event in self.ranks[rank].events]
        kinds = ("spike", "error")
        mine = min(self.ranks, default=0)
        own = self.ranks[mine].events if self.ranks else []
        seen = {(event.event, event.step) for event in own}
        others = [event for event in found if event.event in kinds and (event.event, event.step) not in seen]
        first: dict[tuple[str, int], Event] = {}
        for event in others:
            first.setdefault((event.event, event.step), event)
        return sorted([*own, *first.values()], key=lambda event: event.time)


def read_run(folder: Path) -> Recorded:
    """Read what was recorded in ``folder``.

    Raises:
        ConfigurationError: There is no such folder, nothing was recorded in it, or a newer version of Lockstep did.
    """
    files = sorted(folder.glob(RANK_FILES), key=lambda path: (len(path.name), path.name)) if folder.is_dir() else []
    if not folder.is_dir():
        raise ConfigurationError(f"There is no folder {folder}.\nName the one that was given as --run-dir.")
    if not files and not (folder / RUN_FILE).exists():
        raise ConfigurationError(
            f"No run was recorded in {folder}: it holds no {RUN_FILE} and no {RANK_FILES}.\n"
            "Record one with lockstep train TASK.py --run-dir DIR."
        )
    gaps: list[str] = []
    sessions = _sessions(folder / RUN_FILE, gaps)
    known = {str(session.get("run")) for session in sessions} if sessions else None
    ranks: dict[int, RankRecord] = {}
    for path in files:
        number = path.stem.removeprefix("rank-")
        if number.isdecimal():
            ranks[int(number)] = _rank(path, int(number), known, gaps)
    ranks = {
        number: rank for number, rank in ranks.items() if rank.steps or rank.timelines or rank.events or rank.machine
    }
    sessions = sessions or [{}]
    expected = range(len(_list(sessions[-1].get("ranks"))) or max(ranks, default=0) + 1)
    for former in [number for number in ranks if number not in expected]:
        gaps.append(f"Rank {former} took part in earlier sessions only, and is left out.")
        del ranks[former]
    if missing := [number for number in expected if number not in ranks]:
        names = ", ".join(map(str, missing))
        gaps.append(f"Nothing is there of rank {names}: its file is missing or holds nothing of this run.")
    clocks = {rank: clock_of(sessions, rank) for rank in ranks}
    for rank, record in ranks.items():
        _set_clock(record, clocks[rank])
    errors = [clock.error_s for clock in clocks.values()]
    return Recorded(folder, sessions, ranks, gaps, max(errors, default=0.0))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _parse(text: bytes) -> Any:
    """Return what a piece of JSON holds, without control characters: a record may come from anywhere.

    What a terminal is sent of it would otherwise move the cursor, change the title, or hide lines.
    """
    content = json.loads(text)
    # Lines of steps are many and hold numbers: only what can hold such a character is searched.
    return _without_controls(content) if b"\\u" in text or b"\x7f" in text or not text.isascii() else content


def _without_controls(value: Any) -> Any:
    if isinstance(value, str):
        return _CONTROLS.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_without_controls(key): _without_controls(each) for key, each in value.items()}
    return [_without_controls(each) for each in value] if isinstance(value, list) else value


def _sessions(path: Path, gaps: list[str]) -> list[dict[str, Any]]:
    try:
        content = _parse(path.read_bytes())
        sessions = [session for session in content["sessions"] if isinstance(session, dict)]
        version = content.get("version")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        gaps.append(f"{path.name} is missing or broken: settings, machine and clocks are not known.")
        return []
    if not isinstance(version, int) or version > VERSION:
        raise ConfigurationError(
            f"{path} was written by another version of Lockstep (format {version!r}, this one reads {VERSION}).\n"
            "Use the version that recorded the run."
        )
    return sessions


def _rank(path: Path, number: int, known: set[str] | None, gaps: list[str]) -> RankRecord:
    """Read the file of a rank; lines of other runs in it are left out."""
    rank = RankRecord(number)
    num_bad, first_bad, is_ours = 0, "", known is None
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        gaps.append(f"{path.name} cannot be read: {error.strerror}.")
        return rank
    for place, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = _parse(text)
            if not isinstance(line, dict):
                raise Unfit("no object")
            if line.get("kind") == "start":
                is_ours = known is None or str(line.get("run")) in known
                if is_ours:
                    rank.host, rank.device = str(line.get("host", "")), str(line.get("device", ""))
            elif is_ours:
                _take(rank, line)
        except (ValueError, Unfit, RecursionError, OverflowError) as error:
            num_bad += 1
            why = str(error) if isinstance(error, Unfit) else "no JSON"
            first_bad = first_bad or f"line {place}: {why}"
    if num_bad:
        gaps.append(f"{path.name}: {num_bad} line{'s' * (num_bad > 1)} cannot be read ({first_bad}).")
    rank.steps = _in_order(rank.steps)
    return rank


def _take(rank: RankRecord, line: dict[str, Any]) -> None:
    match line.get("kind"):
        case "step":
            rank.steps.append(step_of(line))
        case "timeline":
            rank.timelines.append(timeline_of(line))
        case "machine":
            rank.machine.append(machine_of(line))
        case "event":
            rank.events.append(event_of(line))
        case _:
            raise Unfit("unknown kind")


def _in_order(steps: list[Step]) -> list[Step]:
    """Return steps by number; those that were done again after a restart once, as they were done last."""
    last = {step.step: step for step in steps}
    return [last[number] for number in sorted(last)]


def _set_clock(rank: RankRecord, clock: Clock) -> None:
    """Set the times of a rank to rank zero's clock, as far as the offset is known."""

    def turned_back(entry: Entry) -> Entry:
        return replace(entry, time=entry.time - clock.offset_s(entry.time))

    rank.steps = [turned_back(each) for each in rank.steps]
    rank.timelines = [turned_back(each) for each in rank.timelines]
    rank.machine = [turned_back(each) for each in rank.machine]
    rank.events = [turned_back(each) for each in rank.events]
