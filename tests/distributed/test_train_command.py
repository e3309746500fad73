"""``lockstep train`` as a user starts it: in this process where it starts no others."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from PIL import Image
from safetensors.torch import load_file

import lockstep
from lockstep.cli import main
from tests.distributed import commands
from tests.training import make_task

EXAMPLES = Path(__file__).parents[2] / "examples"

TASK = """\
import torch
from torch import nn
import lockstep

def make(**changes):
    return lockstep.Task(**{
        "model": lambda: nn.Linear(3, 1),
        "dataset": lambda: torch.utils.data.TensorDataset(torch.ones(8, 3)),
        "eval_dataset": lambda: torch.utils.data.TensorDataset(torch.ones(8, 3)),
        "loss": lambda model, batch: model(batch[0]).square().mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "global_batch_size": 4,
        **changes,
    })

task = make()
frozen = make(model=lambda: nn.Linear(3, 1).requires_grad_(False))
"""


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A folder with a task; what the command changes in this process is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("OMP_NUM_THREADS", "1"), ("LOCKSTEP_COMMAND", "lockstep train")):
        monkeypatch.setenv(name, value)
    (tmp_path / "mine.py").write_text(TASK)


def test_a_run_on_two_ranks_and_resumed_on_one(tmp_path, capfd):
    how = ["mine.py", "--checkpoint", "runs", "--run-dir", "run"]
    first = commands.lockstep("train", *how, "--devices", "2", "--steps", "3")
    assert first.code == 0, first.err
    lines = first.out.splitlines()
    assert lines[:3] == [
        "mine: strategy ddp on 2 CPUs, fp32, 8 samples, 3 steps = 1.5 epochs",
        "global batch 4 = 2 devices x 2 samples",
        "learning rate x 1: not scaled with the global batch; no warm-up, constant",
    ]
    assert lines[-4].startswith("epoch 1.5  step 3/3  evaluation: loss ")
    assert lines[-3].startswith("3 steps in ")
    assert lines[-2].startswith("a step took ") and "; slowest was rank " in lines[-2]
    assert lines[-1].startswith("used ") and lines[-1].count(" device-hours") == 1
    assert main(["train", *how, "--strategy", "single", "--steps", "5", "--export", "weights.safetensors"]) == 0
    assert "resumed after step 3 of 5" in capfd.readouterr().out
    recorded = map(json.loads, (tmp_path / "run" / "rank-0.jsonl").read_text().splitlines())
    assert sum(line["num_steps"] for line in recorded if line["kind"] == "step") == 5
    assert load_file(tmp_path / "weights.safetensors")["weight"].shape == (1, 3)


@pytest.mark.soak
def test_digits_are_learnt(capfd):
    assert main(["train", str(EXAMPLES / "digits.py"), "--strategy", "single"]) == 0
    assert float(capfd.readouterr().out.split("accuracy ")[-1].split()[0]) >= 0.98


@pytest.mark.soak
def test_gpt_writes_something_at_the_end(capfd):
    assert main(["train", str(EXAMPLES / "gpt.py"), "--steps", "3", "--clip", "1", "--strategy", "single"]) == 0
    out = capfd.readouterr().out
    assert "gpt: strategy single on 1 CPU, fp32, 19,200 samples, 3 steps = 0.5% of an epoch" in out
    assert "\n--- the model writes:\ndef main(" in out
    assert float(out.split("evaluation: loss ")[1].split()[0]) < 5.6  # log 256 is 5.55


def test_ranks_that_were_started_already_are_joined(ranks, tmp_path):
    file = str(tmp_path / "mine.py")

    def train(world):
        rank, size = str(world.rank), str(world.world_size)
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # nobody is met there: the group is up already
        with patch.dict(os.environ, env), contextlib.redirect_stdout(io.StringIO()) as out:
            return main(["train", file, "--steps", "2", "--accumulate", "2"]), out.getvalue()

    (code, out), other = ranks(2)(train)
    assert (code, other) == (0, (0, ""))
    assert "strategy ddp on 2 CPUs" in out
    assert "global batch 4 = 2 devices x 2 samples, in 2 micro-batches" in out


def test_pictures_in_a_folder(tmp_path, monkeypatch, capfd):
    for name, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(20):
            shade = tuple(min(255, part + 2 * index) for part in colour)
            Image.new("RGB", (20 + index, 30), shade).save(tmp_path / "pictures" / name / f"{index}.png")
    monkeypatch.setenv("IMAGES", str(tmp_path / "pictures"))
    train = ["train", str(EXAMPLES / "images.py"), "--global-batch-size", "8"]
    assert main([*train, "--steps", "4", "--workers", "1", "--export", "weights.safetensors"]) == 0
    assert "images: strategy ddp on 1 CPU, fp32, " in capfd.readouterr().out
    monkeypatch.setenv("WEIGHTS", "weights.safetensors")
    assert main([*train, "--steps", "2"]) == 0
    assert float(capfd.readouterr().out.split("last loss ")[1].split()[0]) < 0.5
    monkeypatch.setenv("IMAGES", str(tmp_path / "nothing"))
    assert main(train) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert f"IMAGES={tmp_path / 'nothing'} is no folder of pictures." in err.splitlines()[0]


def test_what_a_rank_finds_wrong_with_the_task_needs_no_traceback():
    done = commands.lockstep("train", "mine.py:frozen", "--devices", "2")
    assert (done.code, done.err) == (
        2,
        "lockstep: Linear has no trainable parameter: all of its parameters are frozen.\n"
        "Set requires_grad on the parameters that should be trained.\n",
    )


def test_ctrl_c_says_what_was_done_and_leaves_no_process():
    arguments = ["train", "mine.py", "--epochs", "1000000", "--eval-every", "50", "--devices", "2"]
    process = commands.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        next(line for line in process.stdout if "evaluation" in line)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert re.fullmatch(
        r"lockstep: Stopped by Ctrl-C after step \d+ of \d+, loss \d\.\d+; nothing was saved, because no folder for "
        r"checkpoints was given\.\nAdd checkpoint=.*\n\nlockstep: stopped by Ctrl-C\n",
        errors,
    ), errors
    deadline = time.monotonic() + 20
    while any_in_group(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any_in_group(process.pid)


def any_in_group(group):
    """Return whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_launched_functions_train_together_and_return_what_came_of_it():
    def train():
        result = lockstep.fit(make_task(), strategy="ddp", steps=3, quiet=True)
        return result.num_steps, result.num_samples, result.losses

    first, second = lockstep.launch(train, devices=2, timeout_s=60)
    assert first == second
    alone = lockstep.fit(make_task(), strategy="single", steps=3, quiet=True)
    assert first == (3, 50, pytest.approx(alone.losses, rel=1e-12))


