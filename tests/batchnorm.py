"""Batch norm of one process on the whole batch, as the oracle of the synchronised one."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.collectives import all_reduce

PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
WITHOUT_BIAS = [{"bias": False}] if "bias" in inspect.signature(nn.BatchNorm2d).parameters else []
"""The option for layers that have a weight only, where torch has it."""

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def layers(dim: int, num_features: int, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, lockstep.SyncBatchNorm]:
    """Return torch's batch norm and a synchronised one of the same weights, the same on every rank."""
    plain = PLAIN[dim](num_features, dtype=dtype, **options)
    for parameter in plain.parameters():
        parameter.data = torch.rand(num_features, generator=torch.Generator().manual_seed(7)).to(dtype) + 0.5
    return plain, lockstep.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, mean: float = 3.0) -> Tensor:
    """Return numbers that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + mean).to(dtype)


def errors_of_steps(
    world: Any,
    sizes: list[int],
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float64,
    steps: int = 2,
    mean: float = 3.0,
    channels_last: bool = False,
    device: str = "cpu",
    **options: Any,
) -> dict[str, float]:
    """Run ``steps`` forwards and backwards of both; return by what they yield the largest difference.

    Args:
        world: This rank's.
        sizes: Samples of each rank.
        shape: Of one sample.
        dtype: Of the input.
        steps: How many.
        mean: Of the input.
        channels_last: Whether this rank's part is laid out so.
        device: Where all is computed.
        options: For the constructors.
    """
    own = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1]))
    of_layer = torch.float64 if dtype is torch.float64 else torch.float32
    plain, ours = (layer.to(device) for layer in layers(1 + len(shape), shape[0], of_layer, **options))
    worst: dict[str, float] = {}

    def compare(name: str, found: Tensor, expected: Tensor) -> None:
        assert found.shape == expected.shape and found.dtype == expected.dtype, name
        difference = (found.detach().double() - expected.detach().double()).abs()
        scale = expected.detach().double().abs().max() if expected.numel() else 1.0
        worst[name] = max(worst.get(name, 0.0), float((difference / scale).max()) if difference.numel() else 0.0)

    for step in range(steps):
        whole = values((sum(sizes), *shape), dtype, step, mean).to(device).requires_grad_()
        gradient = values(whole.shape, dtype, 100 + step, mean=0.0).to(device)
        mine = whole.detach()[own]
        mine = mine.contiguous(memory_format=LAST[whole.dim()]) if channels_last else mine.clone()
        mine.requires_grad_()
        expected = plain(whole)
        expected.backward(gradient)
        found = ours(mine)
        found.backward(gradient[own])
        if channels_last and mine.numel() and min(shape[1:]) > 1:
            assert found.is_contiguous(memory_format=LAST[whole.dim()])
            assert mine.grad.is_contiguous(memory_format=LAST[whole.dim()])
        compare("output", found, expected[own])
        compare("input", mine.grad, whole.grad[own])
    for (name, parameter), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None, name
        all_reduce(parameter.grad, group=world.group)
        compare(name, parameter.grad, other.grad)
    for (name, buffer), other in zip(ours.named_buffers(), plain.buffers(), strict=True):
        compare(name, buffer, other)
    return worst
