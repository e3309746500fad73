"""The check that every process has the same samples, which the division of a global batch requires."""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.base.activity import format_ranks
from lockstep.base.containers import items_of
from lockstep.comm.collectives import Group, all_gather_object
from lockstep.data.loader import HasEpochs, LoadOptions, Request, load
from lockstep.data.order import Purpose, mix
from lockstep.errors import ConfigurationError


def is_compared(step: int) -> bool:
    """Return whether the ranks compare more samples in ``step``: after 0, 1, 2, 4, 8, ...; in a resumed run, soon.

    Not counted from the begin of a run, as ranks that take the place of lost ones begin later than the others.
    """
    return step & (step - 1) == 0 or step % 256 == 0


def checksum(samples: list[Any]) -> str:
    """Return a checksum that is equal for equal samples.

    They may hold numbers, texts, arrays and tensors, in lists, mappings and dataclasses. Of other objects, only the
    type counts.
    """
    digest = blake2b(digest_size=8)
    _update_digest(digest, samples)
    return digest.hexdigest()


def _update_digest(digest: blake2b, value: Any) -> None:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(value.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"array{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        digest.update(b"mapping")
        _update_digest(digest, list(value.items()))
    elif isinstance(value, list | tuple) or is_dataclass(value):
        items = items_of(value) or []
        digest.update(f"{type(value).__name__ if is_dataclass(value) else 'list'}{len(items)}".encode())
        for item in items:
            _update_digest(digest, item)
    else:
        # Of other objects only the type: their repr may contain an address.
        is_plain = value is None or isinstance(value, str | bytes | bytearray | int | float | complex | np.generic)
        digest.update(f"{type(value).__name__}{repr(value) if is_plain else ''}".encode())


_NUM_COMPARED, _NUM_READS = 4, 4


def check_same_data(
    samples: Any,
    field: str,
    options: LoadOptions,
    *,
    seed: int,
    group: Group | None,
    device: torch.device,
    epochs: Sequence[HasEpochs] = (),
) -> None:
    """Check that all ranks have the same number of samples, and that some samples are equal, before they are used.

    Samples that change when they are read again, as the data set draws from a generator of its own, are not compared.
    Samples of a stream are compared while it is read.

    Collective: every rank of ``group``, if there is one. Blocks until all have called it.

    Args:
        samples: A data set.
        field: Its name in errors, such as ``Task.dataset``.
        options: How its samples are loaded: here, too, in a loader process, as some files must not be open at a fork.
        seed: Of the run.
        group: The ranks that train together; None: only this process.
        device: For NCCL a CUDA device.
        epochs: What is told the epoch.

    Raises:
        ConfigurationError: On every rank: they differ; names the ranks that differ from the first.
    """
    if group is None or group.size() == 1:
        return
    length = None if isinstance(samples, IterableDataset) else len(samples)
    lengths: list[int | None] = all_gather_object(length, group=group, device=device)
    for rank, other in enumerate(lengths):
        if other != lengths[0]:
            raise ConfigurationError(
                f"{field} has {lengths[0]} samples on rank 0, but {other} on rank {rank}.\n"
                "Every rank must see the same files, and they must not change."
            )
    if length is not None:
        indices = [mix(seed, Purpose.COMPARED, number) % length for number in range(_NUM_COMPARED)]
        options = replace(options, collate=checksum, workers=min(options.workers, 1), pin_memory=False)
        read = load(samples, [Request(0, 0, length, {0: indices})] * _NUM_READS, options, seed=seed, epochs=epochs)
        first, *others = {"" if micro.bad else micro.batches[0] for micro in read}
        check_same_samples("" if others else first, field, 0, group=group, device=device)


def check_same_samples(own_checksum: str, field: str, step: int, *, group: Group | None, device: torch.device) -> None:
    """Check that all ranks read the same samples: of a global batch of a stream, or some that each of them reads.

    Collective: every rank of ``group``, if there is one. Blocks until all have called it.

    Args:
        own_checksum: The checksum of the samples that this rank read; empty if they cannot be compared.
        field: The name of the data in errors, such as ``Task.dataset``.
        step: The step of the batch.
        group: The ranks that train together; None: only this process.
        device: For NCCL a CUDA device.

    Raises:
        ConfigurationError: On every rank: they differ; names the ranks that differ from the first.
    """
    if group is None:
        return
    checksums: list[str] = all_gather_object(own_checksum, group=group, device=device)
    first = next((rank for rank, checksum in enumerate(checksums) if checksum), 0)
    others = [rank for rank, other in enumerate(checksums) if other and other != checksums[first]]
    if others:
        raise ConfigurationError(
            f"{field} gave different samples on {format_ranks(others)} than on rank {first}, in step {step}.\n"
            "Every process creates the same data and takes its part of it: leave out what depends on the rank or the "
            "process, such as the order of a set or of os.listdir, and shuffle or split with a seed of your own, or "
            "with random, numpy.random or torch, whose seeds are set."
        )
