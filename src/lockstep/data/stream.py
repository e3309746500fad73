"""The micro-batches of data that comes as a stream: the k-th global batch is the next so many samples of it.

Every process reads the whole stream and collates only what falls to it, so that the samples of a step do not depend on
the number of ranks or loader processes. A stream that is costly to read is better given a length and an index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from lockstep.data.division import Division
from lockstep.data.loader import Collate, LoadOptions, MicroBatch, as_it_is
from lockstep.data.seeding import mix, seed_cpu
from lockstep.errors import ConfigurationError

_STREAM = 6
"""Keeps the bits that a stream draws apart from those that other purposes draw from the same seed."""


@dataclass(frozen=True)
class StreamOrder:
    """The global batches of a stream: in its own order, for epochs that end when it does."""

    batch_size: int
    seed: int
    drop_last: bool = False
    num_samples: None = None
    steps_per_epoch: None = None


@dataclass
class _Steps(IterableDataset[list[MicroBatch]]):
    """The micro-batches of this process, a list for each step, without end."""

    stream: Iterable[Any]
    order: StreamOrder
    division: Division
    first_step: int
    collate: Collate | None

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        worker = get_worker_info()
        index, num_workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for step, samples in enumerate(self._global_batches()):
            # The loader asks its processes in turn, from the first.
            if step >= self.first_step and (step - self.first_step) % num_workers == index:
                yield self._divide(step, samples)

    def _global_batches(self) -> Iterator[list[Any]]:
        step = 0
        while True:
            iterator, is_empty = iter(self.stream), True
            while True:
                seed_cpu(mix(self.order.seed, _STREAM, step))
                samples = list(islice(iterator, self.order.batch_size))
                if not samples or (self.order.drop_last and len(samples) < self.order.batch_size):
                    break
                yield samples
                step, is_empty = step + 1, False
            if is_empty:
                raise ConfigurationError(
                    "The stream of Task.dataset ended before the first global batch.\n"
                    "Check where it reads its samples from."
                )

    def _divide(self, step: int, samples: list[Any]) -> list[MicroBatch]:
        collate = self.collate or default_collate
        return [
            MicroBatch(
                step,
                len(samples),
                list(shares),
                [len(indices) for indices in shares.values()],
                [collate([samples[index] for index in indices]) for indices in shares.values()],
            )
            for shares in self.division.micro_batches(torch.arange(len(samples)))
        ]


def load_stream(
    stream: Iterable[Any],
    order: StreamOrder,
    division: Division,
    how: LoadOptions,
    *,
    first_step: int,
) -> Iterator[MicroBatch]:
    """Return the micro-batches of this process from ``first_step`` on, without end; still in host memory.

    Reads and drops what comes before ``first_step``.
    """
    loader = DataLoader(
        _Steps(stream, order, division, first_step, how.collate),
        batch_size=None,
        num_workers=how.workers,
        collate_fn=as_it_is,
        pin_memory=how.pin_memory,
        generator=torch.Generator(),
    )
    return chain.from_iterable(loader)
