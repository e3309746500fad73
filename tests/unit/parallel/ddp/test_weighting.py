"""What gradients are multiplied by, before and after the sum over the ranks."""

import math
from functools import reduce
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp import weighting
from lockstep.parallel.ddp.buckets import GradientScale
from lockstep.parallel.ddp.weighting import (
    AccumulationWindow,
    Weights,
    all_zero,
    check_weight,
    encode_message,
    refuse_apart,
    refuse_missing,
    refuse_other_data,
)

CPU = torch.device("cpu")
NO_DIGESTS = (0.0,) * 8  # two differences for each of 4 ranks


class Group:
    """Rank 1 of 4, as far as one can be that alone."""

    def rank(self):
        return 1

    def size(self):
        return 4


def weighed(*weights):
    """Return the weights of a rank that accumulated micro-batches of these weights, and its parameter's use."""
    parameter, used = nn.Parameter(torch.zeros(1)), set()
    each = Weights(Group(), CPU)
    for weight in weights:
        each.open_window([parameter], used).set_weight(weight)
        each.window.begin_backward(used, accumulates=True)
        parameter.grad = torch.ones(1)
        used.add(0)
    return each, used


def bucket(weight=1.0, dtype=torch.float64, missing=0.0, **attributes):
    """Return a reduced bucket whose tail says this."""
    numbers = [weight, 3.0 if weight else 0.0, 0.0, missing, 0.0, *NO_DIGESTS]
    message = None if dtype is None else torch.tensor(numbers, dtype=dtype)
    return mock.Mock(weight_message=message, sent_dtype=dtype, **{"spec.dtype": dtype, **attributes})


def correction(each, *buckets):
    return each.correction(reduce(each.carrier, buckets, None), None, each.message())


def scale(each, used, divisor):
    factor, unused_factor, message = each.scale([0], used, divisor, each.message())
    return factor, unused_factor, message


def test_without_weights_gradients_are_divided_by_the_divisor_or_left_to_the_hook():
    each = Weights(Group(), CPU)
    each.num_updates = 1
    message = (0.0, 0.0, 0.0, 80.0, 0.0, *NO_DIGESTS)  # rank 1 gave none, and made one update
    assert each.scale([0], {0}, 3.0, each.message()) == GradientScale(1 / 3, 1 / 3, message)
    assert each.scale([0], {0}, None, each.message()) == GradientScale(1.0, 1.0, message)
    assert each.scale([0], {0}, None, None) == GradientScale(1.0, 1.0)


def test_gradients_leave_with_the_latest_weight_over_the_typical_one():
    each, used = weighed(6.0, 2.0)
    assert scale(each, used, 99.0) == (2 / 4, 8 / 4, (8.0, 1.0, *[0.0] * 3, *NO_DIGESTS))
    assert scale(each, used, None) == (2.0, 8.0, (8.0, 1.0, *[0.0] * 3, *NO_DIGESTS))
    assert correction(each, bucket(40.0)) == 4 / 40
    # From now on the typical weight is 10.
    assert scale(each, used, 99.0) == (2 / 40, 8 / 40, (0.8, 1.0, *[0.0] * 3, *NO_DIGESTS))
    assert correction(each, bucket(4.0)) == 1.0
    assert correction(each, bucket(5.0)) == 0.8


