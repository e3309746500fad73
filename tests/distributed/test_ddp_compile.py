"""torch.compile inside and around the wrapper, with a backend that shows hooks and frames without generating code."""

import copy
import importlib

import pytest
import torch
from torch import nn

import lockstep
from lockstep.parallel.ddp.bucket_events import Event
from tests.models import assert_gradients_equal, build, global_batch, share, soak, squared_error


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


@pytest.mark.soak
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_modules(ranks, inside):
    """The module's forward is compiled, as one frame, and gradients are reduced."""
    assert ranks(2, warnings="ignore")(train_compiled, inside, timeout=110) == [1, 1]


def compiled_whole(world):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    bare = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    model = torch.compile(lockstep.DistributedDataParallel(bare), backend=counter, fullgraph=True)
    oracle = copy.deepcopy(bare)
    batch = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model(batch.chunk(2)[world.rank]).square().mean().backward()
    oracle(batch).square().mean().backward()
    assert_gradients_equal(bare, oracle)
    return counter.frame_count


def test_fullgraph(ranks):
    """Refused with torch's class. A module of torch's own is compiled, too, though the compiler skips its frames."""
    assert ranks(2, warnings="ignore")(compiled_whole, timeout=110) == [1, 1]


class Deep(nn.Sequential):
    """Layers of more than a MiB each."""

    def __init__(self):
        super().__init__(*(nn.Linear(400, 400, dtype=torch.float64) for _ in range(3)))

    def forward(self, x):
        return super().forward(x)


class Launches:
    """Notes how many gradients were missing when each bucket was launched."""

    def __init__(self, model, missing):
        self.model, self.missing = model, missing

    def on_event(self, kind, bucket):
        if kind is Event.READY:
            self.missing.append(sum(parameter.grad is None for parameter in self.model.parameters()))


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
    whole = which == "ours"  # torch's class refuses it
    if inside:
        wrapper = model = wrap(torch.compile(bare, backend=counter, fullgraph=whole), bucket_cap_mb=cap_mb)
    else:
        wrapper = wrap(bare, bucket_cap_mb=cap_mb)
        model = torch.compile(wrapper, backend=counter, fullgraph=whole)
    missing = []
    if which == "ours":
        wrapper.reducer.observers.append(Launches(bare, missing))
    for step in range(3):
        missing.clear()
        batch = torch.randn(4, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        bare.zero_grad()
        oracle.zero_grad()
        model(batch.chunk(2)[world.rank]).square().mean().backward()
        oracle(batch).square().mean().backward()
        assert_gradients_equal(bare, oracle)
    return counter.frame_count, missing


@pytest.mark.parametrize("inside", [False, *soak([True])])
def test_buckets_leave_while_a_compiled_backward_runs(ranks, inside):
    """Graphs are cut as for torch's class, so the first bucket leaves when gradients of others are still to come.

    With ``fullgraph=True``, too: what was traced as one graph is cut before it is compiled.
    """
    (theirs, _), _ = ranks(2, warnings="ignore")(overlap_compiled, inside, "torch", timeout=110)
    for num_graphs, missing in ranks(2, warnings="ignore")(overlap_compiled, inside, "ours", timeout=110):
        assert num_graphs == theirs > 1
        assert missing[0] >= 2
        assert missing == sorted(missing, reverse=True)


def whole_step(world, which):
    """Compile forward, backward and optimizer as one function; return how many graphs that made."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    torch.manual_seed(0)
    bare = Deep()
    oracle = copy.deepcopy(bare)
    wrap = lockstep.DistributedDataParallel if which != "torch" else torch.nn.parallel.DistributedDataParallel
    model = wrap(bare, bucket_cap_mb=1)
    reference = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
    if which == "zero":
        optimizer = lockstep.ZeroRedundancyOptimizer(
            bare.parameters(), torch.optim.SGD, shard_gradients=True, lr=0.1, momentum=0.9
        )
    else:
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(step, backend=counter)
    for number in range(6):
        batch = torch.randn(4, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        compiled(batch.chunk(2)[world.rank])
        reference.zero_grad()
        oracle(batch).square().mean().backward()
        reference.step()
        for parameter, expected in zip(bare.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-14)
    return counter.frame_count


@pytest.mark.soak
def test_a_whole_step_is_compiled(ranks):
    """In as many graphs as with torch's class, which ends them in the same places: forward's buckets and backward."""
    run = ranks(2, warnings="ignore")
    assert run(whole_step, "ours", timeout=110) == run(whole_step, "torch", timeout=110)


@pytest.mark.soak
def test_a_whole_step_with_a_divided_optimizer_is_compiled(ranks):
    assert min(ranks(2, warnings="ignore")(whole_step, "zero", timeout=110)) > 1


def compiled_autograd(world):
    options = importlib.import_module("torch._dynamo.config")  # a module that cannot be pickled, so not by attributes
    torch.compiler.reset()
    model = lockstep.DistributedDataParallel(nn.Linear(2, 2))

    def step():
        model(torch.ones(1, 2)).sum().backward()

    with options.patch(compiled_autograd=True):
        torch.compile(step, backend="eager")()


def test_compiled_autograd_is_refused(ranks):
    for outcome in ranks(2, warnings="ignore").each(compiled_autograd, timeout=110):
        assert str(outcome.error) == (
            "Compiled autograd does not work with DistributedDataParallel: gradients would not be averaged.\n"
            "Set torch._dynamo.config.compiled_autograd = False; the backward of what is compiled is compiled anyway."
        )
