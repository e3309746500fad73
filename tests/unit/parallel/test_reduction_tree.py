"""The tree in which gradients are summed: the same additions whoever computes which leaves."""

import random

import pytest
import torch
from torch import nn

from lockstep.data.order import cut
from lockstep.parallel.reduction_tree import (
    GradientLayout,
    LeafPlacement,
    PairwiseAccumulator,
    ReductionTree,
    split,
)

CPU = torch.device("cpu")


def test_a_node_splits_after_the_largest_power_of_two_below_its_size():
    assert [split(range(10, 10 + size)) for size in (2, 3, 4, 5, 8, 9)] == [
        (range(10, 11), range(11, 12)),
        (range(10, 12), range(12, 13)),
        (range(10, 12), range(12, 14)),
        (range(10, 14), range(14, 15)),
        (range(10, 14), range(14, 18)),
        (range(10, 18), range(18, 19)),
    ]


def test_what_can_be_summed_without_the_others():
    assert ReductionTree(8).roots(range(2, 4)) == [range(2, 4)]
    assert ReductionTree(8).roots(range(1, 7)) == [range(1, 2), range(2, 4), range(4, 6), range(6, 7)]
    assert ReductionTree(12).roots(range(3, 6)) == [range(3, 4), range(4, 6)]
    assert ReductionTree(6).roots(range(6)) == [range(6)]
    for num_parts in (2, 4, 8):
        for part in range(num_parts):
            assert len(ReductionTree(8).roots(cut(8, num_parts, part))) == 1, "equal parts of a power of two are nodes"


def test_the_tree_in_words():
    def sum_of(num_leaves, part):
        leaves = {range(leaf, leaf + 1): str(leaf) for leaf in range(num_leaves)}
        return ReductionTree(num_leaves).combine(leaves, lambda left, right: f"({left}+{right})", root=part)

    assert sum_of(4, None) == "((0+1)+(2+3))"
    assert sum_of(6, None) == "(((0+1)+(2+3))+(4+5))"
    assert sum_of(7, range(4, 7)) == "((4+5)+6)"


def place_at_random(num_leaves, choose):
    bounds = sorted(choose.sample(range(1, num_leaves), choose.randint(0, min(4, num_leaves - 1))))
    return LeafPlacement(tuple(map(range, [0, *bounds], [*bounds, num_leaves])))


def summed(tree, parts):
    """Return the sum of all leaves, in the row of the first."""
    rows = {node: row for part in parts for node, row in part.items()}
    first = rows[min(rows, key=lambda node: node.start)]
    for chunk, total in enumerate(first.flats):
        assert tree.combine({node: row.flats[chunk] for node, row in rows.items()}, torch.Tensor.add_) is total
    return first


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 5, 6, 8, 13])
def test_the_bits_do_not_depend_on_who_computes_what(num_leaves):
    weights = [
        torch.empty(3, 2),
        torch.empty(5, dtype=torch.float64),
        torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    choose, sums = random.Random(num_leaves), []
    torch.manual_seed(num_leaves)
    scale = 10.0 ** torch.randint(-6, 6, (num_leaves,))
    leaves = [[torch.randn_like(weight) * scale[leaf] for weight in weights] for leaf in range(num_leaves)]
    leaves[-1][0] = None
    plain = sum(leaf[1] for leaf in leaves)
    for _ in range(6):
        placement = place_at_random(num_leaves, choose)
        parts = []
        for mine in placement.ranges:
            accumulator = PairwiseAccumulator(placement.tree, GradientLayout(weights), CPU)
            for leaf in mine:
                accumulator.push(leaf, leaves[leaf])
            parts.append(accumulator.take())
            assert list(parts[-1]) == placement.tree.roots(mine)
        row = summed(placement.tree, parts)
        sums.append([view.clone() for view in row.views])
        assert torch.allclose(row.views[1], plain, rtol=1e-12)
        assert [view.stride() for view in row.views] == [weight.stride() for weight in weights]
    for other in sums[1:]:
        assert all(
            torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
            for ours, theirs in zip(sums[0], other, strict=True)
        )


def test_a_missing_gradient_is_zero_and_not_nothing():
    # -0 + 0 is 0: were missing ones left out, the sign of a zero would tell where a shard was computed.
    signs = []
    for placement in (LeafPlacement((range(2),)), LeafPlacement((range(1), range(1, 2)))):
        parts = []
        for mine in placement.ranges:
            accumulator = PairwiseAccumulator(placement.tree, GradientLayout([torch.empty(1)]), CPU)
            for leaf in mine:
                accumulator.push(leaf, [None if leaf else torch.tensor([-0.0])])
            parts.append(accumulator.take())
        signs.append(bool(summed(placement.tree, parts).views[0].signbit()))
    assert signs == [False, False]


def test_n_leaves_take_about_log_n_rows_and_these_are_used_again():
    class Counted(GradientLayout):
        num_rows = 0

        def new_row(self, device):
            self.num_rows += 1
            return super().new_row(device)

    layout = Counted([torch.empty(4)])
    accumulator = PairwiseAccumulator(ReductionTree(64), layout, CPU)
    for _ in range(3):
        for leaf in range(64):
            accumulator.push(leaf, [torch.ones(4)])
        (row,) = accumulator.take().values()
        assert row.views[0].tolist() == [64.0] * 4
        accumulator.give_back([row])
    assert layout.num_rows == 6


def test_gradients_start_at_aligned_places_in_chunks_of_one_dtype():
    weights = [torch.empty(7), torch.empty(3, dtype=torch.bfloat16), torch.empty(5_000_000), torch.empty(5_000_000)]
    row = GradientLayout(weights, multiple_of=3).new_row(CPU)
    starts = [
        (view.data_ptr() - flat.data_ptr(), flat.dtype)
        for view in row.views
        for flat in row.flats
        if flat.data_ptr() <= view.data_ptr() < flat.data_ptr() + flat.nbytes
    ]
    assert starts == [(20_000_256, torch.float32), (0, torch.bfloat16), (0, torch.float32), (0, torch.float32)]
    assert [flat.numel() % 3 for flat in row.flats] == [0, 0, 0]
    assert [view.shape for view in row.views] == [weight.shape for weight in weights]


def test_a_strange_layout_gets_a_plain_view():
    weight = nn.Parameter(torch.empty(4, 1).expand(4, 3))
    (view,) = GradientLayout([weight]).new_row(CPU).views
    assert (view.shape, view.stride()) == ((4, 3), (3, 1))
