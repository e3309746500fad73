"""The bare model's weights as a safetensors file, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from torch import Tensor, nn

from lockstep.errors import ConfigurationError
from lockstep.train.model_state import plain_names

# Files that are there in whole or not at all, whenever the process ends.

TEMPORARY_SUFFIX = ".partial"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path to write to; what was written there is ``path`` once the block is left, and on disk.

    An error in the block, or the end of the process, leaves ``path`` as it was.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        yield temporary
        _fsync(temporary, os.O_RDWR)
        os.replace(temporary, path)
        _fsync(path.parent, os.O_RDONLY)
    finally:
        temporary.unlink(missing_ok=True)


def _fsync(path: Path, flags: int) -> None:
    """Block until the file, or the entries of the folder, are on disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The bare model's weights as a safetensors file.


def check_export(path: Path) -> None:
    """Check before the training that the file can be written after it.

    Raises:
        ConfigurationError: Its folder is not there, or it is a folder itself.
    """
    if not path.parent.is_dir():
        raise ConfigurationError(f"There is no folder {path.parent} to export the weights to.\nMake it first.")
    if path.is_dir():
        raise ConfigurationError(f"export={path} is a folder.\nName a file.")


def export_weights(model: nn.Module, path: Path) -> None:
    """Write the parameters and buffers of ``model`` to ``path``, whole or not at all.

    Tensors that share their memory, such as tied weights, are written once; ``safetensors.torch.load_model`` puts
    them back in every place.
    """
    with whole_file(path) as temporary:
        save_model(_UnsharedState(model), str(temporary), metadata={"format": "pt"})


class _UnsharedState(nn.Module):
    """Has the state of ``model``, but no tensor is a part of a larger one, as those of a divided optimizer are.

    safetensors refuses such parts. Tensors that are one stay one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._state: dict[str, Any] = plain_names(model.state_dict())

    def state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state by name."""
        copies: dict[tuple[Any, ...], Tensor] = {}
        state = {}
        for name, value in self._state.items():
            place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            is_part = value.numel() > 0 and value.untyped_storage().nbytes() != value.nbytes
            if is_part and place not in copies:
                copies[place] = value.clone()
            state[name] = copies[place] if is_part else value
        return state
