"""The pool itself: results, errors, deaths and hangs of ranks arrive at the test, and no worker outlives it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, PoolError


class LocalError(Exception):
    """An error that only this test module knows."""


class Unpicklable(Exception):
    """An error that cannot be rebuilt from its arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def summed_rank(world, offset):
    tensor = torch.tensor([float(world.rank + offset)])
    dist.all_reduce(tensor)
    return world.rank, world.world_size, tensor.item()


def test_results_arrive_by_rank(ranks):
    assert ranks(2)(summed_rank, 10) == [(0, 2, 21.0), (1, 2, 21.0)]


def test_world_sizes_follow_one_another(ranks):
    assert ranks(1)(summed_rank, 0) == [(0, 1, 0.0)]
    assert ranks(3)(summed_rank, 0) == [(0, 3, 3.0), (1, 3, 3.0), (2, 3, 3.0)]
    assert ranks(2)(lambda world: world.rank) == [0, 1]


def test_workers_persist(ranks):
    assert ranks(2)(lambda world: os.getpid()) == ranks(2)(lambda world: os.getpid())


def test_more_ranks_than_workers_are_refused(ranks):
    with pytest.raises(ValueError) as caught:
        ranks(5)
    assert str(caught.value) == "ranks(5): the pool has 1 to 4 ranks"


def test_error_of_the_first_failing_rank_is_raised_while_the_others_wait(ranks):
    def fail_on_one(world):
        if world.rank == 1:
            print("about to fail")
            raise LocalError("the message")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(LocalError) as caught:
        ranks(2)(fail_on_one)
    assert str(caught.value) == "the message"
    (note,) = caught.value.__notes__
    assert note.startswith("--- raised by rank 1 of 2:\nTraceback")
    assert "in fail_on_one" in note
    assert note.endswith("--- rank 1 wrote:\nabout to fail")
    assert time.monotonic() - start < 20


@pytest.mark.soak
def test_a_failed_rank_that_keeps_its_sockets_open_does_not_hold_up_the_others(ranks):
    def fail_on_one(world):
        if world.rank == 1:
            sys.never_freed = world.group
            raise LocalError("the message")
        dist.barrier()

    start = time.monotonic()
    first, second = ranks(2).each(fail_on_one)
    assert "Connection closed by peer" in str(first.error)
    assert str(second.error) == "the message"
    assert time.monotonic() - start < 20
    assert ranks(2)(lambda world: world.rank) == [0, 1]


@pytest.mark.soak
def test_ranks_that_could_not_make_a_group_alike_meet_in_the_next_call(ranks):
    def fail_to_make_a_group(world):
        if world.rank == 1:
            dist.destroy_process_group()
            with contextlib.suppress(dist.DistStoreError):
                store = dist.HashStore()
                dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.1))

    ranks(2)(fail_to_make_a_group)
    assert ranks(2)(lambda world: world.rank, timeout=10.0) == [0, 1]


def test_each_gives_every_ranks_outcome(ranks):
    def fail_on_one(world):
        if world.rank == 1:
            raise LocalError("only here")
        return "fine"

    first, second = ranks(2).each(fail_on_one)
    assert (first.rank, first.result, first.error) == (0, "fine", None)
    assert (second.rank, second.result) == (1, None)
    assert type(second.error) is LocalError
    assert str(second.error) == "only here"


def test_error_that_cannot_be_pickled_arrives_as_text(ranks):
    def fail(world):
        raise Unpicklable(1, 2)

    with pytest.raises(RuntimeError) as caught:
        ranks(1)(fail)
    assert str(caught.value) == "Unpicklable: 1 and 2"


def test_warnings_are_errors_unless_allowed(ranks):
    def warn(world):
        warnings.warn("careful", stacklevel=1)
        return "went on"

    with pytest.raises(UserWarning) as caught:
        ranks(1)(warn)
    assert str(caught.value) == "careful"
    assert ranks(1, warnings="ignore")(warn) == ["went on"]


@pytest.fixture
def own_pool():
    """A pool whose workers this test may break."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.soak
def test_death_of_a_worker_is_named_and_the_next_call_works(own_pool):
    def die_on_one(world):
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    pids = own_pool.ranks(2)(lambda world: os.getpid())
    with pytest.raises(PoolError) as caught:
        own_pool.ranks(2)(die_on_one)
    assert str(caught.value).splitlines()[0] == "rank 1 of 2 died with exit status -9"
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert own_pool.ranks(2)(lambda world: world.rank) == [0, 1]


@pytest.mark.soak
@pytest.mark.parametrize("forked", [True, False])
def test_workers_can_start_from_any_folder(own_pool, tmp_path, monkeypatch, forked):
    monkeypatch.chdir(tmp_path)
    if not forked:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # what is forked has read another value
    found = own_pool.ranks(1)(lambda world: (os.getcwd(), os.environ.get("CUDA_VISIBLE_DEVICES")))
    assert found == [(str(Path(__file__).parents[2]), os.environ.get("CUDA_VISIBLE_DEVICES"))]


def test_timeout_names_the_stuck_ranks_and_shows_where_they_are(own_pool):
    def stick_on_one(world):
        if world.rank == 1:
            time.sleep(60)

    with pytest.raises(PoolError) as caught:
        own_pool.ranks(2)(stick_on_one, timeout=1.0)
    assert str(caught.value).splitlines()[0] == "ranks [1] of 2 did not finish within 1 s"
    assert "in stick_on_one" in str(caught.value)


@pytest.mark.soak
def test_killed_session_leaves_no_worker():
    code = (
        "import os, time\n"
        "from tests.pool import Pool\n"
        "print(*Pool().ranks(2)(lambda world: os.getpid()), flush=True)\n"
        "time.sleep(60)\n"
    )
    session = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    with session:
        workers = [psutil.Process(int(pid)) for pid in session.stdout.readline().split()]
        assert len(workers) == 2
        session.kill()
    _gone, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []
