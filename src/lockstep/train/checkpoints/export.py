"""The bare model's weights as a safetensors file, written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.errors import ConfigurationError
from lockstep.train.checkpoints.model_state import plain_names


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path to write to; what was written there is ``path`` once the block is left, and on disk.

    An error in the block, or the end of the process, leaves ``path`` as it was.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Block until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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

    The same weights are the same bytes. Tensors that share their memory, such as tied weights, are written once, under
    the first of their names in the alphabet; ``safetensors.torch.load_model`` puts them back in every place.
    """
    # ``safetensors.torch.save_model`` would also list the other names, in an order that differs from call to call.
    found: set[object] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in sorted(plain_names(model.state_dict()).items()):
        memory = value.untyped_storage()
        tensor = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and tensor in found:
            continue
        # Other parts of the same memory, such as ZeRO-1's flat buffers have, are refused unless they are copies.
        shares_memory = memory.nbytes() != value.nbytes or memory.data_ptr() in found
        tensors[name] = value.clone().contiguous() if shares_memory else value.contiguous()
        found |= {tensor, memory.data_ptr()}
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
