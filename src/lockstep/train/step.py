"""The parts of a training step: loss, learning rate, gradient, sums over the ranks, random numbers, out of memory."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import psutil
import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from lockstep import activity
from lockstep.comm.collectives import Group, all_reduce, all_reduce_async
from lockstep.data.loader import MicroBatch
from lockstep.data.order import mix, seed_cpu, seed_device
from lockstep.errors import ConfigurationError, OutOfMemory
from lockstep.parallel.flat import are_finite, combine_norms, list_norms, multiply_
from lockstep.parallel.zero.optimizer import norm_of_shards
from lockstep.telemetry.heartbeat import device_memory
from lockstep.telemetry.rank_state import format_bytes
from lockstep.telemetry.resources import says_out_of_memory
from lockstep.train.settings import Precision, Scaling, Schedule
from lockstep.train.task import Loss, Task

# --- mixed precision --------------------------------------------------------------------------------------------------

_AUTOCAST_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context for mixed precision (autocast) in a forward pass; it holds for the calling thread only."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_AUTOCAST_DTYPES[precision])


@dataclass
class GradScaler:
    """Loss scaling: a factor on the loss that keeps fp16 gradients in range.

    It is halved after an overflow, and doubled after a good while.

    It is a power of two, so it changes no digit of a gradient. It sees only whether the *global* gradient was finite,
    so all ranks hold the same factor.
    """

    scale: float = 2.0**16
    num_good_steps: int = 0
    growth_interval: int = 2000

    def update(self, *, finite: bool) -> None:
        """Adapt the scale to whether the gradient of a step was finite."""
        self.num_good_steps += 1
        if not finite:
            self.scale, self.num_good_steps = max(self.scale / 2, 1.0), 0
        elif self.num_good_steps == self.growth_interval:
            self.scale, self.num_good_steps = min(self.scale * 2, 2.0**24), 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"scale": self.scale, "num_good_steps": self.num_good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.scale, self.num_good_steps = state["scale"], state["num_good_steps"]


# --- the loss ---------------------------------------------------------------------------------------------------------


_RETURN = "Return its mean over the batch, or Loss(total, count)."


class Part(NamedTuple):
    """The loss of one micro-batch: ``value * weight`` out of ``out_of`` is what it adds to the loss of the step.

    A mean over samples has their number as weight and count; a `Loss` has weight 1 and its own count.
    """

    value: Tensor
    weight: float
    out_of: Tensor | float


@dataclass(frozen=True)
class Objective:
    """Computes the loss of ``task`` for a micro-batch; safe to call from several threads at once."""

    task: Task
    precision: Precision

    def __call__(self, model: nn.Module, batch: object, num_samples: int) -> Part:
        """Return the loss of ``model`` on ``batch``.

        Raises:
            ConfigurationError: It is no 0-dimensional tensor, or has no gradient.
        """
        with autocast(self.precision, next(model.parameters()).device):
            result: object = self.task.loss(model, batch)
        if isinstance(result, Loss):
            part = Part(result.total, 1.0, torch.as_tensor(result.count))
        elif isinstance(result, Tensor):
            part = Part(result, float(num_samples), float(num_samples))
        else:
            raise ConfigurationError(f"The loss returned a {type(result).__name__}, no tensor.\n{_RETURN}")
        if part.value.dim() != 0:
            shape = tuple(part.value.shape)
            raise ConfigurationError(f"The loss is a tensor of shape {shape}, not a single number.\n{_RETURN}")
        if torch.is_grad_enabled() and not part.value.requires_grad:
            raise ConfigurationError(
                "The loss has no gradient: it does not depend on any trainable parameter.\n"
                "Compute it from the model's output, without detach(), item() or no_grad()."
            )
        return part


class LossModule(nn.Module):
    """The model with its loss as one module, for engines that wrap a module.

    So the loss gets the bare model, whatever the engine: it may use its attributes and methods, and call it often.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective = objective

    def forward(self, batch: object, num_samples: int) -> Part:
        """Return the loss on ``batch``; without samples, one that has every parameter in its graph but no gradient."""
        if num_samples == 0:
            # A rank whose part of the batch is empty must take part in the collectives of backward. Running the model
            # on a made-up sample would move its batch-norm statistics and random state, and zero times a loss that is
            # not finite is no zero; this touches neither, and each parameter's hooks run all the same.
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            return Part(_NoSamples.apply(*trained), 1.0, 0.0)  # type: ignore[no-untyped-call]
        return self._objective(self.model, batch, num_samples)


