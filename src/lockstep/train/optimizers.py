"""Optimizers that need more than ``step()``: a closure, as LBFGS and SAM, or modes, as schedule-free ones.

[Note: closures]
An optimizer that computes the gradient more than once in a step gets a closure, which repeats forward and backward of
the micro-batches of the step, as in a loop of one process: reduced over the ranks, divided and clipped. It returns the
loss of the global batch, which is the same on all ranks: so a line search makes the same decisions on all of them.

[Note: modes]
The parameters of a schedule-free optimizer are those to train. Its ``eval()`` turns them into those to use, and
``train()`` back, up to rounding. `AveragedWeights` holds the weights to use, as if they were an average, and gives the
parameters back their bits: an evaluation does not change the training, and a rank that was lost in it neither.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.checkpoints.model_state import held_by
from lockstep.errors import ConfigurationError
from lockstep.parallel.consistency import checksum
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.parallel.zero.partition import in_eval_mode
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.task import required_by

_CLOSURE = (
    "{} needs a closure, which computes the gradient again in its step; fit has one with the strategies single, dp and "
    "ddp, without fp16, compression and overlap_optimizer.\nUse one of these, or write a script with lockstep.prepare, "
    "in which optimizer.step(closure) works."
)


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` has ``train()`` and ``eval()``."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def evaluating(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Return a context with the weights that ``eval()`` sets. Collective with ZeRO-1: every rank."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.evaluating()
    return in_eval_mode(optimizer, [parameter for group in optimizer.param_groups for parameter in group["params"]])


def check_optimizer(optimizer: Optimizer, strategy: StrategyName, settings: Settings, *, has_average: bool) -> None:
    """Refuse what ``optimizer`` needs and this run has not.

    Raises:
        ConfigurationError: It is something.
    """
    kind, is_local = type(optimizer).__name__, strategy in ("local-sgd", "diloco")
    if "closure" in required_by(optimizer.step):
        check_closure(optimizer, strategy, settings)
    if has_modes(optimizer) and (has_average or is_local):
        what, advice = "Task.ema", "Omit ema"
        if is_local:
            what, advice = f"strategy {strategy}, which exchanges parameters in training mode", "Use strategy ddp"
        raise ConfigurationError(
            f"{kind} has train() and eval(), as optimizers that average the weights themselves; it cannot be combined "
            f"with {what}.\n{advice}."
        )
    if is_local or strategy == "fsdp":  # they save the entries by parameter; ZeRO-1 refuses the others itself
        own = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"}))
        if own or (is_local and held_by(optimizer)):
            what = f"has {', '.join(own)} in its state_dict" if own else "holds another optimizer"
            raise ConfigurationError(f"{kind} {what}, which strategy {strategy} cannot save.\nUse strategy ddp.")


def check_closure(optimizer: Optimizer, strategy: StrategyName, settings: Settings) -> None:
    """Refuse an optimizer that needs a closure where there is none.

    Raises:
        ConfigurationError: There is none.
    """
    is_whole = strategy in ("single", "dp", "ddp", "torch-ddp")
    is_plain = settings.precision != "fp16" and not settings.compression and not settings.overlap_optimizer
    if not is_whole or not is_plain:
        kind = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        raise ConfigurationError(_CLOSURE.format(type(kind).__name__))


def make_closure(loss: Tensor, parameters: Iterable[Tensor], compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a closure for a step whose gradient was computed, with this loss; see [Note: closures].

    Args:
        loss: Of the global batch.
        parameters: Those of the model.
        compute: Computes loss and gradient again. Collective: every rank.
    """

    def bits() -> int:
        # By content: an optimizer may change parameters through ``.data``, unnoticed by autograd.
        return checksum([value for p in trained for value in (p.detach(), p.grad) if value is not None])

    trained = list(parameters)
    known = bits()

    @torch.enable_grad()
    def closure() -> Tensor:
        # At the same point, as LBFGS begins, there is nothing to compute, and batch norm must not see the batch twice.
        return loss.clone() if bits() == known else compute()

    return closure
