"""What rank zero shows, and how fast it says the run goes."""

import io
import re

import pytest
import torch
from rich.console import Console

from lockstep.train import progress
from lockstep.train.history import History
from lockstep.train.progress import Bar, Lines, Silence, format_metrics, make_display
from lockstep.train.step_record import StepRecord
from lockstep.train.stopwatch import Stopwatch


def test_lines_in_a_pipe(capsys):
    display = make_display(20, 10, silent=False)
    assert isinstance(display, Lines)
    assert not display.is_due()
    display.every_s = 0.0
    assert display.is_due()
    display.show(15, 0.25, 1234.5)
    display.say("said [bold]as it is[/]")
    display.close()
    shown, said = capsys.readouterr().out.splitlines()
    assert shown == "step 15/20  loss 0.2500  1,234 samples/s  0 s left"
    assert said == "said [bold]as it is[/]"


def test_time_left_counts_only_the_steps_of_this_call(monkeypatch):
    now = iter([100.0, 104.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    assert Lines(num_steps=20, first_step=10).left_s(12) == 16.0


def test_nothing_when_silent(capsys):
    display = make_display(20, 0, silent=True)
    assert isinstance(display, Silence)
    assert not display.is_due()
    display.show(1, 0.5, 3.0)
    display.say("nothing")
    display.close()
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("rich.progress.get_console", lambda: console)
    display = Bar(20, 10)
    display.show(15, 0.25, 1234.5)
    display.say("said [bold]as it is[/]")
    display._progress.refresh()
    display.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert "15/20" in text
    assert "loss 0.2500  1,234 samples/s" in text
    assert "said [bold]as it is[/]\n" in text


def test_metrics_as_words():
    assert format_metrics({"loss": 0.5, "accuracy": 0.98765}) == "loss 0.5000  accuracy 0.9877"


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr("lockstep.train.history.time.perf_counter", lambda: now[0])
    return now


def record(loss, num_samples):
    watch = Stopwatch(torch.device("cpu"))
    return StepRecord(0, num_samples, torch.tensor(loss, dtype=torch.float64), None, True, watch)


def test_throughput_leaves_out_the_first_step_and_the_pauses(clock):
    history = History()
    for took_s, pause_s in ((50.0, 0.0), (2.0, 30.0), (3.0, 0.0)):
        history.start()
        clock[0] += took_s
        history.add(record(0.5, 10))
        clock[0] += pause_s
    assert history.samples_per_s == 20 / 5.0
    assert history.num_samples == 30


def test_throughput_of_a_single_step_is_that_step(clock):
    history = History()
    history.start()
    clock[0] += 4.0
    history.add(record(0.5, 10))
    assert history.samples_per_s == 2.5


def test_losses_come_back_in_order_and_exactly():
    history = History()
    losses = [1 / (step + 1) for step in range(600)]
    for loss in losses:
        history.start()
        history.add(record(loss, 1))
    assert history.read() == losses
