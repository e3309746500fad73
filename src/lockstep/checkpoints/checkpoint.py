"""The checkpoints of a run, which all ranks write during the training; loop/saving.py has those of other scripts.

[Note: one save]
Main thread, every rank:  wait for the previous save; get folder and token from rank zero; copy shards to the host
Thread, every rank:       write and flush the shard file, then write its record
Thread, rank zero:        wait for all records; write the state; rename the manifest into place; remove old checkpoints
Threads communicate only through files: their collectives could be matched with collectives of the steps on other ranks.
Folders and object stores differ only in how one file replaces another: see [Note: object stores].
A rank that fails reports it with the sums of the losses of the next step; then all ranks raise its error in `agree`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from lockstep.base.accelerator import start_thread
from lockstep.base.activity import format_bytes, settle
from lockstep.checkpoints import checkpoint_storage as storage
from lockstep.checkpoints import model_state
from lockstep.checkpoints.best import Monitor
from lockstep.checkpoints.object_store import Lease, ObjectPath, Place
from lockstep.comm.collectives import all_gather_object, broadcast_object, default_group, device_for, is_initialized
from lockstep.comm.world import World
from lockstep.errors import CheckpointError, ConfigurationError, LockstepError
from lockstep.telemetry.record import num_restarts

# Time limit for writing a checkpoint.
WRITE_TIMEOUT_S = 1800.0

# Time limit for a checkpoint that is being written when the run ends with an error.
LAST_WRITE_TIMEOUT_S = 60.0

# How long rank zero then waits for the parts of other ranks: the rank that failed may have been killed.
LAST_PARTS_TIMEOUT_S = 10.0

# The same time limit after Ctrl-C.
CTRL_C_TIMEOUT_S = 2.0

# How long restarted ranks wait for the folder: network drives hold the lock of a dead machine for a while.
RESTART_TIMEOUT_S = 120.0

# How long a new file may take to become visible on all ranks: network drives may be slow.
SHARED_TIMEOUT_S = 15.0

# Each poll of an object store is a request.
_POLL_S, _POLL_OBJECTS_S = 0.05, 1.0

_LOCK_NAME = "lock"
_FULL = {errno.ENOSPC, errno.EDQUOT}
# Errors of file systems without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_NAME = re.compile(r"step-(\d{10})")
_TOP_LEVEL = ("model", "optimizer", "compression", "replicas", "ema")
# Names the best checkpoint of a folder.
_BEST = "best.json"

T = TypeVar("T")


# --- the lock of a folder; the check that all ranks see the same folder ---


# The folders that this process has locked: the system would grant the same process a lock twice.
_held: set[str] = set()


@contextlib.contextmanager
def lock_folder(folder: Place) -> Iterator[Callable[[], object]]:
    """Lock a folder within the block, or until the process ends; forked children do not hold the lock.

    Yields a function that raises CheckpointError if the lock has been lost, which can happen in an object store; see
    [Note: leases]. On a file system without locks, only a second lock in the same process is refused. Restarted ranks
    wait for the folder: a file server may notice late that a machine is gone.

    Raises:
        CheckpointError: Another process has locked it.
        OSError: The lock file cannot be created.
    """
    name = os.path.realpath(folder) if isinstance(folder, Path) else str(folder)
    deadline = time.monotonic() + RESTART_TIMEOUT_S * bool(num_restarts())
    while name in _held or (lock := _try_to_lock(folder)) is None:
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"Another process is writing the checkpoint {folder}.\nUse a separate folder for each run."
            )
        time.sleep(0.2)
    _held.add(name)
    try:
        yield lock.check if isinstance(lock, Lease) else bool
    finally:
        # In this order: closing any file of the same name releases this process's locks on it.
        lock.close()
        _held.discard(name)


def _try_to_lock(folder: Place) -> FileIO | Lease | None:
    if isinstance(folder, ObjectPath):
        lease = Lease(folder)
        return lease if lease.take() else None
    file = FileIO(folder / _LOCK_NAME, "ab")
    try:
        # Not flock: forked children, such as loader processes, would hold the lock after this process ends.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return None
            raise
    return file


def require_shared(folder: Place, world: World) -> None:
    """Check that every rank sees a file that rank zero creates in ``folder``.

    Collective: every rank. Blocks until all have checked, at most `SHARED_TIMEOUT_S`.

    Raises:
        ConfigurationError: On every rank: a rank does not see it.
    """
    if world.world_size == 1 or world.is_late:
        return
    name = broadcast_object(f"seen-by-all-{secrets.token_hex(8)}", group=world.group, device=world.device)
    if world.is_rank_zero:
        with contextlib.suppress(Exception):  # then no rank sees it
            (folder / name).write_bytes(b"\n")  # some stores take an empty object for a folder
    deadline, sees, why = time.monotonic() + SHARED_TIMEOUT_S, False, ""
    while not sees and time.monotonic() < deadline:
        try:
            sees = (folder / name).exists()
        except Exception as error:  # for example missing credentials: the other ranks wait for this one
            why = f" ({type(error).__name__}: {error})"
        time.sleep(_POLL_S * (not sees))
    answers = all_gather_object([socket.gethostname(), sees, why], group=world.group, device=world.device)
    if world.is_rank_zero:
        with contextlib.suppress(Exception):  # for example without permission to delete
            (folder / name).unlink(missing_ok=True)
    for rank, (host, sees, why) in enumerate(answers):
        if not sees:
            raise ConfigurationError(
                f"Rank {rank} on {host} does not see the folder {folder} of rank 0 on {answers[0][0]}{why}.\n"
                "Every rank reads checkpoints: name a folder on a drive that all machines share."
            )


# --- list and remove checkpoints ---


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint in a run's folder.

    Attributes:
        step: Number of steps after which it was saved.
        number: Number of the save in this folder, in the order of the saves; infinite if unknown.
        metrics: Of the evaluation after that step, if there was one.
        job: The id of the job that saved it, if it had one.
        problem: Why it cannot be loaded, as far as the manifest shows.
    """

    path: Place
    step: int
    number: float = math.inf
    metrics: Mapping[str, float] = field(default_factory=dict)
    job: str | None = None
    problem: str | None = None


