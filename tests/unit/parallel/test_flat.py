"""Norms of flat tensors, and one factor on many tensors."""

import math

import pytest
import torch

from lockstep.parallel import flat
from lockstep.parallel.flat import combine_norms, flat_norm, flatten_like, list_norms, multiply_


def numbers(numel, dtype=torch.float64):
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("numel", [1, 4095, 32768, 32769, 1_000_003])
@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, math.inf])
def test_it_is_the_norm(numel, norm_type):
    flat = numbers(numel)
    expected = torch.linalg.vector_norm(flat, norm_type)
    torch.testing.assert_close(flat_norm(flat, norm_type), expected, rtol=1e-12, atol=0)
    parts = list(flat.split(50_000))
    torch.testing.assert_close(combine_norms(list_norms(parts, norm_type), norm_type), expected, rtol=1e-12, atol=0)


def test_rows_of_rows(monkeypatch):
    """More rows than one vector may have."""
    monkeypatch.setattr(flat, "_ROW", 16)
    monkeypatch.setattr(flat, "_SHORT", 64)
    values = numbers(16 * 16 * 65 + 3)
    torch.testing.assert_close(flat_norm(values), torch.linalg.vector_norm(values), rtol=1e-12, atol=0)


def test_float32_loses_nothing_on_the_way():
    flat = numbers(3_000_000, torch.float32)
    exact = torch.linalg.vector_norm(flat.double()).item()
    assert abs(flat_norm(flat).item() - exact) / exact < 2e-7


def test_the_number_of_threads_changes_no_bit():
    flat = numbers(3_000_000, torch.float32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(flat_norm(flat).item())
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [1000, 100_000])
def test_half_precision_gives_float32(dtype, numel):
    flat = numbers(numel, dtype) * 100
    norm = flat_norm(flat)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(flat.double()), rtol=1e-6, atol=0)


def test_complex_empty_and_none():
    flat = torch.complex(numbers(100_000), numbers(100_001)[:100_000])
    torch.testing.assert_close(flat_norm(flat), torch.linalg.vector_norm(flat), rtol=1e-12, atol=0)
    assert flat_norm(torch.zeros(0)).item() == 0
    assert flat_norm(torch.zeros(0), math.inf).item() == 0
    assert combine_norms([]).item() == 0


def test_sparse_tensors_count_by_their_values():
    """A row that was looked up twice is one row."""
    table = torch.nn.Embedding(4, 1, sparse=True)
    table(torch.tensor([0, 2, 2])).flatten().dot(torch.tensor([3.0, 1.0, 3.0])).backward()
    assert table.weight.grad.is_sparse
    assert combine_norms(list_norms([table.weight.grad])).item() == 5


def test_flattening_copies_only_what_has_gaps():
    images = numbers(2 * 3 * 4 * 5).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (images, images.permute(3, 1, 0, 2), numbers(12).view(3, 4).t(), numbers(3)):
        flat = flatten_like(tensor, tensor)
        assert flat.data_ptr() == tensor.data_ptr()
        assert flat.numel() == tensor.numel()
        assert flat.is_contiguous()
    gaps = numbers(12).view(3, 4)[:, :2]
    assert flatten_like(gaps, gaps).data_ptr() != gaps.data_ptr()
    assert sorted(flatten_like(gaps, gaps).tolist()) == sorted(gaps.flatten().tolist())


def test_one_factor_on_all_kinds():
    sparse = torch.tensor([0.0, 4.0, 0.0]).to_sparse()
    tensors = [torch.full((2,), 4.0), torch.full((3,), 4.0, dtype=torch.float64), sparse]
    multiply_(tensors, torch.tensor(0.25))
    assert [tensor.to_dense().max().item() for tensor in tensors] == [1.0, 1.0, 1.0]
    versions = [tensor._version for tensor in tensors]
    multiply_(tensors, torch.tensor(1.0))
    assert [tensor._version for tensor in tensors] == versions
