"""A tensor in a thousand numbers: enough to say whether two runs hold the same one, and how far apart they are.

Processes compare every gradient and every weight of every step. Small tensors travel whole; of larger ones each element
is added, with a fixed random sign, to one of a thousand sums. The sums of a difference are the difference of the
sums, and their norm is that of the tensor, give or take a few percent.

Source: the count sketch of Charikar, Chen and Farach-Colton, 2002.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

SIZE = 1024
"""Numbers of a sketch; the norm of a difference is then uncertain by about sqrt(2 / SIZE), 4%."""


@dataclass(frozen=True)
class Sketch:
    """What is kept of a tensor.

    Attributes:
        shape: Of the tensor.
        digest: Of its bits.
        values: Float64, at most `SIZE` numbers: the tensor itself if it is that small, else sums.
        norm: Euclidean, exact.
    """

    shape: tuple[int, ...]
    digest: bytes
    values: Tensor
    norm: float


def sketch(tensor: Tensor) -> Sketch:
    """Return the sketch of a tensor of any dtype, on any device; sparse ones count as dense."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    flat = real.to("cpu").contiguous().flatten()
    digest = blake2b(str((tuple(tensor.shape), str(tensor.dtype))).encode(), digest_size=16)
    digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    values = flat.double()
    norm = float(values.norm())
    return Sketch(tuple(tensor.shape), digest.digest(), values.clone() if len(values) <= SIZE else _sums(values), norm)


def distance(found: Sketch, expected: Sketch) -> float:
    """Return the norm of the difference of two tensors of one shape; infinite if either is not finite and they differ.

    An estimate for tensors of more than `SIZE` elements, but 0 only for tensors of the same bits or equal sums.
    """
    if found.digest == expected.digest:
        return 0.0
    if found.shape != expected.shape:
        return math.inf
    apart = float((found.values - expected.values).norm())
    return apart if math.isfinite(apart) else math.inf


def _sums(values: Tensor) -> Tensor:
    signed = values * _signs(len(values))
    padding = -len(values) % SIZE
    return torch.nn.functional.pad(signed, (0, padding)).view(-1, SIZE).sum(0)


@lru_cache(maxsize=8)
def _signs(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8) * 2 - 1
