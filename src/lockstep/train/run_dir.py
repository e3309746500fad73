"""The folder in which a run is recorded: whose files are in it, and what is known of the run as a whole."""

from __future__ import annotations

import inspect
import json
import os
import platform
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from lockstep.comm.clocks import Offset, machine_name, measure_offsets
from lockstep.comm.collectives import all_gather_object
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.telemetry.provenance import gather
from lockstep.telemetry.record.machine import MachineSampler
from lockstep.telemetry.record.names import RANK_FILES, RUN_FILE, VERSION
from lockstep.telemetry.record.writer import LineWriter
from lockstep.train.atomic import whole_file
from lockstep.train.loop import Loop
from lockstep.train.record import Event, NoRecord, Record
from lockstep.train.recording import Recorder
from lockstep.train.settings import FitSettings
from lockstep.train.step_record import StepRecord
from lockstep.train.task import Task

COMMAND_VARIABLE = "LOCKSTEP_COMMAND"
"""Where the command line tells its processes how it was called."""


def make_record(task: Task, settings: FitSettings, world: World, loop: Loop, *, num_steps: int) -> Record:
    """Return what records a run, if ``settings`` name a folder; see `RunDir`. Collective: every rank."""
    if settings.run_dir is None:
        return NoRecord()
    return RunDir(Path(settings.run_dir), task, settings, world, loop, num_steps=num_steps)


@final
class RunDir(Record):
    """The record of a run: each rank writes its own steps, rank zero also keeps ``run.json``.

    Collective: every rank makes one. Blocks until all have.

    Args:
        folder: Made if it is not there; the ranks of several machines may have one each.
        task, settings, world, loop: Of the run.
        num_steps: Of the whole run.

    Raises:
        ConfigurationError: On every rank: a rank cannot write there.
    """

    def __init__(
        self, folder: Path, task: Task, settings: FitSettings, world: World, loop: Loop, *, num_steps: int
    ) -> None:
        self._folder, self._world, self._loop = folder, world, loop
        num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        first_step = loop.num_steps_done
        fresh = not first_step and not num_restarts
        provenance = asdict(gather(_file_of(task))) if world.is_rank_zero else {}
        writer, error = None, ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            writer = LineWriter(folder / f"rank-{world.rank}.jsonl", fresh=fresh, sample=MachineSampler(loop.devices))
        except ConfigurationError as failure:
            error = str(failure)
        except OSError as failure:
            error = f"Cannot record the run in {folder}: {failure.strerror}.\nName another folder (--run-dir DIR)."
        began_at = time.time()
        mine = {
            "host": platform.node(),
            "machine": machine_name(),
            "pid": os.getpid(),
            "device": ", ".join(str(device) for device in loop.devices),
            "run": f"{began_at:.6f}-{os.getpid()}",
            "error": error,
        }
        ranks = all_gather_object(mine, group=world.group, device=world.device)
        if errors := [f"Rank {rank}: {each['error']}" for rank, each in enumerate(ranks) if each["error"]]:
            if writer is not None:
                writer.close()
            raise ConfigurationError(errors[0])
        assert writer is not None
        self._name: str = ranks[0]["run"]
        start = {"kind": "start", "run": self._name, "rank": world.rank, "host": mine["host"], "pid": mine["pid"]}
        writer.add({**start, "device": mine["device"], "time": began_at, "first_step": first_step})
        self._session: dict[str, Any] = {}
        offsets = measure_offsets(world.group, world.device)
        if world.is_rank_zero:
            if fresh:
                self._forget_other_ranks()
            parameters = [parameter for group in loop.optimizer.param_groups for parameter in group["params"]]
            self._session = {
                "run": self._name,
                "began_at": began_at,
                "first_step": first_step,
                "num_steps": num_steps,
                "num_restarts": num_restarts,
                "task": task.name,
                "command": os.environ.get(COMMAND_VARIABLE) or shlex.join(sys.orig_argv),
                "working_directory": str(Path.cwd()),
                "settings": {name: _plain(value) for name, value in asdict(settings).items()},
                "global_batch_size": loop.plan.batch_size,
                "num_parameters": sum(parameter.numel() for parameter in parameters),
                "gradient_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
                "backend": world.backend if loop.group is not None else None,
                "ranks": [{name: rank[name] for name in ("host", "pid", "device", "machine")} for rank in ranks],
                "clocks": {"start": _clocks(offsets, began_at)},
                "provenance": provenance,
            }
            self._sessions = [] if fresh else _sessions_in(folder / RUN_FILE)
            self._write()
        self._recorder = Recorder(loop, writer)
        if num_restarts:
            self.event("restart", f"started again after a failure, for the {_th(num_restarts)} time")
        if first_step:
            self.event("resume", f"went on after step {first_step}")

    @override
    def begin(self) -> None:
        self._recorder.begin()

    @override
    def step(self, record: StepRecord) -> None:
        self._recorder.step(record)

    @override
    def pause(self) -> None:
        self._recorder.pause()

    @override
    def event(self, event: Event, text: str) -> None:
        self._recorder.event(event, text)

    @override
    def close(self) -> None:
        self._recorder.close()

    @override
    def finish(self, event: Event, text: str) -> None:
        offsets = measure_offsets(self._world.group, self._world.device)
        self.event(event, text)
        if self._world.is_rank_zero:
            self._session["clocks"]["end"] = _clocks(offsets, time.time())
            self._session["workers"] = self._loop.workers
            self._write()

    def _write(self) -> None:
        record = {"version": VERSION, "sessions": [*self._sessions, self._session]}
        with suppress(OSError), whole_file(self._folder / RUN_FILE) as path:
            path.write_text(json.dumps(record, indent=1), encoding="utf-8")

    def _forget_other_ranks(self) -> None:
        """Remove what ranks have left that an earlier run in this folder had and this one has not."""
        for path in self._folder.glob(RANK_FILES):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal() and int(number) >= self._world.world_size:
                with suppress(OSError):
                    path.unlink()


def _sessions_in(path: Path) -> list[dict[str, Any]]:
    """Return what is known of the sessions before; nothing if the file is gone or broken."""
    try:
        sessions: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["sessions"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return sessions


def _clocks(offsets: list[Offset], at: float) -> dict[str, Any]:
    return {
        "time": at,
        "offsets_s": [offset.offset_s for offset in offsets],
        "errors_s": [offset.error_s for offset in offsets],
    }


def _file_of(task: Task) -> Path | None:
    with suppress(OSError, TypeError):
        return Path(inspect.getfile(task.loss))
    return None


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _th(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
