"""What ranks send of their weights: numbers that are summed, and what the sum tells."""

import math

import numpy as np
import pytest
import torch

from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.weighting import WeightMessage, WeightSum, check_weight


def add_up(messages, world_size, dtype=torch.float64):
    """Add up as a reduction in ``dtype`` does, rank by rank."""
    total = torch.zeros(len(WeightMessage().encode(0, world_size)), dtype=dtype)
    for rank in range(world_size):
        total += torch.tensor(messages(rank).encode(rank, world_size), dtype=dtype)
    return WeightSum.decode(total.tolist())


@pytest.mark.parametrize(("world_size", "length"), [(1, 3), (8, 3), (9, 4), (64, 10)])
def test_a_message_is_a_weight_a_flag_and_one_number_per_eight_ranks(world_size, length):
    assert WeightMessage(2.5, is_weighed=True).encode(0, world_size) == [2.5, 1.0] + [0.0] * (length - 2)
    last = WeightMessage(is_missing=True).encode(world_size - 1, world_size)
    assert last == [0.0] * (length - 1) + [float(2 ** ((world_size - 1) % 8))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("missing", [(), (0,), (7, 8, 15, 16, 299), tuple(range(300))])
def test_the_sum_names_the_ranks_in_every_dtype(dtype, missing):
    weights = add_up(lambda rank: WeightMessage(1.0, rank not in missing, rank in missing), 300, dtype)
    assert weights.missing == missing
    assert weights.is_weighed == (len(missing) < 300)


def test_a_rank_without_data_sends_zeros():
    assert add_up(lambda rank: WeightMessage(), 3) == WeightSum(0.0, False, ())
    assert add_up(lambda rank: WeightMessage(2.0, is_weighed=True) if rank else WeightMessage(), 3) == WeightSum(
        4.0, True, ()
    )
    assert add_up(lambda rank: WeightMessage(is_missing=bool(rank)), 3) == WeightSum(0.0, False, (1, 2))


def test_weights_from_all_ranks_or_from_none_are_right():
    WeightSum(3.0, True, ()).check()
    WeightSum(0.0, False, (0, 1)).check()
    with pytest.raises(ConfigurationError) as caught:
        WeightSum(3.0, True, (1, 4)).check()
    assert str(caught.value) == (
        "A weight is missing in this step: ranks 1, 4 ran a backward without one, but other backwards of the step had "
        "theirs.\n"
        "Call model.weight(n) before each backward, or lockstep.backward(loss, count=n), on all ranks or on none; "
        "n is 0 where a batch holds nothing that counts."
    )


def test_the_correction_makes_a_mean_of_a_sum_that_was_divided_by_the_ranks():
    assert WeightSum(8.0, True, ()).correction(2, tolerance=0) == 0.25
    assert WeightSum(0.0, True, ()).correction(2, tolerance=0) == 1.0
    nearly = WeightSum(2 * (1 + 1e-15), True, ())
    assert nearly.correction(2, tolerance=1e-14) == 1.0
    assert nearly.correction(2, tolerance=0) != 1.0


@pytest.mark.parametrize(
    "weight", [0, 3, 2.5, True, np.int64(3), np.float32(2.5), torch.tensor(3), torch.tensor(2.5), torch.tensor(True)]
)
def test_numbers_and_tensors_without_dimensions_are_weights(weight):
    assert check_weight(weight) == float(weight)
    assert type(check_weight(weight)) is float


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        ("3", "'3'"),
        (None, "None"),
        (1j, "1j"),
        ([3], "[3]"),
        (torch.tensor([3]), "a tensor of shape [1]"),
        (torch.tensor(1j), "a tensor of shape []"),
    ],
)
def test_anything_else_is_not(weight, what):
    with pytest.raises(ConfigurationError) as caught:
        check_weight(weight)
    assert str(caught.value) == (
        f"The weight of a batch must be a number or a tensor with no dimensions, not {what}.\n"
        "Give how many samples or tokens the loss is the mean of."
    )


@pytest.mark.parametrize(
    ("weight", "text"),
    [(-1, "-1"), (math.nan, "nan"), (math.inf, "inf"), (torch.tensor(-2.5), "-2.5"), (-math.inf, "-inf")],
)
def test_weights_are_finite_and_not_negative(weight, text):
    with pytest.raises(ValueError) as caught:
        check_weight(weight)
    assert str(caught.value) == (
        f"The weight of a batch must be zero or more and finite, not {text}.\n"
        "Give how many samples or tokens the loss is the mean of."
    )
