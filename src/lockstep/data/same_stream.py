"""Whether every process has the same samples, which is what their division relies on."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.comm.collectives import Group, all_gather_object
from lockstep.data.loader import StreamNote
from lockstep.errors import ConfigurationError


def is_checked(num_steps: int) -> bool:
    """Return whether the batch after ``num_steps`` steps of this run is compared: 0, 1, 2, 4, 8, and so on."""
    return num_steps & (num_steps - 1) == 0


def checksum(samples: list[Any]) -> str:
    """Return what is the same for the same samples: numbers, texts, arrays and tensors in lists and mappings.

    Of other objects only the type counts.
    """
    digest = blake2b(digest_size=8)
    _update(digest, samples)
    return digest.hexdigest()


def _update(digest: blake2b, value: Any) -> None:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        _update(
            digest, value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        )
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"mapping{len(value)}".encode())
        for key, item in value.items():
            _update(digest, key)
            _update(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"list{len(value)}".encode())
        for item in value:
            _update(digest, item)
    elif isinstance(value, bytes | bytearray):
        digest.update(b"bytes%d" % len(value))
        digest.update(value)
    elif value is None or isinstance(value, str | int | float | complex | np.generic):
        digest.update(f"{type(value).__name__}{value!r}".encode())
    else:
        digest.update(type(value).__name__.encode())


def require_same_stream(note: StreamNote, step: int, *, group: Group | None, device: torch.device) -> None:
    """Check that all ranks read the same global batch, if it is one of those that are compared.

    Collective: every rank of ``group``, if there is one. Blocks until all are there.

    Args:
        note: What came with this rank's part of it.
        step: Which batch it is.
        group: The ranks that train together, or None if it is only this process.
        device: For NCCL a CUDA device.

    Raises:
        ConfigurationError: They did not; on every rank, and names those that differ from the first.
    """
    if note.checksum is None or group is None:
        return
    checksums: list[str] = all_gather_object(note.checksum, group=group, device=device)
    others = [str(rank) for rank, other in enumerate(checksums) if other != checksums[0]]
    if others:
        ranks = f"rank{'s' * (len(others) > 1)} {', '.join(others)}"
        raise ConfigurationError(
            f"The stream of Task.dataset gave other samples on {ranks} than on rank 0, in step {step}.\n"
            "Every process reads the same stream and takes its part of it: leave out what depends on the rank, and "
            "shuffle with a seed of your own, or with random, numpy.random or torch, whose seeds are set."
        )


def require_same_length(samples: Any, field: str, *, group: Group | None, device: torch.device) -> None:
    """Check that all ranks have equally many samples; those of a stream are compared as it is read.

    Collective: every rank of ``group``, if there is one. Blocks until all are there.

    Args:
        samples: A data set.
        field: Where in the task it is from.
        group: The ranks that train together, or None if it is only this process.
        device: For NCCL a CUDA device.

    Raises:
        ConfigurationError: They have not; on every rank, and names the first that differs from the first of all.
    """
    if group is None:
        return
    length = None if isinstance(samples, IterableDataset) else len(samples)
    lengths: list[int | None] = all_gather_object(length, group=group, device=device)
    for rank, other in enumerate(lengths):
        if other != lengths[0]:
            raise ConfigurationError(
                f"Task.{field} has {lengths[0]} samples on rank 0, but {other} on rank {rank}.\n"
                "Every rank must see the same files, and they must not change."
            )
