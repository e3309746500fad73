"""The checkpoints of a run, written by every rank beside the training; and `save` and `load` for a script of one's own.

[Note: one save]
Main thread, every rank:  wait for the save before; get folder and token from rank zero; plan; copy shards to the host
Thread, every rank:       write shard file, flush it, rename its record into place
Thread, rank zero:        wait for all records; write the state; rename the manifest, then the folder; remove old ones
Threads communicate by files only: a collective beside those of the steps would meet another one on another rank.
In an object store files are objects, and nothing is renamed but the manifest: see [Note: object stores].
A rank that fails reports it in the next step's sums of losses (`ControlFlags`); then all raise its error in `agree`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.accelerator import recorded_event
from lockstep.comm.collectives import all_gather_object, broadcast_object, default_group, device_for, is_initialized
from lockstep.comm.world import World
from lockstep.errors import CheckpointError, ConfigurationError, LockstepError
from lockstep.train.checkpoints import checkpoint_storage as storage
from lockstep.train.checkpoints import model_state
from lockstep.train.checkpoints.checkpoint_storage import (
    MANIFEST,
    NO_ANSWER,
    TreePacker,
    UnfitValueError,
    part_file,
    read_manifest,
)
from lockstep.train.checkpoints.model_state import TensorChunks, read_tensors, sync
from lockstep.train.checkpoints.object_store import Lease, ObjectPath, Place, place_of

# How long a checkpoint may take to be written until that counts as a failure.
WRITE_TIMEOUT_S = 1800.0

# How long a checkpoint may take that is being written when the run ends with an error.
LAST_WRITE_TIMEOUT_S = 60.0

# How long rank zero then waits for what other ranks write: the one that failed may have been killed.
LAST_PARTS_TIMEOUT_S = 10.0

# How long it may take if somebody waits for it.
CTRL_C_TIMEOUT_S = 2.0

# How long ranks that were started again wait for the folder: network drives hold a dead machine's lock for a while.
RESTART_TIMEOUT_S = 120.0

# How long a new file may take to be seen by all: network drives may show it late.
SHARED_TIMEOUT_S = 15.0

# Each look into an object store costs a request.
_POLL_S, _POLL_OBJECTS_S = 0.05, 1.0

_MARK = "seen-by-all-"
_LOCK_NAME = "lock"
# What file systems without locks answer.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_NAME = re.compile(r"step-(\d{10})")
_LEFTOVER = re.compile(r"step-\d{10}(\.[0-9a-f]{16})?\.(partial|removed)")
_TOP_LEVEL = ("model", "optimizer", "compression", "replicas")

T = TypeVar("T")


# --- a folder: one writer at a time, and the same for all ranks ---


# The folders that this process holds: the system would grant its own locks twice.
_held: set[str] = set()


@contextlib.contextmanager
def lock_folder(folder: Place) -> Iterator[FileIO | Lease]:
    """Hold a folder within, or until the process ends, however it does; forked children do not hold it.

    Where the file system knows no locks, only this process is kept from holding it twice; in an object store, see
    [Note: leases]. Ranks that were started again wait for the folder: a server may know late that a machine is gone.

    Raises:
        CheckpointError: Somebody else holds it.
        OSError: The lock's file cannot be made.
    """
    name = os.path.realpath(folder) if isinstance(folder, Path) else str(folder)
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    deadline = time.monotonic() + RESTART_TIMEOUT_S * is_restart
    while name in _held or (lock := _try_to_lock(folder)) is None:
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"Another process is writing the checkpoint {folder}.\nGive each run a folder of its own."
            )
        time.sleep(0.2)
    _held.add(name)
    try:
        yield lock
    finally:
        # In this order: to close any file of the same name gives up this process's locks on it.
        lock.close()
        _held.discard(name)


def _try_to_lock(folder: Place) -> FileIO | Lease | None:
    if isinstance(folder, ObjectPath):
        lease = Lease(folder)
        return lease if lease.take() else None
    file = FileIO(folder / _LOCK_NAME, "ab")
    try:
        # Not flock: forked children, such as loader processes, would hold it beyond this process's end.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return None
            raise
    return file


def require_shared(folder: Place, world: World) -> None:
    """Check that what rank zero puts into ``folder`` is there for every rank.

    Collective: every rank. Blocks until all have checked, at most some seconds.

    Raises:
        ConfigurationError: On every rank: one of them sees another folder, or none.
    """
    if world.world_size == 1:
        return
    name = broadcast_object(_MARK + secrets.token_hex(8), group=world.group, device=world.device)
    if world.is_rank_zero:
        with contextlib.suppress(Exception):  # then nobody sees it
            for left in folder.iterdir():
                if left.name.startswith(_MARK):
                    left.unlink(missing_ok=True)  # by a run that was killed
            (folder / name).touch()
    deadline, sees, why = time.monotonic() + SHARED_TIMEOUT_S, False, ""
    while not sees and time.monotonic() < deadline:
        try:
            sees = (folder / name).exists()
        except Exception as error:  # of an object store, such as a rank without credentials: the others wait for it
            why = f" ({type(error).__name__}: {error})"
        time.sleep(_POLL_S * (not sees))
    answers = all_gather_object([socket.gethostname(), sees, why], group=world.group, device=world.device)
    if world.is_rank_zero:
        with contextlib.suppress(Exception):  # the next run removes it
            (folder / name).unlink(missing_ok=True)
    for rank, (host, sees, why) in enumerate(answers):
        if not sees:
            raise ConfigurationError(
                f"Rank {rank} on {host} does not see the folder {folder} of rank 0 on {answers[0][0]}{why}.\n"
                "Checkpoints are read by every rank: name a folder on a drive that all machines share."
            )


# --- which checkpoints there are ---


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint in a run's folder.

    Attributes:
        step: After how many steps it was taken.
        number: Of the save, in the order in which they happened in this folder; infinite if that is unknown.
        loss: What the evaluation after that step found, or None.
        problem: Why it cannot be loaded, as far as its manifest shows.
    """

    path: Place
    step: int
    number: float = math.inf
    loss: float | None = None
    problem: str | None = None


