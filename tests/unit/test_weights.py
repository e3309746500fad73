"""What gradients are multiplied by, before and after the sum over the ranks."""

from unittest import mock

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.buckets import GradientScale
from lockstep.parallel.ddp.weighting import WeightMessage, Weights, find_carrier

CPU = torch.device("cpu")


class Group:
    """Rank 1 of 4, as far as one can be that alone."""

    def rank(self):
        return 1

    def size(self):
        return 4


def weighed(*weights):
    """Return the weights of a rank that accumulated micro-batches of these weights, and its parameter's use."""
    parameter, used = nn.Parameter(torch.zeros(1)), bytearray(1)
    each = Weights(Group(), CPU)
    for weight in weights:
        each.give(weight, [parameter], used)
        each.window.enter(used, accumulates=True)
        parameter.grad, used[0] = torch.ones(1), 1
    return each, used


def ballots(weight, dtype=torch.float64, missing=0.0):
    return torch.tensor([weight, 3.0, missing], dtype=dtype)


def test_without_weights_gradients_are_divided_by_the_divisor_or_left_to_the_hook():
    each = Weights(Group(), CPU)
    assert each.share([0], [1], 3.0) == GradientScale(1 / 3, 1 / 3)
    assert each.share([0], [1], None) == GradientScale(1.0, 1.0)
    assert each.ballot() == WeightMessage(is_missing=True)


def test_gradients_leave_with_the_latest_weight_over_the_typical_one():
    each, used = weighed(6.0, 2.0)
    assert each.share([0], used, 99.0) == GradientScale(2 / 4, 8 / 4, [8.0, 1.0, 0.0])
    assert each.share([0], used, None) == GradientScale(2.0, 8.0, [8.0, 1.0, 0.0])
    assert each.conclude(ballots(40.0), is_urgent=True) == 4 / 40
    assert each.sum == 40.0
    # From now on the typical weight is 10.
    assert each.share([0], used, 99.0) == GradientScale(2 / 40, 8 / 40, [0.8, 1.0, 0.0])
    assert each.conclude(ballots(4.0), is_urgent=True) == 1.0
    assert each.conclude(ballots(5.0), is_urgent=True) == 0.8
    assert each.sum == 50.0


def test_weights_that_sum_to_zero_change_nothing():
    each, _ = weighed(0.0)
    assert each.conclude(ballots(8.0), is_urgent=True) == 0.5
    assert each.conclude(ballots(0.0), is_urgent=True) == 1.0
    assert each.sum == 0.0
    assert each.ballot() == WeightMessage(0.0, is_weighed=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_tell_that_there_are_weights_but_not_which(dtype):
    each, _ = weighed(2.0)
    assert each.conclude(ballots(8.0, dtype), is_urgent=True) is None
    assert each.conclude(torch.zeros(3, dtype=dtype), is_urgent=True) == 1.0
    with pytest.raises(ConfigurationError, match="rank 0 ran a backward without one"):
        each.conclude(ballots(8.0, dtype, missing=1.0), is_urgent=True)


def test_a_rank_without_weights_looks_at_the_others_when_its_next_backward_begins():
    """As on CUDA, where it would have to wait in order to look at once."""
    each = Weights(Group(), CPU)
    on_device = mock.Mock(**{"device.type": "cuda", "to.return_value": ballots(8.0, missing=2.0)})
    with (
        mock.patch("torch.cuda.Event") as event,
        mock.patch("torch.cuda.current_stream"),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
    ):
        assert each.conclude(on_device, is_urgent=False) == 1.0
    with pytest.raises(ConfigurationError, match="rank 1 ran a backward without one"):
        each.resolve_doubt()
    event.return_value.synchronize.assert_called_once_with()
    each.resolve_doubt()


def test_a_captured_step_has_no_weights():
    each = Weights(Group(), CPU)
    on_device = mock.Mock(**{"device.type": "cuda"})
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        assert each.conclude(on_device, is_urgent=False) == 1.0
        with pytest.raises(ConfigurationError) as caught:
            each.conclude(on_device, is_urgent=True)
    assert each._doubt is None
    assert str(caught.value) == (
        "A step with weights cannot be captured in a CUDA graph: the host has to read their sum.\n"
        "Capture without weight(), or train eagerly."
    )


def test_the_widest_tail_is_read():
    def bucket(dtype):
        return mock.Mock(ballot=None if dtype is None else ballots(1.0, dtype))

    row = [(bucket(dtype), index) for index, dtype in enumerate([None, torch.float16, torch.float32, torch.float64])]
    for last, expected in [(4, 3), (3, 2), (2, 1)]:
        assert find_carrier(row[:last])[1] == expected
    assert find_carrier(row[:1]) is None
    assert find_carrier([(bucket(torch.float32), 0), (bucket(torch.float32), 1)])[1] == 0


def test_a_refusal_is_an_error():
    each = Weights(Group(), CPU)
    each.refusal = "No weights today.\nCome back tomorrow."
    with pytest.raises(ConfigurationError) as caught:
        each.give(1.0, [], [])
    assert str(caught.value) == "No weights today.\nCome back tomorrow."
