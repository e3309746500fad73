"""Which samples make up each global batch, and which of them fall to whom: pure functions of seed and position.

The order of the samples depends on (seed, epoch) only. The k-th global batch is the k-th slice of the epoch's
permutation, which is worked out only where it is looked at; each share of a batch is contiguous. So the same samples
are in the same step on any number of devices, and a step is found at once in a data set of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import floor

import torch
from torch import Tensor

from lockstep.data.permutation import Permutation
from lockstep.data.seeding import mix

_ORDER = 1
"""Keeps the bits that shuffle apart from those that other purposes draw from the same seed."""

_BLOCK_SIZE = 2**14


def cut(size: int, num_parts: int, index: int) -> range:
    """Return the positions of part ``index`` when ``size`` things are cut into contiguous parts.

    Sizes differ by one at most and the larger parts come first, so parts without anything are the last ones.
    """
    quotient, remainder = divmod(size, num_parts)
    start = index * quotient + min(index, remainder)
    return range(start, start + quotient + (index < remainder))


def cut_by(size: int, proportions: Sequence[float], index: int) -> range:
    """Return the positions of part ``index`` when ``size`` things are cut into contiguous parts by ``proportions``.

    Each part holds its exact portion, rounded up or down: what is left after rounding all down goes, one each, to
    those with the largest remainders, the first of equals first. Equal proportions cut as `cut` does.

    Args:
        size: How many things.
        proportions: A positive number for each part.
        index: Which part.
    """
    ends = _ends(size, tuple(proportions))
    return range(ends[index], ends[index + 1])


@lru_cache(maxsize=64)
def _ends(size: int, proportions: tuple[float, ...]) -> list[int]:
    """Return where each part of `cut_by` starts, and where the last one ends."""
    exact = [Fraction(proportion) for proportion in proportions]  # floats would round otherwise on another machine
    portions = [size * portion / sum(exact) for portion in exact]
    sizes = [floor(portion) for portion in portions]
    by_remainder = sorted(range(len(sizes)), key=lambda part: sizes[part] - portions[part])
    for part in by_remainder[: size - sum(sizes)]:
        sizes[part] += 1
    return [0, *accumulate(sizes)]


@dataclass(frozen=True)
class GlobalOrder:
    """The global batches of a data set of known length, step after step, epoch after epoch.

    Args:
        num_samples: Length of the data set.
        batch_size: Samples of a global batch; the last one of an epoch may hold fewer.
        seed: What the permutations derive from.
        drop_last: Whether to leave that last one out if it is not full.
    """

    num_samples: int
    batch_size: int
    seed: int
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches in an epoch."""
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def epoch(self, step: int) -> int:
        """Return the epoch that ``step`` (counted from 0 over all epochs) falls into."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> Tensor:
        """Return the indices of the global batch of ``step``, a 1-D int64 tensor; the cost depends on its size only."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.batch_size
        stop = min(start + self.batch_size, self.num_samples)
        first = start // _BLOCK_SIZE
        blocks = [
            _block(self.num_samples, self.seed, epoch, block) for block in range(first, (stop - 1) // _BLOCK_SIZE + 1)
        ]
        together = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        return together[start - first * _BLOCK_SIZE : stop - first * _BLOCK_SIZE]


@lru_cache(maxsize=4)
def _block(num_samples: int, seed: int, epoch: int, block: int) -> Tensor:
    """Return so many samples of an epoch's order at once that the work of a batch hardly shows."""
    start = block * _BLOCK_SIZE
    permutation = Permutation(num_samples, mix(seed, _ORDER, epoch))
    return permutation(range(start, min(start + _BLOCK_SIZE, num_samples)))
