"""What a rank changes about its process: a fork waits until other threads sleep; a view as the only process."""

import os
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce

from lockstep.base.torch_internals import forget_groups
from lockstep.comm.process import single_process_view, wait_for_sleep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def busy_thread():
    """Run a thread that computes without the interpreter's lock; call what this gives to end it."""
    matrix, stop = torch.randn(1500, 1500), threading.Event()

    def compute():
        while not stop.is_set():
            matrix @ matrix

    def end():
        stop.set()
        thread.join()

    thread = threading.Thread(target=compute)
    thread.start()
    yield end
    end()


def test_all_threads_that_sleep_are_not_waited_for():
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    try:
        assert wait_for_sleep(20.0)
    finally:
        waiting.set()
        thread.join()


def test_a_thread_that_computes_is_waited_for_but_not_for_ever(busy_thread):
    start = time.monotonic()
    assert not wait_for_sleep(0.1)
    assert time.monotonic() - start >= 0.1
    busy_thread()
    assert wait_for_sleep(20.0)


def test_the_environment_says_rank_0_of_1_within(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with single_process_view():
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
        assert "LOCAL_RANK" not in os.environ
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")


def test_it_ends_with_an_error_too():
    kept = dist.get_rank
    with pytest.raises(KeyError), single_process_view():
        raise KeyError
    assert dist.get_rank is kept is dist.distributed_c10d.get_rank


def test_a_failed_connection_does_not_change_the_name_of_the_next_group():
    limit = timedelta(milliseconds=10)
    with pytest.raises(dist.DistError):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=limit)
    forget_groups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD.group_name == "0"  # as in a new process, which may be the other rank
    finally:
        dist.destroy_process_group()


def test_no_default_of_a_function_keeps_a_group_that_lost_a_rank(monkeypatch):
    """torch's optimizers import these functions, whose default is the default group of that moment."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(all_reduce, "__defaults__", (dist.ReduceOp.MAX, dist.group.WORLD))
    finally:
        dist.destroy_process_group()
    forget_groups()
    assert all_reduce.__defaults__ == (dist.ReduceOp.MAX, None)  # None: the default group when it is called
