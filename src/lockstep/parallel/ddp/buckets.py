"""Gradient buckets: how gradients get in and out of flat buffers, and the set of all buckets of a model.

[Note: layout of a bucket]
One flat buffer: the gradients of the parameters, back to back, then a tail that travels in the same collective: one
element per parameter, which counts on how many ranks it received a gradient, and the ranks' weight messages (see
[Note: weight messages] in weighting.py). ``views[k]`` has the shape and the strides of parameter k and becomes its
``.grad``.

[Note: held gradients]
In torch, a gradient that a script keeps after ``zero_grad()`` stays as it is. Ours are views of a buffer that the next
step overwrites, so a bucket whose views are still held takes new memory and leaves the old to its holders. This rank
does so alone, so the new memory is ordinary; shm reduces buckets of which only some lie in shared memory as it reduces
any other tensor.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lockstep.comm.collectives import Group, empty_buffer
from lockstep.errors import LockstepError
from lockstep.parallel.ddp.bucket_plan import BucketSpec, ParameterSpec, agree_on_order, plan_buckets
from lockstep.parallel.flat import view_like

_LARGE_NUMEL = 2**15
"""Gradients of this size are divided while they are copied; smaller ones all in one go, which takes fewer calls."""

_OWN_REFERENCES = max(map(sys.getrefcount, map([object()].__getitem__, range(1))))
"""Of a view that nobody else holds, as sys.getrefcount counts them where it is called the same way."""


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
        message: What the tail ends with, see [Note: weight messages]; None: what a rank without weights sends.
    """

    factor: float
    unused_factor: float
    message: Sequence[float] | None = None


