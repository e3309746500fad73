"""The micro-batches of a process: how their samples are loaded, and how they get to the devices."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.queues
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from lockstep.base.accelerator import recorded_event
from lockstep.base.containers import map_tensors
from lockstep.base.env import check_socket_folder
from lockstep.base.rank_files import EARLY_SIGNALS
from lockstep.data.order import BatchSplit, GlobalOrder, Purpose, SampleSeeds, ShardOrder, mix, seed_cpu
from lockstep.data.shards import ShardedDataset
from lockstep.data.tokens import TokenFiles
from lockstep.errors import ConfigurationError, DataError, LoaderDied, LockstepError

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

    def error(self, text: str, sample: int | str | None) -> DataError:
        """Return the error that ends the run because of it."""
        error = DataError(text, file=self.file, offset=self.offset, sample=sample)
        if self.trace is not None:
            error.add_note(self.trace)
        return error


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
        rest = f"{len(bad) - 1} more cannot be read either: {_first_few([sample.sample for sample in bad[1:]])}.\n" * (
            len(bad) > 1
        )
        tail = f"{rest}{_ADVICE}"
    return first.error(f"{head}\n{first.cause}\n{tail}", first.sample)


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
    for number in (signal.SIGINT, *EARLY_SIGNALS):
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

    Empty shares are omitted.
    """

    epoch: int
    step: int
    num_global: int
    shares: dict[int, list[int]]


class StreamNote(NamedTuple):
    """What the ranks compare and a stream's state, sent along with a micro-batch; see `lockstep.data.stream`.

    Args:
        checksum: Of samples that all ranks read for this step.
        state: The stream's position after the step, pickled, if it has a state.
        problem: Why the stream's states cannot be used, if so.
    """

    checksum: str
    state: bytes | None = None
    problem: str | None = None


class MicroBatch(NamedTuple):
    """The data that a process computes at once: for each share with samples, its number, its samples, and the batch.

    ``samples`` are indices in the data set; of a stream, positions in the global batch. ``bad`` are the samples that
    could not be read; they are not included in ``samples``, but counted in ``num_global``.
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


def train_requests(order: GlobalOrder | ShardOrder, split: BatchSplit, first_step: int) -> Iterator[Request]:
    """Yield all requests of this process from a step on, without end."""
    for step in itertools.count(first_step):
        batch = order.batch(step)
        for shares in split.micro_batches(batch):
            yield Request(step // order.steps_per_epoch, step, len(batch), shares)


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
    return [dataset for part in parts for dataset in having_epochs(part)]


class Fetch(Dataset[MicroBatch]):
    """Answers requests; runs in the loader processes if there are any."""

    def __init__(self, samples: Any, options: LoadOptions, seed: int, epochs: Sequence[HasEpochs]) -> None:
        self._epochs, self._epoch = epochs, -1
        self._samples, self._collate, self._skip_bad, self._seed = samples, options.collate, options.skip_bad, seed
        self._read_at_once = batched_getitem(samples, options.collate)
        # A subclass may have other indexing.
        self._each = samples.each if type(samples) is ShardedDataset else partial(map, samples.__getitem__)
        self._num_samples, self._seeds = len(samples), SampleSeeds()

    def __getitem__(self, request: Request) -> MicroBatch:
        if request.epoch != self._epoch:
            for dataset in self._epochs:
                seed_cpu(mix(self._seed, Purpose.SAMPLE, request.epoch))  # for what shuffles then
                dataset.set_epoch(request.epoch)
            self._epoch = request.epoch
            if self._epochs and len(self._samples) != self._num_samples:
                raise ConfigurationError(
                    f"Task.dataset has {len(self._samples)} samples after set_epoch({request.epoch}), but had "
                    f"{self._num_samples} when the run began, which determines its steps.\nGive it the same number in "
                    "each epoch, or make it an IterableDataset."
                )
        bad: list[BadSample] = []
        micro = MicroBatch(request.step, request.num_global, [], [], [])
        for number, indices in request.shares.items():
            read, batch = self._share(indices, request, bad)
            if bad and not self._skip_bad:  # the run ends, so more samples are not needed
                return micro._replace(numbers=[], samples=[], batches=[], bad=tuple(bad))
            if read:
                micro.numbers.append(number)
                micro.samples.append(np.array(read))
                micro.batches.append(batch)
        return micro._replace(bad=tuple(bad))

    def _share(self, indices: list[int], request: Request, bad: list[BadSample]) -> tuple[list[int], Any]:
        """Return the samples that could be read, and their collated batch; add the others to ``bad``."""
        if self._read_at_once is not None:
            # If one sample cannot be read, all fail. Then they are read one by one to find it.
            with contextlib.suppress(Exception):
                return indices, self._read_at_once(indices)
        before = len(bad)

        def again() -> tuple[list[int], Any]:
            del bad[before:]
            return self._one_by_one(indices, request, bad)

        return self._seeds.read(lambda: self._one_by_one(indices, request, bad), again)

    def _one_by_one(self, indices: list[int], request: Request, bad: list[BadSample]) -> tuple[list[int], Any]:
        samples, read, each = [], [], self._each(indices)
        for number in indices:
            self._seeds.seed(self._seed, Purpose.SAMPLE, request.epoch, number)
            try:
                samples.append(next(each))
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
            bad_sample = BadSample.of(error, read[0], request.epoch, request.step)
            bad.append(bad_sample._replace(others=tuple(read[1:])))
            return [], None


def load(
    samples: Any, requests: Iterable[Request], options: LoadOptions, *, seed: int, epochs: Sequence[HasEpochs] = ()
) -> Iterator[MicroBatch]:
    """Return the micro-batches of ``requests``, in their order; still in host memory.

    Args:
        samples: With ``len`` and ``[]``.
        requests: Such as those of `train_requests`.
        options: How they are loaded.
        seed: The seed from which the random numbers of each sample are derived.
        epochs: What is told the epoch of a request.
    """
    return iter(options.open(Fetch(samples, options, seed, epochs), requests))


def load_order(
    order: GlobalOrder | ShardOrder, samples: Any, split: BatchSplit, options: LoadOptions, step: int, _state: Any
) -> Iterator[MicroBatch]:
    """Return the micro-batches of this process from ``step`` on, without end; still in host memory."""
    return load(samples, train_requests(order, split, step), options, seed=order.seed, epochs=having_epochs(samples))


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

    Torch raises it from a signal handler, so it may occur anywhere, not only while waiting for a batch. Of our own
    errors in such a process, torch's error has the traceback in its text, which is omitted.

    Raises:
        LoaderDied: A loader process of ``rank`` is gone.
    """
    try:
        yield
    except LockstepError as error:
        kind = type(error)
        if not str(error).startswith(f"Caught {kind.__name__} in"):
            raise
        raise kind(str(error).rpartition(f"{kind.__name__}: ")[2].strip()) from None
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        cause = str(error.__cause__ or error).splitlines()[0].strip()  # how it ended, if torch knows
        otherwise = "Find out why with workers=0 (--workers 0), which loads samples in the training process."
        advice = next((advice for ending, advice in _WHAT_TO_DO.items() if ending in cause), otherwise)
        raise LoaderDied(f"A loader process of rank {rank} died: {cause}\n{advice}") from None


