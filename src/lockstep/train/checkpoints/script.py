"""`save` and `load`: checkpoints for a script of one's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.collectives import all_gather_object, backend_name, default_group, is_initialized
from lockstep.parallel.data_parallel import DataParallel
from lockstep.parallel.distributed import DistributedDataParallel
from lockstep.train.checkpoint import CheckpointError
from lockstep.train.checkpoints.folder import broken, read_folder, write_folder
from lockstep.train.checkpoints.tree import Packer, UnfitValueError, unpack

_WRAPPERS = (DataParallel, DistributedDataParallel, nn.DataParallel, nn.parallel.DistributedDataParallel)


def save(
    path: str | os.PathLike[str], *, model: nn.Module | None = None, optimizer: Optimizer | None = None, **state: Any
) -> None:
    """Write a checkpoint: the folder ``path``, with tensors as safetensors and the rest as JSON.

    A checkpoint that is there is replaced in one rename; a save that fails or is killed leaves it as it was.

    Collective: every rank, if there is a process group. Rank zero writes its state; all block until it is on disk.

    Args:
        path: Only rank zero's need exist.
        model: Bare or in any of Lockstep's or PyTorch's data-parallel wrappers; written as the bare one.
        optimizer: Its state must be whole on rank zero.
        state: Numbers, strings, None, dense tensors, and lists, tuples and dicts of them.

    Raises:
        CheckpointError: On every rank, if something cannot be written; nothing is replaced then.
    """
    problem = None
    try:
        parts: dict[str, Any] = {"state": state}
        if model is not None:
            parts["model"] = _bare(model).state_dict()
        if optimizer is not None:
            parts["optimizer"] = optimizer.state_dict()
        if not is_initialized() or default_group().rank() == 0:
            write_folder(Path(path), _encode(parts))
    except CheckpointError as error:
        problem = str(error)
    except UnfitValueError as error:
        problem = (
            f"The checkpoint {path} cannot hold {error}.\n"
            "Give numbers, strings, None, dense tensors, and lists, tuples and dicts of them."
        )
    except OSError as error:
        problem = f"Cannot write the checkpoint {path}: {error.strerror}.\nThe one before it is as it was."
    except Exception as error:  # the other ranks wait for the verdict, whatever it is
        problem = (
            f"Cannot write the checkpoint {path}: {type(error).__name__}: {error}\nThe one before it is as it was."
        )
    _raise_first(problem)


def load(
    path: str | os.PathLike[str], *, model: nn.Module | None = None, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Read a checkpoint into ``model`` and ``optimizer``; return the rest of what was saved, on the CPU.

    Every checksum is compared before anything is taken over. No code from the files runs.

    Collective: every rank, if there is a process group; each reads the folder. Blocks until all have.

    Raises:
        CheckpointError: On every rank, if there is none, or it is damaged, or does not fit.
    """
    folder, problem = Path(path), None
    parts: dict[str, Any] = {}
    try:
        parts = _decode(folder, read_folder(folder))
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:
        problem = f"Cannot read the checkpoint {folder}: {type(error).__name__}: {error}\nLoad another one."
    _raise_first(problem)  # before anything is changed on any rank
    try:
        for name, part in (("model", None if model is None else _bare(model)), ("optimizer", optimizer)):
            if part is None:
                continue
            if name not in parts:
                raise ValueError(f"it was saved without {name}")
            part.load_state_dict(parts[name])
    except Exception as error:
        problem = f"The checkpoint {folder} does not fit: {error}\nLoad it into the model and optimizer it is of."
    _raise_first(problem)
    state: dict[str, Any] = parts["state"]
    return state


def _bare(model: nn.Module) -> nn.Module:
    while isinstance(model, _WRAPPERS):
        model = model.module
    return model


def _encode(parts: dict[str, Any]) -> dict[str, bytes]:
    packer = Packer()
    try:
        packed = {name: packer.pack(part, name) for name, part in parts.items()}
    except RecursionError:
        raise UnfitValueError("what holds itself or is nested too deep") from None
    tensors = safetensors.torch.save(packer.tensors)
    return {"tensors.safetensors": tensors, "state.json": json.dumps(packed).encode()}


def _decode(folder: Path, files: dict[str, bytes]) -> dict[str, Any]:
    try:
        tensors = safetensors.torch.load(files["tensors.safetensors"])
        parts = {name: unpack(part, tensors) for name, part in json.loads(files["state.json"]).items()}
        if type(parts["state"]) is not dict:
            raise ValueError("it holds no state")
    except (SafetensorError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(broken(folder / "content", f"cannot be read: {error}")) from error
    return parts


def _raise_first(problem: str | None) -> None:
    """Raise the first rank's problem on every rank, if there is one."""
    if not is_initialized():
        problems = [problem]
    else:
        group = default_group()
        device = torch.device("cuda") if backend_name(group) == "nccl" else torch.device("cpu")
        problems = all_gather_object(problem, group=group, device=device)
    for rank, text in enumerate(problems):
        if text is not None:
            raise CheckpointError(text if rank == 0 else f"Rank {rank}: {text}")