class Bucket(ABC):
    """The gradients of ``spec.parameters`` on their way through one collective.

    Attributes:
        gradients: The gradients alone, as communication hooks see them.
        payload: What the collective sums: the gradients and what travels with them.
        weight_message: The end of the tail, see [Note: weight messages] in weighting.py; None if there is no tail.
        position, is_last: Its place among the buckets of the model, which is the order in which they are launched.
        missing: What this rank lacks, from `gather` to `settle`.
        future: Of the reduction, once it is launched; done when the bucket is reduced.
        sent_dtype: In what the tail travels; that of the gradients unless they are compressed.
    """

    gradients: Tensor
    payload: Tensor
    weight_message: Tensor | None

    def __init__(self, spec: BucketSpec, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        self.spec = spec
        self.parameters = [parameters[index] for index in spec.parameters]
        self.names = [names[index] for index in spec.parameters]
        self.position, self.is_last = 0, False
        self.missing: list[MissingGradient] = []
        self.future: Future[Any] | None = None
        self.sent_dtype = spec.dtype

    @property
    @abstractmethod
    def holds_all(self) -> bool:
        """Whether `gradients` is what all its parameters have as their gradients."""

    @abstractmethod
    def gradient_views(self) -> list[Tensor]:
        """Return the gradients one by one, by place."""

    @abstractmethod
    def replace_gradients(self, value: Tensor) -> None:
        """Take what a communication hook has made of `gradients`."""

    @abstractmethod
    def gather(self, used: Sequence[int], scale: GradientScale) -> None:
        """Bring this rank's gradients in.

        Args:
            used: At place k, whether that parameter received a gradient since the last step.
            scale: What they are multiplied by.
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


@final
class DenseBucket(Bucket):
    """Gradients in one flat buffer; see [Note: layout of a bucket].

    Args:
        spec, parameters, names: See `BucketSet`.
        keep_held_gradients: See [Note: held gradients].
        message: What the tail ends with on this rank in a step without weights.
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
        message: Sequence[float],
        group: Group | None = None,
    ) -> None:
        super().__init__(spec, parameters, names)
        self._keep_held_gradients = keep_held_gradients
        self._usual_tail = torch.tensor([1.0] * len(self.parameters) + list(message)).to(spec.device, spec.dtype)
        self._large = {place for place, each in enumerate(self.parameters) if each.numel() >= _LARGE_NUMEL}
        self._allocate(group)

    def _allocate(self, group: Group | None) -> None:
        numel = sum(parameter.numel() for parameter in self.parameters)
        size, dtype, device = numel + len(self._usual_tail), self.spec.dtype, self.spec.device
        if group is None or group.size() == 1:
            self.payload = torch.zeros(size, dtype=dtype, device=device)
        else:
            self.payload = empty_buffer(size, dtype=dtype, device=device, group=group).zero_()
        self.gradients, self._tail = self.payload.split([numel, size - numel])
        message = self._tail[len(self.parameters) :]
        self.weight_message = message.real if message.is_complex() else message
        # Two tensors for each gradient. What we write through a slot does not move the version counter of its view, so
        # a counter that moved tells that autograd or the script has changed that gradient in place.
        self._slots = cut_views(self.gradients, self.parameters)
        self._views = [slot.data for slot in self._slots]
        self._small_slots = [slot for place, slot in enumerate(self._slots) if place not in self._large]
        self._num_aliases = self._count_aliases()

    @property
    @override
    def holds_all(self) -> bool:
        return not any(map(operator.is_not, [parameter.grad for parameter in self.parameters], self._views))

    @override
    def gradient_views(self) -> list[Tensor]:
        return list(self._slots)

    @override
    def replace_gradients(self, value: Tensor) -> None:
        if value.data_ptr() != self.gradients.data_ptr() or value.dtype != self.gradients.dtype:
            self.gradients.copy_(value.reshape(-1)[: self.gradients.numel()])

    @override
    def gather(self, used: Sequence[int], scale: GradientScale) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        is_none = map(operator.is_, gradients, repeat(None))
        if any(is_none) or not all(used) or any(map(operator.is_, gradients, self._views)):
            self._gather_some(gradients, used, scale)
        else:  # the usual case, without a Python loop over the parameters but the one that hands out the views
            self.missing = []
            if self._keep_held_gradients and self._is_held(range(len(self._views))):
                self._renew()
            self._copy_in(cast("list[Tensor]", gradients), scale.factor)
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.grad = view
        self._fill_tail(scale)

    def _gather_some(self, gradients: Sequence[Tensor | None], used: Sequence[int], scale: GradientScale) -> None:
        """Gather where gradients are missing or in the bucket already."""
        self.missing = [
            MissingGradient(place, None if gradient is None else gradient.clone())
            for place, gradient in enumerate(gradients)
            if gradient is None or not used[place]
        ]
        # Slots that will be overwritten, though the parameter does not have them as its gradient now. One without any
        # gradient is overwritten, too: by zeros, and by what other ranks send.
        outside = [place for place, gradient in enumerate(gradients) if gradient is not self._views[place]]
        if outside and self._keep_held_gradients and self._is_held(outside):
            self._renew()
        sources = zip(gradients, self._views, self._slots, strict=True)
        self._copy_in([s if g is None or g is view else g for g, view, s in sources], scale.factor)
        for place in outside:
            if gradients[place] is not None:
                self.parameters[place].grad = self._views[place]
        for missing in self.missing:
            slot = self._slots[missing.place]
            if missing.previous is None:
                slot.zero_()
            elif scale.unused_factor != scale.factor:
                torch.mul(missing.previous, scale.unused_factor, out=slot)

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
            self.gradients.mul_(factor)
        elif small and factor != 1:
            torch._foreach_mul_(self._small_slots, factor)

    def _explain_sparse(self, gradients: Sequence[Tensor], error: RuntimeError) -> None:
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient.layout is not torch.strided:
                raise LockstepError(
                    f"Parameter {name} received a sparse gradient, which was not expected.\n"
                    "Only nn.Embedding and nn.EmbeddingBag with sparse=True may produce sparse gradients."
                ) from error

    @torch.no_grad()
    def _fill_tail(self, scale: GradientScale) -> None:
        self._tail.copy_(self._usual_tail)
        for missing in self.missing:
            self._tail[missing.place] = 0
        if scale.message is not None:
            message = torch.tensor(scale.message, dtype=torch.float64).to(self.spec.dtype)
            # Does not block, but reads pageable memory before it returns.
            self._tail[len(self.parameters) :].copy_(message, non_blocking=True)

    def _is_held(self, places: Iterable[int]) -> bool:
        """Return whether somebody else holds the gradients ``places``, or tensors made from any of the buffer."""
        if self._count_aliases() > self._num_aliases:
            return True
        return max(map(sys.getrefcount, map(self._views.__getitem__, places))) > _OWN_REFERENCES

    def _count_aliases(self) -> int:
        storage = self.payload.untyped_storage()
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
        self.gradients.mul_(factor)

    @override
    def settle(self, num_users: Sequence[int] | None) -> None:
        if not self.missing:
            return
        counts = self._tail.real.tolist() if num_users is None else [num_users[each] for each in self.spec.parameters]
        for missing in self.missing:
            parameter, view = self.parameters[missing.place], self._views[missing.place]
            if round(counts[missing.place]):
                parameter.grad = view
            elif missing.previous is None:
                parameter.grad = None
            else:
                view.copy_(missing.previous)

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


