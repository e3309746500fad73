"""Gradient buckets: which gradients share one, copies in and out of flat buffers, and all buckets of a model."""

import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import compress, repeat
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.futures import Future

from lockstep.base import torch_internals
from lockstep.comm.collectives import Group, Pieces, Started, all_gather_different, empty_buffer
from lockstep.errors import LockstepError
from lockstep.parallel.flat import ALIGNMENT_BYTES, cut_views, padded_numel
from lockstep.parallel.module_io import Registered

# --- which gradients share a bucket: pure functions of sizes and of the observed ready order --------------------------

MIB = 2**20
DEFAULT_CAP_BYTES = 25 * MIB
FIRST_CAP_BYTES = 1 * MIB  # small, so that communication starts early


class ParameterSpec(NamedTuple):
    """The properties of a parameter that the plan uses. ``deferred``: may receive several gradients in one backward."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    deferred: bool = False


class BucketSpec(NamedTuple):
    """The parameters of one bucket, by index, in the order of their gradients in the bucket; see `ALIGNMENT_BYTES`."""

    parameters: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool
    deferred: bool
    size_bytes: int


def plan_buckets(
    parameters: Sequence[ParameterSpec], order: Sequence[int], caps_bytes: Sequence[int]
) -> tuple[BucketSpec, ...]:
    """Split ``order`` into buckets of one dtype and device; a pure function.

    Args:
        parameters: All parameters, by index.
        order: Every index once, in the order in which gradients are expected.
        caps_bytes: A bucket closes when it holds this many bytes: one cap per bucket, the last for all later ones.

    Returns:
        The buckets in the order in which they are launched. Those of deferred parameters come last.
    """
    finished: list[tuple[int, BucketSpec]] = []
    # By the common properties of the members: buckets of several dtypes fill in parallel, each kind with its own caps.
    open_buckets: dict[object, list[int]] = defaultdict(list)
    size_bytes: Counter[object] = Counter()
    num_closed: Counter[object] = Counter()
    order = sorted(order, key=lambda index: parameters[index].deferred)  # stable
    position = {index: place for place, index in enumerate(order)}

    def close(key: object) -> None:
        members = open_buckets.pop(key)
        first = parameters[members[0]]
        kind = first.dtype, first.device, first.sparse, first.deferred
        laid = sorted(members, key=lambda index: parameters[index].numel * first.dtype.itemsize % ALIGNMENT_BYTES > 0)
        # A bucket is ready when its last gradient is, so launches are ordered by the last gradient.
        finished.append((position[members[-1]], BucketSpec(tuple(laid), *kind, size_bytes.pop(key))))
        num_closed[key] += 1

    for index in order:
        param = parameters[index]
        key = (param.dtype, param.device, param.deferred, index if param.sparse else None)  # each sparse one alone
        open_buckets[key].append(index)
        size_bytes[key] += param.numel * param.dtype.itemsize
        if size_bytes[key] >= caps_bytes[min(num_closed[key], len(caps_bytes) - 1)]:
            close(key)
    for open_key in list(open_buckets):
        close(open_key)
    return tuple(spec for _, spec in sorted(finished, key=lambda item: item[0]))


class ReadyOrder(NamedTuple):
    """Every parameter's index once, in the order of arrival, and the indices that arrived more than once.

    Attributes:
        is_uneven: Whether ranks that had data observed different arrivals.
    """

    order: tuple[int, ...]
    repeated: frozenset[int]
    is_uneven: bool = False


def merge_arrivals(arrivals: Sequence[Sequence[int]], default: Sequence[int]) -> ReadyOrder:
    """Combine the arrivals of all ranks into one order; a pure function.

    Args:
        arrivals: By rank, the indices of the parameters as their gradients arrived, including repeats.
        default: Every index once; the order of parameters that did not arrive on the chosen rank.

    Returns:
        The order of the rank on which most parameters arrived (the lowest such rank), completed from ``default``.
        A parameter that arrived twice on any rank counts as repeated, and its last arrival is its place.
    """
    repeated = frozenset(index for seen in arrivals for index, count in Counter(seen).items() if count > 1)
    longest = max(arrivals, key=lambda seen: len(set(seen)))
    last_arrivals = list(dict.fromkeys(reversed(longest)))[::-1]
    order = tuple(dict.fromkeys([*last_arrivals, *default]))
    return ReadyOrder(order, repeated, is_uneven=len({tuple(seen) for seen in arrivals if seen}) > 1)


# --- copying gradients in and out of flat buffers ---------------------------------------------------------------------

# Gradients of this size are divided while they are copied; smaller ones all in one call.
_LARGE_NUMEL = 2**15

# The sys.getrefcount of a view to which there is no other reference, called in the same way.
_OWN_REFERENCES = max(map(sys.getrefcount, [object()]))

_REMEDY = (
    "Convert, move or load the model before wrapping, or wrap again: model = DistributedDataParallel(model.module)."
)

_grad_of, _dtype_of = operator.attrgetter("grad"), operator.attrgetter("dtype")


class GradientScale(NamedTuple):
    """The factors of a rank's gradients in the sum over the ranks.

    Attributes:
        factor: The factor for gradients.
        unused_factor: The factor for the old gradients of parameters that received none in this step.
        message: The end of the tail, see [Note: weight messages]; None: the tail of this bucket is not read.
    """

    factor: float
    unused_factor: float
    message: Sequence[float] | None = None


class _Members:
    """The common part of dense and sparse buckets: the parameters whose gradients go through one collective.

    Attributes:
        gradients: The gradients alone, as communication hooks see them.
        payload: The tensor that the collective sums: the gradients and the tail, which begins at ``tail_start``.
        weight_message: The end of the tail, see [Note: weight messages] in weighting.py; None if there is no tail.
        members: The indices of its parameters.
        position, is_last: Its place among the buckets of the model, in the order in which they are launched.
        missing: By place, from `gather` to `settle`: the parameters that received no gradient on this rank, and the
            gradient that they had before.
        future: Of the reduction, from the launch until it has been waited for; done when the bucket is reduced.
        sent_dtype: The dtype in which the tail is sent; that of the gradients unless they are compressed.
    """

    gradients: Tensor
    payload: Tensor
    tail_start = 0
    weight_message: Tensor | None = None

    def __init__(self, spec: BucketSpec, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        self.spec = spec
        self.parameters = [parameters[index] for index in spec.parameters]
        self.names = [names[index] for index in spec.parameters]
        self.members = frozenset(spec.parameters)
        self._addresses = list(map(torch_internals.tensor_address, self.parameters))
        self.position, self.is_last = 0, False
        self.missing: dict[int, Tensor | None] = {}
        self.future: Future[Any] | Started | None = None
        self.sent_dtype = spec.dtype

    def check_missing(self, used: Set[int]) -> None:
        """Check that the parameters that are not in ``used`` still have their hooks: swapping tensors takes them away.

        Raises:
            LockstepError: A parameter is another tensor now, so a gradient is not noticed.
        """
        for place, (parameter, address) in enumerate(zip(self.parameters, self._addresses, strict=True)):
            if self.spec.parameters[place] not in used and torch_internals.tensor_address(parameter) != address:
                raise LockstepError(
                    f"The tensor of parameter {self.names[place]} was swapped after the model was wrapped, by a "
                    "conversion, load_state_dict or swap_tensors: its gradient would not be averaged over the ranks.\n"
                    + _REMEDY
                )


@final
class DenseBucket(_Members):
    """Gradients in one flat buffer; see [Note: layout of a bucket].

    [Note: layout of a bucket]
    One flat buffer: the gradients of the parameters, back to back, zeros up to a size that ``num_slices`` equal and
    aligned slices divide, and a tail that is reduced in the same collective. The tail has one element per parameter,
    which counts the ranks on which it received a gradient, and the ranks' weight messages (see [Note: weight messages]
    in weighting.py). ``views[k]`` has the shape and the strides of parameter k and becomes its ``.grad``.

    [Note: held gradients]
    In torch, a gradient that a script keeps after ``zero_grad()`` does not change. Ours are views of a buffer that the
    next step overwrites. So if a script still holds views, the bucket allocates new memory and leaves the old memory to
    the script. Only this rank does so, so the new memory is ordinary memory. shm can reduce a bucket that lies in
    shared memory on some ranks only, like any other tensor.

    [Note: gradients that are copied late]
    Gradients that are copied into the bucket first cross memory once more when they are reduced. For a wide model, that
    is most of the cost of synchronisation. So a reduction that can (`BucketReduction.takes_pieces`) gets them where
    autograd left them, as `pieces`, and first copies those that the other ranks need.

    [Note: edited gradients]
    Scripts change gradients: ``p.grad.data = x``, ``p.grad.set_(x)``, ``p.grad.t_()``, and each conversion of the model
    give another memory or other strides to the same tensor, here a view that lasts. So each gather compares where the
    views are with where they were cut, and cuts those anew that have moved. An address costs 50 ns, a new view 200 ns.
    A version counter would be no cheaper, and setting ``data`` does not change it. A count of the storage's users stays
    the same if the script holds the old ``data``. Only views of two and more dimensions may have another order of
    elements at the same address: whether they are contiguous costs 40 ns, their strides 70 ns.

    Args:
        spec, parameters, names: See `BucketSet`.
        keep_held_gradients: See [Note: held gradients].
        message: The end of the tail on this rank in a step without weights.
        num_slices: The number of ranks.
        group: The ranks that create this bucket at the same time, so that it can lie in memory that all of them map;
            see `empty_buffer`. None: this rank creates it alone.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        *,
        keep_held_gradients: bool,
        message: Sequence[float],
        num_slices: int = 1,
        group: Group | None = None,
    ) -> None:
        super().__init__(spec, parameters, names)
        self._keep_held_gradients = keep_held_gradients
        numel = sum(parameter.numel() for parameter in self.parameters)

        # The layout: gradients, zeros up to `tail_start`, the tail. This rank's tail has 1 for each parameter (`gather`
        # replaces it by 0 if there is no gradient), and then the message.
        self.tail_start = padded_numel(numel, spec.dtype.itemsize, num_slices)
        self._message = tuple(message)
        self._own_tail = torch.tensor([1.0] * len(self.parameters) + list(message)).to(spec.device, spec.dtype)

        # The copies: by place, which gradients are copied one by one (`_copy_in`); and whether all may be copied late,
        # by C code that multiplies these two dtypes. Only gradients of contiguous parameters are sure to have the
        # layout of their slot.
        self._large = {place for place, parameter in enumerate(self.parameters) if parameter.numel() >= _LARGE_NUMEL}
        is_multiplied_in_c = spec.dtype in (torch.float32, torch.float64)
        self._may_be_late = is_multiplied_in_c and all(parameter.is_contiguous() for parameter in self.parameters)
        self.pieces: Pieces | None = None

        # By place, whether strides may change at the same address; see [Note: edited gradients].
        self._are_matrices = [parameter.dim() > 1 for parameter in self.parameters]

        # The memory. `_renew` replaces it if the script holds gradients, which the next step must not overwrite.
        self._allocate(self.parameters, group)

    def _allocate(self, like: Sequence[Tensor], group: Group | None) -> None:
        """Allocate memory for gradients with the shapes and strides of ``like``, and cut it by the layout."""
        numel = sum(tensor.numel() for tensor in like)
        size, dtype, device = self.tail_start + len(self._own_tail), self.spec.dtype, self.spec.device
        if group is None or group.size() == 1:
            self.payload = torch.zeros(size, dtype=dtype, device=device)
        else:
            self.payload = empty_buffer(size, dtype=dtype, device=device, group=group).zero_()
        self.gradients, self._tail = self.payload[:numel], self.payload[self.tail_start :]
        message = self._tail[len(self.parameters) :]
        self.weight_message = message.real if message.is_complex() else message
        # Two tensors for each gradient. Writing through a slot does not change the version counter of its view, so a
        # changed counter shows that autograd or the script has changed that gradient in place.
        self._slots = cut_views(self.gradients, like)
        self._views = [slot.data for slot in self._slots]
        self._layout = self._find_layout()
        self._small_slots = [slot for place, slot in enumerate(self._slots) if place not in self._large]
        # See [Note: held gradients]: the tensors on this memory that are ours; more are the script's.
        self._storage_address = torch_internals.storage_address(self.payload)
        self._num_aliases = torch_internals.storage_use_count(self._storage_address)

    def _find_layout(self) -> tuple[list[int], list[bool]]:
        """Return where the views are now; see [Note: edited gradients]."""
        matrices = compress(self._views, self._are_matrices)
        return list(map(Tensor.data_ptr, self._views)), list(map(Tensor.is_contiguous, matrices))

    def _restore_views(self) -> None:
        """Cut those views anew that the script has moved; gradients that they are now lie outside of the bucket."""
        for place, (parameter, view, slot) in enumerate(zip(self.parameters, self._views, self._slots, strict=True)):
            if view.data_ptr() != slot.data_ptr() or view.stride() != slot.stride():
                self._views[place] = slot.data
                if parameter.grad is view:
                    parameter.grad = view.clone()  # it may overlap with the slot that it is copied to

    @property
    def holds_all(self) -> bool:
        """Whether the gradients of all its parameters lie in `gradients`."""
        is_elsewhere = any(map(operator.is_not, map(_grad_of, self.parameters), self._views))
        return not is_elsewhere and self._find_layout() == self._layout

    def gradient_views(self) -> list[Tensor]:
        """Return the gradients one by one, by place."""
        return list(self._slots)

    def replace_gradients(self, value: Tensor) -> None:
        """Replace `gradients` by the result of a communication hook."""
        if value.data_ptr() != self.gradients.data_ptr() or value.dtype != self.gradients.dtype:
            self.gradients.copy_(value.reshape(-1)[: self.gradients.numel()])

    def gather(self, used: Set[int] | None, scale: GradientScale, *, late: bool = False) -> None:
        """Copy this rank's gradients into the bucket.

        Args:
            used: The parameters of the model that received a gradient since the last step; None: all of this bucket.
            scale: Their factors.
            late: Whether they may be left in `pieces`; see [Note: gradients that are copied late].
        """
        if torch.is_grad_enabled():  # backward with create_graph=True would record the copies
            with torch.no_grad():
                return self.gather(used, scale, late=late)
        if self._find_layout() != self._layout:
            self._restore_views()
        if scale.message is not None and scale.message != self._message:  # the same in most steps
            # One by one: numbers go to a device as arguments of kernels, also in a capture.
            for place, (before, now) in enumerate(zip(self._message, scale.message, strict=True), len(self.parameters)):
                if now != before:
                    self._own_tail[place] = now
            self._message = tuple(scale.message)
        gradients = list(map(_grad_of, self.parameters))
        is_none = map(operator.is_, gradients, repeat(None))
        if used is not None or any(is_none) or any(map(operator.is_, gradients, self._views)):
            self._gather_some(gradients, used, scale)
        else:  # the usual case; the only Python loop over the parameters assigns the views
            self.missing = {}
            if self._keep_held_gradients and self._is_held(self._views):
                self._renew()
            present = cast("list[Tensor]", gradients)
            if late and self._can_be_late(present):
                self.pieces = Pieces(present, scale.factor)
                self._tail.copy_(self._own_tail)
            else:
                self._copy_in(present, scale.factor)
            self._set_gradients(zip(self.parameters, self._views, strict=True))
        for place in self.missing:
            self._tail[place] = 0

    def _can_be_late(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether C can read them in place: hooks of the script may have put anything in ``param.grad``."""
        return (
            self._may_be_late
            and set(map(type, gradients)) == {Tensor}
            and all(map(Tensor.is_contiguous, gradients))
            and not any(map(Tensor.is_neg, gradients))
            and set(map(_dtype_of, gradients)) == {self.spec.dtype}
        )

    def take_pieces(self) -> Pieces | None:
        """Return the gradients that are still to be copied in, and forget them."""
        pieces, self.pieces = self.pieces, None
        return pieces or Pieces()

    def _gather_some(self, gradients: Sequence[Tensor | None], used: Set[int] | None, scale: GradientScale) -> None:
        """Gather if some gradients are missing or already in the bucket."""
        used = self.members if used is None else used
        self.missing = {
            place: None if gradient is None else gradient.clone()
            for place, (gradient, index) in enumerate(zip(gradients, self.spec.parameters, strict=True))
            if gradient is None or index not in used
        }
        # Slots that will be overwritten although they are not the parameter's gradient now. The slot of a parameter
        # without a gradient is overwritten, too: by zeros, and by the reduced values.
        outside = [place for place, gradient in enumerate(gradients) if gradient is not self._views[place]]
        if outside and self._keep_held_gradients and self._is_held(map(self._views.__getitem__, outside)):
            self._renew()
        sources = zip(gradients, self._views, self._slots, strict=True)
        self._copy_in([s if g is None or g is view else g for g, view, s in sources], scale.factor)
        present = (place for place in outside if gradients[place] is not None)
        self._set_gradients((self.parameters[place], self._views[place]) for place in present)
        for place, previous in self.missing.items():
            if previous is None:
                self._slots[place].zero_()
            elif scale.unused_factor != scale.factor:
                torch.mul(previous, scale.unused_factor, out=self._slots[place])

    def _copy_in(self, gradients: list[Tensor], factor: float) -> None:
        """Copy the gradients to their places, multiplied by ``factor``. A slot in the list is already in its place.

        The tail becomes this rank's, in the same call.
        """
        slots, large = self._slots, self._large if factor != 1 else ()
        small = [gradient for place, gradient in enumerate(gradients) if place not in large] if large else gradients
        try:
            for place in large:
                torch.mul(gradients[place], factor, out=slots[place])
            targets = self._small_slots if large else slots
            torch_internals.foreach_copy_([*targets, self._tail], [*small, self._own_tail])
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
            torch_internals.foreach_mul_(self._small_slots, factor)

    def _set_gradients(self, pairs: Iterable[tuple[torch.nn.Parameter, Tensor]]) -> None:
        """Set gradients of parameters.

        Raises:
            LockstepError: A parameter now has another dtype, device or shape than when it was wrapped.
        """
        try:
            for parameter, view in pairs:
                parameter.grad = view
        except RuntimeError as error:  # torch compares dtype, device and shape
            was, now = (f"{tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}" for tensor in (view, parameter))
            place = next(place for place, member in enumerate(self.parameters) if member is parameter)
            raise LockstepError(
                f"Parameter {self.names[place]} was {was} when it was wrapped, and is now {now}: the bucket cannot "
                "hold its gradient.\n" + _REMEDY
            ) from error

    def _is_held(self, views: Iterable[Tensor]) -> bool:
        """Return whether the script holds some of ``views``, or tensors made from any part of the buffer."""
        if torch_internals.storage_use_count(self._storage_address) > self._num_aliases:
            return True
        return max(map(sys.getrefcount, views)) > _OWN_REFERENCES

    def _renew(self) -> None:
        old_views = self._views
        self._allocate(self._slots, None)  # as on the other ranks, though parameters may have other strides by now
        for parameter, old, new in zip(self.parameters, old_views, self._views, strict=True):
            if parameter.grad is old:  # in use as the gradient, not only held
                new.copy_(old)
                parameter.grad = new

    @torch.no_grad()
    def scale(self, factor: float | Tensor) -> None:
        """Multiply the reduced gradients by a number, or a tensor with one element; after the reduction."""
        self.gradients.mul_(factor)

    def settle(self, num_users: Sequence[int] | None) -> bool:
        """Set the reduced gradients of parameters without a gradient; the others have theirs since `gather`.

        Args:
            num_users: On how many ranks each parameter of the model received a gradient; None: read it from the tail.

        Returns:
            Whether some rank used some of the parameters.
        """
        if not self.missing:  # only a rank without some gradient reads the tail
            return True
        counts = self._tail.real.tolist() if num_users is None else [num_users[index] for index in self.spec.parameters]
        for place, previous in self.missing.items():
            view = self._views[place]
            if round(counts[place]):
                self._set_gradients([(self.parameters[place], view)])
            elif previous is None:
                self.parameters[place].grad = None
            else:
                view.copy_(previous)
        return any(map(round, counts[: len(self.parameters)]))

    def adopt(self) -> None:
        """Copy in the current gradients of the parameters, which lie in buckets of an earlier plan."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = view


@final
class SparseBucket(_Members):
    """The gradient of one embedding with ``sparse=True``. It has no fixed size, so it has no buffer and no tail."""

    holds_all = False
    pieces = None

    def __init__(self, spec: BucketSpec, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        super().__init__(spec, parameters, names)
        (self._parameter,) = self.parameters
        self.replace_gradients(self._empty())

    def _empty(self) -> Tensor:
        like = self._parameter  # may have been converted
        return torch_internals.empty_sparse(like.shape, dtype=like.dtype, device=like.device)

    def gradient_views(self) -> list[Tensor]:
        """Return the one gradient."""
        return [self.gradients]

    def replace_gradients(self, value: Tensor) -> None:
        """Replace `gradients` by the result of a communication hook."""
        self.gradients = self.payload = value

    def gather(self, used: Set[int] | None, scale: GradientScale, *, late: bool = False) -> None:
        """Set this rank's gradient, coalesced and multiplied; there is nothing to copy late."""
        gradient, is_used = self._parameter.grad, used is None or not self.members.isdisjoint(used)
        self.missing = {} if gradient is not None and is_used else {0: gradient}
        if gradient is None:
            self.replace_gradients(self._empty())
            return
        factor = scale.factor if is_used else scale.unused_factor
        sparse = gradient if gradient.is_sparse else gradient.to_sparse(1)
        self.replace_gradients(sparse.detach().coalesce() * factor)

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the reduced gradient by a number, or a tensor with one element."""
        self.replace_gradients(self.gradients.clone())
        torch_internals.values_of(self.gradients).mul_(factor)

    def settle(self, num_users: Sequence[int] | None) -> bool:
        """Set the reduced gradient of the parameter, unless no rank had one; return whether one had."""
        reduced = self.gradients.coalesce()
        self.replace_gradients(self._empty())
        is_used = not self.missing or torch_internals.nnz(reduced) > 0
        if is_used:
            self._parameter.grad = reduced
        return is_used

    def take_pieces(self) -> None:
        """Do nothing, like `adopt`."""

    def adopt(self) -> None:
        """Do nothing: the parameter's gradient is a separate tensor."""


Bucket = DenseBucket | SparseBucket


class BucketSet:
    """All buckets of a model: first in reverse order of registration, then rebuilt in the observed order.

    [Note: unfrozen parameters]
    Buckets hold the parameters that were trained at some time since the model was wrapped. One that is frozen stays, as
    one without a gradient: models of GANs freeze and unfreeze in each step. One that is unfrozen is found by the next
    forward (`WrappedParameters`), and from then on is a *new* parameter, the last ones of ``parameters``, with a hook,
    but in no bucket. This is not collective: only the weight messages say that a rank has new parameters. When the
    buckets of a step are finished, all ranks know it; they compare the names, and reduce these gradients in further
    buckets (`Reducer._add_new`), which stay the last ones: a backbone that is unfrozen has its gradients last. The
    other buckets do not change, since hooks of scripts, residuals and sharded optimizers have state for each.

    Args:
        parameters: All parameters of the model, by name, each once; the same order, shapes and dtypes on every rank.
        sparse: Those among them that receive sparse gradients.
        caps_bytes: See :func:`plan_buckets`.
        keep_held_gradients: See [Note: held gradients].
        message: The weight message of this rank without weights, see [Note: weight messages] in weighting.py.
        num_slices: See [Note: layout of a bucket].

    Attributes:
        parameters, names: Of the trained ones, by the index that a bucket uses; the new ones come last. They, and
            ``index_of``, stay the same objects.
        num_planned: The number of those in buckets.
        frozen: The others, by name.
        index_of: This index, by the parameter's id.
        device: A device whose tensors the ranks can exchange.
        buckets: In the order in which they are launched, the same on every rank. A new list when they are rebuilt.
        position_of: By parameter, the position of its bucket.
        on_rebuilt: Called with the new buckets when the ranks have created them, on all ranks in the same order.
        is_rebuilt: Whether the order is the observed one.
        is_uneven: Whether ranks observed different arrivals.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        sparse: Set[torch.Tensor],
        caps_bytes: Sequence[int],
        keep_held_gradients: bool,
        message: Sequence[float],
        num_slices: int = 1,
    ) -> None:
        self.parameters: list[torch.nn.Parameter] = []
        self.names: list[str] = []
        self.index_of: dict[int, int] = {}
        self._all, self._sparse = dict(parameters), sparse
        self.is_rebuilt = self.is_uneven = False
        self.on_rebuilt: list[Callable[[Sequence[Bucket]], None]] = []
        self._caps_bytes = tuple(caps_bytes)
        self._new_dense = partial(
            DenseBucket, keep_held_gradients=keep_held_gradients, message=tuple(message), num_slices=num_slices
        )
        self.device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        self.number_anew([name for name, parameter in parameters.items() if parameter.requires_grad])
        # Without the group: a copy of the model may be created on one rank alone.
        self._install(self._default_order, None)

    @property
    def _default_order(self) -> range:
        return range(len(self.parameters))[::-1]

    def number_anew(self, names: Collection[str]) -> None:
        """Hold the parameters with these names, in the order of the model. Buckets must be built next."""
        self.frozen, self.position_of = dict(self._all), dict[int, int]()
        self._specs: list[ParameterSpec] = []
        for values in (self.parameters, self.names, self.index_of):
            values.clear()
        self.append(filter(names.__contains__, self._all))

    def append(self, names: Iterable[str]) -> None:
        """Hold these parameters, too, in no bucket for now. Not collective."""
        for name in names:
            parameter = self.frozen.pop(name)
            self.index_of[id(parameter)] = len(self.parameters)
            self.position_of[len(self.parameters)] = sys.maxsize
            self.parameters.append(parameter)
            self.names.append(name)
            is_sparse = parameter in self._sparse
            self._specs.append(ParameterSpec(parameter.numel(), parameter.dtype, parameter.device, sparse=is_sparse))

    def add_new(self, repeated: Iterable[int], *, group: Group) -> list[Bucket]:
        """Create buckets for the new parameters, and return them. Collective: every rank. Blocks until complete.

        Args:
            repeated: Those that received several gradients in this backward, on any rank.
            group: The ranks that take part.
        """
        for index in repeated:
            self._specs[index] = self._specs[index]._replace(deferred=True)
        order = self._default_order[: len(self.parameters) - self.num_planned]
        new = self._make(plan_buckets(self._specs, order, self._caps_bytes), group)
        self._place([*self.buckets, *new])
        for callback in self.on_rebuilt:
            callback(new)
        return new

    def rebuild(self, ready_order: Sequence[int], *, group: Group) -> None:
        """Rebuild the buckets from the arrivals in the first step. Collective: every rank. Blocks until complete.

        Args:
            ready_order: Indices of the parameters as their gradients arrived on this rank; empty if it had no data.
            group: The ranks that take part.
        """
        arrivals = all_gather_different(list(ready_order), group=group, device=self.device)
        self._use(*merge_arrivals(arrivals, self._default_order), group)

    @property
    def agreed_plan(self) -> list[Any] | None:
        """The names of parameters in order, those that arrive twice, and `is_uneven`; None before `rebuild`."""
        if not self.is_rebuilt:
            return None
        order = [name for bucket in self.buckets for name in bucket.names]
        repeated = [name for name, spec in zip(self.names, self._specs, strict=True) if spec.deferred]
        return [order, repeated, self.is_uneven]

    def use_plan(self, plan: Sequence[Any] | None, *, group: Group) -> None:
        """Build the buckets by an `agreed_plan`. Collective: every rank. Blocks until complete."""
        if plan is None:
            return self._install(self._default_order, None)
        place = {name: index for index, name in enumerate(self.names)}
        order, repeated = ([place[name] for name in names if name in place] for names in plan[:2])
        self._use([*dict.fromkeys([*order, *self._default_order])], frozenset(repeated), plan[2], group)

    def _use(self, order: Sequence[int], repeated: Set[int], is_uneven: bool, group: Group) -> None:
        self.is_uneven = is_uneven
        self._specs = [spec._replace(deferred=index in repeated) for index, spec in enumerate(self._specs)]
        self._install(order, group)
        for bucket in self.buckets:
            bucket.adopt()
        self.is_rebuilt = True
        for callback in self.on_rebuilt:
            callback(self.buckets)

    def scratch(self) -> list[Bucket]:
        """Return buckets like these that hold zeros; not collective."""
        made = self._make([bucket.spec for bucket in self.buckets], None)
        for copy, bucket in zip(made, self.buckets, strict=True):
            copy.position, copy.is_last = bucket.position, bucket.is_last
        return made

    def accumulates(self, functions: Any) -> bool:
        """Return whether the running backward may add to a gradient of these parameters: ``autograd.grad`` does not.

        Args:
            functions: The first nodes that it reaches below an output, with the numbers of their inputs.
        """
        reached = dict.fromkeys(functions)
        queue = list(reached)
        for node, _ in queue:
            if node is None:
                continue
            if not torch_internals.will_execute(node):  # it runs for ``autograd.grad``, or ``backward(inputs=...)``
                trained = filter(requires_grad, self.parameters)
                return any(torch_internals.will_execute(get_gradient_edge(parameter).node) for parameter in trained)
            if id(getattr(node, "variable", None)) in self.index_of:
                return True
            new = dict.fromkeys(successor for successor in node.next_functions if successor not in reached)
            reached |= new
            queue += new
        return True  # this rank's part of the model has no parameters, but other ranks' may have some

    def _install(self, order: Sequence[int], group: Group | None) -> None:
        self._place(self._make(plan_buckets(self._specs, order, self._caps_bytes), group))

    def _place(self, buckets: list[Bucket]) -> None:
        self.buckets, self.num_planned = buckets, len(self.parameters)
        for position, bucket in enumerate(buckets):
            bucket.position, bucket.is_last = position, position == len(buckets) - 1
        self.position_of = {index: bucket.position for bucket in buckets for index in bucket.spec.parameters}

    def _make(self, specs: Sequence[BucketSpec], group: Group | None) -> list[Bucket]:
        kinds = SparseBucket, partial(self._new_dense, group=group)
        return [kinds[not spec.sparse](spec, self.parameters, self.names) for spec in specs]


# --- parameters that came later, and are in no bucket ---

requires_grad = operator.attrgetter("requires_grad")


class WrappedParameters:
    """Detects trained parameters that are in no bucket: those added, replaced or unfrozen after wrapping.

    Args:
        module: The model.
        ignore: Names of parameters that are not reduced.
        bucket_set: The buckets.
    """

    def __init__(self, module: torch.nn.Module, ignore: set[str], bucket_set: BucketSet) -> None:
        self._module, self._ignore, self._bucket_set = module, ignore, bucket_set
        self._known = set(module.parameters())
        self._registered = Registered(module, torch_internals.own_parameters)

    def find_unfrozen(self, module: torch.nn.Module) -> list[str]:
        """Return the names of parameters that were frozen until now.

        Args:
            module: The model as it is now.

        Raises:
            LockstepError: A trained parameter was not in the model when it was wrapped.
        """
        frozen = self._bucket_set.frozen
        if module is not self._module or self._registered.have_changed():
            for name, parameter in module.named_parameters():
                # torch.func.functional_call temporarily puts plain tensors there, which must not be averaged.
                is_one = isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
                if is_one and name not in self._ignore and parameter not in self._known:
                    raise LockstepError(
                        f"Parameter {name} was not in the model when it was wrapped: its gradient would not be "
                        "averaged over the ranks.\nReplace before wrapping, or wrap again: "
                        "model = DistributedDataParallel(model.module)."
                    )
            self._module, self._registered = module, Registered(module, torch_internals.own_parameters)
        if not any(map(requires_grad, frozen.values())):
            return []
        return [name for name, parameter in frozen.items() if parameter.requires_grad]
