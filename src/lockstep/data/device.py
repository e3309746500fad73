"""Batches on their way to the devices: any structure of tensors, and ahead of time where a device allows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.data.loader import MicroBatch


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it.

    Looks into mappings, lists, tuples, named tuples and dataclasses, and calls ``to`` on what offers it only through
    ``function``; everything else is passed as it is.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(item, function) for key, item in value.items()}
        return mapped if type(value) is dict else _like(value, mapped)
    if isinstance(value, tuple):
        items = [map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_tensors(item, function) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {field.name: map_tensors(getattr(value, field.name), function) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return ``items`` in the type of ``value`` if it can be made from them, as for an OrderedDict."""
    make: Any = type(value)
    try:
        return make(items)
    except TypeError:
        return items


def to_device(batch: MicroBatch, devices: Sequence[torch.device]) -> MicroBatch:
    """Return ``batch`` with the i-th share on the i-th device; pinned memory is copied without blocking."""
    moved = [
        map_tensors(share, partial(_to, device=device)) for share, device in zip(batch.batches, devices, strict=False)
    ]
    return batch._replace(batches=moved)


class Prefetcher:
    """Copies the next micro-batch to CUDA on a stream of its own while the current one is computed.

    Not thread-safe. Holds one batch more than is in use on each device.
    """

    def __init__(self, batches: Iterator[MicroBatch], devices: Sequence[torch.device]) -> None:
        self._batches = batches
        self._devices = devices
        self._streams = [torch.cuda.Stream(device) for device in devices]
        self._ahead: MicroBatch | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch, usable on each device's current stream."""
        batch, self._ahead = self._ahead or self._copy(), None
        for device, stream in zip(self._devices, self._streams, strict=True):
            torch.cuda.current_stream(device).wait_stream(stream)
        for share, device in zip(batch.batches, self._devices, strict=False):
            map_tensors(share, partial(_record, stream=torch.cuda.current_stream(device)))
        return batch

    def start_next(self) -> None:
        """Start to copy the batch after the one last returned; call it when the device has enough to do."""
        self._ahead = self._copy()

    def _copy(self) -> MicroBatch:
        batch = next(self._batches)
        moved = []
        for share, device, stream in zip(batch.batches, self._devices, self._streams, strict=False):
            with torch.cuda.stream(stream):
                moved.append(map_tensors(share, partial(_to, device=device)))
        return batch._replace(batches=moved)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=tensor.is_pinned())


def _record(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Tell the allocator that ``tensor``, made on another stream, is in use on ``stream``."""
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor
