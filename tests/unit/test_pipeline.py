"""When communication would end with given buckets: small cases computed by hand."""

import pytest
import torch

from lockstep.parallel.ddp.bucket_plan import BucketSpec
from lockstep.parallel.ddp.pipeline import Costs, Timeline, candidate_caps, fit_line, in_words, predict_end_s

CPU = torch.device("cpu")
FREE = Costs(latency_s=1.0, bytes_per_s=10.0, launch_s=0.0, hidden=1.0)
TIMELINE = Timeline(ready_s=(2.0, 4.0, 6.0), end_s=6.0)


def bucket(*parameters, size_bytes=20, deferred=False):
    return BucketSpec(parameters, torch.float32, CPU, False, deferred, size_bytes)


@pytest.mark.parametrize(
    ("plan", "expected_s"),
    [
        ([bucket(0, 1, 2, size_bytes=60)], 6 + 7),  # all at the end
        ([bucket(0), bucket(1), bucket(2)], 8 + 3),  # 2-5, 5-8, 8-11
        ([bucket(0, 1, size_bytes=40), bucket(2)], 9 + 3),  # 4-9, 9-12
        ([bucket(0), bucket(1, 2, size_bytes=40)], 6 + 5),  # 2-5, 6-11
        ([bucket(2), bucket(0), bucket(1)], 6 + 9),  # order counts: none leaves before the first
        ([bucket(0, deferred=True)], 6 + 3),  # deferred: at the end
    ],
)
def test_without_contention_each_bucket_follows_the_one_before(plan, expected_s):
    assert predict_end_s(plan, TIMELINE, FREE) == expected_s


def test_what_is_not_hidden_delays_backward():
    """The first bucket travels 3 s beside backward, which ends half of that later; the second leaves then."""
    costs = Costs(latency_s=1.0, bytes_per_s=10.0, launch_s=0.0, hidden=0.5)
    assert predict_end_s([bucket(0), bucket(1, 2, size_bytes=40)], TIMELINE, costs) == 6 + 1.5 + 5
    nothing_hidden = Costs(latency_s=1.0, bytes_per_s=10.0, launch_s=0.0, hidden=0.0)
    assert predict_end_s([bucket(0), bucket(1, 2, size_bytes=40)], TIMELINE, nothing_hidden) == 6 + 3 + 5


def test_beside_backward_both_may_take_longer():
    costs = Costs(latency_s=1.0, bytes_per_s=10.0, launch_s=0.0, hidden=-0.5)
    assert predict_end_s([bucket(0), bucket(1, 2, size_bytes=40)], TIMELINE, costs) == 6 + 1.5 * 3 + 5


def test_all_but_the_last_are_handed_over():
    costs = Costs(latency_s=1.0, bytes_per_s=10.0, launch_s=0.0, hidden=1.0, handover_s=2.5)
    assert predict_end_s([bucket(0), bucket(1), bucket(2)], TIMELINE, costs) == 2 + 5.5 + 5.5 + 3


def test_launching_delays_backward():
    costs = Costs(latency_s=1.0, bytes_per_s=10.0, launch_s=0.25, hidden=1.0)
    assert predict_end_s([bucket(0), bucket(1, 2, size_bytes=40)], TIMELINE, costs) == 6 + 0.25 + 0.25 + 5


def test_narrow_gradients_travel_faster():
    assert predict_end_s([bucket(0, 1, 2, size_bytes=60)], TIMELINE, FREE, width=0.5) == 6 + 4


def test_a_line_through_measurements():
    exact = {size: 1e-4 + size / 2e9 for size in (4096, 2**18, 2**20, 2**22)}
    latency_s, bytes_per_s = fit_line(exact)
    assert latency_s == pytest.approx(1e-4)
    assert bytes_per_s == pytest.approx(2e9)
    with_an_outlier = exact | {2**20: 1.0}
    assert fit_line(with_an_outlier)[1] == pytest.approx(2e9)


def test_noise_makes_no_line_that_falls():
    latency_s, bytes_per_s = fit_line({4096: 5e-4, 2**20: 4e-4, 2**22: 4.5e-4})
    assert latency_s == pytest.approx(5e-4)
    assert bytes_per_s == 1e13
    assert fit_line({4096: 5e-4})[1] == 1e13


def test_candidates_go_from_one_bucket_to_small_ones():
    caps = candidate_caps(8 * 2**20, 2**20)
    assert caps[:3] == [(2**23,), (2**20, 2**23), (int(2**23 / 2**0.5),)]
    assert min(cap[-1] for cap in caps) >= 2**15
    assert all(len(cap) == 1 or cap[-1] > 2**20 for cap in caps)
    assert candidate_caps(100, 2**20) == [(2**15,)]


def test_words():
    assert in_words([bucket(0, size_bytes=2**20)]) == "1 bucket of 1 MiB"
    assert in_words([bucket(0, size_bytes=2**19), bucket(1, size_bytes=2**21)]) == "2 buckets of 0.5 to 2 MiB"
