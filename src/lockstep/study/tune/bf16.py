"""How much faster a device computes a layer in bf16, measured in some milliseconds."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch.nn import functional as F

_SIZES = {"cpu": (64, 512), "cuda": (2048, 2048)}
"""Samples, and units of the layer."""

_UNTIMED, _REPEATS = 3, 12


def bf16_speed(device: torch.device) -> float:
    """Return how many times as fast ``device`` computes a layer under autocast to bf16, its casts among it.

    Blocks for some milliseconds.
    """
    num_samples, width = _SIZES.get(device.type, _SIZES["cpu"])
    inputs = torch.ones(num_samples, width, device=device)
    weight = torch.nn.Parameter(torch.ones(width, width, device=device))
    pairs = [(_time(inputs, weight, bf16=False), _time(inputs, weight, bf16=True)) for _ in range(_REPEATS)]
    return median(usual_s / max(bf16_s, 1e-9) for usual_s, bf16_s in pairs[_UNTIMED:])


def _time(inputs: torch.Tensor, weight: torch.Tensor, *, bf16: bool) -> float:
    _finish(inputs)
    begin = time.perf_counter()
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=bf16):
        F.gelu(F.linear(inputs, weight)).sum().backward()
    _finish(inputs)
    return time.perf_counter() - begin


def _finish(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
