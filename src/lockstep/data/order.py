"""Who reads which samples: random state, permutations, global batches, and their division."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from math import floor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Batch = TypeVar("_Batch")

# --- Random state
#
# No random state is carried from step to step: before each micro-batch, and before each sample is fetched, the
# generators are seeded from (seed, purpose, position). So a run draws the same numbers if it was resumed, if it is
# interleaved with another run, or if four processes load its samples.


@unique
class Purpose(IntEnum):
    """What random numbers are for: separates random numbers that follow from the same seed.

    The order of the samples of a resumed run follows from these numbers, so none is changed, or used again.
    """

    ORDER = 1  # of samples, or of shards, in an epoch
    SAMPLE = 2  # what a data set of `fit` draws for a sample
    INIT = 3  # initial weights
    FORWARD = 4  # dropout and the like in a micro-batch
    EVALUATE = 5  # all that an evaluation draws
    STREAM = 6  # what a stream draws before its first sample of a step
    DATA = 7  # the data set that a task creates
    WINDOW = 8  # the order of samples in a window of shards
    COMPARED = 9  # which samples the ranks compare
    RANK = 10  # the generators of each rank, after `prepare`
    UPDATE = 11  # what optimizers draw
    PREPARED_SAMPLE = 12  # what the data set of a prepared loader draws for a sample
    COUNTERFACTUAL = 40  # forward, in an experiment of `verify`
    REFERENCE_FORWARD = 42  # forward, in the reference loop of `verify`


def mix(*parts: int) -> int:
    """Return 63 well-mixed bits of ``parts``; a different order or count of parts gives different bits."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_cpu(value: int) -> None:
    """Set the generators of Python, numpy and torch's CPU."""
    random.seed(value)
    _seed_numpy_and_torch(value)


def _seed_numpy_and_torch(value: int) -> None:
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)


class SampleSeeds:
    """Seeds the CPU's generators before each sample of a data set; Python's only if samples draw from it.

    [Note: samples that do not draw from `random`]
    Seeding takes 7 us a sample, often more than it takes to read one from memory, and half of that is for `random`. So
    after the first batch its next number is compared with that after its last seed: if they are the same, nothing was
    drawn, and in the next batches it is seeded once. If one of them draws from it all the same, that batch is read
    again with a seed for each sample, as are all after it. So samples have the same numbers in any case. The others are
    always seeded: data sets also ask for ``torch.initial_seed()`` or a state of numpy, which is not seen afterwards.

    Attributes:
        draws: Whether samples draw from `random`; None: not known yet.
    """

    def __init__(self, draws: bool | None = None) -> None:
        self.draws = draws
        self._newest: int | None = None

    def seed(self, *position: int) -> None:
        """Seed for the sample that is read next, in a call of `read`."""
        value = mix(*position)
        if self.draws is False:
            _seed_numpy_and_torch(value)
        else:
            seed_cpu(value)
            self._newest = value

    def read(self, load: Callable[[], _Batch], again: Callable[[], _Batch]) -> _Batch:
        """Return a batch: what ``load`` returns, or ``again``, which reads the samples of ``load`` once more.

        Changes the states of the generators.
        """
        if self.draws is False:
            self._newest = 0
            random.seed(0)
        batch = load()
        if self.draws or self._newest is None:
            return batch
        number, is_first = random.random(), self.draws is None
        random.seed(self._newest)
        self.draws = number != random.random()
        return again() if self.draws and not is_first else batch


def seed_device(device: torch.device, value: int) -> None:
    """Set the generator of an accelerator's device; the CPU's is set by `seed_cpu`."""
    if device.type != "cpu":
        with torch.accelerator.device_index(device.index):  # the module's function seeds the current device
            torch.get_device_module(device).manual_seed(value)


# --- [Note: a permutation without a table]
#
# A position is written with the smallest number of bits that can represent the last position, and these are split into
# two halves. Each round changes one half by a keyed hash of the other, in turn. Each round can be inverted, whatever
# the hash is, so all rounds together are a bijection of the numbers with that many bits. If a result is not a position,
# the rounds are repeated until it is one; that is still a bijection. At least half of the numbers are positions, so
# this takes two passes on average. With few bits this would need many rounds until every order is equally likely, so a
# short permutation is a table: the positions sorted by a keyed hash of each. The arithmetic uses unsigned 64-bit
# integers, with the same results on every machine and with every version of numpy.
#
# Source: M. Luby and C. Rackoff, How to construct pseudorandom permutations, 1988 (rounds on halves); J. Black and P.
# Rogaway, Ciphers with arbitrary finite domains, 2002 (again until it is in range); G. Steele et al., Fast splittable
# pseudorandom number generators, 2014 (the hash).

