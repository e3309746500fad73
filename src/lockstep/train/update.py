"""The end of a step: finish the gradient, set the learning rate, step the optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.train.gradients import Gradients, clip_factor
from lockstep.train.precision import GradScaler
from lockstep.train.schedule import LearningRate, base_rates, set_rates


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
    ) -> None:
        self._model, self._optimizer, self._learning_rate = model, optimizer, learning_rate
        self._gradients, self._in_backward = gradients, in_backward
        self._base_rates = base_rates(optimizer)
        self._clip = clip
        self.scaler = scaler
        self.num_updates = 0
        if clip is not None or scaler is not None:
            gradients.expect_norm()

    @property
    def loss_scale(self) -> float:
        """What the loss is to be multiplied by before backward."""
        return self.scaler.scale if self.scaler else 1.0

    def begin(self) -> None:
        """Set the learning rate of the coming update, if it happens within backward."""
        if self._in_backward:
            self._set_rates()

    def run(self, divisor: Tensor | None) -> tuple[Tensor | None, bool]:
        """Divide the gradient by the loss scale and ``divisor``, clip it, and update the parameters.

        Collective in fp16 if the ranks' gradients may differ: every rank. Blocks on CUDA in fp16 only.

        Returns:
            The gradient's norm before clipping if it was needed, and whether the parameters were updated: not in
            fp16 if the gradient overflowed.
        """
        if self._in_backward:
            self.num_updates += 1
            return None, True
        factor = self._unscale(divisor)
        norm = None
        if self._clip is not None or self.scaler is not None:
            norm = self._gradients.norm()
            norm = norm if factor is None else norm * factor.to(norm)
        if self.scaler is not None:
            assert norm is not None
            finite = self._gradients.is_finite(norm)
            self.scaler.update(finite=finite)
            if not finite:
                return norm, False
        if self._clip is not None:
            assert norm is not None
            shorten = clip_factor(norm, self._clip)
            factor = shorten if factor is None else factor * shorten
        if factor is not None:
            self._gradients.multiply_(factor)
        self._set_rates()
        self._optimizer.step()
        self.num_updates += 1
        return norm, True

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
