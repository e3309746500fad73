"""How large buckets are where nobody says it."""

import pytest

from lockstep.parallel.ddp.bucket_plan import MIB
from lockstep.parallel.ddp.setup import bucket_caps_bytes


@pytest.mark.parametrize(
    ("cap_mb", "caps_mb", "can_overlap", "expected"),
    [
        (None, None, True, (1 * MIB, 25 * MIB)),
        (None, None, False, (25 * MIB,)),
        ("auto", None, False, (1 * MIB, 25 * MIB)),
        (2, None, False, (2 * MIB,)),
        (None, [1, 2.5], False, (1 * MIB, 5 * MIB // 2)),
    ],
)
def test_caps(cap_mb, caps_mb, can_overlap, expected):
    assert bucket_caps_bytes(cap_mb, caps_mb, can_overlap=can_overlap) == expected
