"""torch.compile inside and around the wrapper, with a backend that shows hooks and frames without generating code."""

import pytest
import torch

import lockstep
from tests.models import assert_gradients_equal, build, global_batch, share, squared_error


def train_compiled(world, inside):
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds to import

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    oracle, bare = build("reused"), build("reused")
    if inside:
        model = lockstep.DistributedDataParallel(torch.compile(bare, backend=counter))
    else:
        model = torch.compile(lockstep.DistributedDataParallel(bare), backend=counter)
    for step in range(3):
        batch = global_batch("reused", 4 * world.world_size, step)
        bare.zero_grad()
        oracle.zero_grad()
        squared_error(model, share(batch, world.rank, world.world_size)).backward()
        squared_error(oracle, batch).backward()
        assert_gradients_equal(bare, oracle)
    return counter.frame_count


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_modules(ranks, inside):
    """The module's forward is compiled, as one frame, and gradients are reduced."""
    assert ranks(2, warnings="ignore")(train_compiled, inside, timeout=110) == [1, 1]
