"""Gradient buckets: how gradients get in and out of flat buffers, and the list of all buckets of a model."""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import repeat
from typing import cast, final

import torch
from torch import Tensor
from typing_extensions import override

from lockstep.comm.collectives import Group, empty_buffer
from lockstep.errors import LockstepError
from lockstep.parallel.ddp.bucket_plan import BucketSpec, ParameterSpec, agree_on_order, plan_buckets
from lockstep.parallel.flat import view_like

# What a bucket is: the gradients of some parameters on their way through one collective.


@dataclass(frozen=True)
class MissingGradient:
    """A parameter that received no gradient on this rank: its place in the bucket and the gradient it had before."""

    place: int
    previous: Tensor | None


@dataclass(frozen=True)
class GradientScale:
    """What a rank's gradients count in the sum over the ranks.

    Attributes:
        factor: What gradients are multiplied by.
        unused_factor: The same for the gradients from before, of parameters that received none in this step.
        ballot: What the tail ends with, see [Note: ballots]; None: what a rank without weights says.
    """

    factor: float
    unused_factor: float
    ballot: Sequence[float] | None = None


class Bucket(ABC):
    """The gradients of ``spec.parameters`` on their way through one collective."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        self.spec = spec
        self.parameters = [parameters[index] for index in spec.parameters]
        self.names = [names[index] for index in spec.parameters]
        self.absent: list[MissingGradient] = []

    @property
    @abstractmethod
    def gradients(self) -> Tensor:
        """The gradients alone, as communication hooks see them."""

    @gradients.setter
    @abstractmethod
    def gradients(self, value: Tensor) -> None: ...

    @property
    @abstractmethod
    def payload(self) -> Tensor:
        """What the collective sums: the gradients and what travels with them."""

    @abstractmethod
    def gradient_views(self) -> list[Tensor]:
        """Return the gradients one by one, by place."""

    @property
    @abstractmethod
    def ballot(self) -> Tensor | None:
        """The end of the tail, see [Note: ballots]; None if there is no tail."""

    @abstractmethod
    def gather(self, used: Sequence[int], share: GradientScale) -> None:
        """Bring this rank's gradients in.

        Args:
            used: At place k, whether that parameter received a gradient since the last step.
            share: What they are multiplied by.
        """

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients by ``factor``; after the reduction and before `settle`."""

    @abstractmethod
    def settle(self, num_users: Sequence[int] | None) -> None:
        """Hand the reduced gradients to the parameters.

        Args:
            num_users: On how many ranks each parameter of the model received a gradient; None: as the tail says.
        """

    @abstractmethod
    def adopt(self) -> None:
        """Take over the gradients that the parameters have now, from a bucket of an earlier plan."""

    @abstractmethod
    def arrived(self, *, even_in_place: bool) -> list[bool]:
        """Return by place whether a gradient is there that the bucket did not leave there; a sparse one always is.

        Args:
            even_in_place: Whether a gradient that the bucket left counts if it was changed since `seal`.
        """

    @property
    @abstractmethod
    def holds_all(self) -> bool:
        """Whether `gradients` is what all its parameters have as their gradients."""

    @abstractmethod
    def seal(self) -> None:
        """Take the gradients in the bucket for unchanged, as they are now; `gather` does."""


# A bucket in one flat buffer: how gradients get in and out.
#
# [Note: layout]
# One flat buffer: the gradients of the parameters, back to back, then a tail that travels in the same collective: one
# element per parameter, which counts on how many ranks it received a gradient (see [Note: parameters without a
# gradient] in reducer.py), and the ranks' ballots (see [Note: ballots] in ballot.py). ``views[k]`` has the shape and
# the strides of parameter k and becomes its ``.grad``; ``slots[k]`` is the same memory for our own use. Views have
# version counters of their own, which what we write through ``slots`` or the flat buffer leaves alone: so a counter
# that moved tells that somebody else, autograd or the script, has changed that gradient in place.
#
# [Note: held gradients]
# In torch, a gradient that somebody keeps after ``zero_grad()`` stays as it is. Ours are views of a buffer that the
# next step overwrites, so a bucket whose views somebody still holds takes new memory and leaves the old to its
# holders. This rank does so alone, so it is ordinary memory; a reduction in which some ranks' buckets lie in shared
# memory and others' do not takes the ordinary way.

