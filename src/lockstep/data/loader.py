"""The micro-batches that one process computes, in order and without end, each share collated on its own."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from lockstep.data.at_once import Collate, reader_at_once
from lockstep.data.bad_sample import BadSample
from lockstep.data.division import Division
from lockstep.data.order import GlobalOrder
from lockstep.data.seeding import mix, seed_cpu
from lockstep.socket_folder import make_sockets_possible

_SAMPLE = 2
"""Keeps the bits that samples are augmented with apart from those that other purposes draw from the same seed."""


@dataclass(frozen=True)
class LoadOptions:
    """How batches are loaded, apart from which.

    Args:
        collate: A list of samples to a batch; ``default_collate`` if None.
        workers: Loader processes; with 0, samples are loaded as they are asked for.
        pin_memory: Whether to page-lock the batches, for copies to CUDA that do not block.
        ahead: Batches that each loader process loads before they are asked for.
        skip_bad: Whether a micro-batch goes without the samples that cannot be read; else it has none if there is one.
        threads: Cores that an operation in a loader process may use; 1, which is torch's choice, if None.
    """

    collate: Collate | None
    workers: int
    pin_memory: bool
    ahead: int = 2
    skip_bad: bool = False
    threads: int | None = None

    def open(self, dataset: Dataset[Any], sampler: Iterable[Any] | None = None) -> DataLoader[Any]:
        """Return what gives the items of ``dataset`` as they are, in loader processes if there are any."""
        if self.workers:
            make_sockets_possible()
        return DataLoader(
            dataset,
            sampler=sampler,
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=self.ahead if self.workers else None,
            collate_fn=_as_it_is,
            pin_memory=self.pin_memory,
            worker_init_fn=partial(_begin, self.threads),
            generator=torch.Generator(),  # or else it would draw from the default generator
        )


def _as_it_is(batch: Any) -> Any:
    """Return ``batch``: what is loaded is collated already."""
    return batch


def _begin(num_threads: int | None, _worker: int) -> None:
    """Make a loader process ready."""
    # A terminal sends Ctrl-C to all processes of a command; what follows is for the one that trains to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


class Request(NamedTuple):
    """The samples of one micro-batch: what a loader process is asked for.

    ``numbers`` are those of the shares in the division that ``shares`` are the samples of; empty ones are left out.
    """

    epoch: int
    step: int
    num_global: int
    numbers: list[int]
    shares: list[list[int]]


class StreamNote(NamedTuple):
    """What a stream says of itself along with each micro-batch of a step; see `lockstep.data.stream_reader`.

    Args:
        state: Where it stands behind the step, pickled, if it can say that.
        checksum: Of the step's samples, if they are to be compared between the ranks.
        problem: Why its states are of no use, if they are not: what is said of its ``state_dict()``.
    """

    state: bytes | None
    checksum: str | None
    problem: str | None


class MicroBatch(NamedTuple):
    """What a process computes at once: for each of its shares that has samples, which, how many, and them collated.

    ``bad`` are the samples that could not be read; they are not among ``sizes``, but in ``num_global``.
    """

    step: int
    num_global: int
    numbers: list[int]
    sizes: list[int]
    batches: list[Any]
    bad: tuple[BadSample, ...] = ()
    note: StreamNote | None = None


class TrainRequests(Sampler[Request]):
    """All requests of this process from a step on, without end."""

    def __init__(self, order: GlobalOrder, division: Division, first_step: int) -> None:
        self._order, self._division, self._first_step = order, division, first_step

    def __iter__(self) -> Iterator[Request]:
        step = self._first_step
        while True:
            batch = self._order.batch(step)
            for shares in self._division.micro_batches(batch):
                yield Request(self._order.epoch(step), step, len(batch), list(shares), list(shares.values()))
            step += 1


class _Fetch(Dataset[MicroBatch]):
    """Answers requests; runs in the loader processes if there are any."""

    def __init__(self, samples: Any, how: LoadOptions, seed: int) -> None:
        self._samples, self._collate, self._skip_bad, self._seed = samples, how.collate, how.skip_bad, seed
        self._read_at_once = reader_at_once(samples, how.collate)

    def __getitem__(self, request: Request) -> MicroBatch:
        bad: list[BadSample] = []
        micro = MicroBatch(request.step, request.num_global, [], [], [])
        for number, indices in zip(request.numbers, request.shares, strict=True):
            size, batch = self._share(indices, request, bad)
            if bad and not self._skip_bad:  # there is no use in reading on: the run ends
                return MicroBatch(request.step, request.num_global, [], [], [], tuple(bad))
            if size:
                micro.numbers.append(number)
                micro.sizes.append(size)
                micro.batches.append(batch)
        return micro._replace(bad=tuple(bad))

    def _share(self, indices: list[int], request: Request, bad: list[BadSample]) -> tuple[int, Any]:
        """Return how many samples could be read and them collated; add the others to ``bad``."""
        if self._read_at_once is not None:
            with contextlib.suppress(Exception):  # which sample it was is found out below
                return len(indices), self._read_at_once(indices)
        samples = []
        for number in indices:
            seed_cpu(mix(self._seed, _SAMPLE, request.epoch, number))
            try:
                samples.append(self._samples[number])
            except MemoryError:  # says nothing of the sample
                raise
            except Exception as error:
                bad.append(BadSample.of(error, number, request.epoch, request.step))
                if not self._skip_bad:
                    return 0, None
        if not samples:
            return 0, None
        try:
            return len(samples), (self._collate or default_collate)(samples)
        except MemoryError:
            raise
        except Exception as error:
            read = [number for number in indices if all(number != sample.sample for sample in bad)]
            bad.append(BadSample.of_batch(error, read, request.epoch, request.step))
            return 0, None


def load(
    samples: Any,
    requests: Iterable[Request],
    how: LoadOptions,
    *,
    seed: int,
) -> Iterator[MicroBatch]:
    """Return the micro-batches that ``requests`` ask for, in their order; still in host memory.

    Args:
        samples: With ``len`` and ``[]``.
        requests: Such as `TrainRequests`.
        how: Apart from which.
        seed: What the random numbers of each sample derive from.
    """
    return iter(how.open(_Fetch(samples, how, seed), requests))
