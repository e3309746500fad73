"""The parts of a checkpoint, such as model and optimizer, as the files of its folder, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.train.checkpoints.folder import Manifest, broken, read_folder
from lockstep.train.checkpoints.tree import Packer, UnfitValueError, unpack

TENSORS, STATE = "tensors.safetensors", "state.json"


def pack_parts(parts: Mapping[str, Any]) -> tuple[dict[str, Tensor], bytes]:
    """Return the tensors in ``parts`` by name, where they lie, and the rest as JSON.

    Raises:
        UnfitValueError: They hold more than numbers, strings, bytes, lists, tuples, dicts and dense tensors.
    """
    packer = Packer()
    try:
        packed = {name: packer.pack(part, name) for name, part in parts.items()}
    except RecursionError:
        raise UnfitValueError("what holds itself or is nested too deep") from None
    return packer.tensors, json.dumps(packed).encode()


def read_parts(folder: Path) -> tuple[dict[str, Any], Manifest]:
    """Return the parts in the checkpoint ``folder``, on the CPU, and its manifest. Runs no code from it.

    Raises:
        CheckpointError: There is none, or it is damaged; names the file.
    """
    files, manifest = read_folder(folder)
    return unpack_parts(files, folder), manifest


def unpack_parts(files: Mapping[str, bytes], folder: Path) -> dict[str, Any]:
    """Return the parts in the content of the files of the checkpoint ``folder``, on the CPU. Runs no code from it.

    Raises:
        CheckpointError: They are not of the form that Lockstep writes.
    """
    try:
        tensors = safetensors.torch.load(files[TENSORS])
        parts: dict[str, Any] = {name: unpack(part, tensors) for name, part in json.loads(files[STATE]).items()}
        if type(parts["state"]) is not dict:
            raise ValueError("it holds no state")
    except (SafetensorError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(broken(folder / "content", f"cannot be read: {error}")) from error
    return parts


def unfit(what: str, error: UnfitValueError) -> str:
    """Return the message that ``what``, such as a checkpoint's path, cannot hold something."""
    return (
        f"The checkpoint {what} cannot hold {error}.\n"
        "Give numbers, strings, bytes, None, dense tensors, and lists, tuples and dicts of them."
    )


def unwritable(what: str, error: Exception) -> str:
    """Return the message that ``what`` cannot be written."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return f"Cannot write the checkpoint {what}: {why}.\nThe one before it is as it was."
