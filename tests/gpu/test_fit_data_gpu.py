"""Loading for CUDA: samples that cannot be read. Skips itself without a GPU."""

import pytest
import torch

import lockstep
from lockstep.errors import DataError
from tests.distributed.test_fit_bad_samples import BAD, TEXT, Damaged
from tests.training import make_task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("strategy", ["dp", "ddp", "torch-ddp"])
def test_the_ranks_learn_of_skipped_samples_a_step_later(strategy):
    task = make_task(dataset=Damaged)
    expected = lockstep.fit(task, strategy="single", epochs=2, bad_samples="skip", quiet=True)
    found = lockstep.fit(task, strategy=strategy, epochs=2, bad_samples="skip", quiet=True)
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert (found.skipped_samples, found.first_skipped) == (2 * len(BAD), expected.first_skipped)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("steps", [2, 6])
def test_they_stop_the_run_even_in_its_last_step(strategy, steps, tmp_path):
    task = make_task(dataset=lambda: Damaged({17}))  # in the second step
    with pytest.raises(DataError) as error:
        lockstep.fit(task, strategy=strategy, steps=steps, checkpoint=tmp_path, checkpoint_every=2, quiet=True)
    assert str(error.value) == TEXT
    assert not list(tmp_path.glob("step-*")), "nothing is kept of the step that lacks a sample"
