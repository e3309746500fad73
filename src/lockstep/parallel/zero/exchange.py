"""Each rank's part of the parameters on its way to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.collectives import Group
from lockstep.comm.slices import Waitable, all_gather_slices, broadcast_async, gathers, wait_for
from lockstep.parallel.zero.flat import FlatBuffer


class ParameterGather:
    """Sends what each rank owns of flat buffers to all ranks.

    Args:
        group: The ranks that take part, each the owner of its number.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._works: list[Waitable] = []
        self._remainders: list[tuple[Tensor, list[Tensor]]] = []

    def start(self, buffers: Sequence[FlatBuffer], *, alone: bool) -> None:
        """Start to send this rank's part of ``buffers``, and to receive the others'.

        Collective: every rank, in the same order. Does not block; `wait` makes the parameters valid.

        All ranks then have the same bits, since each element comes from one rank.

        Args:
            buffers: The same on every rank.
            alone: Whether `wait` comes next.
        """
        if self._group.size() == 1:
            return
        last = self._group.size() - 1
        remainders: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in buffers:
            flat = buffer.flat
            if not (buffer.is_even and gathers(self._group, flat.device)):
                for owner in range(self._group.size()):
                    part = buffer.slice_of(owner)
                    if part.numel():
                        self._works.append(broadcast_async(part, group=self._group, src=owner, alone=alone))
                continue
            if buffer.even_end:
                self._works.append(all_gather_slices(flat[: buffer.even_end], group=self._group, alone=alone))
            if buffer.even_end < flat.numel():
                remainders.setdefault((flat.device, flat.dtype), []).append(flat[buffer.even_end :])
        for parts in remainders.values():  # fewer elements than ranks in each
            packed = torch.cat(parts)
            self._works.append(broadcast_async(packed, group=self._group, src=last, alone=alone))
            self._remainders.append((packed, parts))

    def wait(self) -> None:
        """Block until all parameters are valid (on CUDA: let the current stream wait)."""
        if not self._works:
            return
        works, self._works = self._works, []
        remainders, self._remainders = self._remainders, []
        for work in works:
            wait_for(work)
        for packed, parts in remainders:
            torch._foreach_copy_(parts, list(packed.split([part.numel() for part in parts])))
