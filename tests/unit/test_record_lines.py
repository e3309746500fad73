"""What is recorded: names that stay, files that survive, and lines that thin out."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from lockstep.telemetry import record
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.record import Downsampler, Event, LineWriter, StepLine, to_json
from lockstep.telemetry.recorder import Place, Recorder, has_timeline
from lockstep.telemetry.resources import MachineSampler
from lockstep.telemetry.step_times import StepMarks, StepTimes, combine
from tests.unit.report_planted import step_line

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
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
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
