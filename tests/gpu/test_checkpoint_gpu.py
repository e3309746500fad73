"""On a GPU a step does not wait for a checkpoint, and what is kept is the state as it was at the save."""

import time

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoints.checkpoint import Checkpoints
from tests.training import read_state

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("blocking", [False, True])
def test_what_is_kept_is_the_state_at_the_save(tmp_path, blocking):
    with lockstep.init() as world, Checkpoints(tmp_path, world, blocking=blocking) as checkpoints:
        model = nn.Linear(2048, 2048).to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in (1, 2, 3):
            expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
            torch.cuda._sleep(20_000_000)  # so that the copies are far behind the host
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            began_at = time.perf_counter()
            checkpoints.save(state, step=step)
            waited_s = time.perf_counter() - began_at
            if step > 1 and not blocking:  # the first allocates
                assert all(copy.is_pinned() for copy in checkpoints._stager._copies)
                assert waited_s < 5.0
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)  # as the next step would
            checkpoints.finish()
            found = read_state(checkpoints.path(step))["model"]
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_run_on_a_gpu_stops_in_order_and_goes_on(tmp_path):
    from tests.distributed.test_stopping import fit, task_that_signals
    from tests.training import make_task, samples

    whole = fit(make_task(eval_dataset=samples), tmp_path / "whole")
    first = fit(task_that_signals(15, at=4), tmp_path / "run")
    assert (first.num_steps, first.stopped) == (4, "SIGTERM")
    rest = fit(make_task(eval_dataset=samples), tmp_path / "run")
    assert first.losses + rest.losses == pytest.approx(whole.losses, rel=1e-12)
