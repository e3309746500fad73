"""Figures from planted records: where the time goes, whom all wait for, what is on the critical path."""

import pytest

from lockstep.study.report.figures import bars_of, find_window
from lockstep.study.report.view import sentences, view_run
from lockstep.telemetry.figures import find_figures
from lockstep.telemetry.record import read_run
from tests.unit.study.report.report_planted import (
    START,
    event_line,
    session,
    step_line,
    steps,
    timeline_line,
    write_run,
)


def figures(tmp_path, *ranks, **changes):
    tmp_path.mkdir(exist_ok=True)
    return find_figures(read_run(write_run(tmp_path / "run", ranks, [session(len(ranks), **changes)])))


def test_the_rank_that_waits_least_waits_for_the_wire_and_the_others_for_it(tmp_path):
    slow = steps(forward_s=0.013, exposed_s=0.001)
    quick = steps(forward_s=0.003, exposed_s=0.011)
    found = figures(tmp_path, quick, slow)
    assert (found.by_rank[0].wire_s, found.by_rank[0].peers_s) == pytest.approx((0.001, 0.010))
    assert (found.by_rank[1].wire_s, found.by_rank[1].peers_s) == pytest.approx((0.001, 0.0))
    assert found.critical == found.by_rank[1]
    assert found.last_share == {0: 0.0, 1: 1.0}
    assert (found.straggler.rank, found.straggler.part) == (1, "forward")
    assert found.straggler.lost_s == pytest.approx(0.010)
    assert found.step_s == pytest.approx(0.021)
    assert found.samples_per_s == pytest.approx(64 / 0.021)


def test_ranks_that_take_turns_at_being_last_are_no_stragglers(tmp_path):
    turns = [(0.003, 0.011), (0.013, 0.001)]
    one = [step_line(n, forward_s=turns[n % 2][0], exposed_s=turns[n % 2][1]) for n in range(30)]
    other = [step_line(n, forward_s=turns[1 - n % 2][0], exposed_s=turns[1 - n % 2][1]) for n in range(30)]
    found = figures(tmp_path, one, other)
    assert found.straggler is None
    assert found.critical.forward_s == pytest.approx(0.013)  # each step waits for one of them
    assert found.by_rank[0].peers_s == pytest.approx(0.005, rel=0.1)


def test_a_slow_rank_is_found_where_all_are_disturbed(tmp_path):
    noise = [0.040 * (n * 7 % 11) / 10 for n in range(60)]  # what slows both down, in turns more than the rank does
    one = [step_line(n, forward_s=0.003 + noise[n], exposed_s=0.011) for n in range(60)]
    other = [step_line(n, forward_s=0.013 + noise[n], exposed_s=0.001) for n in range(60)]
    found = figures(tmp_path, one, other).straggler
    assert (found.rank, found.part) == (1, "forward")
    assert (found.lost_s, found.took_s - found.usual_s) == pytest.approx((0.010, 0.010))
    rarely = [line if n % 5 < 2 else step_line(n, forward_s=0.003, exposed_s=0.011) for n, line in enumerate(other)]
    assert figures(tmp_path / "rarely", one, rarely).straggler is None


def test_first_steps_and_spikes_are_left_out_of_the_means(tmp_path):
    lines = [step_line(n, forward_s=1.0 if n < 5 or n == 20 else 0.003) for n in range(40)]
    found = figures(tmp_path, lines)
    assert found.samples_per_s == pytest.approx(64 / 0.011)
    assert found.critical.forward_s == pytest.approx(0.003)


def test_time_between_steps_is_other(tmp_path):
    found = figures(tmp_path, steps(interval_s=0.015))
    assert found.critical.other_s == pytest.approx(0.004)
    assert found.critical.total_s == pytest.approx(found.step_s)
    quick, late = steps(interval_s=0.025, exposed_s=0.013), steps(interval_s=0.025, exposed_s=0.001)
    slow = figures(tmp_path, quick, late).straggler
    assert (slow.rank, slow.part, slow.lost_s) == (1, "other", pytest.approx(0.012))


def test_an_engine_that_does_not_tell_what_it_waits_for_has_no_such_parts(tmp_path):
    found = figures(tmp_path, steps(exposed_s=None), steps(exposed_s=None, forward_s=0.004))
    assert (found.critical.exposed_s, found.straggler) == (None, None)
    assert [parts.part("wire", "peers") for parts in found.by_rank.values()] == [0.0, 0.0]
    assert found.critical.forward_s == pytest.approx(0.004)


def test_only_steps_that_all_ranks_have_count(tmp_path):
    late = [step_line(number, forward_s=0.003 if number < 12 else 0.009) for number in range(30)]
    assert figures(tmp_path, late, steps(12)).critical.forward_s == pytest.approx(0.003)
    assert figures(tmp_path / "none", []).by_rank == {}


