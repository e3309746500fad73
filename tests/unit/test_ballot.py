"""What ranks send of their weights: numbers that are summed, and what the sum tells."""

import math

import numpy as np
import pytest
import torch

from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.weighting import check_weight, encode_message, refuse_apart, refuse_missing


@pytest.mark.parametrize(("world_size", "length"), [(8, 7), (9, 8)])
def test_a_message_is_a_weight_two_flags_and_a_number_per_two_ranks(world_size, length):
    assert encode_message(0, world_size, 2.5, is_weighed=True) == (2.5, 1.0, *[0.0] * (length - 2))
    last = encode_message(world_size - 1, world_size, is_missing=True)
    assert last == (*[0.0] * (length - 1), float(16 ** ((world_size - 1) % 2)))


def add_up(missing, world_size, dtype):
    """Add up as a reduction in ``dtype`` does, rank by rank."""
    total = torch.zeros(len(encode_message(0, world_size)), dtype=dtype)
    for rank in range(world_size):
        is_missing = rank in missing
        message = encode_message(rank, world_size, 1.0, is_weighed=not is_missing, is_missing=is_missing)
        total += torch.tensor(message, dtype=dtype)
    return total.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("missing", "text"), [((0,), "rank 0"), ((7, 8, 16, 299), "ranks 7, 8, 16, 299")])
def test_the_sum_names_the_ranks_in_every_dtype(dtype, missing, text):
    with pytest.raises(ConfigurationError) as caught:
        refuse_missing(add_up(missing, 300, dtype))
    assert str(caught.value) == (
        f"A weight is missing in this step: {text} ran a backward without one, but other backwards of the step had "
        "theirs.\n"
        "Call model.weight(n) before each backward, or lockstep.backward(loss, mean_over=n), on all ranks or on none; "
        "n is 0 where a batch holds nothing that counts."
    )


def test_weights_from_all_ranks_or_from_none_are_right():
    refuse_missing(add_up((), 300, torch.bfloat16))
    refuse_missing(add_up(range(300), 300, torch.bfloat16))


def add_updates(updates, dtype):
    messages = [encode_message(rank, len(updates), num_updates=each) for rank, each in enumerate(updates)]
    total = torch.zeros(len(messages[0]), dtype=dtype)
    for message in messages:
        total += torch.tensor(message, dtype=dtype)
    return total.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_sum_names_the_ranks_that_are_a_step_apart(dtype):
    for updates in ([1] * 300, [2] * 300, [0] * 10, [None] * 3, [1, None, 1]):
        refuse_apart(add_updates(updates, dtype))
    with pytest.raises(ConfigurationError) as caught:
        refuse_apart(add_updates([0, 2, *[None] * 8, 1, 5], dtype))
    assert str(caught.value) == (
        "The ranks are not in the same step: since the gradients were averaged last, the optimizer has stepped not at "
        "all on rank 0; once on rank 10; more than once on rank 1, 11.\nA rank has run a backward or optimizer.step() "
        "more or less often than the others. Every step needs both on every rank, the backward from a loss that "
        "depends on the output of the model: for a batch without a target, output.sum() * 0."
    )


@pytest.mark.parametrize("weight", [0, 2.5, True, np.float32(2.5), torch.tensor(3), torch.tensor(2.5)])
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
        f"The weight of a batch must be a finite number, 0 or more, or a tensor with one such number, not {what}.\n"
        "Give how many samples or tokens the loss is the mean of."
    )


@pytest.mark.parametrize(
    ("weight", "text"),
    [(-1, "-1"), (math.nan, "nan"), (torch.tensor(math.inf), "tensor(inf)")],
)
def test_weights_are_finite_and_not_negative(weight, text):
    with pytest.raises(ValueError) as caught:
        check_weight(weight)
    assert str(caught.value) == (
        f"The weight of a batch must be a finite number, 0 or more, or a tensor with one such number, not {text}.\n"
        "Give how many samples or tokens the loss is the mean of."
    )
