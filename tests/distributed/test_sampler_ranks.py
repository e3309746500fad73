"""`DistributedSampler` takes rank and world size from the process group."""

import pytest
import torch
from torch.utils.data import DistributedSampler as TorchSampler
from torch.utils.data import TensorDataset

import lockstep

DATASET = TensorDataset(torch.arange(11))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_its_rank_is_that_of_the_group(ranks, num_ranks):
    def indices(world):
        ours, torchs = lockstep.DistributedSampler(DATASET, seed=2), TorchSampler(DATASET, seed=2)
        assert (ours.rank, ours.num_replicas) == (world.rank, world.world_size)
        assert list(ours) == list(torchs)
        return list(lockstep.DistributedSampler(DATASET, pad=False))

    assert sorted(index for part in ranks(num_ranks)(indices) for index in part) == list(range(11))