def find_checkpoints(folder: Place) -> list[FoundCheckpoint]:
    """Return the checkpoints in a run's ``folder``, newest first. Reads their manifests only.

    Raises:
        CheckpointError: An object store does not answer.
    """
    checkpoints = []
    for path in folder.iterdir():
        if (match := _NAME.fullmatch(path.name)) and not _is_unfinished(path):
            checkpoint = FoundCheckpoint(path, int(match[1]))
            try:
                about = storage.read_manifest(path).about
                if type(about.get("number")) is int and about.get("step") == checkpoint.step:
                    # Earlier versions had the loss only.
                    metrics = about.get("metrics") or ({} if about["loss"] is None else {"loss": about["loss"]})
                    checkpoint = replace(checkpoint, number=about["number"], metrics=metrics, job=about.get("job"))
                else:
                    checkpoint = replace(checkpoint, problem="it is not a checkpoint of a run")
            except CheckpointError as error:
                checkpoint = replace(checkpoint, problem=_reason(error))
            checkpoints.append(checkpoint)
    return sorted(checkpoints, key=lambda ckpt: (ckpt.number, ckpt.step), reverse=True)


def _is_unfinished(path: Place) -> bool:
    """Return whether this is an unfinished save or removal; else, without a manifest, a checkpoint is damaged."""
    names = [file.name for file in path.iterdir()]
    kinds = {name.partition("-")[0] for name in names}
    return storage.MANIFEST not in names and ("part" in kinds or storage.STATE not in kinds)


def _reason(error: CheckpointError) -> str:
    """Return the reason why a checkpoint cannot be loaded, without its path; raise ``error`` if it does not say that.

    Raises:
        CheckpointError: An object store does not answer.
    """
    if storage.NO_ANSWER in str(error):
        raise error
    cause = str(error).splitlines()[0].removesuffix(".")
    return cause.partition(" is damaged: ")[2] or cause


