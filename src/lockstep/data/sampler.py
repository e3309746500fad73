"""`DistributedSampler`: each rank's share of a data set, for hand-written loops."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from typing_extensions import TypeVar

from lockstep.comm.collectives import default_group
from lockstep.errors import ConfigurationError

# Generic as torch's: programs derive from DistributedSampler[int].
_Index = TypeVar("_Index", covariant=True, default=int)


class DistributedSampler(Sampler[_Index]):
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
        self.num_replicas = default_group().size() if num_replicas is None else num_replicas
        self.rank = default_group().rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigurationError(
                f"Invalid rank {self.rank}, rank should be in the interval [0, {self.num_replicas - 1}]\n"
                "Leave rank and num_replicas out to take them from the process group."
            )
        self.dataset = dataset
        self.shuffle, self.seed, self.drop_last, self.pad = shuffle, seed, drop_last, pad
        self._epoch, self._is_epoch_begun = 0, False
        size: int = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no length
        if drop_last:
            self.num_samples = size // self.num_replicas
        elif pad:
            self.num_samples = math.ceil(size / self.num_replicas)
        else:
            self.num_samples = len(range(self.rank, size, self.num_replicas))
        self.total_size = self.num_samples * self.num_replicas if drop_last or pad else size

    def __iter__(self) -> Iterator[_Index]:
        """Return this rank's indices of the epoch; a new epoch unless `set_epoch` named this one."""
        if self._is_epoch_begun:
            self._epoch += 1
        self._is_epoch_begun = True
        indices = list(range(len(self.dataset)))  # type: ignore[arg-type]  # torch's Dataset declares no length
        if self.shuffle:
            # The same generator and seed as in torch, so that a script that replaces the sampler keeps its order.
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = torch.randperm(len(indices), generator=generator).tolist()
        missing = self.total_size - len(indices)
        if missing > 0:
            indices += (indices * math.ceil(missing / len(indices)))[:missing]
        return iter(indices[self.rank : self.total_size : self.num_replicas])  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Return the number of indices that this rank gets."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the epoch of the next iteration."""
        self.epoch = epoch

    @property
    def epoch(self) -> int:
        """The epoch being iterated, or the first one before any iteration; setting it calls `set_epoch`."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._is_epoch_begun = False
