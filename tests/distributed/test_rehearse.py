"""`lockstep rehearse` and restarts: faults strike where the rules say, are reported, and cost nothing but time."""

import re
import shutil

import pytest

from tests.distributed.commands import lockstep

TASK = """\
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def data():
    random = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(240, 16, generator=random), torch.randint(0, 4, (240,), generator=random))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

task = lockstep.Task(
    name="small",
    model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)),
    dataset=data,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    global_batch_size=24,
)
"""
SCRIPT = """\
import sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(torch.ones(40, 4), batch_size=4):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
if sys.argv[1] == "same":
    weights = [torch.empty(1, 4) for _ in range(2)]
    dist.all_gather(weights, model.module.weight.detach())
    if dist.get_rank() == 0:
        print("the same" if torch.equal(*weights) else "different")
dist.barrier()
dist.destroy_process_group()
"""
BOTH_STRATEGIES = """\
import lockstep
from task import task
lockstep.fit(task, strategy="ddp", steps=5, on_nan="skip")
lockstep.fit(task, strategy="fsdp", steps=9, on_nan="skip")
"""
KEPT = ["--checkpoint", "CK", "--checkpoint-every", "5", "--export", "w.safetensors", "--reproducible", "4"]
COMMANDS = {
    "killed": [
        *("rehearse", "task.py", "--devices", "2", "--inject", "kill:rank=1,step=12,in=backward"),
        *("--max-restarts", "1", "--min-devices", "1", "--steps", "20", *KEPT),
    ],
    "nan": ["rehearse", "both.py", "--inject", "nan:rank=1,step=4", "--inject", "nan:rank=1,step=8"],
    "hang": ["rehearse", "train.py", "--inject", "hang:rank=1,step=3,in=loader", "--watchdog", "2", "--", "x"],
    "slow": ["rehearse", "train.py", "--inject", "straggler:rank=1,ms=40", "--", "same"],
    "network": [
        *("rehearse", "train.py", "--inject", "slowlink:mbit=1", "--inject", "drop:rank=1,seconds=1"),
        *("--inject", "oom:rank=0,step=99", "--", "same"),
    ],
    "alone": ["rehearse", "task.py", "--devices", "1", "--inject", "oom:rank=0,step=3", "--steps", "5"],
    "disk": ["rehearse", "task.py", "--inject", "disk-full:step=4", "--quiet", "--steps", "9", *KEPT],
}


@pytest.fixture
def run(tmp_path):
    """Run one of the commands in a folder of its own; return how it ended and the folder."""

    def start(name):
        for file, text in (("task.py", TASK), ("train.py", SCRIPT), ("both.py", BOTH_STRATEGIES)):
            (tmp_path / file).write_text(text)
        return lockstep(*COMMANDS[name], cwd=tmp_path), tmp_path

    return start


def rows(out):
    """The table as a row of cells for each fault, lines of a cell joined."""
    lines = out.partition("Rehearsal ")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if "noticed after" in line)
    heading = lines[first]
    starts = [heading.index(name) for name in ("injected", "noticed after", "message", "outcome")]
    found = []
    for line in lines[first + 2 :]:
        if not line.strip():  # the end of the table
            break
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        if cells[1]:
            found.append(cells)
        else:
            found[-1] = [f"{old} {new}".strip() for old, new in zip(found[-1], cells, strict=True)]
    return [[row[0].replace(", in=", ",in="), *row[1:]] for row in found]


@pytest.mark.timeout(300)
def test_a_run_that_lost_a_rank_ends_in_the_same_weights(run, ranks):
    def undisturbed(world, folder):
        import runpy

        import lockstep as package

        task = runpy.run_path(f"{folder}/task.py")["task"]
        package.fit(task, steps=20, reproducible=4, export=f"{folder}/whole.safetensors", quiet=True)

    killed, folder = run("killed")
    assert killed.code == 0, killed.out
    ranks(1)(undisturbed, str(folder))
    assert (folder / "w.safetensors").read_bytes() == (folder / "whole.safetensors").read_bytes()
    lines = [line for line in killed.out.splitlines() if line.startswith("lockstep: rank 1 was")]
    # The phase is known if the rank has written a heartbeat in it.
    assert [re.sub(r" \(\w+\);", ";", line) for line in lines] == [
        "lockstep: rank 1 was killed by SIGKILL (signal 9) in step 12; rank 0 goes on"
    ]
    assert "restart" not in killed.out and "is done again" in killed.out
    ((injected, _, _, outcome),) = rows(killed.out)
    assert injected == "kill:rank=1,step=12,in=backward rank 1, step 12"
    assert outcome == "recovered in place"


