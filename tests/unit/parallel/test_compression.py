"""Codecs on one process: errors, sizes, odd lengths, and numbers that are not finite."""

import pytest
import torch

from lockstep.comm.shm import communicator
from lockstep.errors import ConfigurationError
from lockstep.parallel import compression
from lockstep.parallel.compression import Blocks

LEVELS = {8: 127, 4: 7}


SIZES = [(8, 256), (4, 128), (4, 32)]
CODECS = [Blocks(*size) for size in SIZES]
EACH_CODEC = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.bits} bits, {codec.block}")


def travel(codec, values):
    """Return what arrives of ``values``, what is kept, and how many bytes were sent."""
    kept = values.clone()
    data = torch.full((codec.num_bytes(len(values)) + 1,), 77, dtype=torch.uint8)
    codec.encode(kept, data[:-1])
    assert data[-1] == 77, "more bytes than announced"
    arrived = torch.full_like(values, 5.0)
    codec.decode(data[:-1], arrived)
    again = torch.ones_like(values)
    codec.decode(data[:-1], again, adds=True)
    assert torch.allclose(again, arrived + 1, rtol=0, atol=0, equal_nan=True)
    return arrived, kept, len(data) - 1


@EACH_CODEC
@pytest.mark.parametrize("numel", [0, 1, 2, 127, 128, 129, 255, 257, 1000, 4097])
def test_what_arrives_and_what_is_kept_are_all_and_the_error_is_half_a_level(codec, numel):
    size = torch.logspace(-20, 20, numel).clamp(1e-25, 1e25)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * size
    arrived, kept, num_bytes = travel(codec, values)
    assert num_bytes == -(-numel // codec.block) * 2 + -(-numel * codec.bits // 8)
    for block in range(0, numel, codec.block):
        part = slice(block, block + codec.block)
        # The scale is rounded up to a bfloat16, by less than 2^-7 of it.
        level = values[part].abs().max() / LEVELS[codec.bits] * (1 + 2**-7)
        assert (values[part] - arrived[part]).abs().max() <= level / 2 * (1 + 1e-5)
        assert torch.allclose(arrived[part] + kept[part], values[part], rtol=0, atol=float(level) * 1e-5)


@EACH_CODEC
def test_whole_levels_arrive_as_they_are(codec):
    levels = LEVELS[codec.bits]
    values = torch.arange(-levels, levels + 1).float().repeat(9) * 2.0**-9
    arrived, kept, _ = travel(codec, values)
    assert torch.equal(arrived, values)
    assert not kept.any()


@EACH_CODEC
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_block_that_is_not_finite_arrives_as_nan_and_keeps_nothing(codec, bad):
    values = torch.ones(3 * codec.block + 5)
    values[codec.block + 3] = bad
    arrived, kept, _ = travel(codec, values)
    second = slice(codec.block, 2 * codec.block)
    assert arrived[second].isnan().all()
    assert not kept[second].any()
    arrived[second] = 1.0
    assert (arrived - 1).abs().max() < 0.01
    assert kept.isfinite().all()


@EACH_CODEC
@pytest.mark.parametrize("tiny", [1e-45, 1e-38, 1e-32])
def test_numbers_too_small_for_a_scale_are_kept(codec, tiny):
    values = torch.full((codec.block + 1,), tiny)
    arrived, kept, _ = travel(codec, values)
    assert not arrived.any()
    assert torch.equal(kept, values)


def test_integers_need_the_c_library(monkeypatch):
    monkeypatch.setattr(communicator, "library", lambda: "its C library was not built")
    with pytest.raises(ConfigurationError) as caught:
        compression.make("int8")
    expected = "Lockstep cannot compress to int8 and int4: its C library was not built.\nOr use compression='bf16'."
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("int3", "compression='int3' is not a compression method.\n"),
        (torch.int8, "compression=torch.int8 is not a compression method.\n"),
        ("powersgd", "compression='powersgd' is not a compression method.\n"),
        ("powersgd:-1", "compression='powersgd:-1' is not a compression method.\n"),
    ],
)
def test_other_methods_are_refused(method, text):
    with pytest.raises(ConfigurationError) as caught:
        compression.make(method)
    assert str(caught.value).startswith(text)
