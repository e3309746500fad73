"""How flat tensors pass between the devices of one process: copies, and NCCL where it gives the same bits.

Sums are in the fixed tree ``(0 + 1) + (2 + 3)`` of `sum_in_tree`. NCCL adds in the order of its rings, which is another
one for three and more devices; for two there is only one sum, and ``a + b`` has the bits of ``b + a``. So NCCL
distributes weights among any number of GPUs, and adds for two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.cuda import nccl
from typing_extensions import override

from lockstep.parallel.dp.lanes import Lanes
from lockstep.parallel.zero.partition import shard_bounds

Bounds = Sequence[tuple[int, int]]
"""By replica, where its slice of a flat tensor begins and ends."""

_WORTH_CUTTING_NUMEL = 2**18
"""Below, sending a whole tensor to each device takes no longer than sending it in parts that they pass on."""


class Transport(ABC):
    """Moves flat tensors between replicas. Abstract: `make_transport` returns the one that fits the devices.

    What a method gets was computed on the current streams, and what it returns can be used there. The host does not
    wait for a device.

    Args:
        devices: One a replica; the same one may be named several times.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)

    @abstractmethod
    def broadcast(self, flat: Tensor, targets: Sequence[torch.device]) -> list[Tensor]:
        """Return a copy of ``flat``, which is on the first replica's device, on each of ``targets``: other devices."""

    @abstractmethod
    def reduce_scatter(self, rows: Sequence[Tensor], bounds: Bounds) -> list[Tensor]:
        """Add flat tensors, one of each of the first replicas, in the fixed tree, each owner its slice.

        Args:
            rows: All of one size. Their memory is used up.
            bounds: One for each of ``rows``, and maybe for owners without a row.

        Returns:
            By owner, its slice of the sum, on its device. That of the first replica lies in ``rows[0]``.
        """

    @abstractmethod
    def gather(self, slices: Sequence[Tensor], bounds: Bounds, out: Tensor) -> None:
        """Copy the slices of all owners to ``out`` on the first replica's device; one that lies there stays."""


@final
class CopyTransport(Transport):
    """Plain copies, from each device to each other at the same time; also for several names of one device."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self._lanes = Lanes(devices)

    @override
    @torch.no_grad()
    def broadcast(self, flat: Tensor, targets: Sequence[torch.device]) -> list[Tensor]:
        """Send each target one part, which it passes on to the others: no device sends the whole more than once."""
        source, copies = self._devices[0], [torch.empty_like(flat, device=target) for target in targets]
        with self._lanes.forked():
            if len(targets) < 2 or flat.numel() < _WORTH_CUTTING_NUMEL:
                for copy, target in zip(copies, targets, strict=True):
                    self._lanes.copy(flat, source, copy, target)
                return copies
            bounds = shard_bounds(flat.numel(), len(targets))
            for copy, target, (start, stop) in zip(copies, targets, bounds, strict=True):
                self._lanes.copy(flat[start:stop], source, copy[start:stop], target)
                self._lanes.turn_around(target)
            for sender, receiver in _in_turns(len(targets)):
                start, stop = bounds[sender]
                part, out = copies[sender][start:stop], copies[receiver][start:stop]
                self._lanes.copy(part, targets[sender], out, targets[receiver])
        return copies

    @override
    @torch.no_grad()
    def reduce_scatter(self, rows: Sequence[Tensor], bounds: Bounds) -> list[Tensor]:
        """Send each owner all others' parts of its slice; it adds them."""
        parts = [[row[start:stop] for row in rows] for start, stop in bounds]
        sends = [
            (sender, owner)
            for sender, owner in _in_turns(len(bounds))
            if sender < len(rows) and self._devices[sender] != self._devices[owner]
        ]
        # Memory comes from the current streams, so it is asked for before the lanes begin.
        arrivals = {turn: torch.empty_like(parts[turn[1]][turn[0]], device=self._devices[turn[1]]) for turn in sends}
        with self._lanes.forked():
            for sender, owner in sends:
                out = arrivals[sender, owner]
                self._lanes.copy(parts[owner][sender], self._devices[sender], out, self._devices[owner])
        return [
            _sum([arrivals.get((sender, owner), parts[owner][sender]) for sender in range(len(rows))])
            for owner in range(len(bounds))
        ]

    @override
    @torch.no_grad()
    def gather(self, slices: Sequence[Tensor], bounds: Bounds, out: Tensor) -> None:
        """Send each slice."""
        home = self._devices[0]
        with self._lanes.forked():
            for index, (piece, (start, stop)) in enumerate(zip(slices, bounds, strict=True)):
                place = out[start:stop]
                if self._devices[index] != home:
                    self._lanes.copy(piece, self._devices[index], place, home)
                elif not piece.is_set_to(place):
                    place.copy_(piece)


@final
class NcclTransport(Transport):
    """NCCL in this one process, for replicas on a CUDA device each."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self._copies = CopyTransport(devices)

    @override
    @torch.no_grad()
    def broadcast(self, flat: Tensor, targets: Sequence[torch.device]) -> list[Tensor]:
        """Let NCCL choose the way. Blocks the first time, until NCCL has made its connections."""
        copies = [torch.empty_like(flat, device=target) for target in targets]
        nccl.broadcast([flat, *copies], root=0)
        return copies

    @override
    @torch.no_grad()
    def reduce_scatter(self, rows: Sequence[Tensor], bounds: Bounds) -> list[Tensor]:
        """Let NCCL add for two replicas with slices of one size; else copy, and add in the tree."""
        if not len(rows) == len(bounds) == 2 or bounds[0][1] - bounds[0][0] != bounds[1][1] - bounds[1][0]:
            return self._copies.reduce_scatter(rows, bounds)
        sums = [row[start:stop] for row, (start, stop) in zip(rows, bounds, strict=True)]
        nccl.reduce_scatter(list(rows), sums)
        return sums

    @override
    def gather(self, slices: Sequence[Tensor], bounds: Bounds, out: Tensor) -> None:
        """Copy: NCCL would send all slices to all devices."""
        self._copies.gather(slices, bounds, out)


def make_transport(devices: Sequence[torch.device]) -> Transport:
    """Return NCCL for CUDA devices that are all different, where torch has it, else copies."""
    distinct = len(set(devices)) == len(devices) > 1
    if distinct and all(device.type == "cuda" for device in devices) and hasattr(torch._C, "_nccl_reduce_scatter"):
        return NcclTransport(devices)
    return CopyTransport(devices)


def _in_turns(count: int) -> list[tuple[int, int]]:
    """Return all pairs of a sender and a receiver, so ordered that in each round all send and all receive once."""
    return [(sender, (sender + shift) % count) for shift in range(1, count) for sender in range(count)]


def _sum(parts: list[Tensor]) -> Tensor:
    """Add in the tree, in the memory of ``parts``."""
    while len(parts) > 1:
        pairs = zip(parts[0::2], parts[1::2], strict=False)
        merged = [left.add_(right) for left, right in pairs]
        parts = merged + parts[2 * len(merged) :]
    return parts[0]
