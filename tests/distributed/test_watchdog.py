"""`lockstep run --watchdog`: who waits for whom, in a script of one's own."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.commands import lockstep

SCRIPT = """\
import ctypes, os, signal, sys, time
import torch, torch.distributed as dist
mode = sys.argv[1]
dist.init_process_group("gloo")
rank, one = dist.get_rank(), torch.ones(1)
dist.all_reduce(one)
def load():
    time.sleep(90)
if mode == "own" and rank == 1:
    load()
if mode == "stop" and rank == 1:
    time.sleep(1.2); os.kill(os.getpid(), signal.SIGSTOP)
if mode == "gil" and rank == 1:
    lock, native = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    for _ in range(2): native.pthread_mutex_lock(lock)  # signals do not end it
if mode == "alone" and rank == 0:
    dist.all_reduce(one)  # evaluation
if mode == "slow":
    end = time.monotonic() + 8
    while time.monotonic() < end:
        torch.ones(1000).sum()
if mode == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for step in range(3):
        if rank == 1 and step == 2:
            load()
        model(torch.ones(1, 2)).sum().backward()
if mode == "different" and rank == 1:
    dist.broadcast(one, 0)
dist.barrier()
"""

HEAD = "lockstep: The job hangs: ranks have waited for each other for more than 3 s.\n"
EXPECTED = {
    "own": "rank 1 is in load (train.py:8) for N s\nrank 0 waits in barrier (train.py:30) for N s\n",
    "stop": "rank 1 was stopped by a signal (SIGSTOP), last seen at train.py:12\n"
    "rank 0 waits in barrier (train.py:30) for N s\n",
    "alone": "rank 0 waits in all_reduce (train.py:17) for N s\nrank 1 waits in barrier (train.py:30) for N s\n"
    "The ranks call different collectives: each must be called by all ranks, in the same order.\n",
    "different": "rank 0 waits in barrier (train.py:30) for N s\nrank 1 waits in broadcast (train.py:29) for N s\n"
    "The ranks call different collectives: each must be called by all ranks, in the same order.\n",
    "ddp": "rank 1 is in load (train.py:8) for N s\n"
    "rank 0 waits in backward (gradient exchange) (train.py:27) for N s\n",
}
RUNS = [*EXPECTED, "gil", "slow"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    path = tmp_path_factory.mktemp("watchdog") / "train.py"
    path.write_text(SCRIPT)

    def start(mode):
        return mode, lockstep("run", "--devices", "2", "--watchdog", "3", str(path), mode, timeout=90)

    with ThreadPoolExecutor(4) as pool:  # they mostly sleep
        return dict(pool.map(start, RUNS))


def told(done):
    """The report with its numbers of seconds and its folder taken out, and the stacks."""
    text = done.err[done.err.index("lockstep: The job") :]
    text = re.sub(r"for \d+ s\n", "for N s\n", text)
    report, _, folder = text.rpartition("The Python stacks of all ranks are in ")
    folder = Path(folder.strip().rstrip("."))
    stacks = {path.name: path.read_text() for path in folder.iterdir()}
    shutil.rmtree(folder)
    return report, stacks


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", EXPECTED)
def test_who_waits_for_whom(outcomes, mode):
    report, stacks = told(outcomes[mode])
    assert report == HEAD + EXPECTED[mode]
    assert outcomes[mode].code == 83
    assert "train.py" in stacks["rank-0.txt"]


@pytest.mark.timeout(240)
def test_a_call_that_holds_the_interpreter_still_leaves_its_stack(outcomes):
    report, stacks = told(outcomes["gil"])
    assert report.startswith(HEAD + "rank 1 does not answer: native code holds the interpreter, last seen at ")
    assert report.endswith("\nrank 0 waits in barrier (train.py:30) for N s\n")
    assert ", line 15 in <module>" in stacks["rank-1.txt"]
    assert outcomes["gil"].code == 83


@pytest.mark.timeout(240)
def test_ranks_that_all_compute_are_left_alone(outcomes):
    assert outcomes["slow"].code == 0
    assert "hangs" not in outcomes["slow"].err
