"""Weighted means: what each micro-batch counts, the weight message of a rank, and the sum over the ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lockstep.comm.collectives import Group, all_reduce
from lockstep.errors import CollectiveError, ConfigurationError
from lockstep.parallel.compile import is_capturing
from lockstep.parallel.ddp.buckets import Bucket, GradientScale

# What each rank says of its weight in a step, and what the sum over the ranks tells; pure functions.
#
# [Note: ballots]
# A few numbers that are summed together with the gradients, as the end of each bucket's tail:
#
#     [weight, 1 if this rank gave one, missing ranks 0-7, missing ranks 8-15, ...]
#
# Where rank r gave no weight for some of its micro-batches, 2**(r mod 8) is added to the number of its eight ranks.
# Sums of different powers below 2**8 are exact in every dtype, bfloat16 included, so the sum names the ranks. A rank
# without data (in ``join()``) sends zeros: it neither gave a weight nor left one out. Weights are divided by the
# typical weight of earlier steps, see [Note: typical weight] in weights.py.

_RANKS_PER_NUMBER = 8
_ADVICE = (
    "Call model.weight(n) before each backward, or lockstep.backward(loss, count=n), on all ranks or on none; "
    "n is 0 where a batch holds nothing that counts."
)


@dataclass(frozen=True)
class WeightMessage:
    """What one rank says: its weight, whether it gave one, and whether one was missing."""

    weight: float = 0.0
    is_weighed: bool = False
    is_missing: bool = False

    def encode(self, rank: int, world_size: int) -> list[float]:
        """Return the numbers to be summed."""
        missing = [0.0] * -(-world_size // _RANKS_PER_NUMBER)
        if self.is_missing:
            missing[rank // _RANKS_PER_NUMBER] = float(2 ** (rank % _RANKS_PER_NUMBER))
        return [self.weight, float(self.is_weighed), *missing]


@dataclass(frozen=True)
class WeightSum:
    """What all ranks said: the sum of the weights, whether any rank gave one, and which ranks left one out."""

    weight: float
    is_weighed: bool
    missing: tuple[int, ...]

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> WeightSum:
        """Read the sum of all ranks' ballots."""
        weight, num_weighed, *masks = numbers
        missing = [
            _RANKS_PER_NUMBER * place + bit
            for place, mask in enumerate(masks)
            for bit in range(_RANKS_PER_NUMBER)
            if int(mask) >> bit & 1
        ]
        return cls(weight, num_weighed > 0, tuple(missing))

    def check(self) -> None:
        """Refuse weights that came with some backwards only.

        Raises:
            ConfigurationError: Some ranks gave weights, and some left one out; names the latter.
        """
        if self.is_weighed and self.missing:
            who = "rank " if len(self.missing) == 1 else "ranks "
            raise ConfigurationError(
                f"A weight is missing in this step: {who}{', '.join(map(str, self.missing))} ran a backward without "
                f"one, but other backwards of the step had theirs.\n{_ADVICE}"
            )

    def correction(self, world_size: int, *, tolerance: float) -> float:
        """Return what makes of the sum over the ranks, divided by their number, the weighted mean.

        Args:
            world_size: The number of ranks.
            tolerance: How far from 1 the result may be to be taken as 1, which saves a multiplication.
        """
        if self.weight == 0:
            return 1.0  # all gradients are zero
        factor = world_size / self.weight
        return 1.0 if abs(factor - 1) <= tolerance else factor


def check_weight(weight: Any) -> float:
    """Return the weight of a micro-batch as a number; blocks on a tensor that is still being computed.

    Raises:
        ConfigurationError: It is no number, negative, infinite or NaN.
    """
    is_number = isinstance(weight, Real) or (
        isinstance(weight, Tensor) and weight.dim() == 0 and not weight.is_complex()
    )
    if not is_number:
        what = f"a tensor of shape {list(weight.shape)}" if isinstance(weight, Tensor) else f"{weight!r}"
        raise ConfigurationError(
            f"The weight of a batch must be a number or a tensor with no dimensions, not {what}.\n"
            "Give how many samples or tokens the loss is the mean of."
        )
    number = float(weight)
    if not 0 <= number < math.inf:
        raise ConfigurationError(
            f"The weight of a batch must be zero or more and finite, not {number:g}.\n"
            "Give how many samples or tokens the loss is the mean of."
        )
    return number


