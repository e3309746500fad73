"""A lost rank, or a lost machine, of a job on two machines: network namespaces, as in test_two_machines.py."""

import contextlib
import os
import re
import signal
import subprocess
import time

import psutil
import pytest

from tests.two_machines import two_machines

pytest.importorskip("torchft", reason="the extra `recovery` is not installed")

# Batches follow from the step and the rank alone. `kills` are lines "step:rank" of a file, once each.
SCRIPT = """
import hashlib, os, pathlib, sys, time
import torch, lockstep
torch.set_num_threads(1)
steps, pause_s, plan = int(sys.argv[1]), float(sys.argv[2]), pathlib.Path(sys.argv[3])
with lockstep.init() as world:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)
    )
    model = lockstep.DistributedDataParallel(net, bucket_cap_mb=0.005)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recovery = lockstep.Recovery(world, model=model, optimizer=optimizer)
    is_new = "LOCKSTEP_JOINS" not in os.environ and recovery.step == 0
    while recovery.step < steps:
        with recovery.attempt():
            step = recovery.step
            random = torch.Generator().manual_seed(step * 100 + world.rank)
            x, y = torch.randn(8, 16, generator=random), torch.randint(0, 4, (8,), generator=random)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            if is_new and f"{step}:{world.rank}" in plan.read_text().split():
                os.kill(os.getpid(), 9)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause_s)
        print("step", step, world.rank, world.world_size, f"{time.time():.2f}", flush=True)
    weights = b"".join(tensor.detach().numpy().tobytes() for tensor in net.state_dict().values())
    print("end", world.rank, world.world_size, recovery.step, hashlib.sha1(weights).hexdigest(), flush=True)
"""


@pytest.fixture
def machines(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan").write_text("")
    with two_machines() as found:
        yield found


def start(machines, folder, index, *, steps, pause_s=0.0, devices=2, nnodes="1:2", flags=(), **kwargs):
    where = ["--nnodes", nnodes, "--node-rank", str(index), "--master-addr", "10.78.0.1", "--max-restarts", "9", *flags]
    script = [str(folder / "train.py"), str(steps), str(pause_s), str(folder / "plan")]
    return machines.start(index, "run", *where, "--devices", str(devices), *script, **kwargs)


def finish(processes, timeout=90):
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=timeout))
    finally:
        for process in processes:
            process.kill()
    return outputs


def ends(outputs):
    """The last lines of the ranks: rank, number of ranks, steps, and the hash of the weights."""
    return sorted(re.findall(r"end (\d+) (\d+) (\d+) (\w+)", "".join(out for out, _ in outputs)))
