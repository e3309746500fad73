"""`DistributedSampler`: each rank's share of a data set, for hand-written loops."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from typing_extensions import TypeVar, override

from lockstep.comm.collectives import default_group
from lockstep.errors import ConfigurationError
from lockstep.torch_internals import is_state_of_loader, progress_of_calling_loader


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
