"""The global batches of a stream, from its beginning or from where its own state says.

[Note: the state of a stream]
A stream with ``state_dict()`` and ``load_state_dict(state)`` is asked for its state behind each global batch, so that a
resumed run goes on there at once. Some states are not exact: Hugging Face's shuffle buffers are refilled with other
samples, say. So the first one is tried out. A copy of the stream that loaded it must give the batch that comes next; if
it does not, no state is kept, and a resumed run reads and drops what came before, which is always exact.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lockstep.data.bad_sample import BadSample
from lockstep.data.plain import first_not_plain
from lockstep.data.same_stream import checksum
from lockstep.data.seeding import mix, seed_cpu
from lockstep.errors import ConfigurationError, DataError, LockstepError

_STREAM = 6
"""Keeps the bits that a stream draws apart from those that other purposes draw from the same seed."""

_INEXACT = "does not lead back to the same samples, as with a shuffle buffer"

_NOTHING = ""
"""What is no checksum."""


@runtime_checkable
class Stateful(Protocol):
    """A stream that can say where it stands, and go on from there with the next ``iter``."""

    def state_dict(self) -> Any:
        """Return where it stands: behind the sample that it gave last."""

    def load_state_dict(self, state: Any) -> None:
        """Let the next ``iter`` go on from there; the one after that begins anew."""


@runtime_checkable
class HasEpochs(Protocol):
    """A stream whose order depends on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set what the next ``iter`` goes by."""


@dataclass(frozen=True)
class StreamOrder:
    """The global batches of a stream: in its own order, for epochs that end when it does."""

    batch_size: int
    seed: int
    drop_last: bool = False
    num_samples: None = None
    steps_per_epoch: None = None


@dataclass(frozen=True)
class StreamPosition:
    """Where in a stream to begin.

    Args:
        step: The first global batch that is wanted.
        state: What was kept behind the one before, if anything was: the epoch and the stream's own state.
    """

    step: int = 0
    state: dict[str, Any] | None = None


class GlobalBatch(NamedTuple):
    """The samples of a step."""

    step: int
    samples: list[Any]


def unfit(state: dict[str, Any] | None) -> str | None:
    """Return why a checkpoint cannot hold ``state``, or None if it can."""
    found = first_not_plain(state["stream"]) if state is not None else None
    return None if found is None else f"holds {found}, which a checkpoint cannot"


class StreamReader:
    """Reads a stream a global batch at a time, epoch after epoch.

    Args:
        stream: What is iterated.
        order: How many samples make a batch.
        position: Where to begin; without a state, what comes before is read and dropped.

    Attributes:
        problem: Why the stream's states are of no use, if it has some and that was found out.
    """

    def __init__(self, stream: Iterable[Any], order: StreamOrder, position: StreamPosition) -> None:
        self._stream, self._order, self._position = stream, order, position
        self._start = position.state if isinstance(stream, Stateful) else None
        self._is_tried = self._start is not None  # when it was kept
        self._epoch = 0 if self._start is None else int(self._start["epoch"])
        self.problem: str | None = None

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Read the batches from the position on, without end.

        Raises:
            ConfigurationError: The stream has no samples.
            DataError: It raised an error; says where in it, and what.
        """
        step = 0 if self._start is None else self._position.step
        start, expected = self._start, None
        while True:
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
                if step >= self._position.step:
                    yield GlobalBatch(step, samples)
                    expected = self._try_out(step + 1)
                step, is_empty = step + 1, False
            if is_empty:
                raise ConfigurationError(
                    "The stream of Task.dataset ended before the first global batch.\n"
                    "Check where it reads its samples from."
                )
            self._epoch += 1

    def state(self) -> bytes | None:
        """Return where the stream stands behind the batch that was read last, pickled: it must not change with it.

        None if the stream cannot say that, or the first time it did has yet to be tried out.
        """
        return self._state() if self._is_tried and self.problem is None else None

    def _state(self) -> bytes | None:
        if not isinstance(self._stream, Stateful):
            return None
        try:
            return pickle.dumps({"epoch": self._epoch, "stream": self._stream.state_dict()})
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self.problem = f"cannot be stored: {error}"
            return None

    def _try_out(self, step: int) -> str | None:
        """Return the checksum of what a copy of the stream gives next, made to go on from the state that it has now."""
        if self._is_tried:
            return None
        self._is_tried = True
        pickled = self._state()
        if pickled is None:
            return None
        state = pickle.loads(pickled)
        self.problem = unfit(state)
        try:
            stream = copy.deepcopy(self._stream)
        except Exception:  # it holds a connection, say: then its state must be believed
            return None
        try:
            return checksum(self._read(self._begin(stream, step, state), step)) if self.problem is None else None
        except Exception:  # what the stream itself raises will come up when it is read
            return _NOTHING

    def _begin(self, stream: Iterable[Any], step: int, state: dict[str, Any] | None) -> Iterator[Any]:
        if isinstance(stream, HasEpochs):
            stream.set_epoch(self._epoch)
        if state is not None:
            assert isinstance(stream, Stateful)
            stream.load_state_dict(copy.deepcopy(state["stream"]))
        seed_cpu(mix(self._order.seed, _STREAM, step))  # for streams that shuffle before they give the first sample
        return iter(stream)

    def _read(self, iterator: Iterator[Any], step: int) -> list[Any]:
        seed_cpu(mix(self._order.seed, _STREAM, step))
        samples: list[Any] = []
        try:
            samples.extend(islice(iterator, self._order.batch_size))
        except Exception as error:
            if isinstance(error, LockstepError) and not isinstance(error, DataError):
                raise
            raise _unreadable(error, len(samples), self._epoch, step) from error
        return samples


def _unreadable(error: Exception, number: int, epoch: int, step: int) -> DataError:
    """Return what to raise for an error of the stream: the same words from a loader process as from this one."""
    bad = BadSample.of(error, number, epoch, step)
    found = DataError(
        f"The stream of Task.dataset cannot be read (epoch {epoch}, step {step}, sample {number} of it).\n{bad.cause}\n"
        "Repair or remove what cannot be read. A stream ends where it raises an error, whatever bad_samples says; what "
        "has a length and an index can go on without such samples.",
        file=bad.file,
        offset=bad.offset,
        sample=error.sample if isinstance(error, DataError) else None,
    )
    if bad.trace is not None:
        found.add_note(bad.trace)
    return found
