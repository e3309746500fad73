"""The flags of ``lockstep train``, and what it says of bad input before it starts anything."""

import sys
from types import SimpleNamespace

import click.testing
import pytest

from lockstep.base.setting import settings_of
from lockstep.cli import main
from lockstep.cli.train import train
from lockstep.train import fit
from lockstep.train.settings import FitSettings

MINE = """\
import torch
from torch import nn
import lockstep

def make(**changes):
    return lockstep.Task(**{
        "model": lambda: nn.Linear(3, 1),
        "dataset": lambda: torch.utils.data.TensorDataset(torch.ones(8, 3)),
        "loss": lambda model, batch: model(batch[0]).square().mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "global_batch_size": 4,
        **changes,
    })

task = make()
frozen = make(model=lambda: nn.Linear(3, 1).requires_grad_(False))
empty = make(dataset=list)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A file with tasks in the current folder."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["nothing.py"], "nothing.py does not exist.\nName a Python file that has a lockstep.Task."),
        (
            ["mine.py:frozen"],
            "Linear has no trainable parameter: all of its parameters are frozen.\n"
            "Set requires_grad on the parameters that should be trained.",
        ),
        (["mine.py:empty"], "The data set of Task.dataset is empty.\nCheck where it reads its samples from."),
        (
            ["mine.py", "--accumulate", "3", "--global-batch-size", "2"],
            "A global batch of 2 samples does not have a sample for each of 1 device in each of 3 micro-batches.\n"
            "Set the global batch size to 3 or more, or decrease accumulate.",
        ),
        (
            ["mine.py", "--strategy", "torch-dp"],
            "Strategy torch-dp needs CUDA devices: torch.nn.DataParallel does nothing on CPUs.\n"
            "Use strategy dp, which runs on CPUs too.",
        ),
        (
            ["mine.py", "--strategy", "single", "--devices", "2"],
            "Strategy single trains on one device, but devices=2.\nUse strategy dp or ddp for more.",
        ),
        (
            ["mine.py", "--strategy", "dp", "--devices", "2", "--shares", "2,1,1"],
            "shares=2,1,1 is for 3 devices, but this run has 2.\n"
            "Give one number for each device, or omit shares for equal shares.",
        ),
        (
            ["mine.py", "--devices", "2", "--shares", "2,1", "--accumulate", "2"],
            "A global batch of 4 samples does not have a sample for each of 2 devices in each of 2 micro-batches.\n"
            "Set the global batch size to 6 or more, or make the shares more equal.",
        ),
        (
            ["mine.py", "--strategy", "dp", "--max-restarts", "2", "--watchdog", "9"],
            "--max-restarts and --watchdog is for ranks that this command starts, but it starts none.\n"
            "Pass it to the command that starts them; the output of strategy dp in one process can be redirected.",
        ),
        (
            ["mine.py", "--eval-every", "2"],
            "eval_every needs eval_dataset.\nAdd eval_dataset=... to the task, or omit eval_every.",
        ),
        (
            ["mine.py", "--devices", "2", "--min-devices", "1"],
            "min_devices needs max_restarts.\nAdd max_restarts=N (--max-restarts N), or omit min_devices.",
        ),
        (
            ["mine.py", "--watchdog", "0", "--watchdog-action", "warn"],
            "watchdog_action needs watchdog.\nAdd watchdog=SECONDS (--watchdog SECONDS), or omit watchdog_action.",
        ),
        (["mine.py", "--steps", "0"], "steps=0 is not allowed.\nGive a whole number of at least 1."),
    ],
)
def test_bad_input_is_one_clear_message(mine, capfd, args, text):
    assert main(["train", *args]) == 2
    assert capfd.readouterr().err == f"lockstep: {text}\n"


def test_more_gpus_than_there_are(mine, capfd, monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    assert main(["train", "mine.py", "--devices", "4"]) == 2
    assert capfd.readouterr().err == (
        "lockstep: 4 devices were requested, but this machine has 2 GPUs.\n"
        "Request at most 2, or hide the GPUs to use the CPU, as with CUDA_VISIBLE_DEVICES= .\n"
    )


def test_every_setting_is_a_flag_and_arrives(mine, monkeypatch):
    seen = []

    def train_nothing(task, settings):
        seen.append(settings)
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr(fit, "fit_with", train_nothing)
    flags = {
        "steps": 7,
        "seed": 3,
        "global_batch_size": 8,
        "accumulate": 2,
        "precision": "bf16",
        "clip": 0.5,
        "schedule": "cosine",
        "warmup": 2,
        "lr_scaling": "sqrt",
        "base_batch_size": 2,
        "shares": "2,1.5",
        "workers": 1,
        "prefetch": 4,
        "bad_samples": "skip",
        "on_nan": "skip",
        "check_replicas": 50,
        "strategy": "dp",
        "devices": 2,
        "checkpoint": "runs",
        "checkpoint_every": 5,
        "keep": 3,
        "export": "x.safetensors",
        "eval_every": 4,
        "early_stopping": "accuracy:max",
        "patience": 2,
        "run_dir": "record",
        "log_to": "tensorboard:figures,prometheus:9200",
        "profile_steps": "3,2",
        "profile_dir": "traces",
        "view": "lines",
        "price": "2.50 EUR",
    }
    names = ("keep_best", "checkpoint_blocking", "profile", "load_best")
    switches = {**dict.fromkeys(names, True), "keep_best": "loss"}
    args = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    args += [f"--{name.replace('_', '-')}" for name in names]
    assert main(["train", "mine.py", *args, "--no-resume"]) == 0
    others = ["--epochs", "2", "--resume", "--checkpoint", "runs", "--reproducible", "4", "--threads", "2"]
    others += ["--workers", "2"]
    assert main(["train", "mine.py", *others, "--quiet"]) == 0
    assert main(["train", "mine.py", "--compression", "bf16", "--bucket-cap-mb", "2.5", "--overlap-optimizer"]) == 0
    assert main(["train", "mine.py", "--compression", "powersgd:4"]) == 0
    local = {
        "strategy": "diloco",
        "sync_every": 6,
        "fragments": 2,
        "sync_delay": 1,
        "sync_patience": 9.0,
        "across": "machines",
    }
    local |= {"outer_lr": 0.5, "outer_momentum": 0.8}
    words = [word for name, value in local.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["train", "mine.py", *words]) == 0
    zero = "--strategy", "ddp-zero1", "--redundancy", "1", "--compile", "--no-sync-batchnorm"
    assert main(["train", "mine.py", *zero]) == 0
    assert seen == [
        FitSettings(**{**flags, "shares": (2, 1.5), "profile_steps": (3, 2)}, **switches, resume=False),
        FitSettings(epochs=2, resume=True, checkpoint="runs", reproducible=4, threads=2, workers=2, quiet=True),
        FitSettings(compression="bf16", bucket_cap_mb=2.5, overlap_optimizer=True),
        FitSettings(compression="powersgd:4"),
        FitSettings(**local),
        FitSettings(strategy="ddp-zero1", redundancy=1, compile=True, sync_batchnorm=False),
    ]
    rest = {"epochs", "resume", "quiet", "reproducible", "threads", "compression", "bucket_cap_mb", "overlap_optimizer"}
    rest |= {"redundancy", "compile", "sync_batchnorm"}
    assert {setting.name for setting in settings_of(FitSettings)} == {*flags, *switches, *local, *rest}


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--num-workers", " Did you mean --workers?"),
        ("--batch-size", " Did you mean --global-batch-size?"),
        ("--min-device", " Did you mean --min-devices?"),
        ("--lr", " It is in the task: lockstep.Task(optimizer=...)."),
        ("--qqq", ""),
    ],
)
def test_an_unknown_flag_is_named_with_the_one_that_was_meant(mine, capfd, flag, hint):
    assert main(["train", "mine.py", flag, "2"]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == f"Error: No such option '{flag}'.{hint}"


def test_words_that_are_no_numbers_are_named(mine, capfd):
    assert main(["train", "mine.py", "--shares", "2,x"]) != 0
    assert "Invalid value for '--shares': '2,x' is not a list of numbers such as 2,1,1." in capfd.readouterr().err
    assert main(["train", "mine.py", "--workers", "many"]) != 0
    assert "Invalid value for '--workers': 'many' is not a valid integer." in capfd.readouterr().err


def test_the_help_explains_every_flag():
    text = click.testing.CliRunner().invoke(train, ["--help-all"], prog_name="lockstep train").output
    for setting in settings_of(FitSettings):
        assert text.count(f"\n  --{setting.name.replace('_', '-')} ") == 1
    assert text.index("Common options:") < text.index("--epochs N") < text.index("Batch and learning rate:")
    assert "lockstep train examples/digits.py" in text


def test_the_short_help_fits_a_screen():
    invoke = click.testing.CliRunner().invoke
    text = invoke(train, ["--help"], prog_name="lockstep train", terminal_width=100).output
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert "--devices N" in text and "--help-all" in text and "--outer-momentum" not in text


def test_a_run_in_this_process(mine, capfd):
    args = ["--strategy", "dp", "--devices", "2", "--lr-scaling", "linear", "--global-batch-size", "8", "--warmup", "1"]
    assert main(["train", "mine.py", "--steps", "3", *args]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[:3] == [
        "mine: strategy dp on 2 CPUs, fp32, 8 samples, 3 steps = 3 epochs",
        "global batch 8 = 2 devices x 4 samples",
        "learning rate x 2: linear scaling from base batch 4 to 8; warm-up over 1 step, then constant",
    ]
    assert len(lines) == 6
    assert lines[3].startswith("3 steps in ") and lines[4].startswith("a step took ") and lines[5].startswith("used ")
