"""The bucket plan is a pure function: sizes, dtypes, sparse and deferred parameters decide."""

import pytest
import torch
from torch import nn

from lockstep.errors import LockstepError
from lockstep.parallel.ddp.buckets import (
    MIB,
    DenseBucket,
    GradientScale,
    ParameterSpec,
    ReadyOrder,
    merge_arrivals,
    plan_buckets,
)
from lockstep.parallel.ddp.setup import bucket_caps_bytes

CPU = torch.device("cpu")


def spec(numel, dtype=torch.float32, **flags):
    return ParameterSpec(numel, dtype, CPU, **flags)


def members(plan):
    return [bucket.parameters for bucket in plan]


def test_a_bucket_closes_when_it_reaches_its_cap():
    plan = plan_buckets([spec(10)] * 5, range(5), [80])
    assert members(plan) == [(0, 1), (2, 3), (4,)]
    assert [bucket.size_bytes for bucket in plan] == [80, 80, 40]


def test_the_first_cap_is_for_the_first_bucket_only():
    assert members(plan_buckets([spec(10)] * 5, range(5), [40, 120])) == [(0,), (1, 2, 3), (4,)]


def test_the_order_is_kept():
    assert members(plan_buckets([spec(10)] * 4, [2, 0, 3, 1], [80])) == [(2, 0), (3, 1)]


def test_gradients_of_an_odd_size_come_last_in_their_bucket_so_that_the_others_are_aligned():
    """The bucket takes its turn as before: when the gradient that arrives last does."""
    plan = plan_buckets([spec(10), spec(16), spec(7), spec(8), spec(4)], range(5), [164])
    assert members(plan) == [(1, 3, 0, 2), (4,)]
    assert members(plan_buckets([spec(10)] * 4, [3, 2, 1, 0], [1000])) == [(3, 2, 1, 0)]
    narrow = [spec(4, torch.bfloat16), spec(8, torch.bfloat16)]
    assert members(plan_buckets(narrow, range(2), [1000])) == [(1, 0)]


def test_dtypes_do_not_mix_and_the_bucket_that_is_ready_first_comes_first():
    parameters = [spec(10), spec(10, torch.float64), spec(10), spec(10, torch.float64)]
    plan = plan_buckets(parameters, [1, 0, 2, 3], [1000])
    assert members(plan) == [(0, 2), (1, 3)]
    assert [bucket.dtype for bucket in plan] == [torch.float32, torch.float64]


def test_a_sparse_gradient_travels_alone():
    plan = plan_buckets([spec(10), spec(10, sparse=True), spec(10)], range(3), [1000])
    assert members(plan) == [(1,), (0, 2)]
    assert [bucket.sparse for bucket in plan] == [True, False]


def test_deferred_parameters_come_last():
    plan = plan_buckets([spec(10, deferred=True), spec(10), spec(10, deferred=True), spec(10)], range(4), [1000])
    assert members(plan) == [(1, 3), (0, 2)]
    assert [bucket.deferred for bucket in plan] == [False, True]


def test_every_parameter_is_in_exactly_one_bucket():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 500, (200,), generator=generator).tolist()
    parameters = [
        spec(size, (torch.float32, torch.bfloat16)[index % 2], sparse=index % 17 == 3, deferred=index % 13 == 5)
        for index, size in enumerate(sizes)
    ]
    order = torch.randperm(200, generator=generator).tolist()
    plan = plan_buckets(parameters, order, [100, 4000])
    assert sorted(index for bucket in plan for index in bucket.parameters) == list(range(200))
    assert all(bucket.size_bytes < 4000 + 2000 for bucket in plan)


# How large buckets are where nobody says it.