# The micro-batches that one synchronised step is made of, each with its weight.
#
# [Note: weights]
# A step's gradient is to be the sum of n * g over micro-batches and ranks, divided by the sum of n, where g is the
# gradient of a micro-batch's mean loss and n its weight. Losses are not scaled. ``param.grad`` is kept in units of the
# latest weight: it holds the sum so far divided by that weight, so that autograd can add the next g as it is. Where
# weights differ, what is there is multiplied by old / new before the backward adds to it; the bucket multiplies by the
# latest weight when it leaves, which costs nothing, since it divides anyway.
#
# [Note: when a weight counts]
# ``weight(n)`` only takes note. The weight counts when a backward enters the model: the first hooked output that
# autograd runs comes before all gradients of the model. Only then is it known what ``param.grad`` holds, since
# ``zero_grad()`` may come before or after ``weight()`` and ``forward``. Several backwards of one micro-batch count
# once, unless the step was closed in between. A forward makes a weight that has counted invalid.
#
# [Note: weight zero]
# 0 * NaN is NaN, so gradients of a micro-batch of weight zero must not be added to others. What has been accumulated is
# put aside, and put back when the next micro-batch enters or the bucket leaves.
#
# Where layers share the batch between the ranks (SyncBatchNorm), the samples of such a micro-batch are a part of the
# other ranks' losses all the same. Then not its gradients are dropped, but the gradient of its own loss, where it
# enters the model.
#
# [Note: gradients from before the window]
# Gradients that were neither reduced nor zeroed away since the last step are part of what the next one yields:
# reduced gradient + mean of the window, as without weights. Ranks may have different numbers of micro-batches, so
# each rank sends them with its total weight. That is not the latest weight if the window holds several, and so
# accumulation starts from zero and the bucket adds them.


class _Given(Enum):
    NOTHING = "nothing"  # for the coming backward
    FRESH = "fresh"  # a weight that has not counted yet
    COUNTED = "counted"  # one that has, and no forward came since