def find_checkpoints(folder: Place) -> list[FoundCheckpoint]:
    """Return the checkpoints in a run's ``folder``, newest first. Reads their manifests only.

    Raises:
        CheckpointError: An object store does not answer.
    """
    found = []
    for path in folder.iterdir():
        if (match := _NAME.fullmatch(path.name)) and not _is_unfinished(path):
            step, number, loss, problem = int(match[1]), math.inf, None, None
            try:
                about = read_manifest(path).about
                if type(about.get("number")) is int and about.get("step") == step:
                    number, loss = about["number"], about["loss"]
                else:
                    problem = "it is not a checkpoint of a run"
            except CheckpointError as error:
                if NO_ANSWER in str(error):
                    raise
                problem = _reason(error)
            found.append(FoundCheckpoint(path, step, number, loss, problem))
    return sorted(found, key=lambda each: (each.number, each.step), reverse=True)


def _is_unfinished(path: Place) -> bool:
    """Return whether a save into an object store has not come to its end, or a removal; in folders the name says so."""
    return isinstance(path, ObjectPath) and not (path / MANIFEST).exists()


def _reason(error: CheckpointError) -> str:
    """Return why a checkpoint cannot be loaded, without its path."""
    cause = str(error).splitlines()[0].removesuffix(".")
    return cause.partition(" is damaged: ")[2] or cause


def to_remove(
    found: Sequence[FoundCheckpoint], *, keep: int, keep_best: bool, damaged: Iterable[Place] = ()
) -> list[FoundCheckpoint]:
    """Return which of a run's checkpoints are to go now that the first of them was written.

    Args:
        found: All of them, as `find_checkpoints` returns them.
        keep: So many of the newest whole ones stay.
        keep_best: Whether that of the lowest loss stays, too; of equals the older one.
        damaged: Those that are known not to be whole.
    """
    bad = set(damaged)
    whole = [each for each in found if each.problem is None and each.path not in bad]
    evaluated = [each for each in whole if each.loss is not None]
    stay = whole[:keep]
    if keep_best and evaluated:
        stay.append(min(evaluated, key=lambda each: (each.loss, each.number)))
    # A damaged one ahead of the newest may be one that can be read later.
    newest = whole[0].step if whole else -1
    return [each for each in found if each not in stay and (each in whole or each.step <= newest)]


