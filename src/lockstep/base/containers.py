"""The one walk through batches, arguments and outputs: which containers hold tensors, and how they are made again.

torch's own walk, ``torch.utils._pytree``, does less: dataclasses, mappings that are no dicts, and subclasses of lists
and dicts are leaves to it unless they were registered, and it would move the lengths of a PackedSequence, which must
stay on the CPU.
"""

import copy
import gc
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from numbers import Number
from operator import is_not
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def items_of(value: Any) -> list[Any] | None:
    """Return the items of a container, in its order; None if ``value`` is none.

    Containers are lists, tuples, named tuples, sets, mappings and dataclasses, and what is derived from them. Of a
    mapping, the items are its values; of a dataclass, its fields.
    """
    if _has_fields(value):
        return [getattr(value, name) for name in _field_names(value)]
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple | set | frozenset) else None


def with_items(value: Any, items: Iterable[Any]) -> Any:
    """Return a container like ``value``, of its type, with other ``items`` in the order of `items_of`.

    No constructor runs again where there is another way: it may take other arguments, or do more than store them.
    """
    kind, new = type(value), tuple(items)
    if isinstance(value, tuple):  # of the types in torch.return_types, only the constructor makes one
        return kind(new) if hasattr(kind, "n_fields") else tuple.__new__(kind, new)
    if isinstance(value, set | frozenset):
        return kind(new)
    if isinstance(value, Mapping) and not isinstance(value, dict):
        mapped = dict(zip(value, new, strict=True))
        try:  # a copy might share its memory with the original
            return kind(mapped)
        except TypeError:
            return mapped
    copied = copy.copy(value)
    if _has_fields(value):
        for name, item in zip(_field_names(value), new, strict=True):
            object.__setattr__(copied, name, item)  # also of a frozen one
    elif isinstance(value, dict):
        for key, item in zip(value, new, strict=True):
            copied[key] = item
    else:
        copied[:] = new
    return copied


_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return the items by their key, in the order in which they and the keys first come."""
    groups: dict[_Key, list[_Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def in_chunks(
    items: Iterable[_Item], kind: Callable[[_Item], Hashable], nbytes: Callable[[_Item], int], limit: int
) -> list[list[_Item]]:
    """Return lists of items of one kind, each of at most ``limit`` bytes or one item, in the order of their firsts."""
    chunks: list[list[_Item]] = []
    open_chunks: dict[Hashable, tuple[list[_Item], int]] = {}
    for item in items:
        key, size_bytes = kind(item), nbytes(item)
        chunk, filled = open_chunks.get(key, ([], 0))
        if not chunk or filled + size_bytes > limit:
            chunk, filled = [], 0
            chunks.append(chunk)
        chunk.append(item)
        open_chunks[key] = chunk, filled + size_bytes
    return chunks


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``value``: itself, or in nested containers, see `items_of`."""
    if isinstance(value, Tensor):
        yield value
    for item in items_of(value) or ():
        yield from find_tensors(item)


# They hold no tensor, or others than those of one forward.
_NOT_SEARCHED = str, bytes, Number, type, ModuleType, nn.Module
_MAX_SEARCHED = 10_000


def search_tensors(value: Any) -> Iterator[Tensor]:
    """Yield each tensor that ``value`` refers to once, also in objects of any class and in variables of functions."""
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < _MAX_SEARCHED:
        part = left.pop()
        if id(part) in seen or isinstance(part, _NOT_SEARCHED):
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, FunctionType):  # without the global variables
            left += part.__closure__ or ()
        else:  # the garbage collector knows what objects hold, in attributes, slots or C structures
            left += gc.get_referents(part)


def hook_tensors(value: Any, hook: Callable[[Any, Tensor], Tensor | None]) -> int:
    """Make autograd call ``hook`` for each tensor in ``value``, in every backward through it; return their number.

    See `search_tensors`.

    Its arguments are the ``next_functions`` of the tensor's ``grad_fn``, and the gradient.
    """
    num_hooked = 0
    for tensor in search_tensors(value):
        if tensor.grad_fn is not None:  # a hook on a leaf would be permanent
            tensor.register_hook(partial(hook, tensor.grad_fn.next_functions))
            num_hooked += 1
    return num_hooked


def map_tensors(value: Any, function: Callable[[Tensor], Tensor], other: Callable[[Any], Any] | None = None) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it, and ``other`` to everything else.

    Lists and dicts are always new ones; what holds no tensor stays the same object otherwise. A PackedSequence is
    passed to ``other`` as a whole, since its parts must fit each other: it has methods like those of a tensor.
    """
    if isinstance(value, Tensor):
        return function(value)
    items = None if isinstance(value, PackedSequence) else items_of(value)
    if items is None:
        return value if other is None else other(value)
    mapped = [map_tensors(item, function, other) for item in items]
    is_new = isinstance(value, list | dict) or any(map(is_not, mapped, items))
    return with_items(value, mapped) if is_new else value


def _has_fields(value: Any) -> bool:
    """Return whether it is to be taken by its fields: a mapping with keys is not, though some are dataclasses, too."""
    return is_dataclass(value) and not isinstance(value, type) and not (isinstance(value, Mapping) and len(value))


def _field_names(value: Any) -> list[str]:
    return [field.name for field in fields(value) if hasattr(value, field.name)]