@final
class SparseBucket(Bucket):
    """The gradient of one embedding with ``sparse=True``; it has no fixed size and so neither buffer nor tail."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        super().__init__(spec, parameters, names)
        self.weight_message = None
        self.replace_gradients(self._empty())

    def _empty(self) -> Tensor:
        shape = self.parameters[0].shape
        make = torch.ops.aten._sparse_coo_tensor_with_dims  # public constructors warn about invariants in torch 2.11
        empty: Tensor = make(
            1, len(shape) - 1, shape, dtype=self.spec.dtype, layout=torch.sparse_coo, device=self.spec.device
        )
        return empty

    @property
    @override
    def holds_all(self) -> bool:
        return False

    @override
    def gradient_views(self) -> list[Tensor]:
        return [self.gradients]

    @override
    def replace_gradients(self, value: Tensor) -> None:
        self.gradients = self.payload = value

    @override
    def gather(self, used: Sequence[int], scale: GradientScale) -> None:
        gradient = self.parameters[0].grad
        if gradient is None:
            self.replace_gradients(self._empty())
        else:
            factor = scale.factor if used[0] else scale.unused_factor
            sparse = gradient if gradient.is_sparse else gradient.to_sparse(1)
            self.replace_gradients(sparse.detach().coalesce() * factor)
        self.missing = [] if gradient is not None and used[0] else [MissingGradient(0, gradient)]

    @override
    def scale(self, factor: float) -> None:
        self.replace_gradients(self.gradients * factor)

    @override
    def settle(self, num_users: Sequence[int] | None) -> None:
        reduced = self.gradients.coalesce()
        self.replace_gradients(self._empty())
        if not self.missing or reduced._nnz() > 0:
            self.parameters[0].grad = reduced

    @override
    def adopt(self) -> None:
        """Do nothing: the parameter's gradient is a tensor of its own."""


class BucketSet:
    """All buckets of a model: first in reverse order of registration, then, once, in the order that was observed.

    Args:
        parameters: All parameters to reduce, by name, each once; the same order, shapes and dtypes on every rank.
        sparse: Those among them that receive sparse gradients.
        caps_bytes: See :func:`plan_buckets`.
        keep_held_gradients: See [Note: held gradients].
        message: What this rank sends of weights where it gives none, see [Note: weight messages] in weighting.py.

    Attributes:
        parameters, names: By index, which is how a bucket names them.
        buckets: In the order in which they are launched, the same on every rank. A new list when they are rebuilt.
        position_of: By parameter, the position of its bucket.
        on_rebuilt: What to call with new buckets when the ranks have made them, all ranks in the same order.
        is_rebuilt: Whether the order is the observed one.
        is_uneven: Whether ranks then observed different things.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        sparse: Set[torch.Tensor],
        caps_bytes: Sequence[int],
        keep_held_gradients: bool,
        message: Sequence[float],
    ) -> None:
        self.parameters, self.names = list(parameters.values()), list(parameters)
        self.is_rebuilt = self.is_uneven = False
        self.on_rebuilt: list[Callable[[Sequence[Bucket]], None]] = []
        self._caps_bytes = tuple(caps_bytes)
        self._keep_held_gradients = keep_held_gradients
        self._message = tuple(message)
        self._specs = [
            ParameterSpec(parameter.numel(), parameter.dtype, parameter.device, sparse=parameter in sparse)
            for parameter in self.parameters
        ]
        self._default_order = tuple(reversed(range(len(self.parameters))))
        # Not yet with the group: a copy of the model may be made on one rank alone.
        self._install(self._default_order, None)

    @property
    def device(self) -> torch.device:
        """A device whose tensors the ranks can exchange."""
        return self._specs[0].device if self._specs else torch.device("cpu")  # a copy of a model that was frozen since

    def rebuild(self, ready_order: Sequence[int], *, group: Group) -> None:
        """Build the buckets anew from what the first step showed. Collective: every rank. Blocks until complete.

        Args:
            ready_order: Indices of the parameters as their gradients arrived on this rank; empty if it had no data.
            group: The ranks that take part.
        """
        agreed = agree_on_order(ready_order, self._default_order, group=group, device=self.device)
        self._specs = [replace(spec, deferred=index in agreed.repeated) for index, spec in enumerate(self._specs)]
        self._install(agreed.order, group)
        for bucket in self.buckets:
            bucket.adopt()
        self.is_rebuilt, self.is_uneven = True, agreed.is_uneven
        for callback in self.on_rebuilt:
            callback(self.buckets)

    def scratch(self) -> list[Bucket]:
        """Return buckets like these that hold zeros; this rank may be the only one to ask."""
        return self._make([bucket.spec for bucket in self.buckets], None)

    def _install(self, order: Sequence[int], group: Group | None) -> None:
        self.buckets = self._make(plan_buckets(self._specs, order, self._caps_bytes), group)
        self.position_of = [0] * len(self.parameters)
        for bucket in self.buckets:
            for index in bucket.spec.parameters:
                self.position_of[index] = bucket.position

    def _make(self, specs: Sequence[BucketSpec], group: Group | None) -> list[Bucket]:
        buckets: list[Bucket] = [
            SparseBucket(spec, self.parameters, self.names)
            if spec.sparse
            else DenseBucket(
                spec,
                self.parameters,
                self.names,
                keep_held_gradients=self._keep_held_gradients,
                message=self._message,
                group=group,
            )
            for spec in specs
        ]
        for position, bucket in enumerate(buckets):
            bucket.position, bucket.is_last = position, position == len(buckets) - 1
        return buckets
