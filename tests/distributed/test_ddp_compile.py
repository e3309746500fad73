"""torch.compile inside and around the wrapper, with a backend that shows hooks and frames without generating code."""

import copy

import pytest
import torch
from torch import nn

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


class Deep(nn.Sequential):
    """Layers of more than a MiB each; torch.compile skips a plain ``Sequential`` that it meets first."""

    def __init__(self):
        super().__init__(*(nn.Linear(400, 400, dtype=torch.float64) for _ in range(4)))

    def forward(self, x):
        return super().forward(x)


def overlap_compiled(world, inside, which):
    """Return how many graphs were compiled, and how many gradients were missing when the first bucket left."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    bare = Deep()
    oracle = copy.deepcopy(bare)
    wrap = lockstep.DistributedDataParallel if which == "ours" else torch.nn.parallel.DistributedDataParallel
    cap_mb = 1
    if inside:
        wrapper = model = wrap(torch.compile(bare, backend=counter), bucket_cap_mb=cap_mb)
    else:
        wrapper = wrap(bare, bucket_cap_mb=cap_mb)
        model = torch.compile(wrapper, backend=counter)
    missing = []
    if which == "ours":
        launch = wrapper._reducer.departures.launch

        def noting_launch(used, **kwargs):
            missing.append(sum(parameter.grad is None for parameter in bare.parameters()))
            launch(used, **kwargs)

        wrapper._reducer.departures.launch = noting_launch
    for step in range(7):  # the last ones with few hooks
        missing.clear()
        batch = torch.randn(4, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        bare.zero_grad()
        oracle.zero_grad()
        model(batch.chunk(2)[world.rank]).square().mean().backward()
        oracle(batch).square().mean().backward()
        assert_gradients_equal(bare, oracle)
    return counter.frame_count, missing


@pytest.mark.parametrize("inside", [True, False])
def test_buckets_leave_while_a_compiled_backward_runs(ranks, inside):
    """Graphs are cut as for torch's class, so the first bucket leaves when gradients of others are still to come."""
    (theirs, _), _ = ranks(2, warnings="ignore")(overlap_compiled, inside, "torch", timeout=110)
    for num_graphs, missing in ranks(2, warnings="ignore")(overlap_compiled, inside, "ours", timeout=110):
        assert num_graphs == theirs > 1
        assert missing[0] >= 2
        assert missing == sorted(missing, reverse=True)
