"""SyncBatchNorm on CUDA: two ranks over Gloo on one GPU, against torch's batch norm on the whole batch."""

import itertools

import pytest
import torch
from torch import nn

import lockstep
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.batchnorm import errors_of_steps, values
from tests.training import make_task, relative_error, token_loss


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
)
def test_all_that_it_yields_is_that_of_one_process(ranks, dtype, tolerance):
    def run(world):
        return [
            errors_of_steps(world, sizes, shape, dtype=dtype, channels_last=len(shape) > 2, device="cuda")
            for sizes, shape in itertools.product([[4, 3], [0, 5]], [(4,), (4, 5), (4, 3, 3), (3, 2, 3, 2)])
        ]

    for errors in itertools.chain(*ranks(2)(run)):
        assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}])
def test_every_kind_of_layer(ranks, options):
    def run(world):
        return errors_of_steps(world, [2, 3], (4, 3, 3), device="cuda", **options)

    for errors in ranks(2)(run):
        assert max(errors.values()) < 1e-12


def test_autocast(ranks):
    def run(world):
        torch.manual_seed(0)
        oracle = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)).cuda()
        model = lockstep.SyncBatchNorm.convert_sync_batchnorm(
            nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)).cuda()
        )
        model.load_state_dict(oracle.state_dict())
        x = values((6, 3, 8, 8), torch.float32, 0).cuda()
        own = slice(0, 2) if world.rank == 0 else slice(2, 6)
        with torch.autocast("cuda", torch.float16):
            expected, found = oracle(x)[own].detach(), model(x[own]).detach()
        assert found.dtype is expected.dtype is torch.float16
        return (found - expected).abs().max().item()

    assert max(ranks(2)(run)) < 2**-7


def synchronised_network():
    torch.manual_seed(1)
    layers = [nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)]
    return lockstep.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers).double())


def test_fit_with_ranks_without_samples(ranks):
    def run(world):
        task = make_task(model=synchronised_network, loss=token_loss)
        loop = Trainer(task, Settings(), world, strategy="ddp", devices=[torch.device("cuda:0")])
        for _ in range(4):
            loop.step()
        return {name: tensor.cpu() for name, tensor in loop.model.state_dict().items()}

    task = make_task(model=synchronised_network, loss=token_loss)
    loop = Trainer(task, Settings(), None, strategy="single", devices=[torch.device("cuda:0")])
    for _ in range(4):
        loop.step()
    for state in ranks(3)(run):
        for name, expected in loop.model.state_dict().items():
            assert relative_error(state[name].double(), expected.cpu().double()) < 1e-11, name
