"""Parameters without a gradient, on some ranks, on all, now and then: no flag, no hang, no wrong value."""

import pytest
import torch
from torch import nn

import lockstep


class Branches(nn.Module):
    """Uses the layers that are named in the call, one after the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x, names):
        for name in names:
            x = getattr(self, name)(x)
        return x


def build():
    torch.manual_seed(0)
    return Branches()


def mean_over_ranks(model, inputs_and_paths):
    """Return gradients of the mean of all ranks' losses, computed in one process."""
    model.zero_grad()
    losses = [model(x, path).square().mean() for x, path in inputs_and_paths if path]
    if losses:
        (sum(losses) / len(inputs_and_paths)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def follow(world, paths_by_step):
    """Each step, rank r takes ``paths[r]``; compare with one process after each."""
    model = lockstep.DistributedDataParallel(build(), bucket_cap_mb=0.0001)
    oracle = build()
    for step, paths in enumerate(paths_by_step):
        inputs = [
            torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank in range(world.world_size)
        ]
        model.zero_grad()
        path = paths[world.rank]
        out = model(inputs[world.rank], path)
        (out.square().mean() if path else out.sum()).backward()
        for name, expected in mean_over_ranks(oracle, list(zip(inputs, paths, strict=True))).items():
            actual = model.module.get_parameter(name).grad
            assert (actual is None) == (expected is None), (step, name)
            if expected is not None:
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "paths_by_step",
    [
        pytest.param([("abc", "abc"), ("ab", "abc"), ("c", "c"), ("abc", "a")], id="first step uses all"),
        pytest.param([("a", "b"), ("b", "a"), ("abc", "c"), ("ab", "ab")], id="first step differs between ranks"),
        pytest.param([("abc", ""), ("", "abc"), ("ab", ""), ("", "")], id="a whole rank has no gradient"),
        pytest.param([("abc", "abc"), ("", ""), ("b", "b")], id="nobody has a gradient in one step"),
    ],
)
def test_any_pattern_of_use(ranks, paths_by_step):
    ranks(2)(follow, paths_by_step)


def test_three_ranks_take_three_paths(ranks):
    ranks(3)(follow, [("a", "b", "c"), ("", "bc", "a"), ("abc", "", "")])


def unused_keep_their_gradient(world):
    model = lockstep.DistributedDataParallel(build())
    x = torch.full((2, 4), 1.0 + world.rank, dtype=torch.float64)
    model(x, "abc").sum().backward()
    # A value of its own per rank, that no average of the ranks equals.
    model.module.c.weight.grad.fill_(0.1 + world.rank)
    kept = model.module.c.weight.grad.clone()
    model(x, "ab").sum().backward()
    return torch.equal(model.module.c.weight.grad, kept)


def test_gradient_of_a_parameter_that_no_rank_used_stays_as_it_was(ranks):
    assert ranks(2)(unused_keep_their_gradient) == [True, True]


def use_before_no_sync(world):
    """A gradient accumulated locally on one rank must be sent by the next synchronised step that does not touch it."""
    model = lockstep.DistributedDataParallel(build())
    x = torch.ones(1, 4, dtype=torch.float64)
    with model.no_sync():
        model(x * (1 + world.rank), "c" if world.rank == 0 else "a").sum().backward()
    model(x, "a").sum().backward()
    return model.module.c.bias.grad.tolist()


def test_use_under_no_sync_counts(ranks):
    assert ranks(2)(use_before_no_sync) == [[0.5] * 4, [0.5] * 4]


def skip_unused_buckets(world):
    model = lockstep.DistributedDataParallel(build(), skip_all_reduce_unused_params=True, bucket_cap_mb=0.0001)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 4), 1.0 + world.rank, dtype=torch.float64), "a").sum().backward()
    return model.module.a.weight.grad[0].tolist(), model.module.b.weight.grad


def test_skipping_unused_buckets(ranks):
    assert ranks(2)(skip_unused_buckets) == [([1.5] * 4, None)] * 2
