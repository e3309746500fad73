"""What the report draws beside the old figures: a run on one device, curves, loads over time, bandwidth by bucket."""

import re
from dataclasses import replace

from click.testing import CliRunner

from lockstep.cli.studies import report
from lockstep.study.drawing import drawing_style
from lockstep.study.report import run_page
from lockstep.study.report.run_page import _curve, draw, ranks_table
from lockstep.study.report.view import compare_with_baseline, sentences, view_run
from tests.unit.study.report.report_planted import MACHINE, START, event_line, session, step_line, steps, write_run

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
        "Over 30 steps, the losses of this run and of that on one device begin with the same value and differ by at "
        "most 1e-07 of the first loss, in step 8."
    )
    assert beside.scaling == "1.82 times as fast as one device, 91% of linear"
    assert sentences(view, beside)[0] == (
        "digits trains 5,818 samples/s on 2 CPU processes, 11.0 ms a step; 1.82 times as fast as one device, 91% of "
        "linear."
    )
    slow = view_run(write_run(tmp_path / "slow", [steps(interval_s=0.016)] * 2))
    assert compare_with_baseline(slow, beside.view).scaling == "1.25 times as fast as one device, 62% of linear"
    other = double(tmp_path / "wrong", loss=0.15)
    other.run.ranks[0].steps[0] = replace(other.run.ranks[0].steps[0], loss=1.9)
    assert compare_with_baseline(other, beside.view).loss_note == (
        "Over 30 steps, the losses of this run and of that on one device differ by 5.00% of the first loss in step 1 "
        "(lockstep verify finds the cause), by at most 7.50% of the first loss, in step 8."
    )
    same = compare_with_baseline(double(tmp_path / "same"), single(tmp_path / "other", seed=3))
    assert same.loss_note == (
        "Over 30 steps, the losses of this run and of that on one device are bitwise equal; the settings differ: seed "
        "0 here, 3 there."
    )


def test_the_command_takes_it_and_draws_both_losses(tmp_path, monkeypatch):
    def draw_loss(view, baseline):
        return [_curve(view, baseline, "Loss", "loss", lambda step: step.loss)]

    monkeypatch.setattr(run_page, "draw", draw_loss)  # one drawing tells: each takes its time
    double(tmp_path / "two"), single(tmp_path / "one")
    done = CliRunner().invoke(report, [str(tmp_path / "two"), "--against", str(tmp_path / "one")])
    assert (
        done.output.splitlines()[-2]
        == "Over 30 steps, the losses of this run and of that on one device are bitwise equal."
    )
    page = (tmp_path / "two" / "report.html").read_text()
    assert page.count("Over 30 steps, the losses of this run and of that on one device are bitwise equal.") == 1
    assert "one device: from 2 to 0.0667" in page


def test_tokens_are_counted_and_called_what_the_task_calls_them(tmp_path):
    lines = [step_line(number, counts=6400.0) for number in range(30)]
    view = view_run(write_run(tmp_path / "run", [lines], [session(1, counts="words")]))
    assert sentences(view)[0] == "digits trains 5,818 samples/s (581,818 words/s) on 1 CPU process, 11.0 ms a step."
    some = [step_line(number, counts=None if number == 9 else 6400.0) for number in range(30)]
    assert view_run(write_run(tmp_path / "some", [some])).figures.tokens_per_s is None


def headings(*views):
    with drawing_style():
        return {re.search("<figcaption>(.*?)</figcaption>", plot)[1]: plot for plot in draw(*views)}


def test_curves_are_drawn_where_there_is_something_to_see(tmp_path):
    lines = [
        step_line(number, learning_rate=0.1 / (number + 1), grad_norm=5.0 + (number == 12)) for number in range(30)
    ]
    found = headings(view_run(write_run(tmp_path / "run", [lines])))
    assert (
        "Curve of the learning rate over the steps: from 0.1 to 0.00333, between 0.00333 and 0.1."
        in found["Learning rate"]
    )
    assert "Curve of the gradient norm over the steps: from 5 to 5, between 5 and 6." in found["Gradient norm"]
    plain = view_run(write_run(tmp_path / "plain", [steps()]))
    with drawing_style():
        assert _curve(plain, None, "Learning rate", "learning rate", lambda step: step.learning_rate) is None


def test_evaluations_are_drawn_beside_the_training_loss_and_by_metric(tmp_path):
    evaluated = [
        {**event_line("evaluation", "", step), "metrics": {"loss": 1.0 / step, "<b>": step / 100, "same": 1.0}}
        for step in (10, 20)
    ]
    view = view_run(write_run(tmp_path / "run", [[*steps(), *evaluated]]))
    found = headings(view)
    assert list(found) == ["Where the time of a step goes", "Loss", "Evaluation: &lt;b&gt;"]
    loss = "Curve of the loss over the steps: from 2 to 0.0667, between 0.0667 and 2; evaluation: from 0.1 to 0.05, "
    assert loss in found["Loss"] and ">evaluation</text>" in found["Loss"]
    assert "evaluation: from 0.1 to 0.2, between 0.1 and 0.2." in found["Evaluation: &lt;b&gt;"]
    both = headings(view, compare_with_baseline(view, view))["Loss"]
    names = ("this run", "this run, evaluation", "one device", "one device, evaluation")
    assert [both.count(f">{name}</text>") for name in names] == [1, 1, 1, 1]


def test_each_rank_has_a_row_with_its_parts_memory_and_load(tmp_path):
    ranks = [[*steps(), *machine_lines(**GPU)], [*steps(), *machine_lines(**{**GPU, "gpu_percent": 40.0})]]
    table = ranks_table(view_run(write_run(tmp_path / "run", ranks)))
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["GPU busy, %"] for row in rows] == ["90", "40"]
    assert [row["CPU, % of a core"] for row in rows] == ["95", "95"]
    assert [row["peak MiB"] for row in rows] == ["381", "381"]
    assert [row["comes last"] for row in rows] == ["100%", "0%"]
    assert [row["forward"] for row in rows] == ["3.00", "3.00"]
