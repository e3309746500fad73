"""The bucket plan is a pure function: sizes, dtypes, sparse and deferred parameters decide."""

import torch

from lockstep.parallel.ddp.buckets import ParameterSpec, plan_buckets

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
