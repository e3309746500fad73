"""The parts of a training step: loss, loss scaling, gradient, update, and the sums over the ranks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, final

import psutil
import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.comm.collectives import Group, all_reduce_async
from lockstep.data.loader import MicroBatch
from lockstep.data.order import mix, seed_cpu, seed_device
from lockstep.errors import ConfigurationError, OutOfMemory
from lockstep.parallel.flat import are_finite, combine_norms, list_norms, multiply_
from lockstep.telemetry.resources import says_out_of_memory
from lockstep.train.plan import LearningRate, base_rates, set_rates
from lockstep.train.settings import Precision, Settings, StrategyName
from lockstep.train.task import Loss, Task

if TYPE_CHECKING:
    from lockstep.parallel.ddp.wrapper import DistributedDataParallel


# Low-precision forward passes, and the scaling that keeps fp16 gradients from vanishing.

_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context that a forward pass on ``device`` runs in; it holds for the calling thread only."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


class ScalerState(TypedDict):
    """What a `GradScaler` remembers from step to step."""

    scale: float
    num_good_steps: int


@dataclass
class GradScaler:
    """The factor on the loss that keeps fp16 gradients in range: halved after an overflow, doubled after a good while.

    It is a power of two, so it changes no digit of a gradient. It sees only whether the *global* gradient was finite,
    so all ranks hold the same factor.
    """

    scale: float = 2.0**16
    num_good_steps: int = 0
    growth_interval: int = 2000

    @property
    def is_smallest(self) -> bool:
        """Whether it cannot become smaller, so that an overflow has another cause."""
        return self.scale <= 1.0

    def update(self, *, finite: bool) -> None:
        """Take note of whether the gradient of a step was finite."""
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
            self.num_good_steps = 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.scale = min(self.scale * 2, 2.0**24)
            self.num_good_steps = 0

    def state_dict(self) -> ScalerState:
        """Return what a resumed run needs."""
        return {"scale": self.scale, "num_good_steps": self.num_good_steps}

    def load_state_dict(self, state: ScalerState) -> None:
        """Go on from ``state``."""
        self.scale, self.num_good_steps = state["scale"], state["num_good_steps"]


# The task's loss, as every strategy computes it: under autocast, checked, and with what it counts for.


class Part(NamedTuple):
    """The loss of one micro-batch: ``value * weight`` out of ``out_of`` is what it adds to the loss of the step.

    A mean over samples has their number as weight and count; a `Loss` has weight 1 and its own count.
    """

    value: Tensor
    weight: float
    out_of: Tensor | float

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean over samples, whose count is known without asking the other ranks."""
        return isinstance(self.out_of, float)


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
        with autocast(self.precision, _device_of(model)):
            result: object = self.task.loss(model, batch)
        if isinstance(result, Loss):
            value, count = result.total, torch.as_tensor(result.count)
            part = Part(value, 1.0, count)
        elif isinstance(result, Tensor):
            part = Part(result, float(num_samples), float(num_samples))
        else:
            raise ConfigurationError(
                f"The loss returned a {type(result).__name__}, no tensor.\n"
                "Return its mean over the batch, or Loss(total, count)."
            )
        if part.value.dim() != 0:
            raise ConfigurationError(
                f"The loss is a tensor of shape {tuple(part.value.shape)}, not a single number.\n"
                "Return its mean over the batch, or Loss(total, count)."
            )
        if torch.is_grad_enabled() and not part.value.requires_grad:
            raise ConfigurationError(
                "The loss has no gradient: it does not depend on any trainable parameter.\n"
                "Compute it from the model's output, without detach(), item() or no_grad()."
            )
        return part


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


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
            parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            return Part(no_samples(parameters), 1.0, 0.0)
        return self._objective(self.model, batch, num_samples)


