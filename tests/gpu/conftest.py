"""Tests in this folder need a CUDA device and skip themselves without one."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool, Ranks

# cuBLAS reads it when it is used for the first time, and reproducible runs need it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Do not take the notices of a device's libraries for errors, such as that the check for waits is a prototype."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True, scope="session")
def _needs_cuda() -> None:
    import torch  # not at once: the process that only distributes the tests does not need it

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """As in the other tests, on any number of GPUs, and with warnings as above."""
    pool = Pool()
    try:
        yield partial(pool.ranks, warnings="default")
    finally:
        pool.close()


@pytest.fixture(scope="module")
def on_gpus() -> Callable[..., list[Any]]:
    """Give ``on_gpus(fn, *args, devices=n)``: run ``fn(world, *args)`` on ``n`` ranks, each with its GPU and NCCL."""
    import lockstep

    def run(fn: Callable[..., Any], *args: Any, devices: int | None = None, timeout_s: float = 240.0) -> list[Any]:
        def work() -> Any:
            with lockstep.init() as world:
                return fn(world, *args)

        return lockstep.launch(work, devices=devices, timeout_s=timeout_s)

    return run
