"""The checkpoints of a run: which there are, which is loaded, and how every rank writes its shard."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.collectives import all_gather_object, backend_name, broadcast_object, default_group, is_initialized
from lockstep.comm.world import World
from lockstep.errors import CheckpointError, ConfigurationError, LockstepError
from lockstep.train import checkpoint_storage
from lockstep.train.checkpoint_storage import (
    STATE,
    TENSORS,
    HostCopy,
    Pieces,
    UnfitValueError,
    pack_parts,
    pieces_of,
    read_manifest,
    read_parts,
    unfit_message,
    unwritable_message,
    write_folder,
)
from lockstep.train.model_state import names_as_in, plain_names, unwrap

# One writer at a time in a folder.

_LOCK_NAME = "lock"
_UNKNOWN = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""What file systems without locks answer."""
_held: set[str] = set()
"""By this process, whose own locks the system would grant twice."""


class FolderLock:
    """Holds a folder until `release`, or until the process ends, however it does; forked children do not hold it.

    Where the file system knows no locks, only this process is kept from holding it twice.

    Raises:
        CheckpointError: Somebody else holds it.
        OSError: The lock's file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._name = os.path.realpath(folder)
        if self._name in _held:
            raise _taken(folder)
        self._file = FileIO(folder / _LOCK_NAME, "ab")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                self._file.close()
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise _taken(folder) from None
                raise
        _held.add(self._name)

    def release(self) -> None:
        """Let others have the folder; again has no effect."""
        if not self._file.closed:
            self._file.close()
            _held.discard(self._name)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _taken(folder: Path) -> CheckpointError:
    return CheckpointError(f"Another process is writing the checkpoint {folder}.\nGive each run a folder of its own.")


# Whether all ranks see the same folder.

_PATIENCE_S = 15.0
"""Network drives may show a new file late."""
_PAUSE_S = 0.05
_MARK = "seen-by-all-"


def require_shared(folder: Path, world: World) -> None:
    """Check that what rank zero puts into ``folder`` is there for every rank.

    Collective: every rank. Blocks until all have looked, at most some seconds.

    Raises:
        ConfigurationError: On every rank: one of them sees another folder, or none.
    """
    if world.world_size == 1:
        return
    name = _MARK + secrets.token_hex(8)
    if world.is_rank_zero:
        with contextlib.suppress(OSError):  # then nobody sees it
            for left in folder.glob(f"{_MARK}*"):
                left.unlink(missing_ok=True)  # by a run that was killed
            (folder / name).touch()
    name = broadcast_object(name, group=world.group, device=world.device)
    deadline = time.monotonic() + _PATIENCE_S
    while not (is_there := (folder / name).exists()) and not world.is_rank_zero and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    answers = all_gather_object([socket.gethostname(), is_there], group=world.group, device=world.device)
    if world.is_rank_zero:
        (folder / name).unlink(missing_ok=True)
    for rank, (host, sees) in enumerate(answers):
        if not sees:
            raise ConfigurationError(
                f"Rank {rank} on {host} does not see the folder {folder} of rank 0 on {answers[0][0]}.\n"
                "Checkpoints are read by every rank: name a folder on a drive that all machines share."
            )


# The checkpoints of a run in its folder: which there are, which are to stay, and how a new one comes to be there.
#
# Each is a folder such as ``step-0000000100``, written under another name and renamed. Those that are to go are renamed
# first as well, so that whatever has a checkpoint's name was whole once.

_CHECKPOINT_NAME = re.compile(r"step-(\d{10})")
_LEFTOVER = re.compile(r"step-\d{10}\.(partial|removed)")
_OLD_FORMAT = re.compile(r"step-\d{10}\.pt")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint in a run's folder.

    Attributes:
        step: After how many steps it was taken.
        number: Of the save, in the order in which they happened in this folder; infinite if it does not say.
        loss: What the evaluation after that step found, or None.
        problem: Why it cannot be loaded, as far as its manifest tells.
    """

    path: Path
    step: int
    number: float
    loss: float | None
    problem: str | None


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps."""
    return f"step-{step:010d}"


def find_checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """Return the checkpoints in a run's ``folder``, newest first. Reads their manifests only."""
    found = [
        _read_about(path, int(match[1]))
        for path in folder.iterdir()
        if (match := _CHECKPOINT_NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda each: (each.number, each.step), reverse=True)


def find_old_format(folder: Path) -> list[Path]:
    """Return the checkpoints that Lockstep wrote before it had this format, oldest first."""
    return sorted(path for path in folder.iterdir() if _OLD_FORMAT.fullmatch(path.name))


def best_of(found: Sequence[FoundCheckpoint]) -> FoundCheckpoint | None:
    """Return the one whose evaluation found the lowest loss, the older one of equals; None if none was evaluated."""
    evaluated = [each for each in found if each.loss is not None]
    return min(evaluated, key=lambda each: (each.loss, each.number), default=None)


def to_remove(
    found: Sequence[FoundCheckpoint], *, keep: int, keep_best: bool, damaged: Iterable[Path] = ()
) -> list[FoundCheckpoint]:
    """Return which of a run's checkpoints are to go now that the first of them was written.

    Args:
        found: All of them, as `find` returns them.
        keep: So many of the newest whole ones stay.
        keep_best: Whether the best one stays, too.
        damaged: Those that are known not to be whole.
    """
    bad = set(damaged)
    whole = [each for each in found if each.problem is None and each.path not in bad]
    stay = [*whole[:keep]]
    if keep_best and (best := best_of(whole)) is not None:
        stay.append(best)
    # A damaged one ahead of the newest may be one that can be read later.
    newest = whole[0].step if whole else -1
    return [each for each in found if each not in stay and (each in whole or each.step <= newest)]


def write_kept(
    folder: Path, step: int, files: Mapping[str, Pieces], *, number: int, loss: float | None, anew: bool = False
) -> None:
    """Write the checkpoint after ``step`` steps into a run's ``folder``. Blocks until it is on disk.

    Args:
        folder: Of the run.
        step: Of the run.
        files: The content of each.
        number: Of the save.
        loss: What an evaluation after that step found.
        anew: Whether one of that step is of another run: then it is not changed, but moved out of the way.

    Raises:
        OSError: It cannot be written; the others, and one of that name, are as they were.
    """
    path = folder / checkpoint_name(step)
    about = {"step": step, "number": number, "loss": loss if loss is None or math.isfinite(loss) else None}
    if path.exists() and not anew:
        write_folder(path, files, about)
        return
    partial = folder / f"{path.name}.partial"
    write_folder(partial, files, about)
    if path.exists():
        checkpoint_storage.rename(path, folder / f"{path.name}.removed")  # a leftover, cleared away with the others
    checkpoint_storage.rename(partial, path)
    checkpoint_storage.flush_folder(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what writes and removals left that were not finished. What cannot be removed stays."""
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            _remove_tree(path)


def remove_kept(path: Path) -> None:
    """Remove a checkpoint. What cannot be removed stays, under another name."""
    aside = path.with_name(f"{path.name}.removed")
    with contextlib.suppress(OSError):
        checkpoint_storage.rename(path, aside)
        _remove_tree(aside)


def _remove_tree(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            checkpoint_storage.remove(path)
        checkpoint_storage.remove_folder(folder)


def _read_about(path: Path, step: int) -> FoundCheckpoint:
    try:
        about = read_manifest(path).about
    except CheckpointError as error:
        # "The checkpoint PATH is damaged: FILE WHY." or that there is none
        return FoundCheckpoint(path, step, math.inf, None, reason(error))
    number, loss = about.get("number"), about.get("loss")
    if type(number) is not int or about.get("step") != step:
        return FoundCheckpoint(path, step, math.inf, None, "it is not a checkpoint of a run")
    return FoundCheckpoint(path, step, number, loss if type(loss) is float else None, None)


def reason(error: CheckpointError) -> str:
    """Return why a checkpoint cannot be loaded, without its path."""
    return str(error).splitlines()[0].removesuffix(".").partition(" is damaged: ")[2] or str(error).splitlines()[0]


# Writing beside the training: one job at a time, in a thread.


class BackgroundWriter:
    """Runs one job at a time in a thread, and keeps what went wrong in one until somebody asks.

    The thread does not keep the process alive: who ends it without `wait` gives up the job.

    Attributes:
        error: What the last job raised, or None.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        self._is_running = False
        self._afterwards: Callable[[], None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Start a job, which `wait` has to be called before."""
        assert self._thread is None, "one at a time"
        self._is_running = True
        self._thread = threading.Thread(target=self._run, args=[job], name="lockstep-checkpoint", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], None]) -> None:
        """Run a job in this thread; what it raises is kept all the same."""
        self._is_running = True
        self._run(job)

    def wait(self, timeout_s: float) -> bool:
        """Block until no job is running, at most so long; return whether none is."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def leave(self, afterwards: Callable[[], None]) -> None:
        """Have ``afterwards`` called once no job is running, be that now or later, by the thread. No job follows."""
        with self._guard:
            if self._is_running:
                self._afterwards = afterwards
                return
        afterwards()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # told to all ranks by whoever looks at it
            self.error = error
        finally:
            with self._guard:
                self._is_running, afterwards = False, self._afterwards
            if afterwards is not None:
                afterwards()


# Which of a run's checkpoints is loaded: the newest that is whole, and the same one by every rank.


@dataclass
class Choice:
    """What rank zero has found, for the others to do the same.

    Attributes:
        name: Of the checkpoint; empty if there is none.
        checksum: Of its manifest.
        host: Where rank zero runs.
        passed_over: The names of those that are newer and not whole, each with why.
        problem: Why there is nothing to load though something is there.
    """

    name: str = ""
    checksum: str = ""
    host: str = field(default_factory=socket.gethostname)
    passed_over: dict[str, str] = field(default_factory=dict)
    problem: str | None = None


def choose(folder: Path) -> tuple[Choice, dict[str, Any] | None]:
    """Read the newest checkpoint in ``folder`` that is whole; return which that is, and its parts if there is one."""
    choice = Choice()
    try:
        found, old = find_checkpoints(folder), find_old_format(folder)
    except OSError as error:
        choice.problem = f"Cannot look into the checkpoint folder {folder}: {error.strerror}.\nCheck its permissions."
        return choice, None
    for each in found:
        why = each.problem
        if why is None:
            try:
                parts, manifest = read_parts(each.path)
                choice.name, choice.checksum = each.path.name, manifest.checksum
                return choice, parts
            except CheckpointError as error:
                why = reason(error)
        choice.passed_over[each.path.name] = why
    if found:
        reasons = "\n".join(f"{name}: {why}" for name, why in choice.passed_over.items())
        choice.problem = (
            f"No checkpoint in {folder} is whole.\n{reasons}\nPut back the files of one, or start anew (resume=False)."
        )
    elif old:
        choice.problem = (
            f"The checkpoints in {folder}, such as {old[-1].name}, are of an older Lockstep, whose format is "
            "no longer read.\nEnd that run with the version it was started with, or start anew (resume=False)."
        )
    return choice, None


def read_chosen(folder: Path, choice: Choice) -> dict[str, Any]:
    """Return the parts of the checkpoint that rank zero chose.

    Raises:
        CheckpointError: It cannot be read here, or is another one.
    """
    path = folder / choice.name
    parts, manifest = read_parts(path)
    if manifest.checksum != choice.checksum:
        raise CheckpointError(
            f"{path} on {socket.gethostname()} is another checkpoint than on rank 0's host {choice.host}.\n"
            "The folder must be one that every rank sees, such as on a network drive."
        )
    return parts


# The checkpoints of a run, over its ranks: rank zero writes them beside the training, every rank reads them.

WRITE_TIMEOUT_S = 1800.0
"""How long a checkpoint may take to be written until that counts as a failure."""

LAST_WRITE_TIMEOUT_S = 60.0
"""How long a checkpoint may take that is being written when the run ends with an error."""

CTRL_C_TIMEOUT_S = 2.0
"""How long it may take if somebody waits for it."""

RESTART_TIMEOUT_S = 120.0
"""How long ranks that were started again wait for the folder: network drives hold a dead machine's lock for a while."""

_TOP_LEVEL = ("model", "optimizer")

State = dict[str, Any]


@dataclass
class Checkpoints:
    """The checkpoints of a run in a folder.

    Collective: every rank makes one. Blocks until all have.

    Args:
        folder: Made if it is not there. All ranks must see the same one. This run has it alone until `close`.
        world: Rank zero writes; every rank reads.
        fresh: Whether to start anew: those that are there are ignored, and removed once there is a new one.
        keep: So many of the newest are kept.
        keep_best: Whether that of the best evaluation is kept, too.
        blocking: Whether `save` blocks until all is on disk, and makes no copy of the state.

    Attributes:
        passed_over: Those that could not be loaded though they were newer, each with why.

    Raises:
        ConfigurationError: On every rank: the folder cannot be made or written to, or is not the same for all.
        CheckpointError: On every rank: another run has the folder.
    """

    folder: Path
    world: World
    fresh: bool = False
    keep: int = 2
    keep_best: bool = False
    blocking: bool = False
    passed_over: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._writer, self._memory = BackgroundWriter(), HostCopy()
        self._problem: str | None = None
        self._lock: FolderLock | None = None
        self._stale: list[Path] = []
        self._damaged: list[Path] = []
        self._number = 0
        problem: tuple[str, str] | None = None
        if self.world.is_rank_zero:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = _lock_folder(self.folder)
                found = find_checkpoints(self.folder)
                self._number = max((int(each.number) for each in found if each.problem is None), default=0)
                self._stale = [each.path for each in found] if self.fresh else []
            except OSError as error:
                text = f"Cannot make the checkpoint folder {self.folder}: {error.strerror}.\nName another one."
                problem = ("configuration", text)
            except CheckpointError as error:
                problem = ("checkpoint", str(error))
        problem = self._from_rank_zero(problem)
        if problem is not None:
            kind: type[LockstepError] = ConfigurationError if problem[0] == "configuration" else CheckpointError
            raise kind(problem[1])
        try:
            require_shared(self.folder, self.world)
        except ConfigurationError:
            self.close()
            raise

    def load(self, *, required: bool) -> State | None:
        """Return the state in the newest whole checkpoint, or None if there is none or the run starts anew.

        Collective: every rank. Blocks until all have read it.

        Raises:
            CheckpointError: On every rank: none of them is whole, or a rank does not see the same one; or
                ``required`` and there is none.
        """
        choice, parts = Choice(), None
        if self.world.is_rank_zero and not self.fresh:
            choice, parts = choose(self.folder)
        choice = Choice(**self._from_rank_zero(asdict(choice)))
        self.passed_over = [f"{name}: {why}" for name, why in choice.passed_over.items()]
        self._damaged = [self.folder / name for name in choice.passed_over]
        if choice.problem is not None:
            raise CheckpointError(choice.problem)
        if not choice.name:
            if required:
                raise CheckpointError(
                    f"There is no checkpoint in {self.folder} to resume from.\n"
                    "Name another folder, or leave out resume."
                )
            return None
        problem = None
        if parts is None:
            try:
                parts = read_chosen(self.folder, choice)
            except CheckpointError as error:
                problem = str(error)
        self._raise_first(problem)
        assert parts is not None
        return state_in(parts)

    def path(self, step: int) -> Path:
        """Return where the checkpoint after ``step`` steps is."""
        return self.folder / checkpoint_name(step)

    @property
    def best(self) -> Path | None:
        """The kept one whose evaluation found the lowest loss; only rank zero looks."""
        best = best_of([each for each in find_checkpoints(self.folder) if each.problem is None])
        return None if best is None else best.path

    def save(self, state: Mapping[str, Any], *, step: int, loss: float | None = None) -> Path:
        """Start to write ``state`` as the checkpoint after ``step`` steps, on rank zero; return its path.

        Blocks rank zero until the one before is on disk and ``state`` is copied (on CUDA: until the copies are
        queued). The others do nothing. What goes wrong, here or later, is kept for `failed`, `agree` and `finish`.

        Args:
            state: ``model`` and ``optimizer`` and whatever else there is to keep.
            step: Of the run.
            loss: What an evaluation after this step found.
        """
        path = self.path(step)
        if not self.world.is_rank_zero or not self._is_idle(WRITE_TIMEOUT_S) or self.failed:
            return path
        try:
            tensors, rest = pack_parts(parts_of(state))
            content = partial(pieces_of, tensors) if self.blocking else self._memory.take(tensors)
        except UnfitValueError as error:
            self._problem = unfit_message(str(path), error)
            return path
        except Exception as error:  # such as no memory for the copy
            self._problem = unwritable_message(str(path), error)
            return path
        self._number += 1
        number = self._number

        def write() -> None:
            files = {TENSORS: content(), STATE: [rest]}
            remove_leftovers(self.folder)
            write_kept(self.folder, step, files, number=number, loss=loss, anew=path in self._stale)
            self._remove_others(path)

        self._writing = path
        if self.blocking:
            self._writer.run(write)
        else:
            self._writer.start(write)
        return path

    @property
    def failed(self) -> bool:
        """Whether this rank knows of a failure that the others may not know of."""
        return self._problem is not None or self._writer.error is not None

    def agree(self) -> None:
        """Raise what went wrong with a checkpoint, if anything did.

        Collective: every rank. Does not wait for what is being written.

        Raises:
            CheckpointError: On every rank.
        """
        problem = self._problem
        if problem is None and self._writer.error is not None:
            problem = unwritable_message(str(self._writing), self._writer.error)
        self._raise_first(problem)

    def finish(self) -> None:
        """Wait until all is written.

        Collective: every rank. Blocks until rank zero has.

        Raises:
            CheckpointError: On every rank: something could not be written.
        """
        self._is_idle(WRITE_TIMEOUT_S)
        self.agree()

    def close(self, *, wait_s: float = LAST_WRITE_TIMEOUT_S) -> None:
        """Wait for what is being written, at most so long; once it is, others can have the folder."""
        try:
            self._writer.wait(wait_s)
        finally:
            if self._lock is not None:
                self._writer.leave(self._lock.release)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """After an error a checkpoint that is being written gets some time, after Ctrl-C little."""
        self.close(wait_s=CTRL_C_TIMEOUT_S if kind is KeyboardInterrupt else LAST_WRITE_TIMEOUT_S)

    def _is_idle(self, timeout_s: float) -> bool:
        if self._writer.wait(timeout_s):
            return True
        self._problem = (
            f"The checkpoint {self._writing} has not been written within {timeout_s:g} s.\n"
            "The disk or the network to it hangs; the one before it is as it was."
        )
        return False

    def _remove_others(self, newest: Path) -> None:
        for path in self._stale:
            if path != newest:
                remove_kept(path)
        if newest in self._stale:
            remove_leftovers(self.folder)
        self._stale = []
        self._damaged = [path for path in self._damaged if path != newest]
        found = find_checkpoints(self.folder)
        for each in to_remove(found, keep=self.keep, keep_best=self.keep_best, damaged=self._damaged):
            remove_kept(each.path)

    def _from_rank_zero(self, value: Any) -> Any:
        return broadcast_object(value, group=self.world.group, device=self.world.device)

    def _raise_first(self, problem: str | None) -> None:
        problems: list[str | None] = all_gather_object(problem, group=self.world.group, device=self.world.device)
        for rank, text in enumerate(problems):
            if text is not None:
                raise CheckpointError(text if rank == 0 else f"Rank {rank}: {text}")


def _lock_folder(folder: Path) -> FolderLock:
    """Return the lock; ranks that were started again wait for it, as a server may know late that a machine is gone."""
    patience_s = RESTART_TIMEOUT_S if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) else 0.0
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return FolderLock(folder)
        except CheckpointError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.2)


def read_state(path: Path) -> State:
    """Return the state in one checkpoint of a run, such as ``FitResult.checkpoint``.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    parts, _ = read_parts(path)
    return state_in(parts)


def parts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` as the parts that are written."""
    parts: dict[str, Any] = {name: state[name] for name in _TOP_LEVEL if name in state}
    return parts | {"state": {name: value for name, value in state.items() if name not in parts}}


def state_in(parts: Mapping[str, Any]) -> State:
    """Return what `parts_of` took apart."""
    return {**parts["state"], **{name: parts[name] for name in _TOP_LEVEL if name in parts}}


# `save` and `load`: checkpoints for a script of one's own.

_NUM_TRIES, _RETRY_PAUSE_S = 3, 0.5
"""So often, and so far apart, all ranks read again if they read different checkpoints: one may just be replaced."""


def save(
    path: str | os.PathLike[str], *, model: nn.Module | None = None, optimizer: Optimizer | None = None, **state: Any
) -> None:
    """Write a checkpoint: the folder ``path``, with tensors as safetensors and the rest as JSON.

    A checkpoint that is there is replaced in one rename; a save that fails or is killed leaves it as it was.

    Collective: every rank, if there is a process group. Rank zero writes its state; all block until it is on disk.

    Args:
        path: Only rank zero's need exist.
        model: Bare, compiled, or in any of Lockstep's or PyTorch's data-parallel wrappers; written as the bare one.
        optimizer: Its state must be whole on rank zero.
        state: Numbers, strings, bytes, None, dense tensors, and lists, tuples and dicts of them.

    Raises:
        CheckpointError: On every rank, if something cannot be written; nothing is replaced then.
    """
    problem = None
    try:
        parts: dict[str, Any] = {"state": state}
        if model is not None:
            parts["model"] = plain_names(unwrap(model).state_dict())
        if optimizer is not None:
            parts["optimizer"] = optimizer.state_dict()
        if not is_initialized() or default_group().rank() == 0:
            tensors, rest = pack_parts(parts)
            folder = Path(path)
            folder.mkdir(parents=True, exist_ok=True)
            with FolderLock(folder):
                write_folder(folder, {TENSORS: pieces_of(tensors), STATE: [rest]})
    except CheckpointError as error:
        problem = str(error)
    except UnfitValueError as error:
        problem = unfit_message(str(path), error)
    except Exception as error:  # the other ranks wait for the verdict, whatever it is
        problem = unwritable_message(str(path), error)
    _gather(problem)


def load(
    path: str | os.PathLike[str], *, model: nn.Module | None = None, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Read a checkpoint into ``model`` and ``optimizer``; return the rest of what was saved, on the CPU.

    Every checksum is compared before anything is taken over. No code from the files runs. One that `fit` wrote, a
    folder such as ``runs/mine/step-0000000100``, can be read as well.

    Collective: every rank, if there is a process group; each reads the folder. Blocks until all have.

    Raises:
        CheckpointError: On every rank, if there is none, or it is damaged, or does not fit; or if the ranks read
            different ones, as in folders that are not shared.
    """
    folder = Path(path)
    parts = _read_alike(folder)
    problem = None
    try:
        for name, part in (("model", None if model is None else unwrap(model)), ("optimizer", optimizer)):
            if part is None:
                continue
            if name not in parts:
                raise ValueError(f"it was saved without {name}")
            state = names_as_in(part.state_dict(), parts[name]) if isinstance(part, nn.Module) else parts[name]
            part.load_state_dict(state)
    except Exception as error:
        problem = f"The checkpoint {folder} does not fit: {error}\nLoad it into the model and optimizer it is of."
    _gather(problem)
    rest: dict[str, Any] = parts["state"]
    return rest


def _read_alike(folder: Path) -> dict[str, Any]:
    """Return the parts that every rank has read, each on its own, before anything is changed on any rank."""
    for attempt in range(_NUM_TRIES):
        problem, checksum = None, ""
        parts: dict[str, Any] = {}
        try:
            parts, manifest = read_parts(folder)
            checksum = manifest.checksum
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:
            problem = f"Cannot read the checkpoint {folder}: {type(error).__name__}: {error}\nLoad another one."
        read = _gather(problem, checksum)
        others = [rank for rank, (_, theirs) in enumerate(read) if theirs != read[0][1]]
        if not others:
            return parts
        if attempt + 1 < _NUM_TRIES:
            time.sleep(_RETRY_PAUSE_S)
    raise CheckpointError(
        f"Rank {others[0]} on {read[others[0]][0]} reads another checkpoint {folder} than rank 0 on {read[0][0]}.\n"
        "It must be one folder that every rank sees, such as on a network drive, and no save may be replacing it."
    )


def _gather(problem: str | None, checksum: str = "") -> list[tuple[str, str]]:
    """Return each rank's host and ``checksum``, or raise the first rank's problem on every rank, if there is one."""
    answers: list[Any] = [[problem, socket.gethostname(), checksum]]
    if is_initialized():
        group = default_group()
        device = torch.device("cuda") if backend_name(group) == "nccl" else torch.device("cpu")
        answers = all_gather_object(answers[0], group=group, device=device)
    for rank, (text, _, _) in enumerate(answers):
        if text is not None:
            raise CheckpointError(text if rank == 0 else f"Rank {rank}: {text}")
    return [(host, theirs) for _, host, theirs in answers]
