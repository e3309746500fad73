"""Streams of data: their global batches and their state."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from lockstep.base.torch_internals import hide_worker_info
from lockstep.data.comparison import checksum, is_compared
from lockstep.data.loader import BadSample, Collate, LoadOptions, MicroBatch, StreamNote, having_epochs
from lockstep.data.order import BatchSplit, Purpose, mix, seed_cpu
from lockstep.errors import ConfigurationError, DataError, LockstepError

# --- The state of a stream in a checkpoint: plain values only, because it is read without running code

_VALUES = {type(None), bool, int, float, complex, str, bytes}


def first_not_serializable(value: Any) -> type | None:
    """Return the type of the first object in ``value`` that a checkpoint cannot contain, or None.

    It can contain numbers, strings, bytes, tensors, and lists, tuples and dicts of them; no numpy arrays or numbers.
    """
    if type(value) in {dict, OrderedDict}:
        items = [*value, *value.values()]
    elif type(value) in {list, tuple}:
        items = list(value)
    else:
        return None if type(value) in _VALUES or isinstance(value, Tensor) else type(value)
    return next(filter(None, map(first_not_serializable, items)), None)


# --- Global batches of a stream
#
# [Note: the state of a stream]
# A stream with ``state_dict()`` and ``load_state_dict(state)`` provides its state after each global batch, so that a
# resumed run continues there at once. Some states are not exact: Hugging Face's shuffle buffers are refilled with other
# samples. So the first state is tested: a copy of the stream that loaded it must return the next batch. If it does not,
# no state is kept, and a resumed run reads and drops the samples before its position, which is always exact.


_INEXACT = "does not restore the same samples, as with a shuffle buffer"


@runtime_checkable
class Stateful(Protocol):
    """A stream that can continue, or a part of a training loop, such as a model, an optimizer or a sampler."""

    def state_dict(self) -> Any:
        """Return its state; that of a stream is its position after the last sample that it returned."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from ``state``. A stream does in the next ``iter``; the one after that starts from the beginning."""


@dataclass(frozen=True)
class StreamOrder:
    """The global batches of a stream: in the order of the stream; an epoch ends when the stream ends.

    With ``num_epochs`` it is read so many times, for an evaluation.
    """

    batch_size: int
    seed: int
    drop_last: bool = False
    num_epochs: int | None = None
    num_samples: None = None
    steps_per_epoch: None = None

    @property
    def field(self) -> str:
        """The field of the task that made the stream."""
        return "dataset" if self.num_epochs is None else "eval_dataset"

    def load(self, stream: Any, split: BatchSplit, options: LoadOptions, step: int, state: Any) -> Iterator[MicroBatch]:
        """Return the micro-batches of this process from ``step`` on, without end; still in host memory.

        Without the ``state`` after the step before, earlier samples are read and dropped.
        """
        for item in options.open(_Steps(stream, self, split, step, state, options.collate)):
            if isinstance(item, LockstepError):
                raise item
            yield from item


