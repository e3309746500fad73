"""A bucket in one flat buffer: how gradients get in and out.

[Note: layout]
One flat buffer: the gradients of the parameters, back to back, then a tail that travels in the same collective: one
element per parameter, which counts on how many ranks it received a gradient (see [Note: parameters without a gradient]
in reducer.py), and the ranks' ballots (see [Note: ballots] in ballot.py). ``views[k]`` has the shape and the strides of
parameter k and becomes its ``.grad``.

[Note: held gradients]
In torch, a gradient that somebody keeps after ``zero_grad()`` stays as it is. Ours are views of a buffer that the next
step overwrites, so a bucket whose views somebody still holds takes new memory and leaves the old to its holders.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lockstep.errors import LockstepError
from lockstep.parallel.ddp.bucket import Absent, Bucket, Share
from lockstep.parallel.ddp.bucket_plan import BucketSpec
from lockstep.parallel.views import view_like

_LARGE_NUMEL = 2**15
"""Gradients of this size are divided while they are copied; smaller ones all in one go, which takes fewer calls."""

_OWN_REFERENCES = 2  # to a view nobody else holds, as sys.getrefcount sees it: the list of views and the argument


@final
class DenseBucket(Bucket):
    """Gradients in one flat buffer; see [Note: layout].

    Args:
        spec, parameters, names: See `BucketRow`.
        keep_held_gradients: See [Note: held gradients].
        ballot: What the tail ends with on this rank in a step without weights.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        *,
        keep_held_gradients: bool,
        ballot: Sequence[float],
    ) -> None:
        super().__init__(spec, parameters, names)
        self._keep_held_gradients = keep_held_gradients
        self._usual_tail = torch.tensor([1.0] * len(self.parameters) + list(ballot)).to(spec.device, spec.dtype)
        self._allocate()

    def _allocate(self) -> None:
        numel = sum(parameter.numel() for parameter in self.parameters)
        self._buffer = torch.zeros(numel + len(self._usual_tail), dtype=self.spec.dtype, device=self.spec.device)
        self._data = self._buffer[:numel]
        self._tail = self._buffer[numel:]
        self._ballot = self._tail[len(self.parameters) :]
        self._views = cut_views(self._data, self.parameters)
        self._num_aliases = self._count_aliases()
        self._large = {place for place, view in enumerate(self._views) if view.numel() >= _LARGE_NUMEL}

    @property
    @override
    def gradients(self) -> Tensor:
        return self._data

    @gradients.setter
    def gradients(self, value: Tensor) -> None:
        if value.data_ptr() != self._data.data_ptr() or value.dtype != self._data.dtype:
            self._data.copy_(value.reshape(-1)[: self._data.numel()])

    @property
    @override
    def payload(self) -> Tensor:
        return self._buffer

    @override
    def gradient_views(self) -> list[Tensor]:
        return list(self._views)

    @property
    @override
    def ballot(self) -> Tensor:
        return self._ballot.real

    @override
    def gather(self, used: Sequence[int], share: Share) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        self.absent = [
            Absent(place, None if gradient is None else gradient.clone())
            for place, gradient in enumerate(gradients)
            if gradient is None or not used[place]
        ]
        views = self._views
        fresh = {
            place: gradient
            for place, gradient in enumerate(gradients)
            if gradient is not None and gradient is not views[place]
        }
        if fresh and self._keep_held_gradients and self._is_held(fresh):
            self._renew()
        with torch.no_grad():  # backward with create_graph=True records what we do
            self._copy_in(fresh, share.factor)
        views = self._views
        for place in fresh:
            self.parameters[place].grad = views[place]
        self._tail.copy_(self._usual_tail)
        if share.ballot is not None:
            ballot = torch.tensor(share.ballot, dtype=torch.float64).to(self.spec.dtype)
            self._ballot.copy_(ballot, non_blocking=True)  # from pageable memory: read before this returns
        for absent in self.absent:
            self._tail[absent.place] = 0
            if absent.previous is None:
                views[absent.place].zero_()
            elif share.unused_factor != share.factor:
                torch.mul(absent.previous, share.unused_factor, out=views[absent.place])

    def _copy_in(self, fresh: dict[int, Tensor], factor: float) -> None:
        """Copy the gradients ``fresh`` to their places, and multiply all gradients in the bucket by ``factor``."""
        views = self._views
        large = self._large.intersection(fresh) if factor != 1 else set()
        small = [place for place in fresh if place not in large] if large else list(fresh)
        try:
            for place in large:
                torch.mul(fresh[place], factor, out=views[place])
            if small:
                torch._foreach_copy_([views[place] for place in small], [fresh[place] for place in small])
        except RuntimeError as error:
            self._explain_sparse(fresh, error)
            raise
        if factor != 1 and not large:
            self._data.mul_(factor)
        elif len(large) < len(views) and factor != 1:
            torch._foreach_mul_([view for place, view in enumerate(views) if place not in large], factor)

    def _explain_sparse(self, fresh: dict[int, Tensor], error: RuntimeError) -> None:
        for place, gradient in fresh.items():
            if gradient.layout is not torch.strided:
                raise LockstepError(
                    f"Parameter {self.names[place]} received a sparse gradient, which was not expected.\n"
                    "Only nn.Embedding and nn.EmbeddingBag with sparse=True may produce sparse gradients."
                ) from error

    def _is_held(self, places: Iterable[int]) -> bool:
        views = self._views
        return self._count_aliases() > self._num_aliases or any(
            sys.getrefcount(views[place]) > _OWN_REFERENCES for place in places
        )

    def _count_aliases(self) -> int:
        storage = self._buffer.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata))

    def _renew(self) -> None:
        old_views = self._views
        self._allocate()
        for parameter, old, new in zip(self.parameters, old_views, self._views, strict=True):
            if parameter.grad is old:  # in use now, not merely held
                new.copy_(old)
                parameter.grad = new

    @override
    @torch.no_grad()
    def scale(self, factor: float) -> None:
        self._data.mul_(factor)

    @override
    def settle(self, num_users: Sequence[int] | None) -> None:
        if not self.absent:
            return
        counts = self._tail.real.tolist() if num_users is None else [num_users[each] for each in self.spec.parameters]
        for absent in self.absent:
            parameter, view = self.parameters[absent.place], self._views[absent.place]
            if round(counts[absent.place]):
                parameter.grad = view
            elif absent.previous is None:
                parameter.grad = None
            else:
                view.copy_(absent.previous)

    @override
    def adopt(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view


def cut_views(flat: Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """Cut ``flat`` into views like the parameters; see `view_like`."""
    pieces = flat.split([parameter.numel() for parameter in parameters])
    return [view_like(piece, parameter) for piece, parameter in zip(pieces, parameters, strict=True)]
