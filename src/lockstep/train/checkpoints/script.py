"""`save` and `load`: checkpoints for a script of one's own."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.collectives import all_gather_object, backend_name, default_group, is_initialized
from lockstep.errors import CheckpointError
from lockstep.train.checkpoints.folder import write_folder
from lockstep.train.checkpoints.lock import FolderLock
from lockstep.train.checkpoints.names import bare, names_as_in, plain_names
from lockstep.train.checkpoints.parts import STATE, TENSORS, pack_parts, read_parts, unfit, unwritable
from lockstep.train.checkpoints.tensors import pieces_of
from lockstep.train.checkpoints.tree import UnfitValueError

_NUM_TRIES, _PAUSE_S = 3, 0.5
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
            parts["model"] = plain_names(bare(model).state_dict())
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
        problem = unfit(str(path), error)
    except Exception as error:  # the other ranks wait for the verdict, whatever it is
        problem = unwritable(str(path), error)
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
        for name, part in (("model", None if model is None else bare(model)), ("optimizer", optimizer)):
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
            time.sleep(_PAUSE_S)
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
