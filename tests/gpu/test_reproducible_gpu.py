"""``reproducible`` on CUDA: one device, one GPU named twice, one rank over NCCL, two over Gloo. Skips without a GPU."""

import pytest
import torch

import lockstep
from tests.reproducing import TASKS, Alone, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def alone():
    return {name: train(Alone, name, "single", 1, device=CUDA, reproducible=4) for name in TASKS}


def test_it_repeats_itself(alone):
    for name, expected in alone.items():
        assert train(Alone, name, "single", 1, device=CUDA, reproducible=4) == expected, name


@pytest.mark.parametrize("num_devices", [2, 4])
def test_dp_has_the_bits_of_one_device(alone, num_devices):
    for name, expected in alone.items():
        assert train(Alone, name, "dp", num_devices, device=CUDA, reproducible=4) == expected, name


def test_ddp_over_nccl_has_the_bits_of_one_device(alone):
    with lockstep.init(device=CUDA) as world:
        for name, expected in alone.items():
            assert train(world, name, "ddp", 1, device=CUDA, reproducible=4) == expected, name


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ddp_over_gloo_has_the_bits_of_one_device(ranks, alone, num_ranks):
    def all_tasks(world):
        return {name: train(world, name, "ddp", 1, device=CUDA, reproducible=4) for name in TASKS}

    for results in ranks(num_ranks)(all_tasks, timeout=120.0):
        for name, expected in alone.items():
            assert results[name] == expected, name
