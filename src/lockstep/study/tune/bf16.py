"""How much faster a device multiplies matrices in bf16, measured in some milliseconds."""

from __future__ import annotations

import time
from statistics import median

import torch

_SIZES = {"cpu": 256, "cuda": 2048}
_REPEATS = 7


def bf16_speed(device: torch.device) -> float:
    """Return how many times as fast ``device`` multiplies matrices in bf16 as in fp32. Blocks for some milliseconds."""
    size = _SIZES.get(device.type, 256)
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        seconds[dtype] = median(_time(matrix) for _ in range(_REPEATS))
    return seconds[torch.float32] / max(seconds[torch.bfloat16], 1e-9)


def _time(matrix: torch.Tensor) -> float:
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    begin = time.perf_counter()
    torch.mm(matrix, matrix)
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - begin