def _remove_checkpoint(path: Place) -> None:
    """Remove a checkpoint. What cannot be removed stays, under another name: what has a checkpoint's was whole once."""
    if isinstance(path, ObjectPath):
        with contextlib.suppress(Exception):  # such as no right to remove: as a folder, it stays
            (path / MANIFEST).unlink(missing_ok=True)  # first: what has one is whole
            path.remove_all()
        return
    aside = path.with_name(f"{path.name}.removed")
    with contextlib.suppress(OSError):
        path.replace(aside)
        shutil.rmtree(aside, ignore_errors=True)


# --- what is written ---


class HostStager:
    """Memory on the host that takes copies of a rank's chunks; the same memory each time, as long as shapes stay.

    DCP's stager is not used: it copies all memory behind a view, which is the whole model for the shards of ZeRO-1, and
    blocks until the device is done.
    """

    def __init__(self) -> None:
        self._layout: Any = None
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, TensorChunks]) -> tuple[dict[str, TensorChunks], list[torch.Event]]:
        """Return a copy, and the events after which it is made; valid until the next is taken.

        A device makes the copy itself: what is queued there later, such as the next step, waits for it there.
        """
        chunks = [chunk for held in tensors.values() for chunk in held.chunks.values()]
        layout = [(chunk.shape, chunk.dtype, chunk.device) for chunk in chunks]
        if layout != self._layout:
            self._copies.clear()  # first: there may be no room for both
            self._copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=not each.is_cpu) for each in chunks]
            self._layout = layout
        for copy, chunk in zip(self._copies, chunks, strict=True):
            copy.copy_(chunk, non_blocking=True)
        events = [recorded_event(device) for device in {chunk.device for chunk in chunks if not chunk.is_cpu}]
        copies = iter(self._copies)
        taken = {
            name: TensorChunks(held.size, held.dtype, {offsets: next(copies) for offsets in held.chunks})
            for name, held in tensors.items()
        }
        return taken, events


def _problem_of(what: object, error: BaseException) -> str:
    """Return the message that the checkpoint ``what`` could not be written because of ``error``."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, UnfitValueError):
        return (
            f"The checkpoint {what} cannot hold {error}.\n"
            "Give numbers, strings, bytes, None, dense tensors, and lists, tuples and dicts of them."
        )
    why = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return f"Cannot write the checkpoint {what}: {why}.\nThe one before it is as it was."


def _run_in_background(job: Callable[[], None]) -> Future[None]:
    """Run ``job`` in a thread that does not keep the process alive: who ends it without a wait gives up the job."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            job()
        except BaseException as error:  # reported by `agree`
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="lockstep-checkpoint", daemon=True).start()
    return future


