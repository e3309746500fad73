"""``lockstep predict`` on a tiny task with ranks of the pool, the probe of a link, and what connections have sent."""

import json
import time

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
    files = ["--json", "figures.json", "--html", "page.html"]
    assert cli.main(["predict", task_file, "--machines", "3", "--link", "100Mb", *files]) == 0
    out = capsys.readouterr().out
    assert "tiny: global batch 16, 1.58 MB of gradients; link 100Mb as given" in out
    assert "3 machines pay from " in out or "3 machines never pay" in out
    assert "Time of a step, and efficiency" in (tmp_path / "page.html").read_text()
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
        ([".", "--link", "1Gb"], "No run was recorded in ."),
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