class AccumulationWindow:
    """The weights of one rank's micro-batches since the last synchronised step, and what they make of the gradients.

    Args:
        parameters: All parameters of the model; those behind the end of ``used`` count as used.
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
        self._aside: dict[int, Tensor | None] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by index: the gradient's tensor, and what it held
        self._last_arrival: tuple[int, int] | None = None  # index, version of its gradient

    def give(self, weight: float) -> None:
        """Take note of the weight of the micro-batch whose backward comes next."""
        self._weight, self._given = weight, _Given.FRESH

    @property
    def unit_of_backward(self) -> float:
        """What the gradients of the backward that runs will be multiplied by; 1 if it has no weight."""
        return 1.0 if self._given is _Given.NOTHING else self._weight or self.unit

    @property
    def is_silent(self) -> bool:
        """Whether the loss of the backward that runs counts for nothing, but its samples do in other ranks' losses."""
        return self._shares_batch and self._given is _Given.COUNTED and self._weight == 0

    def withdraw(self) -> bool:
        """Forget a weight that did not count; return whether there was one."""
        if self._given is not _Given.FRESH:
            return False
        self._given = _Given.NOTHING
        return True

    def holds_gradients(self, used: Sequence[int]) -> bool:
        """Tell whether weighed gradients are waiting for a synchronised backward."""
        return self.is_weighed and not self._was_zeroed(used, arrived=None)

    def on_forward(self) -> None:
        """Take notice of another micro-batch: the weight of the one before does not count for it."""
        if self._given is _Given.COUNTED:
            self._given = _Given.NOTHING

    def ballot(self, typical_weight: float) -> WeightMessage:
        """Return what this rank has to say when the step closes."""
        return WeightMessage(self.total / typical_weight, self.is_weighed, self.has_unweighed or not self.is_weighed)

    @torch.no_grad()
    def enter(self, used: bytearray, *, accumulates: bool, arrived: int | None = None) -> None:
        """Take notice that a backward enters the model, and make the gradients ready for what it adds.

        Args:
            used: By index, whether a gradient arrived since the last synchronised step; cleared if they were zeroed.
            accumulates: Whether the gradients stay on this rank for now.
            arrived: The parameter whose gradient has arrived already, if it was not an output that was noticed.

        Raises:
            ConfigurationError: A gradient came before the output, too early to be weighed.
        """
        if (self.is_weighed or self.has_unweighed) and self._was_zeroed(used, arrived):
            self._clear_what_is_aside(arrived)
            self.close()
            used[:] = bytes(index == arrived for index in range(len(used)))
        if self._given is _Given.NOTHING:
            self.has_unweighed = True
        if self._given is _Given.NOTHING or (self._given is _Given.COUNTED and self.is_weighed):
            return
        weight = self._weight
        is_silent = weight == 0 and self._shares_batch
        if arrived is not None and (is_silent or (self.is_weighed and (self._aside or weight != self.unit))):
            raise ConfigurationError(
                "A gradient arrived before any output of the model was reached, too late for its weight to count.\n"
                "Return all outputs as tensors, or in lists, dicts or dataclasses, and give weight() before backward."
            )
        self._put_back(range(len(self._parameters)))
        if accumulates and not self.is_weighed and not self.has_unweighed:
            self._save_what_was_before(arrived)
        if weight == 0 and not is_silent:
            self._put_aside(arrived)
        else:
            unit = weight or self.unit or 1.0
            if self.unit not in (0.0, unit):
                for _, gradient in self._accumulated(used):
                    gradient.mul_(self.unit / unit)
            self.unit = unit
        self.total += weight
        self.is_weighed, self._given = True, _Given.COUNTED

    def on_arrival(self, index: int, used: bytearray) -> None:
        """Take notice of a gradient that stays on this rank for now."""
        counts = self.is_weighed if self._given is _Given.COUNTED else self.has_unweighed
        if self._given is _Given.FRESH or not counts:
            self.enter(used, accumulates=True, arrived=index)
        gradient = self._parameters[index].grad
        self._last_arrival = None if gradient is None else (index, gradient._version)

    @torch.no_grad()
    def leave(self, indices: Sequence[int], used: Sequence[int]) -> None:
        """Make the gradients of the parameters ``indices`` ready to be multiplied by `unit` and sent.

        Args:
            indices: Of parameters whose gradients this backward will not add to any more.
            used: By index, whether a gradient arrived since the last synchronised step.
        """
        self._put_back(indices)
        for index in indices:
            if index in self._before:
                tensor, held = self._before.pop(index)
                gradient = self._parameters[index].grad
                if gradient is tensor and (index >= len(used) or used[index]):
                    gradient.add_(held, alpha=self.total / self.unit if self.unit else 0.0)
                elif gradient is tensor:
                    gradient.copy_(held)

    def _accumulated(self, used: Sequence[int], but: int | None = None) -> Iterator[tuple[int, Tensor]]:
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and index != but and (index >= len(used) or used[index]):
                yield index, parameter.grad

    def _was_zeroed(self, used: Sequence[int], arrived: int | None) -> bool:
        """Tell whether all that was accumulated is gone, by ``zero_grad()`` of either kind."""
        if self._last_arrival is None:
            return False
        index, version = self._last_arrival
        last = self._parameters[index].grad
        if index == arrived or (last is not None and last._version == version):
            return False
        return all_zero(gradient for _, gradient in self._accumulated(used, but=arrived))

    def _save_what_was_before(self, arrived: int | None) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        held = {index: grad for index, grad in enumerate(gradients) if grad is not None and index != arrived}
        if not all_zero(held.values()):
            self._before = {index: (gradient, gradient.clone()) for index, gradient in held.items()}
            for gradient in held.values():
                gradient.zero_()

    def _put_aside(self, arrived: int | None) -> None:
        for index, parameter in enumerate(self._parameters):
            self._aside[index] = None if index == arrived else parameter.grad
            if index != arrived:
                parameter.grad = None
        self._last_arrival = None

    def _clear_what_is_aside(self, arrived: int | None) -> None:
        """Finish a ``zero_grad()`` that could not see all gradients: with ``set_to_none=False`` they stay, as zeros."""
        assert self._last_arrival is not None, "cleared gradients that never came"
        if self._parameters[self._last_arrival[0]].grad is not None:
            for index, gradient in self._aside.items():
                if gradient is not None and index != arrived:
                    self._parameters[index].grad = gradient.zero_()

    def _put_back(self, indices: Iterable[int]) -> None:
        """Drop the gradients of a micro-batch of weight zero."""
        for index in indices if self._aside else ():
            if index not in self._aside:
                continue
            parameter, gradient = self._parameters[index], self._aside.pop(index)
            if gradient is not None:
                parameter.grad = gradient
            elif parameter.grad is not None:
                parameter.grad.zero_()


