"""The generators that a prepared loader leaves as they were."""

import random

import numpy as np
import pytest
import torch

from lockstep.loop.random_state import kept_states

DRAWS = {
    "nothing": lambda: None,
    "numbers": lambda: np.random.rand(5),
    "one of two normal numbers": lambda: np.random.randn(),
    "after a seed": lambda: (np.random.seed(4), np.random.randn()),
}


@pytest.mark.parametrize("inside", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("between", DRAWS.values(), ids=DRAWS)
def test_the_next_numbers_are_those_without_the_block(inside, between):
    def numbers(*, loads):
        np.random.seed(1), random.seed(1), torch.manual_seed(1)
        found = []
        for _ in range(4):
            if loads:
                with kept_states():
                    inside(), random.random(), torch.rand(3)
            between()
            found += [*np.random.randn(1), *np.random.rand(2), random.random(), float(torch.rand(()))]
        return found

    with kept_states():
        assert numbers(loads=True) == numbers(loads=False)
