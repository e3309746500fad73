"""`lockstep.init` when too few, too many or the wrong processes arrive: every rank that came says so, in time."""

import contextlib
import os
import random
import socket
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.comm import hierarchy
from tests.distributed.commands import lockstep as run_lockstep

HOST = socket.gethostname()


def free_port():
    """Return a port below those that the kernel gives to connections: it is chosen long before it is used."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def ranks_at(*ranks, world_size=3, sizes=None):
    """One process a rank, all told the same free port; ``None`` for a process that does not come."""
    port = str(free_port())
    return [
        None
        if rank is None
        else {
            "RANK": str(rank),
            "WORLD_SIZE": str((sizes or [world_size] * 9)[index]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for index, rank in enumerate(ranks)
    ]


SITUATIONS = {
    "complete": (ranks_at(0, 1, 2), 20.0),
    "one is missing": (ranks_at(0, None, 2), 2.0),
    "rank zero is missing": (ranks_at(None, 1, 2), 2.0),
    "one comes twice": (ranks_at(0, 1, 1), 20.0),
    "rank zero comes twice": (ranks_at(0, 0, 1), 20.0),
    "different sizes": (ranks_at(0, 1, 2, sizes=[3, 3, 4]), 20.0),
}


def attempt(world, envs, timeout_s):
    """Join the world that this rank's variables describe, twice, and report how it went."""
    dist.destroy_process_group()  # that of the pool
    env = envs[world.rank]
    if env is None:
        return None
    start = time.monotonic()
    with patch.dict(os.environ, env):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the pool's
        try:
            sums = []
            for _ in range(2):  # A second world on the same address works as well.
                with lockstep.init(timeout_s=timeout_s) as world:
                    total = torch.ones(1) * (world.rank + 1)
                    dist.all_reduce(total)
                    sums.append(total.item())
                    inside = os.environ.get("GLOO_SOCKET_IFNAME")
            return {"sums": sums, "inside": inside, "outside": os.environ.get("GLOO_SOCKET_IFNAME")}
        except lockstep.errors.LockstepError as error:
            waited_s = time.monotonic() - start
            return {"error": type(error).__name__, "text": str(error), "waited_s": waited_s, "pid": os.getpid()}


@pytest.fixture(scope="module")
def outcomes(ranks):
    """What each of three processes saw in each situation."""
    return {name: ranks(3)(attempt, envs, timeout_s) for name, (envs, timeout_s) in SITUATIONS.items()}


def test_complete_worlds_form_again_and_again(outcomes):
    for outcome in outcomes["complete"]:
        assert outcome == {"sums": [6.0, 6.0], "inside": "lo", "outside": None}


def test_a_missing_rank_is_named_by_all_that_came(outcomes):
    zero, absent, two = outcomes["one is missing"]
    assert absent is None
    for outcome in (zero, two):
        assert outcome["error"] == "WorldSizeMismatch"
        assert outcome["text"] == (
            "2 of 3 ranks came within 2 s; missing: rank 1.\n"
            f"Came: rank 0 (host {HOST}, pid {zero['pid']}), rank 2 (host {HOST}, pid {two['pid']}).\n"
            "Check that 3 processes were started and that none of them died before lockstep.init(); "
            "if some only start slowly, pass a longer timeout_s."
        )
        assert outcome["waited_s"] < 6


def test_a_missing_rank_zero_is_named_as_well(outcomes):
    _, one, two = outcomes["rank zero is missing"]
    for outcome in (one, two):
        assert outcome["error"] == "WorldSizeMismatch"
        assert "within 2 s: Connection refused.\nRank 0 hosts it: that did not start" in outcome["text"]
        assert outcome["waited_s"] < 6


@pytest.mark.parametrize(("situation", "rank"), [("one comes twice", 1), ("rank zero comes twice", 0)])
def test_a_rank_that_comes_twice_is_named_by_all(outcomes, situation, rank):
    doubles = [outcome["pid"] for outcome, env in zip(outcomes[situation], SITUATIONS[situation][0], strict=True)
               if env["RANK"] == str(rank)]  # fmt: skip
    for outcome in outcomes[situation]:
        assert outcome["error"] == "WorldSizeMismatch"
        cause, advice = outcome["text"].splitlines()
        assert cause in [
            f"Two processes have the rank {rank}: pid {a} on host {HOST} and pid {b} on host {HOST}."
            for a, b in (doubles, doubles[::-1])
        ]
        assert advice == (
            "Give each process a RANK of its own, from 0 to 2; if one belongs to another job, give this "
            "job another MASTER_PORT. `lockstep run` does both."
        )
        assert outcome["waited_s"] < 10


def test_different_world_sizes_are_shown_side_by_side(outcomes):
    for outcome in outcomes["different sizes"]:
        assert outcome["error"] == "ConfigurationError"
        cause, advice = outcome["text"].splitlines()
        assert cause.startswith("The ranks disagree about WORLD_SIZE: ")
        assert "3 for rank " in cause
        assert f"4 for rank 2 (host {HOST}, pid {outcomes['different sizes'][2]['pid']})" in cause
        assert advice == "Start every rank with the same WORLD_SIZE."


def join_on_machines(world, envs, timeout_s):
    """Join from machines that only their ids tell, and report the place there."""
    machine = ["a", "b", "a"][world.rank]
    dist.destroy_process_group()
    if envs[world.rank] is None:
        return None
    with patch.dict(os.environ, envs[world.rank]), patch.object(hierarchy, "machine_id", return_value=machine):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        try:
            with lockstep.init(timeout_s=timeout_s) as world:
                total = torch.ones(1) * (world.rank + 1)
                dist.all_reduce(total)
                return world.local_rank, world.local_world_size, world.node_rank, total.item()
        except lockstep.errors.LockstepError as error:
            return str(error)


def test_without_a_local_rank_the_hosts_say_who_shares_a_machine(ranks):
    port = str(free_port())
    envs = [
        {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "0.0.0.0", "MASTER_PORT": port} for rank in range(3)
    ]  # no loopback address, which would mean one machine
    assert ranks(3)(join_on_machines, envs, 20.0) == [(0, 2, 0, 6.0), (0, 1, 1, 6.0), (1, 2, 0, 6.0)]
    envs[1] = None
    zero, _, two = ranks(3)(join_on_machines, envs, 1.0)
    assert zero == two
    assert zero.startswith("2 of 3 ranks came within 1 s; missing: rank 1.\n")


AFTER_AN_ERROR_OF_NCCL = """
import os, sys
import torch.distributed as dist
import lockstep

with lockstep.init(backend="gloo"):
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    attempt, names = os.environ["TORCHELASTIC_RESTART_COUNT"], ("DUMP_ON_TIMEOUT", "WAIT_TIMEOUT_DUMP_MILSEC")
    found = store.check(["exception_dump"])
    print(attempt, found, *(os.environ.get(f"TORCH_NCCL_{name}") for name in names), flush=True)
    if attempt == "0":
        store.set("exception_dump", "left by the watchdog of a lost rank")
        os._exit(1)
"""


def test_what_the_watchdog_of_nccl_leaves_in_the_store_ends_no_rank_after_a_restart(tmp_path):
    """With a static rendezvous the store outlives the ranks; a rank that finds the key there would be aborted."""
    (tmp_path / "train.py").write_text(AFTER_AN_ERROR_OF_NCCL)
    where = "--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port())
    done = run_lockstep("run", *where, "--devices", "1", "--max-restarts", "1", str(tmp_path / "train.py"))
    assert (done.out, done.code) == ("0 False 0 1\n1 False None None\n", 0)