def all_zero(gradients: Iterable[Tensor]) -> bool:
    """Tell whether no gradient has an element other than zero; looks no further than the first that has one."""
    return not any(bool((each._values() if each.is_sparse else each).any()) for each in gradients)


# How the ranks agree on the sum of their weights, and what gradients are multiplied by. See window.py, ballot.py.
#
# [Note: where the weights travel]
# In the tail of the buckets, in the same collective as the gradients. The tail of the widest bucket is read; which
# one that is, all ranks see alike. float16 and bfloat16 can tell that there are weights, and which ranks lack one,
# but cannot hold a weight, so if all buckets are so narrow, one number follows them in a collective of its own. So do
# all ballots where only sparse buckets leave, which have no tail. With a communication hook they travel with the use
# counts.
#
# [Note: typical weight]
# Before the sum, gradients are multiplied by weight / (typical weight * ranks), where the typical weight is the mean
# over the ranks in the last step with weights: the same number everywhere. So they keep the size that they have
# without weights, which float16 needs, and if the sum of the weights has not changed, what arrives is the mean
# already. Otherwise it is multiplied by typical weight * ranks / sum. Before the first step's buckets leave, the
# ranks say what they weigh.
#
# [Note: accelerators]
# Reading a tail blocks the host. With weights, it waits on a stream of its own for one bucket only, and the device goes
# on with the rest of backward meanwhile. Without weights it does not wait at all: that other ranks gave weights is
# noticed when the next backward begins. So the host is less than a step ahead of the device, which has the next forward
# to do when the host looks; to look later would be to wait for ranks that have failed already. A step that is captured
# in a CUDA graph cannot look: with weights it is refused, without it is believed that the others give none either.

_WIDTHS = {torch.float32: 1, torch.complex64: 1, torch.float64: 2, torch.complex128: 2}
"""The dtypes that can hold a sum of weights, as exact as the gradients that travel with it."""


def find_carrier(
    left: Iterable[tuple[Bucket, Future[Any]]],
    ballot_of: Callable[[Bucket], Tensor | None] = operator.attrgetter("ballot"),
) -> tuple[Tensor, Future[Any]] | None:
    """Return the ballots that are to be read, and their bucket's reduction; None if no bucket has a tail.

    Args:
        left: The buckets of a step.
        ballot_of: Returns the ballots of a bucket in the dtype in which they travelled.
    """
    found = [(ballot_of(bucket), future) for bucket, future in left]
    ballots = [(ballot, future) for ballot, future in found if ballot is not None]
    return max(ballots, key=lambda item: _WIDTHS.get(item[0].dtype, 0), default=None)


