"""What srun starts, with the variables that it sets: ranks, and a launcher on each machine."""

import os
import signal
import subprocess
import time

import pytest

from tests.distributed import commands
from tests.two_machines import two_machines

TASK = """\
import os, time
import torch
from torch import nn
import lockstep

def loss(model, batch):
    time.sleep(float(os.environ.get("STEP_S", "0")))
    return model(batch[0]).square().mean()

task = lockstep.Task(
    model=lambda: nn.Linear(3, 1),
    dataset=lambda: torch.utils.data.TensorDataset(torch.ones(30, 3)),
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    global_batch_size=6,
)
"""
FAILING = """\
import os
import lockstep, torch, torch.distributed as dist
with lockstep.init(timeout_s=30) as world:
    dist.all_reduce(total := torch.ones(1))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["SLURM_NODEID"] == "1":
        raise ValueError("boom")
    dist.all_reduce(total)
    print(world.world_size, world.local_world_size, total.item())
"""


def step(rank, num_tasks, layout, nodes, **more):
    """The environment of a task of a step."""
    place = {"PROCID": rank, "LOCALID": 0, "NODEID": rank, "JOB_ID": os.getpid(), "STEP_ID": 0, **more}
    whole = {"STEP_NUM_TASKS": num_tasks, "STEP_NUM_NODES": num_tasks if layout == "1(x2)" else 1}
    whole |= {"STEP_TASKS_PER_NODE": layout, "STEP_NODELIST": nodes}
    ours = {f"SLURM_{name}": str(value) for name, value in {**place, **whole}.items()}
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **ours}


def ends(processes):
    try:
        return [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_signal_to_all_processes_before_the_limit_and_the_job_that_is_put_into_the_queue_again(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)

    def start(num_tasks, step_s, *more):
        train = ["train", "mine.py", "--steps", "40", "--checkpoint", "runs", "--checkpoint-every", "3", *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        processes = []
        for rank in range(num_tasks):
            env = step(rank, num_tasks, str(num_tasks), "localhost", LOCALID=rank, NODEID=0, STEP_ID=len(more))
            processes.append(commands.start(*train, cwd=tmp_path, env={**env, "STEP_S": str(step_s)}, **pipes))
        return processes

    first = start(2, 0.05, "--workers", "1")
    while not list(tmp_path.glob("runs/step-??????????")) and all(process.poll() is None for process in first):
        time.sleep(0.02)
    for process in first:
        os.killpg(process.pid, signal.SIGUSR1)  # as SLURM does: to the loader processes as well
    told = ends(first)
    assert [process.returncode for process in first] == [75, 75], told
    stopped_after = int(max(tmp_path.glob("runs/step-*")).name[5:])
    (again,) = start(1, 0)
    out, err = ends([again])[0]
    assert again.returncode == 0, err
    assert f"resumed after step {stopped_after} of 40" in out


@pytest.mark.parametrize("max_restarts", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_launcher_on_each_machine_finds_the_others_by_the_step(tmp_path, max_restarts):
    (tmp_path / "train.py").write_text(FAILING)
    job = ["run", "--devices", "1", "--max-restarts", str(max_restarts), str(tmp_path / "train.py")]
    with two_machines() as machines:
        processes = [machines.start(index, *job, env=step(index, 2, "1(x2)", "10.78.0.[1-2]")) for index in range(2)]
        told = ends(processes)
    if max_restarts:
        assert [process.returncode for process in processes] == [0, 0], told
        assert [out for out, _ in told] == ["2 1 4.0\n"] * 2
    else:
        assert [process.returncode for process in processes] == [1, 1], told
        assert all("ValueError: boom" in err for _, err in told)
