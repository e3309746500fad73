"""Split inputs over devices along a dimension, and join the outputs of the replicas again.

Tensors are cut as ``torch.chunk`` cuts them (so there may be fewer chunks than devices), containers are rebuilt around
the chunks, everything else is given to every replica as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lockstep.errors import ConfigurationError

Device = int | str | torch.device
"""A CUDA index (-1 is the CPU, as in torch), a name such as "cpu" or "cuda:1", or a ``torch.device``."""


def as_device(device: Device) -> torch.device:
    """Return ``device`` as a ``torch.device``; "cuda" without an index is the current CUDA device."""
    if isinstance(device, int):
        return torch.device("cpu") if device == -1 else torch.device("cuda", device)
    named = torch.device(device)
    index: int | None = named.index
    if named.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if named.type == "cpu" else named


def scatter(inputs: Any, devices: Sequence[Device], dim: int = 0) -> Sequence[Any]:
    """Split ``inputs`` over ``devices``: one item a chunk, at most one a device.

    Tensors of at least one dimension are split along ``dim`` and copied to their devices; tensors without a dimension
    are copied whole. Tuples, named tuples, lists, dicts and dataclasses are rebuilt with the parts of what they hold (a
    dataclass without tensors is shared). Without any tensor there is one item a device.

    Raises:
        ConfigurationError: The tensors give different numbers of chunks, or one is a ``PackedSequence``.
    """
    places = [as_device(device) for device in devices]
    num_chunks = _num_chunks(inputs, len(places), dim)
    return _split(inputs, places[:num_chunks], len(places), dim)


def scatter_kwargs(
    inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, devices: Sequence[Device], dim: int = 0
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Split positional and keyword arguments alike: one tuple and one dict a replica, none without arguments.

    Raises:
        ConfigurationError: As ``scatter``.
    """
    if not inputs and not kwargs:
        return (), ()
    parts = scatter((inputs, kwargs or {}), devices, dim)
    return tuple(part[0] for part in parts), tuple(part[1] for part in parts)


def _num_chunks(inputs: Any, num_devices: int, dim: int) -> int:
    """Return how many chunks all tensors in ``inputs`` give; ``num_devices`` if there is no tensor."""
    tensors = [tensor for tensor in _tensors_in(inputs) if tensor.dim() > 0]
    counts = [_count_chunks(tensor.size(dim), num_devices) for tensor in tensors]
    # torch cuts all of them down to the fewest, so that the samples beyond are silently not computed.
    if len(set(counts)) > 1:
        fewest, most = tensors[counts.index(min(counts))], tensors[counts.index(max(counts))]
        raise ConfigurationError(
            f"Cannot split the inputs along dimension {dim} over {num_devices} devices: one tensor has "
            f"{fewest.size(dim)} entries there {tuple(fewest.shape)}, another has {most.size(dim)} "
            f"{tuple(most.shape)}.\n"
            "Give every tensor one entry for each sample. A tensor that all replicas need whole can be a buffer of the "
            "module, or be expanded along that dimension."
        )
    return counts[0] if counts else num_devices


def _count_chunks(size: int, num_devices: int) -> int:
    """Return how many tensors ``torch.chunk`` gives."""
    return num_devices if size == 0 else math.ceil(size / math.ceil(size / num_devices))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in _contents(value) or ():
            yield from _tensors_in(item)


