"""What the report plots: curves over steps and time, events, other runs, and the parts of a step."""

import json
import re
from dataclasses import replace
from html import escape

from click.testing import CliRunner

from lockstep.cli.studies import report
from lockstep.study.drawing import STYLE, items
from lockstep.study.report import run_page
from lockstep.study.report.run_page import MOST_POINTS, draw, ranks_table
from lockstep.study.report.view import compare_with_baseline, sentences, view_run
from tests.unit.study.report.report_planted import (
    MACHINE,
    START,
    event_line,
    session,
    step_line,
    steps,
    timeline_line,
    write_run,
)

GPU = {"gpu_percent": 90.0, "gpu_power_w": 300.0, "gpu_temperature_c": 60.0, "num_workers": 2}


def machine_lines(**figures):
    """Return lines of five moments, of which the first is from before any step."""
    return [{**MACHINE, "time": START - 2.0 + 2.0 * place, **figures} for place in range(5)]


def single(folder, **changes):
    """Return a run on one device, which takes 20 ms a step."""
    settings = {"strategy": "single", "seed": 0, **changes}
    lines = steps(forward_s=0.012, exposed_s=0.0, interval_s=0.020, core_wait_s=0.0)
    return view_run(write_run(folder, [lines], [session(1, settings=settings)]))


def double(folder, loss=0.0):
    """Return the same on two, in 11 ms; one loss is off by ``loss``."""
    lines = steps(core_wait_s=0.0)
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
    assert sentences(view, [beside])[0] == (
        "digits trains 5,818 samples/s on 2 CPU processes, 11.0 ms a step; 1.82 times as fast as one device, 91% of "
        "linear."
    )
    unknown = view_run(write_run(tmp_path / "slow", [steps(interval_s=0.016)] * 2))
    assert compare_with_baseline(unknown, beside.view).scaling == (
        "1.25 times as fast as one device, 62% of linear (if both machines were quiet)"
    )
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


def test_no_line_of_the_page_ends_within_a_number():
    assert items(["at most 5e-08 of <b>"]) == '<li>at most <span class="number">5e-08</span> of &lt;b&gt;</li>'
    assert ".number { white-space: nowrap; }" in STYLE


def test_the_command_takes_several_and_draws_all_losses(tmp_path, monkeypatch):
    double(tmp_path / "two"), single(tmp_path / "one"), double(tmp_path / "<i>other", loss=0.15)
    one, other = str(tmp_path / "one"), str(tmp_path / "<i>other")
    done = CliRunner().invoke(report, [str(tmp_path / "two"), "--against", one, "--against", other])
    notes = [
        f"Over 30 steps, the losses of this run and of that on one device ({one}) are bitwise equal.",
        f"Over 30 steps, the losses of this run and of that on 2 devices ({other}) begin with the same value and "
        "differ by at most 7.50% of the first loss, in step 8.",
    ]
    out = done.output.splitlines()
    assert out[0] == (
        "digits trains 5,818 samples/s on 2 CPU processes, 11.0 ms a step; 1.82 times as fast as one device "
        f"({one}), 91% of linear; 1.00 times as fast as 2 devices ({other})."
    )
    assert out[-3:-1] == notes
    page = (tmp_path / "two" / "report.html").read_text()
    assert [page.count(f"<li>{escape(note)}</li>") for note in notes] == [1, 1]
    names = [escape(name) for name in ("this run", f"one device ({one})", f"2 devices ({other})")]
    assert [page.count(f">{name}</th>") for name in names] == [1, 1, 1]
    loss = plots(page)["Loss"]["data"]
    # Tags in a name would be interpreted by plotly, and by the legend.
    assert [trace["name"] for trace in loss] == names and page.count("<i>other") == 0
    assert [trace["y"][7] for trace in loss] == [0.25, 0.25, 0.4]
    assert len({trace["line"]["color"] for trace in loss}) == 3
    assert run_page.report(tmp_path / "two", against=one).baselines[0].name == "one device"
    assert [each.name for each in run_page.report(tmp_path / "two", against=[one, other]).baselines] == [
        f"one device ({one})",
        f"2 devices ({other})",
    ]


def test_tokens_are_counted_and_called_what_the_task_calls_them(tmp_path):
    lines = [step_line(number, counts=6400.0) for number in range(30)]
    view = view_run(write_run(tmp_path / "run", [lines], [session(1, counts="words")]))
    assert sentences(view)[0] == "digits trains 5,818 samples/s (581,818 words/s) on 1 CPU process, 11.0 ms a step."
    some = [step_line(number, counts=None if number == 9 else 6400.0) for number in range(30)]
    assert view_run(write_run(tmp_path / "some", [some])).figures.tokens_per_s is None


