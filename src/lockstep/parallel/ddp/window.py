"""The micro-batches that one synchronised step is made of, each with its weight.

[Note: weights]
A step's gradient is to be the sum of n * g over micro-batches and ranks, divided by the sum of n, where g is the
gradient of a micro-batch's mean loss and n its weight. Losses are not scaled. ``param.grad`` is kept in units of the
latest weight: it holds the sum so far divided by that weight, so that autograd can add the next g as it is. Where
weights differ, what is there is multiplied by old / new before the backward adds to it; the bucket multiplies by the
latest weight when it leaves, which costs nothing, since it divides anyway.

[Note: when a weight counts]
``weight(n)`` only takes note. The weight counts when a backward enters the model: the first hooked output that autograd
runs comes before all gradients of the model. Only then is it known what ``param.grad`` holds, since ``zero_grad()`` may
come before or after ``weight()`` and ``forward``. Several backwards of one micro-batch count once, unless the step
was closed in between. A forward makes a weight that has counted invalid.

[Note: weight zero]
0 * NaN is NaN, so gradients of a micro-batch of weight zero must not be added to others. What has been accumulated is
put aside, and put back when the next micro-batch enters or the bucket leaves.

Where layers share the batch between the ranks (SyncBatchNorm), the samples of such a micro-batch are a part of the
other ranks' losses all the same. Then not its gradients are dropped, but the gradient of its own loss, where it enters
the model.

[Note: gradients from before the window]
Gradients that were neither reduced nor zeroed away since the last step are part of what the next one yields: reduced
gradient + mean of the window, as without weights. Ranks may have different numbers of micro-batches, so each rank
sends them with its total weight. That is not the latest weight if the window holds several, and so accumulation starts
from zero and the bucket adds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor

from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.ballot import Ballot


class _Given(Enum):
    NOTHING = "nothing"  # for the coming backward
    FRESH = "fresh"  # a weight that has not counted yet
    COUNTED = "counted"  # one that has, and no forward came since


class Window:
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

    def ballot(self, typical_weight: float) -> Ballot:
        """Return what this rank has to say when the step closes."""
        return Ballot(self.total / typical_weight, self.is_weighed, self.has_unweighed or not self.is_weighed)

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
