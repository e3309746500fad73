"""Ranks that come to harm inside a collective on shm. Started as a script, with a scenario for each round.

Each round forks ranks from this process, which has torch loaded already, and harms one of them. Prints one JSON line a
round: what each of the others raised, how long after the harm, and what is left.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import lockstep
from lockstep.comm.collectives import empty_buffer

NUM_RANKS, VICTIM = 3, 1
TIMEOUT_S = {"stop": 2.0}


def join(folder, rank, timeout_s):
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("shm", store=store, rank=rank, world_size=NUM_RANKS, timeout=timeout)


def work(scenario, folder, rank, index):
    """Reduce until something happens."""
    join(folder, rank, TIMEOUT_S.get(scenario, 30.0))
    sizes = [1, 5000, 1_000_000]
    tensor = torch.ones(sizes[index % 3])
    if index // 3 % 2:  # reduced where it lies
        tensor = empty_buffer(
            sizes[index % 3], dtype=torch.float32, device=torch.device("cpu"), group=dist.group.WORLD
        ).fill_(1.0)
    Path(f"{folder}/ready{rank}").touch()
    while True:
        if scenario == "raise" and rank == VICTIM and Path(f"{folder}/harm").exists():
            raise ValueError("a bug in the training script")
        if scenario == "leave" and rank == VICTIM and Path(f"{folder}/harm").exists():
            dist.destroy_process_group()
            time.sleep(60)
        if scenario == "message" and rank != VICTIM:
            dist.recv(tensor, VICTIM)
        elif scenario == "message":
            time.sleep(60)
        elif scenario == "async":
            dist.all_reduce(tensor, async_op=True).get_future().wait()
        else:
            dist.all_reduce(tensor)


def child(scenario, folder, rank, index):
    outcome = {"rank": rank}
    try:
        work(scenario, folder, rank, index)
    except BaseException as error:
        outcome |= {"error": type(error).__name__, "message": str(error), "at": time.monotonic()}
    Path(f"{folder}/outcome{rank}.tmp").write_text(json.dumps(outcome))
    Path(f"{folder}/outcome{rank}.tmp").rename(f"{folder}/outcome{rank}")
    # The hard way, as when another thread still runs: nothing is closed in order.
    os._exit(0)


def one_round(scenario, index):
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(NUM_RANKS):
            pid = os.fork()
            if pid == 0:
                child(scenario, folder, rank, index)
            pids.append(pid)
        try:
            harmed_at = harm(scenario, folder, pids[VICTIM])
            survivors = [rank for rank in range(NUM_RANKS) if rank != VICTIM]
            outcomes = [json.loads(await_file(f"{folder}/outcome{rank}").read_text()) for rank in survivors]
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    for outcome in outcomes:
        outcome["after_s"] = outcome.pop("at") - harmed_at
    return {"outcomes": outcomes, "left": sorted(os.listdir("/dev/shm"))}


def await_file(name):
    deadline = time.monotonic() + 20
    while not Path(name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(name)
        time.sleep(0.001)
    return Path(name)


def harm(scenario, folder, pid):
    for rank in range(NUM_RANKS):
        await_file(f"{folder}/ready{rank}")
    time.sleep(random.uniform(0.0, 0.03))
    now = time.monotonic()
    if scenario in ("kill", "async", "message"):
        os.kill(pid, signal.SIGKILL)
    elif scenario == "stop":
        os.kill(pid, signal.SIGSTOP)
    else:
        Path(f"{folder}/harm").touch()
    return now


if __name__ == "__main__":
    assert lockstep.__name__  # imported for what its import registers
    torch.set_num_threads(1)
    for number, name in enumerate(sys.argv[1:]):
        print(json.dumps({"scenario": name, **one_round(name, number)}), flush=True)
