"""The micro-batches of a process: which samples they have, how these are loaded, and how they get to the devices."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.queues
import os
import pickle
import random
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from math import floor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from lockstep.accelerator import recorded_event
from lockstep.containers import map_tensors
from lockstep.data.comparison import checksum, is_compared
from lockstep.data.tokens import TokenFiles
from lockstep.env import check_socket_folder
from lockstep.errors import DataError, LoaderDied, LockstepError

# --- Random state
#
# No random state is carried from step to step: before each micro-batch, and before each sample is fetched, the
# generators are seeded from (seed, purpose, position). So a run draws the same numbers if it was resumed, if it is
# interleaved with another run, or if four processes load its samples.


def mix(*parts: int) -> int:
    """Return 63 well-mixed bits of ``parts``; a different order or count of parts gives different bits."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_cpu(value: int) -> None:
    """Set the generators of Python, numpy and torch's CPU."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)


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


# --- Global batches
#
# The order of the samples depends on (seed, epoch) only. The k-th global batch is the k-th slice of the epoch's
# permutation, which is computed only where it is read; each share of a batch is contiguous. So the same samples are in
# the same step on any number of devices, and any step of a data set of any length is found at once.

# Separates the random numbers of shuffling from those of other purposes with the same seed.
_ORDER = 1

_BLOCK_SIZE = 2**14


def cut(size: int, num_parts: int, index: int) -> range:
    """Return the positions of part ``index`` of ``size`` items that are split into contiguous parts.

    Sizes differ by at most one and the larger parts come first, so empty parts are the last ones.
    """
    quotient, remainder = divmod(size, num_parts)
    start = index * quotient + min(index, remainder)
    return range(start, start + quotient + (index < remainder))


def cut_by(size: int, proportions: Sequence[float], index: int) -> range:
    """Return the positions of part ``index`` of ``size`` items that are split into contiguous parts by ``proportions``.

    Each part has its exact portion, rounded up or down: all are rounded down, and the remaining items go, one each, to
    the parts with the largest remainders, the first of equals first. Equal proportions give the same parts as `cut`.

    Args:
        size: The number of items.
        proportions: A positive number for each part.
        index: Which part.
    """
    ends = _ends(size, tuple(proportions))
    return range(ends[index], ends[index + 1])


@lru_cache(maxsize=64)
def _ends(size: int, proportions: tuple[float, ...]) -> list[int]:
    """Return where each part of `cut_by` starts, and where the last one ends."""
    exact = [Fraction(proportion) for proportion in proportions]  # floats could round differently on another machine
    portions = [size * portion / sum(exact) for portion in exact]
    sizes = [floor(portion) for portion in portions]
    by_remainder = sorted(range(len(sizes)), key=lambda part: sizes[part] - portions[part])
    for part in by_remainder[: size - sum(sizes)]:
        sizes[part] += 1
    return [0, *itertools.accumulate(sizes)]


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

    def load(self, samples: Any, split: BatchSplit, how: LoadOptions, step: int, _state: Any) -> Iterator[MicroBatch]:
        """Return the micro-batches of this process from ``step`` on, without end; still in host memory."""
        return load(samples, train_requests(self, split, step), how, seed=self.seed, epochs=having_epochs(samples))


@lru_cache(maxsize=4)
def _block(num_samples: int, seed: int, epoch: int, block: int) -> Tensor:
    """Return a block of an epoch's order, large enough that the cost per batch is small."""
    start = block * _BLOCK_SIZE
    permutation = Permutation(num_samples, mix(seed, _ORDER, epoch))
    return permutation(range(start, min(start + _BLOCK_SIZE, num_samples)))


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is divided: over ``num_shares`` devices, each share into ``accumulate`` micro-batches.

    Args:
        shares: The shares that this process computes.
        proportions: The relative sizes of the shares, a positive number for each; all equal if None.
    """

    num_shares: int
    shares: range
    accumulate: int
    proportions: Sequence[float] | None = None

    def positions(self, size: int, share: int) -> range:
        """Return the positions of ``share`` among ``size`` consecutive items."""
        if self.proportions is None:
            return cut(size, self.num_shares, share)
        return cut_by(size, self.proportions, share)

    def positions_here(self, size: int) -> range:
        """Return the positions of this process among ``size`` consecutive items; they are also contiguous."""
        return range(self.positions(size, self.shares[0]).start, self.positions(size, self.shares[-1]).stop)

    def all_have_samples(self, size: int, micro: int) -> bool:
        """Return whether each share has samples in micro-batch ``micro`` of a global batch of ``size``."""
        first = self.num_shares - 1 if self.proportions is None else 0  # of equals, the last is the smallest
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


# --- Samples that cannot be read

_ADVICE = (
    "Repair or remove what cannot be read, or go on without such samples and have them counted: "
    'bad_samples="skip" (--bad-samples skip).'
)


class BadSample(NamedTuple):
    """A sample that could not be read.

    Args:
        sample: Index in the data set; of a stream, how many came before it in the epoch.
        epoch: Counted from 0.
        step: Counted from 0 over all epochs; in an evaluation, the number of the batch.
        cause: The data set's message; for an exception that is not ours, with its type and location.
        file: Path of the file, if the data set named it; likewise for ``offset``.
        offset: Byte where the record begins.
        trace: The traceback of an exception that is not ours.
        others: Further samples of a batch that cannot be collated although each can be read: this is never skipped.
    """

    sample: int
    epoch: int
    step: int
    cause: str
    file: str | None = None
    offset: int | None = None
    trace: str | None = None
    others: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: Exception, index: int, epoch: int, step: int) -> Self:
        """Return the record of ``error`` for the sample ``index``."""
        if isinstance(error, DataError):
            return cls(index, epoch, step, str(error), error.file, error.offset)
        if isinstance(error, LockstepError):
            return cls(index, epoch, step, str(error))
        # Name the last line that is not in a library: that is the line which the user can change.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
        where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "in the data set"
        cause = f"{''.join(traceback.format_exception_only(error)).strip()} ({where})"
        return cls(index, epoch, step, cause, trace="".join(traceback.format_exception(error)))

    @property
    def name(self) -> str:
        """The sample and the cause, in one line."""
        return f"sample {self.sample}: {self.cause.splitlines()[0]}"


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith((str(Path(__file__).parent), "<frozen"))


def stop_error(bad: Sequence[BadSample], data: str, *, evaluation: bool) -> DataError:
    """Return the error that ends a run in which samples of ``data`` could not be read: those of one step."""
    first = next((sample for sample in bad if sample.others), bad[0])
    place = "" if evaluation else f" (epoch {first.epoch + 1}, step {first.step + 1})"
    if first.others:
        head = f"Samples {_first_few([first.sample, *first.others])} of {data} cannot be collated into a batch{place}."
        tail = "Return samples of one kind and shape from the data set, or make batches of them with Task.collate."
    else:
        head = f"Sample {first.sample} of {data} cannot be read{place}."
        more = f"{len(bad) - 1} more cannot be read either: {_first_few([sample.sample for sample in bad[1:]])}.\n" * (
            len(bad) > 1
        )
        tail = f"{more}{_ADVICE}"
    text = f"{head}\n{first.cause}\n{tail}"
    error = DataError(text, file=first.file, offset=first.offset, sample=first.sample)
    if first.trace is not None:
        error.add_note(first.trace)
    return error


def _first_few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + ", ..." * (len(numbers) > 5)


# --- Loading

Collate = Callable[[list[Any]], Any]


def batched_getitem(samples: Any, collate: Collate | None) -> Callable[[list[int]], Any] | None:
    """Return a function from indices to a collated batch, or None if samples must be read one by one.

    In general samples are read one by one, since random numbers are seeded for each. Batches are read at once from data
    sets that draw no random numbers: tensors, token files, and Hugging Face's.
    """
    if collate is None and type(samples) is TensorDataset:  # a subclass may have other indexing
        return lambda indices: list(samples[torch.tensor(indices)])
    if collate is None and type(samples) is TokenFiles:
        return samples.read_batch
    tables = sys.modules.get("datasets")  # a script with such a data set has imported it
    # In other formats a single row may have another dtype than rows of a batch, or a user's function creates the rows.
    if tables is not None and isinstance(samples, tables.Dataset) and samples.format["type"] in {None, "torch"}:
        return lambda indices: (collate or default_collate)(samples.__getitems__(indices))
    return None


# Separates the random numbers of augmentation from those of other purposes with the same seed.
_SAMPLE = 2

# Likewise, and how many samples the ranks compare at once.
_COMPARED = 7
_NUM_COMPARED = 3


@dataclass(frozen=True)
class LoadOptions:
    """How batches are loaded.

    Args:
        collate: A list of samples to a batch; ``default_collate`` if None.
        workers: Loader processes; with 0, samples are loaded when they are needed.
        pin_memory: Whether to page-lock the batches, for copies to CUDA that do not block.
        ahead: Batches that each loader process loads before they are needed.
        skip_bad: Whether samples that cannot be read are skipped; otherwise a micro-batch with one has no samples.
        threads: Cores that an operation in a loader process may use; 1, which is torch's choice, if None.
    """

    collate: Collate | None
    workers: int
    pin_memory: bool
    ahead: int = 2
    skip_bad: bool = False
    threads: int | None = None

    def open(self, dataset: Dataset[Any], sampler: Iterable[Any] | None = None) -> DataLoader[Any]:
        """Return a loader of the unchanged items of ``dataset``, with loader processes if there are any."""
        if self.workers:
            check_socket_folder()
        # Without it Python 3.14 would start new interpreters, and pickle the data set. A program's choice has priority.
        start = multiprocessing.get_start_method(allow_none=True) or "fork"
        return DataLoader(
            dataset,
            sampler=sampler,
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=self.ahead if self.workers else None,
            multiprocessing_context=start if self.workers else None,
            collate_fn=partial(cast, Any),  # returns it as it is; pickled for spawned processes, so no lambda
            pin_memory=self.pin_memory,
            worker_init_fn=partial(_init_worker, self.threads),
            generator=torch.Generator(),  # otherwise it would draw from the default generator
        )


def _init_worker(num_threads: int | None, _worker: int) -> None:
    """Prepare a loader process."""
    # A terminal sends Ctrl-C to all processes of a command, and SLURM may send the signal before its time limit to all
    # processes of a task; the training process decides what to do. torch ends a loader process by SIGTERM.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    # Torch has set it to 1 by now: ranks and their loader processes share the cores.
    if num_threads is not None:
        torch.set_num_threads(num_threads)


# The exit code of a loader process.
_NO_SHARED_MEMORY = os.EX_IOERR


def _end_worker(error: Exception, _batch: object) -> None:
    """End a loader process that cannot send a batch: otherwise the rank would wait for the batch forever."""
    traceback.print_exception(error)
    os._exit(_NO_SHARED_MEMORY if "shared memory" in str(error) else 1)


class Request(NamedTuple):
    """The request to a loader process: the samples of one micro-batch, by the number of the share.

    Empty shares are omitted. ``compared`` are samples that every rank reads, and compares with those of the others.
    """

    epoch: int
    step: int
    num_global: int
    shares: dict[int, list[int]]
    compared: Sequence[int] = ()


class StreamNote(NamedTuple):
    """A stream's state and what the ranks compare, sent along with a micro-batch; see `lockstep.data.stream`.

    Args:
        state: The stream's position after the step, pickled, if it has a state.
        checksum: Of samples of the step that all ranks have read; empty if they cannot be compared.
        is_compared: Whether the ranks exchange it. Otherwise they compare a few bits of it, together with the losses.
        problem: Why the stream's states cannot be used, if so.
    """

    state: bytes | None
    checksum: str
    is_compared: bool
    problem: str | None


class MicroBatch(NamedTuple):
    """The data that a process computes at once: for each share with samples, its number, its samples, and the batch.

    ``samples`` are indices in the data set; of a stream, positions in the global batch. ``bad`` are those that could
    not be read; they are not included in ``samples``, but counted in ``num_global``.
    """

    step: int
    num_global: int
    numbers: list[int]
    samples: list[NDArray[np.int64]]  # no lists: torch's thread that pins memory would descend into them
    batches: list[Any]
    bad: tuple[BadSample, ...] = ()
    note: StreamNote | None = None

    @property
    def sizes(self) -> list[int]:
        """The number of samples of each of these shares."""
        return list(map(len, self.samples))


def train_requests(order: GlobalOrder, split: BatchSplit, first_step: int) -> Iterator[Request]:
    """Yield all requests of this process from a step on, without end."""
    for step in itertools.count(first_step):
        batch = order.batch(step)
        compared = compared_samples(split, order.num_samples, order.seed, step) if is_compared(step) else []
        for index, shares in enumerate(split.micro_batches(batch)):
            yield Request(step // order.steps_per_epoch, step, len(batch), shares, compared if index == 0 else [])


def compared_samples(split: BatchSplit, num_samples: int, seed: int, step: int) -> list[int]:
    """Return some samples that every rank reads to compare them; none if there is one process."""
    several = split.num_shares > len(split.shares)
    return [mix(seed, _COMPARED, step, number) % num_samples for number in range(_NUM_COMPARED * several)]


@runtime_checkable
class HasEpochs(Protocol):
    """Data whose samples or order depend on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next samples."""


def having_epochs(samples: Any) -> list[HasEpochs]:
    """Return what has epochs: ``samples``, or data sets of which it is a subset or a concatenation."""
    if isinstance(samples, HasEpochs):
        return [samples]
    parts = [samples.dataset] if isinstance(samples, Subset) else []
    parts += samples.datasets if isinstance(samples, ConcatDataset | ChainDataset) else []
    return [each for part in parts for each in having_epochs(part)]


class _Fetch(Dataset[MicroBatch]):
    """Answers requests; runs in the loader processes if there are any."""

    def __init__(self, samples: Any, how: LoadOptions, seed: int, epochs: Sequence[HasEpochs]) -> None:
        self._epochs, self._epoch = epochs, -1
        self._samples, self._collate, self._skip_bad, self._seed = samples, how.collate, how.skip_bad, seed
        self._read_at_once = batched_getitem(samples, how.collate)

    def __getitem__(self, request: Request) -> MicroBatch:
        if request.epoch != self._epoch:
            for each in self._epochs:
                each.set_epoch(request.epoch)
            self._epoch = request.epoch
        bad: list[BadSample] = []
        note = StreamNote(None, self._checksum(request), True, None) if request.compared else None
        micro = MicroBatch(request.step, request.num_global, [], [], [], note=note)
        for number, indices in request.shares.items():
            read, batch = self._share(indices, request, bad)
            if bad and not self._skip_bad:  # the run ends, so more samples are not needed
                return micro._replace(numbers=[], samples=[], batches=[], bad=tuple(bad))
            if read:
                micro.numbers.append(number)
                micro.samples.append(np.array(read))
                micro.batches.append(batch)
        return micro._replace(bad=tuple(bad))

    def _checksum(self, request: Request) -> str:
        """Return the checksum of the samples to compare, or nothing: they cannot be read, or are not the same again."""
        found = set()
        for _ in range(2):
            read = []
            for number in request.compared:
                seed_cpu(mix(self._seed, _SAMPLE, request.epoch, number))
                try:
                    read.append(self._samples[number])
                except Exception:  # it is reported if it is needed
                    return ""
            found.add(checksum(read))
        return found.pop() if len(found) == 1 else ""

    def _share(self, indices: list[int], request: Request, bad: list[BadSample]) -> tuple[list[int], Any]:
        """Return the samples that could be read, and their collated batch; add the others to ``bad``."""
        if self._read_at_once is not None:
            # If one sample cannot be read, all fail. Then they are read one by one to find it.
            with contextlib.suppress(Exception):
                return indices, self._read_at_once(indices)
        samples, read = [], []
        for number in indices:
            seed_cpu(mix(self._seed, _SAMPLE, request.epoch, number))
            try:
                samples.append(self._samples[number])
                read.append(number)
            except MemoryError:  # not caused by the sample
                raise
            except Exception as error:
                bad.append(BadSample.of(error, number, request.epoch, request.step))
                if not self._skip_bad:
                    return [], None
        if not samples:
            return [], None
        try:
            return read, (self._collate or default_collate)(samples)
        except MemoryError:
            raise
        except Exception as error:
            found = BadSample.of(error, read[0], request.epoch, request.step)
            bad.append(found._replace(others=tuple(read[1:])))
            return [], None


def load(
    samples: Any, requests: Iterable[Request], how: LoadOptions, *, seed: int, epochs: Sequence[HasEpochs] = ()
) -> Iterator[MicroBatch]:
    """Return the micro-batches of ``requests``, in their order; still in host memory.

    Args:
        samples: With ``len`` and ``[]``.
        requests: Such as those of `train_requests`.
        how: How they are loaded.
        seed: The seed from which the random numbers of each sample are derived.
        epochs: What is told the epoch of a request.
    """
    return iter(how.open(_Fetch(samples, how, seed, epochs), requests))


# --- Loader processes that die

_SHARED_MEMORY = (
    "Most likely shared memory (/dev/shm) is full. Make it larger (docker run --shm-size=8g, or --ipc=host), or use "
    "fewer loader processes (workers, --workers)."
)
# By how it died, in torch's words.
_WHAT_TO_DO = {
    "signal: Killed": "Most likely the machine ran out of memory. Each loader process has its own copy of what the "
    "data set keeps in memory: use fewer of them (workers, --workers), or keep less.",
    "signal: Bus error": _SHARED_MEMORY,
    f"exit code {_NO_SHARED_MEMORY}": _SHARED_MEMORY,
    "signal: Segmentation fault": "A native library crashed: find the line with workers=0 "
    "(--workers 0) and `python -X faulthandler`.",
}


@contextlib.contextmanager
def explaining_worker_failures(rank: int) -> Iterator[None]:
    """Inside the block, add advice to the error about the death of a loader process.

    Torch raises it from a signal handler, so it may occur anywhere, not only while waiting for a batch.

    Raises:
        LoaderDied: A loader process of ``rank`` is gone.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        cause = str(error.__cause__ or error).splitlines()[0].strip()  # how it ended, if torch knows
        otherwise = "Find out why with workers=0 (--workers 0), which loads samples in the training process."
        advice = next((advice for how, advice in _WHAT_TO_DO.items() if how in cause), otherwise)
        raise LoaderDied(f"A loader process of rank {rank} died: {cause}\n{advice}") from None


