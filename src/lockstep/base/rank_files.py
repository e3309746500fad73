"""The files by which a launcher and its ranks communicate, in the launcher's folder. Standard library only.

Each kind of file has one writer and may be read at any moment, so every file is written under another name and then
renamed, or written in one piece. The folder is removed after the run: nothing in it is a record.
"""

import contextlib
import itertools
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The environment variable that names the folder to the ranks.
RUN_DIR = "LOCKSTEP_RUN_DIR"

# Kinds of files, one per rank: its current activity, its current step, its Python stacks, the exception that ended it,
# its normal end, and the Python stack at a fatal signal.
HEARTBEAT, STEP, STACKS = "heartbeat", "step", "stacks"
FAILURE, ENDED, CRASH = "failure", "ended", "crash"
# Of a rank of `lockstep.launch`: the result or the exception of its function.
RESULT, ERROR = "result", "error"


def launcher_folder() -> Path | None:
    """Return the folder of this rank's launcher; ``None`` if no launcher of ours started this process."""
    return Path(name) if (name := os.environ.get(RUN_DIR)) is not None and os.path.isdir(name) else None


def rank_file(folder: str | os.PathLike[str], kind: str, rank: int | str) -> Path:
    """Return the path of a rank's file."""
    return Path(folder) / f"{kind}-{rank}"


def files_by_rank(folder: Path, kind: str) -> dict[int, Path]:
    """Return the existing files of a kind, by rank; not files that are being written."""
    named = {path.name.partition("-")[2]: path for path in folder.glob(f"{kind}-*")}
    return {int(number): path for number, path in named.items() if number.isdigit()}


# The environment variable that names a spare: a process that is no rank until one is lost. Its files, which have this
# name in place of a number, are no rank's.
SPARE = "LOCKSTEP_SPARE"


_own_name = ""


def own_name() -> str:
    """Return the number of this rank, or the name of this spare, as in the names of its files."""
    return _own_name or os.environ.get(SPARE) or os.environ.get("RANK", "0")


def keep_name() -> None:
    """Take the name of this process from its environment, which the program may change later."""
    global _own_name
    _own_name = ""
    _own_name = own_name()


def replace_file(path: Path, text: str) -> None:
    """Replace a whole file atomically: a reader finds the old text or the new one."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, errors="surrogateescape")  # it may name the user's files
    temporary.replace(path)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist, or contains something else."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_bytes()))
    return {}


# Ends: a rank writes why it ends, so that the launcher can read it even if the process goes on or is killed.


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a rank is, or was, in its training.

    Attributes:
        step: The step of ``fit``, counted from 0.
        phase: The phase of that step.
        num_steps: Number of optimizer steps done.
    """

    step: int | None = None
    phase: str = ""
    num_steps: int = 0

    @property
    def in_step(self) -> str:
        """The step in words, as far as it is known."""
        if self.step is not None:
            return f"in step {self.step + 1}{f' ({self.phase})' if self.phase else ''}"
        return f"after {self.num_steps} optimizer step{'s' * (self.num_steps != 1)}" if self.num_steps else ""


@dataclass(frozen=True)
class FailureRecord(Progress):
    """Why and where the program of a rank ended: by an exception, or normally.

    Attributes:
        message: The last line of its traceback, such as ``ValueError: boom``; empty if it ended normally.
        error_type: The name of the exception's class.
        trace: Its whole traceback, which begins with the user's code.
        where: File and line of the exception, in the user's code; empty if the program ran to its end.
        time_ns: When the exception was raised, or the program ended, in nanoseconds since the epoch.
        pid: The process.
        has_joined: Whether the process was in a process group.
    """

    message: str = ""
    error_type: str = ""
    trace: str = ""
    where: str = ""
    time_ns: int = 0
    pid: int = 0
    has_joined: bool = False

    def write(self, folder: str | os.PathLike[str], rank: int | str) -> None:
        """Write it for the launcher. A failure stays if the program, which caught it, then ends normally."""
        with contextlib.suppress(OSError):  # a full disk must not hide the exception itself
            replace_file(rank_file(folder, FAILURE if self.message else ENDED, rank), json.dumps(asdict(self)))

    @classmethod
    def read_all(cls, folder: Path, kind: str = FAILURE) -> "dict[int, FailureRecord]":
        """Return the records of the ranks that failed, or of kind `ENDED`."""
        contents = {rank: read_object(path) for rank, path in files_by_rank(folder, kind).items()}
        return {rank: cls(**content) for rank, content in contents.items() if content}


