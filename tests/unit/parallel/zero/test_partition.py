"""Optimizers on flat slices do what they do on whole parameters; in one process, with several owners."""

from functools import partial

import pytest
import torch
from torch import nn

from lockstep.parallel.flat import flatten_like
from lockstep.parallel.zero import partition as shard_module
from lockstep.parallel.zero.partition import (
    ELEMENTWISE,
    FlatBuffer,
    ShardOptimizer,
    ShardRange,
    cut_ranges,
    partition_by_parameter,
    partition_evenly,
    shard_bounds,
    works_on_slices,
)

SHAPES = [(7, 5), (5,), (), (3, 4, 2, 2), (1,), (11, 3)]
OPTIONS = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    torch.optim.Adam: {"amsgrad": True},
    torch.optim.AdamW: {"weight_decay": 0.1},
    torch.optim.RMSprop: {"momentum": 0.5, "centered": True},
    torch.optim.Adagrad: {"lr_decay": 0.1},
}


def parameters():
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]
    made[3].data = made[3].data.contiguous(memory_format=torch.channels_last)
    return made


def groups_of(made):
    """Two param groups that take turns."""
    return [{"params": made[0:2] + made[4:5]}, {"params": made[2:4] + made[5:6], "lr": 0.003}]


class Sharded:
    """The shards of all ranks of one flat buffer, in this process."""

    def __init__(self, made, optimizer_class, options, num_ranks):
        group_of = [0, 0, 1, 1, 0, 1]
        members = [(each, ShardRange(index, 0, each.numel(), group_of[index])) for index, each in enumerate(made)]
        self.buffer = FlatBuffer(members, lambda numel, like: torch.empty(numel, dtype=like.dtype), num_ranks=num_ranks)
        make = partial(optimizer_class, **options)
        self.shards = [
            ShardOptimizer(make, [self.buffer], rank, [options, {**options, "lr": 0.003}], elementwise=True)
            for rank in range(num_ranks)
        ]

    def step(self):
        present = [each.grad is not None for each in self.buffer.parameters]
        for rank, shard in enumerate(self.shards):
            shard.set_gradients([self.buffer.gradients_of(rank)], present)
            shard.optimizer.step()
            shard.drop_gradients()


def give_gradients(*sets, step):
    for made in sets:
        generator = torch.Generator().manual_seed(step)
        for index, each in enumerate(made):
            gradient = torch.randn(each.shape, generator=generator, dtype=torch.float64)
            absent = (step + index) % 4 == 0 and step > 1
            each.grad = None if absent else gradient  # contiguous, also for channels_last


