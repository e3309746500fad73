"""A state as JSON and named tensors, and back: nothing else can be in it, so reading it runs no code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = {type(None), bool, int, float, str}
_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


class UnfitValueError(ValueError):
    """A value that cannot be written; names its type and place."""


class Packer:
    """Takes a state apart. Equal tensors stay one; those that merely overlap become separate.

    Attributes:
        tensors: Copies on the host, by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, place: str) -> Any:
        """Return ``value`` as JSON in which tensors are named by their place.

        Raises:
            UnfitValueError: It holds more than numbers, strings, lists, tuples, dicts and dense tensors.
        """
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return {"tensor": self._add(value, place)}
        if type(value) in {list, tuple}:
            items = [self.pack(item, f"{place}.{number}") for number, item in enumerate(value)]
            return {"tuple": items} if type(value) is tuple else items
        if isinstance(value, dict):
            for key in value:
                if type(key) not in _PLAIN:
                    raise UnfitValueError(f"{type(key).__qualname__} as a key of {place}")
            return {"dict": [[key, self.pack(item, f"{place}.{key}")] for key, item in value.items()]}
        raise UnfitValueError(f"{type(value).__module__}.{type(value).__qualname__} at {place}")

    def _add(self, tensor: Tensor, place: str) -> str:
        if type(tensor) not in {Tensor, torch.nn.Parameter} or tensor.layout != torch.strided:
            raise UnfitValueError(f"{type(tensor).__qualname__} of layout {tensor.layout} at {place}")
        if tensor.dtype not in _DTYPES or tensor.device.type == "meta":
            raise UnfitValueError(f"tensor of {tensor.dtype} on {tensor.device} at {place}")
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() > 0 and memory in self._names:
            return self._names[memory]
        name, number = place, 1
        while name in self.tensors:  # such as the keys 1 and "1" of one dict
            number += 1
            name = f"{place}#{number}"
        self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        self._names[memory] = name
        return name


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `Packer.pack` took apart.

    Raises:
        ValueError: It is not of that form, or a tensor is not there.
    """
    if type(packed) in _PLAIN:
        return packed
    if type(packed) is list:
        return [unpack(item, tensors) for item in packed]
    if type(packed) is dict and len(packed) == 1:
        ((kind, content),) = packed.items()
        if kind == "tensor" and type(content) is str and content in tensors:
            return tensors[content]
        if kind == "tuple" and type(content) is list:
            return tuple(unpack(item, tensors) for item in content)
        if kind == "dict" and type(content) is list:
            pairs = [pair for pair in content if type(pair) is list and len(pair) == 2 and type(pair[0]) in _PLAIN]
            if len(pairs) == len(content):
                return {key: unpack(item, tensors) for key, item in pairs}
    raise ValueError("its state is not of the form that Lockstep writes")
