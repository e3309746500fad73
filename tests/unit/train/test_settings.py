"""Settings: declared once, checked when made, and the keywords of `fit`."""

import inspect
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

import lockstep
from lockstep.base.setting import settings_of
from lockstep.cli import main
from lockstep.errors import ConfigurationError
from lockstep.train import fit
from lockstep.train.settings import _FOREIGN, FitSettings, Settings, merge_settings, read_settings, toml_line
from tests.training import make_task


def test_each_field_declares_its_kind():
    kinds = {setting.name: (setting.kind, setting.optional) for setting in settings_of(FitSettings)}
    assert kinds == {
        "epochs": ("int", True),
        "steps": ("int", True),
        "seed": ("int", False),
        "global_batch_size": ("int", True),
        "accumulate": ("int", False),
        "precision": ("choice", False),
        "compile": ("bool", False),
        "sync_batchnorm": ("bool", True),
        "clip": ("float", True),
        "schedule": ("choice", True),
        "warmup": ("int", False),
        "lr_scaling": ("choice", False),
        "base_batch_size": ("int", True),
        "shares": ("numbers", True),
        "reproducible": ("int", True),
        "compression": ("text", True),
        "bucket_cap_mb": ("float", True),
        "overlap_optimizer": ("bool", False),
        "sync_every": ("int", True),
        "redundancy": ("int", False),
        "fragments": ("int", True),
        "sync_delay": ("int", True),
        "sync_patience": ("float", True),
        "outer_lr": ("float", True),
        "outer_momentum": ("float", True),
        "across": ("choice", True),
        "threads": ("int", True),
        "workers": ("int", False),
        "prefetch": ("int", True),
        "bad_samples": ("choice", False),
        "on_nan": ("choice", False),
        "check_replicas": ("int", False),
        "strategy": ("choice", False),
        "devices": ("devices", True),
        "checkpoint": ("path", True),
        "checkpoint_every": ("int", True),
        "checkpoint_blocking": ("bool", False),
        "keep": ("int", True),
        "keep_best": ("metric", True),
        "load_best": ("bool", False),
        "early_stopping": ("text", True),
        "patience": ("int", True),
        "resume": ("bool", True),
        "export": ("path", True),
        "eval_every": ("int", True),
        "run_dir": ("path", True),
        "log_to": ("words", True),
        "profile": ("bool", False),
        "profile_steps": ("numbers", True),
        "profile_dir": ("path", True),
        "view": ("choice", False),
        "quiet": ("bool", False),
        "price": ("text", True),
    }


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"steps": 0}, "steps=0 is not allowed.\nGive a whole number of at least 1."),
        ({"steps": 1e3}, "steps=1000.0 is not allowed.\nGive a whole number of at least 1."),
        ({"accumulate": True}, "accumulate=True is not allowed.\nGive a whole number of at least 1."),
        ({"warmup": -1}, "warmup=-1 is not allowed.\nGive a whole number of at least 0."),
        ({"clip": "1"}, "clip='1' is not allowed.\nGive a number."),
        ({"clip": 0}, "clip=0 is not allowed.\nGive a number above 0, or omit it."),
        ({"precision": "fp8"}, "precision='fp8' is not allowed.\nGive one of fp32, bf16, fp16."),
        ({"schedule": "step"}, "schedule='step' is not allowed.\nGive one of constant, linear, cosine."),
        ({"shares": ()}, "shares=() is not allowed.\nGive numbers above 0, such as (2, 1, 1)."),
        ({"shares": (2, 0)}, "shares=(2, 0) is not allowed.\nGive numbers above 0, such as (2, 1, 1)."),
        ({"shares": "2,1"}, "shares='2,1' is not allowed.\nGive numbers above 0, such as (2, 1, 1)."),
        ({"shares": (1, float("inf"))}, "shares=(1, inf) is not allowed.\nGive numbers above 0, such as (2, 1, 1)."),
        (
            {"compression": "fp8"},
            "compression='fp8' is not a compression method.\n"
            "Give one of bf16, fp16, int8, int4, powersgd:RANK with a rank of at least 1, or None.",
        ),
        (
            {"compression": "powersgd:0"},
            "compression='powersgd:0' is not a compression method.\n"
            "Give one of bf16, fp16, int8, int4, powersgd:RANK with a rank of at least 1, or None.",
        ),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 is not allowed.\nGive a size in MiB above 0."),
        ({"bucket_cap_mb": "big"}, "bucket_cap_mb='big' is not allowed.\nGive a number."),
        (
            {"overlap_optimizer": True, "clip": 1.0},
            "overlap_optimizer cannot be combined with clip: parameters are updated before "
            "the whole gradient is known.\n"
            "Omit one of the two.",
        ),
        (
            {"overlap_optimizer": True, "precision": "fp16"},
            "overlap_optimizer cannot be combined with precision=fp16: parameters are updated before "
            "the whole gradient is known.\n"
            "Omit one of the two.",
        ),
        (
            {"overlap_optimizer": True, "bad_samples": "skip"},
            "overlap_optimizer cannot be combined with bad_samples=skip: parameters are updated before "
            "the whole gradient is known.\n"
            "Omit one of the two.",
        ),
        (
            {"compression": "bf16", "reproducible": 4},
            "compression cannot be combined with reproducible: reproducible uses its own exchange of gradients.\n"
            "Omit one of the two.",
        ),
        ({"workers": -1}, "workers=-1 is not allowed.\nGive a whole number of at least 0."),
        ({"workers": "many"}, "workers='many' is not allowed.\nGive a whole number of at least 0."),
        (
            {"epochs": 1, "steps": 2},
            "steps cannot be combined with epochs: both set the end of the run.\nOmit one of the two.",
        ),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_can(values, text):
    with pytest.raises(ConfigurationError) as error:
        Settings(**values)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"strategy": "gpipe"},
            "strategy='gpipe' is not allowed.\n"
            "Give one of single, dp, ddp, ddp-zero1, fsdp, local-sgd, diloco, torch-dp, torch-ddp.",
        ),
        ({"quiet": 1}, "quiet=1 is not allowed.\nGive True or False."),
        ({"checkpoint": 3}, "checkpoint=3 is not allowed.\nGive a path."),
        (
            {"profile": True},
            "profile needs profile_dir or run_dir.\nAdd profile_dir=DIR (--profile-dir DIR) "
            "or run_dir=DIR (--run-dir DIR), or omit profile.",
        ),
        (
            {"view": "live", "quiet": True},
            "quiet cannot be combined with view=live: it prints only errors.\nOmit one of the two.",
        ),
        ({"checkpoint": "runs", "keep": 0}, "keep=0 is not allowed.\nGive a whole number of at least 1."),
        ({"export": "model.pt"}, "export=model.pt does not end in .safetensors.\nName a file that does."),
    ],
)
def test_so_it_is_for_what_goes_on_around_the_steps(values, text):
    with pytest.raises(ConfigurationError) as error:
        FitSettings(**values)
    assert str(error.value) == text


