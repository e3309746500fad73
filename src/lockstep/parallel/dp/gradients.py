"""Gradients of the replicas: copied between devices in large pieces, summed in a fixed tree, given to the module."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.parallel.flat import flatten_like, view_like

# One gradient for each weight, all on the device of one replica; None where the replica did not use the weight.
Gradients = list[Tensor | None]


@torch.no_grad()
def coalesced_copies(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Copy ``tensors``, which share one device, to each of ``devices``: one transfer for each device and dtype.

    Does not block; CUDA copies are in order with the current streams.

    Returns:
        One list for each device, with shapes, strides and values of ``tensors``. The copies do not require gradients.
        They share memory with each other, but each has a version counter of its own.
    """
    copies = [list(tensors) for _ in devices]
    indices_of: dict[torch.dtype, list[int]] = {}
    with torch.inference_mode(False):
        for index, tensor in enumerate(tensors):
            if is_strided(tensor):
                indices_of.setdefault(tensor.dtype, []).append(index)
            else:
                for row, device in zip(copies, devices, strict=True):
                    row[index] = tensor.detach().to(device, copy=True)
        for indices in indices_of.values() if devices else ():
            parts = [tensors[index] for index in indices]
            packed = torch.cat([flatten_like(part, part) for part in parts])
            for row, device in zip(copies, devices, strict=True):
                pieces = packed.to(device, non_blocking=True, copy=True).split([part.numel() for part in parts])
                for index, piece, part in zip(indices, pieces, parts, strict=True):
                    # Not detach(): a write to one buffer would raise the version counter of all, and autograd would
                    # then refuse the backward of an operation that has saved another one.
                    row[index] = view_like(piece, part).data
    return copies


def is_strided(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is an ordinary tensor or parameter: not sparse, not quantized, no other subclass."""
    kind = type(tensor)
    is_ordinary = kind is Tensor or issubclass(kind, torch.nn.Parameter)
    return is_ordinary and tensor.layout is torch.strided and not tensor.is_quantized


@torch.no_grad()
def sum_in_tree(rows: Sequence[Gradients], devices: Sequence[torch.device], *, in_place: bool) -> Gradients:
    """Add the replicas' gradients, weight by weight, in a binary tree: (0 + 1) + (2 + 3), and so on.

    The order depends on the number of rows alone, never on which thread was first: the sum has the same bits every
    time.

    Args:
        rows: One for each replica.
        devices: Where each row is. The sums end up on the first.
        in_place: Whether the memory of ``rows`` may be used for the sums.

    Returns:
        The sums; None where all were None.
    """
    # Autograd hands out two views of one gradient where a sum of two views of parameters was differentiated. Adding to
    # one of them in place would change the other.
    uses = Counter(_address(each) for row in rows for each in row if each is not None and not each.is_sparse)
    writable = {address for address, count in uses.items() if count == 1} if in_place else set()
    level = list(zip(rows, devices, strict=True))
    while len(level) > 1:
        merged = [
            (_add_rows(left, _row_on(device, right, origin), writable), device)
            for (left, device), (right, origin) in zip(level[0::2], level[1::2], strict=False)
        ]
        level = merged + level[2 * len(merged) :]
    return level[0][0]


def deliver(weights: Sequence[Tensor], gradients: Gradients) -> None:
    """Add each gradient to ``weight.grad`` as a backward pass would: None takes the gradient over, hooks are called."""
    pairs: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is None:
                continue
            has_hooks = bool(weight._backward_hooks) or bool(weight._post_accumulate_grad_hooks)
            if has_hooks or not weight.is_leaf:  # a buffer may have been computed from something else
                torch.autograd.backward([weight], [gradient])
            elif weight.grad is None:
                weight.grad = gradient  # without a copy, as autograd does with a gradient that nobody else holds
            elif weight.grad.is_sparse != gradient.is_sparse:
                torch.autograd.backward([weight], [gradient])
            else:
                pairs.append((weight.grad, gradient))
        _add_pairs(pairs)


def _add_rows(left: Gradients, right: Gradients, writable: set[int]) -> Gradients:
    result = list(left)
    in_place: list[tuple[Tensor, Tensor]] = []
    for index, (mine, other) in enumerate(zip(left, right, strict=True)):
        if mine is None or other is None:
            result[index] = other if mine is None else mine
        elif mine.is_sparse:
            result[index] = other + mine  # torch adds dense and sparse gradients in this order only
        elif _address(mine) in writable and not other.is_sparse:
            in_place.append((mine, other))
        else:
            result[index] = mine + other  # its own memory from here on, which no other gradient shares
    _add_pairs(in_place)
    return result


def _row_on(device: torch.device, row: Gradients, origin: torch.device) -> Gradients:
    if origin == device:
        return row
    (copies,) = coalesced_copies([each for each in row if each is not None], [device])
    moved = iter(copies)
    return [None if each is None else next(moved) for each in row]


def _add_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add in place, the second of each pair to the first."""
    dense = [(target, other) for target, other in pairs if not target.is_sparse]
    if dense:
        torch._foreach_add_([target for target, _ in dense], [other for _, other in dense])
    for target, other in pairs:
        if target.is_sparse:
            target.add_(other)


def _address(gradient: Tensor) -> int:
    return gradient.untyped_storage().data_ptr()
