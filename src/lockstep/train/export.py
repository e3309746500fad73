"""The bare model's weights as a safetensors file."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_model
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.train.atomic import whole_file


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
        save_model(model, str(temporary), metadata={"format": "pt"})
