"""Which parameters share a flat buffer, and who owns what of it. Collective: buffers are made by all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from lockstep.comm.buffers import empty_buffer
from lockstep.comm.collectives import Group
from lockstep.parallel.ddp.bucket import Bucket
from lockstep.parallel.zero.flat import FlatBuffer
from lockstep.parallel.zero.spans import Span
from lockstep.parallel.zero.whole_shard import assign_greedily

_LARGEST_BYTES = 256 * 2**20
"""So that moving parameters to flat memory does not need twice their memory."""

Places = Sequence[tuple[nn.Parameter, Span]]
"""Parameters, with their index and param group."""


def slices_of(places: Places, group: Group) -> list[FlatBuffer]:
    """Lay parameters into flat buffers, of which each rank has an equal slice. Collective: every rank."""
    buffers = []
    for alike in _alike(places):
        for part in _of_size(alike):
            buffers.append(_lay(part, group, None))
    return buffers


def buckets_of(places: Places, buckets: Sequence[Bucket], group: Group) -> list[FlatBuffer]:
    """Lay parameters as their gradients lie in ``buckets``. Collective: every rank.

    Args:
        places: Those of all parameters in ``buckets``, and maybe others, which are left out.
        buckets: Of the `DistributedDataParallel`, the same on every rank.
        group: The ranks that take part.
    """
    place_of = {id(parameter): (parameter, span) for parameter, span in places}
    return [_lay([place_of[id(parameter)] for parameter in bucket.parameters], group, None) for bucket in buckets]


def regions_of(places: Places, group: Group) -> list[FlatBuffer]:
    """Lay parameters into flat buffers in which each rank's own lie together, whole. Collective: every rank.

    Ranks own nearly as many elements as each other, as far as the sizes of the parameters allow.
    """
    buffers = []
    for alike in _alike(places):
        owners = assign_greedily([span.numel for _, span in alike], group.size())
        of_owner = [
            [place for place, owner in zip(alike, owners, strict=True) if owner == rank] for rank in range(group.size())
        ]
        ends = list(accumulate(sum(span.numel for _, span in own) for own in of_owner))
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        buffers.append(_lay([place for own in of_owner for place in own], group, bounds))
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


def _lay(places: Places, group: Group, bounds: Sequence[tuple[int, int]] | None) -> FlatBuffer:
    parameters, spans = [parameter for parameter, _ in places], [span for _, span in places]
    first = parameters[0]
    flat = empty_buffer(sum(span.numel for span in spans), dtype=first.dtype, device=first.device, group=group)
    return FlatBuffer(parameters, spans, flat, num_owners=group.size(), bounds=bounds)
