"""Which parameters share a flat buffer, and who owns what of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from lockstep.parallel.ddp.bucket import Bucket
from lockstep.parallel.zero.flat import FlatBuffer
from lockstep.parallel.zero.spans import Span
from lockstep.parallel.zero.whole_shard import assign_greedily

_LARGEST_BYTES = 256 * 2**20
"""So that moving parameters to flat memory does not need twice their memory."""

Places = Sequence[tuple[nn.Parameter, Span]]
"""Parameters, with their index and param group."""


Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""Returns a flat tensor of so many elements."""


def slices_of(places: Places, num_owners: int, allocate: Allocate) -> list[FlatBuffer]:
    """Lay parameters into flat buffers, of which each owner has an equal slice. As collective as ``allocate``."""
    return [_lay(part, num_owners, allocate) for alike in _alike(places) for part in _of_size(alike)]


def buckets_of(places: Places, buckets: Sequence[Bucket], num_owners: int, allocate: Allocate) -> list[FlatBuffer]:
    """Lay parameters as their gradients lie in ``buckets``. As collective as ``allocate``.

    Args:
        places: Those of all parameters in ``buckets``, and maybe others, which are left out.
        buckets: Of the `DistributedDataParallel`, the same on every rank.
        num_owners: Among how many each buffer is divided.
        allocate: Makes a buffer's memory.
    """
    place_of = {id(parameter): (parameter, span) for parameter, span in places}
    return [
        _lay([place_of[id(parameter)] for parameter in bucket.parameters], num_owners, allocate) for bucket in buckets
    ]


def regions_of(places: Places, num_owners: int, allocate: Allocate) -> list[FlatBuffer]:
    """Lay parameters into flat buffers in which each owner's lie together, whole. As collective as ``allocate``.

    They own nearly as many elements as each other, as far as the sizes of the parameters allow.
    """
    buffers = []
    for alike in _alike(places):
        owners = assign_greedily([span.numel for _, span in alike], num_owners)
        of_owner = [
            [place for place, owner in zip(alike, owners, strict=True) if owner == number]
            for number in range(num_owners)
        ]
        ends = list(accumulate(sum(span.numel for _, span in own) for own in of_owner))
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        buffers.append(_lay([place for own in of_owner for place in own], num_owners, allocate, bounds))
    return buffers


def _alike(places: Places) -> list[list[tuple[nn.Parameter, Span]]]:
    """Return the parameters by device, dtype and whether they are trained: frozen ones would take no part in steps."""
    alike: dict[tuple[torch.device, torch.dtype, bool], list[tuple[nn.Parameter, Span]]] = {}
    for parameter, span in places:
        alike.setdefault((parameter.device, parameter.dtype, parameter.requires_grad), []).append((parameter, span))
    return list(alike.values())


def _of_size(places: list[tuple[nn.Parameter, Span]]) -> list[list[tuple[nn.Parameter, Span]]]:
    parts: list[list[tuple[nn.Parameter, Span]]] = [[]]
    size_bytes = 0
    for parameter, span in places:
        if parts[-1] and size_bytes + parameter.nbytes > _LARGEST_BYTES:
            parts.append([])
            size_bytes = 0
        parts[-1].append((parameter, span))
        size_bytes += parameter.nbytes
    return parts


def _lay(
    places: Places, num_owners: int, allocate: Allocate, bounds: Sequence[tuple[int, int]] | None = None
) -> FlatBuffer:
    parameters, spans = [parameter for parameter, _ in places], [span for _, span in places]
    flat = allocate(sum(span.numel for span in spans), parameters[0].dtype, parameters[0].device)
    return FlatBuffer(parameters, spans, flat, num_owners=num_owners, bounds=bounds)