# --- To the devices


@runtime_checkable
class Movable(Protocol):
    """An object that can be moved to a device, such as the graphs of a graph library."""

    def to(self, device: torch.device) -> Any:
        """Return it on ``device``."""


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=value.is_pinned())
    return value.to(device) if isinstance(value, Movable) and not isinstance(value, type) else value


def to_device(batch: MicroBatch, devices: Mapping[int, torch.device]) -> MicroBatch:
    """Return ``batch`` with each share on the device of its number; pinned memory is copied without blocking."""
    moves = [(each, partial(_move, device=device)) for each, device in _on_devices(batch, devices)]
    return batch._replace(batches=[map_tensors(each, move, move) for each, move in moves])


def _on_devices(batch: MicroBatch, devices: Mapping[int, torch.device]) -> Iterator[tuple[Any, torch.device]]:
    """Yield each share of a batch with its device."""
    return zip(batch.batches, map(devices.__getitem__, batch.numbers), strict=True)


# The begin and the end of a copy, as events of the device.
Copy = tuple[torch.Event, torch.Event]


class Prefetcher:
    """Copies the next micro-batch to its devices on separate streams while the current one is computed.

    Not thread-safe. Holds one additional batch on each device. Objects whose tensors are not accessible are copied only
    when their batch is needed: their tensors cannot be marked as in use for the allocator.

    Args:
        batches: In host memory.
        devices: By the number of a share.
        copies: Gets the begin and the end of each copy to the first device, if not None.
    """

    def __init__(
        self, batches: Iterator[MicroBatch], devices: Mapping[int, torch.device], copies: list[Copy] | None = None
    ) -> None:
        self._batches, self._copies = batches, copies
        self._devices = devices
        self._streams = {device: torch.Stream(device) for device in devices.values()}
        self._ahead: MicroBatch | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch, usable on each device's current stream."""
        batch, self._ahead = self._ahead or self._copy(), None
        shares = []
        for share, device in _on_devices(batch, self._devices):
            current = torch.accelerator.current_stream(device)
            current.wait_stream(self._streams[device])
            shares.append(map_tensors(share, partial(_record, stream=current), partial(_move, device=device)))
        return batch._replace(batches=shares)

    def start_next(self) -> None:
        """Start to copy the batch after the last returned one; call it when the device has enough work."""
        self._ahead = self._copy()

    def _copy(self) -> MicroBatch:
        batch = next(self._batches)
        shares: list[Any] = []
        for share, device in _on_devices(batch, self._devices):
            is_timed = self._copies is not None and not shares
            with self._streams[device]:
                began = recorded_event(device, timing=True) if is_timed else None
                shares.append(map_tensors(share, partial(_move, device=device)))
                if self._copies is not None and began is not None:
                    self._copies.append((began, recorded_event(device, timing=True)))
        return batch._replace(batches=shares)