_LARGE_NUMEL = 2**15
"""Gradients of this size are divided while they are copied; smaller ones all in one go, which takes fewer calls."""

_OWN_REFERENCES = max(map(sys.getrefcount, map([object()].__getitem__, range(1))))
"""Of a view that nobody else holds, as sys.getrefcount counts them where it is called the same way."""

_version = operator.attrgetter("_version")


@final
class DenseBucket(Bucket):
    """Gradients in one flat buffer; see [Note: layout].

    Args:
        spec, parameters, names: See `BucketRow`.
        keep_held_gradients: See [Note: held gradients].
        ballot: What the tail ends with on this rank in a step without weights.
        group: The ranks that make this bucket at the same time, so that it can lie in memory which they all see; see
            `empty_buffer`. None: this rank makes it alone.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        *,
        keep_held_gradients: bool,
        ballot: Sequence[float],
        group: Group | None = None,
    ) -> None:
        super().__init__(spec, parameters, names)
        self._keep_held_gradients = keep_held_gradients
        self._usual_tail = torch.tensor([1.0] * len(self.parameters) + list(ballot)).to(spec.device, spec.dtype)
        self._allocate(group)

    def _allocate(self, group: Group | None) -> None:
        numel = sum(parameter.numel() for parameter in self.parameters)
        size, dtype, device = numel + len(self._usual_tail), self.spec.dtype, self.spec.device
        if group is None or group.size() == 1:
            self._buffer = torch.zeros(size, dtype=dtype, device=device)
        else:
            self._buffer = empty_buffer(size, dtype=dtype, device=device, group=group).zero_()
        self._data = self._buffer[:numel]
        self._tail = self._buffer[numel:]
        self._ballot = self._tail[len(self.parameters) :]
        self._slots = cut_views(self._data, self.parameters)
        self._views = [slot.data for slot in self._slots]
        self._num_aliases = self._count_aliases()
        self._large = {place for place, view in enumerate(self._views) if view.numel() >= _LARGE_NUMEL}
        self._small_slots = [slot for place, slot in enumerate(self._slots) if place not in self._large]
        self.seal()

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
        return list(self._slots)

    @property
    @override
    def ballot(self) -> Tensor:
        return self._ballot.real

    @override
    def gather(self, used: Sequence[int], share: GradientScale) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        is_none = map(operator.is_, gradients, repeat(None))
        if any(is_none) or not all(used) or any(map(operator.is_, gradients, self._views)):
            self._gather_some(gradients, used, share)
        else:  # the usual case, without a look at each
            self.absent = []
            if self._keep_held_gradients and self._is_held(range(len(self._views))):
                self._renew()
            self._copy_in(cast("list[Tensor]", gradients), share.factor)
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.grad = view
        self._fill_tail(share)
        self.seal()

    def _gather_some(self, gradients: Sequence[Tensor | None], used: Sequence[int], share: GradientScale) -> None:
        """Gather where gradients are missing or in the bucket already."""
        self.absent = [
            MissingGradient(place, None if gradient is None else gradient.clone())
            for place, gradient in enumerate(gradients)
            if gradient is None or not used[place]
        ]
        fresh = {
            place: gradient
            for place, (gradient, view) in enumerate(zip(gradients, self._views, strict=True))
            if gradient is not None and gradient is not view
        }
        if fresh and self._keep_held_gradients and self._is_held(fresh):
            self._renew()
        self._copy_in([fresh.get(place, slot) for place, slot in enumerate(self._slots)], share.factor)
        for place in fresh:
            self.parameters[place].grad = self._views[place]
        for absent in self.absent:
            slot = self._slots[absent.place]
            if absent.previous is None:
                slot.zero_()
            elif share.unused_factor != share.factor:
                torch.mul(absent.previous, share.unused_factor, out=slot)

    @torch.no_grad()  # backward with create_graph=True records what we do
    def _copy_in(self, gradients: list[Tensor], factor: float) -> None:
        """Copy the gradients to their places, multiplied by ``factor``. A slot in their place stays there."""
        slots, large = self._slots, self._large if factor != 1 else ()
        small = [gradient for place, gradient in enumerate(gradients) if place not in large] if large else gradients
        try:
            for place in large:
                torch.mul(gradients[place], factor, out=slots[place])
            if small:
                torch._foreach_copy_(self._small_slots if large else slots, small)
        except RuntimeError as error:
            self._explain_sparse(gradients, error)
            raise
        if factor != 1 and not large:
            self._data.mul_(factor)
        elif small and factor != 1:
            torch._foreach_mul_(self._small_slots, factor)

    @torch.no_grad()
    def _fill_tail(self, share: GradientScale) -> None:
        self._tail.copy_(self._usual_tail)
        for absent in self.absent:
            self._tail[absent.place] = 0
        if share.ballot is not None:
            ballot = torch.tensor(share.ballot, dtype=torch.float64).to(self.spec.dtype)
            self._ballot.copy_(ballot, non_blocking=True)  # from pageable memory: read before this returns

    def _explain_sparse(self, gradients: Sequence[Tensor], error: RuntimeError) -> None:
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient.layout is not torch.strided:
                raise LockstepError(
                    f"Parameter {name} received a sparse gradient, which was not expected.\n"
                    "Only nn.Embedding and nn.EmbeddingBag with sparse=True may produce sparse gradients."
                ) from error

    def _is_held(self, places: Iterable[int]) -> bool:
        """Tell whether somebody has kept the gradients ``places``, or tensors made from them."""
        if self._count_aliases() > self._num_aliases:
            return True
        return max(map(sys.getrefcount, map(self._views.__getitem__, places))) > _OWN_REFERENCES

    def _count_aliases(self) -> int:
        storage = self._buffer.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata))

    def _renew(self) -> None:
        old_views = self._views
        self._allocate(None)
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
    def arrived(self, *, even_in_place: bool) -> list[bool]:
        gradients = [parameter.grad for parameter in self.parameters]
        versions = list(map(_version, self._views)) if even_in_place else self._sealed
        if versions == self._sealed and not any(map(operator.is_not, gradients, self._views)):
            return [False] * len(gradients)
        facts = zip(gradients, self._views, versions, self._sealed, strict=True)
        return [grad is not None and (grad is not view or now != sealed) for grad, view, now, sealed in facts]

    @property
    @override
    def holds_all(self) -> bool:
        return not any(map(operator.is_not, [parameter.grad for parameter in self.parameters], self._views))

    @override
    def seal(self) -> None:
        self._sealed = list(map(_version, self._views))

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


# A bucket that holds one sparse gradient.


@final
class SparseBucket(Bucket):
    """The gradient of one embedding with ``sparse=True``; it has no fixed size and so neither buffer nor tail."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        super().__init__(spec, parameters, names)
        self._gradient = self._empty()

    def _empty(self) -> Tensor:
        shape = self.parameters[0].shape
        make = torch.ops.aten._sparse_coo_tensor_with_dims  # public constructors warn about invariants in torch 2.11
        empty: Tensor = make(
            1, len(shape) - 1, shape, dtype=self.spec.dtype, layout=torch.sparse_coo, device=self.spec.device
        )
        return empty

    @property
    @override
    def gradients(self) -> Tensor:
        return self._gradient

    @gradients.setter
    def gradients(self, value: Tensor) -> None:
        self._gradient = value

    @property
    @override
    def payload(self) -> Tensor:
        return self._gradient

    @property
    @override
    def ballot(self) -> None:
        return None

    @override
    def gradient_views(self) -> list[Tensor]:
        return [self._gradient]

    @override
    def gather(self, used: Sequence[int], share: GradientScale) -> None:
        gradient = self.parameters[0].grad
        if gradient is None:
            self._gradient = self._empty()
        else:
            factor = share.factor if used[0] else share.unused_factor
            self._gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).detach().coalesce() * factor
        self.absent = [] if gradient is not None and used[0] else [MissingGradient(0, gradient)]

    @override
    def scale(self, factor: float) -> None:
        self._gradient = self._gradient * factor

    @override
    def settle(self, num_users: Sequence[int] | None) -> None:
        reduced, self._gradient = self._gradient.coalesce(), self._empty()
        if not self.absent or reduced._nnz() > 0:
            self.parameters[0].grad = reduced

    @override
    def adopt(self) -> None:
        """Do nothing: the parameter's gradient is a tensor of its own."""

    @override
    def arrived(self, *, even_in_place: bool) -> list[bool]:
        return [self.parameters[0].grad is not None]

    @property
    @override
    def holds_all(self) -> bool:
        return False

    @override
    def seal(self) -> None:
        """Do nothing: `arrived` does not remember."""


