"""A step on CUDA: the host waits for nothing in it, and it can be captured in a CUDA graph. NCCL with one rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.comm_hooks import AllReduceMean
from tests.models import FAMILIES, build, global_batch

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")

NUM_WARM_UP = 11
"""As torch asks for, before a wrapper's step is captured."""


def wrap(name, *, hook=False, **options):
    """Return a model on the GPU whose single rank reduces its buckets over NCCL as many would."""
    model = lockstep.DistributedDataParallel(build(name).cuda(), device_ids=[0], bucket_cap_mb=0.0005, **options)
    if hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif model.compression is None:
        model.reducer.set_reduction(AllReduceMean(model.process_group))
    return model


def on_gpu(name, seed):
    return tuple(part.cuda() for part in global_batch(name, 4, seed=seed))


def in_nccl(world, scenario, *args):
    dist.destroy_process_group()
    with lockstep.init(backend="nccl", device="cuda:0"):
        scenario(*args)


def steps_without_a_wait(name, how):
    model = wrap(name, hook=how == "hook")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    if how == "overlap":
        model.overlap_optimizer(optimizer)
    batches = [on_gpu(name, seed) for seed in range(4)]
    torch.cuda.synchronize()
    for step in range(NUM_WARM_UP + 4):
        torch.cuda.set_sync_debug_mode("error" if step >= NUM_WARM_UP else "default")
        try:
            optimizer.zero_grad()
            FAMILIES[name].loss(model, batches[step % 4]).backward()
            if how == "clip":
                model.clip_grad_norm_(0.1)
            if how != "overlap":
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("how", ["mean", "hook", "clip", "overlap"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_host_does_not_wait_within_a_step(ranks, name, how):
    ranks(1, warnings="ignore")(in_nccl, steps_without_a_wait, name, how)


def capture_beside_oracle(name, hook):
    """Capture forward, backward and optimizer; replay on new data, and train the oracle on the same."""
    oracle = build(name).cuda()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        model = wrap(name, hook=hook, gradient_as_bucket_view=True)
    torch.cuda.current_stream().wait_stream(side)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, oracle)]
    static = on_gpu(name, 0)

    def step(each, optimizer, batch):
        optimizer.zero_grad(set_to_none=True)
        loss = FAMILIES[name].loss(each, batch)
        loss.backward()
        optimizer.step()
        return loss

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(NUM_WARM_UP):
            step(model, optimizers[0], static)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(NUM_WARM_UP):
        step(oracle, optimizers[1], static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records, runs nothing
        loss = step(model, optimizers[0], static)
    for seed in range(1, 5):
        batch = on_gpu(name, seed)
        for place, value in zip(static, batch, strict=True):
            place.copy_(value)
        graph.replay()
        expected = step(oracle, optimizers[1], batch)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    torch.cuda.synchronize()


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_a_captured_step_trains_on(ranks, name, hook):
    ranks(1, warnings="ignore")(in_nccl, capture_beside_oracle, name, hook)


def capture_what_is_unused():
    model = wrap("reused")
    batch = on_gpu("reused", 0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(NUM_WARM_UP):
            model.zero_grad()
            FAMILIES["reused"].loss(model, batch).backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        FAMILIES["reused"].loss(model, batch).backward()


def test_a_step_with_unused_parameters_is_not_captured(ranks):
    with pytest.raises(
        ConfigurationError, match=r"Parameter unused\.\w+ received no gradient in a step that is captured"
    ):
        ranks(1, warnings="ignore")(in_nccl, capture_what_is_unused)
