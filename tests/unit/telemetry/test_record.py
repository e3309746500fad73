"""What is recorded: names that stay, files that survive, and lines that thin out."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from lockstep.errors import ConfigurationError
from lockstep.telemetry import record
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.record import Downsampler, Event, LineWriter, StepLine, read_run, to_json
from lockstep.telemetry.recorder import Place, Recorder, has_timeline
from lockstep.telemetry.resources import MachineSampler
from lockstep.telemetry.step_times import StepMarks, StepTimes, combine
from tests.unit.study.report.report_planted import (
    START,
    event_line,
    session,
    step_line,
    steps,
    timeline_line,
    write_run,
)

FROZEN = {
    "start": "run rank host pid device time first_step",
    "step": "step num_steps epoch time interval_s total_s slowest_s slowest_step data_wait_s copy_s forward_s "
    "backward_s exposed_s hidden_s optimizer_s core_wait_s loss learning_rate grad_norm samples samples_per_s counts "
    "tokens_per_s",
    "timeline": "step time spans buckets waited_from waited_until",
    "machine": "time memory_bytes memory_peak_bytes rss_bytes rss_peak_bytes workers_rss_bytes num_workers num_threads "
    "cpu_percent workers_cpu_percent core_wait_percent host_cpu_percent steal_percent throttled_percent load "
    "gpu_percent gpu_power_w gpu_temperature_c gpu_throttled_percent sent_bytes link_bytes_per_s link_peer "
    "num_devices device_s energy_j",
    "event": "event step time seconds text metrics",
}


def recorder_into(folder):
    return Recorder(Place(0, 1), [torch.device("cpu")], Snapshot(num_steps=9), run_dir=folder)


def test_the_names_of_metrics_stay():
    assert " ".join(record.EVENTS) == (
        "resume restart recovery evaluation checkpoint skipped straggler profile remark stop error end"
    )
    assert (record.VERSION, record.RUN_FILE, record.RANK_FILES) == (1, "run.json", "rank-*.jsonl")


def test_lines_have_the_names_that_the_reference_explains(tmp_path):
    recorder = recorder_into(tmp_path)
    step = StepMarks(4, 0.0, 0.0, 1000.0, 1.0, has_timeline=True)
    recorder.add(step)
    recorder.event(Event(event="evaluation", text="done", step=1, metrics={"loss": 0.5}))
    recorder.finish(waits=True)
    written = {line["kind"]: " ".join(sorted(line.keys() - {"kind"})) for line in read(tmp_path / "rank-0.jsonl")}
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    explained = {
        kind: " ".join(sorted(re.findall(r"^\| `(\w+)` \|", page.split(f"### {kind}\n")[1].split("###")[0], re.M)))
        for kind in FROZEN
    }
    assert explained == {kind: " ".join(sorted(names.split())) for kind, names in FROZEN.items()} == written


def test_waiting_for_a_core_is_taken_out_of_the_phases_in_which_the_rank_had_work():
    spans = [("data_wait", 0.0, 0.1, 0.0), ("forward", 0.1, 0.4, 0.0), ("backward", 0.4, 1.0, 0.0)]
    spans.append(("communication", 1.0, 1.3, 0.0))
    uses = [
        (b"5 7 1", b"6 7 2"),
        (b"6 7 2", b"6 200000007 3"),
        (b"6 0 3", b"9 500000000 4"),
        (b"0 0 4", b"0 300000000 5"),
    ]
    step = StepMarks(0, 0.0, 0.0, 0.0, 1.3, spans=spans, exposed_s=0.2, core_uses=uses)
    took = step.times()
    parts = took.data_wait_s, took.forward_s, took.backward_s, took.optimizer_s, took.core_wait_s
    assert parts == pytest.approx((0.1, 0.1, 0.0, 0.0, 0.6))  # 0.1 s of the 0.5 s in backward were waiting for ranks
    assert took.exposed_s == pytest.approx(0.5)
    # Where the kernel does not count it: what the phases that compute took, less the time on a core.
    step.core_uses = [(b"0", b"0"), (b"0", b"100000000"), (b"0", b"300000000"), (b"0", b"0")]
    took = step.times()
    assert (took.data_wait_s, took.forward_s, took.backward_s) == pytest.approx((0.1, 0.1, 0.3))
    assert took.core_wait_s == pytest.approx(0.3)


def test_what_an_engine_does_not_measure_of_its_waits_stays_in_backward():
    spans = [("forward", 0.0, 0.3, 0.1), ("backward", 0.3, 1.0, 0.0), ("communication", 1.0, 1.2, 0.0)]
    step = StepMarks(0, 0.0, 0.0, 0.0, 1.3, spans=spans)
    times = step.times()
    assert (times.forward_s, times.backward_s, times.exposed_s) == (pytest.approx(0.2), pytest.approx(1.0), None)
    assert times.parts() == pytest.approx({"data_wait": 0, "forward": 0.2, "backward": 1, "optimizer": 0, "other": 0.1})
    step.exposed_s = 0.4
    times = step.times()
    assert (times.backward_s, times.exposed_s) == pytest.approx((0.3, 0.7))
    longer = replace(times, total_s=2.0)
    assert (times.own_s, longer.own_s, longer.other_s) == pytest.approx((0.6, 1.3, 0.8))


def test_times_are_combined_over_the_steps_that_know_them():
    one, other = StepTimes(total_s=1.0, forward_s=0.5), StepTimes(total_s=3.0, forward_s=0.1, exposed_s=0.2)
    found = combine([one, other])
    assert (found.total_s, found.forward_s, found.exposed_s, found.backward_s) == pytest.approx((2.0, 0.3, 0.2, None))
    assert combine([one, other, other], median).total_s == 3.0


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_lines_are_written_at_the_end(tmp_path):
    writer = LineWriter(tmp_path / "a", fresh=True)
    for number in range(500):
        writer.add({"kind": "step", "step": number})
    writer.close()
    lines = read(tmp_path / "a")
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(500))


def test_a_resumed_file_goes_on_behind_a_line_that_was_cut(tmp_path):
    (tmp_path / "a").write_text('{"step":1}\n{"st')
    writer = LineWriter(tmp_path / "a", fresh=False)
    writer.add({"step": 2})
    writer.add({"step": 3})
    writer.close()
    assert (tmp_path / "a").read_text() == '{"step":1}\n{"st\n{"step":2}\n{"step":3}\n'


def test_a_fresh_file_keeps_the_earlier_one_aside(tmp_path):
    for number in range(3):
        writer = LineWriter(tmp_path / "a", fresh=True)
        writer.add({"run": "x/1", "number": number})
        writer.close()
    assert sorted((path.parent.name, read(path)[0]["number"]) for path in tmp_path.rglob("a")) == [
        ("earlier-x-1", 0),
        ("earlier-x-1.1", 1),
        (tmp_path.name, 2),
    ]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_ends_the_record_and_not_the_training(capsys):
    writer = LineWriter(Path("/dev/full"), fresh=False)
    for number in range(3):
        writer.add({"step": number})
    writer.close()
    reported = capsys.readouterr().err
    assert reported.startswith("lockstep: /dev/full is no longer written: ")
    assert reported.count("No space left on device") == 1


def test_numbers_that_are_none_are_words():
    line = {"loss": float("nan"), "spans": [["forward", 0.0, float("inf")]], "step": 1}
    assert to_json(line) == '{"loss":"nan","spans":[["forward",0.0,"inf"]],"step":1}\n'


def test_ever_more_steps_share_a_line():
    thinner = Downsampler(singly=4)
    lines = [
        line for number in range(30) if (line := thinner.add(StepLine.read(step_line(number, forward_s=number / 100))))
    ]
    assert [line.num_steps for line in lines] == [1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4]
    last = lines[-1]
    assert (last.step, last.slowest_step) == (24, 27)
    assert last.times.forward_s == pytest.approx(0.255)
    assert last.loss == pytest.approx(2.0 / 28)
    assert last.slowest_s == pytest.approx(0.27 + 0.008)
    rest = thinner.rest()
    assert (rest.num_steps, rest.step) == (2, 28)
    assert thinner.rest() is None


def test_timelines_are_of_the_same_steps_everywhere_and_ever_fewer():
    assert [step for step in range(80) if has_timeline(step)] == [4, 5, 6, 7, 68, 69, 70, 71]
    assert sum(map(has_timeline, range(2**20))) == 1280


def test_the_sampler_tells_of_this_process(monkeypatch):
    line = MachineSampler([torch.device("cpu")])()
    assert set(line) == {"kind", *FROZEN["machine"].split()}
    assert line["rss_peak_bytes"] > 2**24 < line["rss_bytes"]
    assert (line["memory_bytes"], line["gpu_percent"]) == (None, None)


def test_a_gpu_whose_driver_does_not_give_a_figure_has_none(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device.index) or 87)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 312_500)
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 1 / 0)
    line = MachineSampler([torch.device("cuda", 3)])()
    assert [line[name] for name in ("gpu_percent", "gpu_power_w", "gpu_temperature_c")] == [87.0, 312.5, None]
    assert (line["memory_bytes"], line["memory_peak_bytes"], asked) == (5, 7, [3])


class NeverReached:
    """A CUDA event of a device that does not get there any more, as after an error in a kernel."""

    def query(self):
        return False

    def elapsed_time(self, end):
        raise AssertionError("nobody waits for it")


def test_the_error_that_ended_a_run_is_recorded_though_the_device_is_not_done(tmp_path):
    sample = {"kind": "machine", "load": 1.0}
    recorder = recorder_into(tmp_path)
    recorder.sampler = lambda: sample
    recorder.add(StepMarks(0, 0.0, 0.0, 0.0, 1.0))
    recorder.add(StepMarks(1, NeverReached(), 1.0, 1.0, NeverReached()))
    recorder.event(Event(event="error", text="RuntimeError: CUDA error", step=1))
    recorder.drain()
    recorder.finish(waits=False)
    lines = read(tmp_path / "rank-0.jsonl")
    assert sample in lines
    assert [line["step"] for line in lines if line["kind"] == "step"] == [0]
    assert [(line["event"], line["text"]) for line in lines if line["kind"] == "event"] == [
        ("error", "RuntimeError: CUDA error")
    ]


# Reading a record: what is missing or broken is told, and nothing that is broken gets further.


def test_a_whole_record_has_no_gaps(tmp_path):
    run = read_run(write_run(tmp_path / "run", [steps(3), steps(3)]))
    assert run.gaps == []
    assert {rank: len(record.steps) for rank, record in run.ranks.items()} == {0: 3, 1: 3}
    assert (run.ranks[1].host, run.ranks[1].device) == ("here", "cpu")
    assert run.ranks[0].steps[2].loss == pytest.approx(2 / 3)


def test_no_record_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        read_run(tmp_path / "nothing")
    assert (
        str(error.value) == f"There is no folder {tmp_path}/nothing.\nName the folder given as --run-dir or --monitor."
    )
    with pytest.raises(ConfigurationError) as error:
        read_run(tmp_path)
    assert str(error.value) == (
        f"No run was recorded in {tmp_path}: it holds no run.json and no rank-*.jsonl.\n"
        "Record one with lockstep train TASK.py --run-dir DIR, or lockstep run --monitor DIR SCRIPT.py."
    )


def test_another_version_is_an_error(tmp_path):
    folder = write_run(tmp_path / "run", [steps(3)])
    (folder / "run.json").write_text(json.dumps({"version": 2, "sessions": []}))
    with pytest.raises(ConfigurationError) as error:
        read_run(folder)
    assert str(error.value) == (
        f"{folder}/run.json was written by another version of Lockstep (format 2, this one reads 1).\n"
        "Use the version that recorded the run."
    )


def test_broken_lines_are_left_out_and_told(tmp_path):
    folder = write_run(tmp_path / "run", [steps(3), steps(3)])
    bad = [
        "[1, 2]",
        json.dumps({"kind": "surprise"}),
        json.dumps(step_line(3, loss="<script>")),
        json.dumps(step_line(4, total_s=-1)),
        json.dumps(step_line(5, time=None) | {"time": "now"}),
        json.dumps(event_line("explosion", "boom")),
        json.dumps(timeline_line(4, START) | {"spans": [["<b>", 0, 1]]}),
        json.dumps(timeline_line(4, START) | {"buckets": [[0, 1]]}),
        '{"kind": "step", "st',
    ]
    with (folder / "rank-1.jsonl").open("a") as file:
        file.write("\n".join(bad))
    with (folder / "rank-0.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n" + b"[" * 100_000)
    run = read_run(folder)
    assert [len(record.steps) for record in run.ranks.values()] == [3, 3]
    assert run.gaps == [
        "rank-0.jsonl: 2 lines cannot be read; the first is line 5.",
        "rank-1.jsonl: 9 lines cannot be read; the first is line 5.",
    ]


def test_missing_files_are_told(tmp_path):
    folder = write_run(tmp_path / "run", [steps(3), steps(3), steps(3)])
    (folder / "rank-1.jsonl").unlink()
    assert read_run(folder).gaps == [
        "There is no record of rank 1: its file is missing, or belongs to another run.",
    ]
    (folder / "run.json").write_text("{")
    run = read_run(folder)
    assert run.gaps[0] == "run.json is missing or broken: settings and machine are unknown."
    assert list(run.ranks) == [0, 2]


def test_a_rank_that_was_lost_on_the_way_does_not_hide_the_steps_after_that(tmp_path):
    folder = write_run(tmp_path / "run", [steps(9), steps(9), steps(4)], [session(3), session(2)])
    run = read_run(folder)
    assert (list(run.ranks), run.gaps) == ([0, 1], ["Rank 2 took part in earlier sessions only, and is not included."])


def test_lines_of_another_run_in_the_folder_are_left_out(tmp_path):
    folder = write_run(tmp_path / "run", [steps(3), steps(5)], [session(2, run="other")])
    text = (folder / "rank-0.jsonl").read_text().replace('"run": "r"', '"run": "other"')
    (folder / "rank-0.jsonl").write_text(text)
    run = read_run(folder)
    assert list(run.ranks) == [0]
    assert len(run.gaps) == 1


def test_steps_that_were_done_again_after_a_restart_count_once(tmp_path):
    again = [step_line(1, loss=0.5), step_line(2, loss=0.25)]
    run = read_run(write_run(tmp_path / "run", [[*steps(3), *again]]))
    assert [(step.step, step.loss) for step in run.ranks[0].steps] == [(0, 2.0), (1, 0.5), (2, 0.25)]


def test_losses_that_are_not_finite_stay_what_they_are(tmp_path):
    run = read_run(write_run(tmp_path / "run", [[step_line(0), step_line(1, loss="nan"), step_line(2, loss="inf")]]))
    assert [str(step.loss) for step in run.ranks[0].steps] == ["2.0", "nan", "inf"]


def test_ranks_of_another_machine_are_aligned_where_all_leave_a_reduction(tmp_path):
    begins = {4: 10.0, 5: 20.0, 68: 90.0}
    lines = [timeline_line(step, START + at, own_s=3.0, wait_s=1.0) for step, at in begins.items()]
    # Its clock is ahead by 2 s, later by 3 s; and it begins a second later, so it waits less.
    ahead = {4: 2.0, 5: 2.0, 68: 3.0}
    late = [timeline_line(step, START + at + ahead[step] + 1, own_s=2.5, wait_s=0.5) for step, at in begins.items()]
    mine = [step_line(step, time=START + at) for step, at in ((0, 0.0), (60, 50.0), (80, 200.0))]
    start = {"kind": "start", "run": "r", "rank": 1, "device": "cpu"}
    ranks = [[*mine, *lines], [start | {"host": "there"}, *mine, *late]]
    run = read_run(write_run(tmp_path / "run", ranks, [session(2)]))
    assert [step.time - START for step in run.ranks[0].steps] == [0, 50, 200]
    assert [step.time - START for step in run.ranks[1].steps] == pytest.approx([-2.0, 48.0, 197.0])
    assert [each.time - START for each in run.ranks[1].timelines] == pytest.approx([11.0, 21.0, 91.0])
    # Ranks of one machine have one clock.
    ranks = [[*mine, *lines], [start | {"host": "here"}, *mine, *late]]
    run = read_run(write_run(tmp_path / "alike", ranks, [session(2)]))
    assert [step.time - START for step in run.ranks[1].steps] == [0, 50, 200]


def test_events_of_all_ranks_are_told_once(tmp_path):
    mine = [event_line("checkpoint", "saved", 5), event_line("error", "RuntimeError: mine", 9)]
    theirs = [event_line("checkpoint", "saved", 5), event_line("error", "theirs", 9)]
    run = read_run(write_run(tmp_path / "run", [[*steps(3), *mine], [*steps(3), *theirs]]))
    assert [(event.event, event.text) for event in run.events] == [
        ("checkpoint", "saved"),
        ("error", "RuntimeError: mine"),
    ]


def test_a_record_brings_no_control_characters_to_the_terminal(tmp_path):
    nasty = "\x1b]0;title\x07\x9b2J\x7f saved\nhere"
    lines = [*steps(3), {**event_line("remark", 2), "text": nasty}]
    run = read_run(write_run(tmp_path / "run", [lines], sessions=[{**session(1), "task": nasty, nasty: [nasty]}]))
    clean = "\ufffd]0;title\ufffd\ufffd2J\ufffd saved\nhere"
    assert [event.text for event in run.ranks[0].events] == [clean]
    assert run.last["task"] == clean and run.last[clean] == [clean]
