"""The update of a step: the gradient divided and clipped, the check that it is finite, the optimizer, averaged weights.

[Note: checks one forward later]
A host that waited for the gradient of a step would queue no work meanwhile, and its device would be idle. So on a
device it reads the norm, and the flags of the ranks, when it has queued the first forward of the next step. With
on_nan="raise" the update is made in any case: the run ends, and what it keeps is checked before, see `Trainer.settle`.
If bad steps are to be skipped, and in fp16, the optimizer itself must leave out the update, which torch's fused ones do
for their GradScaler. With other optimizers the host waits before the update, and before the first one always: a fused
SGD that leaves it out never initializes its momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.accelerator import HostCopy
from lockstep.data.loader import MicroBatch
from lockstep.errors import LockstepError
from lockstep.parallel.ddp.bucket_gradients import gradients_of
from lockstep.parallel.flat import are_finite
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.train import optimizers, step_parts
from lockstep.train.plan import Plan
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.skipping import Computed, NonFiniteGuard
from lockstep.train.strategies.strategy import Strategy


class Update(Enum):
    """Who makes the update of a step; a gradient that is not finite must not reach the parameters."""

    # The optimizer, when the gradient is known. If the host checks the gradient before, a bad one makes no update; if
    # later, the run ends: see [Note: checks one forward later].
    PLAIN = auto()
    # The optimizer, which itself leaves out the update on the device if the gradient is not finite, as for GradScaler.
    LEFT_OUT = auto()
    # The engine, for each bucket as soon as it is reduced; the gradient is checked after that.
    IN_BACKWARD = auto()


class Updater:
    """Updates the parameters of a model, and what follows them: scheduler, loss scale, averaged weights.

    Args:
        name, settings, plan: Of the run.
        model: The model without wrappers.
        optimizer: The optimizer, as the strategy has taken it over.
        strategy: The strategy.
        average: The averaged weights.
        needs_closure: Whether the optimizer's ``step`` does.
        evaluates: Whether the task has evaluation data.
        replay: See `NonFiniteGuard`.

    Attributes:
        policy, checks_later: Who makes the update, and whether the host checks the gradient in the next step only.
        gradients: The gradients of the step.
        scaler: The loss scale, in fp16.
        num_updates: Number of updates made.
        base_rates: The learning rates of the task.
        nonfinite: Steps that were skipped so far.
    """

    def __init__(
        self,
        name: StrategyName,
        settings: Settings,
        plan: Plan,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        average: step_parts.AveragedWeights | None,
        *,
        needs_closure: bool,
        evaluates: bool,
        replay: Callable[[MicroBatch, int], list[Tensor]],
    ) -> None:
        self.optimizer, self.average, self.num_updates = optimizer, average, 0
        self._name, self._settings, self._model, self._needs_closure = name, settings, model, needs_closure
        self._is_updating = False
        self.base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.scheduler: step_parts.Rates | step_parts.TorchScheduler
        if step_parts.makes_scheduler((rate := plan.learning_rate).decay):
            self.scheduler = step_parts.TorchScheduler(rate, optimizer, evaluates=evaluates)
        else:
            self.scheduler = step_parts.Rates(rate, optimizer)
        self.scaler = step_parts.GradScaler() if settings.precision == "fp16" else None
        # In a step, before its update: the number of updates, and the loss scaling.
        self._began_with: tuple[int, dict[str, Any]] | None = None
        self.nonfinite = NonFiniteGuard(settings.on_nan, model, optimizer, strategy, plan, replay)
        self.connect(strategy, plan)

    def connect(self, strategy: Strategy, plan: Plan) -> None:
        """Use another strategy and plan from now on, as after a recovery."""
        self._strategy = self.nonfinite.strategy = strategy
        self.nonfinite.plan = plan
        parameters = list(self._model.parameters())
        read = partial(gradients_of, parameters)
        self.gradients = strategy.gradients or step_parts.GradientList(read, parameters[0])
        skips = self._settings.on_nan == "skip" or self.scaler is not None
        can_skip = getattr(self._own_optimizer, "_step_supports_amp_scaling", False) and strategy.stops_between
        self.checks_later = parameters[0].device.type != "cpu" and (can_skip or not skips)
        self.policy = Update.LEFT_OUT if self.checks_later and skips else Update.PLAIN
        if self._settings.overlap_optimizer:
            self.policy = Update.IN_BACKWARD

    @property
    def _own_optimizer(self) -> Any:
        """The optimizer of this rank's part of the parameters, which ZeRO-1 creates again in its first step."""
        return self.optimizer.optim if isinstance(self.optimizer, ZeroRedundancyOptimizer) else self.optimizer

    @property
    def waits(self) -> bool:
        """Whether the host checks the gradient before the update; the first one in any case."""
        return not self.checks_later or (self.num_updates == 0 and self.policy is Update.LEFT_OUT)

    def begin(self) -> None:
        """Begin a step."""
        self._began_with = self.num_updates, {} if self.scaler is None else asdict(self.scaler)
        if self.nonfinite.buffers is not None:  # which a skipped step must not change
            self.nonfinite.buffers.keep()
        self.optimizer.zero_grad(set_to_none=True)

    def end(self) -> None:
        """End a step, which is not done again from here on."""
        self._began_with = None

    def restore(self) -> None:
        """Return to the begin of a step that was not ended."""
        if self._is_updating:
            raise LockstepError(
                "A rank was lost in an update that computes gradients again, and has changed parameters already.\n"
                "The ranks cannot go on in place; restart them from the newest checkpoint."
            )
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None and self.average.is_swapped:  # a rank was lost in an evaluation, or at the end
            self.average.swap()
        # They change before the update, and the step of a sharded optimizer has collectives.
        if self._began_with is not None:
            self.num_updates, scaling = self._began_with
            self.scaler = self.scaler and replace(self.scaler, **scaling)
            self._began_with = None

    def advance(self) -> None:
        """Set the learning rates of the next update."""
        self.scheduler.advance(self.num_updates)

    def scale_gradient(self, metrics: step_parts.StepMetrics) -> tuple[Tensor, HostCopy]:
        """Divide and clip the gradient; return its norm before clipping, and the report of the step with it."""
        scale = 1.0 if self.scaler is None else self.scaler.scale
        norm, factor = self.gradients.norm(), None
        if metrics.divisor is not None and self.policy is not Update.IN_BACKWARD:
            factor = 1.0 / (metrics.divisor * scale)
        elif scale != 1.0:
            factor = torch.full_like(norm, 1.0 / scale)
        norm = norm if factor is None else norm * factor.to(norm)
        # Queued before that pass and before the update: to read it, the host does not wait for them.
        metrics.report[-1].copy_(norm)
        report = HostCopy(metrics.report)
        if self._settings.clip is not None:
            # As in ``clip_grad_norm_``; but one NaN must not reach all parameters: which of them has it is reported.
            shorten = torch.clamp(self._settings.clip / (norm + 1e-6), max=1.0).nan_to_num(nan=1.0)
            factor = shorten if factor is None else factor * shorten
        if factor is not None:  # also if the gradient is not used: the device would be idle in a wait
            self.gradients.multiply_(factor)
        return norm, report

    def update(self, norm: Tensor, loss: Tensor, compute_again: Callable[[], Tensor]) -> None:
        """Update the parameters, unless the engine has done it in backward.

        ``norm`` is that of the gradient. ``loss`` and ``compute_again`` are for an optimizer that needs a closure; see
        [Note: closures] in `optimizers`.
        """
        if self.policy is Update.LEFT_OUT:
            is_bad = norm - norm != 0
            self._own_optimizer.found_inf = is_bad.float()
            if self.nonfinite.buffers is not None and (self.scaler is None or self.scaler.scale <= 1.0):
                self.nonfinite.buffers.restore_where(is_bad)
        if self.policy is not Update.IN_BACKWARD:
            self._step_optimizer(loss, compute_again)
        if self.average is not None:
            self.average.is_due = True

    def _step_optimizer(self, loss: Tensor, compute_again: Callable[[], Tensor]) -> None:
        if not self._needs_closure:
            try:
                self.optimizer.step()
                return
            except Exception as error:  # before it has changed anything
                if "closure" not in str(error):
                    raise
                optimizers.check_closure(self.optimizer, self._name, self._settings)
                self._needs_closure = True
        closure = optimizers.make_closure(loss, self._model.parameters(), compute_again)
        self._is_updating = True
        self.optimizer.step(closure)  # type: ignore[arg-type]
        self._is_updating = False

    def update_average(self, *, is_used: bool = True) -> None:
        """Update the averaged weights with the parameters of the last step, if this has not been done."""
        if self.average is not None and (self.average.follows or is_used):
            is_read = self.average.is_due or not self.average.follows
            if is_read and isinstance(self.optimizer, ZeroRedundancyOptimizer):
                self.optimizer.wait()
            self.average.update()

    def conclude(self, norm: float, computed: Computed, step: int, *, is_over: bool) -> bool:
        """Count the update of ``step``; if its gradient is not finite, decrease the loss scale or refuse the step.

        Collective if it is not: every rank.

        Args:
            norm: The norm of the gradient.
            computed: The micro-batches of this process.
            step: Counted from 0.
            is_over: See `NonFiniteGuard.refuse`.

        Returns:
            Whether the gradient is finite.

        Raises:
            NonFiniteGradient: On every rank: it is not finite, and the run is to stop.
        """
        is_finite = math.isfinite(norm) or self._is_finite_after_all(torch.tensor(norm))
        self.num_updates += is_finite or (is_over and self.policy is not Update.LEFT_OUT)
        # An overflow that a smaller loss scale can avoid is not a bad gradient: the step is only skipped.
        if self.scaler is not None and (is_finite or self.scaler.scale > 1.0):
            before = self.scaler.scale
            self.scaler.update(finite=is_finite)
            if self._strategy.compressed is not None and self.scaler.scale != before:
                self._strategy.compressed.scale_compression_residuals(self.scaler.scale / before)
        elif not is_finite:
            self.nonfinite.refuse(computed, step, is_over=is_over)
        if not is_finite and self.average is not None and self.policy is Update.LEFT_OUT:
            self.average.is_due = False
        return is_finite

    def _is_finite_after_all(self, norm: Tensor) -> bool:
        """Return whether each element of the gradient is finite although the norm is not, because squares overflowed.

        Collective with a sharded gradient: every rank.
        """
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.wait()  # what follows reads all parameters
        if norm.isnan() or not self.checks_later:
            return bool(norm.isinf()) and self.gradients.is_finite(norm)
        # After an update, the parameters show it, unless a rank has only a part of them. An update that was left out
        # cannot be made up for.
        is_made = self.policy is not Update.LEFT_OUT
        return is_made and self._strategy.can_replay and are_finite(self._model.parameters(), norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the state apart from that of the optimizer and of the averaged weights."""
        scaler = None if self.scaler is None else asdict(self.scaler)
        return {"num_updates": self.num_updates, "scaler": scaler, **self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, keeps_rates: bool) -> None:
        """Continue from ``state``; with ``keeps_rates``, the learning rates are those of the checkpoint."""
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler = step_parts.GradScaler(**state["scaler"])
        self.num_updates = state["num_updates"]
        self.scheduler.load_state_dict(state, keeps_rates=keeps_rates)