class _NoSamples(torch.autograd.Function):
    """Zero, whose backward reaches every parameter and gives it no gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)  # type: ignore[attr-defined]
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grad: Tensor) -> tuple[None, ...]:
        num_parameters: int = ctx.num_parameters  # type: ignore[attr-defined]
        return (None,) * num_parameters


def no_samples(parameters: list[nn.Parameter]) -> Tensor:
    """Return zero as the loss of no samples.

    A rank whose part of the last global batch is empty must still take part in the collectives of the backward pass.
    Running the model on a made-up sample would move its batch-norm statistics and random state, and zero times a loss
    that is not finite is no zero; this touches neither, and each parameter's hooks run all the same.
    """
    loss: Tensor = _NoSamples.apply(*parameters)  # type: ignore[no-untyped-call]
    return loss


# What happens to the gradient between backward and the optimizer: one division, one norm, one clip.


class Gradients(ABC):
    """The gradient of a whole model, which backward has left behind. Abstract; a strategy says which kind it leaves."""

    @abstractmethod
    def norm(self) -> Tensor:
        """Return the Euclidean norm of all gradients together, a 0-dimensional tensor. Does not block."""

    @abstractmethod
    def multiply_(self, factor: Tensor) -> None:
        """Multiply all gradients in place by a 0-dimensional tensor. Does not block."""

    @abstractmethod
    def is_finite(self, norm: Tensor) -> bool:
        """Return whether all gradients are finite, the same on every rank. Blocks on CUDA.

        Args:
            norm: What `norm` returned for these gradients, or that times something finite.
        """

    @abstractmethod
    def expect_norm(self) -> None:
        """Compute what `norm` needs as early as can be, from now on."""


@final
class ParameterGradients(Gradients):
    """Gradients parameter by parameter: the same bits on every rank that has them, so all come to the same verdict.

    Args:
        model: The bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def _all(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    @override
    def expect_norm(self) -> None:
        """Do nothing: there is no earlier."""

    @override
    def norm(self) -> Tensor:
        return global_norm(self._all())

    @override
    def multiply_(self, factor: Tensor) -> None:
        multiply_(self._all(), factor)

    @override
    def is_finite(self, norm: Tensor) -> bool:
        return are_finite(self._all(), norm)


@final
class BucketGradients(Gradients):
    """Gradients bucket by bucket, as our `DistributedDataParallel` leaves them: the same bits on every rank.

    So every rank comes to the same verdict on its own; see `are_finite` for ranks that compute differently.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model

    @override
    def expect_norm(self) -> None:
        self.model.flat_gradients.compute_norms_early()

    @override
    def norm(self) -> Tensor:
        return self.model.flat_gradients.norm()

    @override
    def multiply_(self, factor: Tensor) -> None:
        self.model.flat_gradients.multiply_(factor)

    @override
    def is_finite(self, norm: Tensor) -> bool:
        return are_finite(self.model.flat_gradients.tensors(), norm)


def global_norm(grads: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients together, a 0-dimensional tensor."""
    return combine_norms(list_norms(list(grads)))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that brings ``norm`` down to ``max_norm``, or one; the formula of ``clip_grad_norm_``."""
    factor: Tensor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return factor


# The end of a step: finish the gradient, set the learning rate, step the optimizer.


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


# The loss of a step over all ranks and micro-batches: what it sums to, and out of how many.


class StepMetrics:
    """Sums the parts of a step; the sum over the ranks travels while the last backward runs.

    Args:
        device: Where the sums are.
        group: The ranks that take part, or None if it is only this process.
        counts: Whether the losses of a step before were no means over samples; true from the first such one on.
    """

    def __init__(self, device: torch.device, group: Group | None, *, counts: bool = False) -> None:
        self._group = group
        self._sums = torch.zeros(6, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self._future: Future[Any] | None = None
        self._saw_means = self._saw_losses = False
        self.counts = counts

    def add(self, parts: list[Part]) -> None:
        """Add the losses of this process's shares of a micro-batch."""
        for part in parts:
            device = self._sums.device
            if part.is_mean:
                self._sums[1] += part.out_of
            else:
                self._sums[1] += torch.as_tensor(part.out_of).detach().to(device)
            self._sums[0] += part.value.detach().to(device, self._sums.dtype) * part.weight
            self._saw_means |= part.is_mean
            self._saw_losses |= not part.is_mean
            self.counts |= not part.is_mean

    def require_means(self) -> None:
        """Refuse losses that leave the gradient to be divided after backward.

        Raises:
            ConfigurationError: There were some, and the optimizer steps within backward.
        """
        if self._saw_losses:
            raise ConfigurationError(
                "With overlap_optimizer a loss must be a mean over samples, but the task returned a Loss: its gradient "
                "is divided by all ranks' count after backward.\nReturn the mean, or leave overlap_optimizer out."
            )

    def add_bad(self, num_samples: int) -> None:
        """Add the number of samples of this process that could not be read."""
        if num_samples:
            self._sums[2] += num_samples

    def add_wishes(self, *, stop: bool, failed: bool) -> None:
        """Add that this process wants the run to stop, or that something failed beside its steps."""
        if stop:
            self._sums[3] += 1
        if failed:
            self._sums[4] += 1

    def add_out_of_memory(self) -> None:
        """Add that this process ran out of memory."""
        self._sums[5] += 1

    @property
    def num_out_of_memory(self) -> int:
        """How many processes ran out of memory. Blocks until the sum over the ranks is there."""
        return int(self._sums[5].item())

    def start_sum(self) -> None:
        """Start to sum over the ranks, once all parts are in.

        Collective: every rank of the group. Does not block.
        """
        if self._group is not None:
            self._future = all_reduce_async(self._sums, group=self._group)

    def wait(self) -> None:
        """Block until the sum over the ranks is there (on CUDA: let the current stream wait)."""
        if self._future is not None:
            self._future.wait()

    def loss(self) -> Tensor:
        """Return the loss of the step, a 0-dimensional tensor; zero if nothing counted."""
        return self._sums[0] / self._count()

    @property
    def count(self) -> Tensor | None:
        """What the loss of the step is a mean over if that is not samples, 0-dimensional; None if it is."""
        return self._sums[1] if self.counts else None

    @property
    def notes(self) -> Tensor:
        """How many samples could not be read, how many processes want to stop, and on how many something failed."""
        return self._sums[2:5]

    def divisor(self, num_samples: int, *, may_miss: bool = False) -> Tensor | None:
        """Return what a gradient scaled by ``1 / num_samples`` has yet to be divided by, or None if that is one.

        A rank that saw no part cannot know, and divides in any case: by exactly one if the losses were means. So do
        all if samples ``may_miss``, for then only the counts say how many there were.
        """
        if self._saw_means and not self._saw_losses and not may_miss:
            return None
        return self._count() / num_samples

    def _count(self) -> Tensor:
        count = self._sums[1]
        return torch.where(count > 0, count, torch.ones_like(count))


# The random numbers of a training run: set from the position before each thing that draws any.

INIT, FORWARD, DATA, UPDATE = 3, 4, 7, 8
"""Keep the bits for initial weights, dropout, made-up data and the optimizer apart from what else the seed is for."""


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

    def share(self, step: int, index: int, share: int, device: torch.device) -> None:
        """Give one share random numbers of its own, on the CPU and on its device."""
        self.all(FORWARD, step, index, share, device=device)


# What settings ask of the engine, and how its gradients become an update.

_OURS = ("ddp",)


def check_engine(name: StrategyName, settings: Settings) -> None:
    """Refuse what only our DistributedDataParallel does with another strategy.

    Raises:
        ConfigurationError: Names the setting.
    """
    given = {
        "wire": settings.wire is not None,
        "bucket_cap_mb": settings.bucket_cap_mb is not None,
        "overlap_optimizer": settings.overlap_optimizer,
    }
    for setting, is_given in given.items():
        if is_given and name not in _OURS:
            raise ConfigurationError(
                f"{setting} is for strategy {' or '.join(_OURS)}, but the strategy is {name}.\nLeave {setting} out."
            )


def our_wrapper(settings: Settings) -> Callable[..., nn.Module]:
    """Return what wraps a model as ``settings`` say."""
    from lockstep.parallel.ddp.wrapper import DistributedDataParallel

    return partial(DistributedDataParallel, wire_dtype=settings.wire, bucket_cap_mb=settings.bucket_cap_mb)


def gradients_of(module: nn.Module) -> Gradients:
    """Return the gradients that a wrapper, ours or torch's, leaves alike on every rank."""
    from lockstep.parallel.ddp.wrapper import DistributedDataParallel

    return BucketGradients(module) if isinstance(module, DistributedDataParallel) else ParameterGradients(module)


def is_ours(module: nn.Module) -> bool:
    """Return whether a wrapper is our `DistributedDataParallel`, and not torch's."""
    from lockstep.parallel.ddp.wrapper import DistributedDataParallel

    return isinstance(module, DistributedDataParallel)


def watch_part(module: nn.Module) -> Callable[[], bool]:
    """Return what tells whether this rank's part of the last gradient was not finite, if the wrapper is ours."""
    from lockstep.parallel.ddp.wrapper import DistributedDataParallel

    return module.monitor_local_gradients() if isinstance(module, DistributedDataParallel) else nobody_knows


def nobody_knows() -> bool:
    """Return that nothing is known of a rank's part of the gradient."""
    return False


def make_updater(
    model: nn.Module, optimizer: Optimizer, learning_rate: LearningRate, settings: Settings, gradients: Gradients
) -> Updater:
    """Return what ends a step, and let the optimizer step within backward if ``settings`` say so.

    Raises:
        ConfigurationError: That optimizer cannot.
    """
    if settings.overlap_optimizer:
        assert isinstance(gradients, BucketGradients), "checked when the strategy was made"
        gradients.model.overlap_optimizer(optimizer)
    return Updater(
        model,
        optimizer,
        learning_rate,
        clip=settings.clip,
        scaler=GradScaler() if settings.precision == "fp16" else None,
        gradients=gradients,
        in_backward=settings.overlap_optimizer,
        looks_later=settings.on_nan == "raise" and next(model.parameters()).device.type == "cuda",
    )


def leave_alone(model: nn.Module) -> None:
    """Keep synchronised layers from waiting for ranks that do not train the model; there may be a group of them."""
    from lockstep.parallel.sync_batchnorm import SyncBatchNorm

    for layer in model.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.alone = True


def torch_data_parallel(model: nn.Module, devices: Sequence[torch.device]) -> nn.Module:
    """Return torch's DataParallel around ``model``.

    Raises:
        ConfigurationError: A device is no GPU.
    """
    if any(device.type != "cuda" for device in devices):
        raise ConfigurationError(
            "Strategy torch-dp needs CUDA devices: torch.nn.DataParallel does nothing on CPUs.\n"
            "Use strategy dp, which runs on CPUs too."
        )
    return nn.DataParallel(model, device_ids=[device.index for device in devices])


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory left, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def explain_out_of_memory(
    error: BaseException, micro: MicroBatch, accumulate: int, devices: Sequence[torch.device]
) -> None:
    """Turn an out-of-memory error of forward or backward into one that says what this process has, and what to try.

    The memory of the other ranks is in the launcher's report: they wait in a collective by now, and cannot be asked.

    Raises:
        OutOfMemory: It was one.
    """
    if not is_out_of_memory(error):
        return
    size = max(micro.sizes, default=0)
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    advice = (
        f"Try micro-batches of {(size + 1) // 2} samples: accumulate={2 * accumulate} (--accumulate {2 * accumulate})"
    )
    if size <= 1:
        advice = "Use a smaller model, shorter samples, more devices, or a strategy that divides the state (fsdp)"
    raise OutOfMemory(
        f"Out of memory in step {micro.step + 1}, in a micro-batch of {size} sample{'s' * (size != 1)}: {cause}\n"
        f"This rank has {describe_memory(devices)}.\n{advice}{': the training stays the same' * (size > 1)}."
    ) from error


def describe_memory(devices: Sequence[torch.device]) -> str:
    """Return how much memory this process has, on its devices and on the host."""
    host = psutil.virtual_memory()
    rss = psutil.Process().memory_info().rss
    on_host = f"{_gib(rss)} of the host's {_gib(host.total)}, of which {_gib(host.available)} are free"
    parts = []
    for device in devices if devices[0].type == "cuda" else ():
        free, total = torch.cuda.mem_get_info(device)
        mine = torch.cuda.memory_allocated(device)
        parts.append(f"{_gib(mine)} in tensors on {device}, where {_gib(free)} of {_gib(total)} are free")
    return "; ".join([*parts, on_host])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
