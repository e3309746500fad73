"""`DistributedSampler`: each rank's share of a data set, for hand-written loops."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from typing_extensions import TypeVar, override

from lockstep.comm.collectives import default_group
from lockstep.errors import ConfigurationError

# Generic as torch's: programs derive from DistributedSampler[int].
_Index = TypeVar("_Index", covariant=True, default=int)


class DistributedSampler(TorchDistributedSampler[_Index]):
    """Returns each rank's share of the indices of a data set, in an order that is the same on all ranks.

    A drop-in for ``torch.utils.data.distributed.DistributedSampler``: the same arguments, attributes and, for each
    epoch, the same indices in the same order. In addition:

    - It advances to the next epoch when it is iterated again, so without ``set_epoch`` it does not repeat the first
      order forever. ``set_epoch(e)`` makes the next iteration epoch ``e``; the one after it is ``e + 1``. The epoch
      counts iterations, finished or not: every rank must start the same number of them.
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

    _is_epoch_begun = False

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
        self.pad = pad
        if not pad and not drop_last:
            self.total_size: int = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no length
            self.num_samples = len(range(rank, self.total_size, num_replicas))

    @override
    def __iter__(self) -> Iterator[_Index]:
        """Return this rank's indices of the epoch; a new epoch unless `set_epoch` named this one."""
        if self._is_epoch_begun:
            self._epoch += 1
        self._is_epoch_begun = True
        return super().__iter__()

    @property
    def epoch(self) -> int:
        """The epoch being iterated, or the first one before any iteration; setting it calls `set_epoch`."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._is_epoch_begun = False
