"""The bytes of a file as what they mean, by the file's extension. Nothing is ever unpickled."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import ConfigurationError

Decoder = Callable[[bytes], Any]


def _number(data: bytes) -> int:
    return int(data)


def _text(data: bytes) -> str:
    return data.decode()


def _array(data: bytes) -> Tensor:
    return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))


def _image(data: bytes) -> Tensor:
    """Return the picture as red, green and blue: uint8 of shape (3, height, width)."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigurationError(
            "Pictures are read with Pillow, which is not installed.\npip install 'lockstep-torch[data]'"
        ) from None
    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


_DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("cls", "cls2", "count", "id", "index"), _number),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm"), _image),
    "json": json.loads,
    "npy": _array,
}
"""By the part of a field behind its last dot."""


def decoder_for(field: str, own: Mapping[str, Decoder]) -> Decoder:
    """Return what makes a value of the bytes of ``field``; those in ``own`` come first, by whole field or extension."""
    extension = field.rpartition(".")[2]
    return own.get(field) or own.get(extension) or _DECODERS.get(extension) or bytes