@dataclass
class Checkpoints:
    """The checkpoints of a run in a folder.

    Collective: every rank makes one. Blocks until all have.

    Args:
        folder: Made if it is not there. All ranks must see the same one. This run has it alone until `close`. May be a
            place in an object store.
        world: Every rank writes its shards and reads what it needs.
        fresh: Whether to start anew: those that are there are ignored, and removed once there is a new one.
        keep: So many of the newest are kept.
        keep_best: Whether that of the best evaluation is kept, too.
        blocking: Whether `save` blocks until all is on disk, and makes no copy of the state.

    Attributes:
        passed_over: Those that could not be loaded though they were newer, each with why.

    Raises:
        ConfigurationError: On every rank: the folder is not the same for all.
        CheckpointError: On every rank: the folder cannot be made or written to, or another run has it.
    """

    folder: Place
    world: World
    fresh: bool = False
    keep: int = 2
    keep_best: bool = False
    blocking: bool = False
    passed_over: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stager = HostStager()
        self._problem: str | None = None
        self._lock = contextlib.ExitStack()  # of the folder, on rank zero
        self._lease: Lease | None = None  # if it is in an object store
        self._stale: list[Place] = []
        self._damaged: list[Place] = []
        self._number = 0
        self._path = self.folder
        self._writes: list[Future[None]] = []  # of this rank's shard; on rank zero then of the checkpoint
        self._no_more_parts = threading.Event()
        try:
            mine = _on_all_ranks(self.folder, self._open_folder)
            self._candidates: list[tuple[str, str | None]] = self._from_rank_zero(mine)
            require_shared(self.folder, self.world)
        except LockstepError:
            self.close()
            raise

    def _open_folder(self) -> list[tuple[str, str | None]]:
        """On rank zero, take the folder; return what can be loaded from it, and why something cannot."""
        if not self.world.is_rank_zero:
            return []
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = self._lock.enter_context(lock_folder(self.folder))
        self._lease = lock if isinstance(lock, Lease) else None
        found = find_checkpoints(self.folder)
        self._number = max((int(each.number) for each in found if each.problem is None), default=0)
        if self.fresh:
            self._stale = [each.path for each in found]
            return []
        return [(each.path.name, each.problem) for each in found]

    # --- loading ---

    def load(self, *, required: bool) -> dict[str, Any] | None:
        """Return the state in the newest checkpoint that was whole when this began; None if there was none.

        Tensors of model and optimizer are read when the state is given to them: each rank reads what it needs.

        Collective: every rank. Blocks until all files have been compared with their digests, by all ranks together.

        Raises:
            CheckpointError: On every rank: none of them is whole, or a rank does not see the same one; or
                ``required`` and there is none.
        """
        for name, why in self._candidates:
            if why is None:
                try:
                    parts = _read_alike(self.folder / name)
                    return {**parts["state"], **{part: parts[part] for part in _TOP_LEVEL if part in parts}}
                except CheckpointError as error:
                    if NO_ANSWER in str(error):
                        raise
                    why = _reason(error)
            self.passed_over.append(f"{name}: {why}")
            self._damaged.append(self.folder / name)
        if self.passed_over:
            reasons = "\n".join(self.passed_over)
            raise CheckpointError(
                f"No checkpoint in {self.folder} is whole.\n{reasons}\n"
                "Put back the files of one, or start anew (resume=False)."
            )
        if required:
            raise CheckpointError(
                f"There is no checkpoint in {self.folder} to resume from.\nName another folder, or leave out resume."
            )
        return None

    def path(self, step: int) -> Place:
        """Return where the checkpoint after ``step`` steps is."""
        return self.folder / f"step-{step:010d}"

    # --- saving ---

    def save(self, state: Mapping[str, Any], *, step: int, loss: float | None = None) -> Place:
        """Start to write ``state`` as the checkpoint after ``step`` steps; return its path.

        Collective: every rank. Blocks until the one before is on disk and this rank's shards are copied (on CUDA:
        until the copies are queued). What goes wrong, here or later, is kept for `failure`, `agree` and `finish`.

        Args:
            state: ``model`` and ``optimizer`` and whatever else there is to keep. Rank zero's is written, and every
                rank's shards of sharded tensors.
            step: Of the run.
            loss: What an evaluation after this step found.
        """
        path = self.path(step)
        self._wait_until_written(self._writes)  # there is memory for one copy of the state
        # One broadcast makes the ranks agree on folder and token, and whether there is to be a save at all.
        place = self._from_rank_zero(self._make_place(path) if self.world.is_rank_zero else None)
        if place is not None and not self.failure:  # otherwise `agree` raises it on all ranks
            name, token = place
            self._path = path
            about = {"step": step, "loss": None if loss is None or not math.isfinite(loss) else loss}
            try:
                self._start(state, self.folder / name, token, about)
            except Exception as error:  # such as no memory for the copy
                self._problem = _problem_of(path, error)
        if self.blocking:
            self.finish()
        return path

    def _start(self, state: Mapping[str, Any], folder: Place, token: str, about: Mapping[str, Any]) -> None:
        """Copy what this rank holds, and start the threads that write it into ``folder``; see [Note: one save]."""
        path, world = self._path, self.world
        parts: dict[str, Any] = {name: state[name] for name in _TOP_LEVEL if name in state}
        parts["state"] = {name: value for name, value in state.items() if name not in parts}
        packer = storage.pack_parts(parts, is_coordinator=world.is_rank_zero)
        ranks = packer.writers(world.world_size)
        if world.rank not in ranks:
            return
        # A save that blocks needs no copy: the next step does not begin before it is through.
        tensors, events = (packer.tensors, []) if self.blocking else self._stager.stage(packer.tensors)

        def write_part() -> None:
            for event in events:
                event.synchronize()
            storage.write_shard(folder, token, world.rank, tensors)

        def complete() -> None:
            self._check_lease()  # what it would clear away may be what the next holder writes
            self._clear(folder, token)
            if self._wait_for_parts(folder, token, ranks):
                self._check_lease()
                storage.commit(folder, token, packer, world.world_size, {**about, "number": number})
                self._take_name(folder, path)
                self._remove_others(path)

        self._writes = [_run_in_background(write_part)]
        if world.is_rank_zero:
            self._number += 1
            number = self._number
            self._writes.append(_run_in_background(complete))

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _make_place(self, path: Place) -> tuple[str, str] | None:
        """Return the name of the folder that all write into, and the token of this save; None if it cannot be."""
        token = secrets.token_hex(8)
        # A checkpoint of the same step is replaced by one rename, that of its manifest. One of another run stays as it
        # is until the new one is whole.
        in_place = isinstance(path, ObjectPath) or (path.exists() and path not in self._stale)
        name = path.name if in_place else f"{path.name}.{token}.partial"
        try:
            (self.folder / name).mkdir(exist_ok=in_place)
        except OSError as error:
            self._problem = self._problem or _problem_of(path, error)
        return None if self.failure else (name, token)

    def _clear(self, folder: Place, token: str) -> None:
        """Remove what saves and removals left that did not come to their end."""
        for path in self.folder.iterdir():
            if isinstance(path, Path) and _LEFTOVER.fullmatch(path.name) and path != folder:
                shutil.rmtree(path, ignore_errors=True)
            elif _NAME.fullmatch(path.name) and path != folder and _is_unfinished(path):
                _remove_checkpoint(path)
        storage.remove_leftover_files(folder, token)

    def _wait_for_parts(self, folder: Place, token: str, ranks: Iterable[int]) -> bool:
        """Wait until all ranks have written their parts; return whether they have."""
        deadline, pause_s = time.monotonic() + WRITE_TIMEOUT_S, _POLL_S
        while True:
            # Read before the files: a part that arrives together with the flag still counts.
            is_last_poll = self._no_more_parts.is_set()
            there = {path.name for path in folder.iterdir()}
            missing = [rank for rank in ranks if part_file(folder, token, rank).name not in there]
            if not missing or is_last_poll:
                return not missing
            if time.monotonic() > deadline:
                raise TimeoutError(0, f"rank {missing[0]} has not written its part within {WRITE_TIMEOUT_S:g} s")
            self._no_more_parts.wait(pause_s)
            pause_s = min(2 * pause_s, _POLL_S if isinstance(folder, Path) else _POLL_OBJECTS_S)

    def _take_name(self, folder: Place, path: Place) -> None:
        if folder == path:
            return
        assert isinstance(folder, Path) and isinstance(path, Path)
        # Between the two renames the old one is there as ``.removed`` only. It is of a run that was given up.
        if path.exists():
            path.replace(path.with_name(f"{path.name}.removed"))
        folder.replace(path)
        sync(path.parent)

    def _remove_others(self, newest: Place) -> None:
        for path in self._stale:
            if path != newest:
                _remove_checkpoint(path)
        if isinstance(newest, Path):
            shutil.rmtree(newest.with_name(f"{newest.name}.removed"), ignore_errors=True)
        self._stale = []
        self._damaged = [path for path in self._damaged if path != newest]
        found = find_checkpoints(self.folder)
        for each in to_remove(found, keep=self.keep, keep_best=self.keep_best, damaged=self._damaged):
            _remove_checkpoint(each.path)

    @property
    def failure(self) -> str | None:
        """What has failed on this rank, of which the others may not know."""
        for write in self._writes:
            if self._problem is None and write.done() and (error := write.exception()) is not None:
                self._problem = _problem_of(self._path, error)
        return self._problem

    def agree(self) -> None:
        """Raise what went wrong with a checkpoint, if anything did.

        Collective: every rank. Does not wait for what is being written.

        Raises:
            CheckpointError: On every rank.
        """
        problems = _gather(self.failure)
        if any(problems):
            self._no_more_parts.set()  # for rank zero would wait for those of the rank that failed
        _raise_first(problems)

    def finish(self) -> None:
        """Wait until all is written.

        Collective: every rank. Blocks until every rank's shard is written and rank zero has made them a checkpoint.

        Raises:
            CheckpointError: On every rank: something could not be written.
        """
        # Rank zero would wait in vain for the shard of a rank that failed, so all agree on the shards first.
        self._wait_until_written(self._writes[:1])
        self.agree()
        self._wait_until_written(self._writes)
        self.agree()

    def close(self, *, wait_s: float = LAST_WRITE_TIMEOUT_S) -> None:
        """Wait for what is being written, at most so long; once it is, others can have the folder."""
        try:
            wait(self._writes[:1], wait_s)
            # The parts of other ranks may never come; those that do in this time make the checkpoint all the same.
            wait(self._writes, min(wait_s, LAST_PARTS_TIMEOUT_S))
            self._no_more_parts.set()
            wait(self._writes, wait_s)
        finally:
            if self._writes:  # what is still being written must not meet another run in the folder
                self._writes[-1].add_done_callback(lambda _: self._lock.close())
            else:
                self._lock.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """After an error a checkpoint that is being written gets some time, after Ctrl-C little."""
        self.close(wait_s=CTRL_C_TIMEOUT_S if kind is KeyboardInterrupt else LAST_WRITE_TIMEOUT_S)

    def _wait_until_written(self, writes: Sequence[Future[None]]) -> None:
        if wait(writes, WRITE_TIMEOUT_S).not_done:
            self._problem = (
                f"The checkpoint {self._path} has not been written within {WRITE_TIMEOUT_S:g} s.\n"
                "The disk or the network to it hangs; the one before it is as it was."
            )

    def _from_rank_zero(self, value: Any) -> Any:
        return broadcast_object(value, group=self.world.group, device=self.world.device)