def find_best(checkpoints: Iterable[FoundCheckpoint], monitor: Monitor) -> FoundCheckpoint | None:
    """Return the best of the valid ones by a metric, the older one if two are equal; None if none has the metric."""
    candidates = [ckpt for ckpt in checkpoints if ckpt.problem is None and monitor.name in ckpt.metrics]
    return min(candidates, key=lambda ckpt: (monitor.score(ckpt.metrics), ckpt.number), default=None)


def to_remove(
    checkpoints: Sequence[FoundCheckpoint], *, keep: int, best: Monitor | None, damaged: Collection[Place] = ()
) -> list[FoundCheckpoint]:
    """Return the checkpoints to remove after the first of them was written or loaded.

    Args:
        checkpoints: All of the run, as `find_checkpoints` returns them.
        keep: Number of newest valid checkpoints to keep.
        best: The metric by which the best one is kept, too.
        damaged: Checkpoints that are known to be damaged.
    """
    whole = [ckpt for ckpt in checkpoints if ckpt.problem is None and ckpt.path not in damaged]
    stay = whole[:keep]
    if best is not None and (best_one := find_best(whole, best)) is not None:
        stay.append(best_one)
    # A checkpoint that is newer than the newest valid one may become readable later.
    newest = whole[0].step if whole else -1
    return [ckpt for ckpt in checkpoints if ckpt not in stay and (ckpt in whole or ckpt.step <= newest)]


def _remove_checkpoint(path: Place) -> None:
    """Remove a checkpoint; ignore errors."""
    with contextlib.suppress(Exception):  # for example without permission to delete
        # First these, the state before the manifest: what is left is unfinished, see `_is_unfinished`.
        for name in sorted((file.name for file in path.iterdir()), reverse=True):
            if name.startswith((storage.MANIFEST, storage.STATE)):
                (path / name).unlink(missing_ok=True)
        path.remove_all() if isinstance(path, ObjectPath) else shutil.rmtree(path)


# --- write a checkpoint ---


