"""The files of a recorded run: each rank's own, and what rank zero keeps of the run as a whole in ``run.json``."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.comm.clocks import Offset, machine_name
from lockstep.errors import ConfigurationError
from lockstep.telemetry.record.machine import MachineSampler
from lockstep.telemetry.record.names import RANK_FILES, RUN_FILE, VERSION
from lockstep.telemetry.record.writer import LineWriter
from lockstep.train.atomic import whole_file

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
    command = os.environ.get(COMMAND_VARIABLE) or shlex.join(sys.orig_argv)
    return {"command": command, "working_directory": str(Path.cwd())}


def start_line(name: str, rank: int, described: dict[str, Any], *, began_at: float, first_step: int) -> dict[str, Any]:
    """Return the line of kind ``start``; see ``START`` in lockstep.telemetry.record.names."""
    mine = {key: described[key] for key in ("host", "pid", "device")}
    return {"kind": "start", "run": name, "rank": rank, **mine, "time": began_at, "first_step": first_step}


def clocks_line(offsets: Sequence[Offset], at: float) -> dict[str, Any]:
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
