"""Weights in scripts that a random generator writes: no_sync, cleared and kept gradients, unused parameters, zeros."""

import contextlib
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep
from tests.models import relative_error, soak

WIDTH = 3


class Branches(nn.Module):
    """Uses the layers that are named in the call, one after the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))

    def forward(self, x, names):
        for name in names:
            x = torch.tanh(getattr(self, name)(x))
        return x


@dataclass
class MicroBatch:
    """What one rank does once: which layers, how many samples, and how it says so."""

    path: str
    n: int
    when: str
    seed: int

    def inputs(self):
        return torch.randn(
            max(self.n, 1), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(self.seed)
        )


@dataclass
class Step:
    """By rank, micro-batches that are thrown away again, and those that count; what happens to the gradients before."""

    clear: str  # "keep", "none" or "zero"
    is_late: bool  # gradients are cleared between the first forward and its backward
    discarded: list
    counted: list


def write_script(seed, num_ranks, num_steps):
    draw = random.Random(seed)

    def micro_batch():
        path = "".join(draw.sample("abc", draw.randint(1, 3)))
        n = draw.choice([0, 1, 2, 2, 3, 5])
        return MicroBatch(path, n, draw.choice(["before", "after", "backward"]), draw.randrange(2**30))

    def micro_batches(low, high):
        return [[micro_batch() for _ in range(draw.randint(low, high))] for _ in range(num_ranks)]

    steps = []
    for _ in range(num_steps):
        clear = draw.choice(["keep", "none", "none", "zero"])
        discards = clear != "keep" and draw.random() < 0.3
        discarded = micro_batches(0, 2) if discards else [[] for _ in range(num_ranks)]
        steps.append(Step(clear, draw.random() < 0.5, discarded, micro_batches(1, 3)))
    return steps


def clear(model, how):
    if how != "keep":
        model.zero_grad(set_to_none=how == "none")


def run(model, micro_batch, *, how=None, is_late=False):
    """Forward and backward; the gradients of a batch of weight zero are NaN."""
    if how is not None and not is_late:
        clear(model, how)
    if micro_batch.when == "before":
        model.mean_over(micro_batch.n)
    loss = model(micro_batch.inputs(), micro_batch.path).square().mean() * (1.0 if micro_batch.n else float("nan"))
    if how is not None and is_late:
        clear(model, how)
    if micro_batch.when == "after":
        model.mean_over(micro_batch.n)
    if micro_batch.when == "backward":
        lockstep.backward(loss, count=micro_batch.n)
    else:
        loss.backward()


def cleared(gradients, step, rank):
    """Return what is there when the step begins: torch's ``zero_grad`` leaves zeros where there was any gradient."""
    if step.clear == "keep":
        return gradients
    touched = {name for name in gradients for each in step.discarded[rank] if name[0] in each.path}
    exists = {name for name, gradient in gradients.items() if gradient is not None or name in touched}
    shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    return {
        name: torch.zeros(shapes[name[2:]], dtype=torch.float64) if step.clear == "zero" and name in exists else None
        for name in gradients
    }


def expect(oracle, before, step):
    """Return the gradients that the step must leave, from those that are there when it begins."""
    everything = [each for mine in step.counted for each in mine]
    used = {name for name in before for each in everything if name[0] in each.path}
    total = sum(each.n for each in everything)
    oracle.zero_grad()
    for each in everything:
        if each.n:
            (oracle(each.inputs(), each.path).square().mean() * (each.n / total)).backward()
    after = {}
    for name, parameter in oracle.named_parameters():
        if name not in used:
            after[name] = before[name]
            continue
        mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        after[name] = mean.clone() if before[name] is None or total == 0 else before[name] + mean
    return after


def follow_script(world, script, options, hook):
    torch.manual_seed(0)
    oracle = Branches()
    model = lockstep.DistributedDataParallel(Branches(), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    oracle.load_state_dict(model.module.state_dict())
    expected = {name: None for name, _ in oracle.named_parameters()}
    for index, step in enumerate(script):
        how = step.clear
        for micro_batch in step.discarded[world.rank]:
            with model.no_sync():
                run(model, micro_batch, how=how, is_late=step.is_late)
            how = None
        mine = step.counted[world.rank]
        for place, micro_batch in enumerate(mine):
            with model.no_sync() if place < len(mine) - 1 else contextlib.nullcontext():
                run(model, micro_batch, how=step.clear if place == 0 else None, is_late=step.is_late)
        expected = expect(oracle, cleared(expected, step, world.rank), step)
        for name, parameter in model.module.named_parameters():
            assert (parameter.grad is None) == (expected[name] is None), (index, name, step)
            if parameter.grad is not None:
                error = relative_error(parameter.grad, expected[name])
                assert error < 1e-12, (error, index, name, step)


WAYS = [
    ({"bucket_cap_mb": 0.0001}, None),
    ({"gradient_as_bucket_view": True}, None),
    ({"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}, default_hooks.allreduce_hook),
]


@pytest.mark.parametrize("seed", [0, 1, *soak(range(2, 6))])
@pytest.mark.parametrize("num_ranks", [2, *soak([1, 3])], ids=str)
def test_random_scripts(ranks, num_ranks, seed):
    ranks(num_ranks)(follow_script, write_script(seed, num_ranks, 25), *WAYS[seed % len(WAYS)])
