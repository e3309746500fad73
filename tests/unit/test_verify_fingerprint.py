"""Fingerprints tell tensors apart, and say by how much."""

import math

import pytest
import torch

from lockstep.study.verify.fingerprint import SIZE, distance, fingerprint


def test_a_small_tensor_is_kept_whole():
    a, b = torch.randn(30, 7, dtype=torch.float64), torch.randn(30, 7, dtype=torch.float64)
    assert distance(fingerprint(a), fingerprint(b)) == pytest.approx(float((a - b).norm()), rel=1e-12)
    assert fingerprint(a).norm == pytest.approx(float(a.norm()), rel=1e-12)


def test_the_distance_of_large_tensors_is_estimated():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(300, 500, generator=generator, dtype=torch.float64)
    change = torch.randn(300, 500, generator=generator, dtype=torch.float64) * 1e-9
    found = fingerprint(a + change)
    assert len(found.values) == SIZE
    assert distance(found, fingerprint(a)) == pytest.approx(float(change.norm()), rel=0.15)


def test_one_element_of_a_large_tensor_is_enough():
    a = torch.zeros(10_000)
    b = a.clone()
    b[7777] = 1e-6
    assert distance(fingerprint(b), fingerprint(a)) == pytest.approx(1e-6)


def test_equal_bits_are_no_distance_whatever_they_hold():
    a = torch.tensor([math.nan, math.inf])
    assert distance(fingerprint(a), fingerprint(a.clone())) == 0.0


@pytest.mark.parametrize("other", [torch.tensor([math.nan, 1.0]), torch.zeros(3), torch.zeros(2, 1)])
def test_what_cannot_be_compared_is_infinitely_far(other):
    assert distance(fingerprint(other), fingerprint(torch.zeros(2))) == math.inf


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([True, False]),
        torch.arange(5),
        torch.tensor([1 + 2j, 3 - 1j]),
        torch.tensor([0.0, 1.0, 0.0, 2.0]).to_sparse(),
        torch.zeros(0),
        torch.tensor(3.0, dtype=torch.bfloat16),
    ],
)
def test_every_kind_of_tensor_has_one(tensor):
    assert distance(fingerprint(tensor), fingerprint(tensor.clone())) == 0.0
    assert fingerprint(tensor).norm == pytest.approx(
        float(torch.linalg.vector_norm(tensor.to_dense().to(torch.complex128)))
    )
