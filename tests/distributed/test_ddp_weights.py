"""Weights: the gradient is the mean over all samples of a step, whoever computed how many, and in how many parts."""

import contextlib
import itertools
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep
from tests.models import FAMILIES, assert_gradients_equal, build, global_batch, soak, squared_error

UNEVEN = [  # by step, by rank: the samples of each micro-batch
    [[3], [5]],
    [[1, 2], [4, 3]],
    [[2, 2, 2], [1]],
    [[4], [4]],
    [[1], [2, 6]],
]
WITH_ZEROS = [
    [[0], [4]],
    [[3, 0], [0, 0, 2]],
    [[0, 5, 0, 1], [2]],
    [[2], [0]],
    [[0, 0], [3, 1]],
]


@dataclass
class Setting:
    """How a script trains: what may change nothing about the gradients."""

    options: dict = field(default_factory=dict)
    set_to_none: bool = True
    when: str = "before"  # of mean_over(): before or after forward, or "backward" for lockstep.backward
    zero_grad: str = "first"  # before everything, or "late": between forward and backward
    hook: str | None = None
    tolerance: float = 1e-12


def parts_of(batch, sizes):
    """Cut a global batch into each rank's micro-batches."""
    pieces = iter(zip(*(tensor.split([n for rank in sizes for n in rank]) for tensor in batch), strict=True))
    return [[next(pieces) for _ in rank] for rank in sizes]


def run_micro_batch(model, optimizer, family, part, setting, *, n, zeroes):
    """One forward and backward with its weight; a batch of weight zero has a gradient of NaN."""
    if n == 0:
        part = tuple(tensor.new_zeros(1, *tensor.shape[1:]) for tensor in part)
    if zeroes and setting.zero_grad == "first":
        optimizer.zero_grad(set_to_none=setting.set_to_none)
    if setting.when == "before":
        model.mean_over(n)
    loss = family.loss(model, part) * (1.0 if n else float("nan"))
    if zeroes and setting.zero_grad == "late":
        optimizer.zero_grad(set_to_none=setting.set_to_none)
    if setting.when == "after":
        model.mean_over(torch.tensor(n))
    if setting.when == "backward":
        lockstep.backward(loss, mean_over=n)
    else:
        loss.backward()


def train_uneven(world, name, sizes_by_step, setting):
    """Train beside one process that takes each step's samples as one batch; compare all gradients after each step."""
    family, oracle = FAMILIES[name], build(name)
    model = lockstep.DistributedDataParallel(build(name), **{"bucket_cap_mb": 0.0005, **setting.options})
    if setting.hook is not None:
        model.register_comm_hook(world.group, HOOKS[setting.hook])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, oracle)]
    for step, sizes in enumerate(sizes_by_step):
        batch = global_batch(name, sum(itertools.chain(*sizes)), seed=step)
        parts, mine = parts_of(batch, sizes)[world.rank], sizes[world.rank]
        for index, (part, n) in enumerate(zip(parts, mine, strict=True)):
            is_last = index == len(mine) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                run_micro_batch(model, optimizers[0], family, part, setting, n=n, zeroes=index == 0)
        optimizers[1].zero_grad(set_to_none=setting.set_to_none)
        family.loss(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle, setting.tolerance)
        for optimizer in optimizers:
            optimizer.step()
    return model._get_ddp_logging_data()["has_rebuilt_buckets"]


def python_hook(group, bucket):
    """Average a copy of the bucket."""
    average = bucket.buffer() / group.size()
    future = dist.all_reduce(average, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "python": python_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


@pytest.mark.parametrize(
    "name", ["reused", "sparse", *soak(name for name in FAMILIES if name not in ("reused", "sparse"))]
)
@pytest.mark.parametrize("sizes", [UNEVEN, *soak([WITH_ZEROS])], ids=["uneven", "zeros"])
def test_gradients_are_those_of_one_process_on_all_samples(ranks, name, sizes):
    assert ranks(2)(train_uneven, name, sizes, Setting()) == [1, 1]


def train_in_ways(world, sizes, ways):
    for when, set_to_none, zero_grad, as_view in ways:
        setting = Setting({"gradient_as_bucket_view": as_view}, set_to_none, when, zero_grad)
        train_uneven(world, "mlp", sizes, setting)


ALL_WAYS = list(itertools.product(["before", "after", "backward"], [True, False], ["first", "late"], [True, False]))
SOME_WAYS = [
    ("before", True, "late", False),
    ("after", False, "first", True),
    ("backward", False, "late", False),
    ("backward", True, "first", True),
]


@pytest.mark.parametrize("ways", [SOME_WAYS, *soak([ALL_WAYS])], ids=["some", "all"])
@pytest.mark.parametrize("sizes", [UNEVEN, WITH_ZEROS], ids=["uneven", "zeros"])
def test_it_does_not_matter_when_weights_come_and_how_gradients_are_cleared(ranks, sizes, ways):
    ranks(2)(train_in_ways, sizes, ways)


@pytest.mark.parametrize(("when", "set_to_none"), [("before", False), ("backward", True), *soak([("after", True)])])
def test_one_rank(ranks, when, set_to_none):
    sizes = [[[3]], [[1, 4]], [[2, 0, 5]], [[0, 3]], [[2, 1, 0]]]
    for first in (0, 2):
        ranks(1)(train_uneven, "mlp", sizes[first:] + sizes[:first], Setting(when=when, set_to_none=set_to_none))


def test_three_ranks(ranks):
    sizes = [[[1], [7], [2]], [[0, 2], [1], [1, 1, 1]], [[5], [0], [0]], [[2], [2], [2]]]
    ranks(3)(train_uneven, "reused", sizes, Setting())


@pytest.mark.parametrize(
    ("hook", "tolerance", "sizes"),
    [
        ("python", 1e-12, WITH_ZEROS),
        ("fp16", 3e-3, UNEVEN),
        *soak([("allreduce", 1e-12, UNEVEN), ("python", 1e-12, UNEVEN), ("fp16", 3e-3, WITH_ZEROS)]),
        *soak([("bf16", 2e-2, UNEVEN), ("bf16", 2e-2, WITH_ZEROS), ("allreduce", 1e-12, WITH_ZEROS)]),
    ],
)
def test_communication_hooks(ranks, hook, tolerance, sizes):
    ranks(2)(train_uneven, "reused", sizes, Setting(hook=hook, tolerance=tolerance))


# --- tokens -----------------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """A small decoder with learned places and the embedding tied to the output."""

    def __init__(self):
        super().__init__()
        self.embedding, self.place = nn.Embedding(13, 8), nn.Embedding(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)
        x = self.embedding(tokens) + self.place(torch.arange(length))
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def mean_over_tokens(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)


def token_weighted(world, clip):
    """Sequences of different lengths, padded: each micro-batch's loss is the mean over its own tokens."""

    def make():
        torch.manual_seed(0)
        return GPT().double()

    oracle, model = make(), lockstep.DistributedDataParallel(make())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, oracle)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        tokens = torch.randint(13, (12, 6), generator=generator)
        lengths = torch.randint(1, 7, (12,), generator=generator)
        targets = torch.randint(13, (12, 6), generator=generator).where(torch.arange(6) < lengths[:, None], -100)
        sizes = [[2, 1, 3], [4, 2]]
        parts = parts_of((tokens, targets), sizes)[world.rank]
        for index, (inputs, outputs) in enumerate(parts):
            with contextlib.nullcontext() if index == len(parts) - 1 else model.no_sync():
                loss = mean_over_tokens(model, inputs, outputs)
                lockstep.backward(loss, mean_over=(outputs != -100).sum())
        mean_over_tokens(oracle, tokens, targets).backward()
        assert_gradients_equal(model.module, oracle)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), clip) for each in (model, oracle)]
        assert norms[0] > clip
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=0)
        assert_gradients_equal(model.module, oracle)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_token_weighted_accumulation_is_one_big_batch(ranks):
    ranks(2)(token_weighted, 0.1)


