"""Sum the gradients of the replicas in a fixed order and hand them to the module."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.parallel.dp.flat import coalesced_copies, is_remote

Gradients = list[Tensor | None]
"""One gradient a weight, all on the device of one replica; None where the replica did not use the weight."""


def sum_in_tree(rows: Sequence[Gradients], devices: Sequence[torch.device], *, owned: bool) -> Gradients:
    """Add the replicas' gradients, weight by weight, in a binary tree: (0 + 1) + (2 + 3), and so on.

    The order depends on the number of rows alone, never on which thread was first, so the sum has the same bits every
    time. A row travels to another device in one flat buffer a dtype.

    Args:
        rows: One a replica.
        devices: Where each row is. The sums end up on the first.
        owned: Whether nobody else needs the gradients; then memory of ``rows`` is used for the sums.

    Returns:
        The sums; None where all were None.
    """
    level = list(zip(rows, devices, strict=True))
    while len(level) > 1:
        merged = [
            (_added(left, _moved(right, origin, device), reuse=owned), device)
            for (left, device), (right, origin) in zip(level[0::2], level[1::2], strict=False)
        ]
        level = merged + level[2 * len(merged) :]
    return level[0][0]


def deliver(weights: Sequence[Tensor], gradients: Gradients) -> None:
    """Add each gradient to ``weight.grad`` as a backward pass would: None takes the gradient over, hooks are called."""
    accumulated: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is None:
                continue
            if _needs_autograd(weight) or (weight.grad is not None and _is_mixed(weight.grad, gradient)):
                torch.autograd.backward([weight], [gradient])
            elif weight.grad is None:
                weight.grad = gradient
            else:
                accumulated.append((weight.grad, gradient))
        _add_all(accumulated)


def _added(left: Gradients, right: Gradients, *, reuse: bool) -> Gradients:
    """Return the sums of two rows on one device; with ``reuse`` in the memory of ``left`` where that is safe."""
    result = list(left)
    in_place: list[tuple[Tensor, Tensor]] = []
    shared = _memory_used_twice(left, right) if reuse else set()
    with torch.no_grad():
        for index, (mine, other) in enumerate(zip(left, right, strict=True)):
            if mine is None or other is None:
                result[index] = other if mine is None else mine
            elif _is_mixed(mine, other):
                result[index] = other + mine if mine.is_sparse else mine + other  # torch adds in this order only
            elif reuse and (mine.is_sparse or _address(mine) not in shared):
                in_place.append((mine, other))
            else:
                result[index] = mine + other
        _add_all(in_place)
    return result


def _moved(row: Gradients, origin: torch.device, device: torch.device) -> Gradients:
    """Return copies of the gradients on ``device``, or the gradients if they are there already."""
    if not is_remote(origin, device):
        return row
    present = [index for index, gradient in enumerate(row) if gradient is not None]
    tensors = [gradient for gradient in row if gradient is not None]
    moved: Gradients = [None] * len(row)
    for index, copy in zip(present, coalesced_copies(tensors, [device])[0], strict=True):
        moved[index] = copy
    return moved


def _add_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add in place, the second of each pair to the first, in one call a dtype; layouts agree pair by pair."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, other in pairs:
        if target.is_sparse:
            target.add_(other)
        else:
            targets, others = groups.setdefault(target.dtype, ([], []))
            targets.append(target)
            others.append(other)
    for targets, others in groups.values():
        torch._foreach_add_(targets, others)


def _memory_used_twice(*rows: Gradients) -> set[int]:
    """Return the addresses of storages that several gradients lie in.

    Autograd hands out views of one gradient where a sum of two views of parameters was differentiated; adding to one
    of those in place would change the other.
    """
    seen: set[int] = set()
    twice: set[int] = set()
    for row in rows:
        for gradient in row:
            if gradient is not None and not gradient.is_sparse:
                address = _address(gradient)
                (twice if address in seen else seen).add(address)
    return twice


def _address(gradient: Tensor) -> int:
    return gradient.untyped_storage().data_ptr()


def _is_mixed(left: Tensor, right: Tensor) -> bool:
    return left.is_sparse != right.is_sparse


def _needs_autograd(weight: Tensor) -> bool:
    """Whether hooks wait for the gradient, or the weight was itself computed."""
    return bool(weight._backward_hooks) or bool(weight._post_accumulate_grad_hooks) or not weight.is_leaf
