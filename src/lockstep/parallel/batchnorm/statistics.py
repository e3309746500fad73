"""Mean and variance by channel over the values of several ranks, from each rank's own.

[Note: one layout, one dtype]
A rank's statistics are one float64 vector, whatever the dtype of its input: the number of values in a channel, then
the means of the C channels, then their M2, the sums of squared distances from the mean. So ranks can exchange them
without knowing each other's dtypes, a count beyond 2**24 stays exact, and a rank without any input has zeros to send.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """Of the values of all ranks: mean and biased variance by channel, and how many values a channel has in float64."""

    mean: Tensor
    var: Tensor
    total: Tensor

    @property
    def unbiased_var(self) -> Tensor:
        """The variance as running statistics hold it."""
        return self.var * (self.total / (self.total - 1))

    def to(self, dtype: torch.dtype) -> Statistics:
        """Return them with mean and variance of another dtype."""
        return Statistics(self.mean.to(dtype), self.var.to(dtype), self.total)


def compute_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype in which statistics of ``input`` are computed: float32 for half precision too."""
    return torch.float64 if input.dtype is torch.float64 else torch.float32


def num_values(input: Tensor) -> int:
    """Return how many values each channel of ``input`` has."""
    return input.numel() // input.size(1)


def measure(input: Tensor) -> Tensor:
    """Return count, means and M2 of ``input``, whose second dimension is the channels; see the note above."""
    num_channels = input.size(1)
    if input.numel() == 0:
        return nothing(num_channels, input.device)
    like: tuple[Tensor | None, Tensor | None] = (None, None)
    if input.device.type == "cpu" and input.dtype in (torch.bfloat16, torch.float16):
        # The kernel rounds its results to half precision unless running statistics tell it another dtype.
        like = torch.zeros(num_channels), torch.ones(num_channels)
    mean, var = torch.batch_norm_update_stats(input, *like, 1.0)
    count = num_values(input)
    vector = torch.cat([mean.new_full((1,), count, dtype=torch.float64), mean, var])
    vector[1 + num_channels :] *= count
    return vector


def nothing(num_channels: int, device: torch.device) -> Tensor:
    """Return the statistics of no values."""
    return torch.zeros(1 + 2 * num_channels, dtype=torch.float64, device=device)


def merge(vectors: Tensor) -> Statistics:
    """Return the statistics of the values of all ranks, in float64; with none at all, zeros.

    The squared distances between the ranks' means are added to the squared distances within ranks, so nothing cancels
    where the mean is large. Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979.

    Args:
        vectors: What `measure` returned on each rank, of shape (ranks, 1 + 2 C).
    """
    num_channels = vectors.size(1) // 2
    counts, means, within = vectors[:, :1], vectors[:, 1 : 1 + num_channels], vectors[:, 1 + num_channels :]
    total = counts.sum()
    divisor = total.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    between = (counts * (means - mean).square()).sum(0)
    return Statistics(mean, (within.sum(0) + between) / divisor, total)


def move_towards(running: Tensor, value: Tensor, factor: float) -> None:
    """Replace ``factor`` of a running statistic by a new value, in place."""
    running.lerp_(value.to(running.dtype), factor)