def test_a_loader_process_that_was_stopped_does_not_keep_a_run_without_a_launcher_from_ending(tmp_path):
    stop = "os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)"
    with (tmp_path / "mine.py").open("a") as file:
        # torch waits so long for a loader process to end, twice.
        file.write("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5\n")
        file.write(f"import multiprocessing, os, signal\nheld = make(after=lambda model: {stop})\n")
    train = ["train", "mine.py:held", "--strategy", "single", "--steps", "2", "--workers", "1"]
    done = commands.lockstep(*train, timeout=40)
    assert (done.code, done.err) == (0, "")


def test_processes_and_strategies_that_do_not_go_together(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # a rank, so that fit starts none
    for settings, text in (
        (
            {"strategy": "ddp", "devices": 2},
            "Strategy ddp on 2 devices needs as many processes, but this run has 1 process.\n"
            "Start them with `lockstep run SCRIPT --devices 2`, or omit devices.",
        ),
        (
            {"strategy": "single", "devices": 2},
            "Strategy single trains on one device, but devices=2.\nUse strategy dp or ddp for more.",
        ),
    ):
        with pytest.raises(lockstep.errors.ConfigurationError) as error:
            lockstep.fit(make_task(), **settings)
        assert str(error.value) == text


def test_a_strategy_of_one_process_refuses_several(ranks):
    def fit(world):
        lockstep.fit(make_task(), strategy="dp", quiet=True)

    for outcome in ranks(2).each(fit):
        assert str(outcome.error) == (
            "Strategy dp trains in one process, but 2 were started.\n"
            "Start one, or use strategy ddp, which trains in all of them."
        )
