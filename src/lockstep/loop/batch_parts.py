"""Which batch a forward was given: the parts of batches that prepared loaders have returned, found by their tensors."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.base.containers import find_tensors
from lockstep.parallel.ddp.shares import BatchPart


@dataclass(eq=False)
class Reading:
    """What one pass over a loader has returned.

    Attributes:
        owner: The loader.
        newest: The part that was returned last.
        kinds: A part of each kind so far.
        num_unused: How many were returned since the last forward.
        reads_ahead: Whether several were, at some forward, or another thread reads.
        thread: Which has read the newest part.
        is_over: Whether the pass has ended or was left.
        has_grad: Whether gradients were enabled at its begin.
        num_read: How many were returned.
    """

    owner: weakref.ref[Any]
    newest: BatchPart | None = None
    kinds: dict[int | None, BatchPart] = field(default_factory=dict)
    num_unused: int = 0
    reads_ahead: bool = False
    thread: int = 0
    is_over: bool = False
    has_grad: bool = field(default_factory=torch.is_grad_enabled)
    num_read: int = 0

    def read(self, known: BatchPart) -> None:
        """Record a part that is returned."""
        self.newest = self.kinds[known.kind] = known
        self.num_unused += 1
        self.num_read += 1
        self.thread = threading.get_ident()

    def use(self) -> list[BatchPart]:
        """Record that a forward used a part, and return the parts that it may be, one of each kind, the newest last."""
        self.reads_ahead |= self.num_unused > 1 or (self.num_read > 0 and self.thread != threading.get_ident())
        self.num_unused = 0
        if self.newest is None:
            return []
        return [*self.kinds.values(), self.newest] if self.reads_ahead else [self.newest]


class _Owners:
    """By storage, the parts of which it holds tensors, each by the address where the tensor begins.

    Storages are referred to weakly; as long as they are, their keys are not used for others.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, dict[int, BatchPart]]] = {}
        self._limit = 64

    def add(self, value: Any, part: BatchPart) -> None:
        """Record that the tensors in ``value`` are of ``part``."""
        for tensor in find_tensors(value):
            with suppress(NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have no storage
                storage = StorageWeakRef(tensor.untyped_storage())
                _, parts = self._storages.setdefault(storage.cdata, (storage, {}))
                parts[tensor.data_ptr()] = part
        if len(self._storages) > self._limit:
            self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
            self._limit = max(64, 2 * len(self._storages))

    def holds(self, part: BatchPart | None) -> bool:
        """Return whether a tensor of ``part`` is in use."""
        return any(part in parts.values() and not storage.expired() for storage, parts in self._storages.values())

    def find(self, value: Any) -> list[BatchPart]:
        """Return the parts of the tensors in ``value``, or of which they may be views."""
        found: list[BatchPart] = []
        for tensor in find_tensors(value) if self._storages else ():
            with suppress(NotImplementedError, RuntimeError):
                _, parts = self._storages.get(StorageWeakRef(tensor.untyped_storage()).cdata, (None, {}))
                address = tensor.data_ptr()
                found += [parts[address]] if address in parts else parts.values()
        return found


class BatchParts:
    """The parts of batches that are in use in this process.

    [Note: the batch of a forward]
    A tensor belongs to a batch if it is one of the batch's tensors, or a view of one. If a forward gets such tensors,
    it is known which batch it was given. If it gets none, but what a forward of a prepared model has returned, it was
    given the batch of that forward.

    Tensors that were computed from a batch (``x.float()``, ``torch.cat``) cannot be told from others, such as noise.
    Then
    the batch is the one that was returned last, if that is certain: in a loop that reads one batch, from one loader,
    before each forward. If a loop has several (a look-ahead, a list of batches, two loaders), it is right as well if
    they are divided alike, as all are whose size is a multiple of the number of ranks. Else the share is not known, and
    the backward is refused.

    Attributes:
        num_forwards: Of prepared models.
        num_training_forwards: Of these, those in training mode, with gradients.
    """

    def __init__(self) -> None:
        self.num_forwards = self.num_training_forwards = 0
        self._batches, self._outputs = _Owners(), _Owners()
        self._readings: list[Reading] = []

    def begin(self, owner: Any) -> Reading:
        """Return the record of a new pass over ``owner``."""
        self._readings = [each for each in self._readings if not (each.is_over and each.owner() in (owner, None))]
        return Reading(weakref.ref(owner))

    def returned(self, reading: Reading, part: BatchPart, batch: Any, *, is_final: bool = True) -> None:
        """Record that a loader returns ``batch`` to the script; or if not final, to the loader's own ``__iter__``."""
        reading.read(part)
        self._batches.add(batch, part)
        if not is_final:
            return
        others = [each for each in self._readings if each is not reading]
        self._readings = [each for each in others if self._may_be_used(each)] + [reading]

    def _may_be_used(self, reading: Reading) -> bool:
        """Return whether a batch of a pass, or what was computed from one, may be given to another forward."""
        if not reading.is_over:
            return True
        # Each batch was used before the next was read; or it was an evaluation, or a look at a batch that is gone.
        if not (reading.reads_ahead or reading.num_unused) or not reading.has_grad:
            return False
        return reading.num_read > 1 or self._batches.holds(reading.newest)

    def of_forward(self, arguments: Any, *, trains: bool) -> BatchPart | None:
        """Return the part that a forward is given; None: it is given none of a prepared loader."""
        self.num_forwards += 1
        self.num_training_forwards += trains
        unused = [each for each in self._readings if self._may_be_used(each)] or self._readings[-1:]
        uses = {id(each): each.use() for each in self._readings}
        candidates = [part for each in unused for part in uses[id(each)]]
        return single(self._batches.find(arguments) or self._outputs.find(arguments) or candidates)

    def of_output(self, output: Any, part: BatchPart) -> None:
        """Record what the forward has returned."""
        self._outputs.add(output, part)

    def of_batch(self, batch: Any, reading: Reading) -> BatchPart | None:
        """Return the part of a batch that was made of the batches of ``reading``; None: none was read."""
        return single(self._batches.find(batch) or reading.use())


def single(candidates: list[BatchPart]) -> BatchPart | None:
    """Return the last of ``candidates`` if all are divided alike; else a part that is refused."""
    if not candidates:
        return None
    if len({part.kind for part in candidates}) == 1:
        return candidates[-1]
    names = sorted({part.name for part in candidates})
    return candidates[-1]._replace(kind=None, problem=_PROBLEM.format(names=" or ".join(names)))


_PROBLEM = (
    "It is not known from which batch this forward was computed, {names}, and they are divided differently over the "
    "ranks.\nGive the model a tensor of one batch, or a view of it; or compute what it is given where batches are "
    "made, in the data set or collate_fn. Or make all batches a multiple of the number of ranks (drop_last=True), or "
    "call lockstep.backward(loss, mean_over=n), where n is the number of samples in the mean on this rank."
)

parts = BatchParts()