def _contents(value: Any) -> list[Any] | None:
    """Return what a container holds, or None for what is no container here."""
    if isinstance(value, PackedSequence):
        raise ConfigurationError(
            "A PackedSequence cannot be split along the batch.\n"
            "Pass the padded tensor and the lengths to the module, and call pack_padded_sequence in its forward."
        )
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if _is_dataclass_instance(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def _split(value: Any, devices: Sequence[torch.device], num_devices: int, dim: int) -> Sequence[Any]:
    """Return one part of ``value`` for each of ``devices``, the first of ``num_devices``."""
    if isinstance(value, Tensor):
        chunks = value.chunk(num_devices, dim) if value.dim() > 0 else [value] * len(devices)
        return tuple(_move(chunk, device) for chunk, device in zip(chunks, devices, strict=True))
    contents = _contents(value)
    if not contents:
        return [value for _ in devices]
    if not isinstance(value, (tuple, list, dict)) and next(_tensors_in(contents), None) is None:
        return [value for _ in devices]
    parts = zip(*(_split(item, devices, num_devices, dim) for item in contents), strict=True)
    return [_rebuild(value, part) for part in parts]


def gather(outputs: Sequence[Any], target_device: Device, dim: int = 0) -> Any:
    """Join the replicas' outputs on ``target_device``; autograd leads back to each of them.

    Tensors are concatenated along ``dim``, tensors without a dimension into a vector (with a warning, since it is one
    entry a replica, not a sample). Tuples, named tuples, lists, dicts and dataclasses are joined item by item; None
    stays None.

    Args:
        outputs: One a replica, all built alike.
        target_device: -1 is the CPU.
        dim: The dimension along which the inputs were scattered.

    Raises:
        ConfigurationError: The outputs differ in more than their sizes along ``dim``, or hold something that cannot be
            joined.
    """
    return _gather(outputs, as_device(target_device), dim)


def _gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    first = outputs[0]
    for replica, output in enumerate(outputs):
        if isinstance(first, Tensor) != isinstance(output, Tensor) or (first is None) != (output is None):
            raise ConfigurationError(
                f"The replicas returned different outputs: replica 0 a {type(first).__name__}, replica {replica} a "
                f"{type(output).__name__}.\nReturn the same structure for every part of a batch."
            )
    if isinstance(first, Tensor):
        return _concatenate(outputs, device, dim)
    if first is None:
        return None
    if isinstance(first, dict):
        if not all(len(output) == len(first) for output in outputs):
            raise ConfigurationError("All dicts must have the same number of keys")
        return _rebuild(first, [_gather([_entry(output, key) for output in outputs], device, dim) for key in first])
    if isinstance(first, (tuple, list)):
        if not all(len(output) == len(first) for output in outputs):
            lengths = [len(output) for output in outputs]
            raise ConfigurationError(f"The replicas returned {type(first).__name__}s of different lengths: {lengths}")
        return _rebuild(first, [_gather(items, device, dim) for items in zip(*outputs, strict=True)])
    if _is_dataclass_instance(first):
        names = [field.name for field in dataclasses.fields(first)]
        return _rebuild(first, [_gather([getattr(output, name) for output in outputs], device, dim) for name in names])
    raise ConfigurationError(
        f"DataParallel cannot gather an output of type {type(first).__name__}.\n"
        "Return tensors, None, or tuples, lists, dicts and dataclasses of them."
    )


def _entry(output: dict[Any, Any], key: Any) -> Any:
    if key not in output:
        raise ConfigurationError(f"The replicas returned dicts with different keys: {key!r} is missing in one of them")
    return output[key]


def _concatenate(tensors: Sequence[Tensor], device: torch.device, dim: int) -> Tensor:
    if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and "
            "return a vector.",
            stacklevel=2,
        )
        tensors = [tensor.unsqueeze(0) for tensor in tensors]
    _check_sizes(tensors, dim)
    parts = [_move(tensor, device) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _check_sizes(tensors: Sequence[Tensor], dim: int) -> None:
    """Check that the shapes are alike but for ``dim``."""
    expected = list(tensors[0].shape)
    for replica, tensor in enumerate(tensors):
        shape = list(tensor.shape)
        if len(shape) == len(expected) > 0:
            expected[dim] = shape[dim]
        if shape != expected or not shape:
            raise ConfigurationError(
                f"Gather got an input of invalid size: got {shape}, but expected {expected} (replica {replica})"
            )


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; a copy to the CPU is complete when this returns."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def _rebuild(container: Any, contents: Iterable[Any]) -> Any:
    """Return a container like ``container`` that holds ``contents``, in the order of its own.

    A dataclass is copied and its fields are set, so that ``__init__`` and ``__post_init__`` do not run again.
    """
    if isinstance(container, dict):
        items = zip(container, contents, strict=True)
        if isinstance(container, defaultdict):
            return type(container)(container.default_factory, items)
        make: Callable[[Any], Any] = type(container)
        return make(items)
    if _is_named_tuple(container):
        return type(container)._make(contents)
    if isinstance(container, tuple):
        return tuple(contents) if type(container) is tuple else type(container)(tuple(contents))
    if isinstance(container, list):
        return type(container)(contents)
    copied = copy.copy(container)
    for field, content in zip(dataclasses.fields(container), contents, strict=True):
        object.__setattr__(copied, field.name, content)
    return copied


def _is_named_tuple(value: Any) -> bool:
    """Whether ``value`` is an instance of a ``typing.NamedTuple`` or of ``collections.namedtuple``."""
    return isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple)


def _is_dataclass_instance(value: Any) -> bool:
    """Whether ``value`` is an instance of a dataclass, not the class itself."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
