"""What ranks write: one merged stream on the terminal, files beside it; of `lockstep run`, `train` and `launch`."""

import os
import re
from unittest import mock

import pytest

from lockstep import launch
from lockstep.base.record_files import open_locked
from lockstep.cli import main
from lockstep.errors import ConfigurationError
from lockstep.launcher.command import run as start
from lockstep.telemetry.sinks import WandbRun
from tests.distributed.commands import lockstep

SCRIPT = """\
import os, sys, time
rank = int(os.environ["RANK"])
print("all", flush=True)
print("mine is", rank)
print("careful", file=sys.stderr)
if rank == 1:
    time.sleep(0.7)
    sys.stdout.write("without an end")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def test_lines_are_merged_and_kept(script, tmp_path):
    done = lockstep("run", "--devices", "3", "--log-dir", "logs", script, cwd=tmp_path)
    lines = done.out.splitlines()
    assert lines[:2] == ["all", "mine is 0"]
    assert sorted(lines[2:]) == ["[rank 1] mine is 1", "[rank 1] without an end", "[rank 2] mine is 2"]
    alone = "lockstep: no rank has joined a process group: each of 3 processes runs the whole script alone."
    assert [line for line in done.err.splitlines() if "OMP_NUM_THREADS" not in line][:2] == ["careful", alone]
    kept = (tmp_path / "logs" / "rank-1.log").read_text().splitlines()
    assert sorted(kept) == ["all", "careful", "mine is 1", "without an end"]


def test_logs_hold_tracebacks_and_a_file_for_a_silent_rank_and_are_never_erased(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1': raise ValueError('boom')\n"
        "if os.environ['RANK'] == '2': print('hello')\n"
        "time.sleep(60)\n"
    )
    for _ in range(2):
        done = lockstep("run", "--devices", "3", "--log-dir", "logs", str(path), cwd=tmp_path)
        assert done.code == 1
    silent, failed, _ = ((tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(3))
    assert silent == ""
    traces = re.split(r"--- another run, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ---\n", failed)
    head = f'Traceback (most recent call last):\n  File "{path}", line 2, in <module>\n'
    assert [trace.startswith(head) and trace.endswith("\nValueError: boom\n") for trace in traces] == [True, True]


def test_logs_that_another_run_writes_are_refused(script, tmp_path):
    other = open_locked(tmp_path / "rank-1.log")
    with (
        mock.patch.object(open_locked, "__kwdefaults__", {"wait_s": 0.1}),
        pytest.raises(ConfigurationError) as caught,
    ):
        start(["--devices", "2", "--log-dir", str(tmp_path), script])
    assert str(caught.value) == (
        f"{tmp_path}/rank-1.log cannot be written: another run, which has not ended, writes there.\n"
        "Name another place with --log-dir."
    )
    os.close(other)
    os.close(open_locked(tmp_path / "rank-0.log", wait_s=0))  # what was opened is closed again


def test_quiet_shows_none_of_it(script, tmp_path):
    done = lockstep("run", "--devices", "2", "--quiet", "--log-dir", str(tmp_path / "logs"), script)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert (tmp_path / "logs" / "rank-0.log").read_text().splitlines()[0] == "all"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--logs", "raw", "--quiet", "--log-dir", "x"],
            "--log-level error and --log-dir cannot be combined with --logs raw.\nLeave one of them out.",
        ),
        (
            ["-t", "3", "--log-level", "warning"],
            "--log-level warning cannot be combined with --redirects and --tee.\nLeave one of them out.",
        ),
        (
            ["--min-devices", "1", "--nnodes", "2"],
            "--min-devices 1 is not possible: it must be at least 1, and the job on one machine.\n"
            "For machines that may be lost, pass a range such as --nnodes 1:4.",
        ),
        (
            ["--log-dir", "/proc/nowhere"],
            "/proc/nowhere cannot be written: No such file or directory.\nName another place with --log-dir.",
        ),
    ],
)
def test_what_does_not_go_together(script, args, message):
    with pytest.raises(ConfigurationError) as caught:
        start(["--devices", "2", *args, script])
    assert str(caught.value) == message


TASK = """\
import os, sys
import torch
from torch import nn
import lockstep

def loss(model, batch):
    print("loss on", os.environ["RANK"])
    print("careful", file=sys.stderr)
    return model(batch[0]).square().mean()

task = lockstep.Task(
    model=lambda: nn.Linear(3, 1),
    dataset=lambda: torch.utils.data.TensorDataset(torch.ones(8, 3)),
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=4,
)
"""


@pytest.mark.soak
def test_train_keeps_what_its_ranks_write(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    options = ["--devices", "2", "--steps", "2", "--quiet", "--log-level", "warning", "--log-dir", "logs"]
    done = lockstep("train", "task.py", *options, cwd=tmp_path)
    assert (done.code, done.out, set(done.err.splitlines())) == (0, "", {"careful"})
    for rank in range(2):
        kept = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(kept) == ["careful", "careful", f"loss on {rank}", f"loss on {rank}"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--devices", "2", "--logs", "raw", "--log-dir", "x"],
            "--log-dir cannot be combined with --logs raw.\nLeave one of them out.",
        ),
        (
            ["--strategy", "single", "--log-dir", "x"],
            "--log-dir is for ranks that this command starts, but it starts none.\n"
            "Pass it to the command that starts them; the output of strategy single in one process can be redirected.",
        ),
        (
            ["--devices", "2", "--log-to", "wandb:digits"],
            "wandb:digits needs the package wandb_is_not_here, which is not installed on rank zero's machine.\n"
            "pip install 'lockstep-torch[wandb]'",
        ),
    ],
)
def test_train_says_what_it_cannot_do_before_it_starts_ranks(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.setattr(WandbRun, "package", "wandb_is_not_here")
    monkeypatch.setattr("lockstep.launcher.api.launch_with", lambda *_, **__: pytest.fail("processes started"))
    monkeypatch.delenv("LOCKSTEP_COMMAND", raising=False)
    (tmp_path / "task.py").write_text(TASK)
    assert main(["train", str(tmp_path / "task.py"), *args]) == 2
    assert capsys.readouterr().err == f"lockstep: {message}\n"


def test_launch_keeps_what_its_ranks_write(tmp_path, capsys):
    def work():
        print("on", os.environ["RANK"])
        return 5

    assert launch(work, devices=2, log_dir=tmp_path, log_level="error") == [5, 5]
    assert capsys.readouterr() == ("", "")
    assert [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)] == ["on 0\n", "on 1\n"]