class _NoSamples(torch.autograd.Function):
    """Zero, whose backward reaches every parameter and gives it no gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)  # type: ignore[attr-defined]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grad: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.num_parameters  # type: ignore[attr-defined, no-any-return]


# --- the learning rate ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearningRate:
    """The learning-rate schedule with its warm-up: a factor on the optimizer's own rates at each optimizer step.

    Args:
        scale: From the size of the global batch; see `batch_scale`.
        warmup: Steps over which the factor rises from ``1 / warmup`` of its value to all of it.
        num_steps: Steps of the run, over which it falls.
        decay: How it falls, or a function ``(step, num_steps)`` to the factor.
    """

    scale: float
    warmup: int
    num_steps: int
    decay: Schedule | Callable[[int, int], float]

    def factor(self, step: int) -> float:
        """Return the factor at optimizer step ``step``, counted from 0."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if callable(self.decay):
            return self.scale * warm * self.decay(step, self.num_steps)
        if self.decay == "constant" or step < self.warmup:
            return self.scale * warm
        done = min(1.0, (step - self.warmup) / max(1, self.num_steps - self.warmup))
        return self.scale * warm * (1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))


def batch_scale(rule: Scaling, batch_size: int, base_batch_size: int) -> float:
    """Return the factor of learning-rate scaling, for a global batch that differs from the base batch.

    Source: linear from Goyal et al. 2017 (arXiv:1706.02677), square root from Krizhevsky 2014 (arXiv:1404.5997).
    """
    ratio = batch_size / base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def set_rates(optimizer: Optimizer, base: list[float], factor: float) -> None:
    """Set each group's learning rate to its base rate times ``factor``; one that is a tensor stays one."""
    for group, rate in zip(optimizer.param_groups, base, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor


# --- the gradient -----------------------------------------------------------------------------------------------------


class Gradients(Protocol):
    """The gradient of a whole model, which backward has left behind; a strategy says which kind it leaves.

    ``FlatGradients`` of our `DistributedDataParallel` is one of them.
    """

    def norm(self) -> Tensor:
        """Return the Euclidean norm of all gradients together, a 0-dimensional tensor. Does not block."""

    def multiply_(self, factor: Tensor) -> None:
        """Multiply all gradients in place by a 0-dimensional tensor. Does not block."""

    def is_finite(self, norm: Tensor) -> bool:
        """Return whether all gradients are finite, the same on every rank. Blocks on CUDA.

        Args:
            norm: What `norm` returned for these gradients, or that times something finite.
        """


@final
class ParameterGradients:
    """Gradients parameter by parameter: the same bits on every rank that has them, so all come to the same verdict."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def _all(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def norm(self) -> Tensor:
        """Return the norm of all."""
        return combine_norms(list_norms(self._all()))

    def multiply_(self, factor: Tensor) -> None:
        """Multiply all in place."""
        multiply_(self._all(), factor)

    def is_finite(self, norm: Tensor) -> bool:
        """Return whether all are finite."""
        return are_finite(self._all(), norm)


@final
class ShardedGradients:
    """Gradients of which each rank has its part; the same norm on every rank.

    Args:
        local: Returns this rank's part.
        like: A parameter.
        group: The ranks.
    """

    def __init__(self, local: Callable[[], list[Tensor]], like: Tensor, group: Group) -> None:
        self._local, self._like, self._group = local, like, group

    def norm(self) -> Tensor:
        """Collective: every rank."""
        return norm_of_shards(self._local(), self._like, group=self._group)

    def multiply_(self, factor: Tensor) -> None:
        """Multiply this rank's part in place."""
        multiply_(self._local(), factor)

    def is_finite(self, norm: Tensor) -> bool:
        """Collective if the norm is not finite: every rank then."""
        if math.isfinite(float(norm)):
            return True
        mine = torch.tensor([are_finite(self._local(), norm)], device=norm.device).int()
        all_reduce(mine, group=self._group, op="min")
        return bool(mine)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor of gradient clipping, which brings ``norm`` down to ``max_norm``, or one.

    The formula of ``clip_grad_norm_``.
    """
    factor: Tensor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return factor


# --- sums over the ranks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSums:
    """What a step came to over all ranks.

    Args:
        loss: Of the global batch, 0-dimensional; zero if nothing counted.
        count: What the loss is a mean over if that is not samples, 0-dimensional; None if it is.
        divisor: What a gradient scaled by one over the samples has yet to be divided by; None if that is one.
        flags: How many samples could not be read, how many ranks request to stop, and on how many something failed.
    """

    loss: Tensor
    count: Tensor | None
    divisor: Tensor | None
    flags: Tensor


class StepMetrics:
    """What a step sums over micro-batches and ranks: its loss, and what each rank has to report to the others.

    Args:
        device: Where the sums are.
        group: The ranks that take part, or None if it is only this process.
        dtype: Of the sums.
        has_counts: Whether the losses of a step before were no means over samples; true from the first such one on.
        only_means: Whether they must be, for the gradient cannot be divided after backward.
    """

    def __init__(
        self,
        device: torch.device,
        group: Group | None,
        *,
        dtype: torch.dtype = torch.float64,
        has_counts: bool = False,
        only_means: bool = False,
    ) -> None:
        self._group, self._only_means = group, only_means
        # Total and count of the loss, unreadable samples, ranks that request to stop, ranks on which something failed.
        self._sums = torch.zeros(5, dtype=dtype, device=device)
        self._future: Future[Any] | None = None
        self._saw_means = self._saw_counts = False
        self.has_counts = has_counts

    def add(self, parts: Sequence[Part]) -> None:
        """Add the losses of this process's shares of a micro-batch.

        Raises:
            ConfigurationError: One is no mean over samples, and all must be.
        """
        for value, weight, out_of in parts:
            if isinstance(out_of, float):  # a mean over samples
                self._saw_means = True
                self._sums[1] += out_of
            elif self._only_means:
                raise ConfigurationError(
                    "With overlap_optimizer a loss must be a mean over samples, but the task returned a Loss: its "
                    "gradient is divided by all ranks' count after backward.\n"
                    "Return the mean, or leave overlap_optimizer out."
                )
            else:
                self._saw_counts = self.has_counts = True
                self._sums[1] += torch.as_tensor(out_of).detach().to(self._sums.device)
            self._sums[0] += value.detach().to(self._sums.device, self._sums.dtype) * weight

    def start_sum(self, num_bad: int, *, stop: bool, failed: bool) -> None:
        """Add what this rank has to report, and start to sum over the ranks, once all parts are in.

        Collective: every rank of the group. Does not block.
        """
        # A signal reaches the ranks in different steps, and a checkpoint is written by one of them in the background.
        # Each adds what it has to report to the sums of the losses, which travel beside the last backward: so all act
        # on it after the same step, and no step has an exchange for it.
        if num_bad or stop or failed:
            self._sums[2:] += torch.tensor([num_bad, stop, failed], dtype=self._sums.dtype, device=self._sums.device)
        if self._group is not None:
            self._future = all_reduce_async(self._sums, group=self._group)

    def wait(self, num_samples: float, *, may_miss: bool) -> StepSums:
        """Return what was summed; see `StepSums`. Blocks until it is there (on a device: lets the current stream wait).

        Args:
            num_samples: Of the global batch, by which the gradient was divided already.
            may_miss: Whether some of them may be missing, so that only the counts say how many there were.
        """
        if self._future is not None:
            with activity.waiting("all_reduce of losses"):
                self._future.wait()
        count = torch.where(self._sums[1] > 0, self._sums[1], 1.0)
        # A rank that saw no part cannot know, and divides in any case: by exactly one if the losses were means.
        is_one = self._saw_means and not self._saw_counts and not may_miss
        return StepSums(
            loss=self._sums[0] / count,
            count=self._sums[1] if self.has_counts else None,
            divisor=None if is_one else count / num_samples,
            flags=self._sums[2:],
        )


# --- random numbers ---------------------------------------------------------------------------------------------------

# Keep the bits for initial weights, dropout, made-up data and the optimizer apart from what else the seed is for.
INIT, FORWARD, DATA, UPDATE = 3, 4, 7, 8


class Seeds:
    """Sets the generators of this process and of its devices.

    Args:
        seed: What all random numbers derive from.
        devices: Of this process, by share.
        shares: Of a global batch that this process computes.
    """

    def __init__(self, seed: int, devices: Sequence[torch.device], shares: range) -> None:
        self._seed, self._devices, self._shares = seed, devices, shares

    def all(self, *purpose: int, device: torch.device | None = None) -> None:
        """Give what the task makes the same random numbers on every rank."""
        value = mix(self._seed, *purpose)
        seed_cpu(value)
        seed_device(device or self._devices[0], value)

    def forward(self, micro: MicroBatch, index: int) -> None:
        """Give each share of each micro-batch of each step random numbers of its own."""
        position = (self._seed, FORWARD, micro.step, index)
        seed_cpu(mix(*position, self._shares.start))
        for share, device in zip(self._shares, self._devices, strict=False):
            seed_device(device, mix(*position, share))


# --- out of memory ----------------------------------------------------------------------------------------------------


def explain_out_of_memory(error: BaseException, micro: MicroBatch, accumulate: int) -> None:
    """Turn an out-of-memory error of forward or backward into one that says what this process has, and what to try.

    The memory of the other ranks is in the launcher's report: they wait in a collective by now, and cannot be asked.

    Raises:
        OutOfMemory: It was one.
    """
    is_raised_as_one = isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory)
    if not is_raised_as_one and not (isinstance(error, RuntimeError) and says_out_of_memory(str(error))):
        return
    size = max(micro.sizes, default=0)
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    advice = (
        f"Try micro-batches of {(size + 1) // 2} samples: accumulate={2 * accumulate} (--accumulate {2 * accumulate})"
    )
    if size <= 1:
        advice = "Use a smaller model, shorter samples, more devices, or a strategy that divides the state (fsdp)"
    host = psutil.virtual_memory()
    rss, total, free = map(format_bytes, (psutil.Process().memory_info().rss, host.total, host.available))
    memory = "; ".join([*device_memory(), f"{rss} of the host's {total}, of which {free} are free"])
    raise OutOfMemory(
        f"Out of memory in step {micro.step + 1}, in a micro-batch of {size} sample{'s' * (size != 1)}: {cause}\n"
        f"This rank has {memory}.\n{advice}{': the training stays the same' * (size > 1)}."
    ) from error
