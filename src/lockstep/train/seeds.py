"""The random numbers of a training run: set from the position before each thing that draws any."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.data.loader import MicroBatch
from lockstep.data.seeding import mix, seed_cpu, seed_device

INIT, FORWARD, DATA, UPDATE = 3, 4, 7, 8
"""Keep the bits for initial weights, dropout, made-up data and the optimizer apart from what else the seed is for."""


class Seeds:
    """Sets the generators of this process and of its devices.

    Args:
        seed: What all random numbers derive from.
        devices: Of this process, by share.
        shares: Of a global batch that this process computes.
    """

    def __init__(self, seed: int, devices: Sequence[torch.device], shares: range) -> None:
        self._seed, self._devices, self._shares = seed, devices, shares

    def all(self, *purpose: int, device: torch.device | None = None) -> None:
        """Give what the task makes the same random numbers on every rank."""
        value = mix(self._seed, *purpose)
        seed_cpu(value)
        seed_device(device or self._devices[0], value)

    def forward(self, micro: MicroBatch, index: int) -> None:
        """Give each share of each micro-batch of each step random numbers of its own."""
        position = (self._seed, FORWARD, micro.step, index)
        seed_cpu(mix(*position, self._shares.start))
        for share, device in zip(self._shares, self._devices, strict=False):
            seed_device(device, mix(*position, share))

    def share(self, step: int, index: int, share: int, device: torch.device) -> None:
        """Give one share random numbers of its own, on the CPU and on its device."""
        self.all(FORWARD, step, index, share, device=device)