# Four rounds look random with many bits; twelve leave a margin with the few bits just above the size of a table.
_NUM_ROUNDS = 12

# Up to this size, sorting all positions takes about as long as computing the block that is read together anyway.
_TABLE_SIZE = 2**14

_Bits = NDArray[np.uint64]


class Permutation:
    """A pseudo-random permutation of the positions ``0 ... size - 1``, the same for the same ``key``.

    Args:
        size: At least 1, at most 2**62.
        key: 63 bits, such as from `mix`.
    """

    def __init__(self, size: int, key: int) -> None:
        assert 1 <= size <= 2**62, size
        self._size = np.uint64(size)
        num_bits = max(1, (size - 1).bit_length())
        self._low_bits = np.uint64((num_bits + 1) // 2)
        self._low_mask = np.uint64(2 ** ((num_bits + 1) // 2) - 1)
        self._high_mask = np.uint64(2 ** (num_bits // 2) - 1)
        self._keys = [np.uint64(mix(key, number)) for number in range(_NUM_ROUNDS)]
        self._table = self._sort() if size <= _TABLE_SIZE else None

    def __call__(self, positions: range) -> Tensor:
        """Return the values at ``positions`` as a 1-D int64 tensor; time and memory are O(len(positions))."""
        assert not positions or 0 <= min(positions[0], positions[-1]) <= max(positions[0], positions[-1]) < self._size
        if self._table is not None:
            return torch.from_numpy(self._table[np.arange(positions.start, positions.stop, positions.step)])
        values = self._rounds(np.arange(positions.start, positions.stop, positions.step, dtype=np.uint64))
        while len(outside := np.flatnonzero(values >= self._size)):
            values[outside] = self._rounds(values[outside])
        return torch.from_numpy(values.astype(np.int64))

    def _sort(self) -> NDArray[np.int64]:
        positions = np.arange(self._size, dtype=np.uint64)
        return np.argsort(_hash(_hash(positions, self._keys[0]), self._keys[1]), kind="stable").astype(np.int64)

    def _rounds(self, values: _Bits) -> _Bits:
        low, high = values & self._low_mask, values >> self._low_bits
        for number, key in enumerate(self._keys):
            if number % 2:
                high ^= _hash(low, key) & self._high_mask
            else:
                low ^= _hash(high, key) & self._low_mask
        return (high << self._low_bits) | low


def _hash(values: _Bits, key: np.uint64) -> _Bits:
    hashed = values + key
    hashed ^= hashed >> np.uint64(30)
    hashed *= np.uint64(0xBF58476D1CE4E5B9)
    hashed ^= hashed >> np.uint64(27)
    hashed *= np.uint64(0x94D049BB133111EB)
    hashed ^= hashed >> np.uint64(31)
    return hashed


# --- Global batches
#
# The order of the samples depends on (seed, epoch) only. The k-th global batch is the k-th slice of the epoch's
# permutation, which is computed only where it is read; each share of a batch is contiguous. So the same samples are in
# the same step on any number of devices, and any step of a data set of any length is found at once.

_BLOCK_SIZE = 2**14


def cut(size: int, num_parts: int, index: int) -> range:
    """Return the positions of part ``index`` of ``size`` items that are split into contiguous parts.

    Sizes differ by at most one and the larger parts come first, so empty parts are the last ones.
    """
    quotient, remainder = divmod(size, num_parts)
    start = index * quotient + min(index, remainder)
    return range(start, start + quotient + (index < remainder))


@lru_cache(maxsize=64)
def cut_by(size: int, proportions: tuple[float, ...]) -> list[range]:
    """Return the positions of each part of ``size`` items that are split into contiguous parts by ``proportions``.

    Each part has its exact portion, rounded up or down: all are rounded down, and the remaining items go, one each, to
    the parts with the largest remainders, the first of equals first. Equal proportions give the same parts as `cut`.

    Args:
        size: The number of items.
        proportions: A positive number for each part.
    """
    exact = [Fraction(proportion) for proportion in proportions]  # floats could round differently on another machine
    portions = [size * portion / sum(exact) for portion in exact]
    sizes = [floor(portion) for portion in portions]
    by_remainder = sorted(range(len(sizes)), key=lambda part: sizes[part] - portions[part])
    for part in by_remainder[: size - sum(sizes)]:
        sizes[part] += 1
    return list(itertools.starmap(range, itertools.pairwise([0, *itertools.accumulate(sizes)])))


@dataclass(frozen=True)
class GlobalOrder:
    """The global batches of a data set of known length, step after step, epoch after epoch.

    Args:
        num_samples: Length of the data set.
        batch_size: Samples of a global batch; the last one of an epoch may hold fewer.
        seed: The seed of the permutations.
        drop_last: Whether to skip that last one if it is not full.
    """

    num_samples: int
    batch_size: int
    seed: int
    drop_last: bool = False

    @cached_property
    def steps_per_epoch(self) -> int:
        """The number of global batches in an epoch."""
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def batch(self, step: int) -> Tensor:
        """Return the indices of the global batch of ``step``, a 1-D int64 tensor; the cost depends on its size only."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.batch_size
        stop = min(start + self.batch_size, self.num_samples)
        first = start // _BLOCK_SIZE
        numbers = range(first, (stop - 1) // _BLOCK_SIZE + 1)
        blocks = list(map(partial(_block, self.num_samples, self.seed, epoch), numbers))
        together = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        return together[start - first * _BLOCK_SIZE : stop - first * _BLOCK_SIZE]


@lru_cache(maxsize=4)
def _block(num_samples: int, seed: int, epoch: int, block: int) -> Tensor:
    """Return a block of an epoch's order, large enough that the cost per batch is small."""
    start = block * _BLOCK_SIZE
    permutation = Permutation(num_samples, mix(seed, Purpose.ORDER, epoch))
    return permutation(range(start, min(start + _BLOCK_SIZE, num_samples)))


# --- [Note: the order of shards]
#
# A data set in shards is not permuted as a whole: each rank would read all shards. In each epoch the shards are
# permuted, and the sequence of all their samples is cut into lanes. Each lane contains exactly the samples that it
# gives to the global batches of the epoch, always at the same positions of a batch. Within a lane, consecutive windows
# of the sequence are permuted. A rank computes whole lanes, so it reads only their parts of the sequence, each from its
# begin to its end. The number of lanes does not depend on the number of ranks, so the global batches do not either.


def cut_lanes(size: int, num_lanes: int) -> NDArray[np.int64]:
    """Return where each lane begins in a batch of ``size`` samples, and the end of the last.

    Unlike those of `cut`, larger parts are spread evenly, so that several lanes together have their proportion of a
    batch. The first lane is empty only if all are.
    """
    return -(-size * np.arange(num_lanes + 1) // num_lanes)


@dataclass(frozen=True, eq=False)
class ShardOrder:
    """The global batches of a data set in shards; see [Note: the order of shards]. Otherwise as `GlobalOrder`.

    Args:
        sizes: The number of samples of each shard, int64.
        window: Number of consecutive samples of a lane that are permuted.
        num_lanes: At most ``batch_size``.
    """

    sizes: NDArray[np.int64]
    batch_size: int
    seed: int
    drop_last: bool
    window: int
    num_lanes: int

    @cached_property
    def num_samples(self) -> int:
        """The number of samples in all shards."""
        return int(self.sizes.sum())

    @cached_property
    def steps_per_epoch(self) -> int:
        """The number of global batches in an epoch."""
        return (self.num_samples if self.drop_last else self.num_samples + self.batch_size - 1) // self.batch_size

    @cached_property
    def lane_starts(self) -> NDArray[np.int64]:
        """Where each lane begins in the sequence of an epoch, and the end of the last."""
        full, rest = divmod(self.num_samples, self.batch_size)
        return full * cut_lanes(self.batch_size, self.num_lanes) + cut_lanes(rest, self.num_lanes)

    def batch(self, step: int) -> Tensor:
        """Return the indices of the global batch of ``step``, a 1-D int64 tensor; the cost depends on its size only."""
        epoch, number = divmod(step, self.steps_per_epoch)
        size = min(self.batch_size, self.num_samples - number * self.batch_size)
        full, lane_sizes = (np.diff(cut_lanes(num, self.num_lanes)) for num in (self.batch_size, size))
        parts = []
        for lane in np.flatnonzero(lane_sizes).tolist():
            first, skipped = divmod(number * int(full[lane]), self.window)
            stop = skipped + int(lane_sizes[lane])
            for at in range(0, stop, self.window):
                parts += [_window(self, epoch, lane, first + at // self.window)[max(skipped - at, 0) : stop - at]]
        return torch.from_numpy(self.indices(epoch, np.concatenate(parts)))

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of the samples at ``positions`` of the sequence of ``epoch``."""
        shards, starts = shard_sequence(self, epoch)
        owners = shards[np.searchsorted(starts[shards] + self.sizes[shards], positions, side="right")]
        return positions - starts[owners] + (np.cumsum(self.sizes) - self.sizes)[owners]


@lru_cache(maxsize=4)
def shard_sequence(order: ShardOrder, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the shards in the order of ``epoch``; and the position of each shard's first sample, by its number."""
    shards = Permutation(len(order.sizes), mix(order.seed, Purpose.ORDER, epoch))(range(len(order.sizes))).numpy()
    starts = np.empty_like(shards)
    starts[shards] = np.cumsum(order.sizes[shards]) - order.sizes[shards]
    return shards, starts


@lru_cache(maxsize=512)
def _window(order: ShardOrder, epoch: int, lane: int, number: int) -> NDArray[np.int64]:
    """Return the positions of a window, permuted."""
    start = int(order.lane_starts[lane]) + number * order.window
    size = min(order.window, int(order.lane_starts[lane + 1]) - start)
    return start + Permutation(size, mix(order.seed, Purpose.WINDOW, epoch, lane, number))(range(size)).numpy()


# --- The division of a global batch


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is divided: over ``num_shares`` devices, each share into ``accumulate`` micro-batches.

    Args:
        shares: The shares that this process computes.
        proportions: The relative sizes of the shares, a positive number for each; all equal if None.
        num_lanes: Of a `ShardOrder`, whose lanes are not divided.
    """

    num_shares: int
    shares: range
    accumulate: int
    proportions: Sequence[float] | None = None
    num_lanes: int | None = None

    def positions(self, size: int, share: int) -> range:
        """Return the positions of ``share`` among ``size`` consecutive items."""
        if self.num_lanes is not None:
            lanes, starts = self.lanes(share), cut_lanes(size, self.num_lanes).tolist()
            return range(starts[lanes.start], starts[lanes.stop])
        return self._cut(size, share)

    def lanes(self, share: int) -> range:
        """Return the lanes of ``share``."""
        return self._cut(self.num_lanes or 0, share)

    def _cut(self, size: int, share: int) -> range:
        if self.proportions is None:
            return cut(size, self.num_shares, share)
        return cut_by(size, tuple(self.proportions))[share]

    def positions_here(self, size: int) -> range:
        """Return the positions of this process among ``size`` consecutive items; they are also contiguous."""
        return range(self.positions(size, self.shares[0]).start, self.positions(size, self.shares[-1]).stop)

    def all_have_samples(self, size: int, micro: int) -> bool:
        """Return whether each share has samples in micro-batch ``micro`` of a global batch of ``size``."""
        is_even = self.proportions is None and self.num_lanes is None
        first = self.num_shares - 1 if is_even else 0  # of equals, the last is the smallest
        shares = range(first, self.num_shares)
        return all(len(cut(len(self.positions(size, share)), self.accumulate, micro)) > 0 for share in shares)

    def micro_batches(self, batch: Tensor) -> list[dict[int, list[int]]]:
        """Return the indices of each micro-batch of this process, by number of share; empty shares are left out."""
        micro_batches = []
        for micro in range(self.accumulate):
            shares: dict[int, list[int]] = {}
            for share in self.shares:
                positions = self.positions(len(batch), share)
                if part := cut(len(positions), self.accumulate, micro):
                    shares[share] = batch[positions[part.start] : positions[part.stop - 1] + 1].tolist()
            micro_batches.append(shares)
        return micro_batches
