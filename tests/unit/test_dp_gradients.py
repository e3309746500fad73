"""The sum of the replicas' gradients: in threads it has the bits of the plain tree."""

import pytest
import torch

from lockstep.parallel.dp import gradients
from lockstep.parallel.dp.gradients import even_cuts, sum_in_tree, sum_side_by_side

CPU = torch.device("cpu")


def rows(count):
    generator = torch.Generator().manual_seed(count)
    made = [[torch.randn(size, generator=generator) for size in (5, 70_000, 3, 9)] for _ in range(count)]
    made[1][2] = made[0][3] = None  # used by some replicas only
    for row in made:
        row.append(None)  # by none
        pair = torch.randn(2, 8, generator=generator)
        row += [pair[0].view(8), pair[0].view(2, 4)]  # autograd may give two parameters one gradient
    return made


@pytest.mark.parametrize("count", [2, 3, 4])
def test_in_threads_the_sum_has_the_same_bits(count, monkeypatch):
    monkeypatch.setattr(gradients, "_WORTH_THREADS_NUMEL", 1)
    jobs = []

    def run(functions):
        jobs.extend(functions)
        return [function() for function in reversed(functions)][::-1]

    expected = sum_in_tree(rows(count), [CPU] * count, owned=False)
    found = sum_side_by_side(rows(count), [CPU] * count, run)
    assert len(jobs) == count
    assert [each is None for each in found] == [each is None for each in expected]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True) if pair[0] is not None)


def test_few_elements_are_summed_in_the_calling_thread():
    def run(functions):
        raise AssertionError("handed over")

    assert torch.equal(sum_side_by_side([[torch.ones(3)], [torch.ones(3)]], [CPU, CPU], run)[0], torch.full((3,), 2.0))


def test_parts_are_even():
    assert even_cuts([4, 4, 4, 4], 2) == [(0, 2), (2, 4)]
    assert even_cuts([100, 1, 1, 98], 2) == [(0, 1), (1, 4)]
    assert even_cuts([5], 3) == [(0, 0), (0, 1), (1, 1)]
