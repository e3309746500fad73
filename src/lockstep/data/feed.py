"""The micro-batches of a process, on its devices, from whatever kind of data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lockstep.data.device import Prefetcher, to_device
from lockstep.data.division import Division
from lockstep.data.loader import LoadOptions, MicroBatch, TrainRequests, load
from lockstep.data.order import GlobalOrder
from lockstep.data.stream import StreamOrder, load_stream


class Feed:
    """Gives the micro-batches of this process one after the other, without end.

    Args:
        samples: With ``len`` and ``[]`` for a `GlobalOrder`, to be iterated for a `StreamOrder`.
        order: Which samples are in which step.
        division: Which of them fall to this process.
        how: How they are loaded.
        devices: Where each share of this process goes.
    """

    def __init__(
        self,
        samples: Any,
        order: GlobalOrder | StreamOrder,
        division: Division,
        how: LoadOptions,
        devices: Sequence[torch.device],
    ) -> None:
        self._samples, self._order, self._division, self._how = samples, order, division, how
        self._devices = dict(zip(division.shares, devices, strict=False))  # torch's DataParallel has one share only
        self._first_step = 0
        self._batches: Iterator[MicroBatch] | None = None

    def next(self) -> MicroBatch:
        """Return the next micro-batch, on the devices. Starts the loader's processes if there are none yet."""
        if self._batches is None:
            batches = self._open()
            self._batches = Prefetcher(batches, self._devices) if self._on_cuda else batches
        batch = next(self._batches)
        return batch if self._on_cuda else to_device(batch, self._devices)

    def prefetch(self) -> None:
        """Start to copy the next micro-batch to CUDA devices, beside what they are computing; nothing on others."""
        if isinstance(self._batches, Prefetcher):
            self._batches.start_next()

    def seek(self, step: int) -> None:
        """Go on with ``step``, counted from 0 over all epochs."""
        self._first_step = step
        self.close()

    def close(self) -> None:
        """Stop the loader's processes."""
        self._batches = None

    @property
    def _on_cuda(self) -> bool:
        return self._devices[self._division.shares.start].type == "cuda"

    def _open(self) -> Iterator[MicroBatch]:
        if isinstance(self._order, StreamOrder):
            return load_stream(self._samples, self._order, self._division, self._how, first_step=self._first_step)
        requests = TrainRequests(self._order, self._division, self._first_step)
        return load(self._samples, requests, self._how, seed=self._order.seed)
