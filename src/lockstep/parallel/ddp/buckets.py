"""Gradient buckets: which gradients share one, how they get in and out of flat buffers, and all buckets of a model."""

import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.futures import Future

from lockstep.comm.collectives import Group, Pieces, all_gather_different, empty_buffer
from lockstep.errors import LockstepError
from lockstep.parallel.flat import view_like

# --- which gradients travel together: pure functions of sizes and of the observed ready order -------------------------

MIB = 2**20
DEFAULT_CAP_BYTES = 25 * MIB
FIRST_CAP_BYTES = 1 * MIB  # small, so that communication starts early


@dataclass(frozen=True)
class ParameterSpec:
    """What the plan needs to know of a parameter. ``deferred``: it may receive several gradients in one backward."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    deferred: bool = False


@dataclass(frozen=True)
class BucketSpec:
    """The parameters of one bucket, by index, in the order in which their gradients lie."""

    parameters: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool
    deferred: bool
    size_bytes: int


def plan_buckets(
    parameters: Sequence[ParameterSpec], order: Sequence[int], caps_bytes: Sequence[int]
) -> tuple[BucketSpec, ...]:
    """Cut ``order`` into buckets of one dtype and device; a pure function.

    Args:
        parameters: All parameters, by index.
        order: Every index once, in the order in which gradients are expected.
        caps_bytes: A bucket closes when it holds this many bytes: one cap per bucket, the last for all that follow.

    Returns:
        The buckets in the order in which they are launched. Those of deferred parameters come last.
    """
    finished: list[tuple[int, BucketSpec]] = []
    # By what the members have in common: buckets of several dtypes fill side by side, each kind with all the caps.
    open_buckets: dict[object, list[int]] = defaultdict(list)
    size_bytes: Counter[object] = Counter()
    num_closed: Counter[object] = Counter()
    order = sorted(order, key=lambda index: parameters[index].deferred)  # stable
    position = {index: place for place, index in enumerate(order)}

    def close(key: object) -> None:
        members = open_buckets.pop(key)
        first = parameters[members[0]]
        kind = first.dtype, first.device, first.sparse, first.deferred
        # A bucket is ready when its last gradient is, so that is what orders the launches.
        finished.append((position[members[-1]], BucketSpec(tuple(members), *kind, size_bytes.pop(key))))
        num_closed[key] += 1

    for index in order:
        each = parameters[index]
        key = (each.dtype, each.device, each.deferred, index if each.sparse else None)  # each sparse one on its own
        open_buckets[key].append(index)
        size_bytes[key] += each.numel * each.dtype.itemsize
        if size_bytes[key] >= caps_bytes[min(num_closed[key], len(caps_bytes) - 1)]:
            close(key)
    for left in list(open_buckets):
        close(left)
    return tuple(spec for _, spec in sorted(finished, key=lambda item: item[0]))


@dataclass(frozen=True)
class ReadyOrder:
    """Every parameter's index once, in the order of arrival, and those that arrived more than once.

    Attributes:
        is_uneven: Whether ranks that had data saw different things.
    """

    order: tuple[int, ...]
    repeated: frozenset[int]
    is_uneven: bool = False


def merge_arrivals(arrivals: Sequence[Sequence[int]], default: Sequence[int]) -> ReadyOrder:
    """Combine what each rank saw into one order; a pure function.

    Args:
        arrivals: By rank, the indices of the parameters as their gradients arrived, repeats included.
        default: Every index once; the place of parameters that the chosen rank did not see.

    Returns:
        The order of the rank that saw most parameters (the lowest such rank), completed from ``default``.
        A parameter that arrived twice on any rank counts as repeated, and its last arrival is its place.
    """
    repeated = frozenset(index for seen in arrivals for index, count in Counter(seen).items() if count > 1)
    longest = max(arrivals, key=lambda seen: len(set(seen)))
    last_arrivals = list(dict.fromkeys(reversed(longest)))[::-1]
    order = tuple(dict.fromkeys([*last_arrivals, *default]))
    return ReadyOrder(order, repeated, is_uneven=len({tuple(seen) for seen in arrivals if seen}) > 1)


# --- how gradients get in and out of flat buffers ---------------------------------------------------------------------

# Gradients of this size are divided while they are copied; smaller ones all in one go, which takes fewer calls.
_LARGE_NUMEL = 2**15

# Of a view that nobody else holds, as sys.getrefcount counts them where it is called the same way.
_OWN_REFERENCES = max(map(sys.getrefcount, map([object()].__getitem__, range(1))))

_grad_of, _dtype_of = operator.attrgetter("grad"), operator.attrgetter("dtype")


class GradientScale(NamedTuple):
    """What a rank's gradients count in the sum over the ranks.

    Attributes:
        factor: What gradients are multiplied by.
        unused_factor: The same for the gradients from before, of parameters that received none in this step.
        message: What the tail ends with, see [Note: weight messages]; None: what a rank without weights sends.
    """

    factor: float
    unused_factor: float
    message: Sequence[float] | None = None


class _Members:
    """What dense and sparse buckets have in common: the parameters whose gradients go through one collective.

    Attributes:
        gradients: The gradients alone, as communication hooks see them.
        payload: What the collective sums: the gradients and what travels with them.
        weight_message: The end of the tail, see [Note: weight messages] in weighting.py; None if there is no tail.
        position, is_last: Its place among the buckets of the model, which is the order in which they are launched.
        missing: By place, from `gather` to `settle`: the parameters that received no gradient on this rank, and the
            gradient that they had before.
        future: Of the reduction, once it is launched; done when the bucket is reduced.
        sent_dtype: In what the tail travels; that of the gradients unless they are compressed.
    """

    gradients: Tensor
    payload: Tensor
    weight_message: Tensor | None = None

    def __init__(self, spec: BucketSpec, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        self.spec = spec
        self.parameters = [parameters[index] for index in spec.parameters]
        self.names = [names[index] for index in spec.parameters]
        self.position, self.is_last = 0, False
        self.missing: dict[int, Tensor | None] = {}
        self.future: Future[Any] | None = None
        self.sent_dtype = spec.dtype


@final
class DenseBucket(_Members):
    """Gradients in one flat buffer; see [Note: layout of a bucket].

    [Note: layout of a bucket]
    One flat buffer: the gradients of the parameters, back to back, then a tail that travels in the same collective: one
    element per parameter, which counts on how many ranks it received a gradient, and the ranks' weight messages (see
    [Note: weight messages] in weighting.py). ``views[k]`` has the shape and the strides of parameter k and becomes its
    ``.grad``.

    [Note: held gradients]
    In torch, a gradient that a script keeps after ``zero_grad()`` stays as it is. Ours are views of a buffer that the
    next step overwrites, so a bucket whose views are still held takes new memory and leaves the old to its holders.
    This rank does so alone, so the new memory is ordinary; shm reduces buckets of which only some lie in shared memory
    as it reduces any other tensor.

    [Note: gradients that are copied late]
    Gradients that are copied into the bucket first cross memory once more when they are reduced, which is most of what
    synchronisation costs a wide model. So a reduction that can (`BucketReduction.takes_pieces`) gets them where
    autograd left them, as `pieces`, and copies what the other ranks need first.

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
        # C multiplies these two. Gradients of parameters that are not contiguous may lie in another order.
        is_known = spec.dtype in (torch.float32, torch.float64)
        self._may_wait = is_known and all(each.is_contiguous() for each in self.parameters)
        self.pieces: Pieces | None = None
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
        # a counter that moved shows that autograd or the script has changed that gradient in place.
        self._slots = cut_views(self.gradients, self.parameters)
        self._views = [slot.data for slot in self._slots]
        self._small_slots = [slot for place, slot in enumerate(self._slots) if place not in self._large]
        self._num_aliases = self._count_aliases()

    @property
    def holds_all(self) -> bool:
        """Whether `gradients` is what all its parameters have as their gradients."""
        return not any(map(operator.is_not, map(_grad_of, self.parameters), self._views))

    def gradient_views(self) -> list[Tensor]:
        """Return the gradients one by one, by place."""
        return list(self._slots)

    def replace_gradients(self, value: Tensor) -> None:
        """Take what a communication hook has made of `gradients`."""
        if value.data_ptr() != self.gradients.data_ptr() or value.dtype != self.gradients.dtype:
            self.gradients.copy_(value.reshape(-1)[: self.gradients.numel()])

    def gather(self, used: Sequence[int], scale: GradientScale, *, late: bool = False) -> None:
        """Bring this rank's gradients in.

        Args:
            used: At place k, whether that parameter received a gradient since the last step.
            scale: What they are multiplied by.
            late: Whether they may be left in `pieces`; see [Note: gradients that are copied late].
        """
        gradients = list(map(_grad_of, self.parameters))
        is_none = map(operator.is_, gradients, repeat(None))
        if any(is_none) or not all(used) or any(map(operator.is_, gradients, self._views)):
            self._gather_some(gradients, used, scale)
        else:  # the usual case, without a Python loop over the parameters but the one that hands out the views
            self.missing = {}
            if self._keep_held_gradients and self._is_held(range(len(self._views))):
                self._renew()
            present = cast("list[Tensor]", gradients)
            if late and self._can_wait(present):
                self.pieces = Pieces(present, scale.factor)
            else:
                self._copy_in(present, scale.factor)
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.grad = view
        self._fill_tail(scale)

    def _can_wait(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether C can read them as they are: hooks of the script may have put anything in ``param.grad``."""
        return (
            self._may_wait
            and set(map(type, gradients)) == {Tensor}
            and all(map(Tensor.is_contiguous, gradients))
            and not any(map(Tensor.is_neg, gradients))
            and set(map(_dtype_of, gradients)) == {self.spec.dtype}
        )

    def take_pieces(self) -> Pieces | None:
        """Return the gradients that are to be copied in, and forget them."""
        pieces, self.pieces = self.pieces, None
        return pieces or Pieces()

    def _gather_some(self, gradients: Sequence[Tensor | None], used: Sequence[int], scale: GradientScale) -> None:
        """Gather where gradients are missing or in the bucket already."""
        self.missing = {
            place: None if gradient is None else gradient.clone()
            for place, gradient in enumerate(gradients)
            if gradient is None or not used[place]
        }
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
        for place, previous in self.missing.items():
            if previous is None:
                self._slots[place].zero_()
            elif scale.unused_factor != scale.factor:
                torch.mul(previous, scale.unused_factor, out=self._slots[place])

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
            for name, gradient in zip(self.names, gradients, strict=True):
                if gradient.layout is not torch.strided:
                    raise LockstepError(
                        f"Parameter {name} received a sparse gradient, which was not expected.\n"
                        "Only nn.Embedding and nn.EmbeddingBag with sparse=True may produce sparse gradients."
                    ) from error
            raise
        if factor != 1 and not large:
            self.gradients.mul_(factor)
        elif small and factor != 1:
            torch._foreach_mul_(self._small_slots, factor)

    @torch.no_grad()
    def _fill_tail(self, scale: GradientScale) -> None:
        self._tail.copy_(self._usual_tail)
        for place in self.missing:
            self._tail[place] = 0
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
        return int(torch._C._storage_Use_Count(self.payload.untyped_storage()._cdata))

    def _renew(self) -> None:
        old_views = self._views
        self._allocate(None)
        for parameter, old, new in zip(self.parameters, old_views, self._views, strict=True):
            if parameter.grad is old:  # in use now, not merely held
                new.copy_(old)
                parameter.grad = new

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients by ``factor``; after the reduction and before `settle`."""
        self.gradients.mul_(factor)

    def settle(self, num_users: Sequence[int] | None) -> None:
        """Hand the reduced gradients to the parameters that lack one; the others have theirs since `gather`.

        Args:
            num_users: On how many ranks each parameter of the model received a gradient; None: as in the tail.
        """
        if not self.missing:  # so only a rank that lacks a gradient reads the tail
            return
        counts = self._tail.real.tolist() if num_users is None else [num_users[each] for each in self.spec.parameters]
        for place, previous in self.missing.items():
            view = self._views[place]
            if round(counts[place]):
                self.parameters[place].grad = view
            elif previous is None:
                self.parameters[place].grad = None
            else:
                view.copy_(previous)

    def adopt(self) -> None:
        """Take over the gradients that the parameters have now, from a bucket of an earlier plan."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view


def cut_views(flat: Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """Cut ``flat`` into views like the parameters; see `view_like`."""
    pieces = flat.split([parameter.numel() for parameter in parameters])
    return [view_like(piece, parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


@final
class SparseBucket(_Members):
    """The gradient of one embedding with ``sparse=True``; it has no fixed size and so neither buffer nor tail."""

    holds_all = False
    pieces = None

    def __init__(self, spec: BucketSpec, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        super().__init__(spec, parameters, names)
        (self._parameter,) = self.parameters
        self.replace_gradients(self._empty())

    def _empty(self) -> Tensor:
        shape = self._parameter.shape
        make = torch.ops.aten._sparse_coo_tensor_with_dims  # public constructors warn about invariants in torch 2.11
        where = {"dtype": self.spec.dtype, "layout": torch.sparse_coo, "device": self.spec.device}
        return cast("Tensor", make(1, len(shape) - 1, shape, **where))

    def gradient_views(self) -> list[Tensor]:
        """Return the one gradient."""
        return [self.gradients]

    def replace_gradients(self, value: Tensor) -> None:
        """Take what a communication hook has made of `gradients`."""
        self.gradients = self.payload = value

    def gather(self, used: Sequence[int], scale: GradientScale, *, late: bool = False) -> None:
        """Take this rank's gradient, coalesced and multiplied; there is nothing to copy late."""
        gradient = self._parameter.grad
        self.missing = {} if gradient is not None and used[0] else {0: gradient}
        if gradient is None:
            self.replace_gradients(self._empty())
            return
        factor = scale.factor if used[0] else scale.unused_factor
        sparse = gradient if gradient.is_sparse else gradient.to_sparse(1)
        self.replace_gradients(sparse.detach().coalesce() * factor)

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradient by ``factor``."""
        self.replace_gradients(self.gradients * factor)

    def settle(self, num_users: Sequence[int] | None) -> None:
        """Hand the reduced gradient to the parameter, unless no rank had one."""
        reduced = self.gradients.coalesce()
        self.replace_gradients(self._empty())
        if not self.missing or reduced._nnz() > 0:
            self._parameter.grad = reduced

    def take_pieces(self) -> None:
        """Do nothing, as `adopt`."""

    def adopt(self) -> None:
        """Do nothing: the parameter's gradient is a tensor of its own."""


Bucket = DenseBucket | SparseBucket


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
        device: One whose tensors the ranks can exchange.
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
        self._dense_options: dict[str, Any] = {"keep_held_gradients": keep_held_gradients, "message": tuple(message)}
        self._specs = [
            ParameterSpec(parameter.numel(), parameter.dtype, parameter.device, sparse=parameter in sparse)
            for parameter in self.parameters
        ]
        # A copy of a model that was frozen since has none.
        self.device = self._specs[0].device if self._specs else torch.device("cpu")
        self._default_order = tuple(reversed(range(len(self.parameters))))
        # Not yet with the group: a copy of the model may be made on one rank alone.
        self._install(self._default_order, None)

    def rebuild(self, ready_order: Sequence[int], *, group: Group) -> None:
        """Build the buckets anew from what the first step showed. Collective: every rank. Blocks until complete.

        Args:
            ready_order: Indices of the parameters as their gradients arrived on this rank; empty if it had no data.
            group: The ranks that take part.
        """
        arrivals = all_gather_different(list(ready_order), group=group, device=self.device)
        agreed = merge_arrivals(arrivals, self._default_order)
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
        buckets: list[Bucket] = []
        for spec in specs:
            if spec.sparse:
                buckets.append(SparseBucket(spec, self.parameters, self.names))
            else:
                buckets.append(DenseBucket(spec, self.parameters, self.names, group=group, **self._dense_options))
            buckets[-1].position, buckets[-1].is_last = len(buckets) - 1, len(buckets) == len(specs)
        return buckets
