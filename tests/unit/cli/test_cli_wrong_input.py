"""What each command answers to wrong input: its exit code and the line with the cause, before any rank is started."""

import sys

import pytest

from lockstep.cli import main
from lockstep.launcher import fork_server

TASK = """\
import torch
from torch import nn
import lockstep

task = lockstep.Task(
    model=lambda: nn.Linear(3, 1),
    dataset=lambda: torch.utils.data.TensorDataset(torch.ones(8, 3)),
    loss=lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=4,
)
number = 3
"""
FILES = {
    "mine.py": TASK,
    "empty.py": "",
    "broken.py": "task = (\n",
    "failing.py": "import no_such_module\ntask = None\n",
    "unknown.toml": "wokers = 2\n",
    "wrong.toml": 'workers = "two"\n',
    "no.toml": "workers 2\n",
}

# Arguments, and how the line of standard error begins that names the cause.
WRONG = [
    ("tran mine.py", "Error: No such command 'tran'. Did you mean train?"),
    ("nonsense", "Error: No such command 'nonsense'."),
    ("train", "Error: Missing argument 'TASK.py'."),
    ("train nothing.py", "lockstep: nothing.py does not exist."),
    ("train .", "lockstep: . is a folder."),
    ("train empty.py", "lockstep: empty.py has no 'task'."),
    ("train failing.py", "lockstep: failing.py, line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ("train mine.py:other", "lockstep: mine.py has no 'other'."),
    ("train mine.py:number", "lockstep: mine.py: number is a int, not a lockstep.Task."),
    ("train mine.py --devcies 2", "Error: No such option '--devcies'."),
    ("train mine.py --steps 0", "lockstep: steps=0 is not allowed."),
    ("train mine.py --steps many", "Error: Invalid value for '--steps': 'many' is not a valid integer."),
    (
        "train mine.py --strategy dpp",
        "Error: Invalid value for '--strategy': 'dpp' is not one of 'single', 'dp', ",
    ),
    ("train mine.py --steps 3 --epochs 2", "lockstep: steps cannot be combined with epochs: "),
    (
        "train mine.py --devices 1000",
        "lockstep: A global batch of 4 is too small: each of 1000 devices needs a sample.",
    ),
    ("train mine.py --devices 0", "lockstep: devices=0 is not allowed."),
    (
        "train mine.py --accumulate 3 --global-batch-size 2",
        "lockstep: A global batch of 2 samples does not have a sample for each of 1 device in each of 3 micro-batches.",
    ),
    ("train mine.py --devices 2 --shares 1,2,3", "lockstep: shares=1,2,3 is for 3 devices, but this run has 2."),
    ("train mine.py --resume", "lockstep: resume needs checkpoint."),
    ("train mine.py --export weights.pt", "lockstep: export=weights.pt does not end in .safetensors."),
    ("train mine.py --export no/weights.safetensors", "lockstep: There is no folder no to export the weights to."),
    ("train mine.py --log-to nowhere:x", "lockstep: log_to='nowhere:x' does not name a known sink."),
    ("train mine.py --profile", "lockstep: profile needs profile_dir or run_dir."),
    ("train mine.py --compression lz4", "lockstep: compression='lz4' is not a compression method."),
    (
        "train mine.py --reproducible 2 --devices 4",
        "lockstep: reproducible=2 leaves 2 of 4 devices without a virtual shard.",
    ),
    ("train mine.py --settings no.toml", "lockstep: no.toml is not a file of settings: "),
    ("train mine.py --settings none.toml", "lockstep: none.toml cannot be read: No such file or directory."),
    ("train mine.py --settings unknown.toml", "lockstep: unknown.toml: unknown setting 'wokers'."),
    ("train mine.py --settings wrong.toml", "lockstep: wrong.toml: workers='two' is not allowed."),
    ("train mine.py --strategy single --devices 2", "lockstep: Strategy single trains on one device, but devices=2."),
    ("run", "Error: the following arguments are required: "),
    ("run --devices 0 mine.py", "lockstep: 0 is not a valid number of devices."),
    ("run --devices many mine.py", "lockstep: --devices many: "),
    ("run --nonsense mine.py", "Error: unrecognized arguments: --nonsense"),
    ("run --no-python no-such-program", "lockstep: Executable not found: no-such-program."),
    (
        "run --monitor m --no-python true",
        "lockstep: --monitor records Python scripts, but --no-python starts any executable.",
    ),
    (
        "run --min-devices 0 mine.py",
        "lockstep: --min-devices 0 is not possible: it must be at least 1, and the job on one machine.",
    ),
    ("run --min-devices 1 mine.py", "lockstep: --min-devices needs --max-restarts."),
    ("report nothing", "lockstep: There is no folder nothing."),
    ("report .", "lockstep: No run was recorded in .: it holds no run.json and no rank-*.jsonl."),
    ("report", "Error: Missing argument 'RUN'."),
    ("compare mine.py --strategies ddp,foo", "lockstep: There is no strategy 'foo'."),
    ("compare mine.py --json no/such.json", "lockstep: no/such.json cannot be written: No such file or directory."),
    ("verify mine.py --strategy diloco", "Error: No such option '--strategy'. It is a setting of the run"),
    ("verify mine.py --devices 0", "lockstep: devices=0 is not allowed."),
    ("predict mine.py", "lockstep: There is no link to predict for."),
    ("predict mine.py --link fast", "lockstep: 'fast' is not the rate of a link."),
    ("rehearse mine.py", "Error: Missing option '--inject'."),
    ("rehearse mine.py --inject explode:rank=0", "lockstep: --inject explode:rank=0: there is no fault 'explode'."),
    (
        "rehearse mine.py --inject kill:rank=7,step=1",
        "lockstep: --inject kill:rank=7,step=1: there is no rank 7: 2 ranks are counted from 0.",
    ),
    ("rehearse mine.py --inject kill:step=x", "lockstep: --inject kill:step=x: rank is missing."),
    ("doctor nothing.py", "lockstep: nothing.py does not exist."),
    ("doctor --devices 0", "Error: Invalid value for '--devices': 0 is not in the range x>=1."),
    ("tune mine.py --minutes 0", "lockstep: minutes=0 is not allowed."),
    ("tune mine.py --out no/such.toml", "lockstep: no/such.toml cannot be written: No such file or directory."),
    ("run nothing.py", "lockstep: There is no script nothing.py (looked in "),
]


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A folder with files; nothing that would start a process."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(fork_server, "start", lambda: None)
    for name in ("lockstep.launcher.api.supervise", "lockstep.launcher.command.supervise"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("LOCKSTEP_COMMAND", "lockstep")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("command", "cause"), WRONG)
def test_wrong_input_ends_with_2_and_the_cause(capfd, command, cause):
    assert main(command.split()) == 2
    lines = capfd.readouterr().err.splitlines()
    # Of wrong flags click and argparse show the usage first.
    assert next(line for line in lines if line.startswith(("lockstep: ", "Error: "))).startswith(cause)
    assert not any("Traceback" in line for line in lines)