# Graceful stop: a rank that can stop and save announces this; the launcher requests the stop; each rank then reports
# its result.

# The signals for a graceful stop. Schedulers send the early ones ahead of the end: SLURM any of them, submitit SIGUSR2,
# Grid Engine and LSF SIGUSR2 or SIGXCPU, Flux SIGALRM.
EARLY_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *EARLY_SIGNALS)

FIRST_CTRL_C_MESSAGE = b"lockstep: stopping after this step; Ctrl-C again stops at once\n"

# The reason for a stop that is not a signal: the ranks are then started again together with that machine.
ANOTHER_MACHINE = "another machine"

_STOP, _CAN_STOP, _STOPPED = "stop", "stops", "stopped"


_OF_RANKS = (HEARTBEAT, STEP, FAILURE, ENDED, CRASH, RESULT, ERROR, _CAN_STOP, _STOPPED)


def announce_graceful_stop(folder: Path, rank: int | str) -> None:
    """Report to the launcher that this rank stops gracefully when requested."""
    rank_file(folder, _CAN_STOP, rank).touch()


def withdraw_graceful_stop(folder: Path, rank: int | str) -> None:
    """Report to the launcher that this rank no longer stops gracefully."""
    with contextlib.suppress(OSError):
        rank_file(folder, _CAN_STOP, rank).unlink(missing_ok=True)


def graceful_ranks(folder: Path) -> set[int]:
    """Return the ranks of this machine that would stop gracefully."""
    return set(files_by_rank(folder, _CAN_STOP))


def request_stop(folder: Path, reason: str) -> None:
    """Request the ranks to stop; ``reason`` is the name of a signal, or `ANOTHER_MACHINE`."""
    replace_file(folder / _STOP, reason)


def stop_reason(folder: Path) -> str | None:
    """Return the reason of the launcher's request to stop; ``None`` without a request."""
    with contextlib.suppress(OSError):  # it may also be removed in this moment
        return (folder / _STOP).read_text(errors="replace")
    return None


def is_stopped_by_signal(folder: Path) -> bool:
    """Return whether the launcher has requested the ranks to stop without a restart."""
    return stop_reason(folder) not in (None, ANOTHER_MACHINE)


def report_stopped(folder: Path, rank: int | str, text: str) -> None:
    """Report to the launcher that this rank has stopped gracefully, and what it saved."""
    with contextlib.suppress(OSError):
        replace_file(rank_file(folder, _STOPPED, rank), text)


def stop_reports(folder: Path) -> list[str]:
    """Return the reports of the ranks, by rank."""
    return [path.read_text(errors="surrogateescape") for _, path in sorted(files_by_rank(folder, _STOPPED).items())]


def forget_rank(folder: Path, rank: int, pid: int) -> None:
    """Remove the files of a rank that has ended, as another process takes its place."""
    # It may have been given another number, which it had not taken yet.
    names = {rank} | {
        name for name, path in files_by_rank(folder, HEARTBEAT).items() if read_object(path).get("pid") == pid
    }
    for kind, name in itertools.product(_OF_RANKS, names):
        rank_file(folder, kind, name).unlink(missing_ok=True)
    withdraw_recovery(folder, pid)


def rename_rank(folder: Path, before: str, after: str) -> None:
    """Give a rank's files another number. Files that are open, or mapped into memory, stay so."""
    for kind in (*_OF_RANKS, STACKS):
        with contextlib.suppress(FileNotFoundError):
            rank_file(folder, kind, before).replace(rank_file(folder, kind, after))


def forget_ranks(folder: Path) -> None:
    """Remove the files of ranks that have ended; there may be fewer ranks after a restart.

    A signal's request to stop also applies to the next ranks.
    """
    for kind in (*_OF_RANKS, _RECOVERS, _COMPLETE, _BROKEN):
        for path in files_by_rank(folder, kind).values():
            path.unlink(missing_ok=True)
    for name in (_GENERATION, _RECOVERED):
        (folder / name).unlink(missing_ok=True)
    if not is_stopped_by_signal(folder):
        (folder / _STOP).unlink(missing_ok=True)


# Recovery in place: a rank that can go on without a lost one announces this; the launcher posts the next generation.

_GENERATION, _RECOVERS, _RECOVERED = "generation", "recovers", "recovered"
_COMPLETE, _BROKEN = "complete", "broken"


