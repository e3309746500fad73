"""Split inputs over devices along a dimension, and join the outputs of the replicas again."""

import copy
import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lockstep.errors import ConfigurationError

# A CUDA index (-1 is the CPU, as in torch), a name such as "cpu" or "cuda:1", or a ``torch.device``.
Device = int | str | torch.device


def as_device(device: Device) -> torch.device:
    """Return ``device`` as a ``torch.device``; "cuda" without an index is the current CUDA device."""
    if isinstance(device, int):
        return torch.device("cpu") if device == -1 else torch.device("cuda", device)
    named = torch.device(device)
    if named.type == "cuda":
        return named if named.index is not None else torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if named.type == "cpu" else named


def scatter(inputs: Any, devices: Sequence[Device], dim: int = 0) -> Sequence[Any]:
    """Split ``inputs`` over ``devices``: one item a chunk, at most one a device.

    Tensors of at least one dimension are cut along ``dim`` as ``torch.chunk`` does and copied to their devices; others
    are copied whole. Tuples, named tuples, lists, dicts and dataclasses are rebuilt with the parts of what they hold (a
    dataclass without tensors is shared). Without any tensor there is one item a device.

    Raises:
        ConfigurationError: The tensors give different numbers of chunks, or one is a ``PackedSequence``.
    """
    places = [as_device(device) for device in devices]
    # Of all arguments together: a keyword must not make more parts than the positional ones.
    tensors = [tensor for tensor in _tensors_in(inputs) if tensor.dim() > 0]
    counts = [len(tensor.chunk(len(places), dim)) for tensor in tensors] or [len(places)]
    # torch cuts all of them down to the fewest, so that the samples beyond are silently not computed.
    if min(counts) < max(counts):
        fewest, most = tensors[counts.index(min(counts))], tensors[counts.index(max(counts))]
        raise ConfigurationError(
            f"Cannot split the inputs along dimension {dim} over {len(places)} devices: one tensor has "
            f"{fewest.size(dim)} entries there {tuple(fewest.shape)}, another has {most.size(dim)} "
            f"{tuple(most.shape)}.\n"
            "Give every tensor one entry for each sample. A tensor that all replicas need whole can be a buffer of the "
            "module, or be expanded along that dimension."
        )
    return _split(inputs, places[: counts[0]], len(places), dim)


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


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def _split(value: Any, devices: Sequence[torch.device], num_devices: int, dim: int) -> Sequence[Any]:
    """Return one part of ``value`` for each of ``devices``, the first of ``num_devices``."""
    if isinstance(value, Tensor):
        chunks = value.chunk(num_devices, dim) if value.dim() > 0 else [value] * len(devices)
        return tuple(_move(chunk, device) for chunk, device in zip(chunks, devices, strict=True))
    # A dataclass without tensors is shared, not copied: it may be a configuration, or hold what cannot be copied.
    contents = _contents(value)
    is_dataclass = not isinstance(value, (tuple, list, dict))
    if not contents or (is_dataclass and next(_tensors_in(contents), None) is None):
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
    first, device = outputs[0], as_device(target_device)
    kind = type(first).__name__
    for replica, output in enumerate(outputs):
        if isinstance(first, Tensor) != isinstance(output, Tensor) or (first is None) != (output is None):
            raise ConfigurationError(
                f"The replicas returned different outputs: replica 0 a {kind}, replica {replica} a "
                f"{type(output).__name__}.\nReturn the same structure for every part of a batch."
            )
    if isinstance(first, Tensor):
        return _concatenate(outputs, device, dim)
    if first is None:
        return None
    contents = [_contents(output) for output in outputs]
    if contents[0] is None:
        raise ConfigurationError(
            f"DataParallel cannot gather an output of type {kind}.\n"
            "Return tensors, None, or tuples, lists, dicts and dataclasses of them."
        )
    if isinstance(first, dict):
        if any(output.keys() != first.keys() for output in outputs):
            keys = ", ".join(str(list(output)) for output in outputs)
            raise ConfigurationError(f"All dicts must have the same keys, but the replicas returned {keys}")
        contents = [[output[key] for key in first] for output in outputs]  # in one order
    lengths = [len(each or ()) for each in contents]
    if len(set(lengths)) > 1:
        raise ConfigurationError(f"The replicas returned {kind}s of different lengths: {lengths}")
    return _rebuild(first, [gather(items, device, dim) for items in zip(*contents, strict=True)])


def _concatenate(tensors: Sequence[Tensor], device: torch.device, dim: int) -> Tensor:
    if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and "
            "return a vector.",
            stacklevel=2,
        )
        tensors = [tensor.unsqueeze(0) for tensor in tensors]
    expected = list(tensors[0].shape)
    for replica, tensor in enumerate(tensors):
        shape = list(tensor.shape)
        if len(shape) == len(expected) > 0:
            expected[dim] = shape[dim]  # the shapes are alike but for this one
        if shape != expected or not shape:
            raise ConfigurationError(
                f"Gather got an input of invalid size: got {shape}, but expected {expected} (replica {replica})"
            )
    parts = [_move(tensor, device) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    # A copy to the CPU must be complete when this returns: nobody there waits for a stream.
    return tensor.to(device, non_blocking=device.type == "cuda")


def _rebuild(container: Any, contents: Iterable[Any]) -> Any:
    """Return a container like ``container`` that holds ``contents``, in the order of its own."""
    kind = type(container)
    if isinstance(container, dict):
        items = zip(container, contents, strict=True)
        return kind(container.default_factory, items) if isinstance(container, defaultdict) else kind(items)
    if isinstance(container, tuple) and isinstance(getattr(container, "_fields", None), tuple):  # a named tuple
        return kind._make(contents)
    if isinstance(container, (tuple, list)):
        return kind(tuple(contents))  # torch.return_types take a tuple only
    # A dataclass, of which __init__ and __post_init__ are not to run again.
    copied = copy.copy(container)
    for field, content in zip(dataclasses.fields(container), contents, strict=True):
        object.__setattr__(copied, field.name, content)
    return copied