def plots(page):
    """Return what plotly draws, and the description, by heading."""
    pattern = r'<figure.*?<figcaption>(.*?)</figcaption>.*?aria-label="(.*?)".*?json">(.*?)</script></figure>'
    return {heading: {**json.loads(data), "alt": alt} for heading, alt, data in re.findall(pattern, page, re.DOTALL)}


def drawn(view, *baselines):
    return plots("".join(draw(view, baselines)))


def trace_of(plot, name):
    return next(trace for trace in plot["data"] if trace["name"] == name)


def test_curves_are_drawn_of_all_that_is_known(tmp_path):
    lines = [
        step_line(number, learning_rate=0.1 / (number + 1), grad_norm=5.0 + (number == 12), logged={"<b>": 3.0})
        for number in range(30)
    ]
    found = drawn(view_run(write_run(tmp_path / "run", [lines])))
    assert list(found) == [
        *("Where the time of a step goes", "Loss", "Throughput", "Learning rate", "Gradient norm", "Logged: &lt;b&gt;")
    ]
    rate = found["Learning rate"]
    assert rate["alt"] == "Learning rate over the steps: from 0.1 to 0.00333, between 0.00333 and 0.1."
    assert rate["data"][0]["x"][:3] == [1, 2, 3] and rate["data"][0]["y"][:3] == [0.1, 0.05, 0.033333]
    norm = "Gradient norm over the steps: from 5 to 5, between 5 and 6."
    assert found["Gradient norm"]["alt"] == norm
    # Around a value that never changes, its axis begins with zero.
    assert found["Logged: &lt;b&gt;"]["layout"]["yaxis"]["range"] == [0, 6]


def test_evaluations_are_drawn_beside_the_training_loss_and_by_metric(tmp_path):
    evaluated = [
        {**event_line("evaluation", "", step), "metrics": {"loss": 1.0 / step, "<b>": step / 100, "same": 1.0}}
        for step in (10, 20)
    ]
    view = view_run(write_run(tmp_path / "run", [[*steps(), *evaluated]]))
    found = drawn(view)
    assert [name for name in found if name.startswith("Eval")] == ["Evaluation: &lt;b&gt;", "Evaluation: same"]
    assert found["Loss"]["alt"] == (
        "Loss over the steps: from 2 to 0.0667, between 0.0667 and 2; evaluation: from 0.1 to 0.05, "
        "between 0.05 and 0.1."
    )
    assert [(trace["name"], trace["mode"]) for trace in found["Loss"]["data"]] == [
        ("training", "lines"),
        ("evaluation", "lines+markers"),
    ]
    assert trace_of(found["Evaluation: &lt;b&gt;"], "evaluation")["y"] == [0.1, 0.2]
    both = drawn(view, compare_with_baseline(view, view))["Loss"]["data"]
    names = ["this run", "this run, evaluation", "one device", "one device, evaluation", "evaluation"]
    assert [trace["name"] for trace in both] == names


def test_memory_and_load_are_drawn_over_the_time(tmp_path, monkeypatch):
    ranks = [
        [*steps(), *machine_lines(**GPU, core_wait_percent=0.0)],
        [*steps(), *machine_lines(**{**GPU, "gpu_percent": 40.0, "rss_bytes": 2**20})],
    ]
    view = view_run(write_run(tmp_path / "run", ranks))
    found = drawn(view)
    names = ["Memory of each process", "CPU", "GPU busy"]  # but nothing that is always 0
    assert list(found)[-3:] == names
    rank = trace_of(found["Memory of each process"], "rank 1")
    assert (rank["x"], rank["y"]) == ([2.0, 4.0, 6.0, 8.0], [1.0] * 4)
    assert found["GPU busy"]["alt"] == (
        "GPU busy over the seconds: rank 0: from 90 to 90, between 90 and 90; rank 1: from 40 to 40, between 40 and 40."
    )
    assert found["Throughput"]["layout"]["yaxis"]["exponentformat"] == "SI"
    monkeypatch.setattr(run_page, "_SHORT_S", 0.0)
    rank = trace_of(drawn(view)["Memory of each process"], "rank 1")
    assert rank["x"] == [0.0333, 0.0667, 0.1, 0.1333]
    both = drawn(view, compare_with_baseline(view, view))["GPU busy"]["data"]
    assert [(trace["name"], trace["y"]) for trace in both] == [("this run", [65] * 4), ("2 devices", [65] * 4)]


