"""A state as JSON and named tensors, and back: nothing else can be in it, so reading it runs no code."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.train.checkpoints.tensors import DTYPES

_PLAIN = {type(None), bool, int, float, str}


class UnfitValueError(ValueError):
    """A value that cannot be written; names its type and place."""


class Packer:
    """Takes a state apart. Equal tensors stay one; those that merely overlap become separate.

    Attributes:
        tensors: By name, where they lie: not copies.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, place: str) -> Any:
        """Return ``value`` as JSON in which tensors are named by their place.

        Raises:
            UnfitValueError: It holds more than numbers, strings, bytes, lists, tuples, dicts and dense tensors.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._pack_tensor(value, place)
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind in {list, tuple}:
            items = [self.pack(item, f"{place}.{number}") for number, item in enumerate(value)]
            return {"tuple": items} if kind is tuple else items
        if isinstance(value, dict):
            return {"dict": [[_pack_key(key, place), self.pack(item, f"{place}.{key}")] for key, item in value.items()]}
        raise UnfitValueError(f"{kind.__module__}.{kind.__qualname__} at {place}")

    def _pack_tensor(self, tensor: Tensor, place: str) -> Any:
        if type(tensor) not in {Tensor, torch.nn.Parameter} or tensor.layout != torch.strided:
            raise UnfitValueError(f"{type(tensor).__qualname__} of layout {tensor.layout} at {place}")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        kind = "tensor"
        if tensor.is_complex():
            tensor, kind = torch.view_as_real(tensor), "complex tensor"
        if tensor.dtype not in DTYPES or tensor.device.type == "meta":
            raise UnfitValueError(f"tensor of {tensor.dtype} on {tensor.device} at {place}")
        return {kind: self._add(tensor, place)}

    def _add(self, tensor: Tensor, place: str) -> str:
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() > 0 and memory in self._names:
            return self._names[memory]
        # A name goes into the file's header, whose reader knows no half characters.
        place = place.encode("utf-8", "backslashreplace").decode()
        name, number = place, 1
        while name in self.tensors:  # such as the keys 1 and "1" of one dict
            number += 1
            name = f"{place}#{number}"
        self.tensors[name] = tensor
        self._names[memory] = name
        return name


def _pack_key(key: Any, place: str) -> Any:
    if type(key) in {*_PLAIN, bytes, complex, tuple}:
        packer = Packer()
        packed = packer.pack(key, f"a key of {place}")
        if not packer.tensors:
            return packed
    raise UnfitValueError(f"{type(key).__qualname__} as a key of {place}")


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
        if kind == "complex tensor" and type(content) is str and content in tensors:
            return _complex(tensors[content])
        if kind == "tuple" and type(content) is list:
            return tuple(unpack(item, tensors) for item in content)
        if kind == "dict" and type(content) is list and all(type(pair) is list and len(pair) == 2 for pair in content):
            return {_unpack_key(key): unpack(item, tensors) for key, item in content}
        if kind == "complex" and type(content) is list and [type(part) for part in content] == [float, float]:
            return complex(*content)
        if kind == "bytes" and type(content) is str:
            return base64.b64decode(content, validate=True)
    raise ValueError("its state is not of the form that Lockstep writes")


def _unpack_key(packed: Any) -> Any:
    key = unpack(packed, {})
    try:
        hash(key)
    except TypeError:
        raise ValueError("a key in its state is not of the form that Lockstep writes") from None
    return key


def _complex(pairs: Tensor) -> Tensor:
    if pairs.dtype not in {torch.float16, torch.float32, torch.float64} or pairs.shape[-1:] != (2,):
        raise ValueError("a complex tensor in its state is not of the form that Lockstep writes")
    return torch.view_as_complex(pairs)
