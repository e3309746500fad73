"""A process group written in Python may do its work when it is asked for the future; `wait` alone need not do it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

import lockstep
from lockstep.errors import ConfigurationError


class LateWork(dist.Work):
    def __init__(self, action):
        super().__init__()
        self.action = action

    def wait(self, timeout=None):
        return True

    def get_future(self):
        future = Future()
        future.set_result(self.action())
        return future


class TriplingGroup(dist.ProcessGroup):
    def __init__(self):
        super().__init__(0, 1)

    def size(self):
        return 1

    def broadcast(self, tensors, opts):
        return LateWork(lambda: tensors)

    def allgather(self, outputs, inputs, opts):
        outputs[0][0].copy_(inputs[0])
        return LateWork(lambda: outputs)

    def allreduce(self, tensors, opts):
        return LateWork(lambda: [tensor.mul_(3) for tensor in tensors])


@pytest.mark.parametrize("compression", [None, "bf16"])
def test_the_future_of_every_bucket_is_asked_for(compression):
    group = TriplingGroup()
    model = lockstep.DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=group, compression=compression)
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor([[1.0, 2.0]])).sum().backward()
        assert model.module.weight.grad.tolist() == [[3.0, 6.0]]


def test_messages_over_such_a_group_are_refused():
    with pytest.raises(ConfigurationError) as caught:
        lockstep.DistributedDataParallel(nn.Linear(2, 1), process_group=TriplingGroup(), compression="int8")
    assert str(caught.value) == (
        "compression='int8' sends messages between two ranks, which the process group TriplingGroup may not do as "
        "torch's do.\nUse a group on Gloo, or compression='bf16'."
    )
