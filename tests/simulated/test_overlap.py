"""What the engines put on streams, and in which order: parameters that arrive late, one tail, copies from a device."""

import copy
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.parallel.zero import partition
from lockstep.parallel.zero.optimizer import shard_optimizer

WIDTH = 16
# A bucket for each layer of this width.
CAP_MB = 0.001


def layers(count=4, **options):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, **options) for _ in range(count)))


def inputs(world, step=0):
    generator = torch.Generator().manual_seed(10 * step + world.rank)
    return torch.randn(3, WIDTH, generator=generator).to(world.device)


class Operations(TorchDispatchMode):
    """Records the name and the tensors of each operation."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.__name__.split(".")[0], args, result))
        return result


# --- ZeRO: parameters that are waited for when they are used


def train(world, model, loss_of, *, late, num_steps=4):
    """Train with ZeRO-1; return the parameters, and what happened in the last forward, where waits are late."""
    wrapped = lockstep.DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), group=world.group)
    optimizer.overlaps = True
    for step in range(num_steps):
        optimizer.zero_grad()
        if not late:
            optimizer.wait()
        with optimizer.wait_late():
            loss = loss_of(wrapped, inputs(world, step))
        assert {type(each) for each in model.parameters()} == {nn.Parameter}
        loss.backward()
        optimizer.step()
    optimizer.wait()
    assert not partition._arrivals
    return torch.cat([each.detach().flatten().cpu() for each in model.parameters()])


class Uses(nn.Module):
    """Uses the parameters of some of its layers without calling them."""

    def __init__(self, how):
        super().__init__()
        self.how, self.body = how, layers()
        self.attention = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0)
        self.seen = []

    def forward(self, x):
        used = self.body[2].weight
        x = self.body[0](x)
        if self.how == "functional":
            x = F.linear(x, used, self.body[2].bias)
        elif self.how == "list":
            x = x + torch._foreach_norm([used])[0]
        elif self.how == "data":
            x = x + used.data.sum() + used.detach().T.sum()
        elif self.how == "function":
            x = Multiply.apply(x, used)
        elif self.how == "copied":
            copied = copy.deepcopy(self.body[2])
            x = x + copied(x).detach()
            assert type(copied.weight) is nn.Parameter
        elif self.how == "functional_call":
            x = torch.func.functional_call(self.body[1], dict(self.body[2].named_parameters()), x)
        elif self.how == "side stream":
            main, side = torch.accelerator.current_stream(), torch.Stream(x.device)
            side.wait_stream(main)
            y = self.body[1](x)
            with side:
                z = self.body[2](x) + self.body[1](x)
            main.wait_stream(side)
            x = y + z
        elif self.how == "attention":
            x = self.attention(x.unsqueeze(1)).squeeze(1)
        elif self.how == "checkpoint":
            x = torch.utils.checkpoint.checkpoint(self.body[1], x, use_reentrant=False)
        return self.body[3](self.body[2](self.body[1](x)))


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


def penalised(model, x):
    """A penalty on the weights that is computed first, with a list that the loss keeps."""
    return sum(each.square().sum() for each in model.module.parameters()) + model(x).square().mean()


def used_outside_of_their_layers(world, hows):
    for how in hows:
        loss = penalised if how == "penalty" else lambda model, x: model(x).square().mean()
        late, at_once = (train(world, Uses(how).to(world.device), loss, late=each) for each in (True, False))
        assert torch.equal(late, at_once), how


EVERY_USE = ["functional", "list", "data", "function", "copied", "functional_call", "side stream", "attention"]


@pytest.mark.parametrize("hows", [[*EVERY_USE, "checkpoint", "penalty"]])
def test_parameters_have_arrived_wherever_they_are_used(on_sim, hows):
    """A read without a wait is an error of the simulated device, which compares what orders the streams."""
    on_sim(2)(used_outside_of_their_layers, hows)


def in_order(world, monkeypatch=None):
    model, log = layers().to(world.device), []
    wait = partition.wait_for_gather
    for number, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, number=number: log.append(number))

    def logged(works):
        log.append("wait")
        wait(works)

    partition.wait_for_gather = logged
    try:

        def loss_of(wrapped, x):
            log.clear()
            log.append("forward")
            loss = wrapped(x).square().mean()
            log.append("end")
            return loss

        train(world, model, loss_of, late=True)
    finally:
        partition.wait_for_gather = wait
    return [each for each, _ in groupby(log)]


def test_each_layer_waits_for_its_own_parameters(on_sim):
    expected = ["forward", "wait", 0, "wait", 1, "wait", 2, "wait", 3, "end", "wait"]
    assert on_sim(2)(in_order) == [expected] * 2
