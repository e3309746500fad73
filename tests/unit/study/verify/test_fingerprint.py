"""Fingerprints tell tensors apart, and say by how much."""

import math
from dataclasses import replace

import pytest
import torch

from lockstep.study.verify.fingerprint import DOUBLE, EXACT, SIZE, StepTrace, Trace, compare, distance, fingerprint
from lockstep.study.verify.reference_loop import choose_steps


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


# The first thing that differs is named, and what is rounding is not.


SIZES = {"samples of the data set": 20, "samples of a global batch": 4}


def tensors(gradient=1.0, weight=2.0, buffer=3.0):
    def full(value):
        return fingerprint(torch.full((4,), value, dtype=torch.float64))

    return {"parameter": {"w": full(weight)}, "gradient": {"w": full(gradient)}, "buffer": {"b": full(buffer)}}


def trace(*steps, samples=(b"a", b"b"), initial=None):
    made = [StepTrace(number, samples, 0.5, {"lr of group 0": 0.1}, step) for number, step in enumerate(steps)]
    return Trace(SIZES, initial or tensors(), tuple(made))


def change(run, step, **values):
    steps = list(run.steps)
    steps[step] = replace(steps[step], **values)
    return replace(run, steps=tuple(steps))


ONE = trace(tensors(), tensors(), samples=(b"a", b"b", b"c", b"d"))
RANKS = [trace(tensors(), tensors(), samples=part) for part in ((b"a", b"b"), (b"c", b"d"))]


def test_equal_runs_are_the_same():
    found = compare([ONE], RANKS, EXACT)
    assert found.same
    assert set(found.worst.values()) == {0.0}


def test_rounding_is_within_the_tolerance_but_not_to_the_bit():
    ranks = [change(rank, 1, tensors=tensors(gradient=1 + 1e-14)) for rank in RANKS]
    found = compare([ONE], ranks, DOUBLE)
    assert found.same
    assert found.worst["gradient"] == pytest.approx(1e-14, rel=0.1)
    assert not compare([ONE], ranks, EXACT).same


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"samples": (b"c", b"x")}, "samples at step 1 (1 of 4 samples are others)"),
        ({"samples": (b"c",)}, "samples at step 1 (3 samples instead of 4)"),
        ({"samples": (b"c", b"d", b"a")}, "samples at step 1 (5 samples instead of 4)"),
        ({"samples": (b"d", b"c")}, "samples at step 1 (the same samples in another order)"),
        ({"loss": 0.75}, "loss at step 1 (0.75 instead of 0.5)"),
        ({"rates": {"lr of group 0": 0.2}}, "learning rate lr of group 0 at step 1 on rank 1 (0.2 instead of 0.1)"),
        ({"tensors": tensors(gradient=1.5)}, "gradient w at step 1 on rank 1 (off by 5.0e-01 of its size)"),
        ({"tensors": tensors(weight=2.5)}, "parameter w at step 1 on rank 1 (off by 2.5e-01 of its size)"),
        ({"tensors": tensors(buffer=6.0)}, "buffer b at step 1 on rank 1 (off by 1.0e+00 of its size)"),
        ({"tensors": tensors(weight=math.nan)}, "parameter w at step 1 on rank 1 (not finite)"),
    ],
)
def test_the_first_difference_is_named(values, words):
    found = compare([ONE], [RANKS[0], change(RANKS[1], 1, **values)], DOUBLE)
    assert str(found.first) == words


def test_what_came_about_first_is_first():
    rank = change(RANKS[1], 0, tensors=tensors(buffer=4.0, weight=5.0), loss=9.0)
    kinds = [difference.kind for difference in compare([ONE], [RANKS[0], rank], DOUBLE).differences]
    assert kinds == ["loss", "parameter", "buffer"]


def test_sizes_and_initial_weights_come_before_all_steps():
    rank = replace(RANKS[1], sizes={**SIZES, "samples of a global batch": 8}, initial=tensors(weight=1.0))
    first, second = compare([ONE], [RANKS[0], rank], DOUBLE).differences
    assert str(first) == "size: samples of a global batch on rank 1 (8 instead of 4)"
    assert str(second) == "initial parameter w on rank 1 (off by 5.0e-01 of its size)"


def test_a_gradient_that_should_be_zero_is_measured_by_the_others():
    def with_noise(value):
        noise = fingerprint(torch.full((4,), value, dtype=torch.float64))
        return tensors() | {"gradient": {**tensors()["gradient"], "key": noise}}

    one, rank = (change(run, 0, tensors=with_noise(value)) for run, value in ((ONE, 1e-17), (RANKS[0], -3e-17)))
    assert compare([one], [rank, change(RANKS[1], 0, tensors=with_noise(1e-17))], DOUBLE).same


def test_every_rank_reads_all_of_a_stream():
    one = replace(ONE, sizes={**SIZES, "samples of the data set": None})
    assert compare([one], [one, one], EXACT).same
    other = change(one, 0, samples=(b"a", b"b", b"c", b"x"))
    assert compare([one], [one, other], EXACT).first.ranks == (1,)


@pytest.mark.parametrize(
    ("num_steps", "size", "drop_last", "expected"),
    [
        (4, 45, False, (0, 1, 2, 5)),
        (4, 45, True, (0, 1, 2, 3)),
        (4, 48, False, (0, 1, 2, 3)),
        (9, 45, False, tuple(range(9))),
        (1, 45, False, (0,)),
        (3, None, False, (0, 1, 2)),
        (4, 5, False, (0, 1, 2, 3)),
    ],
)
def test_the_uneven_last_batch_is_chosen(num_steps, size, drop_last, expected):
    sizes = {"samples of the data set": size, "samples of a global batch": 8}
    assert choose_steps(num_steps, sizes, drop_last=drop_last) == expected