def _record(tensor: Tensor, stream: torch.Stream) -> Tensor:
    """Mark for the allocator that ``tensor``, created on another stream, is in use on ``stream``."""
    if not tensor.is_cpu:
        tensor.record_stream(stream)
    return tensor


# --- The iterator


class BatchIterator:
    """Returns the micro-batches of this process in order, without end.

    Args:
        open_at: Returns them from a step on, in host memory; ``load`` of a `GlobalOrder` or a `StreamOrder`.
        devices: By the number of a share.

    Attributes:
        copies: Gets the begin and the end of each copy to the first device, if a list is assigned in time.
        can_rewind: Whether the micro-batches of a step are kept for `rewind`, which takes their memory on the device.
    """

    _note: StreamNote | None
    _note_before: StreamNote | None
    _again: list[MicroBatch]
    _of_step: list[MicroBatch]
    _batches: Iterator[MicroBatch] | None

    def __init__(self, open_at: Callable[..., Iterator[MicroBatch]], devices: Mapping[int, torch.device]) -> None:
        self._open_at, self._devices = open_at, devices
        self.copies: list[Copy] | None = None
        self.can_rewind = False
        self.seek(0)

    def next(self) -> MicroBatch:
        """Return the next micro-batch, on the devices. Starts the loader's processes if there are none yet."""
        if self._batches is None:
            batches = self._open_at(self._step, self._state)
            is_on_cpu = all(device.type == "cpu" for device in self._devices.values())
            self._batches = batches if is_on_cpu else Prefetcher(batches, self._devices, self.copies)
        batch = self._again.pop(0) if self._again else next(self._batches)
        if self._of_step and self._of_step[0].step != batch.step:
            self._of_step, self._note_before = [], self._note
        if self.can_rewind:
            self._of_step.append(batch)
        # Of this batch, not of the newest: loader processes and prefetching are ahead of the training.
        self._note = batch.note
        return batch

    def rewind(self, step: int) -> None:
        """Return the micro-batches of ``step`` again, if any of them were returned: it was not completed."""
        if self._of_step and self._of_step[0].step == step:
            self._again, self._of_step, self._note = [*self._of_step, *self._again], [], self._note_before

    def prefetch(self) -> None:
        """Start to copy the next micro-batch to the devices while they compute."""
        if isinstance(self._batches, Prefetcher):
            self._batches.start_next()

    def seek(self, step: int, state: dict[str, Any] | None = None) -> None:
        """Continue with ``step``, counted from 0 over all epochs.

        Args:
            step: The step of the next micro-batch.
            state: Of a stream, the result of `state` after the previous step.
        """
        self._step, self._state, self._note = step, state, None
        # Those to return before others, and those of the current step.
        self._again, self._of_step, self._note_before = [], [], None
        self.close()

    def state(self) -> dict[str, Any] | None:
        """Return the stream's position after the last micro-batch's step; None if unknown or without a stream.

        Warns on the first rank if the stream's states cannot be used.
        """
        note = self._note
        if note is None:
            return self._state
        if note.problem is not None and 0 in self._devices:
            warnings.warn(
                f"A resumed run will read and discard the earlier samples: {note.problem}.\nReturn all that its "
                "position and order depend on as numbers, strings, lists, dicts and tensors, to resume at once.",
                stacklevel=2,
            )
        return None if note.state is None else cast(dict[str, Any], pickle.loads(note.state))

    def close(self) -> None:
        """Stop the loader's processes."""
        self._batches = None  # they end with the iterator, to which there is no other reference
