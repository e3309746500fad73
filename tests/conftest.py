"""Fixtures that all tests share."""

from collections.abc import Callable, Iterator

import pytest

from tests.pool import Pool, Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """Give ``ranks(n)(fn, *args)``: run ``fn(world, *args)`` on each of ``n`` ranks; see tests/pool.py."""
    pool = Pool()
    try:
        yield pool.ranks
    finally:
        pool.close()