# The buckets in the order in which they leave, and where each parameter's gradient lies.


class Buckets:
    """All buckets of a model: first in reverse order of registration, then, once, in the order that was observed.

    Args:
        parameters: All parameters to reduce, by name, each once; the same order, shapes and dtypes on every rank.
        sparse: Those among them that receive sparse gradients.
        caps_bytes: See :func:`plan_buckets`.
        keep_held_gradients: See [Note: held gradients] in dense_bucket.py.
        ballot: What this rank says of weights where it gives none, see [Note: ballots] in ballot.py.

    Attributes:
        parameters, names: By index, which is how a bucket names them.
        buckets: In the order in which they leave, the same on every rank.
        position_of: By parameter, the position of its bucket.
        first_sizes_bytes: Of the first buckets.
        on_rebuilt: What to call with new buckets when the ranks have made them, all ranks in the same order.
        is_rebuilt: Whether the order is the observed one.
        arrivals: The order in which gradients arrived on this rank in the first step; empty before.
        is_uneven: Whether ranks then observed different things.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        sparse: Set[torch.Tensor],
        caps_bytes: Sequence[int],
        keep_held_gradients: bool,
        ballot: Sequence[float],
    ) -> None:
        self.is_rebuilt = self.is_uneven = False
        self.arrivals: tuple[int, ...] = ()
        self.on_rebuilt: list[Callable[[Sequence[Bucket]], None]] = []
        self._group: Group | None = None  # not before the first step: a copy of the model may be made on one rank alone
        self.parameters, self.names = list(parameters.values()), list(parameters)
        self._caps_bytes = tuple(caps_bytes)
        self._keep_held_gradients = keep_held_gradients
        self._ballot = tuple(ballot)
        self._specs = [
            ParameterSpec(parameter.numel(), parameter.dtype, parameter.device, sparse=parameter in sparse)
            for parameter in self.parameters
        ]
        self._default_order = tuple(reversed(range(len(self.parameters))))
        self._install(self._default_order)
        self.first_sizes_bytes = [bucket.spec.size_bytes for bucket in self.buckets]

    @property
    def device(self) -> torch.device:
        """A device whose tensors the ranks can exchange."""
        return self._specs[0].device if self._specs else torch.device("cpu")

    def rebuild(self, arrivals: Sequence[int], *, group: Group) -> None:
        """Build the buckets anew from what the first step showed. Collective: every rank. Blocks until complete.

        Args:
            arrivals: Indices of the parameters as their gradients arrived on this rank; empty if it had no data.
            group: The ranks that take part.
        """
        self._group, self.arrivals = group, tuple(arrivals)
        agreed = agree_on_order(arrivals, self._default_order, group=group, device=self.device)
        self._specs = [replace(spec, deferred=index in agreed.repeated) for index, spec in enumerate(self._specs)]
        self._install(agreed.order)
        for bucket in self.buckets:
            bucket.adopt()
        self.is_rebuilt, self.is_uneven = True, agreed.is_uneven

    def plan(self, caps_bytes: Sequence[int]) -> tuple[BucketSpec, ...]:
        """Return the buckets that other caps would make of the order as it is; changes nothing."""
        return plan_buckets(self._specs, self._order, caps_bytes)

    def replan(self, caps_bytes: Sequence[int]) -> None:
        """Build the buckets anew with other caps, between steps. Collective: every rank, with the same caps. Blocks."""
        self._caps_bytes = tuple(caps_bytes)
        self._install(self._order)
        for bucket in self.buckets:
            bucket.adopt()

    def scratch(self) -> list[Bucket]:
        """Return buckets like these that hold zeros; this rank may be the only one to ask."""
        return [self._make(bucket.spec, None) for bucket in self.buckets]

    def _install(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self.buckets = [self._make(spec, self._group) for spec in self.plan(self._caps_bytes)]
        self.position_of = [0] * len(self.parameters)
        for position, bucket in enumerate(self.buckets):
            for index in bucket.spec.parameters:
                self.position_of[index] = position
        for callback in self.on_rebuilt if self._group is not None else ():
            callback(self.buckets)

    def _make(self, spec: BucketSpec, group: Group | None) -> Bucket:
        if spec.sparse:
            return SparseBucket(spec, self.parameters, self.names)
        return DenseBucket(
            spec,
            self.parameters,
            self.names,
            keep_held_gradients=self._keep_held_gradients,
            ballot=self._ballot,
            group=group,
        )
