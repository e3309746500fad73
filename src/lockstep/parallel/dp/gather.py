"""Join the outputs of replicas along a dimension, on one device."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigurationError
from lockstep.parallel.dp.scatter import Device, as_device, is_dataclass_instance, moved, rebuilt


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
    return _join(outputs, as_device(target_device), dim)


def _join(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    first = outputs[0]
    for replica, output in enumerate(outputs):
        if isinstance(first, Tensor) != isinstance(output, Tensor) or (first is None) != (output is None):
            raise ConfigurationError(
                f"The replicas returned different outputs: replica 0 a {type(first).__name__}, replica {replica} a "
                f"{type(output).__name__}.\nReturn the same structure for every part of a batch."
            )
    if isinstance(first, Tensor):
        return _joined_tensor(outputs, device, dim)
    if first is None:
        return None
    if isinstance(first, dict):
        if not all(len(output) == len(first) for output in outputs):
            raise ConfigurationError("All dicts must have the same number of keys")
        return rebuilt(first, [_join([_entry(output, key) for output in outputs], device, dim) for key in first])
    if isinstance(first, (tuple, list)):
        if not all(len(output) == len(first) for output in outputs):
            lengths = [len(output) for output in outputs]
            raise ConfigurationError(f"The replicas returned {type(first).__name__}s of different lengths: {lengths}")
        return rebuilt(first, [_join(items, device, dim) for items in zip(*outputs, strict=True)])
    if is_dataclass_instance(first):
        names = [field.name for field in dataclasses.fields(first)]
        return rebuilt(first, [_join([getattr(output, name) for output in outputs], device, dim) for name in names])
    raise ConfigurationError(
        f"DataParallel cannot gather an output of type {type(first).__name__}.\n"
        "Return tensors, None, or tuples, lists, dicts and dataclasses of them."
    )


def _entry(output: dict[Any, Any], key: Any) -> Any:
    if key not in output:
        raise ConfigurationError(f"The replicas returned dicts with different keys: {key!r} is missing in one of them")
    return output[key]


def _joined_tensor(tensors: Sequence[Tensor], device: torch.device, dim: int) -> Tensor:
    if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and "
            "return a vector.",
            stacklevel=2,
        )
        tensors = [tensor.unsqueeze(0) for tensor in tensors]
    _check_sizes(tensors, dim)
    parts = [moved(tensor, device) for tensor in tensors]
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