def test_shares_are_kept_as_they_were_given():
    given = [2, 1.5]
    settings = Settings(shares=given)
    given.append(1)
    assert settings.shares == (2, 1.5)


def test_paths_may_be_strings():
    assert FitSettings(checkpoint="runs", export=Path("x.safetensors")).checkpoint == "runs"


def test_the_keywords_of_fit_are_the_settings():
    task, *keywords = inspect.signature(lockstep.fit).parameters.values()
    assert task.name == "task"
    assert {keyword.name: keyword.default for keyword in keywords} == {
        setting.name: setting.default for setting in settings_of(FitSettings)
    } | {"callbacks": ()}


@pytest.mark.parametrize(
    ("make", "name", "text"),
    [
        (lockstep.fit, "epoch", "unknown setting 'epoch'.\nDid you mean epochs?"),
        (lockstep.fit, "num_workers", "unknown setting 'num_workers'.\nDid you mean workers?"),
        (lockstep.fit, "max_epochs", "unknown setting 'max_epochs'.\nDid you mean epochs?"),
        (
            lockstep.fit,
            "learning_rate",
            "unknown setting 'learning_rate'.\nIt is in the task: lockstep.Task(optimizer=...).",
        ),
        (lockstep.Task, "batch_size", "unknown field of Task 'batch_size'.\nDid you mean global_batch_size?"),
        (
            lockstep.Task,
            "num_workers",
            "unknown field of Task 'num_workers'.\nIt is a setting of the run: lockstep.fit(task, workers=...).",
        ),
    ],
)
def test_an_unknown_keyword_is_named_with_the_one_that_was_meant(make, name, text):
    with pytest.raises(ConfigurationError) as error:
        make(*[None] * (make is lockstep.fit), **{name: 2})
    assert str(error.value) == text


def test_an_unknown_keyword_without_a_like_is_shown_what_there_is():
    with pytest.raises(ConfigurationError, match=r"unknown setting 'zzz'\.\nThere are epochs, steps, seed, "):
        Settings(zzz=1)


def test_what_is_foreign_stands_for_what_there_is():
    ours = {each.name for each in settings_of(FitSettings)} | {each.name for each in fields(lockstep.Task)}
    assert set(_FOREIGN.values()) <= ours
    assert not ours & _FOREIGN.keys()


NEEDS = {
    "checkpoint=DIR (--checkpoint DIR)": {
        "resume": True, "checkpoint_every": 5, "checkpoint_blocking": True, "keep": 2, "keep_best": True,
    },
    "workers=N (--workers N)": {"prefetch": 2},
    "lr_scaling=linear (--lr-scaling linear)": {"base_batch_size": 8},
    "profile=True (--profile)": {"profile_steps": (3, 2), "profile_dir": "traces"},
}  # fmt: skip