def _problem_of(what: Place, error: BaseException, num_bytes: int = 0) -> str:
    """Return the message for ``error``, which was raised while the checkpoint ``what`` of this size was written."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, storage.UnfitValueError):
        return (
            f"The checkpoint {what} cannot contain {error}.\n"
            "Pass numbers, strings, bytes, None, dense tensors, and lists, tuples and dicts of them."
        )
    why = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    advice = ""
    if isinstance(error, OSError) and error.errno in _FULL and isinstance(what, Path):
        with contextlib.suppress(OSError):
            advice = _how_to_make_room(what, num_bytes)
    return f"Cannot write the checkpoint {what}: {why}.\nEarlier checkpoints were not changed.{advice}"


def _how_to_make_room(path: Path, num_bytes: int) -> str:
    """Return what the checkpoint ``path`` needs and what fills its disk, with sizes, and what may be removed of it."""
    checkpoints = find_checkpoints(path.parent)
    paths = sorted(ckpt.path for ckpt in checkpoints if isinstance(ckpt.path, Path))
    sizes = [f"{path.name} ({format_bytes(sum(file.stat().st_size for file in path.iterdir()))})" for path in paths]
    held = f", and {path.parent} holds {', '.join(sizes)}" if sizes else ""
    # What a run resumes from stays.
    old = [ckpt.path.name for ckpt in checkpoints if ckpt.problem is None][1:]
    which = f"Remove {', '.join(sorted(old))}, or keep fewer (--keep N): the next start removes the others first."
    free = format_bytes(shutil.disk_usage(path.parent).free)
    return (
        f" It needs {format_bytes(num_bytes)}; the disk has {free} free{held}.\n"
        f"{which if old else 'Make room on the disk, or write to another one.'}"
    )


def _run_in_background(job: Callable[[], None], device: torch.device | None = None) -> Future[None]:
    """Run ``job``, which may use ``device``, in a daemon thread: it is lost if the process ends before it is done."""
    future: Future[None] = Future()  # `agree` reports its error
    start_thread(partial(settle, future, job), name="lockstep-checkpoint", device=device)
    return future


@dataclass
class Checkpoints:
    """The checkpoints of a run in a folder.

    Collective: every rank creates one. Blocks until all have.

    Args:
        folder: The folder, or a path in an object store. It is created if needed. All ranks must see the same folder.
            This run locks it until `close`.
        world: The ranks. Each of them writes its shards and reads what it needs.
        fresh: Whether to start a new run: existing checkpoints are ignored, and removed after the first save.
        keep: Number of newest checkpoints to keep.
        best: The metric by which the best checkpoint is kept, too.
        blocking: Whether `save` blocks until everything is on disk, without a copy of the state.

    Attributes:
        passed_over: Newer checkpoints that could not be loaded, each with the reason.

    Raises:
        ConfigurationError: On every rank: the ranks do not see the same folder.
        CheckpointError: On every rank: the folder cannot be created or written to, or another run has locked it.
    """

    folder: Place
    world: World
    fresh: bool = False
    keep: int = 2
    best: Monitor | None = None
    blocking: bool = False
    passed_over: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stager = storage.HostStager()
        self._problem: str | None = None
        self._lock = contextlib.ExitStack()  # of the folder, on rank zero
        self._check_lock: Callable[[], object] = lambda: None
        self._leads = False  # whether this is rank zero, which has the lock
        self._stale: list[Place] = []
        self._damaged: list[Place] = []
        self._number = 0
        self._path, self._num_bytes = self.folder, 0
        self._writes: list[Future[None]] = []  # of this rank's shard; on rank zero also of the checkpoint
        self._no_more_parts = threading.Event()
        try:
            self._candidates: list[tuple[str, str | None]] = gather(on_all_ranks(self.folder, self._open_folder))[0]
            require_shared(self.folder, self.world)
        except LockstepError:
            self.close()
            raise

    def _open_folder(self) -> list[tuple[str, str | None]]:
        """On rank zero, lock the folder; return the checkpoints in it, each with the reason why it cannot be loaded."""
        if not self.world.is_rank_zero:
            return []
        self._leads = True
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_lock = self._lock.enter_context(lock_folder(self.folder))
        checkpoints = find_checkpoints(self.folder)
        self._number = max((int(ckpt.number) for ckpt in checkpoints if ckpt.problem is None), default=0)
        if self.fresh:
            self._clear()
            job = os.environ.get("TORCHELASTIC_RUN_ID") if num_restarts() else None
            # After a restart, this job goes on from what it has saved.
            of_job = [ckpt for ckpt in checkpoints if job is not None and ckpt.job == job]
            self._stale, checkpoints = [ckpt.path for ckpt in checkpoints if ckpt not in of_job], of_job
        return [(ckpt.path.name, ckpt.problem) for ckpt in checkpoints]

    def lead(self) -> None:
        """Do what rank zero does from now on, if this rank has become it: lock the folder, and number checkpoints."""
        if self.world.is_rank_zero and not self._leads:
            self.fresh = False  # what is there now is of this run
            self._open_folder()

    # --- loading ---

    def load(self, *, required: bool) -> dict[str, Any] | None:
        """Return the state of the newest valid checkpoint; None if there are no checkpoints.

        Tensors of model and optimizer are read when the state is loaded: each rank reads what it needs.

        Collective: every rank. Blocks until the ranks together have compared all files with their digests.

        Raises:
            CheckpointError: On every rank: all checkpoints are damaged, or the ranks read different ones; or there is
                none and ``required`` is set.
        """
        for name, why in self._candidates:
            if why is None:
                try:
                    parts = read_alike(self.folder / name)
                    if self.world.is_rank_zero:
                        # Before the first save, for which there may be no room; the one that was loaded stays.
                        with contextlib.suppress(OSError, CheckpointError):
                            self._remove_old(find_checkpoints(self.folder))
                    return {**parts["state"], **{part: parts[part] for part in _TOP_LEVEL if part in parts}}
                except CheckpointError as error:
                    why = _reason(error)
            self.passed_over.append(f"{name}: {why}")
            self._damaged.append(self.folder / name)
        if self.passed_over:
            reasons = "\n".join(self.passed_over)
            raise CheckpointError(
                f"All checkpoints in {self.folder} are damaged.\n{reasons}\n"
                "Restore the files of one checkpoint, or start a new run with resume=False (--no-resume)."
            )
        if required:
            raise CheckpointError(
                f"There is no checkpoint in {self.folder} to resume from.\nName another folder, or omit resume."
            )
        return None

    def load_best(self) -> dict[str, Any]:
        """Return the state of the best checkpoint. Collective: every rank."""
        return read_alike(find_checkpoint(self.folder, best=True))

    def path(self, step: int) -> Place:
        """Return the path of the checkpoint after ``step`` steps."""
        return self.folder / f"step-{step:010d}"

    # --- saving ---

    def save(self, state: Mapping[str, Any], *, step: int, metrics: Mapping[str, float] | None = None) -> Place:
        """Start to write ``state`` as the checkpoint after ``step`` steps; return its path.

        Collective: every rank. Blocks until the previous one is on disk and this rank's shards are copied (on CUDA:
        until the copies are queued). Errors, here or later, are kept for `failure`, `agree` and `finish`.

        Args:
            state: ``model``, ``optimizer`` and any other state. The state of rank zero is written, and every rank's
                shards of sharded tensors.
            step: Number of steps done.
            metrics: Of the evaluation after this step.
        """
        path = self.path(step)
        self._wait_for_all()  # there is memory for one copy of the state
        # One exchange, so that all ranks use the same folder and token, or none of them saves.
        token = gather(self._make_folder(path) if self.world.is_rank_zero else None)[0]
        if token is not None and not self.failure:  # otherwise `agree` raises it on all ranks
            self._path = path
            finite = {name: value for name, value in (metrics or {}).items() if math.isfinite(value)}
            about = {"step": step, "metrics": finite, "loss": finite.get("loss")}
            about["job"] = os.environ.get("TORCHELASTIC_RUN_ID")
            try:
                self._start(state, path, token, about)
            except Exception as error:  # for example no memory for the copy
                self._problem = _problem_of(path, error)
        if self.blocking:
            self.finish()
        return path

    def _start(self, state: Mapping[str, Any], folder: Place, token: str, about: Mapping[str, Any]) -> None:
        """Copy what this rank holds, and start the threads that write it into ``folder``; see [Note: one save]."""
        world = self.world
        parts: dict[str, Any] = {name: state[name] for name in _TOP_LEVEL if name in state}
        parts["state"] = {name: value for name, value in state.items() if name not in parts}
        packer = storage.TreePacker(parts, is_coordinator=world.is_rank_zero)
        self._num_bytes = packer.num_bytes
        ranks = packer.writers(world.world_size)
        if world.rank not in ranks:
            return
        # A blocking save needs no copy: the next step begins after it.
        tensors, events = (packer.tensors, []) if self.blocking else self._stager.stage(packer.tensors)

        def write_part() -> None:
            for event in events:
                event.synchronize()
            storage.write_shard(folder, token, world.rank, tensors)

        def complete() -> None:
            self._check_lock()  # otherwise it could remove what the next holder writes
            self._clear(folder)
            storage.remove_leftover_files(folder, token)
            if not self._wait_for_parts(folder, token, ranks):
                return
            self._check_lock()
            storage.commit(folder, token, packer, world.world_size, {**about, "number": number})
            for stale in self._stale:
                if stale != folder:
                    _remove_checkpoint(stale)
            self._stale = []
            self._damaged = [damaged for damaged in self._damaged if damaged != folder]
            self._remove_old(find_checkpoints(self.folder))

        self._writes = [_run_in_background(write_part, world.device)]
        if world.is_rank_zero:
            self._number += 1
            number = self._number
            self._writes.append(_run_in_background(complete))

    def _make_folder(self, path: Place) -> str | None:
        """Create the folder to write to; return the token of this save, or None after an error."""
        try:
            path.mkdir(exist_ok=True)  # what is there of the same step is valid until its manifest is replaced
        except OSError as error:
            self._problem = self._problem or _problem_of(path, error)
        return None if self.failure else secrets.token_hex(8)

    def _clear(self, folder: Place | None = None) -> None:
        """Remove what unfinished saves and removals have left, except for ``folder``."""
        for path in self.folder.iterdir():
            if _NAME.fullmatch(path.name) and path != folder and _is_unfinished(path):
                _remove_checkpoint(path)

    def _remove_old(self, checkpoints: Sequence[FoundCheckpoint]) -> None:
        """Remove what is not to be kept of the ``checkpoints``, and what killed saves have left."""
        self._clear()
        for checkpoint in to_remove(checkpoints, keep=self.keep, best=self.best, damaged=self._damaged):
            _remove_checkpoint(checkpoint.path)
        whole = [ckpt for ckpt in checkpoints if ckpt.path not in self._damaged]
        if self.best is not None and (best := find_best(whole, self.best)) is not None:
            about = {"checkpoint": best.path.name, "metric": self.best.name, "value": best.metrics[self.best.name]}
            storage.put_file(self.folder / _BEST, json.dumps(about).encode())

    def _wait_for_parts(self, folder: Place, token: str, ranks: Iterable[int]) -> bool:
        """Wait until all ranks have written their parts; return whether they have."""
        deadline, pause_s = time.monotonic() + WRITE_TIMEOUT_S, _POLL_S
        while True:
            # Read before the files, so that a part that arrives together with the flag is found.
            is_last_poll = self._no_more_parts.is_set()
            there = {path.name for path in folder.iterdir()}
            missing = [rank for rank in ranks if storage.part_file(folder, token, rank).name not in there]
            if not missing or is_last_poll:
                return not missing
            if time.monotonic() > deadline:
                raise TimeoutError(0, f"rank {missing[0]} has not written its part within {WRITE_TIMEOUT_S:g} s")
            self._no_more_parts.wait(pause_s)
            pause_s = min(2 * pause_s, _POLL_S if isinstance(folder, Path) else _POLL_OBJECTS_S)

    @property
    def failure(self) -> str | None:
        """The error on this rank, which the others may not know yet."""
        for write in self._writes:
            if self._problem is None and write.done() and (error := write.exception()) is not None:
                self._problem = _problem_of(self._path, error, self._num_bytes)
        return self._problem

    def agree(self) -> None:
        """Raise an error if writing a checkpoint failed on any rank.

        Collective: every rank. Does not wait for a checkpoint that is being written.

        Raises:
            CheckpointError: On every rank.
        """
        _raise_first(self._gather_failures())

    def _gather_failures(self) -> list[str | None]:
        problems = gather(self.failure)
        if any(problems):
            self._no_more_parts.set()  # otherwise rank zero would wait for the part of the rank that failed
        return problems

    def finish(self) -> None:
        """Wait until the checkpoint is written.

        Collective: every rank. Blocks until all shards are written and rank zero has committed the checkpoint.

        Raises:
            CheckpointError: On every rank: something could not be written.
        """
        self._wait_for_all()
        self.agree()

    def close(self, *, wait_s: float = LAST_WRITE_TIMEOUT_S) -> None:
        """Wait at most ``wait_s`` for a checkpoint that is being written; unlock the folder once it is written."""
        try:
            wait(self._writes[:1], wait_s)
            # The parts of other ranks may never arrive. If all arrive in this time, the checkpoint is completed.
            wait(self._writes, min(wait_s, LAST_PARTS_TIMEOUT_S))
            self._no_more_parts.set()
            wait(self._writes, wait_s)
        finally:
            if self._writes:  # another run must not use the folder while this one still writes
                self._writes[-1].add_done_callback(lambda _: self._lock.close())
            else:
                self._lock.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close; after Ctrl-C with a short time limit."""
        self.close(wait_s=CTRL_C_TIMEOUT_S if kind is KeyboardInterrupt else LAST_WRITE_TIMEOUT_S)

    def _wait_for_all(self) -> None:
        # First the parts: rank zero would wait for the part of a rank that failed.
        self._wait_until_written(self._writes[:1])
        self._gather_failures()
        self._wait_until_written(self._writes)

    def _wait_until_written(self, writes: Sequence[Future[None]]) -> None:
        if wait(writes, WRITE_TIMEOUT_S).not_done:
            self._problem = (
                f"The checkpoint {self._path} has not been written within {WRITE_TIMEOUT_S:g} s.\n"
                "Check the disk or its network: it does not respond. Earlier checkpoints were not changed."
            )


