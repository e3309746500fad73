"""A checksum over bits: every flipped one shows, and so do elements that changed places."""

from functools import partial

import pytest
import torch

from lockstep.parallel.consistency import between, checksum, describe_difference, sides_of

SIZES = (1, 7, 2**14 - 1, 2**14, 2**14 + 3)


@pytest.mark.parametrize("size", SIZES)
def test_every_flipped_bit_shows(size):
    tensor = torch.randn(size)
    before = checksum([tensor])
    bits = tensor.view(torch.int32)
    for place in {0, size // 2, size - 1}:
        for bit in range(32):
            mask = torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
            bits[place] ^= mask
            assert checksum([tensor]) != before
            bits[place] ^= mask
    assert checksum([tensor]) == before


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
@pytest.mark.parametrize("size", [5, 8])
def test_any_dtype_will_do(dtype, size):
    tensor = torch.ones(size, dtype=dtype)
    before = checksum([tensor])
    assert checksum([tensor.clone()]) == before
    for place in range(size):
        other = tensor.clone()
        other[place] = 0
        assert checksum([other]) != before
    assert checksum([tensor[1:]]) == checksum([tensor[1:].clone()])  # where 32 bits do not begin at a multiple of them


def test_elements_that_changed_places_show():
    """Also where there are but two values, whose difference is a power of two."""
    seen = set()
    for place in range(0, 2**15, 64):
        tensor = torch.ones(2**15)
        tensor[place] = 2.0
        seen.add(checksum([tensor]))
    assert len(seen) == 2**15 // 64
    small = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    assert checksum(small) != checksum([small[0].flip(0), small[1]])
    assert checksum(small) != checksum(small[::-1])


def test_it_is_the_same_on_every_machine():
    tensors = [torch.arange(40000, dtype=torch.float32), torch.arange(6.0).view(2, 3).t(), torch.tensor(-0.0)]
    assert checksum(tensors) == KNOWN
    assert checksum([*tensors[:2], torch.tensor(0.0)]) != KNOWN
    assert checksum([]) == 0


KNOWN = -4481795195106698752


def test_the_largest_side_is_right():
    sides = sides_of(["a", "b", "a", "c"])
    assert sides == ((0, 2), (1,), (3,))
    assert between(sides) == "on rank 1 and on rank 3 from that on ranks 0, 2"
    assert between(((0,), (1,))) == "between rank 0 and rank 1"
    assert between(((0, 1), (2, 3))) == "between ranks 0, 1 and ranks 2, 3"
    assert between(((0, 1, 3), (2,))) == "on rank 2 from that on ranks 0, 1, 3"
    assert between(((0,), (1,), (2,))) == "between rank 0 and rank 1 and rank 2"


def test_what_differs_is_found_in_a_tensor():
    one = torch.zeros(2, 3)
    other = one.clone()
    other[1, 0] = 2.0
    found = partial(describe_difference, first_name="here", second_name="there")
    assert found(other, one) == (
        "1 of its 6 elements differs, by one bit: the first at [1, 0] is 2.0 here and 0.0 there."
    )
    other[1, 2] = 3.0
    assert found(other, one) == "2 of its 6 elements differ: the first at [1, 0] is 2.0 here and 0.0 there."
    assert "the first is 3 here and 2 there" in found(torch.tensor(3), torch.tensor(2))
    assert found(one, one) == ""
