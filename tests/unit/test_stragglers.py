"""Which rank is slow, in which phase, and by how much; and when that is said."""

import pytest

from lockstep.telemetry.figures import StragglerReporter, find_stragglers, pace_of
from lockstep.telemetry.step_times import StepTimes
from lockstep.train.recording import window_of

PHASES = ("data_wait", "forward", "backward", "optimizer")
NOISE = (0.0, 0.001, 0.0, 0.002, 0.001)


def times(data_wait, forward, backward, optimizer, waits):
    parts = {"data_wait_s": data_wait, "forward_s": forward, "backward_s": backward, "optimizer_s": optimizer}
    return StepTimes(total_s=sum(parts.values()) + waits, exposed_s=waits, **parts)


def pace(*, slow=None, by_s=0.0, waits=0.002):
    usual = {"data_wait": 0.001, "forward": 0.01, "backward": 0.02, "optimizer": 0.002}
    steps = []
    for noise in NOISE:
        took = dict(usual, forward=0.01 + noise)
        if slow is not None:
            took[slow] += by_s
        steps.append(times(**took, waits=waits))
    return pace_of(steps)


@pytest.mark.parametrize("phase", PHASES)
def test_a_delay_is_of_the_rank_and_the_phase_that_it_was_put_into(phase):
    paces = {rank: pace(waits=0.052) for rank in range(3)} | {3: pace(slow=phase, by_s=0.05)}
    [found] = find_stragglers(paces)
    assert (found.rank, found.part) == (3, phase)
    assert found.lost_s == pytest.approx(0.05)
    assert found.step_s == pytest.approx(0.086)


@pytest.mark.parametrize(
    "paces",
    [
        {0: pace()},
        {rank: pace() for rank in range(4)},
        {0: pace(), 1: pace(slow="data_wait", by_s=0.002)},  # within what steps differ by anyway
        {rank: pace(slow="data_wait", by_s=0.05) for rank in range(3)} | {3: pace()},  # most are: one is quick
    ],
)
def test_nobody_is_slow(paces):
    assert find_stragglers(paces) == []


def test_single_slow_steps_are_not_persistent():
    steps = [times(0.001, 0.01, 0.02, 0.002, 0.002)] * 4 + [times(0.5, 0.01, 0.02, 0.002, 0.002)]
    assert find_stragglers({0: pace(), 1: pace_of(steps)}) == []


def test_nothing_is_compared_without_the_same_steps_as_after_a_recovery():
    reporter = StragglerReporter(pytest.fail)
    reporter.judge({0: pace_of([]), 1: pace_of([])})
    reporter.judge({0: pace_of([]), 1: pace(slow="backward", by_s=0.05)})


def test_what_is_said():
    [found] = find_stragglers({0: pace(waits=0.052), 1: pace(slow="backward", by_s=0.05)})
    assert str(found) == (
        "rank 1 is slow: it loses 50.0 ms in each step of 86.0 ms, in backward (70.0 ms, usual is 20.0 ms), "
        "and the others wait for it"
    )


def test_which_steps_are_looked_at():
    assert [step for step in range(120) if step in window_of(step)] == [*range(2, 22), *range(40, 50), *range(90, 100)]
    assert [step for step in range(120) if step == window_of(step)[-1]] == [11, 21, 49, 99]


def test_it_is_said_once_and_again_if_it_gets_worse():
    reported = []
    reporter = StragglerReporter(reported.append)
    for by_s in (0.05, 0.06, 0.2):
        reporter.judge({0: pace(), 1: pace(slow="data_wait", by_s=by_s)})
    assert [text.partition(" in each")[0] for text in reported] == [
        "rank 1 is slow: it loses 50.0 ms",
        "rank 1 is slow: it loses 200 ms",
    ]


def test_nothing_is_said_after_a_rank_was_replaced_in_this_window():
    reported = []
    StragglerReporter(reported.append).judge({0: pace_of([]), 1: pace_of([])})
    assert reported == []
