"""A shuffle that is computed only where it is looked at: its cost depends on how many positions, never on the length.

[Note: a permutation without a table]
A position is written in the fewest bits that can hold the last one, and these are cut into two halves. In each round
one half is changed by a keyed hash of the other, in turn: whatever the hash, the round can be undone, so all rounds
together are a bijection of the numbers with that many bits. A result that is no position goes through the rounds again
until it is one; that keeps it a bijection, and as at least half of the numbers are positions, it takes two turns on
average. On few bits this would need many rounds until every order is equally likely, so a short permutation is a table:
the positions sorted by a keyed hash of each. The arithmetic is that of unsigned 64-bit integers, the same on every
machine and with every version of numpy.

Source: M. Luby and C. Rackoff, How to construct pseudorandom permutations, 1988 (rounds on halves); J. Black and
P. Rogaway, Ciphers with arbitrary finite domains, 2002 (again until it is in range); G. Steele et al., Fast splittable
pseudorandom number generators, 2014 (the hash).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.seeding import mix

_NUM_ROUNDS = 12
"""Four look random on many bits; twelve leave a margin on as few as there are just above a table's size."""

_TABLE_SIZE = 2**14
"""Up to how many positions sorting them all costs about as much as what is looked at together anyway."""

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
        """Return what lies at ``positions``, a 1-D int64 tensor of as many; time and memory are O(len(positions))."""
        assert not positions or 0 <= min(positions[0], positions[-1]) <= max(positions[0], positions[-1]) < self._size
        if self._table is not None:
            return torch.from_numpy(self._table[np.arange(positions.start, positions.stop, positions.step)])
        found = self._rounds(np.arange(positions.start, positions.stop, positions.step, dtype=np.uint64))
        while len(outside := np.flatnonzero(found >= self._size)):
            found[outside] = self._rounds(found[outside])
        return torch.from_numpy(found.astype(np.int64))

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
