"""Checkpoints: the whole state of a run in one file, the last two of them, never half a one.

They are what ``torch.save`` writes, and are read with ``weights_only``, so that a file from elsewhere runs no code.
torch does not check a file's checksums when it reads it, so that is done here.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.comm.collectives import all_gather_object, broadcast_object
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.train.atomic import TEMPORARY_SUFFIX, whole_file

_NUM_KEPT = 2
_NAME = re.compile(r"step-(\d{10})\.pt")

State = dict[str, Any]


class CheckpointError(LockstepError):
    """A checkpoint cannot be read or written; names the file."""


@dataclass
class Checkpoints:
    """The checkpoints of a run in a folder.

    Args:
        folder: Made if it is not there. All ranks must see the same one.
        world: Rank zero writes; every rank reads.
        fresh: Whether to start anew: those that are there are ignored, and removed once there is a new one.
    """

    folder: Path
    world: World
    fresh: bool = False

    def __post_init__(self) -> None:
        self._stale: list[Path] = []
        self._verified = False
        if self.world.is_rank_zero:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError(
                    f"Cannot make the checkpoint folder {self.folder}: {error.strerror}.\nName another one."
                ) from error
            self._stale = find(self.folder) if self.fresh else []

    def load(self, *, required: bool) -> State | None:
        """Return the state in the newest checkpoint, or None if there is none or the run starts anew.

        Collective: every rank. Blocks until all have read it.

        Raises:
            CheckpointError: The file is broken, or a rank does not see it; or ``required`` and there is none.
        """
        found = find(self.folder) if self.world.is_rank_zero and not self.fresh else []
        name = self._from_rank_zero(found[-1].name if found else None)
        if name is None:
            if required:
                raise CheckpointError(
                    f"There is no checkpoint in {self.folder} to resume from.\n"
                    "Name another folder, or leave out resume."
                )
            return None
        state, problem = None, None
        try:
            state = read(self.folder / name)
        except CheckpointError as error:
            problem = str(error)
        self._raise_first(problem)
        return state

    def path(self, step: int) -> Path:
        """Return where the checkpoint after ``step`` steps is."""
        return self.folder / f"step-{step:010d}.pt"

    def save(self, state: State, *, step: int) -> Path:
        """Write ``state`` as the checkpoint after ``step`` steps, on rank zero; return its path.

        Blocks rank zero until the file is on disk. The others do nothing.

        Raises:
            CheckpointError: It cannot be written, or could not be read again.
        """
        path = self.path(step)
        if not self.world.is_rank_zero:
            return path
        try:
            with whole_file(path) as temporary:
                torch.save(state, temporary)
                if not self._verified:
                    read(temporary)
                    self._verified = True
        except OSError as error:
            raise CheckpointError(
                f"Cannot write the checkpoint {path}: {error.strerror}.\nThe one before it is as it was."
            ) from error
        self._prune(path)
        return path

    def _prune(self, newest: Path) -> None:
        for path in self._stale:
            if path != newest:
                path.unlink(missing_ok=True)
        self._stale = []
        for path in find(self.folder)[:-_NUM_KEPT]:
            path.unlink(missing_ok=True)
        for path in self.folder.glob(f"step-*{TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)  # left by a run that was killed while it wrote

    def _from_rank_zero(self, value: str | None) -> str | None:
        answer: str | None = broadcast_object(value, group=self.world.group, device=self.world.device)
        return answer

    def _raise_first(self, problem: str | None) -> None:
        problems: list[str | None] = all_gather_object(problem, group=self.world.group, device=self.world.device)
        for rank, text in enumerate(problems):
            if text is not None:
                first, _, rest = text.partition("\n")
                raise CheckpointError(f"{first}\n{rest}" if rank == 0 else f"Rank {rank}: {first}\n{rest}")


def find(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name))


def read(path: Path) -> State:
    """Return the state in a checkpoint, on the CPU. Runs no code from the file.

    Raises:
        CheckpointError: It is not there, not whole, or holds more than tensors, numbers and strings.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise CheckpointError(_broken(path, f"{broken} does not match its checksum"))
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"There is no checkpoint {path}.\nThe folder must be one that every rank sees, such as a network drive."
        ) from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"The checkpoint {path} holds more than tensors, numbers and strings, which is not read for safety.\n"
            f"{str(error).splitlines()[0]}"
        ) from error
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(_broken(path, str(error).splitlines()[0])) from error
    return state


def _broken(path: Path, why: str) -> str:
    others = [other for other in find(path.parent) if other.name < path.name]
    advice = f"Remove it to go on from {others[-1].name}." if others else "Remove it to start anew."
    return f"The checkpoint {path} is broken: {why}.\n{advice}"
