"""Gradients that travel in bfloat16 or float16: near the exact mean, the same on all ranks, with exact counts.

The bound: each rank rounds what it sends once, by at most u of its size; then each addition rounds (on a backend that
adds in the narrow dtype), or only the sum does (``shm``, which adds in float32). So on n ranks the mean is off by at
most about n * u * (|g0| + |g1| + ...) / n, where u is 2**-8 for bfloat16 and 2**-11 for float16.
"""

from unittest import mock

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp import comm_hooks
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.models import FAMILIES, assert_gradients_equal, build, global_batch, share, soak
from tests.shm import shm_group
from tests.training import make_task

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
TINIEST = {"bf16": 1e-38, "fp16": 2.0**-25}


def local_gradients(name, rank, world_size, seed):
    """Return the gradients of a rank's share, on one process."""
    family, model = FAMILIES[name], build(name)
    family.loss(model, share(global_batch(name, 4 * world_size, seed=seed), rank, world_size)).backward()
    return [parameter.grad for parameter in model.parameters()]


def errors_on(group, world, name, method):
    """Return the largest error of any element in units of the bound, and all gradients."""
    model = lockstep.DistributedDataParallel(build(name), process_group=group, compression=method, bucket_cap_mb=0.0005)
    worst, gradients = 0.0, []
    for step in range(3):
        model.zero_grad()
        mine = share(global_batch(name, 4 * world.world_size, seed=step), world.rank, world.world_size)
        FAMILIES[name].loss(model, mine).backward()
        locals_ = [local_gradients(name, rank, world.world_size, step) for rank in range(world.world_size)]
        u = UNIT_ROUNDOFF[method]
        for index, parameter in enumerate(model.module.parameters()):
            sent = [local[index] for local in locals_]
            size = torch.stack(sent).abs().mean(0)
            bound = (1 + u) * world.world_size * u * size + world.world_size * TINIEST[method]
            worst = max(worst, ((parameter.grad - torch.stack(sent).mean(0)).abs() / bound).max().item())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return worst, torch.stack(gradients)


@pytest.mark.parametrize(
    ("method", "num_ranks", "backend"),
    [
        ("bf16", 2, "shm"),
        ("fp16", 2, "gloo"),
        *soak([("bf16", 2, "gloo"), ("fp16", 2, "shm"), ("bf16", 3, "gloo"), ("fp16", 3, "shm")]),
    ],
)
def test_the_error_is_bounded_and_all_ranks_have_the_same_bits(ranks, method, num_ranks, backend):
    def measure(world):
        if backend == "gloo":
            return errors_on(world.group, world, "mlp", method)
        with shm_group() as group:
            return errors_on(group, world, "mlp", method)

    results = ranks(num_ranks)(measure)
    for worst, gradients in results:
        assert 0.1 < worst <= 1.0  # it was rounded, and not too much
        assert torch.equal(gradients, results[0][1])


def beside_oracle(world, name):
    """Parameters that nobody used, or only one rank, are as they are without: they are counted exactly."""
    family = FAMILIES[name]
    oracle = build(name)
    model = lockstep.DistributedDataParallel(build(name), bucket_cap_mb=0.0005, compression="bf16")
    for step in range(3):
        model.zero_grad()
        oracle.zero_grad()
        batch = global_batch(name, 4 * world.world_size, seed=step)
        family.loss(model, share(batch, world.rank, world.world_size)).backward()
        family.loss(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle, tolerance=2.0**-7)


@pytest.mark.parametrize("name", ["reused", "sparse", "complex", *soak(["cnn", "channels_last", "lstm"])])
def test_all_kinds_of_models(ranks, name):
    ranks(2)(beside_oracle, name)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(3)])

    def forward(self, x, head):
        return self.heads[head](x)


def each_its_own_head(world):
    model = lockstep.DistributedDataParallel(TwoHeads(), compression="bf16")
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), 3.0), world.rank).sum().backward()
    return [None if head.weight.grad is None else head.weight.grad.item() for head in model.module.heads]


def test_use_counts_are_exact(ranks):
    assert ranks(2)(each_its_own_head) == [[1.5, 1.5, None]] * 2


def weighted(world):
    """Rank 1 gives 1.003 in the second step, which bfloat16 does not have; only rank 0 has a gradient, of 1."""
    model = lockstep.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), compression="bf16")
    found = []
    for weights in [(1, 1), (1, 1.003)]:
        model.zero_grad()
        model.mean_over(weights[world.rank])
        model(torch.full((1, 1), [1.0, 0.0][world.rank])).sum().backward()
        found.append(model.module.weight.grad.item())
    return found


def test_sums_of_weights_are_exact(ranks):
    for found in ranks(2)(weighted):
        assert found == pytest.approx([1 / 2, 1 / 2.003], rel=1e-6)


def messages(world):
    """Return dtype and number of elements of each all-reduce of gradients in the third step."""
    model = lockstep.DistributedDataParallel(torch.nn.Linear(100, 10), compression="bf16")
    for _ in range(2):
        model(torch.ones(1, 100)).sum().backward()
    with mock.patch.object(comm_hooks, "all_reduce_work", wraps=comm_hooks.all_reduce_work) as sent:
        model(torch.ones(1, 100)).sum().backward()
    return [(call.args[0].dtype, call.args[0].numel()) for call in sent.call_args_list]


def test_one_message_a_bucket_in_the_narrow_dtype(ranks):
    """1010 gradients, up to a multiple of two slices of 16 bytes, two use counts, and eight numbers of the message."""
    assert ranks(2)(messages) == [[(torch.bfloat16, 1016 + 2 + 8)]] * 2


def with_a_hook(world):
    model = lockstep.DistributedDataParallel(torch.nn.Linear(1, 1), compression="bf16")
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def test_a_hook_decides_alone_what_travels(ranks):
    with pytest.raises(ConfigurationError) as caught:
        ranks(2)(with_a_hook)
    assert str(caught.value) == (
        "A communication hook sends the gradients itself, but compression='bf16' was given.\nLeave one of the two out."
    )


def train(world, method):
    loop = Trainer(make_task(), Settings(compression=method), world, strategy="ddp", devices=[torch.device("cpu")])
    for _ in range(4):
        loop.step()
    return torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])


def test_fit_trains_nearly_the_same(ranks):
    exact, _ = ranks(2)(train, None)
    first, second = ranks(2)(train, "bf16")
    assert torch.equal(first, second)
    assert 1e-6 < ((first - exact).norm() / exact.norm()).item() < 0.01
