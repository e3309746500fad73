"""`DistributedSampler`: each rank's share of a data set, for hand-written loops."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from typing_extensions import TypeVar, override

from lockstep.comm.collectives import default_group
from lockstep.errors import ConfigurationError
from lockstep.torch_internals import progress_of_calling_loader

# Generic as torch's: programs derive from DistributedSampler[int].
_Index = TypeVar("_Index", covariant=True, default=int)


class DistributedSampler(TorchDistributedSampler[_Index]):
    """Returns each rank's share of the indices of a data set, in an order that is the same on all ranks.

    A drop-in for ``torch.utils.data.distributed.DistributedSampler``: the same arguments, attributes and, for each
    epoch, the same indices in the same order. In addition:

    - Without ``set_epoch``, it advances to the next epoch at the next ``iter`` after a pass that was read to its end; a
      ``DataLoader`` has returned all batches of it. After ``set_epoch`` it stays in that epoch, as torch's.
    - ``state_dict()`` and ``load_state_dict()``: the epoch, and the position in the order of all ranks, so that the
      rest of an epoch can be divided among another number of ranks. The position is that of the indices read, and the
      processes of a ``DataLoader`` read ahead; torchdata's ``StatefulDataLoader`` saves what it has returned.
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

    # Of the newest pass: where it begins, how far it was read, and whether a loader has returned all that it read.
    _start = 0
    _position: int | None = None
    _is_delivered: Callable[[], bool] = bool
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
        is_loaded_at_end = self._position is None and 0 < self._num_all <= self._start and not self._is_set
        if is_loaded_at_end or self._is_over:
            self._epoch += not self._is_set
            self._position, self._start = None, 0
        return self._read(self._epoch, self._start)

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield the indices of a pass. Nothing is computed before the first: loaders also create unread iterators."""
        indices = self._indices(epoch, start)
        self._is_delivered = progress_of_calling_loader()
        if not indices:
            self._position = self._num_all
        for number, index in enumerate(indices, 1):
            if epoch == self._epoch:  # an older iterator may be read, too
                self._position = start + number * self.num_replicas if number < len(indices) else self._num_all
            yield index

    @property
    def _is_over(self) -> bool:
        """Whether the pass was read to its end, and a loader has returned all batches; its processes read ahead."""
        is_read = self._position is not None and self._position >= self._num_all
        return is_read and (self._start > 0 or self._is_delivered())

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
        if epoch != self._epoch or self._is_over:
            self._start = 0
        self._epoch, self._position, self._is_set = epoch, None, True

    def state_dict(self) -> dict[str, int]:
        """Return ``epoch`` and ``position``: how many samples of it all ranks together have read."""
        return {"epoch": self._epoch, "position": self._start if self._position is None else self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next passes at the position of ``state``, also that of another number of ranks."""
        self._epoch, self._start, self._position, self._is_set = state["epoch"], state["position"], None, False
