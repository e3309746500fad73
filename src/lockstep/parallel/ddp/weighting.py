"""Weighted means: what each micro-batch counts, the weight message of a rank, and the sum over the ranks."""

import math
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from lockstep.accelerator import HostCopy, is_capturing, widest_dtype
from lockstep.comm.collectives import Group, all_reduce
from lockstep.errors import CollectiveError, ConfigurationError
from lockstep.parallel.ddp.buckets import Bucket, GradientScale

_RANKS_PER_NUMBER = 8
# The dtypes that can hold a sum of weights, as exact as the gradients that travel with it.
_WIDTHS = {torch.float32: 1, torch.complex64: 1, torch.float64: 2, torch.complex128: 2}


def check_weight(weight: Any) -> float:
    """Return the weight of a micro-batch as a number; blocks on a tensor that is still being computed.

    Raises:
        ConfigurationError: It is no number, negative, infinite or NaN.
    """
    is_scalar = isinstance(weight, Tensor) and weight.dim() == 0 and not weight.is_complex()
    number = float(weight) if is_scalar or isinstance(weight, Real) else math.nan
    if not 0 <= number < math.inf:
        is_one = is_scalar or not isinstance(weight, Tensor)
        what = repr(weight) if is_one else f"a tensor of shape {list(weight.shape)}"
        raise ConfigurationError(
            f"The weight of a batch must be a finite number, 0 or more, or a tensor with one such number, not {what}.\n"
            "Give how many samples or tokens the loss is the mean of."
        )
    return number


