"""The first thing that differs is named, and what is rounding is not."""

import math
from dataclasses import replace

import pytest
import torch

from lockstep.study.verify.fingerprint import DOUBLE, EXACT, StepTrace, Trace, compare, fingerprint
from lockstep.study.verify.reference_loop import choose_steps

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