@pytest.mark.parametrize(
    ("cap_mb", "caps_mb", "can_overlap", "expected"),
    [
        (None, None, True, (1 * MIB, 25 * MIB)),
        (None, None, False, (25 * MIB,)),
        (2, None, False, (2 * MIB,)),
        (None, [1, 2.5], False, (1 * MIB, 5 * MIB // 2)),
    ],
)
def test_caps(cap_mb, caps_mb, can_overlap, expected):
    assert bucket_caps_bytes(cap_mb, caps_mb, can_overlap=can_overlap, is_compressed=False) == expected


@pytest.mark.parametrize(("num_devices", "expected_mib"), [(8, 25), (9, 36), (64, 256)])
def test_the_cap_grows_with_the_number_of_devices(num_devices, expected_mib):
    """So that the latency of a ring stays a small part of the time of a bucket."""
    options = {"can_overlap": True, "num_devices": num_devices}
    assert bucket_caps_bytes(None, None, is_compressed=False, **options) == (1 * MIB, expected_mib * MIB)
    assert bucket_caps_bytes(None, None, is_compressed=True, **options) == (1 * MIB, 8 * MIB)
    assert bucket_caps_bytes(3, None, is_compressed=False, **options) == (3 * MIB,)


@pytest.mark.parametrize("cap_mb", ["auto", 0, -1])
def test_what_is_no_size(cap_mb):
    with pytest.raises(ValueError) as caught:
        bucket_caps_bytes(cap_mb, None, can_overlap=True, is_compressed=False)
    assert str(caught.value) == f"A bucket's size must be a positive number of MiB, but got {cap_mb!r}."


# What ranks saw in the first step becomes one order.


def test_the_rank_that_saw_most_decides():
    merged = merge_arrivals([[3, 1], [2, 3, 1], [1, 2, 3]], default=[3, 2, 1, 0])
    assert merged == ReadyOrder((2, 3, 1, 0), frozenset(), is_uneven=True)


def test_a_parameter_stands_where_it_arrived_last():
    merged = merge_arrivals([[2, 1, 2, 0]], default=[2, 1, 0])
    assert merged == ReadyOrder((1, 2, 0), frozenset({2}))


def test_repeats_on_any_rank_count():
    merged = merge_arrivals([[2, 1, 0], [1, 1]], default=[2, 1, 0])
    assert merged == ReadyOrder((2, 1, 0), frozenset({1}), is_uneven=True)


def test_ranks_without_data_are_not_uneven():
    assert not merge_arrivals([[1, 0], [], [1, 0]], default=[1, 0]).is_uneven


def test_nobody_saw_anything():
    assert merge_arrivals([[], []], default=[1, 0]) == ReadyOrder((1, 0), frozenset())


# How gradients get into a bucket, divided by the number of ranks on the way.


SMALL, LARGE = (3, 4), (256, 256)
MESSAGE = [0.0, 0.0, 1.0]


def divided_by(divisor):
    return GradientScale(1.0 / divisor, 1.0 / divisor)


def make_bucket(*shapes):
    """Return a bucket for parameters of these shapes, which have gradients of their own."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    specs = [ParameterSpec(parameter.numel(), parameter.dtype, parameter.device) for parameter in parameters]
    (spec,) = plan_buckets(specs, range(len(specs)), (2**30,))
    names = [str(index) for index in range(len(specs))]
    return parameters, DenseBucket(spec, parameters, names, keep_held_gradients=False, message=MESSAGE)


@pytest.mark.parametrize("shapes", [[SMALL, SMALL], [LARGE], [SMALL, LARGE, SMALL, LARGE]])
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_every_gradient_is_divided_once_and_becomes_a_view(shapes, divisor):
    parameters, bucket = make_bucket(*shapes)
    expected = [parameter.grad * (1 / divisor) for parameter in parameters]
    bucket.gather(None, divided_by(divisor))
    for parameter, view, gradient in zip(parameters, bucket.gradient_views(), expected, strict=True):
        assert parameter.grad.is_set_to(view)
        assert torch.equal(view, gradient)
    assert bucket.payload[-len(shapes) - 3 :].tolist() == [1.0] * len(shapes) + MESSAGE
    assert bucket.missing == {}


def test_gradients_that_are_in_the_bucket_already_are_divided_as_those_that_come_in():
    parameters, bucket = make_bucket(LARGE, SMALL, LARGE)
    bucket.gather(None, divided_by(1.0))
    parameters[2].grad = torch.full(LARGE, 6.0)
    expected = [parameters[0].grad / 2, parameters[1].grad / 2, torch.full(LARGE, 3.0)]
    bucket.gather(None, divided_by(2.0))
    assert all(torch.equal(view, gradient) for view, gradient in zip(bucket.gradient_views(), expected, strict=True))


def test_a_gradient_that_never_came_counts_as_zero():
    parameters, bucket = make_bucket(LARGE, SMALL)
    parameters[1].grad = None
    bucket.gather({0}, divided_by(2.0))
    assert bucket.gradient_views()[1].count_nonzero() == 0
    assert bucket.payload[-5:].tolist() == [1.0, 0.0, *MESSAGE]
    bucket.settle([1, 0])
    assert parameters[1].grad is None


@pytest.mark.parametrize("divisor", [1.0, 2.0])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_an_unexpected_sparse_gradient_is_named(shape, divisor):
    (parameter,), bucket = make_bucket(shape)
    parameter.grad = parameter.grad.to_sparse(1)
    with pytest.raises(LockstepError) as caught:
        bucket.gather(None, divided_by(divisor))
    assert str(caught.value) == (
        "Parameter 0 received a sparse gradient, which was not expected.\n"
        "Only nn.Embedding and nn.EmbeddingBag with sparse=True may produce sparse gradients."
    )


def test_the_scale_tells_gradients_of_this_step_from_those_before_and_casts_the_message():
    parameters, bucket = make_bucket(SMALL, SMALL)
    fresh, before = (parameter.grad.clone() for parameter in parameters)
    bucket.gather({0}, GradientScale(factor=0.5, unused_factor=2.0, message=torch.tensor([3.0, 1.0, 0.0])))
    first, second = bucket.gradient_views()
    assert torch.equal(first, fresh * 0.5) and torch.equal(second, before * 2.0)
    assert bucket.payload[-5:].tolist() == [1.0, 0.0, 3.0, 1.0, 0.0]
    assert bucket.weight_message.tolist() == [3.0, 1.0, 0.0]
    bucket.scale(4.0)
    bucket.settle(None)
    assert torch.equal(parameters[0].grad, fresh * 2.0) and torch.equal(parameters[1].grad, before)
