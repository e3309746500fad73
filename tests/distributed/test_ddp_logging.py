"""What `_get_ddp_logging_data` tells, under torch's names and with torch's values where these do not depend on time."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.comm.collectives import BuiltinCommHookType


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
            "If the result is ready, create a torch.futures.Future() and call set_result()."
        )
