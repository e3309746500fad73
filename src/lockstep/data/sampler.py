"""`DistributedSampler`: each rank's share of a data set, for hand-written loops; the position of loaders over it."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from typing_extensions import TypeVar, override

from lockstep.base.torch_internals import is_state_of_loader, progress_of_calling_loader
from lockstep.comm.collectives import default_group
from lockstep.data.stream import Stateful
from lockstep.errors import CheckpointError, ConfigurationError


@dataclass
class _Pass:
    """A pass over the indices: where it begins; once it is read, their number, and the batch of each that was read."""

    start: int = 0
    num_indices: int = -1
    progress: Callable[[], tuple[int, int]] = lambda: (0, 1)
    batches: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether it was read to its end, and a loader has returned all batches; its processes read ahead."""
        num_read, num_returned = self.progress()
        return len(self.batches) == self.num_indices and num_returned >= num_read


# Generic as torch's: programs derive from DistributedSampler[int].
_Index = TypeVar("_Index", covariant=True, default=int)


class DistributedSampler(TorchDistributedSampler[_Index]):
    """Returns each rank's share of the indices of a data set, in an order that is the same on all ranks.

    A drop-in for ``torch.utils.data.distributed.DistributedSampler``: the same arguments, attributes and, for each
    epoch, the same indices in the same order. In addition:

    - Without ``set_epoch``, it advances to the next epoch at the next ``iter`` after a pass that was read to its end; a
      ``DataLoader`` has returned all batches of it. After ``set_epoch`` it stays in that epoch, as torch's.
    - ``state_dict()`` and ``load_state_dict()``: the epoch, and the position in the order of all ranks, so that the
      rest of an epoch can be divided among another number of ranks. The position is that of the batches that a
      ``DataLoader`` has returned, though its processes read ahead. All ranks must have taken the same number; rank
      zero's state is that of all, because no rank has more samples.
    - ``pad=False`` gives each sample to exactly one rank, so that lengths may differ by one and be zero.

    Args:
        dataset: Of any length.
        num_replicas: Number of ranks; that of the default process group if None.
        rank: This rank; that in the default process group if None.
        shuffle: Whether to permute the indices, differently in each epoch.
        seed: The seed of the permutations; the same on every rank.
        drop_last: Whether to skip up to ``num_replicas - 1`` samples so that all ranks get the same number.
        pad: Whether to repeat samples, if none are skipped, so that all ranks get the same number.

    Attributes:
        num_samples: Number of indices that this rank gets.
        total_size: Number of indices that all ranks get.

    Raises:
        ConfigurationError: ``rank`` is not one of the replicas, or there is no process group.
    """

    # The newest pass; after a reset, where the next begins.
    _pass = _Pass()
    _epoch = 0

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
    ) -> None:
        num_replicas = default_group().size() if num_replicas is None else num_replicas
        rank = default_group().rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ConfigurationError(
                f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]\n"
                "Leave rank and num_replicas out to take them from the process group."
            )
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._is_set = False  # torch's constructor sets the epoch
        self.pad = pad
        if not pad and not drop_last:
            self.total_size: int = self._num_all
            self.num_samples = len(range(rank, self.total_size, num_replicas))

    @override
    def __iter__(self) -> Iterator[_Index]:
        """Return this rank's indices of the epoch: the next one if the pass before was read to its end."""
        is_loaded_at_end = 0 < self._num_all <= self._pass.start and self._pass.num_indices < 0 and not self._is_set
        if is_loaded_at_end or self._pass.is_over:
            self._epoch += not self._is_set
            self._pass = _Pass()
        return self._read(self._epoch, self._pass.start)

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield the indices of a pass. Nothing is computed before the first: loaders also create unread iterators."""
        indices = self._indices(epoch, start)
        this = _Pass(start, len(indices), progress_of_calling_loader())
        if epoch == self._epoch:  # an older iterator may be read, too
            self._pass = this
        for index in indices:
            this.batches.append(this.progress()[0])
            yield index

    @property
    def _num_all(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch's Dataset declares no length

    def _indices(self, epoch: int, start: int) -> list[Any]:
        """Return this rank's share of what follows position ``start`` of the order of ``epoch``, which is torch's."""
        size = self._num_all
        order = torch.arange(size)
        if self.shuffle:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed + epoch))
        rest, surplus = order[start:], len(order[start:]) % self.num_replicas
        if self.drop_last:
            rest = rest[: len(rest) - surplus]
        elif self.pad and surplus:
            missing = self.num_replicas - surplus
            rest = torch.cat([rest, order.repeat(-(-missing // size))[:missing]])
        return rest[self.rank :: self.num_replicas].tolist()

    @property
    def epoch(self) -> int:
        """The epoch of the newest pass; setting it calls `set_epoch`."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        # The position that was loaded is one in its epoch, which a script usually sets again.
        if epoch != self._epoch or self._pass.is_over:
            self._pass = _Pass()
        self._epoch, self._is_set = epoch, True

    def state_dict(self) -> dict[str, int]:
        """Return ``epoch`` and ``position``: how many samples of it all ranks together have got."""
        this = self._pass
        num_got = len(this.batches) if is_state_of_loader() else bisect_left(this.batches, this.progress()[1])
        is_at_end = this.is_over or num_got == this.num_indices
        position = self._num_all if is_at_end else this.start + num_got * self.num_replicas
        return {"epoch": self._epoch, "position": position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next passes at the position of ``state``, also that of another number of ranks."""
        self._is_set = self._is_set and state["epoch"] == self._epoch
        self._epoch, self._pass = state["epoch"], _Pass(state["position"])


# --- The position of a loader


@dataclass(frozen=True)
class LoaderPosition:
    """The position of a sampler, or of a ``DataLoader`` over it with the ``batch_size``, and the order of samples."""

    sampler: DistributedSampler[Any]
    batch_size: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler, and what `check` compares."""
        order = {"samples": self.sampler._num_all, "shuffle": self.sampler.shuffle, "seed": self.sampler.seed}
        size = {"batch_size": self.batch_size, "ranks": self.sampler.num_replicas}
        return {**self.sampler.state_dict(), **order, **size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next pass at the position of ``state``."""
        self.sampler.load_state_dict(state)

    def check(self, saved: dict[str, Any], name: str) -> None:
        """Check that ``saved``, loaded as ``name``, is a position in this order; earlier versions have saved no order.

        Another number of ranks may have the same batch size on each, or the same of all together. The number need not
        divide that, so what was rounded counts as the same.

        Raises:
            CheckpointError: It is of another order; names what differs.
        """
        now = self.state_dict()
        values = [(key, saved.get(key, now[key]), now[key]) for key in ("samples", "shuffle", "seed")]
        (size, num), (own_size, own_num) = [(each.get("batch_size"), each.get("ranks", 0)) for each in (saved, now)]
        if size and own_size and size != own_size and abs(size * num - own_size * own_num) >= max(num, own_num):
            each = f"{own_size * own_num} ({own_size} on each of {own_num} ranks)"
            values.append(("global batch", f"{size * num} ({size} on each of {num} ranks)", each))
        for key, old, new in values:
            if old != new and (key != "seed" or self.sampler.shuffle):
                raise CheckpointError(
                    f"The checkpoint is of a {name} with {key} {old}, this one has {new}.\n"
                    f"Create the same {name}, or load without {name} to begin at the first sample."
                )


def position_of(value: Any, name: str, *, saves: bool = False) -> Any:
    """Return what has the position of ``value``, if that is a loader or a `DistributedSampler`; else ``value``.

    If a ``DataLoader`` reads a `DistributedSampler` as it is, that is a `LoaderPosition`: it loads on any number of
    ranks and loader processes. Otherwise the class that has an ``__iter__`` of its own must have the state to it; or
    torchdata's loader counts the batches, in the epoch that the script sets.

    Args:
        value: Any object.
        name: What the caller calls it in messages.
        saves: Whether the position is to be saved.

    Raises:
        CheckpointError: The position is not known: samples would be lost or repeated.
    """
    readers, sampler, epochs = {"class": value}, value, [value]
    is_loader, batches = isinstance(value, DataLoader), None
    if is_loader:
        batches, epochs = value.batch_sampler, _samplers_of(value)
        sampler = value.sampler if batches is None else getattr(batches, "sampler", None)
        readers |= {"batch sampler": batches, "sampler": sampler}
    epochs = [item for item in epochs if isinstance(item, DistributedSampler)]
    if not epochs or (is_loader and isinstance(value.dataset, Stateful)):
        return value
    # The outermost that may read ahead, or return other samples.
    nested = "" if isinstance(sampler, DistributedSampler) else "sampler"
    kind = next((kind for kind, reader in readers.items() if not _adds_nothing(reader)), nested)
    reader = readers.get(kind)
    has_state, num_workers = _has_own_state(reader), value.num_workers if is_loader else 0
    is_counted = is_loader and isinstance(value, Stateful)
    why = f"its {kind} {type(reader).__name__} has an __iter__ of its own, which may read ahead or change the samples"
    advice = "use torchdata's StatefulDataLoader, and set_epoch in every epoch"
    if num_workers and not value.in_order:
        why, advice = "its workers return batches in any order", "leave in_order=False out"
    elif not kind:
        return LoaderPosition(sampler, getattr(batches, "batch_size", 1) if is_loader else None)
    elif has_state and (reader is value or not (num_workers or is_counted)):
        return reader
    elif reader is value or (isinstance(reader, DistributedSampler) and not has_state):
        advice = "give that class a state_dict and load_state_dict of its own"
    elif is_counted:
        if has_state or not saves or epochs[0]._is_set:
            return value
        why, advice = f"{type(value).__name__} does not save the epoch", "call set_epoch in every epoch"
    raise CheckpointError(
        f"The position of {name} within an epoch is not known: {why}.\n"
        f"Save between epochs, with the number of the next epoch in place of {name}, for set_epoch; or {advice}."
    )


def _samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the samplers of a loader, and the samplers that they have as attributes."""
    found: list[Any] = [loader.batch_sampler, loader.sampler]
    for item in found:  # which grows
        parts = getattr(item, "__dict__", {}).values()
        found += [part for part in parts if isinstance(part, Sampler) and all(part is not other for other in found)]
    return found


def _adds_nothing(reader: Any) -> bool:
    """Return whether a loader or sampler takes what it needs for the next batch, and returns it as it is."""
    if isinstance(reader, DistributedSampler):
        return type(reader).__iter__ is DistributedSampler.__iter__
    is_known = isinstance(reader, DataLoader | BatchSampler)
    return reader is None or (is_known and type(reader).__iter__.__module__.split(".")[0] in ("torch", "torchdata"))


def _has_own_state(reader: Any) -> bool:
    """Return whether the state is of the class that has the ``__iter__``, or of one that derives from it."""
    kinds = [next((kind for kind in type(reader).__mro__ if name in vars(kind)), object) for name in _ITER_AND_STATE]
    return isinstance(reader, Stateful) and issubclass(kinds[1], kinds[0])


_ITER_AND_STATE = ("__iter__", "state_dict")
