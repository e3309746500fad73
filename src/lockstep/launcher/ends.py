"""How ranks ended, put together from what torch elastic, the ranks themselves and the watchdog have left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.launcher.failure import RankEnd, tidy_crash
from lockstep.launcher.guard import Guard
from lockstep.telemetry.resources import Resources, says_out_of_memory
from lockstep.telemetry.seen import user_frame
from lockstep.telemetry.step_mark import read_mark


def ends_of(failures: Mapping[int, ProcessFailure], guard: Guard, resources: Resources) -> list[RankEnd]:
    """Return how the ranks ended that did not end well, and those that ended well after an exception of their own."""
    ended = guard.ended_at_ns({failure.pid for failure in failures.values()})
    ends = [_end(rank, failure, ended, guard.run_dir, resources) for rank, failure in failures.items()]
    for path in guard.run_dir.glob("failure-*"):
        number = path.name.partition("-")[2]  # of one that is being written, it ends in .new
        if number.isdigit() and int(number) not in failures and (record := _record_of(_read(path))):
            ends.append(_raised(int(number), 0, 0, None, record, guard.run_dir))
    return ends


def _end(rank: int, failure: ProcessFailure, ended: Mapping[int, int], run_dir: Path, resources: Resources) -> RankEnd:
    # Written by our bootstrap, or by elastic's own `record`, which has less; else a text of elastic's.
    record = _record_of(failure.message) or _record_of(_read(run_dir / f"failure-{rank}"))
    ended_at_ns = ended.get(failure.pid)
    if record:
        end = _raised(rank, failure.pid, failure.exitcode, ended_at_ns, record, run_dir)
        return replace(end, facts=resources.of_each()) if _ran_out_of_memory(end) else end
    number = -failure.exitcode if failure.exitcode < 0 else failure.exitcode - 128
    facts, was_short = "", None
    if number == signal.SIGKILL:
        was_short = resources.was_short_of_memory()
        facts = resources.of_each() if was_short else resources.of_memory(rank)
    elif number == signal.SIGBUS:
        facts = resources.of_shm()
    beacon = _with_step(_read(run_dir / f"beacon-{rank}"), *read_mark(run_dir, rank))
    file, line, _ = user_frame(beacon.get("frames", []))
    crash = run_dir / f"crash-{rank}"
    return RankEnd(
        rank=rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        ended_at_ns=ended_at_ns,
        place=_place(beacon, f"{file}:{line}" if os.path.isabs(file) else "", seen=True),
        crash=tidy_crash(crash.read_text(), own_folder=str(Path(__file__).parent)) if crash.is_file() else "",
        facts=facts,
        was_short=was_short,
    )


def _raised(
    rank: int, pid: int, exit_code: int, ended_at_ns: int | None, record: Mapping[str, Any], run_dir: Path
) -> RankEnd:
    where = record.get("where", "")
    return RankEnd(
        rank=rank,
        pid=pid,
        exit_code=exit_code,
        ended_at_ns=ended_at_ns,
        failed_at_ns=record.get("time_ns"),
        message=record.get("message", ""),
        error_type=record.get("type", ""),
        where=where,
        # An exit on purpose has said what it had to say.
        trace="" if record.get("type") == "SystemExit" else record.get("py_callstack", ""),
        place=_place(record, where, seen=False),
    )


def _ran_out_of_memory(end: RankEnd) -> bool:
    """Tell whether an error says so, but for our own, which has the figures of all ranks."""
    if end.error_type == "OutOfMemory":
        return False
    return end.error_type.endswith("MemoryError") or says_out_of_memory(end.message)


def _with_step(beacon: dict[str, Any], step: int | None, num_steps: int) -> dict[str, Any]:
    """Return what a beacon said with the step that the rank was in at its end; the beacon's is half a second old."""
    phase = beacon.get("phase") if step == beacon.get("step") else ""
    return {**beacon, "step": step, "num_steps": num_steps, "phase": phase}


def _place(marks: Mapping[str, Any], where: str, *, seen: bool) -> str:
    """Say where a rank was: the step, file and line, and the machine."""
    phase = f" ({marks['phase']})" if marks.get("phase") else ""
    parts = []
    if marks.get("step") is not None:
        parts.append(f"in step {marks['step'] + 1}{phase}")
    elif marks.get("num_steps"):
        parts.append(f"after {marks['num_steps']} optimizer step{'s' * (marks['num_steps'] != 1)}")
    if where:
        parts.append(f"at {where}")
    parts.append(f"on {socket.gethostname()}")
    text = ", ".join(parts)
    return f"Last seen {text}." if seen else f"{text[0].upper()}{text[1:]}."


def _record_of(said: Any) -> dict[str, Any]:
    if not isinstance(said, dict):
        return {}
    inner = said.get("message", said)
    said = inner if isinstance(inner, dict) else said
    return {"message": said.get("message", ""), **said.get("extraInfo", {})} if said.get("message") else {}


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        said = json.loads(path.read_bytes())
        return said if isinstance(said, dict) else {}
    return {}


def leave_failure(run_dir: Path, rank: int, message: str) -> None:
    """Say in a rank's name why it failed, as it is ended for that and cannot say so itself."""
    data = {"message": {"message": message, "extraInfo": {"type": message.partition(":")[0]}}}
    with contextlib.suppress(OSError):
        (run_dir / f"failure-{rank}.new").write_text(json.dumps(data))
        os.replace(run_dir / f"failure-{rank}.new", run_dir / f"failure-{rank}")
