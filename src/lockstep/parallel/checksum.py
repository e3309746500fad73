"""A checksum over the bits of tensors: fast, the same on every machine, and different whenever a single bit is.

[Note: what it finds]
The bits are read as numbers of 32 bits, whatever the dtype. Each is multiplied by an odd number of 64 bits that depends
on its position, and the products are summed modulo 2^64. A flipped bit changes one product by an odd number times a
power of two below 2^64, which is never zero: so it is always found, and so is everything that changes one number of 32
bits. Elements that changed places are found because their factors differ. Changes of several numbers cancel each other
about once in 2^32 times at worst. The sums of chunks are weighed in the same way. Zero and minus zero differ, and so do
NaNs of different bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.parallel.flat_math import flatten

_CHUNK_CPU, _CHUNK = 2**14, 2**22
"""Numbers that are worked on at once: on CPUs what stays in a core's cache, elsewhere what keeps a device busy."""

_SALT_OF_CHUNKS = 1


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return 64 bits that depend on every bit of ``tensors``, on their order, and on nothing else. Blocks.

    Args:
        tensors: On any devices; how they are cut into tensors does not matter, but for the order of their sizes.
    """
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_device[tensor.device].append(tensor)
    total = 0
    for place, (device, group) in enumerate(by_device.items()):
        total += (2 * place + 1) * _of_device(group, device)
    return _signed(total)


@torch.no_grad()
def _of_device(tensors: Sequence[Tensor], device: torch.device) -> int:
    on_cpu = device.type == "cpu"
    size = _CHUNK_CPU if on_cpu else _CHUNK
    weights = _weights(size, device)
    sums = []
    for chunk in _chunks(tensors, size):
        factors = weights if chunk.numel() == size else weights[: chunk.numel()]
        # the dot product is for CPUs only; elsewhere one kernel converts and multiplies
        sums.append(torch.dot(chunk.long(), factors) if on_cpu else (chunk * factors).sum())
    if not sums:
        return 0
    together = torch.stack(sums)
    return int((together * _mixed(len(sums), _SALT_OF_CHUNKS).to(device)).sum())


def _chunks(tensors: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Return all bits as rows of at most ``size`` 32-bit numbers: large tensors in pieces, small ones together."""
    small: list[Tensor] = []
    num_small = 0
    for tensor in tensors:
        numbers = as_numbers(tensor)
        if numbers.numel() >= size:
            yield from numbers.split(size)
            continue
        if num_small + numbers.numel() > size:
            yield torch.cat(small)
            small, num_small = [], 0
        small.append(numbers)
        num_small += numbers.numel()
    if num_small:
        yield torch.cat(small)


def as_numbers(tensor: Tensor) -> Tensor:
    """Return the bits of a strided ``tensor`` as 32-bit numbers in a row, in the order in which they lie in memory."""
    flat = flatten(tensor.detach().resolve_conj().resolve_neg())
    if flat.nbytes % 4:
        return flat.view(torch.uint8).to(torch.int32)
    if flat.storage_offset() * flat.itemsize % 4:
        flat = flat.clone()
    return flat.view(torch.int32)


@lru_cache(maxsize=8)
def _weights(size: int, device: torch.device) -> Tensor:
    return _mixed(size, 0).to(device)


def _mixed(size: int, salt: int) -> Tensor:
    """Return odd numbers of 64 bits that look random: those of splitmix64, computed alike on every machine."""
    numbers = torch.arange(1, size + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15) + salt
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> shift)) * _signed(factor)
    return (numbers ^ (numbers >> 31)) | 1


def _signed(number: int) -> int:
    """Return ``number`` modulo 2^64 as a signed one."""
    return (number + 2**63) % 2**64 - 2**63