def test_events_are_marked_on_the_curves(tmp_path):
    lost = event_line("recovery", "<i>rank 1</i>\nwas lost", 12, 1.5)
    events = [event_line("checkpoint", "saved", 10, 0.2), lost, event_line("remark", "no mark", 13), MACHINE]
    found = drawn(view_run(write_run(tmp_path / "run", [[*steps(), *events, *machine_lines()]])))
    loss = found["Loss"]
    assert loss["alt"].endswith(" Marked: recovery (1), checkpoint (1).")
    assert [trace["name"] for trace in loss["data"]] == ["training", "recovery", "checkpoint"]
    recovery, checkpoint = loss["data"][1:]
    assert (recovery["x"], recovery["y"], recovery["yaxis"]) == ([12, 12, None], [0, 1, None], "y2")
    assert recovery["text"][0] == "recovery after step 12: &lt;i&gt;rank 1&lt;/i&gt; was lost"
    assert (checkpoint["x"], checkpoint["y"]) == ([10, 10, None], [0, 0.08, None])
    over_time = trace_of(found["CPU"], "recovery")["x"]
    assert over_time == [0.132, 0.132, None]  # 12 steps of 11 ms


def test_long_curves_are_means_of_bins_without_what_json_has_not(tmp_path):
    lines = [step_line(number, loss="nan" if number == 2 else float(number)) for number in range(2 * MOST_POINTS)]
    (loss,) = drawn(view_run(write_run(tmp_path / "run", [lines])))["Loss"]["data"]
    assert len(loss["x"]) == MOST_POINTS
    assert (loss["x"][:3], loss["y"][:3]) == ([1.5, 3.5, 5.5], [0.5, None, 4.5])


def test_bars_and_timeline_have_the_same_parts(tmp_path):
    # Of 6 ms of backward, 2 were waiting for a core; rank 1 waited 3 ms for rank 0, then both 1 ms for the exchange.
    times = {"data_wait_s": 0.0, "backward_s": 0.004, "optimizer_s": 0.0, "core_wait_s": 0.002}
    ranks = [
        [
            *steps(9, exposed_s=wait_s, **times, interval_s=0.014, total_s=0.013),
            *[timeline_line(4, START + 0.1, own_s=own_s, wait_s=wait_s, buckets=[(0, 2**20, 0.007, own_s, 0.01)])],
        ]
        for own_s, wait_s in ((0.009, 0.001), (0.009, 0.004))
    ]
    found = drawn(view_run(write_run(tmp_path / "run", ranks)))
    bars, timeline = found["Where the time of a step goes"], found["Timeline"]
    labels = {trace["name"]: trace["marker"] for trace in bars["data"]}
    shared = {trace["name"]: trace["marker"] for trace in timeline["data"] if trace["name"] in labels}
    assert list(shared) == ["forward", "backward", "exchange", "waiting for ranks", "waiting for a core", "other"]
    assert all(labels[name] == look for name, look in shared.items())
    assert [trace["name"] for trace in timeline["data"][-2:]] == ["bucket, not sent", "bucket"]
    assert timeline["layout"]["yaxis"]["ticktext"] == ["<b>step 5</b>", "rank 0", "rank 1"]
    traces = {name: trace_of(timeline, name) for name in shared if name != "forward"}
    spans = {name: [*zip(trace["base"], trace["x"], strict=True)] for name, trace in traces.items()}
    assert spans == {
        "backward": [(3, 4), (3, 4)],
        "waiting for a core": [(7, 2), (7, 2)],
        "waiting for ranks": [(9, 3)],
        "exchange": [(9, 1), (12, 1)],
        "other": [(10, 4), (13, 1)],
    }
    assert "Waiting for a core is the end of each phase: only its sum" in "".join(draw(view_run(tmp_path / "run")))


def test_each_rank_has_a_row_with_its_parts_memory_and_load(tmp_path):
    ranks = [[*steps(), *machine_lines(**GPU)], [*steps(), *machine_lines(**{**GPU, "gpu_percent": 40.0})]]
    table = ranks_table(view_run(write_run(tmp_path / "run", ranks)))
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["GPU busy, %"] for row in rows] == ["90", "40"]
    assert [row["CPU, % of a core"] for row in rows] == ["95", "95"]
    assert [row["peak MiB"] for row in rows] == ["381", "381"]
    assert [row["comes last"] for row in rows] == ["100%", "0%"]
    assert [row["forward"] for row in rows] == ["3.00", "3.00"]