# --- To the devices


@runtime_checkable
class Movable(Protocol):
    """An object that can be moved to a device, such as the graphs of a graph library."""

    def to(self, device: torch.device) -> Any:
        """Return it on ``device``."""


def _put_on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=value.is_pinned())
    return value.to(device) if isinstance(value, Movable) and not isinstance(value, type) else value


def to_device(batch: MicroBatch, devices: Mapping[int, torch.device]) -> MicroBatch:
    """Return ``batch`` with each share on the device of its number; pinned memory is copied without blocking."""
    moves = [(share, partial(_put_on_device, device=device)) for share, device in _on_devices(batch, devices)]
    return batch._replace(batches=[map_tensors(share, move, move) for share, move in moves])


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

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch, usable on each device's current stream."""
        batch, self._ahead = self._ahead or self._copy(), None
        shares = []
        for share, device in _on_devices(batch, self._devices):
            current = torch.accelerator.current_stream(device)
            current.wait_stream(self._streams[device])
            shares.append(map_tensors(share, partial(_record, stream=current), partial(_put_on_device, device=device)))
        return batch._replace(batches=shares)

    def start_next(self) -> None:
        """Start to copy the batch after the last returned one; call it when the device has enough work."""
        self._ahead = self._ahead or self._copy()  # there is one when a step is done again

    def _copy(self) -> MicroBatch:
        batch = next(self._batches)
        shares: list[Any] = []
        for share, device in _on_devices(batch, self._devices):
            is_timed = self._copies is not None and not shares
            with self._streams[device]:
                began = recorded_event(device, timing=True) if is_timed else None
                shares.append(map_tensors(share, partial(_put_on_device, device=device)))
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
        open_at: Returns them from a step on, in host memory; `load_order`, or ``load`` of a `StreamOrder`.
        devices: By the number of a share.

    Attributes:
        copies: Gets the begin and the end of each copy to the first device, if a list is assigned in time.
        can_rewind: Whether the micro-batches of a step are kept for `rewind`, which takes their memory on the device.
    """

    def __init__(self, open_at: Callable[..., Iterator[MicroBatch]], devices: Mapping[int, torch.device]) -> None:
        self._open_at, self._devices = open_at, devices
        self.copies: list[Copy] | None = None
        self.can_rewind = False
        self.seek(0)

    def seek(self, step: int, state: dict[str, Any] | None = None) -> None:
        """Continue with ``step``, counted from 0 over all epochs.

        Args:
            step: The step of the next micro-batch.
            state: Of a stream, the result of `state` after the previous step.
        """
        self._step, self._state = step, state
        self._note: StreamNote | None = None
        self._note_before: StreamNote | None = None
        self._again: list[MicroBatch] = []  # to return before others
        self._of_step: list[MicroBatch] = []
        self._batches: Iterator[MicroBatch] | Prefetcher | None = None  # with whose iterator their processes end

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
