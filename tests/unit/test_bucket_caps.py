"""How large buckets are where nobody says it."""

import pytest

from lockstep.parallel.ddp.buckets import MIB
from lockstep.parallel.ddp.setup import bucket_caps_bytes


@pytest.mark.parametrize(
    ("cap_mb", "caps_mb", "can_overlap", "expected"),
    [
        (None, None, True, (1 * MIB, 25 * MIB)),
        (None, None, False, (25 * MIB,)),
        (2, None, False, (2 * MIB,)),
        (None, [1, 2.5], False, (1 * MIB, 5 * MIB // 2)),
    ],
)
def test_caps(cap_mb, caps_mb, can_overlap, expected):
    assert bucket_caps_bytes(cap_mb, caps_mb, can_overlap=can_overlap, is_compressed=False) == expected


@pytest.mark.parametrize("cap_mb", ["auto", 0, -1])
def test_what_is_no_size(cap_mb):
    with pytest.raises(ValueError) as caught:
        bucket_caps_bytes(cap_mb, None, can_overlap=True, is_compressed=False)
    assert str(caught.value) == f"A bucket's size must be a positive number of MiB, but got {cap_mb!r}."
