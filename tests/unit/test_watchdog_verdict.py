"""When the watchdog fires, as a function of what is seen of the ranks."""

import pytest

from lockstep.monitor.verdict import RankSeen, is_hanging, operation

C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"


def waits(rank, still_s, line=3, name="all_reduce"):
    return RankSeen(
        rank,
        [
            (C10D, 9, name),
            ("/x/site-packages/torch/distributed/c10d_logger.py", 8, "wrapper"),
            ("/x/train.py", line, "<module>"),
        ],
        still_s,
    )


def works(rank, still_s, *, is_busy=False, **more):
    return RankSeen(rank, [("/x/train.py", 7, "load")], still_s, is_busy=is_busy, **more)


@pytest.mark.parametrize(
    ("ranks", "hangs"),
    [
        ([waits(0, 4), works(1, 4)], True),
        ([waits(0, 2), works(1, 4)], False),
        ([waits(0, 4), works(1, 1)], False),  # it moves
        ([waits(0, 4), works(1, 4, is_busy=True)], False),  # it computes
        ([waits(0, 16), works(1, 0, is_busy=True)], True),  # an endless loop
        ([waits(0, 4), waits(1, 4)], False),  # a slow transfer
        ([waits(0, 16), waits(1, 16)], True),
        ([waits(0, 4), waits(1, 4, line=5)], True),
        ([works(0, 99), works(1, 99)], False),  # nobody waits for anybody
        ([waits(0, 4), RankSeen(1, has_left=True)], True),
        ([waits(0, 4), works(1, 0.2, is_stopped=True)], True),
        ([waits(0, 4), works(1, 0.2, silent_s=4)], True),
    ],
)
def test_is_hanging(ranks, hangs):
    assert is_hanging(ranks, 3) is hangs


def test_the_operation_is_the_one_that_was_called():
    assert operation(waits(0, 1)) == "all_reduce"
    assert operation(works(0, 1)) is None
