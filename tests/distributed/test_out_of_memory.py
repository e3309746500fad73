"""A rank that runs out of memory ends the run with one error: what it has, and the micro-batch to try."""

import re

import pytest
import torch

import lockstep
from lockstep.errors import OutOfMemory
from tests.training import make_task, mean_loss


def greedy(model, batch):
    if len(batch[0]) > 6:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSome more.")
    return mean_loss(model, batch)


def test_the_error_has_the_memory_of_the_rank_and_the_micro_batch_to_try():
    with pytest.raises(OutOfMemory) as error:
        lockstep.fit(make_task(loss=greedy), strategy="single", accumulate=2, quiet=True)
    assert re.fullmatch(
        r"Out of memory in step 1, in a micro-batch of 12 samples: CUDA out of memory\. Tried to allocate 20\.00 "
        r"GiB\.\n"
        r"This rank has [\d.]+ [GM]iB of the host's \d+\.\d GiB, of which \d+\.\d GiB are free\.\n"
        r"Try micro-batches of 6 samples: accumulate=4 \(--accumulate 4\): the training stays the same\.",
        str(error.value),
    )
    assert lockstep.fit(make_task(loss=greedy), strategy="single", accumulate=4, quiet=True).num_steps == 3


def test_a_single_sample_that_is_too_much_needs_something_else():
    def hopeless(model, batch):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(OutOfMemory, match="Use a smaller model, shorter samples, more devices"):
        lockstep.fit(make_task(loss=hopeless), strategy="single", global_batch_size=1, quiet=True)


def test_other_errors_are_not_taken_for_it():
    def broken(model, batch):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        lockstep.fit(make_task(loss=broken), strategy="single", quiet=True)
