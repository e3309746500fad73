"""``lockstep predict`` on a tiny task with ranks of the pool, the probe of a link, and what connections have sent."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lockstep import cli
from lockstep.comm.collectives import all_reduce
from lockstep.comm.network import sent_to
from lockstep.study import predict as prediction
from lockstep.study.common import run_ranks
from lockstep.study.links import probe_link

TASK = """
import torch
from torch import nn
import lockstep

WIDTH = 256

def fail(model, batch):
    raise ValueError("no such thing")

def task(loss=lambda model, batch: (model(batch[0]) - batch[0]).square().mean()):
    return lockstep.Task(
        name="tiny",
        model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))),
        dataset=lambda: torch.utils.data.TensorDataset(torch.ones(64, WIDTH)),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        global_batch_size=16,
    )

broken = lambda: task(fail)
"""
NUM_PARAMETERS = 6 * (256 * 256 + 256)


def measured(world, *request):
    before = torch.get_num_threads()
    try:
        return prediction.measure(*request, world)
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def task_file(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(
        prediction, "run_ranks", lambda _, *request, devices, backend: ranks(devices)(measured, *request)
    )
    monkeypatch.setattr(prediction, "_TURN_S", 0.02)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "tiny.py"
    file.write_text(TASK)
    return str(file)


def test_a_task_is_measured_and_predicted(task_file, tmp_path, capsys):
    args = ["--machines", "3", "--link", "100Mb", "--json", "figures.json"]
    assert cli.main(["predict", task_file, *args]) == 0
    out = capsys.readouterr().out
    assert "tiny: global batch 16, 1.58 MB of gradients; link 100Mb as given" in out
    assert "3 machines are 1.05 times as fast as one from " in out or "No link makes 3 machines" in out
    record = json.loads((tmp_path / "figures.json").read_text())
    profile, rows = record["profile"], {row["method"]["name"]: row for row in record["rows"]}
    # Parts of 16 samples on 1, 2, 3, 4 and 8 machines.
    assert sorted(map(int, profile["computing"])) == [2, 4, 6, 8, 16]
    assert all(each["backward_s"] > 0 for each in profile["computing"].values())
    assert sum(bucket["size_bytes"] for bucket in profile["buckets"]) == 4 * NUM_PARAMETERS
    ready = [bucket["ready"] for bucket in profile["buckets"]]
    assert len(ready) == 2 and 0 < ready[0] < ready[1] == 1.0
    # What was really sent, with the counts of ranks and the headers of messages.
    assert rows["ddp"]["method"]["cost"]["sent"] == pytest.approx(1.0, abs=0.03)
    sent = {name: rows[name]["method"]["cost"]["sent"] for name in ("bf16", "int8", "int4", "powersgd:4")}
    assert sent == pytest.approx({"bf16": 0.5, "int8": 0.252, "int4": 0.129, "powersgd:4": 0.036}, abs=0.03)
    assert list(rows)[-2:] == ["local-sgd", "diloco"]
    for row in rows.values():
        assert all(row["method"]["cost"][name] >= 0 for name in ("encode_s", "decode_s", "cpu_s"))
        assert sorted(map(int, row["steps"])) == [1, 2, 3, 4, 8]
    assert rows["ddp"]["steps"]["3"]["sent_bytes"] == pytest.approx(2 * 2 / 3 * 4 * NUM_PARAMETERS, rel=0.03)
    wire_s = rows["ddp"]["steps"]["3"]["sent_bytes"] / record["link"]["bytes_per_s"]
    assert rows["ddp"]["steps"]["3"]["seconds"] > wire_s


def test_failures_are_predicted(task_file, tmp_path, capsys):
    args = ["--machines", "4", "--link", "1MB/s", "--mtbf", "100", "--price", "2 EUR", "--json", "figures.json"]
    assert cli.main(["predict", task_file, *args]) == 0
    out = capsys.readouterr().out
    assert "Goodput: a machine fails every 100 h, the job every 25:00 h" in out
    assert "lost of 1,000 device-hours, EUR" in out
    record = json.loads((tmp_path / "figures.json").read_text())
    found, profile = record["goodput"], record["profile"]
    # The optimizer has no state: the parameters, at 1 MB/s.
    assert profile["state_bytes"] == 4 * NUM_PARAMETERS
    assert found["times"]["copy_s"] == pytest.approx(4 * NUM_PARAMETERS / 1e6)
    assert found["times"]["checkpoint_s"] == profile["checkpoint_s"] > 0
    assert found["times"]["replacement_s"] == profile["start_s"] > 0
    assert found["times"]["notice_s"] == 5.0
    rows = {row["method"]["name"]: row for row in record["rows"]}
    assert found["times"]["step_s"] == rows[record["verdict"]["use"] or "ddp"]["steps"]["4"]["seconds"]
    assert all(0 < share < 1 for way in found["shares"].values() for share in way)
    assert record["verdict"]["sentences"][-1].startswith("Checkpoint every ")
    assert cli.main(["predict", task_file, *args, "--replacement", "600"]) == 0
    found = json.loads((tmp_path / "figures.json").read_text())["goodput"]
    assert found["times"]["replacement_s"] == 600.0


def measured_while_others_have_the_cores(world, *request):
    time_steps, waited_s = prediction.time_steps, 6.75

    def disturbed(trainer, num_steps):
        seconds, records = time_steps(trainer, num_steps)
        late = [SimpleNamespace(times=replace(each.times, core_wait_s=waited_s), timer=each.timer) for each in records]
        return seconds + waited_s, late

    prediction.time_steps = disturbed
    try:
        return measured(world, *request)
    finally:
        prediction.time_steps = time_steps


def test_waiting_for_a_core_is_no_part_of_a_step(task_file, tmp_path, capsys, ranks, monkeypatch):
    monkeypatch.setattr(
        prediction,
        "run_ranks",
        lambda _, *request, devices, backend: ranks(devices)(measured_while_others_have_the_cores, *request),
    )
    assert cli.main(["predict", task_file, "--link", "100Mb", "--json", "figures.json"]) == 0
    assert "The machine was busy, or steps differ: a measured step took 6." in " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "figures.json").read_text())
    for each in found["profile"]["computing"].values():
        assert each["wall_s"] > 6.75
        assert each["fastest_s"] <= each["wall_s"] - 6.75
        assert each["before_s"] + each["backward_s"] + each["after_s"] < each["wall_s"] - 6.7
    assert found["verdict"]["sentences"][0].startswith("The machine was busy")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tiny.py", "--machines", "0", "--link", "1Gb"], "0 is not in the range x>=1"),
        (["tiny.py", "--ranks-per-machine", "0"], "0 is not in the range x>=1"),
        (["tiny.py", "--machines", "2", "--link", "100"], "'100' is not the rate"),
        (["tiny.py", "--machines", "2"], "There is no link to predict for.\n"),
        (
            ["tiny.py", "--machines", "20", "--link", "1Gb"],
            "A global batch of 16 is too small: each of 20 devices needs a sample",
        ),
        (["other.py", "--link", "1Gb"], "other.py does not exist.\n"),
        (
            ["tiny.py", "--link", "1Gb", "--replacement", "60"],
            "--replacement has no effect without --mtbf.\nAdd --mtbf HOURS, or leave it out.",
        ),
        (["tiny.py", "--link", "1Gb", "--mtbf", "0"], "0.0 is not in the range"),
        (["tiny.py", "--link", "1Gb", "--mtbf", "nan"], "--mtbf nan is not a time between failures."),
        ([".", "--link", "1Gb"], ". is a folder.\nName a Python file that has a lockstep.Task."),
    ],
)
def test_what_cannot_be_predicted_is_one_clear_error(task_file, capsys, args, message):
    assert cli.main(["predict", *args]) == 2
    assert message in capsys.readouterr().err


def test_a_task_that_fails_ends_the_command(task_file, monkeypatch, capsys):
    monkeypatch.setattr(prediction, "run_ranks", run_ranks)  # whose launcher ends the ranks that wait
    assert cli.main(["predict", f"{task_file}:broken", "--link", "1Gb"]) == 1
    assert "lockstep: Rank 0 failed: ValueError: no such thing\n" in capsys.readouterr().err


def probe(world, limit_s):
    before, began_s = sent_to(loopback=True), time.perf_counter()
    link = probe_link(world, limit_s=limit_s)
    num_bytes = sum(each.num_bytes for each in sent_to(loopback=True).values())
    return link, time.perf_counter() - began_s, num_bytes - sum(each.num_bytes for each in before.values())


def test_a_probe_is_bounded_in_time_and_bytes(ranks):
    for link, took_s, num_bytes in ranks(2)(probe, 0.2):
        assert 1e5 < link.bytes_per_s < 1e11
        assert 0 < link.latency_s < 1.0
        assert took_s < 20.0  # on a busy machine
        assert num_bytes < 540e6


def send(world, size):
    before = sent_to(loopback=True)
    all_reduce(torch.ones(size), group=world.group)
    all_reduce(torch.ones(1), group=world.group)  # so that all of it has arrived
    after = sent_to(loopback=True)
    busy_s = sum(each.busy_s for each in after.values()) - sum(each.busy_s for each in before.values())
    return sum(after[peer].num_bytes - before[peer].num_bytes for peer in before), busy_s, sent_to()


def test_what_was_sent_is_counted(ranks):
    for num_bytes, busy_s, elsewhere in ranks(2)(send, 2**20):
        assert num_bytes == pytest.approx(4 * 2**20, rel=0.02)
        assert busy_s >= 0  # counted in ticks of the kernel
        assert elsewhere == {}, "connections within the machine are left out"
