"""What ``lockstep compare`` refuses before it starts a process: one message and exit code 1."""

import pytest
import torch

from lockstep import cli
from lockstep.study.compare import benchmark

TASK = """
import torch
import lockstep

task = lockstep.Task(
    model=lambda: torch.nn.Linear(2, 1),
    dataset=lambda: torch.utils.data.TensorDataset(torch.ones(8, 2)),
    loss=lambda model, batch: model(batch[0]).mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=4,
)
"""


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Give ``refused(*args)``: the message with which the command ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "launch", lambda *_, **__: pytest.fail("processes were started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "mine.py").write_text(TASK)

    def run(*args):
        assert cli.main(["compare", *args]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return run


def test_a_file_without_a_task_is_refused(refused, tmp_path):
    (tmp_path / "other.py").write_text("x = 1\n")
    assert refused("none.py") == "lockstep: none.py does not exist.\nName a Python file that has a lockstep.Task.\n"
    assert refused("other.py") == "lockstep: other.py has no 'task'.\nDefine one: task = lockstep.Task(...)\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--devices", "0"], "devices=0 is not allowed.\nGive a whole number of at least 1."),
        (["--devices", "-1"], "devices=-1 is not allowed.\nGive a whole number of at least 1."),
        (
            ["--strategies", "ddp,fsdp"],
            "There is no strategy 'fsdp'.\nChoose from: single, torch-dp, dp, torch-ddp, ddp, ddp-zero1.",
        ),
        (["--rounds", "0"], "rounds=0 is not allowed.\nGive a whole number of at least 1."),
    ],
)
def test_what_does_not_go_together_is_refused(refused, args, message):
    assert refused("mine.py", *args) == f"lockstep: {message}\n"


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_that_cannot_be_written_is_refused_before_minutes_are_spent(refused, tmp_path, option):
    assert refused("mine.py", option, "no/figures") == (
        f"lockstep: no/figures cannot be written: there is no folder {tmp_path / 'no'}.\n"
        "Make it, or name another file.\n"
    )
    (tmp_path / "folder").mkdir()
    assert refused("mine.py", option, "folder") == (
        "lockstep: folder cannot be written: Is a directory.\nName another file.\n"
    )
    too_long = "x" * 300
    assert refused("mine.py", option, too_long) == (
        f"lockstep: {too_long} cannot be written: File name too long.\nName another file.\n"
    )


def test_a_file_that_could_be_written_is_left_as_it_was(refused, tmp_path):
    (tmp_path / "old.json").write_text("old")
    refused("mine.py", "--rounds", "0", "--json", "old.json", "--html", "new.html")
    assert (tmp_path / "old.json").read_text() == "old"
    assert not (tmp_path / "new.html").exists()
