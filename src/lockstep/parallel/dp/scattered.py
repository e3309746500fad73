"""The sum of gradients that lie on several devices: each device adds its slice of all of them.

[Note: the sum over devices]

In a tree of whole rows the first device receives the gradients of log2(n) others, one after the other, and needs memory
for them, while most devices are idle. Here each row is packed into one flat tensor a dtype, each replica owns a slice,
gets that slice of all rows and adds them: every device sends, receives and adds the same amount at the same time. Then
the slices go to the first device, into the memory of its own packed row, or stay with their owners, if they are to do
the optimizer's work (``sharded_optimizer``).

The slices are added in the tree of ``sum_in_tree``, and adding is element by element, so the bits are the same. Where
the rows do not all have a gradient, or not dense ones of one dtype, the tree of whole gradients is used.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.parallel.dp.gradients import (
    Gradients,
    Run,
    flatten_dense,
    is_dense,
    sum_in_tree,
    sum_side_by_side,
    unpack,
)
from lockstep.parallel.dp.transport import Transport
from lockstep.parallel.zero.partition import shard_bounds


def sum_of_replicas(
    rows: Sequence[Gradients], devices: Sequence[torch.device], transport: Transport, run: Run
) -> Gradients:
    """Return the sums of gradients that nobody else needs, on the first device.

    Args:
        rows: One a replica. Their memory may be used, and those on several devices are emptied.
        devices: Where each row is: those of the first replicas of ``transport``.
        transport: Between all replicas.
        run: See `sum_side_by_side`.
    """
    if len(set(devices)) > 1:
        return sum_over_devices(rows, devices, transport, owned=True)
    return sum_side_by_side(rows, devices, run)


def sum_apart(rows: Sequence[Gradients], devices: Sequence[torch.device], transport: Transport) -> Gradients:
    """Do as `sum_of_replicas` does, and leave ``rows`` as they are; the sums share no memory with them."""
    if len(set(devices)) > 1:
        sums = sum_over_devices(rows, devices, transport, owned=False)
    else:
        sums = sum_in_tree(rows, devices, owned=False)
    theirs = {id(gradient) for row in rows for gradient in row}
    return [each.clone() if each is not None and id(each) in theirs else each for each in sums]


@torch.no_grad()
def sum_over_devices(
    rows: Sequence[Gradients], devices: Sequence[torch.device], transport: Transport, *, owned: bool
) -> Gradients:
    """Return the sums on the first device, see [Note: the sum over devices]; None where all were None.

    Args:
        rows: One a replica.
        devices: Where each row is: those of the first replicas of ``transport``.
        transport: Between all replicas.
        owned: Whether nobody else needs the gradients; ``rows`` are emptied then, so that memory is free early.
    """
    sums: Gradients = [None] * len(rows[0])
    groups: dict[torch.dtype, list[int]] = {}
    odd: list[int] = []
    for index, parts in enumerate(zip(*rows, strict=True)):
        first = parts[0]
        if first is not None and _are_alike(parts):
            groups.setdefault(first.dtype, []).append(index)
        else:
            odd.append(index)
    for indices in groups.values():
        like = [_like(rows[0][index]) for index in indices]
        flats = [
            torch.cat([flatten_dense(part) for index in indices if (part := row[index]) is not None]) for row in rows
        ]
        if owned:
            for row in rows:
                for index in indices:
                    row[index] = None
        bounds = shard_bounds(flats[0].numel(), len(rows))
        transport.gather(transport.reduce_scatter(flats, bounds), bounds, flats[0])
        for index, total in zip(indices, unpack(flats[0], like), strict=True):
            sums[index] = total
    if odd:
        found = sum_in_tree([[row[index] for index in odd] for row in rows], devices, owned=owned)
        for index, gradient in zip(odd, found, strict=True):
            sums[index] = gradient
    return sums


def _are_alike(parts: Sequence[Tensor | None]) -> bool:
    """Whether all are there, strided, of one dtype and of one layout in memory."""
    first = parts[0]
    assert first is not None
    return all(
        part is not None
        and part.layout is torch.strided
        and part.dtype is first.dtype
        and (part.stride() == first.stride() or (part.is_contiguous() and first.is_contiguous()))
        and (part.is_contiguous() or is_dense(part))
        for part in parts
    )


def _like(gradient: Tensor | None) -> Tensor:
    """Return a tensor without memory of the same shape and strides."""
    assert gradient is not None
    return torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device="meta")
