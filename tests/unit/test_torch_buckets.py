"""Which bucket of torch's DistributedDataParallel a rank waits for, by torch's record of its collectives."""

import pytest

from lockstep.telemetry.heartbeat import Bucket, Call, Parameter, awaited, buckets_at, plan_of

PARAMETERS = [Parameter(f"layers.{index}.weight", 10 + index) for index in range(4)]


def test_buckets_that_were_built_anew():
    plan = plan_of({"bucket_sizes": "1, 2", "rebuilt_per_bucket_param_indices": "3 1, 0 2"}, PARAMETERS)
    assert plan == [
        Bucket(("layers.3.weight", "layers.1.weight"), 24),
        Bucket(("layers.0.weight", "layers.2.weight"), 22),
    ]


@pytest.mark.parametrize(
    "logged",
    [
        {},
        {"bucket_sizes": "100, 84"},  # they will be built anew
        {"rebuilt_per_bucket_param_indices": "3 1, 0"},
        {"rebuilt_per_bucket_param_indices": "3 1, 0 2 4"},
    ],
)
def test_what_does_not_add_up_is_left_out(logged):
    assert plan_of(logged, PARAMETERS) == []


def calls(*sizes, over=0):
    names = ["broadcast" if size < 0 else "all_reduce" for size in sizes]
    return [Call(name, abs(size), place < over) for place, (name, size) in enumerate(zip(names, sizes, strict=True))]


def plan(*sizes):
    return [Bucket((f"p{number}",), size) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "buckets", "expected"),
    [
        ((7, 5, 5, 3), (7, 5, 5, 3), [3]),
        ((7, 5, 5), (7, 5, 5, 3), [2]),
        ((7, 5), (7, 5, 5, 3), [1]),
        ((1, 7, 5), (7, 5, 5, 3), [1]),  # a sum of one's own before backward
        ((5, 5, -9, 5, 5), (5, 5, 5), [1]),  # buffers are exchanged between steps
        ((5, 5, 5, 5), (5, 5, 5), [0, 1, 2]),  # nobody can tell
        ((15, 5, 5, 5, 5, 5), (5, 5, 5), [1]),  # before they were built anew they were others
        ((7, 5, 4), (7, 5, 5, 3), []),
        ((7,), (), []),
    ],
)
def test_a_bucket_is_told_by_the_sizes_before_it(sizes, buckets, expected):
    assert buckets_at(calls(*sizes), len(sizes) - 1, plan(*buckets)) == expected


def test_what_is_awaited_is_the_first_that_is_not_over():
    assert awaited([]) is None
    assert awaited(calls(7, 5, 5)) == 2  # torch does not say which are over
    assert awaited(calls(7, 5, 5, over=1)) == 1
    assert awaited(calls(7, 5, 5, over=3)) == 2