def scaled(world):
    """With loss scaling; on one rank the first step overflows, so that all must skip it."""
    oracle, model = build("mlp"), lockstep.DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step, sizes in enumerate(UNEVEN):
        batch = global_batch("mlp", sum(itertools.chain(*sizes)), seed=step)
        parts, mine = parts_of(batch, sizes)[world.rank], sizes[world.rank]
        before = model.module[0].weight.clone()
        for index, (part, n) in enumerate(zip(parts, mine, strict=True)):
            with contextlib.nullcontext() if index == len(mine) - 1 else model.no_sync():
                loss = squared_error(model, part) * (float("inf") if step == 1 and index == world.rank == 0 else 1.0)
                lockstep.backward(scaler.scale(loss), mean_over=n)
        scaler.unscale_(optimizer)
        if step != 1:
            oracle.load_state_dict(model.module.state_dict())
            oracle.zero_grad()
            squared_error(oracle, batch).backward()
            assert_gradients_equal(model.module, oracle)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.module[0].weight) == (step == 1)
        optimizer.zero_grad()
    return scaler.get_scale()


def test_gradient_scaling(ranks):
    assert ranks(2)(scaled) == [2.0**9] * 2


# --- uneven inputs ----------------------------------------------------------------------------------------------------


def train_joined(world, sizes_by_rank, divide_by_initial_world_size):
    """Each rank has its own number of batches; step k's gradient is the mean over the samples of all that have one."""
    model, oracle = lockstep.DistributedDataParallel(build("mlp")), build("mlp")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, oracle)]
    num_steps = max(map(len, sizes_by_rank))
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(len(sizes_by_rank[world.rank])):
            sizes = [[each[step]] if step < len(each) else [] for each in sizes_by_rank]
            batch = global_batch("mlp", sum(itertools.chain(*sizes)), seed=step)
            (part,) = parts_of(batch, sizes)[world.rank]
            optimizers[0].zero_grad()
            lockstep.backward(squared_error(model, part), mean_over=len(part[0]))
            optimizers[0].step()
    for step in range(num_steps):
        optimizers[1].zero_grad()
        num_samples = sum(each[step] for each in sizes_by_rank if step < len(each))
        squared_error(oracle, global_batch("mlp", num_samples, seed=step)).backward()
        optimizers[1].step()
    for mine, expected in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("sizes", "divide_by_initial_world_size"), [([[3, 1, 2], [2]], True), ([[], [4, 1]], False), ([[], [4, 1]], True)]
)
def test_join_with_different_numbers_of_batches_and_none(ranks, sizes, divide_by_initial_world_size):
    ranks(2)(train_joined, sizes, divide_by_initial_world_size)


def end_in_the_middle_of_a_step(world):
    """Rank 1's data ends while it accumulates: what it holds is part of the others' next step."""
    model, oracle = lockstep.DistributedDataParallel(build("mlp")), build("mlp")
    batch = global_batch("mlp", 8, seed=0)
    parts = parts_of(batch, [[1, 2], [5]])[world.rank]
    with model.join():
        for index, part in enumerate(parts):
            with contextlib.nullcontext() if index == 1 else model.no_sync():
                lockstep.backward(squared_error(model, part), mean_over=len(part[0]))
    squared_error(oracle, batch).backward()
    assert_gradients_equal(model.module, oracle)


def test_a_rank_whose_data_ends_while_it_accumulates(ranks):
    ranks(2)(end_in_the_middle_of_a_step)