@pytest.mark.parametrize(("how", "name", "value"), [(how, *each) for how, all in NEEDS.items() for each in all.items()])
def test_a_setting_that_would_be_ignored_is_refused(how, name, value):
    with pytest.raises(ConfigurationError) as error:
        FitSettings(**{name: value})
    assert str(error.value) == f"{name} needs {how.partition('=')[0]}.\nAdd {how}, or omit {name}."


@pytest.mark.parametrize("given", [{"eval_every": 5}, {"keep_best": True, "checkpoint": "kept"}])
def test_a_setting_that_the_task_makes_idle_is_refused(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = next(iter(given))
    with pytest.raises(ConfigurationError) as error:
        lockstep.fit(make_task(), **given)
    assert str(error.value) == f"{name} needs eval_dataset.\nAdd eval_dataset=... to the task, or omit {name}."
    assert not list(tmp_path.iterdir())


# Settings in a file: what `lockstep train --settings` makes of it, and where it is wrong.


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "mine.toml").write_text(text)
        return "mine.toml"

    return write


def test_every_kind_of_setting_comes_back_as_it_was_written(file):
    values = {
        "workers": 2,
        "accumulate": 4,
        "lr_scaling": "linear",
        "base_batch_size": 8,
        "shares": [2, 1.5],
        "overlap_optimizer": True,
        "strategy": "ddp",
        "bucket_cap_mb": 2.5,
        "run_dir": 'runs/"a" \\ ü',
    }
    text = "# a comment\n" + "\n".join(toml_line(name, value) for name, value in values.items())
    assert read_settings(file(text)) == values
    assert FitSettings(**read_settings("mine.toml")).shares == (2, 1.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers = 2\nworker = 3\n", ": unknown setting 'worker'.\nDid you mean workers?"),
        ("batch_size = 3\n", ": unknown setting 'batch_size'.\nDid you mean global_batch_size?"),
        ("colour = 9\n", ": unknown setting 'colour'.\nlockstep train --help-all lists them all."),
        ("\n\n  accumulate = 0  # none\n", ": accumulate=0 is not allowed.\nGive a whole number of at least 1."),
        ('precision = "fp8"\n', ": precision='fp8' is not allowed.\nGive one of fp32, bf16, fp16."),
        (
            "seed = 1\nstrategy = ddp\n",
            " is not a file of settings: Invalid value (at line 2, column 12).\n"
            'Write one setting per line, such as workers = 2 or strategy = "ddp".',
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file, text, message):
    with pytest.raises(ConfigurationError) as error:
        read_settings(file(text))
    assert str(error.value) == f"mine.toml{message}"


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as error:
        read_settings("no.toml")
    assert str(error.value) == (
        "no.toml cannot be read: No such file or directory.\nName a file of settings, such as lockstep tune writes."
    )
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"bytes\.toml is not a file of settings: 'utf-8' codec"):
        read_settings("bytes.toml")


def test_what_is_given_wins_and_takes_the_place_of_its_rival():
    assert merge_settings({"epochs": 2, "workers": 3}, {"steps": 5}) == {"workers": 3, "steps": 5}
    assert merge_settings({"steps": 2, "workers": 3}, {"workers": 0}) == {"steps": 2, "workers": 0}


def test_flags_win_over_the_file_and_the_file_over_defaults(file, tmp_path, monkeypatch, capfd):
    seen = []
    monkeypatch.setattr(fit, "fit_with", lambda task, settings: seen.append(settings) or SimpleNamespace(exit_code=0))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text("from tests.training import make_task\ntask = make_task()\n")
    file('epochs = 3\nworkers = 2\nprefetch = 4\nstrategy = "fsdp"\ndevices = 2\nbucket_cap_mb = 5.0\n')
    # A flag wins even where it says what is the default anyway.
    flags = ["--settings", "mine.toml", "--strategy", "ddp", "--devices", "1", "--steps", "7", "--workers", "0"]
    assert main(["train", "mine.py", *flags]) == 0
    assert seen == [
        # Without loader processes, the file's prefetch would be refused.
        FitSettings(steps=7, workers=0, strategy="ddp", devices=1, bucket_cap_mb=5.0),
    ]
    assert main(["train", "mine.py", "--settings", "mine.toml", "--reproducible", "2", "--workers", "1"]) == 2
    assert capfd.readouterr().err == (
        "lockstep: bucket_cap_mb cannot be combined with reproducible: reproducible uses its own exchange of "
        "gradients.\n"
        "Omit one of the two.\nSettings without a flag are from mine.toml.\n"
    )


def test_all_settings_can_be_in_a_file(file):
    for setting in settings_of(FitSettings):
        if setting.default is not None:
            assert read_settings(file(toml_line(setting.name, setting.default))) == {setting.name: setting.default}
