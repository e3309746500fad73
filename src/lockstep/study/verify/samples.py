"""The samples that a process loads: noted, and replaced by those that another process had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lockstep.study.verify.experiment import Given


def digest(sample: Any) -> bytes:
    """Return a digest of a sample of any structure: equal for equal values, in any process."""
    found = blake2b(digest_size=12)
    for part in _parts(sample):
        found.update(part)
    return found.digest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        yield f"{tuple(dense.shape)}{dense.dtype}".encode()
        yield dense.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.shape}{value.dtype}".encode() + value.tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from _parts(item)
    elif isinstance(value, (str, bytes, int, float, complex, type(None))):
        yield repr(value).encode()
    else:
        yield cloudpickle.dumps(value)


class Watch:
    """Keeps what was loaded for the step that is being computed.

    Args:
        given: Where samples are taken from instead, or None.
    """

    def __init__(self, given: Given | None) -> None:
        self.given = given
        self.step = 0
        self._pending: list[tuple[int | None, Any, bytes]] = []
        self._used: list[tuple[int | None, Any, bytes]] = []

    def note(self, index: int | None, sample: Any) -> None:
        """Take note of a sample that was loaded."""
        self._pending.append((index, sample, digest(sample)))

    def use(self) -> None:
        """All that was loaded until now belongs to this step; what comes may be loaded ahead."""
        self._used += self._pending
        self._pending = []

    def end_step(self, *, ahead: bool) -> list[tuple[int | None, Any, bytes]]:
        """Return what the step loaded; ``ahead``: what came after the last use is of the next step."""
        if not ahead:
            self.use()
        used, self._used = self._used, []
        return used

    def replace(self, index: int) -> Any:
        """Return the sample that was given for ``index`` in this step, or in the next if it is loaded ahead."""
        assert self.given is not None
        later = [step for step in sorted(self.given.samples) if step >= self.step]
        for step in later:
            for known, sample in self.given.samples[step]:
                if known == index:
                    return sample
        raise LookupError(f"sample {index} was not loaded in step {self.step} by one process")


class WatchedSamples(Dataset[Any]):
    """A data set with a length, watched."""

    def __init__(self, samples: Any, watch: Watch) -> None:
        self._samples, self._watch = samples, watch

    def __len__(self) -> int:
        """Return the number of samples."""
        given = self._watch.given
        return len(self._samples) if given is None else int(given.sizes["samples of the data set"] or 0)

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        sample = self._samples[index] if self._watch.given is None else self._watch.replace(index)
        self._watch.note(index, sample)
        return sample


class WatchedStream(IterableDataset[Any]):
    """A stream, watched."""

    def __init__(self, stream: Any, watch: Watch) -> None:
        self._stream, self._watch = stream, watch

    def __iter__(self) -> Iterator[Any]:
        """Return the samples."""
        given = self._watch.given
        for sample in self._stream if given is None else _in_order(given):
            self._watch.note(None, sample)
            yield sample


def _in_order(given: Given) -> Iterator[Any]:
    for step in sorted(given.samples):
        for _, sample in given.samples[step]:
            yield sample


def watched(samples: Any, watch: Watch) -> Any:
    """Return ``samples``, watched."""
    return WatchedStream(samples, watch) if isinstance(samples, IterableDataset) else WatchedSamples(samples, watch)