def test_weights_that_sum_to_zero_change_nothing():
    each, _ = weighed(0.0)
    assert correction(each, bucket(8.0)) == 0.5
    assert correction(each, bucket(0.0)) == 1.0
    assert each.message() == (0.0, 1.0, *[0.0] * 3, *NO_DIGESTS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_tell_that_there_are_weights_but_not_which(dtype):
    each, _ = weighed(2.0)
    with mock.patch.object(
        each, "_exchange", return_value=torch.tensor([8.0, 3.0, *[0.0] * 3, *NO_DIGESTS])
    ) as exchange:
        assert correction(each, bucket(9.0, dtype)) == 0.5
        exchange.assert_called_once_with((2.0, 1.0, *[0.0] * 3, *NO_DIGESTS))
        assert correction(each, bucket(0.0, dtype)) == 1.0
        with pytest.raises(ConfigurationError, match="rank 0 ran a backward without one"):
            correction(each, bucket(8.0, dtype, missing=1.0))
        exchange.assert_called_once()


def on_gpu(weight=8.0, missing=0.0):
    values = bucket(weight, missing=missing).weight_message
    message = mock.Mock(**{"device.type": "cuda"}, is_cpu=False, values=values)
    return mock.Mock(weight_message=message, sent_dtype=torch.float64)


def test_a_rank_without_weights_looks_at_the_others_when_its_next_backward_begins():
    """As on CUDA, where it would have to wait in order to look at once."""
    each = Weights(Group(), CPU)
    with (
        mock.patch.object(weighting, "HostCopy", lambda message: mock.Mock(value=message.values)),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
    ):
        assert correction(each, on_gpu(missing=16.0)) == 1.0
    with pytest.raises(ConfigurationError, match="rank 1 ran a backward without one"):
        each.check_last_step()
    each.check_last_step()


def test_sums_like_those_of_the_step_before_are_not_decoded_and_others_are():
    each = Weights(Group(), CPU)
    for _ in range(2):
        with mock.patch.object(weighting, "refuse_apart", wraps=refuse_apart) as decoded:
            assert [correction(each, bucket(0.0, missing=17.0)) for _ in range(2)] == [1.0, 1.0]
        assert decoded.call_count == 1
        with pytest.raises(ConfigurationError, match="rank 0 ran a backward without one"):
            correction(each, bucket(8.0, missing=1.0))
        assert correction(each, bucket(8.0)) == 0.5  # weights: so the next plain sums are read anew


def test_a_captured_step_has_no_weights():
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        assert correction(Weights(Group(), CPU), on_gpu()) == 1.0
        with pytest.raises(ConfigurationError) as caught:
            correction(weighed(2.0)[0], on_gpu())
    assert str(caught.value) == (
        "A step with weights cannot be captured in a CUDA graph: each replay would use the same weights.\n"
        "Capture without mean_over(), or train eagerly."
    )


def test_the_widest_tail_is_read():
    each, _ = weighed(1.0)
    row = [bucket(dtype=None), bucket(9.0, torch.float16), bucket(2.0, torch.float32), bucket(4.0, torch.float64)]
    assert correction(each, *row) == 1.0  # 4 ranks, and 4 typical weights
    assert correction(each, *row[:3]) == 2.0


def test_a_refusal_is_an_error():
    each = Weights(Group(), CPU)
    each.refusal = "No weights today.\nCome back tomorrow."
    with pytest.raises(ConfigurationError) as caught:
        each.open_window([], []).set_weight(1.0)
    assert str(caught.value) == "No weights today.\nCome back tomorrow."


# What ranks send of their weights: numbers that are summed, and what the sum tells.


@pytest.mark.parametrize(("world_size", "length"), [(8, 7), (9, 8)])
def test_a_message_is_a_weight_two_flags_a_number_per_two_ranks_and_two_differences_per_rank(world_size, length):
    none = [0.0] * 2 * world_size
    assert encode_message(0, world_size, 2.5, is_weighed=True) == (2.5, 1.0, *[0.0] * (length - 2), *none)
    last = encode_message(world_size - 1, world_size, is_missing=True)
    assert last == (*[0.0] * (length - 1), float(16 ** ((world_size - 1) % 2)), *none)


def test_a_digest_is_added_at_the_own_rank_and_subtracted_at_the_next():
    assert encode_message(1, 3, digest=0x0502)[5:] == (0.0, 2.0, -2.0, 0.0, 5.0, -5.0)
    assert encode_message(2, 3, digest=0x0502)[5:] == (-2.0, 0.0, 2.0, -5.0, 0.0, 5.0)
    assert encode_message(0, 1, digest=0x0502)[4:] == (0.0, 0.0)


def add_digests(digests, dtype):
    messages = [encode_message(rank, len(digests), digest=each) for rank, each in enumerate(digests)]
    total = torch.zeros(len(messages[0]), dtype=dtype)
    for message in messages:
        total += torch.tensor(message, dtype=dtype)
    return total.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_sum_names_the_ranks_that_have_read_other_data(dtype):
    for digests in ([0xFFFF] * 300, [0] * 10, [0x1234]):
        refuse_other_data(add_digests(digests, dtype), "")
    for digests, name, text in [
        ([0xFFFF, 0xFFFE], "", "rank 1 trained on another global batch than rank 0."),
        ([7] * 299 + [0x0107], "b 3", "rank 299 trained on another global batch than rank 0; here it was b 3."),
        ([0xFF00, 0xFF00, 0x00FF, 0, 0xFF00], "", "ranks 2, 3 trained on another global batch than rank 0."),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            refuse_other_data(add_digests(digests, dtype), name)
        assert str(caught.value) == (
            f"The ranks have read different data: in this step, {text}\nEvery rank must read the same samples in the "
            "same order, and gets its part of them from prepare(). So a data set or sampler must not take a part by "
            "rank, shuffle with a generator that the ranks seed differently, or weight samples by the losses of one "
            "rank: use torch's generator, random or numpy.random, or a seed that is equal on all ranks."
        )


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
        "Call model.mean_over(n) before each backward, or lockstep.backward(loss, mean_over=n), on all ranks or "
        "on none; n is 0 where a batch holds nothing that counts."
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


# What weights make of gradients while they are accumulated.


NUM_PARAMETERS = 3


class Script:
    """A window, and gradients that arrive one after the other, as autograd delivers them."""

    def __init__(self):
        self.parameters = [nn.Parameter(torch.zeros(2)) for _ in range(NUM_PARAMETERS)]
        self.used = set()
        self.window = AccumulationWindow(self.parameters, has_unweighed=False, shares_batch=False)

    def give(self, weight):
        self.window.on_forward()
        self.window.set_weight(weight)

    def backward(self, *gradients, accumulates=True, enters=True):
        if enters:
            self.window.begin_backward(self.used, accumulates=accumulates)
        for index, value in enumerate(gradients):
            if value is not None:
                parameter, gradient = self.parameters[index], torch.full((2,), float(value))
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient
                self.used.add(index)
                if accumulates:
                    self.window.on_local_gradient(index, self.used)

    def gradients(self):
        return [None if each.grad is None else each.grad[0].item() for each in self.parameters]

    def end(self):
        self.window.end(range(NUM_PARAMETERS), self.used)
        return self.gradients()


def test_gradients_are_kept_in_units_of_the_latest_weight():
    script = Script()
    script.give(6)
    script.backward(1, 2)
    script.give(2)
    script.backward(1, None, 5)
    assert script.gradients() == [4.0, 6.0, 5.0]
    assert (script.window.unit, script.window.total) == (2.0, 8.0)
    assert (script.window.is_weighed, script.window.has_unweighed) == (True, False)


def test_equal_weights_leave_gradients_alone():
    script = Script()
    script.give(3)
    script.backward(1)
    version = script.parameters[0].grad._version
    script.give(3)
    script.window.begin_backward(script.used, accumulates=True)
    assert script.parameters[0].grad._version == version


def test_a_weight_of_zero_keeps_nan_out():
    script = Script()
    script.give(2)
    script.backward(1, 7)
    script.give(0)
    script.backward(float("nan"), None, float("nan"))
    script.give(1)
    script.backward(1)
    assert script.end() == [3.0, 14.0, 0.0]
    assert (script.window.unit, script.window.total) == (1.0, 3.0)


def test_a_last_weight_of_zero_leaves_what_was_accumulated_in_its_own_unit():
    script = Script()
    script.give(2)
    script.backward(1, 7)
    script.give(0)
    script.backward(float("nan"), accumulates=False)
    assert script.end() == [1.0, 7.0, None]
    assert (script.window.unit, script.window.total) == (2.0, 2.0)


def test_nothing_but_zeros():
    script = Script()
    script.give(0)
    script.backward(float("inf"), accumulates=False)
    assert script.end() == [0.0, None, None]
    assert (script.window.unit, script.window.total) == (0.0, 0.0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_the_gradients_begins_a_new_window(set_to_none):
    script = Script()
    script.give(6)
    script.backward(1, 2)
    for parameter in script.parameters:
        if parameter.grad is not None:
            parameter.grad = None if set_to_none else parameter.grad.zero_()
    script.give(2)
    script.backward(None, 5)
    assert script.gradients() == [None if set_to_none else 0.0, 5.0, None]
    assert (script.window.unit, script.window.total) == (2.0, 2.0)
    assert script.used == {1}


def test_gradients_that_are_zero_by_themselves_count():
    script = Script()
    script.give(6)
    script.backward(0, 0)
    script.give(2)
    script.backward(1)
    assert script.window.total == 8.0


def test_gradients_from_before_are_sent_with_the_total_weight():
    script = Script()
    for parameter in script.parameters:
        parameter.grad = torch.full((2,), 10.0)
    script.give(6)
    script.backward(1)
    script.give(2)
    script.backward(1)
    assert script.gradients() == [4.0, 0.0, 0.0]
    # In units of 2 with a total of 8, 10 is 40; what received no gradient is as it was.
    assert script.end() == [44.0, 10.0, 10.0]


def test_a_weight_counts_once_for_all_backwards_of_its_micro_batch():
    script = Script()
    script.give(3)
    script.backward(1)
    script.backward(1)
    assert (script.window.total, script.gradients()[0]) == (3.0, 2.0)
    script.window.close()
    script.backward(1)
    assert script.window.total == 3.0
    script.window.on_forward()
    script.backward(1)
    assert (script.window.is_weighed, script.window.has_unweighed) == (True, True)


def test_a_weight_that_no_backward_used_can_be_withdrawn_and_replaced():
    script = Script()
    script.give(3)
    assert script.window.discard_weight()
    assert not script.window.discard_weight()
    script.backward(1)
    assert (script.window.is_weighed, script.window.has_unweighed) == (False, True)
    script.window.close()
    script.give(3)
    script.give(5)
    script.backward(1)
    assert script.window.total == 5.0
    assert not script.window.discard_weight()


def test_gradients_that_arrive_before_any_output_was_noticed():
    script = Script()
    script.give(3)
    script.backward(1, 2, enters=False)
    assert (script.window.total, script.gradients()) == (3.0, [1.0, 2.0, None])
    script.give(3)
    script.backward(1, enters=False)
    assert (script.window.total, script.gradients()) == (6.0, [2.0, 2.0, None])
    script.give(4)
    with pytest.raises(ConfigurationError) as caught:
        script.backward(1, enters=False)
    assert str(caught.value) == (
        "A gradient arrived before any output of the model was reached, too late for its weight to count.\n"
        "Return all outputs as tensors, or in lists, dicts or dataclasses, and call mean_over() before backward."
    )


def test_zero_weight_for_gradients_that_arrive_before_any_output_was_noticed():
    script = Script()
    script.give(0)
    script.backward(float("nan"), float("nan"), enters=False)
    script.give(2)
    script.backward(1)
    assert script.end() == [1.0, 0.0, None]


def test_all_zero():
    assert all_zero([])
    assert all_zero([torch.zeros(2), torch.zeros(2, 2).to_sparse(1)])
    assert not all_zero([torch.zeros(2), torch.tensor([0.0, 1e-30])])
    assert not all_zero([torch.eye(2).to_sparse(1)])
    assert not all_zero([torch.tensor([float("nan")])])
