"""What rank zero shows, and how fast it says the run goes."""

import sys
from dataclasses import replace

import pytest
import torch

from lockstep.telemetry import live_view
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.live_view import Display
from lockstep.telemetry.recorder import StepTimer
from lockstep.train.result import Throughput
from lockstep.train.trainer import StepRecord

SNAPSHOT = Snapshot(time=0.0, step=15, num_steps=20, loss=0.25, samples_per_s=1234.5, left_s=3.0)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """Neither CI nor a launcher."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("LOCKSTEP_RUN_DIR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_lines_in_a_pipe(capsys, monkeypatch):
    display = Display(silent=False)
    display.update(SNAPSHOT)
    monkeypatch.setattr(live_view, "_LINE_S", 0.0)
    display.update(SNAPSHOT)
    display.update(replace(SNAPSHOT, left_s=2.0))
    display.log("said [bold]as it is[/]")
    display.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 15/20  loss 0.2500  1,234 samples/s  3 s left",
        "step 15/20  loss 0.2500  1,234 samples/s  2 s left",
        "said [bold]as it is[/]",
    ]


def test_nothing_when_silent(capsys):
    display = Display("live", silent=True)
    display.update(SNAPSHOT)
    display.log("nothing")
    display.close()
    assert capsys.readouterr() == ("", "")


def test_no_view_but_what_stays(capsys):
    display = Display("none", silent=False)
    display.update(SNAPSHOT)
    display.log("said")
    assert capsys.readouterr().out == "said\n"


def test_a_view_where_there_is_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    display = Display(silent=False)
    display.update(SNAPSHOT)
    display.log("said")
    display.close()
    assert "15/20" in capsys.readouterr().out
    for view, name, value in (
        ("auto", "CI", "true"),
        ("auto", "TERM", "dumb"),
        ("live", "TERM", ""),
        ("lines", "A", ""),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            display = Display(view, silent=False)
            display.update(SNAPSHOT)  # a view would draw it at once
            display.close()
    assert capsys.readouterr().out == ""


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr("lockstep.train.result.time.perf_counter", lambda: now[0])
    return now


def record(loss, num_samples, timer):
    return StepRecord(0, num_samples, torch.tensor(loss, dtype=torch.float64), None, True, None, False, timer)


def test_throughput_leaves_out_the_first_step_and_the_pauses(clock):
    history = Throughput()
    for took_s, pause_s in ((50.0, 0.0), (2.0, 30.0), (3.0, 0.0)):
        timer = StepTimer(torch.device("cpu"))
        clock[0] += took_s
        history.add(record(0.5, 10, timer))
        clock[0] += pause_s
    assert history.samples_per_s == 20 / 5.0
    assert history.num_samples == 30


def test_throughput_of_a_single_step_is_that_step(clock):
    history = Throughput()
    timer = StepTimer(torch.device("cpu"))
    clock[0] += 4.0
    history.add(record(0.5, 10, timer))
    assert history.samples_per_s == 2.5


@pytest.mark.parametrize(
    ("first_s", "compiles", "text"),
    [(91.8, True, ", of which the first took 91.8 s (compiling)"), (91.8, False, ""), (0.1, True, "")],
)
def test_a_first_step_that_compiled_is_shown_apart(clock, monkeypatch, first_s, compiles, text):
    monkeypatch.setattr("lockstep.train.result.has_compiled", lambda: compiles)
    history = Throughput()
    for took_s in (first_s, 0.1, 0.1):
        timer = StepTimer(torch.device("cpu"))
        clock[0] += took_s
        history.add(record(0.5, 10, timer))
    assert history.compiling() == text


def test_a_rank_that_takes_the_place_of_a_lost_one_continues_the_throughput(clock):
    history, other = Throughput(), Throughput()
    for took_s in (50.0, 2.0, 3.0):
        timer = StepTimer(torch.device("cpu"))
        clock[0] += took_s
        history.add(record(0.5, 10, timer))
    other.load(history.state())
    assert (other.samples_per_s, other.num_samples, other.losses) == (4.0, 30, [0.5] * 3)
    timer = StepTimer(torch.device("cpu"))
    clock[0] += 10.0
    other.add(record(0.25, 30, timer))
    assert (other.samples_per_s, other.num_samples, other.read()) == (60 / 17.5, 60, [0.5, 0.5, 0.5, 0.25])


def test_losses_come_back_in_order_and_exactly():
    history = Throughput()
    losses = [1 / (step + 1) for step in range(600)]
    for loss in losses:
        history.add(record(loss, 1, StepTimer(torch.device("cpu"))))
    assert history.read() == losses
