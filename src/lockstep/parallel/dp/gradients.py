"""Sum the gradients of the replicas in a fixed tree and deliver them to the module's parameters."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# Copies of many tensors on other devices: one transfer a device and dtype.

Broadcast = Callable[[Tensor, Sequence[torch.device]], list[Tensor]]
"""Returns copies of a flat tensor on other devices; see `Transport.broadcast`."""


def coalesced_copies(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], broadcast: Broadcast
) -> list[list[Tensor]]:
    """Copy ``tensors``, which share one device, to each of ``devices``.

    The tensors of a dtype are packed into one flat buffer, which is sent whole. Does not block; CUDA copies are in
    order with the current streams.

    Args:
        tensors: On the first device of who broadcasts.
        devices: Several may be one, also the tensors' own.
        broadcast: Sends a flat buffer to other devices.

    Returns:
        One list a device, in the order of ``devices``; tensors as ``tensors``, with the same shapes and strides. They
        share memory only with the flat buffer that they came in (each has a version counter of its own), do not
        require gradients, and are never written again: a later call makes new ones.
    """
    if tensors and not any(worth_packing(tensors[0].device, device) for device in devices):
        with torch.inference_mode(False), torch.no_grad():
            return [[tensor.clone() for tensor in tensors] for _ in devices]
    copies = [list(tensors) for _ in devices]
    groups: dict[torch.dtype, list[int]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for index, tensor in enumerate(tensors):
            if is_strided(tensor):
                groups.setdefault(tensor.dtype, []).append(index)
            else:
                for copy, device in zip(copies, devices, strict=True):
                    copy[index] = tensor.detach().to(device, copy=True)
        for indices in groups.values():
            parts = [tensors[index] for index in indices]
            packed = torch.cat([flatten_dense(part) for part in parts])
            for copy, flat in zip(copies, _copies_on(packed, devices, broadcast), strict=True):
                for index, view in zip(indices, unpack(flat, parts), strict=True):
                    copy[index] = view
    return copies


class FixedMemory:
    """Tensors that stay where they are while their values change."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    @torch.no_grad()
    def renew(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors with these values, at the same place as the last time if they are like those of then."""
        known = self._tensors
        if len(known) != len(values) or not all(map(_is_like, known, values)):
            self._tensors = list(values)
        elif values:
            torch._foreach_copy_(known, list(values))
        return list(self._tensors)


def _is_like(one: Tensor, other: Tensor) -> bool:
    return is_strided(one) and is_strided(other) and one.dtype == other.dtype and one.shape == other.shape


def is_remote(device: torch.device, source: torch.device) -> bool:
    """Whether a replica on ``device`` needs copies of what is on ``source``."""
    return device != source


def worth_packing(source: torch.device, device: torch.device) -> bool:
    """Whether one large copy beats many: on the CPU there is neither a transfer nor a kernel launch to save."""
    return source.type != "cpu" or device.type != "cpu"


def is_strided(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an ordinary strided tensor or parameter: no sparse or quantized one, no other subclass."""
    kind = type(tensor)
    return (
        (kind is Tensor or issubclass(kind, torch.nn.Parameter))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def alias_of(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that is no view in autograd's eyes and may be pointed elsewhere.

    Unlike ``detach()``, the result may be ``set_()`` to other memory, which ``flatten_parameters`` of a recurrent
    layer does; and it has a version counter of its own.
    """
    with torch.inference_mode(False), torch.no_grad():
        if not is_strided(tensor):
            return tensor.detach()
        other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return other


def _copies_on(packed: Tensor, devices: Sequence[torch.device], broadcast: Broadcast) -> list[Tensor]:
    """Return one tensor a device, each with memory of its own; the first on the device of ``packed`` is ``packed``."""
    elsewhere = [device for device in dict.fromkeys(devices) if device != packed.device]
    first = {packed.device: packed} | dict(
        zip(elsewhere, broadcast(packed, elsewhere) if elsewhere else (), strict=True)
    )
    given: set[torch.device] = set()
    sent = []
    for device in devices:
        sent.append(first[device].clone() if device in given else first[device])
        given.add(device)
    return sent


def flatten_dense(tensor: Tensor) -> Tensor:
    """Return the elements in the order in which they lie in memory, where they lie without gaps."""
    if not tensor.is_contiguous() and is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def unpack(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Cut ``flat`` into tensors of the shapes and, for dense ones, the strides of ``parts``."""
    views = []
    offset = 0
    for part in parts:
        size = part.numel()
        if part.is_contiguous() or not is_dense(part):
            view = flat.narrow(0, offset, size).view(part.shape)
        else:
            view = flat.as_strided(part.shape, part.stride(), offset)
        views.append(view.data)  # .data, not detach(): a version counter that the neighbours do not move
        offset += size
    return views


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps and overlaps, in whichever order (channels last, say)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


# Sum the gradients of the replicas in a fixed order and hand them to the module.

Gradients = list[Tensor | None]
"""One gradient a weight, all on the device of one replica; None where the replica did not use the weight."""


Run = Callable[[Sequence[Callable[[], Any]]], list[Any]]

_WORTH_THREADS_NUMEL = 2**19
"""Handing work to threads costs as much time as to add so many elements."""


def sum_in_tree(rows: Sequence[Gradients], devices: Sequence[torch.device], *, owned: bool) -> Gradients:
    """Add the replicas' gradients, weight by weight, in a binary tree: (0 + 1) + (2 + 3), and so on.

    The order depends on the number of rows alone, never on which thread was first, so the sum has the same bits every
    time. For rows on several devices `sum_over_devices` gives the same bits with less to send.

    Args:
        rows: One a replica.
        devices: Where each row is. The sums end up on the first.
        owned: Whether nobody else needs the gradients; then memory of ``rows`` is used for the sums.

    Returns:
        The sums; None where all were None.
    """
    return _sum_rows(rows, devices, _memory_used_twice(*rows) if owned else None)


def sum_side_by_side(rows: Sequence[Gradients], devices: Sequence[torch.device], run: Run) -> Gradients:
    """Return what `sum_in_tree` does of rows that nobody else needs; on one CPU each replica's thread sums its part.

    Args:
        rows: One a replica.
        devices: Where each row is. The sums end up on the first.
        run: Calls function i in the thread of replica i, all of them at once; returns the results.
    """
    shared = _memory_used_twice(*rows)
    sizes = [max((part.numel() for part in parts if part is not None), default=0) for parts in zip(*rows, strict=True)]
    if any(device.type != "cpu" for device in devices) or sum(sizes) < _WORTH_THREADS_NUMEL:
        return _sum_rows(rows, devices, shared)
    cuts = even_cuts(sizes, len(rows))
    jobs = [partial(_sum_rows, [row[start:stop] for row in rows], devices, shared) for start, stop in cuts]
    return [gradient for part in run(jobs) for gradient in part]


def even_cuts(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut a sequence into ``count`` runs of about the same total size; return where each begins and ends."""
    ends = [0, *accumulate(sizes)]
    inner = [
        min(range(len(ends)), key=lambda cut: abs(ends[cut] - ends[-1] * part / count)) for part in range(1, count)
    ]
    return list(zip([0, *inner], [*inner, len(sizes)], strict=True))


def _sum_rows(rows: Sequence[Gradients], devices: Sequence[torch.device], shared: set[int] | None) -> Gradients:
    """Add in the tree; in the memory of ``rows`` except what lies in the storages ``shared``, or never if None."""
    level = list(zip(rows, devices, strict=True))
    while len(level) > 1:
        merged = [
            (_added(left, _moved(right, origin, device), shared), device)
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
            if needs_autograd(weight) or (weight.grad is not None and _is_mixed(weight.grad, gradient)):
                torch.autograd.backward([weight], [gradient])
            elif weight.grad is None:
                weight.grad = gradient
            else:
                accumulated.append((weight.grad, gradient))
        _add_all(accumulated)


def _added(left: Gradients, right: Gradients, shared: set[int] | None) -> Gradients:
    """Return the sums of two rows on one device; see `_sum`."""
    result = list(left)
    in_place: list[tuple[Tensor, Tensor]] = []
    apart: dict[torch.dtype, tuple[list[int], list[Tensor], list[Tensor]]] = {}
    with torch.no_grad():
        for index, (mine, other) in enumerate(zip(left, right, strict=True)):
            if mine is None or other is None:
                result[index] = other if mine is None else mine
            elif _is_mixed(mine, other):
                result[index] = other + mine if mine.is_sparse else mine + other  # torch adds in this order only
            elif shared is not None and (mine.is_sparse or _address(mine) not in shared):
                in_place.append((mine, other))
            elif mine.dtype == other.dtype and not mine.is_sparse:
                indices, lefts, rights = apart.setdefault(mine.dtype, ([], [], []))
                indices.append(index)
                lefts.append(mine)
                rights.append(other)
            else:
                result[index] = mine + other
        _add_all(in_place)
        for indices, lefts, rights in apart.values():
            for index, total in zip(indices, torch._foreach_add(lefts, rights), strict=True):
                result[index] = total
    return result


def _moved(row: Gradients, origin: torch.device, device: torch.device) -> Gradients:
    """Return copies of the gradients on ``device``, or the gradients if they are there already."""
    if not is_remote(origin, device):
        return row
    return [None if each is None else each.to(device, non_blocking=True, copy=True) for each in row]


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


def needs_autograd(weight: Tensor) -> bool:
    """Whether hooks wait for the gradient, or the weight was itself computed."""
    return bool(weight._backward_hooks) or bool(weight._post_accumulate_grad_hooks) or not weight.is_leaf