def test_slices_are_equal_and_begin_at_multiples_of_16_bytes_as_far_as_there_are_elements():
    assert shard_bounds(24, 3, itemsize=4) == [(0, 8), (8, 16), (16, 24)]
    assert shard_bounds(25, 3, itemsize=4) == [(0, 12), (12, 24), (24, 25)]
    assert shard_bounds(11, 3, itemsize=16) == [(0, 4), (4, 8), (8, 11)]
    assert shard_bounds(2, 3, itemsize=2) == [(0, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_parameters_are_aligned_except_behind_those_of_an_odd_size(dtype):
    shapes = [(3,), (10, 8), (5, 7), (16,), ()]
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    members = [(each, ShardRange(index, 0, each.numel())) for index, each in enumerate(made)]

    def allocate(numel, like):
        assert numel * like.itemsize % (3 * 16) == 0  # three slices, each a multiple of 16 bytes
        return torch.empty(numel, dtype=like.dtype)

    (buffer,) = partition_evenly(members, 3, allocate)
    assert [whole.parameter for whole in buffer.ranges] == [1, 3, 0, 2, 4]
    assert [(each.data_ptr() - buffer.flat.data_ptr()) % 16 for each in buffer.parameters[:3]] == [0, 0, 0]
    assert all(start * made[0].itemsize % 16 == 0 for start, stop in buffer.bounds if stop > start)
    owned = partition_by_parameter(members, 2, allocate=lambda numel, like: torch.empty(numel, dtype=like.dtype))
    assert [each.bounds for each in owned] == [[(0, 80), (0, 0)], [(0, 0), (0, 55)]]
    assert [[whole.parameter for whole in each.ranges] for each in owned] == [[1], [3, 0, 2, 4]]


def test_a_shard_holds_parts_of_parameters():
    ranges = [ShardRange(4, 0, 5), ShardRange(2, 0, 3, group=1), ShardRange(0, 0, 4)]
    assert cut_ranges(ranges, 3, 9) == [ShardRange(4, 3, 5), ShardRange(2, 0, 3, group=1), ShardRange(0, 0, 1)]
    assert cut_ranges(cut_ranges(ranges, 3, 12), 1, 3) == [ShardRange(4, 4, 5), ShardRange(2, 0, 1, group=1)]
    assert cut_ranges(ranges, 8, 8) == []


def test_elements_are_laid_flat_as_the_parameter_has_them():
    parameter = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    value = torch.randn(2, 3, 4, 5)
    assert torch.equal(flatten_like(value, parameter), value.permute(0, 2, 3, 1).reshape(-1))
    assert torch.equal(flatten_like(value, torch.empty(2, 3, 4, 5)), value.reshape(-1))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("optimizer_class", sorted(ELEMENTWISE, key=lambda each: each.__name__))
def test_slices_are_updated_as_whole_parameters_are(optimizer_class, num_ranks):
    """Also where some parameters have no gradient in some steps, and so have made fewer steps than others."""
    options = {"lr": 0.01, **OPTIONS.get(optimizer_class, {})}
    ours, theirs = parameters(), parameters()
    expected = optimizer_class(groups_of(theirs), **options)
    sharded = Sharded(ours, optimizer_class, options, num_ranks)
    for step in range(7):
        give_gradients(ours, theirs, step=step)
        expected.step()
        sharded.step()
    assert [each.data_ptr() for each in sharded.buffer.parameters] == sharded.buffer._pointers
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.stride() == other.stride()
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_segments_stay_whole_as_long_as_all_have_gradients():
    made = parameters()
    sharded = Sharded(made, torch.optim.AdamW, {}, 1)
    give_gradients(made, step=0)
    sharded.step()
    sizes = [[each.numel() for each in group["params"]] for group in sharded.shards[0].optimizer.param_groups]
    assert sizes == [[40, 1], [49, 33]]
    made[1].grad = None
    sharded.step()
    sizes = [[each.numel() for each in group["params"]] for group in sharded.shards[0].optimizer.param_groups]
    assert sizes == [[35, 5, 1], [49, 33]]
    steps = [float(entries["step"]) for _, entries in sharded.shards[0].state()]
    assert steps == [2, 1, 2, 2, 2, 2]


def test_slices_that_exceed_a_cache_are_updated_in_parts(monkeypatch):
    monkeypatch.setattr(shard_module, "_CHUNK_BYTES", 7 * 8)
    ours, theirs = parameters(), parameters()
    expected = torch.optim.AdamW(groups_of(theirs), lr=0.01)
    sharded = Sharded(ours, torch.optim.AdamW, {"lr": 0.01}, 2)
    for step in range(4):
        give_gradients(ours, theirs, step=step)
        expected.step()
        sharded.step()
    sizes = [each.numel() for group in sharded.shards[0].optimizer.param_groups for each in group["params"]]
    assert sum(sizes) == sharded.buffer.shard_of(0).numel()
    assert max(sizes) == 7
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
    whole = Sharded(parameters(), torch.optim.AdamW, {"fused": True}, 2)
    assert max(each.numel() for each in whole.shards[0].optimizer.param_groups[0]["params"]) > 7


def test_state_moves_to_another_number_of_ranks():
    made, others = parameters(), parameters()
    first, second = (Sharded(each, torch.optim.Adam, {"lr": 0.01}, num) for each, num in ((made, 3), (others, 2)))
    for step in range(5):
        give_gradients(made, step=step)
        first.step()
    pieces = {(span.parameter, span.start): entries for shard in first.shards for span, entries in shard.state()}

    def read(span):
        parts = sorted((start, entries) for (index, start), entries in pieces.items() if index == span.parameter)
        whole = {
            name: torch.cat([part[name] for _, part in parts]) if value.dim() else value
            for name, value in parts[0][1].items()
        }
        return {name: value[span.start : span.stop] if value.dim() else value for name, value in whole.items()}

    for shard in second.shards:
        shard.load(read, [{}, {"lr": 0.003}])
    for mine, other in zip(made, others, strict=True):
        other.data.copy_(mine.data)
    for step in range(5, 9):
        give_gradients(made, others, step=step)
        first.step()
        second.step()
    for mine, other in zip(made, others, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_what_is_not_known_to_be_elementwise_is_not_taken_for_it():
    class Own(torch.optim.AdamW):
        """May do anything."""

    class Declared(torch.optim.AdamW):
        """Says what it does."""

        elementwise = True

    assert not works_on_slices(Own)
    assert works_on_slices(Own, True)
    assert works_on_slices(Declared)
    assert not works_on_slices(torch.optim.Adafactor)
