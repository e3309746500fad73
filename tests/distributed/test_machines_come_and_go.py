"""Machines that are lost, come back, or leave a running job: it goes on, and ends in the bits of an undisturbed run."""

import re
import signal
import time

import pytest

from tests.distributed.commands import lockstep as command
from tests.two_machines import two_machines

TASK = """\
import os, time
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def data():
    random = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(240, 16, generator=random), torch.randint(0, 4, (240,), generator=random))

def loss(model, batch):
    with open("steps", "a") as file:
        print(os.environ.get("WORLD_SIZE", "1"), lockstep.progress.now.step, file=file)
    if os.path.exists("slow"):
        time.sleep(0.1)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)),
    dataset=data,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    global_batch_size=24,
)
"""
TRAIN = ["train", "task.py", "--reproducible", "2", "--steps", "200", "--export", "w.safetensors"]
MEETING = [
    *("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.78.0.1:29600", "--rdzv-id", "job"),
    *("--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"),
    *("--max-restarts", "2", "--devices", "1"),
]


def folder_of(path):
    path.mkdir()
    (path / "task.py").write_text(TASK)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = folder_of(tmp_path_factory.mktemp("whole") / "run")
    done = command(*TRAIN, "--devices", "1", cwd=folder)
    assert done.code == 0, done.err
    return (folder / "w.safetensors").read_bytes()


def await_step(folder, world_size, after=0):
    """Wait until so many ranks train, and have come past a step; return the step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
        if lines and len(lines[-1].split()) == 2:
            size, step = map(int, lines[-1].split())
            if size == world_size and step > after:
                return step
        time.sleep(0.02)
    raise AssertionError(f"no step of {world_size} ranks after {after}: {lines[-3:]}")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("keeps", ["memory", "disk"])
def test_a_machine_is_lost_and_comes_back(tmp_path, undisturbed, keeps):
    folder = folder_of(tmp_path / "run")
    (folder / "slow").touch()
    keeping = ["--memory-checkpoint-every", "1"]
    if keeps == "disk":
        keeping += ["--checkpoint", "ck", "--checkpoint-every", "1000"]
    with two_machines() as machines:
        job = ["run", *MEETING, "-m", "lockstep", *TRAIN, *keeping]
        processes = [machines.start(index, *job, cwd=folder) for index in range(2)]
        try:
            killed_in = await_step(folder, 2, after=3)
            processes[1].kill()
            alone = await_step(folder, 1, after=killed_in)
            processes.append(machines.start(1, *job, cwd=folder))
            together = await_step(folder, 2, after=alone)
            if keeps == "disk":
                processes[2].send_signal(signal.SIGTERM)  # as before a spot instance ends
                processes[2].wait(60)
                await_step(folder, 1, after=together)
            (folder / "slow").unlink()
            told = [process.communicate(timeout=100) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    out, err = told[0]
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 75 if keeps == "disk" else 0], told
    assert (folder / "w.safetensors").read_bytes() == undisturbed
    found = re.findall(r"^resumed after step (\d+) of 200(, from memory)?$", out, re.MULTILINE)
    steps = [int(step) for step, _ in found]
    assert killed_in <= steps[0]  # the step that ran is done again, and no more
    joins = "lockstep: another machine waits to join; the ranks stop after this step, and start again with it\n"
    if keeps == "disk":
        assert [where for _, where in found] == [", from memory", "", ""]
        assert f"{joins}lockstep: machines came or left; the ranks start again\n" in err
        assert f"lockstep: Stopped by SIGTERM after step {steps[2]} of 200, saved in ck/" in told[2][1]
        # Nothing was lost: no step ran twice, but for that of the kill.
        sizes = [line.split()[0] for line in (folder / "steps").read_text().splitlines()]
        assert len(sizes) - 2 * 200 <= 4
    else:
        assert [where for _, where in found] == [", from memory"] * 2
        assert joins not in err
        assert alone - 1 <= steps[1] <= together
