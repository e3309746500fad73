"""An exception that nobody will catch, held up in a ``finally``: others learn of it soon, if nothing goes on in it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.distributed.commands import lockstep

SCRIPT = """\
import os, sys, time
import torch, torch.distributed as dist
import lockstep
mode, notes = sys.argv[1:]

def note(what):
    with open(notes, "a") as file:
        print(what, time.time(), file=file)

def train():
    if world.rank == 1:
        note("raised")
        raise KeyError("boom")
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        note("noticed")

def hangs():
    try:
        train()
    finally:
        time.sleep(60 if world.rank == 1 else 0)

def saves():
    try:
        train()
    finally:
        if world.rank == 1:
            with open(os.devnull, "wb") as file:
                for _ in range(20):
                    file.write(bytes(65536))
                    file.flush()
                    time.sleep(0.1)
            note("saved")

def catches():
    try:
        try:
            train()
        finally:
            time.sleep(1.5 if world.rank == 1 else 0)
    except KeyError:
        dist.all_reduce(torch.ones(1))

with lockstep.init(backend="gloo") as world:
    dist.barrier()
    {"hangs": hangs, "saves": saves, "catches": catches}[mode]()
"""
MODES = ["hangs", "saves", "catches"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held_up")
    (folder / "train.py").write_text(SCRIPT)

    def run(mode):
        done = lockstep("run", "--devices", "2", str(folder / "train.py"), mode, str(folder / mode))
        times = dict(line.split() for line in (folder / mode).read_text().splitlines())
        return mode, (done, {what: float(at) for what, at in times.items()})

    with ThreadPoolExecutor(3) as pool:  # they mostly sleep
        return dict(pool.map(run, MODES))


@pytest.mark.timeout(150)
def test_a_finally_that_hangs_is_not_waited_for(outcomes):
    done, at = outcomes["hangs"]
    assert done.code == 1
    assert "lockstep: Rank 1 failed: KeyError: 'boom'\nAt " in done.err
    assert at["noticed"] - at["raised"] < 10  # below one on a machine that has nothing else to do


@pytest.mark.timeout(150)
def test_a_finally_that_writes_comes_to_its_end(outcomes):
    done, at = outcomes["saves"]
    assert done.code == 1
    assert "lockstep: Rank 1 failed: KeyError: 'boom'\nAt " in done.err
    assert at["raised"] < at["saved"] < at["noticed"]


@pytest.mark.timeout(150)
def test_a_rank_whose_exception_is_caught_further_out_is_left_alone(outcomes):
    done, at = outcomes["catches"]
    assert (done.code, done.err.count("lockstep: Rank")) == (0, 0), done.err
    assert at["noticed"] - at["raised"] > 1.4
