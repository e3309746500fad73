"""Read the record of a run: its files, their lines, and the clocks of the machines that wrote them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import ConfigurationError
from lockstep.telemetry.run_record import EVENTS, PHASES, RANK_FILES, RUN_FILE, VERSION

# The lines of a record as data, which is validated here.

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """A line of kind ``step``; see lockstep.telemetry.run_record. Parts that could not be observed are 0."""

    step: int
    num_steps: int
    time: float
    interval_s: float | None
    total_s: float
    data_wait_s: float
    forward_s: float
    backward_s: float
    exposed_s: float | None
    optimizer_s: float
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    samples: float
    counts: float | None = None
    core_wait_s: float = 0.0

    @property
    def own_s(self) -> float:
        """Seconds of this rank's own work, including waiting for a core."""
        return self.data_wait_s + self.forward_s + self.backward_s + self.optimizer_s + self.core_wait_s

    @property
    def lasted_s(self) -> float:
        """Seconds from its beginning to that of the next step, if known."""
        return self.total_s if self.interval_s is None else self.interval_s


@dataclass(frozen=True)
class Bucket:
    """The exchange of a bucket; times in seconds after the beginning of the step."""

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
    """A line of kind ``machine``: known figures by name, and the other end of the slowest link."""

    time: float
    figures: Mapping[str, float]
    link_peer: str = ""


@dataclass(frozen=True)
class Event:
    """A line of kind ``event``; the metrics are those of an evaluation, by name."""

    event: str
    step: int
    time: float
    seconds: float | None
    text: str
    metrics: Mapping[str, float] = field(default_factory=dict)


def _number(line: Line, name: str) -> float | None:
    """Return a number of a line, which may be NaN or infinite; None if unknown."""
    value = line.get(name)
    return None if value is None else float(value)  # NaN and infinity are strings in JSON


def _amount(line: Line, name: str) -> float | None:
    """Return a duration or a count; None if unknown."""
    value = _number(line, name)
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{name} is out of range")
    return value


def _given(line: Line, name: str) -> float:
    """Return a required amount."""
    value = _amount(line, name)
    if value is None:
        raise ValueError(f"{name} is missing")
    return value


def _step(line: Line) -> Step:
    found: dict[str, Any] = {name: _given(line, name) for name in ("time", "total_s", "samples")}
    parts = ("data_wait_s", "forward_s", "backward_s", "optimizer_s", "core_wait_s")
    found |= {name: _amount(line, name) or 0.0 for name in parts}
    found |= {name: _amount(line, name) for name in ("interval_s", "exposed_s", "counts")}
    # These may be NaN or infinite.
    found |= {name: _number(line, name) for name in ("loss", "learning_rate", "grad_norm")}
    return Step(step=int(_given(line, "step")), num_steps=int(_amount(line, "num_steps") or 1), **found)


def _timeline(line: Line) -> Timeline:
    spans = tuple((str(phase), float(begin), float(end)) for phase, begin, end in line["spans"])
    if not {phase for phase, _, _ in spans} <= set(PHASES):
        raise ValueError("there is no such phase")
    buckets = []
    for number, size, ready, sent, done in line["buckets"]:
        buckets.append(Bucket(int(number), int(size), float(ready), float(sent), float(done)))
    begin_s, end_s = _number(line, "waited_from"), _number(line, "waited_until")
    waited = None if begin_s is None or end_s is None else (begin_s, end_s)
    return Timeline(int(_given(line, "step")), _given(line, "time"), spans, tuple(buckets), waited)


def _machine(line: Line) -> Machine:
    values = {name: _number(line, name) for name in line if name not in ("kind", "time", "link_peer")}
    known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
    return Machine(_given(line, "time"), known, str(line.get("link_peer") or ""))


def _event(line: Line) -> Event:
    if line["event"] not in (*EVENTS, "spike"):  # which earlier versions recorded
        raise ValueError("there is no such event")
    step, text = int(_given(line, "step")), str(line.get("text", ""))[:2000]
    metrics = {str(name): float(value) for name, value in (line.get("metrics") or {}).items() if value is not None}
    return Event(line["event"], step, _given(line, "time"), _amount(line, "seconds"), text, metrics)


# The folder of a run as data, with a list of missing or broken parts.


@dataclass
class RankRecord:
    """The record of one rank, with times on rank zero's clock."""

    rank: int
    host: str = ""
    device: str = ""
    steps: list[Step] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    machine: list[Machine] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


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
    def settings(self) -> dict[str, Any]:
        """The settings of the last session by name; empty if unknown."""
        found = self.last.get("settings")
        return found if isinstance(found, dict) else {}

    @property
    def zero(self) -> RankRecord:
        """The first rank with a record."""
        return self.ranks[min(self.ranks)] if self.ranks else RankRecord(0)

    @property
    def events(self) -> list[Event]:
        """Events of the run: those of the first rank, and errors of other ranks."""
        found: dict[tuple[str, int], Event] = {}
        for number in sorted(self.ranks):
            for event in self.ranks[number].events:
                if number == self.zero.rank or event.event == "error":
                    found.setdefault((event.event, event.step), event)
        return sorted(found.values(), key=lambda event: event.time)


