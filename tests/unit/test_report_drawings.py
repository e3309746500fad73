"""What the report draws beside the old figures: a run on one device, curves, loads over time, bandwidth by bucket."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

from lockstep.cli.studies import report
from lockstep.study.drawing import drawing_style
from lockstep.study.report.plots import devices_by_part, draw, draw_loads
from lockstep.study.report.run_page import figure_tables
from lockstep.study.report.view import compare_with_baseline, sentences, view_run
from tests.unit.report_planted import MACHINE, START, event_line, session, step_line, steps, timeline_line, write_run

GPU = {"gpu_percent": 90.0, "gpu_power_w": 300.0, "gpu_temperature_c": 60.0, "num_workers": 2}


def machine_lines(**figures):
    """Return lines of five moments, of which the first is from before any step."""
    return [{**MACHINE, "time": START - 2.0 + 2.0 * place, **figures} for place in range(5)]


def single(folder, **changes):
    """Return a run on one device, which takes 20 ms a step."""
    settings = {"strategy": "single", "seed": 0, **changes}
    lines = steps(forward_s=0.012, exposed_s=0.0, interval_s=0.020)
    return view_run(write_run(folder, [lines], [session(1, settings=settings)]))


def double(folder, loss=0.0):
    """Return the same on two, in 11 ms; one loss is off by ``loss``."""
    lines = steps()
    lines[7]["loss"] += loss
    return view_run(write_run(folder, [lines, lines], [session(2, settings={"strategy": "ddp", "seed": 0})]))


def test_a_run_on_one_device_beside_it_tells_whether_it_is_the_same_and_how_much_more_devices_gave(tmp_path):
    view = double(tmp_path / "two", loss=0.25e-6)
    beside = compare_with_baseline(view, single(tmp_path / "one"))
    assert beside.loss_note == (
        "Over 30 steps, the loss and that on one device begin alike and differ by 1e-06 of it at most, in step 8."
    )
    assert beside.scaling == "1.82 times as fast as one device, 91% of linear"
    assert sentences(view, beside)[0] == (
        "digits trains 5,818 samples/s on 2 CPU processes, 11 ms a step; 1.82 times as fast as one device, 91% of "
        "linear."
    )
    slow = view_run(write_run(tmp_path / "slow", [steps(interval_s=0.016)] * 2))
    assert (
        compare_with_baseline(slow, beside.view).scaling
        == "1.25 times as fast as one device, 62% of linear (80% is good)"
    )
    other = double(tmp_path / "wrong", loss=0.1)
    other.run.ranks[0].steps[0] = replace(other.run.ranks[0].steps[0], loss=1.9)
    assert compare_with_baseline(other, beside.view).loss_note == (
        "Over 30 steps, the loss and that on one device differ by 5.00% in step 1 already (lockstep verify says why), "
        "by 28.57% at most, in step 8."
    )
    same = compare_with_baseline(double(tmp_path / "same"), single(tmp_path / "other", seed=3))
    assert same.loss_note == (
        "Over 30 steps, the loss and that on one device are the same to the bit; it is another training run: seed 0 "
        "here, 3 there."
    )


def test_the_command_takes_it(tmp_path):
    double(tmp_path / "two"), single(tmp_path / "one")
    done = CliRunner().invoke(report, [str(tmp_path / "two"), "--against", str(tmp_path / "one")])
    assert done.output.splitlines()[-2] == "Over 30 steps, the loss and that on one device are the same to the bit."
    page = (tmp_path / "two" / "report.html").read_text()
    assert page.count("Over 30 steps, the loss and that on one device are the same to the bit.") == 1
    assert "one device: from 2 to 0.06667" in page


def test_devices_are_counted_by_what_they_do(tmp_path):
    slow = steps(forward_s=0.013, exposed_s=0.001)
    quick = steps(forward_s=0.003, exposed_s=0.011)
    view = view_run(write_run(tmp_path / "run", [quick, slow]))
    found = devices_by_part(view.figures)
    assert sum(found.values()) == pytest.approx(2.0)
    assert found["peers_s"] == pytest.approx(10 / 21)
    with drawing_style():
        first = draw(view)[0]
    assert first.heading == "Why 2 devices are not 2 times as fast"
    assert first.note == (
        "On average 1.2 of 2 devices compute forward and backward; most of the rest goes into waiting for other ranks "
        "(0.48)."
    )


def test_tokens_are_counted_and_called_what_the_task_calls_them(tmp_path):
    lines = [step_line(number, counts=6400.0) for number in range(30)]
    view = view_run(write_run(tmp_path / "run", [lines], [session(1, counts="words")]))
    assert sentences(view)[0] == "digits trains 5,818 samples/s (581,818 words/s) on 1 CPU process, 11 ms a step."
    some = [step_line(number, counts=None if number == 9 else 6400.0) for number in range(30)]
    assert view_run(write_run(tmp_path / "some", [some])).figures.tokens_per_s is None


def headings(view):
    with drawing_style():
        return {plot.heading: plot for plot in draw(view)}


def test_curves_are_drawn_where_there_is_something_to_see(tmp_path):
    lines = [
        step_line(number, learning_rate=0.1 / (number + 1), grad_norm=5.0 + (number == 12)) for number in range(30)
    ]
    found = headings(view_run(write_run(tmp_path / "run", [lines])))
    assert found["Learning rate"].alt == "Curve of the learning rate over the steps: from 0.1 to 0.00333."
    assert found["Gradient norm"].alt == (
        "Curve of the norm of the gradient over the steps: last 5, largest 6 in step 13."
    )
    plain = view_run(write_run(tmp_path / "plain", [steps()]))
    assert {"Learning rate", "Gradient norm"}.isdisjoint(headings(plain))


def test_loads_are_drawn_over_time_and_their_extremes_are_named(tmp_path):
    ranks = [[*steps(), *machine_lines(**GPU)], [*steps(), *machine_lines(**{**GPU, "gpu_percent": 40.0})]]
    view = view_run(write_run(tmp_path / "run", ranks))
    with drawing_style():
        plot = draw_loads(view)
    assert plot.heading == "Devices over time"
    assert "GPU busy, %: from 40 (rank 1) to 90 (rank 0)" in plot.alt
    (table,) = [table for table in figure_tables(view) if table.heading == "Each figure over the ranks"]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["GPU busy, %"] == ["40 (rank 1)", "65", "90 (rank 0)"]
    assert rows["process, % of a core"] == ["95 (rank 0)", "95", "95 (rank 1)"]
    assert rows["comes last, % of steps"][0] == "0 (rank 1)"
    many = view_run(write_run(tmp_path / "many", [[*steps(), *machine_lines()]] * 6))
    with drawing_style():
        assert draw_loads(many).heading == "Processes over time"


def test_bandwidth_is_listed_by_bucket(tmp_path):
    buckets = [(0, 2**20, 0.001, 0.002, 0.004), (1, 2**19, 0.003, 0.005, 0.007)]
    lanes = [timeline_line(number, START + number, buckets=buckets) for number in (4, 5)]
    view = view_run(write_run(tmp_path / "run", [[*steps(), *lanes]] * 2))
    (table,) = [table for table in figure_tables(view) if table.heading == "Buckets of gradients on their way"]
    assert table.rows == [["0", "1", "2", "2", "2", "0.524"], ["1", "0.5", "2", "2", "2", "0.262"]]
    assert headings(view)["Communication"].note == "In each step, 1.5 MiB of gradients travel in 2 buckets."


def test_restarts_skipped_steps_and_profiles_are_marked_on_the_throughput(tmp_path):
    kinds = ("restart", "skipped", "profile", "spike")
    lines = [*steps(), *(event_line(kind, "text", 9 + place) for place, kind in enumerate(kinds))]
    plot = headings(view_run(write_run(tmp_path / "run", [lines])))["Throughput and events"]
    assert "; 1 x restart, 1 x skipped, 1 x profiled, 1 x slow step." in plot.alt