def encode_message(
    rank: int, world_size: int, weight: float = 0.0, *, is_weighed: bool = False, is_missing: bool = False
) -> list[float]:
    """Return what a rank sends at the end of a step; see [Note: weight messages].

    Args:
        rank: Of the sender.
        world_size: The number of ranks.
        weight: What its micro-batches count.
        is_weighed: Whether it gave a weight.
        is_missing: Whether it gave none for some of them.
    """
    missing = [0.0] * -(-world_size // _RANKS_PER_NUMBER)
    if is_missing:
        missing[rank // _RANKS_PER_NUMBER] = float(2 ** (rank % _RANKS_PER_NUMBER))
    return [weight, float(is_weighed), *missing]


def refuse_missing(sums: Sequence[float]) -> None:
    """Refuse weights that came with some backwards only.

    Args:
        sums: Of all ranks' messages.

    Raises:
        ConfigurationError: Some ranks gave weights, and some left one out; names the latter.
    """
    _, num_weighed, *masks = sums
    missing = [
        str(_RANKS_PER_NUMBER * place + bit)
        for place, mask in enumerate(masks)
        for bit in range(_RANKS_PER_NUMBER)
        if int(mask) >> bit & 1
    ]
    if num_weighed and missing:
        raise ConfigurationError(
            f"A weight is missing in this step: rank{'s' * (len(missing) > 1)} {', '.join(missing)} ran a backward "
            "without one, but other backwards of the step had theirs.\n"
            "Call model.weight(n) before each backward, or lockstep.backward(loss, mean_over=n), on all ranks or on "
            "none; n is 0 where a batch holds nothing that counts."
        )


class _Given(Enum):
    NOTHING = "nothing"  # for the coming backward
    FRESH = "fresh"  # a weight that has not counted yet
    COUNTED = "counted"  # one that has, and no forward came since


class AccumulationWindow:
    """The weights of one rank's micro-batches since the last synchronised step, and what they make of the gradients.

    [Note: weights]
    A step's gradient is to be the sum of n * g over micro-batches and ranks, divided by the sum of n, where g is the
    gradient of a micro-batch's mean loss and n its weight. Losses are not scaled. ``param.grad`` is kept in units of
    the latest weight: it holds the sum so far divided by that weight, so that autograd can add the next g as it is.
    Where weights differ, what is there is multiplied by old / new before the backward adds to it; the bucket multiplies
    by the latest weight when it is gathered, which costs nothing, since it divides anyway.

    `set_weight` only takes note. The weight counts when a backward enters the model: the first hooked output that
    autograd runs comes before all gradients of the model. Only then is it known what ``param.grad`` holds, since
    ``zero_grad()`` may come before or after ``weight()`` and ``forward``. Several backwards of one micro-batch count
    once, unless the step was closed in between. A forward makes a weight that has counted invalid.

    Args:
        parameters: All parameters of the model.
        has_unweighed: Whether gradients of micro-batches without a weight have been accumulated.
        shares_batch: Whether layers of the model exchange gradients with other ranks within backward.

    Attributes:
        is_weighed, has_unweighed: Whether the window holds micro-batches with and without a weight.
        total: The sum of the weights.
        unit: The weight in units of which gradients are; 0 if there are none.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, has_unweighed: bool, shares_batch: bool = False
    ) -> None:
        self._parameters = parameters
        self._shares_batch = shares_batch
        self._given = _Given.NOTHING
        self._weight = 0.0
        self.close()
        self.has_unweighed = has_unweighed

    def close(self) -> None:
        """Begin a new window: the gradients have been reduced, or are worthless."""
        self.is_weighed = self.has_unweighed = False
        self.total = self.unit = 0.0
        # By parameter. Gradients accumulated before a micro-batch of weight zero, whose own must not be added to them:
        # 0 * NaN is NaN. They are put back when the next micro-batch enters, or the bucket is gathered.
        self._stashed: dict[int, Tensor | None] = {}
        # By parameter: the gradient's tensor, and a copy of what it held when the window began. Gradients that were
        # neither reduced nor zeroed since the last step are part of what the next one yields: reduced gradient + mean
        # of the window. Ranks may have different numbers of micro-batches, so each rank sends them with its total
        # weight. That is not the latest weight if the window holds several, so accumulation starts from zero and `end`
        # adds them.
        self._previous: dict[int, tuple[Tensor, Tensor]] = {}
        self._last_arrival: tuple[int, int] | None = None  # the index, and the version of its gradient

    def set_weight(self, weight: float) -> None:
        """Take note of the weight of the micro-batch whose backward comes next."""
        self._weight, self._given = weight, _Given.FRESH

    def discard_weight(self) -> bool:
        """Forget a weight that did not count; return whether there was one."""
        if self._given is not _Given.FRESH:
            return False
        self._given = _Given.NOTHING
        return True

    def on_forward(self) -> None:
        """Take note of another micro-batch: the weight of the one before does not count for it."""
        if self._given is _Given.COUNTED:
            self._given = _Given.NOTHING

    @property
    def unit_of_backward(self) -> float:
        """What the gradients of the backward that runs will be multiplied by; 1 if it has no weight."""
        return 1.0 if self._given is _Given.NOTHING else self._weight or self.unit

    def masked(self, gradient: Tensor) -> Tensor | None:
        """Return what is to enter the model instead of the gradient of an output; None: the gradient itself.

        Where layers share the batch between the ranks (SyncBatchNorm), the samples of a micro-batch of weight zero are
        a part of the other ranks' losses all the same. So its gradients are not dropped, but the gradient of its own
        loss is, where it enters the model.
        """
        is_masked = self._shares_batch and self._given is _Given.COUNTED and self._weight == 0
        return torch.zeros_like(gradient) if is_masked else None

    def holds_gradients(self, used: Sequence[int]) -> bool:
        """Return whether weighed gradients are waiting for a synchronised backward."""
        return self.is_weighed and not self._was_zeroed(used, arrived=None)

    @torch.no_grad()
    def begin_backward(self, used: bytearray, *, accumulates: bool, arrived: int | None = None) -> None:
        """Take note that a backward enters the model, and make the gradients ready for what it adds.

        Args:
            used: By index, whether a gradient arrived since the last synchronised step; cleared if they were zeroed.
            accumulates: Whether the gradients stay on this rank for now.
            arrived: The parameter whose gradient has arrived already, if it was not an output that was noticed.

        Raises:
            ConfigurationError: A gradient came before the output, too early to be weighed.
        """
        if (self.is_weighed or self.has_unweighed) and self._was_zeroed(used, arrived):
            self._zero_stashed(arrived)
            self.close()
            used[:] = bytes(index == arrived for index in range(len(used)))
        if self._given is _Given.NOTHING:
            self.has_unweighed = True
        if self._given is _Given.NOTHING or (self._given is _Given.COUNTED and self.is_weighed):
            return
        weight = self._weight
        # Masked gradients are zeros, so they may be added to what is there. Others of weight zero may be NaN.
        is_masked = weight == 0 and self._shares_batch
        if arrived is not None and (is_masked or (self.is_weighed and (self._stashed or weight != self.unit))):
            raise ConfigurationError(
                "A gradient arrived before any output of the model was reached, too late for its weight to count.\n"
                "Return all outputs as tensors, or in lists, dicts or dataclasses, and give weight() before backward."
            )
        self._unstash(range(len(self._parameters)))
        if accumulates and not self.is_weighed and not self.has_unweighed:
            self._save_previous(arrived)
        if weight == 0 and not is_masked:
            self._stash(arrived)
        else:
            # What is there is brought to the new unit, so that autograd can add to it.
            unit = weight or self.unit or 1.0
            if self.unit not in (0.0, unit):
                for gradient in self._accumulated(used):
                    gradient.mul_(self.unit / unit)
            self.unit = unit
        self.total += weight
        self.is_weighed, self._given = True, _Given.COUNTED

    def on_local_gradient(self, index: int, used: bytearray) -> None:
        """Take note of a gradient that stays on this rank for now."""
        counts = self.is_weighed if self._given is _Given.COUNTED else self.has_unweighed
        if self._given is _Given.FRESH or not counts:
            self.begin_backward(used, accumulates=True, arrived=index)
        gradient = self._parameters[index].grad
        self._last_arrival = None if gradient is None else (index, gradient._version)

    @torch.no_grad()
    def end(self, indices: Sequence[int], used: Sequence[int]) -> None:
        """Make the gradients of the parameters ``indices`` ready to be multiplied by `unit` and sent.

        Args:
            indices: Of parameters whose gradients this backward will not add to any more.
            used: By index, whether a gradient arrived since the last synchronised step.
        """
        self._unstash(indices)
        for index in indices:
            if index in self._previous:
                tensor, held = self._previous.pop(index)
                gradient = self._parameters[index].grad
                if gradient is tensor and used[index]:
                    gradient.add_(held, alpha=self.total / self.unit if self.unit else 0.0)
                elif gradient is tensor:
                    gradient.copy_(held)

    def _accumulated(self, used: Sequence[int], but: int | None = None) -> Iterator[Tensor]:
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and index != but and used[index]:
                yield parameter.grad

    def _was_zeroed(self, used: Sequence[int], arrived: int | None) -> bool:
        """Return whether all that was accumulated is gone, by ``zero_grad()`` of either kind."""
        if self._last_arrival is None:
            return False
        index, version = self._last_arrival
        last = self._parameters[index].grad
        # The version is known without reading elements, which are read only where something has changed it.
        if index == arrived or (last is not None and last._version == version):
            return False
        return all_zero(self._accumulated(used, but=arrived))

    def _save_previous(self, arrived: int | None) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        held = {index: grad for index, grad in enumerate(gradients) if grad is not None and index != arrived}
        if not all_zero(held.values()):
            self._previous = {index: (gradient, gradient.clone()) for index, gradient in held.items()}
            for gradient in held.values():
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
        """Finish a ``zero_grad()`` that could not see all gradients: with ``set_to_none=False`` they stay, as zeros."""
        assert self._last_arrival is not None, "cleared gradients that never came"
        if self._parameters[self._last_arrival[0]].grad is not None:
            for index, gradient in self._stashed.items():
                if gradient is not None and index != arrived:
                    self._parameters[index].grad = gradient.zero_()


def all_zero(gradients: Iterable[Tensor]) -> bool:
    """Return whether no gradient has an element other than zero; reads no further than the first that has one."""
    return not any(bool((each._values() if each.is_sparse else each).any()) for each in gradients)


class Weights:
    """What a rank weighs in each step, and what all ranks weigh together.

    [Note: weight messages]
    A few numbers that are summed together with the gradients, as the end of each bucket's tail:

        [weight, 1 if this rank gave one, missing ranks 0-7, missing ranks 8-15, ...]

    Where rank r gave no weight for some of its micro-batches, 2**(r mod 8) is added to the number of its eight ranks.
    Sums of different powers below 2**8 are exact in every dtype, bfloat16 included, so the sum names the ranks. A rank
    without data (in ``join()``) sends zeros: it neither gave a weight nor left one out.

    Only one tail is read, of a bucket in the widest dtype: all ranks see alike which that is. float16 and bfloat16 show
    whether there are weights, and which ranks lack one, but cannot hold a weight, so if all buckets travel in these,
    one number follows them in a collective of its own. So do all messages where only sparse buckets are reduced, which
    have no tail. With a communication hook they travel with the use counts.

    [Note: typical weight]
    Before the sum, gradients are multiplied by weight / (typical weight * ranks), where the typical weight is the mean
    over the ranks in the last step with weights: the same number everywhere. So they keep the size that they have
    without weights, which float16 needs, and if the sum of the weights has not changed, what arrives is the mean
    already. Otherwise it is multiplied by typical weight * ranks / sum. Before the first step's buckets are launched,
    the ranks agree on it.

    Attributes:
        window: This rank's micro-batches; None as long as no weight was ever given.
        device: Where tensors lie that the ranks can exchange.
        refusal: Why there can be no weights; None: there can.
        shares_batch: See `AccumulationWindow`.
        encode: Returns a message of this rank; without arguments that of a rank without data.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.window: AccumulationWindow | None = None
        self.device = device
        self.refusal: str | None = None
        self.shares_batch = False
        self._group, self._world_size = group, group.size()
        self.encode = partial(encode_message, group.rank(), group.size())
        self._no_weights = self.encode(is_missing=True)
        self._typical = 1.0
        # Of a device: the sum of the messages on its way to the host. Reading it would make the host wait, so a rank
        # without weights reads it when the next backward begins: then it is less than a step ahead of the device. To
        # read it later would be to wait for ranks that have failed already.
        self._unread: HostCopy | None = None

    def set_weight(self, weight: float, parameters: Sequence[torch.nn.Parameter], used: Sequence[int]) -> None:
        """Take note of the weight of the coming backward; see `AccumulationWindow` for the other arguments.

        Raises:
            ConfigurationError: There can be no weights.
        """
        if self.refusal is not None:
            raise ConfigurationError(self.refusal)
        if self.window is None:
            local = [parameter.grad for parameter, is_used in zip(parameters, used, strict=True) if is_used]
            has_unweighed = not all_zero(gradient for gradient in local if gradient is not None)
            self.window = AccumulationWindow(parameters, has_unweighed=has_unweighed, shares_batch=self.shares_batch)
        self.window.set_weight(weight)

    def message(self) -> list[float]:
        """Return what this rank sends at the end of a step."""
        window = self.window
        if window is None:
            return self._no_weights
        is_missing = window.has_unweighed or not window.is_weighed
        return self.encode(window.total / self._typical, is_weighed=window.is_weighed, is_missing=is_missing)

    def scale(self, indices: Sequence[int], used: Sequence[int], divisor: float | None) -> GradientScale:
        """Make the gradients of a bucket ready to be gathered, and return what they count.

        Args:
            indices: The bucket's parameters.
            used: By parameter, whether it received a gradient since the last step.
            divisor: What gradients are divided by where there are no weights; None: by nothing, the hook divides.
        """
        window = self.window
        if window is None or not window.is_weighed:
            factor = 1.0 if divisor is None else 1.0 / divisor
            return GradientScale(factor, factor)
        window.end(indices, used)
        scale = self._typical * (1 if divisor is None else self._world_size)
        return GradientScale(window.unit / scale, window.total / scale, self.message())

    # --- the sum over the ranks -------------------------------------------------------------------------------------

    def agree_first(self, message: Sequence[float]) -> None:
        """Agree on the typical weight before any bucket is launched. Collective: every rank. Blocks until complete.

        Raises:
            ConfigurationError: On every rank: only some have given weights.
        """
        self._conclude(self._exchange(message))

    def correction(self, buckets: Sequence[Bucket], messages: Tensor | None, message: Sequence[float]) -> float:
        """Return what the reduced ``buckets`` are to be multiplied by.

        Collective where no bucket can carry the messages: every rank. Blocks until complete, but with a device
        on a rank without weights.

        Args:
            buckets: Those of the step.
            messages: The sum of the ranks' messages, valid on the current stream; None: the buckets' tails hold it.
            message: What this rank sent.

        Raises:
            ConfigurationError: On every rank: only some have given weights.
        """
        carrier: Bucket | None = None  # whose tail is read: the widest, which all ranks see alike
        if messages is None:
            with_tail = [bucket for bucket in buckets if bucket.weight_message is not None]
            carrier = max(with_tail, key=lambda bucket: _WIDTHS.get(bucket.sent_dtype, 0), default=None)
            messages = None if carrier is None else carrier.weight_message
        if messages is None:  # sparse buckets have no tail
            return self._conclude(self._exchange(message)) if buckets else 1.0
        device = messages.device
        if device.type != "cpu":
            if is_capturing(device):
                if message != self._no_weights:
                    raise ConfigurationError(
                        "A step with weights cannot be captured in a CUDA graph: the host has to read their sum.\n"
                        "Capture without weight(), or train eagerly."
                    )
                return 1.0  # believing that the other ranks give none either
            if message == self._no_weights:
                self._unread = HostCopy(messages)
                return 1.0
        if device.type != "cpu" and carrier is not None and carrier.sent_dtype == carrier.spec.dtype:
            # Beside the current stream, which has to wait for all buckets, and this number for one of them only.
            with torch.Stream(device):
                assert carrier.future is not None
                carrier.future.wait()
                sums = messages.tolist()
        else:
            sums = messages.tolist()
        if not sums[1]:
            return 1.0
        sent_dtype = messages.dtype if carrier is None else carrier.sent_dtype
        if sent_dtype in _WIDTHS:
            return self._conclude(sums, messages.dtype)
        refuse_missing(sums)  # too narrow to hold the sum
        return self._conclude(self._exchange(message))

    def check_last_step(self) -> None:
        """Raise ConfigurationError if other ranks gave weights in the last step, and this one did not read it then."""
        if self._unread is None or is_capturing(self.device):  # no event may be waited for in a capture
            return
        unread, self._unread = self._unread, None
        self._conclude(unread.read().tolist())

    def _exchange(self, message: Sequence[float]) -> list[float]:
        """Return the sum of all messages. Collective: every rank. Blocks until complete."""
        sums = torch.tensor(message, dtype=widest_dtype(self.device), device=self.device)
        try:
            all_reduce(sums, group=self._group)
        except RuntimeError as error:
            raise CollectiveError(
                f"Rank {self._group.rank()}: the exchange of the ranks' weights failed: {error}\n"
                "Another rank probably ended or ran no backward; look at the first error of the job."
            ) from error
        return cast("list[float]", sums.tolist())

    def _conclude(self, sums: Sequence[float], dtype: torch.dtype = torch.float64) -> float:
        """Return what makes the weighted mean of reduced gradients, given the sums of all messages in ``dtype``."""
        refuse_missing(sums)
        weight, num_weighed = sums[:2]
        if not num_weighed or not weight:  # no weights; or all are zero, and so are all gradients
            return 1.0
        self._typical *= weight / self._world_size
        factor = self._world_size / weight
        # What rounding alone makes of 1 is not worth a multiplication of all gradients.
        return 1.0 if abs(factor - 1) <= 4 * torch.finfo(dtype).eps else factor
