"""Weighted means: the weight of each micro-batch, the weight message of a rank, and the sum over the ranks."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from enum import Enum
from functools import lru_cache, partial
from itertools import accumulate
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lockstep.base.accelerator import HostCopy, is_capturing, upload, widest_dtype
from lockstep.base.activity import format_ranks
from lockstep.base.containers import grouped
from lockstep.base.torch_internals import version_of
from lockstep.comm.collectives import Group, all_reduce
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.buckets import Bucket, GradientScale
from lockstep.parallel.ddp.shares import BatchPart

USUAL_UPDATES = 1  # the optimizer steps between two reductions
_USUAL_STATE = {"lacks_gradients": False, "num_updates": USUAL_UPDATES, "digest": 0, "has_new": False}
NUM_UNREAD = 4  # the steps by which a host without weights and missing gradients may be ahead of its device
# The dtypes that can hold a sum of weights, with the precision of the gradients in the same message.
_WIDTHS = {torch.float32: 1, torch.complex64: 1, torch.float64: 2, torch.complex128: 2}


def check_weight(weight: Any) -> float:
    """Return the weight of a micro-batch as a number; blocks on a tensor that is still being computed.

    Raises:
        ConfigurationError: It is not a number, or it is negative, infinite or NaN.
    """
    is_scalar = isinstance(weight, Tensor) and weight.dim() == 0 and not weight.is_complex()
    number = float(weight) if is_scalar or isinstance(weight, Real) else math.nan
    if not 0 <= number < math.inf:
        is_one = is_scalar or not isinstance(weight, Tensor)
        text = repr(weight) if is_one else f"a tensor of shape {list(weight.shape)}"
        raise ConfigurationError(
            f"The weight of a batch must be a finite number, 0 or more, or a tensor with one such number, not {text}.\n"
            "Give how many samples or tokens the loss is the mean of."
        )
    return number


@lru_cache(maxsize=32)
def encode_message(
    rank: int,
    world_size: int,
    weight: float = 0.0,
    *,
    is_weighed: bool = False,
    is_missing: bool = False,
    lacks_gradients: bool = False,
    num_updates: int | None = None,
    digest: int = 0,
    has_new: bool = False,
) -> tuple[float, ...]:
    """Return the message that a rank sends at the end of a step; see [Note: weight messages].

    Args:
        rank: Of the sender.
        world_size: The number of ranks.
        weight: The total weight of its micro-batches.
        is_weighed: Whether it gave a weight.
        is_missing: Whether it gave none for some of them.
        lacks_gradients: Whether parameters had no gradient.
        num_updates: How many times its optimizer has stepped since the last reduction; None: not known.
        digest: 16 bits of what it has trained on.
        has_new: Whether it has new parameters, see [Note: unfrozen parameters] in buckets.py.
    """
    updates = 0 if num_updates is None else 1 + min(num_updates, 2)
    ranks = [0.0] * -(-world_size // 2)
    ranks[rank // 2] = float((is_missing + 2 * updates + 8 * has_new) * 16 ** (rank % 2))
    differences = [0.0] * 2 * world_size
    for start, bits in ((0, digest & 255), (world_size, digest >> 8 & 255)):
        differences[start + rank] += bits
        differences[start + (rank + 1) % world_size] -= bits
    return weight, float(is_weighed), float(lacks_gradients), *ranks, *differences


def _num_ranks(sums: Sequence[float]) -> int:
    return (len(sums) - 3) * 2 // 5


def _decode_ranks(sums: Sequence[float]) -> list[int]:
    """Return the state of each rank, from the sums of all messages; see [Note: weight messages]."""
    ranks = sums[3 : -2 * _num_ranks(sums)]
    return [int(number) >> bits & 15 for number in ranks for bits in (0, 4)]


def refuse_other_data(sums: Sequence[float], name: str) -> None:
    """Refuse a reduction of gradients of other global batches.

    Args:
        sums: Of all ranks' messages.
        name: Of the batches that this rank has used.

    Raises:
        ConfigurationError: The digests of the ranks differ; names the ranks that differ from the first.
    """
    world_size = _num_ranks(sums)
    if not any(sums[-2 * world_size :]):
        return
    # From rank 1 on, the sum of the differences between neighbours is the difference from rank 0.
    starts = len(sums) - 2 * world_size, len(sums) - world_size
    lower, upper = (accumulate(sums[start + 1 : start + world_size]) for start in starts)
    ranks = [rank for rank, distance in enumerate(zip(lower, upper, strict=True), 1) if any(distance)]
    raise ConfigurationError(
        f"The ranks have read different data: in this step, {format_ranks(ranks)} trained on "
        f"another global batch than rank 0{name and f'; here it was {name}'}.\n"
        "Every rank must read the same samples in the same order, and gets its part of them from prepare(). So a data "
        "set or sampler must not take a part by rank, shuffle with a generator that the ranks seed differently, or "
        "weight samples by the losses of one rank: use torch's generator, random or numpy.random, or a seed that is "
        "equal on all ranks."
    )


def refuse_apart(sums: Sequence[float]) -> None:
    """Refuse a reduction of ranks that are not in the same step.

    Args:
        sums: Of all ranks' messages.

    Raises:
        ConfigurationError: Since the last reduction, the optimizers of the ranks have stepped unequally often.
    """
    updates = [state >> 1 & 3 for state in _decode_ranks(sums)]
    if len({*updates} - {0}) > 1:  # 0: not known
        ranks = grouped(range(len(updates)), updates.__getitem__)
        ranks.pop(0, None)
        times = ["", "not at all", "once", "more than once"]
        summary = "; ".join(f"{times[count]} on rank {', '.join(map(str, ranks[count]))}" for count in sorted(ranks))
        raise ConfigurationError(
            "The ranks are not in the same step: since the gradients were averaged last, the optimizer has stepped "
            f"{summary}.\nA rank has run a backward or optimizer.step() more or less often than the others. Every step "
            "needs both on every rank, the backward from a loss that depends on the output of the model: for a batch "
            "without a target, output.sum() * 0."
        )


def some_have_new(sums: Sequence[float]) -> bool:
    """Return whether ranks have new parameters: all, apart from ranks without data.

    Args:
        sums: Of all ranks' messages.

    Raises:
        ConfigurationError: Only some have; names them.
    """
    states = _decode_ranks(sums)
    new = [rank for rank, state in enumerate(states) if state & 8]
    if new and any(0 < state < 8 for state in states):
        raise ConfigurationError(
            f"Parameters that were frozen are trained now on {format_ranks(new)}, but not on "
            "the others.\nSet requires_grad alike on all ranks, before the same step: not by rank, nor by what one "
            "rank has measured."
        )
    return bool(new)


def refuse_missing(sums: Sequence[float]) -> None:
    """Refuse weights that were given for some backwards only.

    Args:
        sums: Of all ranks' messages.

    Raises:
        ConfigurationError: Some ranks gave weights, and some omitted one; names the latter.
    """
    missing = [rank for rank, state in enumerate(_decode_ranks(sums)) if state & 1]
    if sums[1] and missing:
        raise ConfigurationError(
            f"A weight is missing in this step: {format_ranks(missing)} ran a backward "
            "without one, but other backwards of the step had theirs.\n"
            "Call model.mean_over(n) before each backward, or lockstep.backward(loss, mean_over=n), on all ranks or on "
            "none; n is 0 where a batch holds nothing that counts."
        )


class _Given(Enum):
    NOTHING = "nothing"  # for the next backward
    FRESH = "fresh"  # a weight that was not used yet
    COUNTED = "counted"  # a weight that was used, without a forward since


class AccumulationWindow:
    """The weights of one rank's micro-batches since the last synchronised step, and their effect on the gradients.

    [Note: weights]
    The gradient of a step is the sum of n * g over micro-batches and ranks, divided by the sum of n, where g is the
    gradient of a micro-batch's mean loss and n its weight. Losses are not scaled. ``param.grad`` is kept in units of
    the latest weight: it holds the sum so far divided by that weight, so autograd can add the next g without scaling.
    If the weight changes, ``param.grad`` is first multiplied by old / new. The bucket multiplies by the latest weight
    when it is gathered, which costs nothing, since it divides anyway.

    `set_weight` only stores the weight. The weight is used when a backward enters the model: autograd runs the first
    hooked output before all gradients of the model. Only then are the contents of ``param.grad`` known, since
    ``zero_grad()`` may come before or after ``mean_over()`` and ``forward``. Several backwards of one micro-batch count
    once, unless the step was closed in between. A forward invalidates a weight that was used.

    Args:
        parameters: All parameters of the model.
        has_unweighed: Whether gradients of micro-batches without a weight have been accumulated.
        shares_batch: Whether layers of the model exchange gradients with other ranks within backward.

    Attributes:
        is_weighed, has_unweighed: Whether the window holds micro-batches with and without a weight.
        total: The sum of the weights.
        unit: The weight that ``param.grad`` is divided by; 0 if there are no gradients.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, has_unweighed: bool, shares_batch: bool) -> None:
        self._parameters = parameters
        self._shares_batch = shares_batch
        self._given = _Given.NOTHING
        self._weight = 0.0
        self.close()
        self.has_unweighed = has_unweighed

    def close(self) -> None:
        """Begin a new window: the gradients have been reduced, or are invalid."""
        self.is_weighed = self.has_unweighed = False
        self.total = self.unit = 0.0
        # By parameter: gradients accumulated before a micro-batch of weight zero. Its own gradients must not be added,
        # since 0 * NaN is NaN. They are restored when the next micro-batch enters, or when the bucket is gathered.
        self._stashed: dict[int, Tensor | None] = {}
        # By parameter: the gradient's tensor, and a copy of its value when the window began. Gradients that were not
        # zeroed since the last step are part of the result of the next one: reduced gradient + mean of the window.
        # Ranks may have different numbers of micro-batches, so each rank sends these gradients with its total weight.
        # That is not the latest weight if the window holds several, so accumulation starts from zero and `end` adds
        # them.
        self._previous: dict[int, tuple[Tensor, Tensor]] = {}
        self._last_arrival: tuple[int, int] | None = None  # the index, and the version of its gradient

    def set_weight(self, weight: float) -> None:
        """Store the weight of the micro-batch of the next backward."""
        self._weight, self._given = weight, _Given.FRESH

    def ignore_weight(self) -> None:
        """Use 0 in place of a weight that was not used yet: the sample of the micro-batch is that of another rank."""
        if self._given is _Given.FRESH:
            self._weight = 0.0

    def discard_weight(self) -> bool:
        """Forget a weight that was not used; return whether there was one."""
        if self._given is not _Given.FRESH:
            return False
        self._given = _Given.NOTHING
        return True

    def on_forward(self) -> None:
        """Record a new micro-batch: the weight of the one before does not apply to it."""
        if self._given is _Given.COUNTED:
            self._given = _Given.NOTHING

    @property
    def has_weight(self) -> bool:
        """Whether the current or the next backward has a weight."""
        return self._given is not _Given.NOTHING

    @property
    def unit_of_backward(self) -> float:
        """The factor of the current backward's gradients; 1 if it has no weight."""
        return 1.0 if self._given is _Given.NOTHING else self._weight or self.unit

    def masked(self, gradient: Tensor) -> Tensor | None:
        """Return the replacement for the gradient of an output; None: keep the gradient.

        If layers share the batch between the ranks (SyncBatchNorm), the samples of a micro-batch of weight zero still
        contribute to the other ranks' losses. So its gradients are not dropped. Only the gradient of its own loss is
        replaced by zeros, where it enters the model.
        """
        is_masked = self._shares_batch and self._given is _Given.COUNTED and self._weight == 0
        return torch.zeros_like(gradient) if is_masked else None

    def holds_gradients(self, used: Set[int]) -> bool:
        """Return whether weighted gradients wait for a synchronised backward."""
        return self.is_weighed and not self._was_zeroed(used, arrived=None)

    @torch.no_grad()
    def begin_backward(self, used: set[int], *, accumulates: bool, arrived: int | None = None) -> None:
        """Record that a backward enters the model, and prepare the gradients for accumulation.

        Args:
            used: The indices whose gradients arrived since the last synchronised step; cleared if they were zeroed.
            accumulates: Whether the gradients stay on this rank for now.
            arrived: The parameter whose gradient has already arrived, if this was not noticed at an output.

        Raises:
            ConfigurationError: A gradient arrived before the output, too early to be weighted.
        """
        if (self.is_weighed or self.has_unweighed) and self._was_zeroed(used, arrived):
            self._zero_stashed(arrived)
            self.close()
            used.intersection_update((arrived,))
        if self._given is _Given.NOTHING:
            self.has_unweighed = True
        if self._given is _Given.NOTHING or (self._given is _Given.COUNTED and self.is_weighed):
            return
        weight = self._weight
        # Masked gradients are zeros, so they may be added to the old ones. Others of weight zero may be NaN.
        is_masked = weight == 0 and self._shares_batch
        if arrived is not None and (is_masked or (self.is_weighed and (self._stashed or weight != self.unit))):
            raise ConfigurationError(
                "A gradient arrived before any output of the model was reached, too late for its weight to count.\n"
                "Return all outputs as tensors, or in lists, dicts or dataclasses, and call mean_over() before "
                "backward."
            )
        self._unstash(range(len(self._parameters)))
        if accumulates and not self.is_weighed and not self.has_unweighed:
            self._save_previous(arrived)
        if weight == 0 and not is_masked:
            self._stash(arrived)
        else:
            # Old gradients are converted to the new unit, so that autograd can add to them.
            unit = weight or self.unit or 1.0
            if self.unit not in (0.0, unit):
                for gradient in self._accumulated(used):
                    gradient.mul_(self.unit / unit)
            self.unit = unit
        self.total += weight
        self.is_weighed, self._given = True, _Given.COUNTED

    def on_local_gradient(self, index: int, used: set[int]) -> None:
        """Record a gradient that stays on this rank for now."""
        counts = self.is_weighed if self._given is _Given.COUNTED else self.has_unweighed
        if self._given is _Given.FRESH or not counts:
            self.begin_backward(used, accumulates=True, arrived=index)
        gradient = self._parameters[index].grad
        self._last_arrival = None if gradient is None else (index, version_of(gradient))

    @torch.no_grad()
    def end(self, indices: Sequence[int], used: Set[int]) -> None:
        """Prepare the gradients of the parameters ``indices`` for being multiplied by `unit` and sent.

        Args:
            indices: Of parameters whose gradients this backward will not add to any more.
            used: The indices whose gradients arrived since the last synchronised step.
        """
        self._unstash(indices)
        for index in indices:
            if index in self._previous:
                tensor, previous = self._previous.pop(index)
                gradient = self._parameters[index].grad
                if gradient is tensor and index in used:
                    gradient.add_(previous, alpha=self.total / self.unit if self.unit else 0.0)
                elif gradient is tensor:
                    gradient.copy_(previous)

    def _accumulated(self, used: Set[int], but: int | None = None) -> Iterator[Tensor]:
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and index != but and index in used:
                yield parameter.grad

    def _was_zeroed(self, used: Set[int], arrived: int | None) -> bool:
        """Return whether all accumulated gradients were reset, by ``zero_grad()`` of either kind."""
        if self._last_arrival is None:
            return False
        index, version = self._last_arrival
        last = self._parameters[index].grad
        # Comparing the version reads no elements. They are read only if the version has changed.
        if index == arrived or (last is not None and version_of(last) == version):
            return False
        return all_zero(self._accumulated(used, but=arrived))

    def _save_previous(self, arrived: int | None) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        previous = {index: grad for index, grad in enumerate(gradients) if grad is not None and index != arrived}
        if not all_zero(previous.values()):
            self._previous = {index: (gradient, gradient.clone()) for index, gradient in previous.items()}
            for gradient in previous.values():
                gradient.zero_()

    def _stash(self, arrived: int | None) -> None:
        for index, parameter in enumerate(self._parameters):
            self._stashed[index] = None if index == arrived else parameter.grad
            if index != arrived:
                parameter.grad = None
        self._last_arrival = None

    def _unstash(self, indices: Iterable[int]) -> None:
        """Drop the gradients of a micro-batch of weight zero."""
        for index in indices if self._stashed else ():
            if index not in self._stashed:
                continue
            parameter, gradient = self._parameters[index], self._stashed.pop(index)
            if gradient is not None:
                parameter.grad = gradient
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _zero_stashed(self, arrived: int | None) -> None:
        """Apply a ``zero_grad(set_to_none=False)`` to the stashed gradients, which it could not see."""
        assert self._last_arrival is not None, "cleared gradients that never came"
        if self._parameters[self._last_arrival[0]].grad is not None:
            for index, gradient in self._stashed.items():
                if gradient is not None and index != arrived:
                    self._parameters[index].grad = gradient.zero_()