# --- for a script of one's own ---

# So often, and so far apart, all ranks read again if they read different checkpoints: one may just be replaced.
_NUM_TRIES, _RETRY_PAUSE_S = 5, 0.1


def save(
    path: str | os.PathLike[str], *, model: nn.Module | None = None, optimizer: Optimizer | None = None, **state: Any
) -> None:
    """Write a checkpoint: the folder ``path``, with tensors as safetensors and the rest as JSON.

    A checkpoint that is there is replaced in one rename; a save that fails or is killed leaves it as it was.

    Collective: every rank, if there is a process group. Rank zero writes its state, every rank its shards of what is
    sharded (``fully_shard``, `ZeroRedundancyOptimizer`); all block until it is on disk.

    Args:
        path: A folder, or the URL of one in an object store, such as ``s3://bucket/mine`` (docs/checkpoints.md); where
            something is sharded, one that every rank sees.
        model: Bare, compiled, or in any of Lockstep's or PyTorch's data-parallel wrappers; written as the bare one.
        optimizer: Its state must be whole on rank zero, or sharded over the ranks.
        state: Numbers, strings, bytes, None, dense tensors, and lists, tuples and dicts of them.

    Raises:
        CheckpointError: On every rank, if something cannot be written; nothing is replaced then.
    """
    folder, (rank, world_size) = place_of(path), _rank_and_size()
    lock: FileIO | Lease | None = None
    with contextlib.ExitStack() as stack:

        def begin() -> TreePacker:
            nonlocal lock
            parts = {"state": state, **model_state.local_state_dict(model, optimizer)}
            packer = storage.pack_parts(parts, is_coordinator=rank == 0)
            if rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(lock_folder(folder))
                storage.remove_leftover_files(folder)
            return packer

        packer = _on_all_ranks(folder, begin)
        token = _gather(secrets.token_hex(8))[0]  # rank zero's

        def write_part() -> None:
            if rank in packer.writers(world_size):
                storage.write_shard(folder, token, rank, packer.tensors)

        def complete() -> None:
            if isinstance(lock, Lease):
                lock.check()
            if rank == 0:
                storage.commit(folder, token, packer, world_size, {})

        _on_all_ranks(folder, write_part)
        _on_all_ranks(folder, complete)


