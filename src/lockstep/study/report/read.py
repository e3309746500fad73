"""A folder in which a run was recorded, as data, with a list of what is missing or broken in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import ConfigurationError
from lockstep.study.report.clocks import Clock, clock_of
from lockstep.study.report.lines import (
    Event,
    Machine,
    Step,
    Timeline,
    Unfit,
    event_of,
    machine_of,
    step_of,
    timeline_of,
)
from lockstep.telemetry.record.names import RANK_FILES, RUN_FILE, VERSION

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


def _sessions(path: Path, gaps: list[str]) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
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
            line = json.loads(text)
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