class StreamReader:
    """Reads a stream a global batch at a time, epoch after epoch.

    Args:
        stream: The iterable.
        order: How many samples make a batch.
        first_step: The first global batch to return; without a state, earlier samples are read and dropped.
        state: The state after the previous batch, if it was kept: the epoch and the stream's own state.

    Attributes:
        problem: Why the stream's states cannot be used, if it has states and the test failed.
    """

    def __init__(self, stream: Iterable[Any], order: StreamOrder, first_step: int = 0, state: Any = None) -> None:
        self._stream, self._order, self._first_step = stream, order, first_step
        self._start = state if isinstance(stream, Stateful) else None
        # It was tested before it was kept, or is not kept.
        self._is_tried = self._start is not None or order.num_epochs is not None
        self.epoch = 0 if self._start is None else int(self._start["epoch"])
        self.problem: str | None = None

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the number and the samples of each step from the position on.

        Raises:
            ConfigurationError: The stream has no samples.
            DataError: It raised an error; names the place in it, and the cause.
        """
        step = 0 if self._start is None else self._first_step
        start, expected = self._start, None
        while self._order.num_epochs is None or self.epoch < self._order.num_epochs:
            iterator = self._begin(self._stream, step, start)
            is_empty = start is None
            start = None
            while True:
                samples = self._read(iterator, step)
                if expected is not None:
                    self.problem = None if checksum(samples) == expected else _INEXACT
                    expected = None
                if not samples or (self._order.drop_last and len(samples) < self._order.batch_size):
                    break
                if step >= self._first_step:
                    yield step, samples
                    expected = self._try_out(step + 1)
                step, is_empty = step + 1, False
            if is_empty:
                raise ConfigurationError(
                    f"The stream of Task.{self._order.field} ended before the first global batch.\n"
                    "Check where it reads its samples from."
                )
            self.epoch += 1

    def state(self) -> bytes | None:
        """Return the stream's position after the last batch, pickled, so that it does not change with the stream.

        None if the stream has no state, or the first state has not been tested yet.
        """
        # Not during the test of the first state: the batch that confirms it has not been read yet.
        return self._state() if self._is_tried and self.problem is None else None

    def _state(self) -> bytes | None:
        if not isinstance(self._stream, Stateful):
            return None
        state = self._stream.state_dict()
        if (kind := first_not_serializable(state)) is not None:
            self.problem = f"holds a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot"
            return None
        return pickle.dumps({"epoch": self.epoch, "stream": state})

    def _try_out(self, step: int) -> str | None:
        """Return the checksum of the next batch of a copy of the stream that continues from the current state."""
        if self._is_tried:
            return None
        self._is_tried = True
        pickled = self._state()
        if pickled is None:
            return None
        try:
            stream = copy.deepcopy(self._stream)
        except Exception:  # it may hold a connection: then this check is skipped
            return None
        try:
            return checksum(self._read(self._begin(stream, step, pickle.loads(pickled)), step))
        except Exception:  # an error of the stream itself will occur again when it is read
            return ""  # not a checksum, so the state counts as inexact

    def _begin(self, stream: Iterable[Any], step: int, state: dict[str, Any] | None) -> Iterator[Any]:
        for dataset in having_epochs(stream):
            dataset.set_epoch(self.epoch)
        if state is not None:
            assert isinstance(stream, Stateful)
            stream.load_state_dict(copy.deepcopy(state["stream"]))
        seed_cpu(mix(self._order.seed, Purpose.STREAM, step))  # for streams that shuffle before their first sample
        return iter(stream)

    def _read(self, iterator: Iterator[Any], step: int) -> list[Any]:
        seed_cpu(mix(self._order.seed, Purpose.STREAM, step))
        samples: list[Any] = []
        try:
            samples.extend(islice(iterator, self._order.batch_size))
        except Exception as error:
            if isinstance(error, LockstepError) and not isinstance(error, DataError):
                raise
            raise _stream_error(error, len(samples), self.epoch, step, self._order.field) from error
        return samples


def _stream_error(error: Exception, number: int, epoch: int, step: int, field: str) -> DataError:
    """Return the error to raise for an error of the stream: with the same text in a loader process and in this one."""
    bad = BadSample.of(error, number, epoch, step)
    return bad.error(
        f"The stream of Task.{field} cannot be read (epoch {epoch}, step {step}, sample {number} of it).\n{bad.cause}\n"
        "Repair or remove what cannot be read. A stream ends where it raises an error, whatever bad_samples says; what "
        "has a length and an index can go on without such samples.",
        error.sample if isinstance(error, DataError) else None,
    )


# --- Micro-batches of a stream
#
# Every process reads the whole stream and collates only its own samples, so that the samples of a step do not depend on
# the number of ranks or loader processes. If a stream is slow to read, a data set with length and index is better.


@dataclass
class _Steps(IterableDataset[list[MicroBatch] | LockstepError]):
    """The micro-batches of this process, a list for each step, without end.

    Our own errors are yielded like a step: torch would add text of the loader process to an error that is raised.
    """

    stream: Iterable[Any]
    order: StreamOrder
    split: BatchSplit
    first_step: int
    state: dict[str, Any] | None
    collate: Collate | None

    def __iter__(self) -> Iterator[list[MicroBatch] | LockstepError]:
        worker = get_worker_info()
        index, num_workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        stream = self.stream
        if worker is not None:
            # In a loader process, which reads all of it, streams usually check their worker number and skip samples.
            # Hugging Face's share their epoch between processes, which end an epoch at different times.
            hide_worker_info()
            stream = copy.deepcopy(stream) if having_epochs(stream) else stream
        reader = StreamReader(stream, self.order, self.first_step, self.state)
        try:
            for step, samples in reader:
                if (step - self.first_step) % num_workers == index:  # the loader polls them in turn, from the first
                    # If a rank has skipped a sample, its later batches end with another one, or the last is shorter.
                    compared = samples if is_compared(step) else [len(samples), reader.epoch, samples[-1]]
                    why = reader.problem and f"state_dict() of {type(self.stream).__name__} {reader.problem}"
                    yield self._divide(step, samples, StreamNote(checksum(compared), reader.state(), why))
        except LockstepError as error:
            yield error

    def _divide(self, step: int, samples: list[Any], note: StreamNote) -> list[MicroBatch]:
        collate = self.collate or default_collate
        return [
            MicroBatch(
                step,
                len(samples),
                list(shares),
                [np.array(indices) for indices in shares.values()],
                [collate([samples[index] for index in indices]) for indices in shares.values()],
                note=note,
            )
            for shares in self.split.micro_batches(torch.arange(len(samples)))
        ]
