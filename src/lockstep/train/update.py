"""The end of a step: finish the gradient, set the learning rate, step the optimizer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.train.gradients import Gradients, clip_factor
from lockstep.train.precision import GradScaler
from lockstep.train.schedule import LearningRate, base_rates, set_rates


class Outcome(NamedTuple):
    """What became of a step.

    Args:
        norm: The gradient's norm before clipping.
        updated: Whether the parameters were updated.
        verdict: Whether the gradient was finite; None: `norm` will tell. An overflow that fp16's loss scale can mend is
            no bad gradient: the scaler skips such steps, as part of its search.
    """

    norm: Tensor
    updated: bool
    verdict: bool | None


class Updater:
    """Takes the gradient that backward left in ``param.grad`` to an update of the parameters.

    Args:
        model: The bare model.
        gradients: What backward leaves in it.
        optimizer: Of its parameters; the learning rates it has now are those that ``learning_rate`` scales.
        learning_rate: The factor on them at each update.
        clip: Largest global norm of the gradient, or None.
        scaler: For fp16, else None.
        in_backward: Whether the optimizer steps within backward, and only its learning rate is left to do here.
        looks_later: Whether to update the parameters without knowing whether the gradient is finite; not in fp16.

    Attributes:
        scaler, in_backward, looks_later: As given; in fp16 it never looks later.
        num_updates: That the parameters have seen; the schedule goes by it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        learning_rate: LearningRate,
        *,
        clip: float | None,
        scaler: GradScaler | None,
        gradients: Gradients,
        in_backward: bool = False,
        looks_later: bool = False,
    ) -> None:
        self._model, self._optimizer, self._learning_rate = model, optimizer, learning_rate
        self._gradients, self.in_backward = gradients, in_backward
        self._base_rates = base_rates(optimizer)
        self._clip = clip
        self.looks_later = looks_later and scaler is None
        self.scaler = scaler
        self.num_updates = 0
        gradients.expect_norm()

    @property
    def loss_scale(self) -> float:
        """What the loss is to be multiplied by before backward."""
        return self.scaler.scale if self.scaler else 1.0

    def begin(self) -> None:
        """Set the learning rate of the coming update, if it happens within backward."""
        if self.in_backward:
            self._set_rates()

    @property
    def reports_norm(self) -> bool:
        """Whether the norm that `run` returns is worth a report: with fp16 or clipping."""
        return self._clip is not None or self.scaler is not None

    def run(self, divisor: Tensor | None) -> Outcome:
        """Divide the gradient by the loss scale and ``divisor``, clip it, and update the parameters if it is finite.

        Collective if each rank has a part of the gradient: every rank. Blocks on CUDA unless it looks later.
        """
        norm = self._gradients.norm()
        if self.in_backward:
            self.num_updates += 1
            return Outcome(norm, True, None if self.looks_later else self._gradients.is_finite(norm))
        factor = self._unscale(divisor)
        norm = norm if factor is None else norm * factor.to(norm)
        verdict = None if self.looks_later else self._gradients.is_finite(norm)
        if verdict is False:
            return Outcome(norm, False, self._blames_scale())
        if self.scaler is not None:
            self.scaler.update(finite=True)
        if self._clip is not None:
            shorten = clip_factor(norm, self._clip)
            if verdict is None:  # so that it can be seen later which parameter it was
                shorten = torch.where(norm.isnan(), torch.ones_like(shorten), shorten)
            factor = shorten if factor is None else factor * shorten
        if factor is not None:
            self._gradients.multiply_(factor)
        self._set_rates()
        self._optimizer.step()
        self.num_updates += 1
        return Outcome(norm, True, verdict)

    def _blames_scale(self) -> bool:
        """Return whether a smaller loss scale may help against an overflow, and make it smaller."""
        if self.scaler is None or self.scaler.is_smallest:
            return False
        self.scaler.update(finite=False)
        return True

    def _set_rates(self) -> None:
        set_rates(self._optimizer, self._base_rates, self._learning_rate.factor(self.num_updates))

    def _unscale(self, divisor: Tensor | None) -> Tensor | None:
        """Return what the gradient is yet to be multiplied by, or None if that is one."""
        if divisor is None:
            if self.loss_scale == 1.0:
                return None
            device = next(self._model.parameters()).device
            return torch.full((), 1.0 / self.loss_scale, device=device)
        return 1.0 / (divisor * self.loss_scale)
