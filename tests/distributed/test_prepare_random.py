"""Random programs with `prepare` are those of one device, or are refused where nobody can tell what is meant."""

import itertools
import os
import time

import pytest

from tests.models import soak
from tests.prepared_programs import run_on_ranks, write_program

# Together they hold every kind, and few processes of loaders, which are slow to start.
SEEDS = {
    2: [0, 24, 103, 654, 31, 205, 403, 473, 646, 797, 861, 1004, 1169, 1390, 2013, 2423],
    3: [30, 52, 829, 1193, 1205, 1640, 2006, 2828, 2889],
    4: [17, 344, 744, 1214, 2692],
}
# Most kinds once more.
OTHER_SEEDS = {2: [84, 129], 3: [51, 136, 672, 998, 1386, 2057, 2307], 4: [263, 322, 607]}
BEGAN = time.monotonic()


def wrong(ranks, seeds, num_ranks):
    verdicts = run_on_ranks(ranks, [write_program(seed) for seed in seeds], num_ranks)
    return [f"{verdict}\n    {verdict.program}\n{verdict.trace}" for verdict in verdicts if not verdict.is_right]


@pytest.mark.parametrize(("num_ranks", "seeds"), [*SEEDS.items(), *soak(OTHER_SEEDS.items())])
def test_programs_are_those_of_one_device(ranks, num_ranks, seeds):
    found = wrong(ranks, seeds, num_ranks)
    assert not found, "\n".join(found)


def test_the_programs_hold_every_kind():
    kinds = [
        {kind for seed in seeds for kind in write_program(seed).kinds()} for seeds in (*SEEDS.values(), range(2000))
    ]
    assert set().union(*kinds[:-1]) >= kinds[-1]


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_new_programs_are_those_of_one_device(ranks):
    end = BEGAN + 60 * float(os.environ.get("SOAK_MINUTES", "1"))
    begin = 10_000 + int(time.time()) % 10**9
    for number, num_ranks in enumerate(itertools.cycle((2, 3, 4, 1))):
        found = wrong(ranks, range(begin + 25 * number, begin + 25 * (number + 1)), num_ranks)
        assert not found, "\n".join(found)
        if time.monotonic() > end:
            return
