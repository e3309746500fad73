"""The loss of a step over all ranks and micro-batches: what it sums to, and out of how many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lockstep.comm.collectives import Group, all_reduce_async
from lockstep.errors import ConfigurationError
from lockstep.train.objective import Part


class Tally:
    """Sums the parts of a step; the sum over the ranks travels while the last backward runs.

    Args:
        device: Where the sums are.
        group: The ranks that take part, or None if it is only this process.
        counts: Whether the losses of a step before were no means over samples; true from the first such one on.
    """

    def __init__(self, device: torch.device, group: Group | None, *, counts: bool = False) -> None:
        self._group = group
        self._sums = torch.zeros(6, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self._future: Future[Any] | None = None
        self._saw_means = self._saw_losses = False
        self.counts = counts

    def add(self, parts: list[Part]) -> None:
        """Add the losses of this process's shares of a micro-batch."""
        for part in parts:
            device = self._sums.device
            if part.is_mean:
                self._sums[1] += part.out_of
            else:
                self._sums[1] += torch.as_tensor(part.out_of).detach().to(device)
            self._sums[0] += part.value.detach().to(device, self._sums.dtype) * part.weight
            self._saw_means |= part.is_mean
            self._saw_losses |= not part.is_mean
            self.counts |= not part.is_mean

    def require_means(self) -> None:
        """Refuse losses that leave the gradient to be divided after backward.

        Raises:
            ConfigurationError: There were some, and the optimizer steps within backward.
        """
        if self._saw_losses:
            raise ConfigurationError(
                "With overlap_optimizer a loss must be a mean over samples, but the task returned a Loss: its gradient "
                "is divided by all ranks' count after backward.\nReturn the mean, or leave overlap_optimizer out."
            )

    def add_bad(self, num_samples: int) -> None:
        """Add the number of samples of this process that could not be read."""
        if num_samples:
            self._sums[2] += num_samples

    def add_wishes(self, *, stop: bool, failed: bool) -> None:
        """Add that this process wants the run to stop, or that something failed beside its steps."""
        if stop:
            self._sums[3] += 1
        if failed:
            self._sums[4] += 1

    def add_out_of_memory(self) -> None:
        """Add that this process ran out of memory."""
        self._sums[5] += 1

    @property
    def num_out_of_memory(self) -> int:
        """How many processes ran out of memory. Blocks until the sum over the ranks is there."""
        return int(self._sums[5].item())

    def start_sum(self) -> None:
        """Start to sum over the ranks, once all parts are in.

        Collective: every rank of the group. Does not block.
        """
        if self._group is not None:
            self._future = all_reduce_async(self._sums, group=self._group)

    def wait(self) -> None:
        """Block until the sum over the ranks is there (on CUDA: let the current stream wait)."""
        if self._future is not None:
            self._future.wait()

    def loss(self) -> Tensor:
        """Return the loss of the step, a 0-dimensional tensor; zero if nothing counted."""
        return self._sums[0] / self._count()

    @property
    def count(self) -> Tensor | None:
        """What the loss of the step is a mean over if that is not samples, 0-dimensional; None if it is."""
        return self._sums[1] if self.counts else None

    @property
    def notes(self) -> Tensor:
        """How many samples could not be read, how many processes want to stop, and on how many something failed."""
        return self._sums[2:5]

    def divisor(self, num_samples: int, *, may_miss: bool = False) -> Tensor | None:
        """Return what a gradient scaled by ``1 / num_samples`` has yet to be divided by, or None if that is one.

        A rank that saw no part cannot know, and divides in any case: by exactly one if the losses were means. So do
        all if samples ``may_miss``, for then only the counts say how many there were.
        """
        if self._saw_means and not self._saw_losses and not may_miss:
            return None
        return self._count() / num_samples

    def _count(self) -> Tensor:
        count = self._sums[1]
        return torch.where(count > 0, count, torch.ones_like(count))
