"""`lockstep rehearse` and restarts: faults strike where they were told to, are named, and cost nothing but time."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor

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
REPRODUCIBLE = ["--steps", "30", "--reproducible", "4"]
KEPT = [*REPRODUCIBLE, "--checkpoint", "CK", "--checkpoint-every", "5", "--export", "w.safetensors"]
COMMANDS = {
    "undisturbed": ["train", "task.py", "--devices", "1", *REPRODUCIBLE, "--export", "w.safetensors"],
    "killed": [
        *("rehearse", "task.py", "--devices", "3", "--inject", "kill:rank=1,step=12"),
        *("--inject", "kill:rank=0,step=22,in=backward", "--max-restarts", "2", "--min-devices", "2", *KEPT),
    ],
    "nan": [
        *("rehearse", "task.py", "--devices", "2", "--inject", "nan:rank=1,step=4", "--steps", "9", "--quiet"),
    ],
    "hang": ["rehearse", "train.py", "--inject", "hang:rank=1,step=3,in=loader", "--watchdog", "2", "--", "x"],
    "network": [
        *("rehearse", "train.py", "--inject", "slowlink:mbit=1", "--inject", "drop:rank=1,seconds=1", "--", "same"),
    ],
    "disk": ["rehearse", "task.py", "--inject", "disk-full:step=4", *KEPT],
    "late": ["rehearse", "train.py", "--inject", "oom:rank=0,step=99", "--quiet", "--", "x"],
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    def start(name):
        folder = tmp_path_factory.mktemp(name)
        (folder / "task.py").write_text(TASK)
        (folder / "train.py").write_text(SCRIPT)
        return name, (lockstep(*COMMANDS[name], cwd=folder), folder)

    with ThreadPoolExecutor(3) as pool:
        return dict(pool.map(start, COMMANDS))


def rows(out):
    """The table as a row of cells for each fault, lines of a cell joined."""
    found = []
    for line in out.splitlines():
        if line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("│").split("│")]
            if cells[3]:
                found.append(cells)
            else:
                found[-1] = [f"{old} {new}".strip() for old, new in zip(found[-1], cells, strict=True)]
    return found


@pytest.mark.timeout(300)
def test_a_run_that_lost_ranks_ends_in_the_same_weights(done):
    (undisturbed, folder), (killed, killed_folder) = done["undisturbed"], done["killed"]
    assert (undisturbed.code, killed.code) == (0, 0), killed.err
    assert (folder / "w.safetensors").read_bytes() == (killed_folder / "w.safetensors").read_bytes()
    assert [line for line in killed.err.splitlines() if "restart" in line] == [
        "lockstep: rank 1 was killed by SIGKILL (signal 9) in step 12; restart 1 of 2 with 2 ranks",
        "lockstep: rank 0 was killed by SIGKILL (signal 9) in step 22; restart 2 of 2",
    ]
    resumed = [int(step) for step in re.findall(r"^resumed after step (\d+) of 30$", killed.out, re.MULTILINE)]
    # Checkpoints are written beside the training: the newest may not have been whole yet.
    assert resumed[0] in (5, 10)
    assert resumed[1] in (15, 20)
    assert len(resumed) == 2
    outcomes = [(row[0], row[3]) for row in rows(killed.out)]
    assert outcomes == [
        ("kill:rank=1,step=12 rank 1, step 12", "recovered by a restart"),
        ("kill:rank=0,step=22,in=backward rank 0, step 22", "recovered by a restart"),
    ]


@pytest.mark.timeout(300)
def test_a_gradient_that_is_not_a_number_is_traced_to_its_rank(done):
    nan, _ = done["nan"]
    ((injected, _, said, outcome),) = rows(nan.out)
    assert (injected, outcome, nan.code) == ("nan:rank=1,step=4 rank 1, step 4", "ended with code 1", 0)
    assert said.startswith("The gradient is not finite on rank 1 (epoch 1, step 4): first that of parameter 3.weight.")
    assert nan.err == ""  # quiet


@pytest.mark.timeout(300)
def test_a_script_with_torchs_ddp_that_hangs(done):
    hang, _ = done["hang"]
    ((injected, _, said, outcome),) = rows(hang.out)
    assert (injected, outcome, hang.code) == (
        "hang:rank=1,step=3,in=loader rank 1, step 3",
        "ended with code 83",
        0,
    )
    assert said.startswith("rank 1 is in DataLoader.__next__ (train.py:7) for ")
    shutil.rmtree(re.search(r"/\S*lockstep-hang-\w+", hang.err).group())


@pytest.mark.timeout(300)
def test_a_slow_link_and_a_pause_change_no_weights(done):
    network, _ = done["network"]
    assert network.out.startswith("the same\n")
    assert [(row[0].split()[0], row[3]) for row in rows(network.out)] == [
        ("slowlink:mbit=1", "survived"),
        ("drop:rank=1,seconds=1", "survived"),
    ]
    assert network.code == 0
    assert "no packet is touched" in network.out


@pytest.mark.timeout(300)
def test_a_full_disk_leaves_the_checkpoint_before(done):
    disk, folder = done["disk"]
    ((_, _, said, outcome),) = rows(disk.out)
    assert said == "Cannot write the checkpoint CK/step-0000000005: No space left on device."
    assert (outcome, disk.code) == ("ended with code 1", 0)
    assert not (folder / "w.safetensors").exists()


@pytest.mark.timeout(300)
def test_a_fault_that_never_strikes_is_a_failure(done):
    late, _ = done["late"]
    assert "the job ended with code 0 after " in late.out, late
    assert rows(late.out) == [
        ["oom:rank=0,step=99", "-", "", "did not strike: rank 0 never came to forward in step 99"]
    ]
    assert late.code == 1
    assert "Not noticed or not injected: oom:rank=0,step=99; the job ended with code 0 after " in late.out