def load(
    path: str | os.PathLike[str], *, model: nn.Module | None = None, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Read a checkpoint into ``model`` and ``optimizer``; return the rest of what was saved, on the CPU.

    Every checksum is compared before anything is taken over, each file's by one of the ranks. No code from the files
    runs. Ranks read what they need, however many had saved. One that `fit` wrote, a folder such as
    ``runs/mine/step-0000000100``, can be read as well.

    Collective: every rank, if there is a process group. Blocks until all have read.

    Raises:
        CheckpointError: On every rank, if there is none, or it is damaged, or does not fit; or if the ranks read
            different ones, as in folders that are not shared.
    """
    folder = place_of(path)
    parts = _read_alike(folder)

    def fill() -> dict[str, Any]:
        try:
            for name, given in (("model", model), ("optimizer", optimizer)):
                if given is not None and name not in parts:
                    raise ValueError(f"it was saved without {name}")
            model_state.load_state_dict(model, optimizer, parts)
        except CheckpointError:
            raise
        except Exception as error:
            text = f"The checkpoint {folder} does not fit: {error}\nLoad it into the model and optimizer it is of."
            raise CheckpointError(text) from error
        rest: dict[str, Any] = parts["state"]
        return rest

    return _on_all_ranks(folder, fill)


def _read_alike(folder: Place) -> dict[str, Any]:
    """Return the parts of the checkpoint, the same one on every rank, before anything is changed on any rank.

    Every digest is compared, each shard's by one of the ranks. Tensors of model and optimizer are not read yet.

    Collective: every rank.

    Raises:
        CheckpointError: On every rank: one of them cannot read it, or they read different ones.
    """
    different, (rank, world_size) = "", _rank_and_size()
    for _ in range(_NUM_TRIES):
        digest, parts, problem = "", {}, None
        try:
            manifest = read_manifest(folder)
            digest = manifest.digest
            storage.verify_files(folder, manifest, rank=rank, world_size=world_size)
            parts = storage.read_parts(folder, manifest)
            parts["state"] = read_tensors(parts["state"])
        except CheckpointError as error:
            problem = str(error)
        # A save may be replacing the checkpoint, and removing the files of the one before, while it is read.
        is_replaced = digest != _try_read_digest(folder)
        answers = _gather([problem, is_replaced, digest, socket.gethostname()])
        if not any(replaced for _, replaced, _, _ in answers):
            # Damage may be in a file that only one rank has compared with its digest.
            _raise_first([text for text, _, _, _ in answers])
            others = [rank for rank, answer in enumerate(answers) if answer[2] != answers[0][2]]
            if not others:
                return parts
            different = (
                f"Rank {others[0]} on {answers[others[0]][3]} reads another checkpoint {folder} than rank 0 on "
                f"{answers[0][3]}.\nIt must be one folder that every rank sees, such as on a network drive, and no "
                "save may be replacing it."
            )
        time.sleep(_RETRY_PAUSE_S)
    raise CheckpointError(different or f"The checkpoint {folder} is replaced faster than it can be read.\nTry again.")


def _try_read_digest(folder: Place) -> str:
    with contextlib.suppress(CheckpointError):
        return read_manifest(folder).digest
    return ""


def _on_all_ranks(folder: Place, act: Callable[[], T]) -> T:
    """Return what ``act`` does here; or raise, on every rank, what went wrong on the first one. Collective."""
    value: T | None = None
    problem = None
    try:
        value = act()
    except Exception as error:  # the other ranks wait for the verdict, whatever it is
        problem = _problem_of(folder, error)
    _raise_first(_gather(problem))
    return cast(T, value)


def _raise_first(problems: Sequence[str | None]) -> None:
    for rank, text in enumerate(problems):
        if text is not None:
            raise CheckpointError(text if rank == 0 else f"Rank {rank}: {text}")


def _gather(value: Any) -> list[Any]:
    """Return each rank's ``value``. Collective if there is a process group: every rank."""
    if not is_initialized():
        return [value]
    group = default_group()
    return all_gather_object(value, group=group, device=device_for(group))


def _rank_and_size() -> tuple[int, int]:
    return (default_group().rank(), default_group().size()) if is_initialized() else (0, 1)
