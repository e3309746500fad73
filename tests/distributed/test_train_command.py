"""``lockstep train`` from the command line, as a user starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

import lockstep
from tests.training import make_task

EXAMPLES = Path(__file__).parents[2] / "examples"
LOCKSTEP = [sys.executable, "-m", "lockstep"]

BROKEN = """\
import os
import torch
from torch import nn
import lockstep

def loss(model, batch):
    if os.environ.get("RANK") == "1":
        raise KeyError("boom")
    return model(batch[0]).square().mean()

def make(**changes):
    return lockstep.Task(**{
        "model": lambda: nn.Linear(3, 1),
        "dataset": lambda: torch.utils.data.TensorDataset(torch.ones(8, 3)),
        "loss": loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "global_batch_size": 4,
        **changes,
    })

task = make()
"""


def run(*args, timeout=100, **env):
    return subprocess.run(
        [*LOCKSTEP, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **env},
    )


def steps_of(folder):
    """Return the lines of the steps that rank zero has recorded; late ones may be of several steps each."""
    lines = (folder / "rank-0.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "step"]


def test_digits_on_two_ranks_with_log_and_export_and_resumed(tmp_path):
    digits = EXAMPLES / "digits.py"
    how = ["--devices", 2, "--checkpoint", tmp_path / "runs", "--run-dir", tmp_path / "run"]
    first = run("train", digits, "--steps", 20, *how)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert lines[:3] == [
        "digits: strategy ddp on 2 CPUs, fp32, 1,437 samples, 20 steps = 0.8696 epochs",
        "global batch 64 = 2 devices x 32 samples",
        "learning rate x 1: not scaled with the global batch; no warm-up, constant",
    ]
    assert lines[-3].startswith("epoch 0.9  step 20/20  evaluation: loss ")
    assert lines[-2].startswith("20 steps in ")
    assert lines[-1].startswith("a step took ") and "; slowest was rank " in lines[-1]
    again = run("train", digits, *how, "--export", tmp_path / "digits.safetensors")
    assert again.returncode == 0, again.stderr
    assert "resumed after step 20 of 184" in again.stdout
    steps = steps_of(tmp_path / "run")
    assert sum(line["num_steps"] for line in steps) == 184
    assert steps[0]["loss"] > 2.0 > 0.3 > steps[-1]["loss"]
    assert float(again.stdout.split("accuracy ")[-1].split()[0]) >= 0.98
    assert load_file(tmp_path / "digits.safetensors")["0.weight"].shape == (32, 1, 3, 3)


def test_gpt_writes_something_at_the_end():
    result = run("train", EXAMPLES / "gpt.py", "--steps", 3, "--clip", 1, "--strategy", "single")
    assert result.returncode == 0, result.stderr
    assert "gpt: strategy single on 1 CPU, fp32, 19,200 samples, 3 steps = 0.005 epochs" in result.stdout
    assert "\n--- the model writes:\ndef main(" in result.stdout
    assert float(result.stdout.split("evaluation: loss ")[1].split()[0]) < 5.6  # log 256 is 5.55


def test_ranks_that_were_started_already_are_joined(tmp_path):
    result = run(
        "run",
        "--devices",
        2,
        "--no-python",
        *LOCKSTEP,
        "train",
        EXAMPLES / "digits.py",
        "--steps",
        2,
        "--accumulate",
        2,
    )
    assert result.returncode == 0, result.stderr
    assert "strategy ddp on 2 CPUs" in result.stdout
    assert "global batch 64 = 2 devices x 32 samples, in 2 micro-batches" in result.stdout


def test_pictures_in_a_folder(tmp_path):
    for name, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(20):
            shade = tuple(min(255, part + 2 * index) for part in colour)
            Image.new("RGB", (20 + index, 30), shade).save(tmp_path / "pictures" / name / f"{index}.png")
    images, weights = EXAMPLES / "images.py", tmp_path / "weights.safetensors"
    env = {"IMAGES": str(tmp_path / "pictures")}
    first = run("train", images, "--steps", 4, "--global-batch-size", 8, "--workers", 1, "--export", weights, **env)
    assert first.returncode == 0, first.stderr
    assert "images: strategy ddp on 1 CPU, fp32, " in first.stdout
    second = run("train", images, "--steps", 2, "--global-batch-size", 8, WEIGHTS=str(weights), **env)
    assert second.returncode == 0, second.stderr
    assert float(second.stdout.split("last loss ")[1].split()[0]) < 0.5
    missing = run("train", images, IMAGES=str(tmp_path / "nothing"))
    assert (missing.returncode, missing.stdout) == (1, "")
    assert f"IMAGES={tmp_path / 'nothing'} is no folder of pictures." in missing.stderr.splitlines()[0]


def test_what_a_rank_finds_wrong_with_the_task_needs_no_traceback(tmp_path):
    frozen = "frozen = make(model=lambda: nn.Linear(3, 1).requires_grad_(False))\n"
    (tmp_path / "mine.py").write_text(BROKEN + frozen)
    result = run("train", f"{tmp_path / 'mine.py'}:frozen", "--devices", 2)
    assert (result.returncode, result.stderr) == (
        1,
        "lockstep: Linear has no trainable parameter: all of its parameters are frozen.\n"
        "Leave requires_grad set on those that should be trained.\n",
    )


def test_an_exception_in_one_rank_is_named_first(tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    result = run("train", tmp_path / "mine.py", "--devices", 2)
    assert result.returncode == 1
    assert "strategy ddp on 2 CPUs" in result.stdout
    assert result.stderr.splitlines()[0] == "lockstep: Rank 1 failed: KeyError: 'boom'"
    assert 'line 8, in loss\n    raise KeyError("boom")' in result.stderr


def test_ctrl_c_is_one_line_and_leaves_no_process():
    command = [*LOCKSTEP, "train", str(EXAMPLES / "digits.py"), "--epochs", "1000", "--devices", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            for line in process.stdout:
                if "evaluation" in line:
                    break
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert errors.strip() == "lockstep: stopped by Ctrl-C"
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


LAUNCHED = """\
import lockstep
from tests.training import make_task