@dataclass(frozen=True)
class Generation:
    """The ranks that train together from now on; of this machine, each is known by its process.

    Attributes:
        number: Counts the generations of a start of the job. The first, with which the ranks begin, is 0.
        ranks: By process, the ranks of this machine.
        world_size: The number of ranks of the job.
        node_rank: The index of this machine.
        num_nodes: The number of machines.
        store: Host and port of the store in which the ranks meet; None: that of the start.
        lost_at_ns: When the rank was lost, in nanoseconds since the epoch.
        why: Who was lost, how and in which step.
        waiting: Processes of this machine that are not among its ranks, but will be in a later generation. Their
            numbers, which are below ``world_size``, stay free.
    """

    number: int
    ranks: dict[int, int]
    world_size: int
    node_rank: int = 0
    num_nodes: int = 1
    store: tuple[str, int] | None = None
    lost_at_ns: int = 0
    why: str = ""
    waiting: Sequence[int] = ()

    def post(self, folder: Path) -> None:
        """Publish it for the ranks of this machine, each of which leaves the generation before."""
        replace_file(folder / _GENERATION, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Generation | None":
        """Return the newest generation; ``None`` if that is the first."""
        if not (content := read_object(folder / _GENERATION)):
            return None
        ranks = {int(pid): rank for pid, rank in content["ranks"].items()}
        return cls(**content | {"ranks": ranks, "store": content["store"] and tuple(content["store"])})


@dataclass(frozen=True)
class RecoveryReport:
    """What the ranks report when a generation is complete.

    Attributes:
        number: Of the generation.
        text: For the user.
        num_bytes: Of the state that was copied.
        why: Who was lost, how and in which step.
        lost_at_s: When, in Unix time.
        seconds: From then until all had the state.
    """

    number: int
    text: str
    num_bytes: int
    why: str = ""
    lost_at_s: float = 0.0
    seconds: float = 0.0

    def write(self, folder: Path | None) -> None:
        """Write it for the launcher."""
        if folder is not None:
            replace_file(folder / _RECOVERED, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "RecoveryReport | None":
        """Return the newest report; ``None`` if there is none."""
        return cls(**content) if (content := read_object(folder / _RECOVERED)) else None


@dataclass(frozen=True)
class Arrival:
    """Where a process is that trains alone between exchanges with the others.

    Attributes:
        number: How many exchanges, or other attempts, it had completed when it came to one.
        patience_s: How long it waits there for the others; None: as long as they live.
        generation: The generation in which it meets the others; -1: none.
        time_ns: When it came, in nanoseconds since the epoch.
    """

    number: int
    patience_s: float | None = None
    generation: int = -1
    time_ns: int = 0

    @classmethod
    def read_all(cls, folder: Path) -> "dict[int, Arrival]":
        """Return which processes of this machine can go on in a next generation."""
        contents = {pid: read_object(path) for pid, path in files_by_rank(folder, _RECOVERS).items()}
        return {pid: cls(**content) for pid, content in contents.items() if content}


def announce_recovery(folder: Path, pid: int, arrival: Arrival | None = None) -> None:
    """Report to the launcher that this process can go on in a next generation; until it ends."""
    replace_file(rank_file(folder, _RECOVERS, pid), json.dumps(arrival and asdict(arrival)))


def withdraw_recovery(folder: Path, pid: int, *, is_complete: bool = False) -> None:
    """Report to the launcher that this process goes on in no next generation, as it may have completed its part."""
    if not is_complete:
        rank_file(folder, _COMPLETE, pid).unlink(missing_ok=True)
    elif rank_file(folder, _RECOVERS, pid).exists():
        rank_file(folder, _COMPLETE, pid).touch()
    rank_file(folder, _RECOVERS, pid).unlink(missing_ok=True)


def recovering_processes(folder: Path) -> set[int]:
    """Return the processes of this machine that can go on in a next generation."""
    return set(files_by_rank(folder, _RECOVERS))


def complete_processes(folder: Path) -> set[int]:
    """Return the processes of this machine that have completed their part: no other rank needs them any more."""
    return set(files_by_rank(folder, _COMPLETE))


def report_broken(folder: Path, pid: int, number: int) -> None:
    """Report to the launcher that this process cannot reach a rank of its generation, maybe on another machine."""
    replace_file(rank_file(folder, _BROKEN, pid), str(number))


def broken_generation(folder: Path) -> int:
    """Return the newest generation in which a process of this machine could not reach a rank; -1 if there is none."""
    numbers = [-1]
    for path in files_by_rank(folder, _BROKEN).values():
        with contextlib.suppress(OSError):  # removed in this moment
            numbers.append(int(path.read_text(errors="replace")))
    return max(numbers)
