"""The micro-batches of a process, on its devices, from any kind of data set."""

import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from lockstep.accelerator import recorded_event
from lockstep.containers import map_tensors
from lockstep.data.loader import LoadOptions, MicroBatch, StreamNote, load, train_requests
from lockstep.data.order import BatchSplit, GlobalOrder
from lockstep.data.stream import StreamOrder, StreamPosition, load_stream

# --- To the devices


@runtime_checkable
class Movable(Protocol):
    """An object that can be moved to a device, such as the graphs of a graph library."""

    def to(self, device: torch.device) -> Any:
        """Return it on ``device``."""


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=tensor.is_pinned())


def _move(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Movable) and not isinstance(value, type) else value


def to_device(batch: MicroBatch, devices: Mapping[int, torch.device]) -> MicroBatch:
    """Return ``batch`` with each share on the device of its number; pinned memory is copied without blocking."""
    pairs = _on_devices(batch, devices)
    moved = [map_tensors(each, partial(_to, device=device), partial(_move, device=device)) for each, device in pairs]
    return batch._replace(batches=moved)


def _on_devices(batch: MicroBatch, devices: Mapping[int, torch.device]) -> Iterator[tuple[Any, torch.device]]:
    """Yield each share of a batch with its device."""
    return zip(batch.batches, map(devices.__getitem__, batch.numbers), strict=True)


# The begin and the end of a copy, as events of the device.
Copy = tuple[torch.Event, torch.Event]


class Prefetcher:
    """Copies the next micro-batch to its devices on separate streams while the current one is computed.

    Not thread-safe. Holds one additional batch on each device. Objects whose tensors are not accessible are copied only
    when their batch is needed: their tensors cannot be marked as in use for the allocator.

    Args:
        batches: In host memory.
        devices: By the number of a share.
        copies: Gets the begin and the end of each copy to the first device, if not None.
    """

    def __init__(
        self, batches: Iterator[MicroBatch], devices: Mapping[int, torch.device], copies: list[Copy] | None = None
    ) -> None:
        self._batches, self._copies = batches, copies
        self._devices = devices
        self._streams = {device: torch.Stream(device) for device in devices.values()}
        self._ahead: MicroBatch | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch, usable on each device's current stream."""
        batch, self._ahead = self._ahead or self._copy(), None
        shares = []
        for share, device in _on_devices(batch, self._devices):
            current = torch.accelerator.current_stream(device)
            current.wait_stream(self._streams[device])
            shares.append(map_tensors(share, partial(_record, stream=current), partial(_move, device=device)))
        return batch._replace(batches=shares)

    def start_next(self) -> None:
        """Start to copy the batch after the last returned one; call it when the device has enough work."""
        self._ahead = self._copy()

    def _copy(self) -> MicroBatch:
        batch = next(self._batches)
        shares: list[Any] = []
        for share, device in _on_devices(batch, self._devices):
            is_timed = self._copies is not None and not shares
            with self._streams[device]:
                began = recorded_event(device, timing=True) if is_timed else None
                shares.append(map_tensors(share, partial(_to, device=device)))
                if self._copies is not None and began is not None:
                    self._copies.append((began, recorded_event(device, timing=True)))
        return batch._replace(batches=shares)


def _record(tensor: Tensor, stream: torch.Stream) -> Tensor:
    """Mark for the allocator that ``tensor``, created on another stream, is in use on ``stream``."""
    if not tensor.is_cpu:
        tensor.record_stream(stream)
    return tensor


# --- The iterator

Order = GlobalOrder | StreamOrder


class BatchIterator:
    """Returns the micro-batches of this process in order, without end.

    Args:
        samples: With ``len`` and ``[]`` for a `GlobalOrder`, iterable for a `StreamOrder`.
        order: Which samples are in which step.
        split: Which of them belong to this process.
        how: How they are loaded.
        devices: The device of each share of this process.

    Attributes:
        copies: Gets the begin and the end of each copy to the first device, if a list is assigned in time.
    """

    def __init__(
        self, samples: Any, order: Order, split: BatchSplit, how: LoadOptions, devices: Sequence[torch.device]
    ) -> None:
        self._samples, self._order, self._split, self._how = samples, order, split, how
        self._devices = dict(zip(split.shares, devices, strict=False))  # torch's DataParallel has one share only
        self.copies: list[Copy] | None = None
        self._position = StreamPosition()
        self._note: StreamNote | None = None
        self._batches: Iterator[MicroBatch] | None = None
        self._prefetches = devices[0].type != "cpu"

    def next(self) -> MicroBatch:
        """Return the next micro-batch, on the devices. Starts the loader's processes if there are none yet."""
        if self._batches is None:
            batches = self._open()
            self._batches = Prefetcher(batches, self._devices, self.copies) if self._prefetches else batches
        batch = next(self._batches)
        # Of this batch, not of the newest: loader processes and prefetching are ahead of the training.
        self._note = batch.note
        return batch

    def prefetch(self) -> None:
        """Start to copy the next micro-batch to the devices while they compute."""
        if isinstance(self._batches, Prefetcher):
            self._batches.start_next()

    def seek(self, step: int, state: dict[str, Any] | None = None) -> None:
        """Continue with ``step``, counted from 0 over all epochs.

        Args:
            step: The step of the next micro-batch.
            state: Of a stream, the result of `state` after the previous step.
        """
        self._position, self._note = StreamPosition(step, state), None
        self.close()

    def state(self) -> dict[str, Any] | None:
        """Return the stream's position after the last micro-batch's step; None if unknown or without a stream.

        Warns on the first rank if the stream's states cannot be used.
        """
        note = self._note
        if note is None:
            return self._position.state
        if note.problem is not None and self._split.shares.start == 0:
            warnings.warn(
                "A resumed run will read and discard the earlier samples: state_dict() of "
                f"{type(self._samples).__name__} "
                f"{note.problem}.\nReturn all that its position and order depend on as numbers, strings, lists, dicts "
                "and tensors, to resume at once.",
                stacklevel=2,
            )
        return None if note.state is None else cast(dict[str, Any], pickle.loads(note.state))

    def close(self) -> None:
        """Stop the loader's processes."""
        self._batches = None  # they end with the iterator, to which there is no other reference

    def _open(self) -> Iterator[MicroBatch]:
        if isinstance(self._order, StreamOrder):
            return load_stream(self._samples, self._order, self._split, self._how, position=self._position)
        requests = train_requests(self._order, self._split, self._position.step)
        return load(self._samples, requests, self._how, seed=self._order.seed)
