"""Settings in a file: what `lockstep train --settings` makes of it, and where it is wrong."""

import sys
from types import SimpleNamespace

import pytest

from lockstep.cli import main
from lockstep.errors import ConfigurationError
from lockstep.train import fit
from lockstep.train.settings import FitSettings, merge_settings, read_settings, settings_of, toml_line


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
