"""The micro-batches of data that comes as a stream: the k-th global batch is the next so many samples of it.

Every process reads the whole stream and collates only what falls to it, so that the samples of a step do not depend on
the number of ranks or loader processes. A stream that is costly to read is better given a length and an index.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lockstep.data.at_once import Collate
from lockstep.data.division import Division
from lockstep.data.loader import LoadOptions, MicroBatch, StreamNote
from lockstep.data.same_stream import checksum, is_checked
from lockstep.data.stream_reader import HasEpochs, StreamOrder, StreamPosition, StreamReader
from lockstep.errors import LockstepError


@dataclass
class _Steps(IterableDataset[list[MicroBatch] | LockstepError]):
    """The micro-batches of this process, a list for each step, without end.

    Our own errors are given like a step: torch would put the words of a loader process before theirs.
    """

    stream: Iterable[Any]
    order: StreamOrder
    division: Division
    position: StreamPosition
    collate: Collate | None

    def __iter__(self) -> Iterator[list[MicroBatch] | LockstepError]:
        try:
            yield from self._steps()
        except LockstepError as error:
            yield error

    def _steps(self) -> Iterator[list[MicroBatch]]:
        worker = get_worker_info()
        index, num_workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        reader = StreamReader(self.stream if worker is None else _apart(self.stream), self.order, self.position)
        for step, samples in reader:
            num_steps = step - self.position.step
            if num_steps % num_workers == index:  # the loader asks its processes in turn, from the first
                compared = checksum(samples) if is_checked(num_steps) else None
                note = StreamNote(reader.state(), compared, reader.problem)
                yield self._divide(step, samples, note)

    def _divide(self, step: int, samples: list[Any], note: StreamNote) -> list[MicroBatch]:
        collate = self.collate or default_collate
        return [
            MicroBatch(
                step,
                len(samples),
                list(shares),
                [len(indices) for indices in shares.values()],
                [collate([samples[index] for index in indices]) for indices in shares.values()],
                note=note if index == 0 else note._replace(checksum=None),
            )
            for index, shares in enumerate(self.division.micro_batches(torch.arange(len(samples))))
        ]


def _apart(stream: Iterable[Any]) -> Iterable[Any]:
    """Return ``stream`` as it must be in a loader process, which reads all of it.

    What streams do there as a rule is to ask which process they are in, and leave samples out: so they are not told.
    Hugging Face's share their epoch among the processes, which reach its end at different times: so each has a copy.
    """
    torch_worker._worker_info = None
    return copy.deepcopy(stream) if isinstance(stream, HasEpochs) else stream


def load_stream(
    stream: Iterable[Any],
    order: StreamOrder,
    division: Division,
    how: LoadOptions,
    *,
    position: StreamPosition,
) -> Iterator[MicroBatch]:
    """Return the micro-batches of this process from ``position`` on, without end; still in host memory.

    Reads and drops what comes before, unless the position holds the stream's own state.
    """
    return _unpack(how.open(_Steps(stream, order, division, position, how.collate)))


def _unpack(loader: Iterable[list[MicroBatch] | LockstepError]) -> Iterator[MicroBatch]:
    for item in loader:
        if isinstance(item, LockstepError):
            raise item
        yield from item
