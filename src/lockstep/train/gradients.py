"""What happens to the gradient between backward and the optimizer: one division, one norm, one clip."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def global_norm(grads: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients together, a 0-dimensional tensor."""
    return torch.nn.utils.get_total_norm(list(grads))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that brings ``norm`` down to ``max_norm``, or one; the formula of ``clip_grad_norm_``."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def multiply_(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients in place by a 0-dimensional tensor."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(factor.to(grad.device))
        else:
            groups[grad.device, grad.dtype].append(grad)
    for (device, dtype), group in groups.items():
        torch._foreach_mul_(group, factor.to(device, dtype))


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
