"""torchft's DistributedDataParallel, as its train_ddp.py writes it: a lighthouse, and a torchrun for each replica.

Only for the row of killed ranks: it is what torchft is for.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from bench.conformance_peers import shared
from bench.conformance_peers.shared import Case

PACKAGES = ("torchft",)
FORKS = False
"""Its driver starts the replicas."""
ALL = "min_replicas of all"
SWITCHES = {"killed": (ALL,)}
NUM_RANKS, RESTARTS, LIGHTHOUSE = "CONFORMANCE_NUM_RANKS", "CONFORMANCE_RESTARTS", "TORCHFT_LIGHTHOUSE"


def command(num_ranks: int, restarts: int) -> list[str]:
    """Return that of the driver."""
    return ["env", f"{NUM_RANKS}={num_ranks}", f"{RESTARTS}={restarts}", sys.executable, shared.SCRIPT]


def train(case: Case) -> None:
    """Start the lighthouse and the replicas, or train as one of them."""
    if LIGHTHOUSE in os.environ:
        replica(case)
        return
    from torchft.coordination import LighthouseServer

    num_ranks = int(os.environ[NUM_RANKS])
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=num_ranks if case.switch == ALL else 1, join_timeout_ms=10_000, quorum_tick_ms=100
    )
    run = [*shared.torchrun(1, int(os.environ[RESTARTS])), *sys.argv[1:]]
    replicas = [
        subprocess.Popen(run, env={**os.environ, LIGHTHOUSE: lighthouse.address(), "REPLICA_GROUP_ID": str(rank)})
        for rank in range(num_ranks)
    ]
    codes = [each.wait() for each in replicas]
    if any(codes):
        raise RuntimeError(f"The replicas ended with {codes}.")
    shared.record("done")
    os._exit(0)  # the lighthouse would keep this process alive


def replica(case: Case) -> None:
    """Train."""
    from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

    rank, num_ranks = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ[NUM_RANKS])
    data, module = shared.make_data(case), shared.make_model(case)
    sampler = DistributedSampler(
        data, replica_rank=rank, num_replica_groups=num_ranks, group_rank=0, num_replicas=1, shuffle=False
    )
    loader = DataLoader(data, batch_size=case.micro_batch(num_ranks), sampler=sampler)
    inner = shared.make_optimizer(module.parameters())

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=num_ranks if case.switch == ALL else 1,
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"train_ddp_{rank}",
        timeout=timedelta(seconds=30),
    )
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, inner)
    ready = Path(case.folder)
    (ready / f"ready_{rank}").touch()
    while len(list(ready.glob("ready_*"))) < num_ranks:  # so short a run would be over before the last replica is there
        time.sleep(0.05)
    num_steps = case.epochs * case.num_samples // shared.BATCH
    while manager.current_step() < num_steps:
        for batch in loader:
            optimizer.zero_grad()
            shared.kill_if_due(case, rank, manager.current_step() + 1)
            shared.loss_of(model, batch).backward()
            optimizer.step()
            if manager.current_step() >= num_steps:
                break
    shared.record_end(module)
    manager.shutdown(wait=False)
