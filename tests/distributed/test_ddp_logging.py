"""What `_get_ddp_logging_data` tells, under torch's names and with torch's values where these do not depend on time."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.comm.collectives import BuiltinCommHookType
from lockstep.errors import ConfigurationError
from tests.models import assert_gradients_equal


class Layers(nn.Module):
    """The last one is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)))
        self.unused = nn.Linear(10, 10, bias=False)

    def forward(self, x):
        return self.used(x)


def logged(world, which):
    wrap = lockstep.DistributedDataParallel if which == "ours" else nn.parallel.DistributedDataParallel
    model = wrap(Layers(), find_unused_parameters=True)
    for _ in range(2):
        model(torch.ones(1, 10)).sum().backward()
    return model._get_ddp_logging_data()


def test_the_same_facts_as_torch(ranks):
    """Of those that libraries read; torch never rebuilds buckets with ``find_unused_parameters``."""
    ours, theirs = ranks(2)(logged, "ours")[1], ranks(2)(logged, "torch")[1]
    assert {name: theirs.get(name, 0) for name in ours} | {"has_rebuilt_buckets": 1} == ours


def log_hook(world):
    model = lockstep.DistributedDataParallel(Layers())
    with pytest.raises(ValueError, match="equal or greater than 1"):
        model._set_ddp_runtime_logging_sample_rate(0)
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, {})
    logged = model._get_ddp_logging_data()
    assert "comm_hook" not in logged
    assert (logged["has_error"], logged["error"]) == (1, "<class 'TypeError'>: Communication hook must be callable.")
    model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    return model._get_ddp_logging_data()["comm_hook"]


def test_the_communication_hook_and_an_error_about_it_are_named(ranks):
    assert ranks(2)(log_hook) == ["BuiltinCommHookType.ALLREDUCE"] * 2


def not_a_future(world):
    model = lockstep.DistributedDataParallel(Layers())
    model.register_comm_hook(None, lambda state, bucket: 1)
    model(torch.ones(1, 10)).sum().backward()


def test_a_hook_that_returns_no_future(ranks):
    for outcome in ranks(2).each(not_a_future):
        assert str(outcome.error) == (
            "A communication hook: the callback must return a torch.futures.Future object, but got <class 'int'>.\n"
            "For a result that is there already, make a torch.futures.Future() and call its set_result."
        )


def changing_groups(world):
    """Train among two ranks, then among the other two, then among all."""
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([1, 2])]
    model = lockstep.DistributedDataParallel(nn.Linear(3, 2).double(), bucket_cap_mb=0.00001)
    oracle = nn.Linear(3, 2).double()
    oracle.load_state_dict(model.module.state_dict())
    for group, members in [(pairs[0], [0, 1]), (pairs[1], [1, 2]), (torch.distributed.group.WORLD, [0, 1, 2])]:
        model._update_process_group(group)
        if world.rank not in members:
            assert model.process_group is not group
            continue
        for step in range(6):
            whole = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            oracle.zero_grad()
            model(whole[world.rank][None]).square().mean().backward()
            oracle(whole[members]).square().mean().backward()
            assert_gradients_equal(model.module, oracle)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.overlap_optimizer(optimizer)
    with pytest.raises(ConfigurationError, match="Wrap the model again, with a new optimizer"):
        model._update_process_group(torch.distributed.group.WORLD)


def test_the_process_group_can_change(ranks):
    ranks(3)(changing_groups)
