"""Communication hooks and optimizers inside backward, as torch's own tests use them."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep


def record_dtypes(world):
    model = nn.Linear(3, 2)
    model.weight.data = torch.full((2, 3), 0.1)
    ddp = lockstep.DistributedDataParallel(model)
    seen = []

    def hook(state, bucket):
        seen.append((bucket.buffer().dtype, [(view.dtype, tuple(view.shape)) for view in bucket.gradients()]))
        return default_hooks.allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, default_hooks.fp16_compress_wrapper(hook))
    ddp(torch.full((1, 3), 1.0 + world.rank)).sum().backward()
    return seen, model.weight.grad


def test_a_compressing_wrapper_sends_compressed_gradients(ranks):
    for seen, gradient in ranks(2)(record_dtypes):
        half = torch.float16
        assert seen == [(half, [(half, (2,)), (half, (2, 3))])]
        assert gradient.dtype == torch.float32
        assert gradient.tolist() == [[1.5] * 3] * 2


def step_inside_backward(world, apply_before_wrapping):
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns on import

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    reference = copy.deepcopy(model)
    inputs = torch.randn(2, 3, 4, dtype=torch.float64)

    def apply():
        _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.05})

    if apply_before_wrapping:
        apply()
    ddp = lockstep.DistributedDataParallel(model)
    if not apply_before_wrapping:
        apply()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.05)
    for _ in range(3):
        ddp(inputs[world.rank]).square().sum().backward()
        optimizer.zero_grad()
        (reference(inputs.flatten(0, 1)).square().sum() / 2).backward()
        optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("apply_before_wrapping", [True, False])
def test_an_optimizer_inside_backward_steps_on_averaged_gradients(ranks, apply_before_wrapping):
    assert max(ranks(2, warnings="ignore")(step_inside_backward, apply_before_wrapping)) < 1e-12
