"""What gradients are multiplied by, before and after the sum over the ranks."""

from unittest import mock

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp import weighting
from lockstep.parallel.ddp.buckets import GradientScale
from lockstep.parallel.ddp.weighting import Weights

CPU = torch.device("cpu")


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
    message = None if dtype is None else torch.tensor([weight, 3.0 if weight else 0.0, 0.0, missing], dtype=dtype)
    return mock.Mock(weight_message=message, sent_dtype=dtype, **{"spec.dtype": dtype, **attributes})


def correction(each, *buckets):
    return each.correction(each.carrier(buckets), None, each.message())


def scale(each, used, divisor):
    factor, unused_factor, message = each.scale([0], used, divisor)
    return factor, unused_factor, message


def test_without_weights_gradients_are_divided_by_the_divisor_or_left_to_the_hook():
    each = Weights(Group(), CPU)
    each.num_updates = 1
    message = (0.0, 0.0, 0.0, 80.0, 0.0)  # rank 1 gave none, and made one update
    assert each.scale([0], {0}, 3.0) == GradientScale(1 / 3, 1 / 3, message)
    assert each.scale([0], {0}, None) == GradientScale(1.0, 1.0, message)
    assert each.scale([0], {0}, None, carries=False) == GradientScale(1.0, 1.0)


def test_gradients_leave_with_the_latest_weight_over_the_typical_one():
    each, used = weighed(6.0, 2.0)
    assert scale(each, used, 99.0) == (2 / 4, 8 / 4, (8.0, 1.0, *[0.0] * 3))
    assert scale(each, used, None) == (2.0, 8.0, (8.0, 1.0, *[0.0] * 3))
    assert correction(each, bucket(40.0)) == 4 / 40
    # From now on the typical weight is 10.
    assert scale(each, used, 99.0) == (2 / 40, 8 / 40, (0.8, 1.0, *[0.0] * 3))
    assert correction(each, bucket(4.0)) == 1.0
    assert correction(each, bucket(5.0)) == 0.8


def test_weights_that_sum_to_zero_change_nothing():
    each, _ = weighed(0.0)
    assert correction(each, bucket(8.0)) == 0.5
    assert correction(each, bucket(0.0)) == 1.0
    assert each.message() == (0.0, 1.0, *[0.0] * 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_tell_that_there_are_weights_but_not_which(dtype):
    each, _ = weighed(2.0)
    with mock.patch.object(each, "_exchange", return_value=torch.tensor([8.0, 3.0, 0.0, 0.0])) as exchange:
        assert correction(each, bucket(9.0, dtype)) == 0.5
        exchange.assert_called_once_with((2.0, 1.0, *[0.0] * 3))
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


def test_a_captured_step_has_no_weights():
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        assert correction(Weights(Group(), CPU), on_gpu()) == 1.0
        with pytest.raises(ConfigurationError) as caught:
            correction(weighed(2.0)[0], on_gpu())
    assert str(caught.value) == (
        "A step with weights cannot be captured in a CUDA graph: each replay would use the same weights.\n"
        "Capture without weight(), or train eagerly."
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