def read_run(folder: Path) -> Recorded:
    """Read the record in ``folder``.

    Raises:
        ConfigurationError: There is no such folder, nothing was recorded in it, or a newer version of Lockstep did.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"There is no folder {folder}.\nName the folder that was given as --run-dir or --monitor."
        )
    # Sorted by length first, so that rank-10 comes after rank-9.
    files = sorted(folder.glob(RANK_FILES), key=lambda path: (len(path.name), path.name))
    if not files and not (folder / RUN_FILE).exists():
        raise ConfigurationError(
            f"No run was recorded in {folder}: it holds no {RUN_FILE} and no {RANK_FILES}.\n"
            "Record one with lockstep train TASK.py --run-dir DIR, or lockstep run --monitor DIR SCRIPT.py."
        )
    gaps: list[str] = []
    sessions = _sessions(folder / RUN_FILE, gaps)
    # The folder may hold files of an earlier run with more ranks.
    known = {str(session.get("run")) for session in sessions} if sessions else None
    sessions = sessions or [{}]
    ranks: dict[int, RankRecord] = {}
    for path in files:
        number = path.stem.removeprefix("rank-")
        if number.isdecimal():
            record = _rank(path, int(number), known, gaps)
            if record.steps or record.timelines or record.events or record.machine:
                ranks[int(number)] = record
                _set_clock(record, sessions)
    # Records that `lockstep.monitor` renamed when ranks were restarted.
    aside = (_rank(path, 0, known, gaps) for path in folder.glob(f"before-restart-*.{RANK_FILES}"))
    machine = [line for record in (*ranks.values(), *aside) for line in record.machine]
    last_ranks = sessions[-1].get("ranks")
    expected = range(len(last_ranks) if isinstance(last_ranks, list) else max(ranks, default=0) + 1)
    for former in [number for number in ranks if number not in expected]:
        gaps.append(f"Rank {former} took part in earlier sessions only, and is not included.")
        del ranks[former]
    if missing := [number for number in expected if number not in ranks]:
        names = ", ".join(map(str, missing))
        gaps.append(f"There is no record of rank {names}: its file is missing, or belongs to another run.")
    return Recorded(folder, sessions, ranks, gaps, machine)


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _parse(text: bytes) -> Any:
    """Return the content of a piece of JSON without control characters, as a record may come from any source.

    In a terminal, these could move the cursor, change the title, or hide lines.
    """
    content = json.loads(text)
    # Most lines only hold numbers, so only those are searched that can contain such a character.
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
        gaps.append(f"{path.name} is missing or broken: settings, machine and clocks are unknown.")
        return []
    if not isinstance(version, int) or version > VERSION:
        raise ConfigurationError(
            f"{path} was written by another version of Lockstep (format {version!r}, this one reads {VERSION}).\n"
            "Use the version that recorded the run."
        )
    return sessions


def _rank(path: Path, number: int, known: set[str] | None, gaps: list[str]) -> RankRecord:
    """Read the file of a rank, without lines of other runs."""
    rank = RankRecord(number)
    kinds: dict[Any, tuple[list[Any], Callable[[Line], Any]]] = {
        "step": (rank.steps, _step),
        "timeline": (rank.timelines, _timeline),
        "machine": (rank.machine, _machine),
        "event": (rank.events, _event),
    }
    bad, is_ours = [], known is None
    for place, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text:
            continue
        try:
            line = _parse(text)
            if line["kind"] == "start":
                is_ours = known is None or str(line["run"]) in known
                if is_ours:
                    rank.host, rank.device = str(line["host"]), str(line["device"])
            elif is_ours:
                entries, read = kinds[line["kind"]]
                entries.append(read(line))
        # A broken line may raise any of these: json recurses on nested lists, int() fails for infinity.
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            bad.append(place)
    if bad:
        gaps.append(f"{path.name}: {len(bad)} line{'s' * (len(bad) > 1)} cannot be read; the first is line {bad[0]}.")
    # Of steps that were repeated after a restart, the last one counts.
    last = {step.step: step for step in rank.steps}
    rank.steps = [last[number] for number in sorted(last)]
    return rank


def _set_clock(record: RankRecord, sessions: Sequence[dict[str, Any]]) -> None:
    """Convert the times of a rank to rank zero's clock.

    The offset was measured at the beginning of each session, and at its end if it was not killed; between the two, it
    is interpolated.
    """
    # By session: times and offsets.
    readings: list[list[tuple[float, float]]] = []
    for session in sessions:
        with suppress(TypeError, LookupError, AttributeError):
            clocks = [session["clocks"].get(name) for name in ("start", "end")]  # a killed session has no end
            readings.append([(each["time"], each["offsets_s"][record.rank]) for each in clocks if each])
    readings = [session for session in readings if session]
    if not readings:
        return

    def offset_s(time: float) -> float:
        session = next((each for each in reversed(readings) if each[0][0] <= time), readings[0])
        moments, offsets_s = zip(*session, strict=True)
        return float(np.interp(time, moments, offsets_s))

    for entries in (record.steps, record.timelines, record.machine, record.events):
        entries[:] = [replace(entry, time=entry.time - offset_s(entry.time)) for entry in entries]  # type: ignore
