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
from lockstep.cli import main
from tests.distributed.commands import Done, start
from tests.distributed.commands import lockstep as lockstep_command
from tests.training import make_task

EXAMPLES = Path(__file__).parents[2] / "examples"

TASK = """\
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
    """Run a command in a process of its own; what starts ranks has to."""
    base = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return lockstep_command(*map(str, args), timeout=timeout, env={**base, **env})


@pytest.fixture
def here(monkeypatch, capfd):
    """Run a command that starts no ranks in this process; return its exit code, output and errors."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run_here(*args):
        code = main(list(map(str, args)))
        return Done(code, *capfd.readouterr())

    return run_here


def steps_of(folder):
    """Return the lines of the steps that rank zero has recorded; late ones may be of several steps each."""
    lines = (folder / "rank-0.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "step"]


def test_digits_with_log_and_export_resumed_on_two_ranks(tmp_path, here):
    how = [EXAMPLES / "digits.py", "--checkpoint", tmp_path / "runs", "--run-dir", tmp_path / "run"]
    first = here("train", *how, "--steps", 4, "--strategy", "single")
    assert first.code == 0, first.err
    assert first.out.startswith("digits: strategy single on 1 CPU, fp32, 1,437 samples, 4 steps = 0.1739 epochs\n")
    again = run("train", *how, "--steps", 8, "--devices", 2, "--export", tmp_path / "digits.safetensors")
    assert again.code == 0, again.err
    lines = again.out.splitlines()
    assert lines[:3] == [
        "digits: strategy ddp on 2 CPUs, fp32, 1,437 samples, 8 steps = 0.3478 epochs",
        "global batch 64 = 2 devices x 32 samples",
        "learning rate x 1: not scaled with the global batch; no warm-up, constant",
    ]
    assert "resumed after step 4 of 8" in again.out
    for start_of_line in ("epoch 0.3  step 8/8  evaluation: loss ", "4 steps in ", "a step took "):
        assert any(line.startswith(start_of_line) for line in lines), again.out
    assert sum(line["num_steps"] for line in steps_of(tmp_path / "run")) == 8
    assert load_file(tmp_path / "digits.safetensors")["0.weight"].shape == (32, 1, 3, 3)


@pytest.mark.soak
def test_digits_are_learned(here):
    done = here("train", EXAMPLES / "digits.py")
    assert float(done.out.split("accuracy ")[-1].split()[0]) >= 0.98


@pytest.mark.soak
def test_gpt_writes_something_at_the_end(here):
    done = here("train", EXAMPLES / "gpt.py", "--steps", 3, "--clip", 1, "--strategy", "single")
    assert done.code == 0, done.err
    assert "gpt: strategy single on 1 CPU, fp32, 19,200 samples, 3 steps = 0.005 epochs" in done.out
    assert "\n--- the model writes:\ndef main(" in done.out
    assert float(done.out.split("evaluation: loss ")[1].split()[0]) < 5.6  # log 256 is 5.55


@pytest.mark.soak
def test_ranks_that_were_started_already_are_joined():
    train = [sys.executable, "-m", "lockstep", "train", EXAMPLES / "digits.py", "--steps", 2, "--accumulate", 2]
    done = run("run", "--devices", 2, "--no-python", *train)
    assert done.code == 0, done.err
    assert "strategy ddp on 2 CPUs" in done.out
    assert "global batch 64 = 2 devices x 32 samples, in 2 micro-batches" in done.out


def test_a_rank_that_was_started_already_starts_no_others(here, monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text(TASK.replace('"boom"', "0"))
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    done = here("train", tmp_path / "mine.py", "--max-restarts", 3, "--steps", 1)
    assert done.code == 0, done.err
    assert done.out.startswith("task: strategy ddp on 1 CPU, fp32, 8 samples, 1 step = 0.5 epochs\n")


def test_pictures_in_a_folder(tmp_path, here, monkeypatch):
    for name, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(20):
            shade = tuple(min(255, part + 2 * index) for part in colour)
            Image.new("RGB", (20 + index, 30), shade).save(tmp_path / "pictures" / name / f"{index}.png")
    images, weights = EXAMPLES / "images.py", tmp_path / "weights.safetensors"
    monkeypatch.setenv("IMAGES", str(tmp_path / "pictures"))
    first = here("train", images, "--steps", 4, "--global-batch-size", 8, "--workers", 1, "--export", weights)
    assert first.code == 0, first.err
    assert "images: strategy ddp on 1 CPU, fp32, " in first.out
    monkeypatch.setenv("WEIGHTS", str(weights))
    second = here("train", images, "--steps", 2, "--global-batch-size", 8)
    assert second.code == 0, second.err
    assert float(second.out.split("last loss ")[1].split()[0]) < 0.5
    monkeypatch.setenv("IMAGES", str(tmp_path / "nothing"))
    missing = here("train", images)
    assert (missing.code, missing.out) == (1, "")
    assert f"IMAGES={tmp_path / 'nothing'} is no folder of pictures." in missing.err.splitlines()[0]


def test_what_a_rank_finds_wrong_with_the_task_needs_no_traceback(tmp_path, here, monkeypatch):
    def launch_with(*_args, **_how):
        error = lockstep.errors.ConfigurationError("Linear has no trainable parameter.\nLeave some.")
        raise lockstep.errors.RankFailed("Rank 0 failed, with a long traceback") from error

    monkeypatch.setattr("lockstep.launcher.api.launch_with", launch_with)
    (tmp_path / "mine.py").write_text(TASK)
    done = here("train", tmp_path / "mine.py", "--devices", 2)
    assert (done.code, done.err) == (1, "lockstep: Linear has no trainable parameter.\nLeave some.\n")


def test_an_exception_in_one_rank_is_named_first(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    done = run("train", tmp_path / "mine.py", "--devices", 2)
    assert done.code == 1
    assert "strategy ddp on 2 CPUs" in done.out
    assert done.err.splitlines()[0] == "lockstep: Rank 1 failed: KeyError: 'boom'"
    assert 'line 8, in loss\n    raise KeyError("boom")' in done.err


def test_ctrl_c_is_one_line_and_leaves_no_process(tmp_path):
    (tmp_path / "mine.py").write_text(TASK.replace('raise KeyError("boom")', 'print("training", flush=True)'))
    command = ["train", str(tmp_path / "mine.py"), "--epochs", "100000", "--devices", "2"]
    with start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            for line in process.stdout:
                if "training" in line:
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
"""


@pytest.mark.soak
def test_launched_functions_train_together_and_return_what_came_of_it(tmp_path):
    (tmp_path / "script.py").write_text(LAUNCHED)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent)}
    script = [sys.executable, tmp_path / "script.py"]
    result = subprocess.run(script, capture_output=True, text=True, timeout=100, env=env)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first == second
    assert first.startswith("3 50 {} ")
    alone = lockstep.fit(make_task(), strategy="single", steps=3, quiet=True).losses
    assert [float(loss) for loss in first.split()[3:]] == pytest.approx(alone, rel=1e-12)


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