def train(**settings):
    return lockstep.fit(make_task(), strategy="ddp", steps=3, quiet=True, **settings)

for result in lockstep.launch(train, devices=2, timeout_s=60):
    print(result.num_steps, result.num_samples, result.metrics, *result.losses)
try:
    lockstep.launch(lambda: train(devices=3), devices=2, timeout_s=60)
except lockstep.errors.RankFailed as error:
    print(error.__cause__)
"""


def test_launched_functions_train_together_and_return_what_came_of_it(tmp_path):
    (tmp_path / "script.py").write_text(LAUNCHED)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent)}
    script = [sys.executable, tmp_path / "script.py"]
    result = subprocess.run(script, capture_output=True, text=True, timeout=100, env=env)
    assert result.returncode == 0, result.stderr
    first, second, *error = result.stdout.splitlines()
    assert first == second
    assert first.startswith("3 50 {} ")
    alone = lockstep.fit(make_task(), strategy="single", steps=3, quiet=True).losses
    assert [float(loss) for loss in first.split()[3:]] == pytest.approx(alone, rel=1e-12)
    assert error == [
        "Strategy ddp on 3 devices needs as many processes, but this run has 2 processes.",
        "Start them with `lockstep run SCRIPT --devices 3`, or leave devices out.",
    ]


def test_processes_and_strategies_that_do_not_go_together():
    for settings, text in (
        (
            {"strategy": "ddp", "devices": 2},
            "Strategy ddp on 2 devices needs as many processes, but this run has 1 process.\n"
            "Start them with `lockstep run SCRIPT --devices 2`, or leave devices out.",
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
