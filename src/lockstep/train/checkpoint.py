"""The checkpoints of a run, over its ranks: rank zero writes them beside the training, every rank reads them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.comm.collectives import all_gather_object, broadcast_object
from lockstep.comm.world import World
from lockstep.errors import CheckpointError, ConfigurationError, LockstepError
from lockstep.train.checkpoints import kept
from lockstep.train.checkpoints.choice import Choice, choose, read_chosen
from lockstep.train.checkpoints.lock import FolderLock
from lockstep.train.checkpoints.parts import STATE, TENSORS, pack_parts, read_parts, unfit, unwritable
from lockstep.train.checkpoints.shared import require_shared
from lockstep.train.checkpoints.tensors import HostCopy, pieces_of
from lockstep.train.checkpoints.tree import UnfitValueError
from lockstep.train.checkpoints.writer import Writer

WRITE_TIMEOUT_S = 1800.0
"""How long a checkpoint may take to be written until that counts as a failure."""

LAST_WRITE_TIMEOUT_S = 60.0
"""How long a checkpoint may take that is being written when the run ends with an error."""

CTRL_C_TIMEOUT_S = 2.0
"""How long it may take if somebody waits for it."""

RESTART_TIMEOUT_S = 120.0
"""How long ranks that were started again wait for the folder: network drives hold a dead machine's lock for a while."""

_PARTS = ("model", "optimizer")

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
        self._writer, self._memory = Writer(), HostCopy()
        self._problem: str | None = None
        self._lock: FolderLock | None = None
        self._stale: list[Path] = []
        self._damaged: list[Path] = []
        self._number = 0
        problem: tuple[str, str] | None = None
        if self.world.is_rank_zero:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = _lock(self.folder)
                found = kept.find(self.folder)
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
        return self.folder / kept.name_of(step)

    @property
    def best(self) -> Path | None:
        """The kept one whose evaluation found the lowest loss; only rank zero looks."""
        best = kept.best_of([each for each in kept.find(self.folder) if each.problem is None])
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
            self._problem = unfit(str(path), error)
            return path
        except Exception as error:  # such as no memory for the copy
            self._problem = unwritable(str(path), error)
            return path
        self._number += 1
        number = self._number

        def write() -> None:
            files = {TENSORS: content(), STATE: [rest]}
            kept.remove_leftovers(self.folder)
            kept.write_kept(self.folder, step, files, number=number, loss=loss, anew=path in self._stale)
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
            problem = unwritable(str(self._writing), self._writer.error)
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
                kept.remove_kept(path)
        if newest in self._stale:
            kept.remove_leftovers(self.folder)
        self._stale = []
        self._damaged = [path for path in self._damaged if path != newest]
        found = kept.find(self.folder)
        for each in kept.to_remove(found, keep=self.keep, keep_best=self.keep_best, damaged=self._damaged):
            kept.remove_kept(each.path)

    def _from_rank_zero(self, value: Any) -> Any:
        return broadcast_object(value, group=self.world.group, device=self.world.device)

    def _raise_first(self, problem: str | None) -> None:
        problems: list[str | None] = all_gather_object(problem, group=self.world.group, device=self.world.device)
        for rank, text in enumerate(problems):
            if text is not None:
                raise CheckpointError(text if rank == 0 else f"Rank {rank}: {text}")


def _lock(folder: Path) -> FolderLock:
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
    parts: dict[str, Any] = {name: state[name] for name in _PARTS if name in state}
    return parts | {"state": {name: value for name, value in state.items() if name not in parts}}


def state_in(parts: Mapping[str, Any]) -> State:
    """Return what `parts_of` took apart."""
    return {**parts["state"], **{name: parts[name] for name in _PARTS if name in parts}}