class Weights:
    """What a rank weighs in each step, and what all ranks weigh together.

    Attributes:
        window: This rank's micro-batches; None as long as no weight was ever given.
        sum: Of all weights in the last step that had some.
        device: Where tensors lie that the ranks can exchange.
        rank: This one.
        refusal: Why there can be no weights; None: there can.
        shares_batch: See `AccumulationWindow`.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.window: AccumulationWindow | None = None
        self.sum = 0.0
        self.device, self.rank = device, group.rank()
        self._group, self._world_size = group, group.size()
        self._typical = 1.0
        # Ballots on their way to the host, and the event of their arrival.
        self._doubt: tuple[Tensor, Any] | None = None
        self.refusal: str | None = None
        self.shares_batch = False

    def give(self, weight: float, parameters: Sequence[torch.nn.Parameter], used: Sequence[int]) -> None:
        """Take note of the weight of the coming backward; see `AccumulationWindow` for the other arguments.

        Raises:
            ConfigurationError: There can be no weights.
        """
        if self.refusal is not None:
            raise ConfigurationError(self.refusal)
        if self.window is None:
            local = [parameter.grad for parameter, is_used in zip(parameters, used, strict=False) if is_used]
            has_unweighed = not all_zero(gradient for gradient in local if gradient is not None)
            self.window = AccumulationWindow(parameters, has_unweighed=has_unweighed, shares_batch=self.shares_batch)
        self.window.give(weight)

    def silenced(self, gradient: Tensor) -> Tensor | None:
        """Return what is to enter the model instead of the gradient of an output; None: the gradient itself."""
        return torch.zeros_like(gradient) if self.window is not None and self.window.is_silent else None

    def encode(self, ballot: WeightMessage) -> list[float]:
        """Return the numbers that ``ballot`` is on this rank."""
        return ballot.encode(self.rank, self._world_size)

    def ballot(self) -> WeightMessage:
        """Return what this rank has to say at the end of a step."""
        return WeightMessage(is_missing=True) if self.window is None else self.window.ballot(self._typical)

    def share(self, indices: Sequence[int], used: Sequence[int], divisor: float | None) -> GradientScale:
        """Make the gradients of a bucket ready to leave, and return what they count.

        Args:
            indices: The bucket's parameters.
            used: By parameter, whether it received a gradient since the last step.
            divisor: What gradients are divided by where there are no weights; None: by nothing, the hook divides.
        """
        window = self.window
        if window is None or not window.is_weighed:
            factor = 1.0 if divisor is None else 1.0 / divisor
            return GradientScale(factor, factor)
        window.leave(indices, used)
        scale = self._typical * (1 if divisor is None else self._world_size)
        return GradientScale(window.unit / scale, window.total / scale, self.encode(self.ballot()))

    def call_the_roll(self, ballot: WeightMessage) -> None:
        """Agree on the typical weight before anything has left. Collective: every rank. Blocks until complete.

        Raises:
            ConfigurationError: On every rank: only some have given weights.
        """
        self._conclude(self._exchange(ballot))

    # --- the end of a step ------------------------------------------------------------------------------------------

    def conclude(self, ballots: Tensor, future: Future[Any] | None = None, *, is_urgent: bool) -> float | None:
        """Return what the reduced gradients are to be multiplied by; None if ``ballots`` is too narrow to tell.

        Args:
            ballots: The sum of all ranks' ballots, valid on the current stream.
            future: The reduction that made it, if others are still under way.
            is_urgent: False: a rank without weights, which can look at them later.

        Raises:
            ConfigurationError: On every rank: only some have given weights.
        """
        if is_capturing(ballots.device):
            if is_urgent:
                raise ConfigurationError(
                    "A step with weights cannot be captured in a CUDA graph: the host has to read their sum.\n"
                    "Capture without weight(), or train eagerly."
                )
            return 1.0
        if ballots.device.type == "cuda" and not is_urgent:
            event = torch.cuda.Event()
            self._doubt = ballots.to("cpu", non_blocking=True), event
            event.record(torch.cuda.current_stream(ballots.device))
            return 1.0
        if ballots.device.type == "cuda" and future is not None:
            with torch.cuda.stream(torch.cuda.Stream(ballots.device)):
                future.wait()
                numbers = ballots.tolist()
        else:
            numbers = ballots.tolist()
        if numbers[1] and ballots.dtype not in _WIDTHS:
            WeightSum.decode(numbers).check()
            return None
        return self._conclude(numbers, ballots.dtype)

    def conclude_apart(self, ballot: WeightMessage) -> float:
        """Do the same in a collective of its own. Collective: every rank. Blocks until complete."""
        return self._conclude(self._exchange(ballot))

    def resolve_doubt(self) -> None:
        """Raise ConfigurationError if other ranks gave weights in the last step, and this one did not look then."""
        if self._doubt is None or is_capturing(self.device):  # no event may be waited for in a capture
            return
        ballots, event = self._doubt
        self._doubt = None
        event.synchronize()
        self._conclude(ballots.tolist())

    def _exchange(self, ballot: WeightMessage) -> list[float]:
        """Return the sum of all ballots. Collective: every rank. Blocks until complete."""
        sums = torch.tensor(self.encode(ballot), dtype=torch.float64, device=self.device)
        try:
            all_reduce(sums, group=self._group)
        except RuntimeError as error:
            raise CollectiveError(
                f"Rank {self.rank}: the exchange of the ranks' weights failed: {error}\n"
                "Another rank probably ended or ran no backward; look at the first error of the job."
            ) from error
        numbers: list[float] = sums.tolist()
        return numbers

    def _conclude(self, numbers: Sequence[float], dtype: torch.dtype = torch.float64) -> float:
        """Draw the conclusions from all ranks' ballots; return what the reduced gradients are to be multiplied by."""
        if not numbers[1]:
            return 1.0
        tally = WeightSum.decode(numbers)
        tally.check()
        self.sum = tally.weight * self._typical
        if self.sum:
            self._typical = self.sum / self._world_size
        return tally.correction(self._world_size, tolerance=4 * torch.finfo(dtype).eps)
