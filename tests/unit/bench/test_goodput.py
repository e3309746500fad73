"""What bench/goodput.py makes of the times at which steps were done."""

import pytest

from bench.goodput import pace


def test_the_pace_without_and_with_checkpoints():
    # A step each 0.1 s; after every second one 0.5 s for a checkpoint; and once 9 s between two, for a restart.
    done_s = {1: 0.1, 2: 0.2, 3: 0.8, 4: 0.9, 5: 1.5, 6: 1.6, 7: 2.2, 8: 11.2}
    assert pace(done_s, 2) == (pytest.approx(0.1), pytest.approx(0.5))
    assert pace({step: 0.1 * step for step in range(1, 6)}, 0) == (pytest.approx(0.1), 0.0)