# --- what all ranks read, and their errors ---

# How often, and after which pause, all ranks read again if a save may have replaced the checkpoint meanwhile.
_NUM_TRIES, _RETRY_PAUSE_S = 5, 0.1


def find_checkpoint(folder: Place, *, best: bool) -> Place:
    """Return the newest or the best checkpoint in the folder of a run; without any, the folder. Collective."""

    def choose() -> str:
        if best and not (folder / _BEST).exists():
            raise CheckpointError(
                f"{folder} has no best checkpoint.\nName the folder of a run that had keep_best (--keep-best)."
            )
        if best:
            return str(json.loads((folder / _BEST).read_bytes())["checkpoint"])
        with contextlib.suppress(OSError):  # there is nothing
            return next((ckpt.path.name for ckpt in find_checkpoints(folder) if ckpt.problem is None), "")
        return ""

    name = gather(on_all_ranks(folder, choose))[0]
    return folder / name if name else folder


def read_alike(folder: Place) -> dict[str, Any]:
    """Return the parts of the checkpoint after a check that it is valid and the same on every rank.

    The ranks together compare all digests. Tensors of model and optimizer are not read yet.

    Collective: every rank.

    Raises:
        CheckpointError: On every rank: a rank cannot read it, or the ranks read different ones.
    """
    different, (rank, world_size) = "", rank_and_size()
    for _ in range(_NUM_TRIES):
        digest, parts, problem = "", {}, None
        try:
            manifest = storage.read_manifest(folder)
            digest = manifest.digest
            storage.verify_files(folder, manifest, rank=rank, world_size=world_size)
            parts = storage.read_parts(folder, manifest)
            parts["state"] = model_state.read_tensors(parts["state"])
        except CheckpointError as error:
            problem = str(error)
        # A save may replace the checkpoint and remove its files while it is read.
        now = ""
        with contextlib.suppress(CheckpointError):
            now = storage.read_manifest(folder).digest
        answers = gather([problem, digest != now, digest, socket.gethostname()])
        if not any(replaced for _, replaced, _, _ in answers):
            # Each file is compared with its digest on one rank only.
            _raise_first([text for text, _, _, _ in answers])
            others = [rank for rank, answer in enumerate(answers) if answer[2] != answers[0][2]]
            if not others:
                return parts
            different = (
                f"Rank {others[0]} on {answers[others[0]][3]} reads another checkpoint {folder} than rank 0 on "
                f"{answers[0][3]}.\nUse one folder that every rank sees, such as on a network drive, and do not save "
                "to it at the same time."
            )
        time.sleep(_RETRY_PAUSE_S)
    raise CheckpointError(different or f"The checkpoint {folder} was replaced while it was read.\nTry again.")


def on_all_ranks(folder: Place, act: Callable[[], T], num_bytes: int = 0) -> T:
    """Return what ``act`` returns here, or raise the error of the first rank that failed on every rank. Collective."""
    value: T | None = None
    problem = None
    try:
        value = act()
    except Exception as error:  # of any kind: the other ranks wait for this one
        problem = _problem_of(folder, error, num_bytes)
    _raise_first(gather(problem))
    return cast(T, value)


def _raise_first(problems: Sequence[str | None]) -> None:
    for rank, text in enumerate(problems):
        if text is not None:
            raise CheckpointError(text if rank == 0 else f"Rank {rank}: {text}")


def gather(value: Any) -> list[Any]:
    """Return each rank's ``value``. Collective if there is a process group: every rank."""
    if not is_initialized():
        return [value]
    group = default_group()
    return all_gather_object(value, group=group, device=device_for(group))


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; (0, 1) without a process group."""
    return (default_group().rank(), default_group().size()) if is_initialized() else (0, 1)
