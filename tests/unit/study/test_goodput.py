"""Which share of the time trains if machines fail, against published figures, figures by hand, and a simulation."""

import random
from dataclasses import replace

import pytest

from lockstep.study.common import console
from lockstep.study.goodput import JobTimes, best_interval_s, predict_goodput, share_of_time
from lockstep.telemetry.cost import Price

MINUTE, HOUR = 60.0, 3600.0
TIMES = JobTimes(step_s=0.5, checkpoint_s=2.0, notice_s=5.0, replacement_s=60.0, copy_s=1.0)


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_best_interval_is_that_of_dalys_paper(mtbf_s, minutes):
    # Its figures 3, 4 and 5, with checkpoints of 5 minutes.
    _, daly_s = best_interval_s(mtbf_s, 5 * MINUTE)
    assert daly_s / MINUTE == pytest.approx(minutes, rel=6e-3)


def test_the_best_interval_by_hand():
    assert best_interval_s(100.0, 2.0) == (20.0, pytest.approx(20 * (1 + 0.1 / 3 + 0.01 / 9) - 2))
    assert best_interval_s(1.0, 2.0) == (2.0, 1.0), "checkpoints that take longer than work between failures"
    assert best_interval_s(100.0, 0.0) == (0.0, 0.0)


def test_no_other_interval_trains_more():
    _, best_s = best_interval_s(100.0, 2.0)
    best = share_of_time(100.0, best_s, 2.0, 10.0)
    assert all(share_of_time(100.0, best_s * factor, 2.0, 10.0) < best for factor in (0.5, 0.9, 1.1, 2.0))


def test_the_share_by_hand():
    # (e^0.12 - 1) e^0.3 / 0.1 is the time that work takes: a tenth of the time between failures, a save, a restart.
    assert share_of_time(100.0, 10.0, 2.0, 30.0) == pytest.approx(0.1 / (0.127496852 * 1.349858808))
    assert share_of_time(1e9, 10.0, 0.0, 0.0) == pytest.approx(1.0)
    assert share_of_time(1e9, 10.0, 2.5, 0.0) == pytest.approx(0.8)
    assert share_of_time(1e-3, 10.0, 2.0, 3600.0) == 0.0, "no overflow"


def test_the_share_is_that_of_a_simulation():
    draw, now, done, failure = random.Random(0), 0.0, 0.0, 0.0
    for _ in range(40_000):
        while (left := failure - now) < 12.0:  # lost, and down for 30 s, in which failures begin that again
            now = failure
            failure = now + draw.expovariate(1 / 100.0)
            while failure - now < 30.0:
                now = failure
                failure = now + draw.expovariate(1 / 100.0)
            now += 30.0
        assert left >= 12.0
        now, done = now + 12.0, done + 10.0
    assert done / now == pytest.approx(share_of_time(100.0, 10.0, 2.0, 30.0), rel=0.01)


def test_a_published_run_of_torchft():
    # 300 GPUs, steps of 10.9 s, a failure every 60 s: 5145 of 6249 steps counted. A step that fails ends all the same.
    assert share_of_time(60.0, 10.9, 0.0, 10.9 / 2) == pytest.approx(5145 / 6249, rel=0.02)


def test_the_ways_to_go_on():
    found = predict_goodput(TIMES, 1000 * HOUR, 100)
    assert found.mtbf_s == 36_000.0, "a tenth of what a hundredth of the machines has"
    assert (found.young_s, found.best_s) == best_interval_s(36_000.0, 2.0)
    assert found.every_s == pytest.approx([found.best_s * factor for factor in (0.25, 0.5, 1, 2, 4)])
    writes = found.best_s / (found.best_s + 2.0)
    assert {way: share[2] for way, share in found.shares.items()} == pytest.approx(
        {
            "restart": share_of_time(36_000.0, found.best_s, 2.0, 5.0 + 60.0 + 2.0),
            "in place": writes * share_of_time(36_000.0, 0.5, 0.0, 5.0 + 60.0 + 1.0),
            # In 60 s of 36,000 another machine fails, and the spare is late by half of them.
            "spare": writes * share_of_time(36_000.0, 0.5, 0.0, 5.0 + 1.0 + 0.05),
        },
        rel=1e-5,
    )
    lost = {way: 1000 * (1 - share[2]) for way, share in found.shares.items()}
    assert found.lost == pytest.approx({**lost, "spare": 1000 * (1 - found.shares["spare"][2] * 100 / 101)})
    assert found.lost["in place"] < found.lost["restart"] < 15 < found.lost["spare"]


def test_without_a_spare_in_time_it_is_no_faster():
    slow = predict_goodput(replace(TIMES, replacement_s=3600.0), 10.0 * 100, 100)
    assert slow.shares["spare"][2] == pytest.approx(slow.shares["in place"][2] * 2.718281828, rel=1e-6)


def test_no_interval_is_shorter_than_a_step():
    found = predict_goodput(replace(TIMES, checkpoint_s=0.0), HOUR, 1)
    assert (found.young_s, found.best_s, found.every_s) == (0.5, 0.5, [0.5, 0.5, 0.5, 1.0, 2.0])


def test_table_and_sentence(capsys):
    found = predict_goodput(TIMES, 1000 * HOUR, 100)
    console().print(found.table(Price(2.0, "EUR")).rich())
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert " ".join(lines[0]) == "Goodput: a machine fails every 1000 h, the job every 10:00 h"
    assert lines[1] == ["checkpoint", "every", "restart", "in", "place", "spare"]
    assert [line[0] for line in lines[3:8]] == ["1:35", "3:09", "6:18", "12:36", "25:13"]
    assert lines[5] == ["6:18", "min", "98.77%", "99.29%", "99.46%"]
    assert lines[8] == ["lost", "of", "1,000", "device-hours,", "EUR", "24.69", "14.18", "30.56"]
    console().print(found.table(None).rich())
    assert capsys.readouterr().out.split()[-7:] == ["lost", "of", "1,000", "device-hours", "12.34", "7.09", "15.28"]
    assert found.sentence() == (
        "Checkpoint every 6:18 min (Young: 6:19 min). Share that trains: restart 98.77%, in place 99.29%, spare "
        "99.46%. Writing one takes 2.00 s, a replacement 1:00 min, to send it the state 1.00 s; a lost machine is "
        "noticed after 5.00 s."
    )
