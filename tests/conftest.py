"""Fixtures that all tests share, and the time that `make soak` is given."""

import gc
import os
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import pytest

# Before torch, whose libgomp reads it once. Else each thread that has done its part of an operation spins for the next,
# on cores that other ranks, or the tests of another process, need: several times the processor time of some tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The threads of numpy's and scipy's OpenBLAS spin for a while, too, and no test needs them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# The server of torch's TCPStore asks the DNS for the name of each client, of 127.0.0.1 too, and answers nobody
# meanwhile. Where no DNS answers, the resolver would wait 5 s, twice, each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# For all processes and threads that this one starts: one that wakes up does not stop one that runs. Else, with more
# ranks than cores, Gloo's thread calls epoll_wait a thousand times for each all-reduce of three ranks: it skips a
# connection whose lock another thread holds, and that thread, it seems, was stopped. With this, an all-reduce of three
# ranks on two cores took a quarter of the processor time.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

from tests import forking, simulated_device
from tests.pool import Pool, Ranks

if TYPE_CHECKING:
    import torch  # not at once: the process that only distributes the tests does not need it

forking.install(forking.connection_to_server, for_single_ranks=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """Give ``ranks(n)(fn, *args)``: run ``fn(world, *args)`` on each of ``n`` ranks; see tests/pool.py."""
    pool = Pool()
    try:
        yield pool.ranks
    finally:
        pool.close()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> "Callable[[int], list[torch.device]]":
    """Give ``gpus(n)``: let torch find ``n`` CUDA devices from now on; it returns those that become the current one."""
    import torch

    from lockstep.base import activity

    monkeypatch.setattr(activity.now, "device", None)  # put back at the end
    chosen: list[torch.device] = []

    def pretend(count: int) -> "list[torch.device]":
        found = torch.device("cuda")
        answers = {
            "current_accelerator": lambda check_available=False: found if count or not check_available else None,
            "device_count": lambda: count,
            "is_available": lambda: count > 0,
            "set_device_index": chosen.append,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.accelerator, name, answer)
        return chosen

    return pretend


@pytest.fixture(scope="session")
def sim_ranks() -> Iterator[Callable[..., Ranks]]:
    """As ``ranks``, but with the simulated accelerator, in workers of its own; see tests/simulated_device."""
    if reason := simulated_device.missing():
        pytest.skip(reason)
    simulated_device.build()  # here, where it may take its time
    pool = Pool(simulated=True)
    try:
        yield pool.ranks
    finally:
        pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that may fail without a reason."""
    for item in items:
        if (marker := item.get_closest_marker("flaky")) and not marker.args:
            raise pytest.UsageError(f'{item.nodeid}: give the reason: @pytest.mark.flaky("the reason")')


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported out of all garbage collections: during the imports they take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


_BEGAN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the soak tests that are still to come when the time given is over; what was skipped is reported."""
    minutes = float(os.environ.get("SOAK_MINUTES", "inf"))
    if item.get_closest_marker("soak") and time.monotonic() - _BEGAN > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes of SOAK_MINUTES are over")
