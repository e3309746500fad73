"""``lockstep compare`` from end to end, as a user starts it."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

MIB = 2**20

TASK = """
import os
import torch
from torch import nn
import lockstep

def loss(model, batch):
    if FAULT and os.environ["RANK"] == "1":
        raise KeyError("boom")
    return (model(batch[0]) - batch[1]).square().mean()

def samples():
    return torch.utils.data.TensorDataset(torch.randn(40, 6).double(), torch.randn(40, 3).double())

task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)).double(),
    dataset=samples,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    global_batch_size=16,
)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start the command on a task of its own; whatever comes of it ends with the test."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    started = []

    def start(*args, fault=False, width=8):
        file = tmp_path / "tiny.py"
        file.write_text(f"FAULT, WIDTH = {fault}, {width}\n{TASK}")
        command = [sys.executable, "-m", "lockstep", "compare", str(file), *map(str, args)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_two_devices_train_alike_and_end_in_a_table_and_two_files(start, tmp_path):
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    files = "--json", figures, "--html", page
    process = start("--devices", 2, "--rounds", 2, "--steps", 3, "--warmup", 2, "--no-memory", *files)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert lines[0].rstrip() == "tiny.py: 2 x cpu, global batch 16, 2 rounds of 3 steps"
    assert [line.split()[0] for line in lines[4:8]] == ["single", "dp", "torch-ddp", "ddp"]
    assert "Verdict" in lines
    assert lines[-2:] == [f"figures written to {figures}", f"page written to {page}"]
    assert [line.split(",")[0] for line in err.splitlines()] == [
        "building the models",
        "warming up",
        "round 1/2",
        "round 2/2",
    ]
    record = json.loads(figures.read_text())
    assert record["left_out"] == [
        {"strategy": "torch-dp", "reason": "torch.nn.DataParallel does nothing on CPUs; ours runs there, as dp."}
    ]
    assert record["setup"]["num_parameters"] == 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3
    assert record["verdict"]["sentences"][0] in page.read_text().replace("&#x27;", "'")
    found = {contender["strategy"]: contender for contender in record["contenders"]}
    for contender in found.values():
        # Three steps make an epoch of 16 + 16 + 8 samples. The warm-up takes two and one without synchronisation, and
        # each turn three and three without: so every turn trains on a whole epoch.
        assert [(turn["round"], turn["num_samples"]) for turn in contender["turns"]] == [(0, 40), (1, 40)]
    losses = {name: contender["losses"] for name, contender in found.items()}
    assert len(set(losses["single"])) == 2 + 2 * 3
    assert losses["ddp"] == losses["torch-ddp"]
    for name in ("dp", "ddp"):
        assert losses[name] == pytest.approx(losses["single"], rel=1e-12)


def test_one_device_is_enough_and_its_peak_memory_is_measured(start, tmp_path):
    figures = tmp_path / "figures.json"
    how = "--devices", 1, "--strategies", "ddp", "--rounds", 1, "--steps", 2, "--warmup", 1
    process = start(*how, "--json", figures, width=1500)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    single, ddp = json.loads(figures.read_text())["contenders"]
    assert ddp["losses"] == single["losses"]
    assert ddp["num_threads"] == single["num_threads"] == torch.get_num_threads()
    # Weights, gradients and momentum, and not much more than the libraries take when first used.
    weights_bytes = 8 * 1500 * 1500
    for contender in (single, ddp):
        (peak_bytes,) = contender["peak_bytes"]
        assert 3 * weights_bytes < peak_bytes < 8 * weights_bytes + 150 * MIB
        assert contender["imbalance"] is None


def test_an_exception_in_one_rank_is_told_once_and_leaves_nothing(start):
    process = start("--devices", 2, "--rounds", 1, "--no-memory", "--strategies", "ddp", fault=True)
    children = wait_for_ranks(process)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.count("Traceback") == 1
    assert "lockstep: Rank 1 failed: KeyError: 'boom'" in err
    assert "It was the turn of ddp. If the others can train this task, name them: --strategies LIST" in err
    require_gone(children)


def test_ctrl_c_leaves_no_process_and_no_traceback(start):
    process = start("--devices", 2, "--rounds", 100_000, "--steps", 3, "--no-memory", "--strategies", "ddp")
    children = wait_for_ranks(process)
    for line in process.stderr:
        if line.startswith("round 1/"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "lockstep: stopped by Ctrl-C"
    assert "Traceback" not in err
    require_gone(children)


def wait_for_ranks(process):
    """Return all processes of the job once both ranks are among them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        found = psutil.Process(process.pid).children(recursive=True)
        if sum(is_rank(child) for child in found) == 2:
            return found
        time.sleep(0.05)
    raise AssertionError("No two ranks were started.")


def is_rank(process):
    try:
        return "RANK" in process.environ()
    except psutil.Error:
        return False


def require_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert [process.cmdline() for process in alive] == []