def all_zero(gradients: Iterable[Tensor]) -> bool:
    """Return whether all gradients are zero; stops at the first that is not."""
    return not any(bool((gradient._values() if gradient.is_sparse else gradient).any()) for gradient in gradients)


class Weights:
    """The weight of this rank in each step, and the sum of the weights of all ranks.

    [Note: weight messages]
    A weight message is a few numbers that are summed together with the gradients, at the end of each bucket's tail:

        [weight, 1 if this rank gave one, 1 if it lacks gradients, a number for ranks 0 and 1, one for 2 and 3, ...,
         a difference of digests between ranks 0 and 1, 1 and 2, ..., and the same for the upper bits]

    In the number of two ranks, rank r adds its state times 16**(r mod 2): 1 if it gave no weight for some of its
    micro-batches, plus 6, 4 or 2 if its optimizer stepped more than once, once, or not at all since the last reduction,
    see [Note: updates] in updates.py, plus 8 if it has new parameters, see [Note: unfrozen parameters] in buckets.py.
    Sums below 2**8 are exact in every dtype, including bfloat16, so they identify the ranks. A rank without data (in
    ``join()``) sends zeros: it neither gave a weight nor omitted one, and its step is not known. For the third number
    see [Note: parameters without a gradient] in reducer.py.

    The digest says which global batches a rank has trained on, see shares.py, and in some steps what its replica is,
    see replicas.py; 0 if neither is known. Rank r adds 8 bits of it to the number r, and subtracts them from the number
    r + 1. So each sum is the difference of two neighbours, which is exact in every dtype and for any number of ranks,
    and all are 0 if the ranks have read the same data and hold the same replicas.

    Only one tail is read, that of a bucket in the widest dtype, which is the same bucket on all ranks. float16 and
    bfloat16 show whether there are weights, and which ranks lack one, but cannot hold a weight. So if all buckets are
    sent in these dtypes, the weight follows in a separate collective. So do all messages if only sparse buckets are
    reduced, which have no tail. With a communication hook, messages are sent with the use counts.

    On a device the host does not read the sums in the same step, since it would wait for the device. The factor of the
    gradients is computed where the sums are. The host reads a copy when the next forward is queued, on every rank at
    the same point, so that all ranks raise the same error there and know the same typical weight in the next step. As
    long as no rank gives weights or lacks gradients, it reads the copy `NUM_UNREAD` forwards later: by then the device
    has usually done that step, so the host waits for nothing.

    [Note: typical weight]
    Before the sum, gradients are multiplied by weight / (typical weight * ranks). The typical weight is the mean over
    the ranks in the last step with weights, so it is equal on all ranks. Gradients then have about the same magnitude
    as without weights, which float16 needs. If the sum of the weights has not changed, the result is already the mean.
    Otherwise it is multiplied by typical weight * ranks / sum. Before the buckets of the first step are launched, the
    ranks agree on the typical weight.

    Attributes:
        window: This rank's micro-batches; None until the first weight is given.
        device: A device whose tensors the ranks can exchange.
        refusal: Why weights are not possible; None: they are.
        shares_batch: See `AccumulationWindow`.
        lacks_gradients: Whether parameters had no gradient in the last step of this rank, if it uses a device.
        some_lack: Whether this held on some rank, by the last sums that were read; equal on all ranks.
        num_updates: How many times the optimizer has stepped since the last reduction; None: not known.
        parts: Of the batches that this rank has used since the last reduction.
        digest: Of its replica, see replicas.py; 0 if it is not compared in this step.
        has_new: Whether this rank has new parameters, see [Note: unfrozen parameters].
        refuse_replicas: Raises an error if replicas differ, or returns that they may. Collective: every rank.
        encode: Returns a message of this rank; without arguments that of a rank without data.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.window: AccumulationWindow | None = None
        self.device = device
        self.refusal: str | None = None
        self.shares_batch = False
        self._group, self._world_size = group, group.size()
        self.encode = partial(encode_message, group.rank(), group.size())
        self.num_updates: int | None = None
        self.lacks_gradients = self.some_lack = False
        self._had_weights = False  # whether some rank gave a weight, by the last sums that were read
        self._plain_sums: list[float] = []  # the last that were in order, with nothing to do about them
        self._typical = 1.0
        self.parts: set[BatchPart] = set()
        self.digest = 0
        self.has_new = self._some_have_new = False
        self.refuse_replicas: Callable[[], bool] = lambda: False
        # On a device: the sums of messages, being copied to the host, and the batches of their steps.
        self._unread: deque[tuple[HostCopy, str]] = deque()
        self._num_plain = 0  # the sums that were read since the last with weights or missing gradients; equal on all

    def open_window(self, parameters: Sequence[torch.nn.Parameter], used: Set[int]) -> AccumulationWindow:
        """Return the window, which is made with the first weight; see `AccumulationWindow` for the arguments.

        Raises:
            ConfigurationError: Weights are not possible here.
        """
        if self.refusal is not None:
            raise ConfigurationError(self.refusal)
        if self.window is None:
            local = [parameters[index].grad for index in used]
            has_unweighed = not all_zero(gradient for gradient in local if gradient is not None)
            self.window = AccumulationWindow(parameters, has_unweighed=has_unweighed, shares_batch=self.shares_batch)
        return self.window

    def message(self) -> tuple[float, ...]:
        """Return the message that this rank sends at the end of a step."""
        window, digest = self.window, sum(map(attrgetter("digest"), self.parts)) + self.digest & 0xFFFF
        state: dict[str, Any] = {"lacks_gradients": self.lacks_gradients, "num_updates": self.num_updates}
        state |= {"digest": digest, "has_new": self.has_new}
        if state != _USUAL_STATE and is_capturing(self.device):  # each replay will send the same message
            state = _USUAL_STATE
        if window is None:
            return self.encode(is_missing=True, **state)
        is_missing = window.has_unweighed or not window.is_weighed
        return self.encode(window.total / self._typical, is_weighed=window.is_weighed, is_missing=is_missing, **state)

    def scale(
        self, indices: Sequence[int], used: Set[int], divisor: float | None, message: Sequence[float] | None
    ) -> GradientScale:
        """Prepare the gradients of a bucket for gathering, and return their factors.

        Args:
            indices: The bucket's parameters.
            used: The parameters that received a gradient since the last step.
            divisor: Divides gradients if there are no weights; None: the hook divides them.
            message: The end of the tail; None: the tail of this bucket is not read.
        """
        window = self.window
        if window is None or not window.is_weighed:
            factor = 1.0 if divisor is None else 1.0 / divisor
            return GradientScale(factor, factor, message)
        window.end(indices, used)
        scale = self._typical * (1 if divisor is None else self._world_size)
        return GradientScale(window.unit / scale, window.total / scale, message)

    # --- the sum over the ranks -------------------------------------------------------------------------------------

    def agree_first(self, message: Sequence[float]) -> None:
        """Agree on the typical weight before any bucket is launched. Collective: every rank. Blocks until complete.

        Raises:
            ConfigurationError: On every rank: only some have given weights.
        """
        self._conclude(self._exchange(message))

    @staticmethod
    def carrier(before: Bucket | None, bucket: Bucket) -> Bucket | None:
        """Return the bucket whose tail is read, the same one on all ranks: the first of the widest with a tail.

        Args:
            before: That among the buckets before.
            bucket: The next one.
        """
        if bucket.weight_message is None:
            return before
        if before is None or _WIDTHS.get(bucket.sent_dtype, 0) > _WIDTHS.get(before.sent_dtype, 0):
            return bucket
        return before

    def correction(self, carrier: Bucket | None, messages: Tensor | None, message: Sequence[float]) -> float | Tensor:
        """Return the factor for the reduced buckets; a tensor with one element if the host does not know it.

        Collective if the messages have to be sent separately: every rank. Does not block on a device, except in the
        first step with weights of a model whose tails cannot hold them.

        Args:
            carrier: The bucket whose tail has the sum of the ranks' messages, reduced; None: there is none.
            messages: The sum, valid on the current stream, if it is not in a tail.
            message: What this rank sent.

        Raises:
            ConfigurationError: Only some ranks have given weights. On every rank; on a device by `check_last_step`.
        """
        is_narrow = False
        if messages is None and carrier is not None:
            messages, is_narrow = carrier.weight_message, carrier.sent_dtype not in _WIDTHS
        if messages is not None and not messages.is_cpu and is_capturing(messages.device):
            if message[1]:
                raise ConfigurationError(
                    "A step with weights cannot be captured in a CUDA graph: each replay would use the same weights.\n"
                    "Capture without mean_over(), or train eagerly."
                )
            return 1.0  # assuming that the other ranks give none either
        # Narrow tails only show whether there are weights. All ranks expect them if the last step had some.
        if messages is not None and is_narrow and (messages.is_cpu or not self._had_weights):
            if not messages.is_cpu and not message[1] and any(message):  # if other ranks have weights, they refuse them
                self._unread.append((HostCopy(messages), self._data_name))
                return 1.0
            sums = messages.tolist()
            if not sums[1]:
                return self._conclude(messages)
            refuse_missing(sums)
        if messages is None or is_narrow:
            messages = self._exchange(message)
        if messages.is_cpu:
            return self._conclude(messages)
        self._unread.append((HostCopy(messages), self._data_name))
        if not message[1]:  # without weights, or without gradients
            return 1.0
        # Not zero-dimensional: then a narrow bucket would be multiplied by a factor that is rounded to its dtype.
        weight = messages[:1]
        return torch.where(weight > 0, self._world_size / weight, 1.0)

    def check_last_step(self) -> None:
        """Read the sums of the last step, or of one before, on a device; blocks until the device has done that step.

        Call it when the device has other work: after a forward. Collective in effect: all ranks raise the same error.

        Raises:
            ConfigurationError: Only some ranks gave weights in that step.
        """
        if not self._unread or is_capturing(self.device):  # waiting for an event is not allowed in a capture
            return
        # Which layers are never used shows in the first two steps.
        while len(self._unread) > (NUM_UNREAD if self._num_plain > 2 else 0):
            sums, name = self._unread.popleft()
            self._conclude(sums.value if sums.has_arrived() else sums.read(), name)

    def agree_on_new(self, *, has_data: bool = True) -> bool:
        """Return whether the ranks have new parameters; call it after `correction`. Blocks if this rank has some.

        Raises:
            ConfigurationError: On every rank: only some have. On a device by `check_last_step`.
        """
        if self._unread and (self.has_new or not has_data):
            # Read in this step, unless some rank does not know it: then all read it at the same later forward.
            states = _decode_ranks(self._unread[-1][0].read().tolist())
            while self._unread and any(state & 8 for state in states) and not any(0 < state < 8 for state in states):
                sums, name = self._unread.popleft()
                self._conclude(sums.read(), name)
        found, self._some_have_new = self._some_have_new, False
        return found

    def _exchange(self, message: Sequence[float]) -> Tensor:
        """Return the sum of all messages. Collective: every rank. Blocks until complete; on a device its stream."""
        sums = upload(message, widest_dtype(self.device), self.device)
        all_reduce(sums, group=self._group)
        return sums

    @property
    def _data_name(self) -> str:
        return " and ".join(sorted(part.name for part in self.parts))

    def _conclude(self, messages: Tensor, data_name: str | None = None) -> float:
        """Return the factor that gives the weighted mean, from the sums of all messages. Blocks on a device."""
        sums: list[float] = messages.tolist()
        if sums == self._plain_sums:  # the usual case: the same as in the step before
            self._num_plain += 1
            return 1.0
        weight, num_weighed, num_lacking = sums[:3]
        if num_weighed:
            refuse_missing(sums)
        refuse_apart(sums)
        self._some_have_new = some_have_new(sums)
        differ = any(sums[-2 * self._world_size :])
        if differ:
            is_explained = self.refuse_replicas()  # all ranks come here, as all have the same sums
            data_name = self._data_name if data_name is None else data_name
            if data_name and not is_explained:
                refuse_other_data(sums, data_name)
        self._had_weights, self.some_lack = bool(num_weighed), bool(num_lacking)
        self._num_plain = 0 if num_weighed or num_lacking else self._num_plain + 1
        self._plain_sums = [] if num_weighed or num_lacking or self._some_have_new or differ else sums
        if not num_weighed or not weight:  # no weights; or all are zero, and so are all gradients
            return 1.0
        self._typical *= weight / self._world_size
        factor = self._world_size / weight
        # If the factor differs from 1 only by rounding, do not multiply all gradients by it.
        return 1.0 if abs(factor - 1) <= 4 * torch.finfo(messages.dtype).eps else factor