def test_a_window_has_steps_that_follow_each_other_on_one_clock(tmp_path):
    zero = [timeline_line(4, START + 1.0, own_s=0.006, wait_s=0.004), timeline_line(5, START + 1.010)]
    one = [timeline_line(4, START + 1.001), timeline_line(5, START + 1.010, own_s=0.006, wait_s=0.004)]
    run = read_run(write_run(tmp_path / "run", [[*steps(9), *zero], [*steps(9), *one]]))
    window = find_window(run)
    assert [{rank: each.step for rank, each in step.items()} for step in window] == [{0: 4, 1: 4}, {0: 5, 1: 5}]
    bars = bars_of(run, window[0], START + 1.0)[1]
    assert [part for part, _, _ in bars] == ["forward", "backward", "wire", "other"]
    moments = [moment for _, *both in bars for moment in both]
    assert moments == pytest.approx([0.001, 0.004, 0.004, 0.010, 0.010, 0.011, 0.011, 0.012], abs=1e-6)


def test_a_window_needs_timelines_of_all_ranks(tmp_path):
    assert find_window(read_run(write_run(tmp_path / "run", [[timeline_line(4, START)], steps(3)]))) == []


def test_three_sentences(tmp_path):
    slow = write_run(tmp_path / "slow", [steps(exposed_s=0.011), steps(forward_s=0.013)])
    assert sentences(view_run(slow)) == (
        "digits trains 3,048 samples/s on 2 CPU processes, 21.0 ms a step.",
        "Of a step, 91% is computing (well used): 62% forward, 24% backward, 5% optimizer; the rest is 5% data wait, "
        "5% exchange; the others wait 10.0 ms in each step for rank 1 (forward).",
        "Change first: Rank 1 is slow: it loses 10.0 ms in each step of 21.0 ms, in forward (13.0 ms, usual is 3.0 "
        "ms), and the others wait for it: making rank 1 as fast as the others (check its machine, its data and other "
        "programs there) would give about 1.91 times the throughput.",
    )


def test_a_run_without_cores_is_not_called_well_used(tmp_path):
    machine = {"kind": "machine", "time": START, "cpu_percent": 12.0, "host_cpu_percent": 190.0}
    machine |= {"core_wait_percent": 85.0, "steal_percent": 1.0, "throttled_percent": 0.0}
    lines = [*steps(core_wait_s=0.089, total_s=0.1, interval_s=0.1), machine, machine]
    about = session(provenance={"when": "today", "versions": {}, "machine": {"cores": "2"}, "commits": {}})
    view = view_run(write_run(tmp_path / "run", [lines, lines], [about]))
    assert view.figures.critical.core_wait_s == pytest.approx(0.089)
    assert sentences(view)[1:] == (
        "Of a step, 89% is waiting for a core, as other programs use 1.7 of 2 cores; the rest is 5% backward, 3% "
        "forward, 1% data wait, 1% exchange, 1% optimizer.",
        "Change first: The ranks wait for a core during 89% of the step, as other programs use 1.7 of 2 cores: "
        "stopping them, or reserving cores for the run (taskset), would give at most 9.09 times the throughput.",
    )
    alone = view_run(write_run(tmp_path / "late", [steps(exposed_s=0.09), [*steps(core_wait_s=0.089), machine]]))
    assert sentences(alone)[1].endswith("the others wait 89.0 ms in each step for rank 1 (waiting for a core).")


def test_the_parts_add_up_to_what_computes_and_the_rest_follows(tmp_path):
    parts = {"forward_s": 0.010, "backward_s": 0.043, "optimizer_s": 0.006, "core_wait_s": 0.039, "exposed_s": 0.001}
    view = view_run(write_run(tmp_path / "run", [steps(**parts, total_s=0.1, interval_s=0.1)]))
    assert sentences(view)[1] == (
        "Of a step, 59% is computing: 43% backward, 10% forward, 6% optimizer; the rest can be gained: 39% waiting for "
        "a core, 1% data wait, 1% exchange."
    )


def test_nothing_to_change_is_said(tmp_path):
    lines = steps(data_wait_s=0.0, backward_s=0.1, optimizer_s=0.0)
    folder = write_run(tmp_path / "run", [lines, lines])
    assert sentences(view_run(folder))[2] == "No change is predicted to gain more than 3%."


def test_a_record_without_steps_says_so(tmp_path):
    folder = write_run(tmp_path / "run", [[event_line("error", "RuntimeError: too early", 0)]])
    assert sentences(view_run(folder))[0] == "The record of digits has no step that all ranks have done."