@pytest.mark.flaky(
    "a report counts for the fault before it in time, and a busy machine prints that of step 4 after step 8"
)
@pytest.mark.timeout(300)
def test_a_gradient_that_is_not_a_number_is_traced_to_its_rank_under_ddp_and_fsdp(run):
    nan, _ = run("nan")
    assert nan.code == 0, nan.out
    ddp, fsdp = rows(nan.out)
    assert (ddp[0], ddp[3]) == ("nan:rank=1,step=4 rank 1, step 4", "reported, the run went on")
    assert "not finite on rank 1 (epoch 1, step 4): first that of parameter 3.weight" in ddp[2]
    # There the gradient of a rank is no longer known by itself when it is checked.
    assert (fsdp[0], fsdp[3]) == ("nan:rank=1,step=8 rank 1, step 8", "reported without its rank, the run went on")
    assert "not finite (epoch 1, step 8): first that of parameter 3.weight." in fsdp[2]


@pytest.mark.soak  # the watchdog has tests of its own
@pytest.mark.timeout(300)
def test_a_script_with_torchs_ddp_that_hangs(run):
    hang, _ = run("hang")
    ((injected, _, message, outcome),) = rows(hang.out)
    assert (injected, outcome, hang.code) == (
        "hang:rank=1,step=3,in=loader rank 1, step 3",
        "ended with code 83",
        0,
    )
    assert message.startswith("rank 1 is in DataLoader.__next__ (train.py:7) for ")
    shutil.rmtree(re.search(r"/\S*lockstep-hang-\w+", hang.out).group())


@pytest.mark.timeout(300)
def test_a_slow_rank_of_a_script_is_found_in_its_record(run):
    slow, _ = run("slow")
    ((injected, _, message, outcome),) = rows(slow.out)
    assert (injected, outcome, slow.code) == (
        "straggler:rank=1,ms=40 rank 1, step 1",
        "reported, the run went on",
        0,
    )
    assert re.match(r"rank 1 is slow: it loses \d+", message)


@pytest.mark.timeout(300)
def test_a_slow_link_and_a_pause_change_no_weights_and_what_never_strikes_is_a_failure(run):
    network, _ = run("network")
    assert "\nthe same\n" in network.out
    slow, drop, late = rows(network.out)
    assert [(row[0].split()[0], row[3]) for row in (slow, drop)] == [
        ("slowlink:mbit=1", "survived"),
        ("drop:rank=1,seconds=1", "survived"),
    ]
    assert late == ["oom:rank=0,step=99", "-", "", "did not strike: rank 0 never came to forward in step 99"]
    assert network.code == 1
    assert "Not noticed or not injected: oom:rank=0,step=99; the job ended with code 0 after " in network.out


def test_a_fault_strikes_a_task_on_one_device(run):
    alone, _ = run("alone")
    ((injected, _, message, outcome),) = rows(alone.out)
    assert (injected, outcome, alone.code) == ("oom:rank=0,step=3 rank 0, step 3", "ended with code 1", 0)
    assert "out of memory" in message.lower()


def test_a_strategy_without_ranks_is_refused(monkeypatch, tmp_path, capsys):
    from lockstep.cli import main
    from lockstep.launcher.bootstrap import RANK_SETUP

    monkeypatch.setenv(RANK_SETUP, "[]")
    (tmp_path / "task.py").write_text("from tests.training import make_task\ntask = make_task()\n")
    assert main(["train", str(tmp_path / "task.py"), "--strategy", "dp"]) != 0
    assert "Faults are injected in ranks, and strategy dp in one process starts no ranks." in capsys.readouterr().err


@pytest.mark.soak  # and so have checkpoints on a full disk
@pytest.mark.timeout(300)
def test_a_full_disk_leaves_the_checkpoint_before(run):
    disk, folder = run("disk")
    ((_, _, message, outcome),) = rows(disk.out)
    assert message == "Cannot write the checkpoint CK/step-0000000005: No space left on device."
    assert (outcome, disk.code, disk.err) == ("ended with code 1", 0, "")  # quiet
    assert not (folder / "w.safetensors").exists()
