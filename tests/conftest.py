"""Fixtures that all tests share, and the time that `make soak` is given."""

import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests import forking
from tests.distributed import commands
from tests.pool import Pool, Ranks

forking.install(commands.connection_for_children)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """Give ``ranks(n)(fn, *args)``: run ``fn(world, *args)`` on each of ``n`` ranks; see tests/pool.py."""
    pool = Pool()
    try:
        yield pool.ranks
    finally:
        pool.close()


_BEGAN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the soak tests that are still to come when the time given is over; what was skipped is reported."""
    minutes = float(os.environ.get("SOAK_MINUTES", "inf"))
    if item.get_closest_marker("soak") and time.monotonic() - _BEGAN > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes of SOAK_MINUTES are over")
