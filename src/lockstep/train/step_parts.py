"""The parts of a training step: loss, learning rate, gradient, sums over the ranks, average, random numbers, memory."""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, final

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lockstep.base import activity
from lockstep.base.accelerator import upload
from lockstep.base.activity import format_bytes, plural
from lockstep.base.torch_internals import TorchDispatchMode, local_scalar_dense, mark_stepped, version_of
from lockstep.checkpoints.model_state import plain_name, read_tensors
from lockstep.comm.collectives import Group, Work, all_reduce, all_reduce_work, takes_pieces
from lockstep.comm.fully_shard import local_part
from lockstep.comm.network import wait_for_call
from lockstep.data.loader import MicroBatch
from lockstep.data.order import Purpose, mix, seed_cpu, seed_device
from lockstep.errors import ConfigurationError, OutOfMemory
from lockstep.health.heartbeat import device_memory
from lockstep.parallel.flat import are_finite, combine_norms, list_norms, multiply_
from lockstep.parallel.zero.optimizer import norm_of_shards
from lockstep.telemetry.resources import says_out_of_memory
from lockstep.train.settings import Precision, Scaling, Schedule
from lockstep.train.task import Loss, Task, required_by

# --- mixed precision --------------------------------------------------------------------------------------------------

_AUTOCAST_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context of a forward pass, for the calling thread."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_AUTOCAST_DTYPES[precision])


@dataclass
class GradScaler:
    """Loss scaling: a factor on the loss that keeps fp16 gradients in range.

    It is halved after an overflow, and doubled after `growth_interval` steps without one. It is a power of two, so it
    does not round gradients. It depends only on whether the *global* gradient was finite, so it is the same on all
    ranks.
    """

    scale: float = 2.0**16
    num_good_steps: int = 0
    growth_interval: int = 2000

    def update(self, *, finite: bool) -> None:
        """Update the scale after a step whose gradient was ``finite`` or not."""
        self.num_good_steps += 1
        if not finite:
            self.scale, self.num_good_steps = max(self.scale / 2, 1.0), 0
        elif self.num_good_steps == self.growth_interval:
            self.scale, self.num_good_steps = min(self.scale * 2, 2.0**24), 0


# --- the loss ---------------------------------------------------------------------------------------------------------


_RETURN = "Return its mean over the batch, or Loss(total, count)."


class Part(NamedTuple):
    """The loss of one micro-batch: it adds ``value * weight`` to the total and ``out_of`` to the count of the step.

    For a mean over samples, weight and count are the number of samples. A `Loss` has weight 1 and its own count.
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
            ConfigurationError: It is not a 0-dimensional tensor, or has no gradient.
        """
        with autocast(self.precision, next(model.parameters()).device):
            result: object = self.task.loss(model, batch)
        if isinstance(result, Loss):
            part = Part(result.total, 1.0, torch.as_tensor(result.count))
        elif isinstance(result, Tensor):
            part = Part(result, float(num_samples), float(num_samples))
        else:
            raise ConfigurationError(f"The loss returned a {type(result).__name__}, not a tensor.\n{_RETURN}")
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

    With every engine the loss gets the model without wrappers: it may use its attributes and call it several times.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective = objective

    def forward(self, batch: object, num_samples: int) -> Part:
        """Return the loss on ``batch``; without samples, a loss that depends on every parameter without a gradient."""
        if num_samples == 0:
            # A rank whose part of the batch is empty must take part in the collectives of backward. A forward on an
            # invented sample would change batch-norm statistics and random state, and zero times a loss that is not
            # finite is not zero. This loss avoids both, and the hooks of all parameters run.
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            return Part(_NoSamples.apply(*trained), 1.0, 0.0)  # type: ignore[no-untyped-call]
        return self._objective(self.model, batch, num_samples)


class _NoSamples(torch.autograd.Function):
    """Zero, whose backward reaches every parameter without a gradient."""

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
        scale: Factor from the global batch size; see `batch_scale`.
        warmup: Steps over which the factor rises linearly, from ``1 / warmup`` of its value.
        num_steps: Steps of the run, over which the factor decays.
        decay: The kind of decay, or a function from ``(step, num_steps)`` to the factor, or one that `makes_scheduler`.
    """

    scale: float
    warmup: int
    num_steps: int
    decay: Schedule | Callable[..., Any]

    def factor(self, step: int) -> float:
        """Return the factor at optimizer step ``step``, counted from 0."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if callable(self.decay):
            return self.scale * warm * float(self.decay(step, self.num_steps))
        if self.decay == "constant" or step < self.warmup:
            return self.scale * warm
        done = min(1.0, (step - self.warmup) / max(1, self.num_steps - self.warmup))
        return self.scale * warm * (1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))


def batch_scale(rule: Scaling, batch_size: int, base_batch_size: int) -> float:
    """Return the factor of learning-rate scaling for a global batch size that differs from the base batch size.

    Source: linear from Goyal et al. 2017 (arXiv:1706.02677), square root from Krizhevsky 2014 (arXiv:1404.5997).
    """
    ratio = batch_size / base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def _mark(value: Any) -> Any:
    """Return a number, or for a tensor what changes with it: its value would have to be waited for on a device."""
    return (id(value), version_of(value)) if isinstance(value, Tensor) else value


def _marks(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the numbers of each param group, to notice what changes."""
    return [
        {key: _mark(value) for key, value in group.items() if isinstance(value, int | float | tuple) or key == "lr"}
        for group in optimizer.param_groups
    ]


def _check_groups(optimizer: Optimizer, num_before: int) -> None:
    if (number := len(optimizer.param_groups)) != num_before:
        raise ConfigurationError(
            f"The optimizer has {number} param groups, but had {num_before} when the training began.\n"
            "Make all of them in Task.optimizer."
        )


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a number of a param group; a tensor is updated in place."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


@final
class Rates:
    """Sets the rates of ``optimizer``: each group's base rate times the factor of ``rate``.

    A rate that a callback sets, or the optimizer in its step, holds: it changes the base rate, and the schedule goes
    on from there.
    """

    def __init__(self, rate: LearningRate, optimizer: Optimizer) -> None:
        self._rate, self._optimizer, self._factor = rate, optimizer, 1.0
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._set, self._seen = list(self._base), self._read()

    def _read(self) -> list[Any]:
        return [_mark(group["lr"]) for group in self._optimizer.param_groups]

    def advance(self, num_updates: int) -> None:
        """Set the rates for the update after ``num_updates``.

        Raises:
            ConfigurationError: A param group was added.
        """
        self._adopt()
        factor = self._rate.factor(num_updates)
        if factor != self._factor:
            self._apply(factor)

    def _adopt(self) -> None:
        """Adopt the rates that something else has set."""
        if (now := self._read()) == self._seen:
            return
        _check_groups(self._optimizer, len(self._seen))
        for place, group in enumerate(self._optimizer.param_groups):
            if now[place] != self._seen[place] and (value := float(group["lr"])) != self._set[place]:
                self._base[place], self._set[place] = value / (self._factor or 1.0), value
        self._seen = now

    def _apply(self, factor: float) -> None:
        self._factor = factor
        for place, group in enumerate(self._optimizer.param_groups):
            value, rate = self._base[place] * factor, group["lr"]
            _put(group, "lr", value)
            self._set[place] = value if not isinstance(rate, Tensor) else float(torch.tensor(value, dtype=rate.dtype))
        self._seen = self._read()

    def add_loss(self, step: int, loss: float) -> None:
        """Do nothing: this schedule needs no losses."""

    def state_dict(self) -> dict[str, Any]:
        """Return base rates, factor, and the rates of the last update."""
        self._adopt()
        return {"rates": [list(self._base), self._factor, list(self._set)]}

    def load_state_dict(self, state: Mapping[str, Any], *, keeps_rates: bool) -> None:
        """Continue from the state of a run, whose param groups have been loaded; see `TorchScheduler`."""
        if keeps_rates and "rates" in state:
            base, self._factor, then = state["rates"]
            self._base, self._set, self._seen = list(base), list(then), self._read()
        else:
            self._apply(self._rate.factor(state["num_updates"] - 1) if state["num_updates"] else 1.0)


def makes_scheduler(schedule: object) -> bool:
    """Return whether ``schedule`` is a function from the optimizer to a scheduler of torch."""
    return callable(schedule) and required_by(schedule)[:1] == ["optimizer"]


@final
class TorchScheduler:
    """A scheduler of torch that the task makes, stepped once for each update or evaluation.

    [Note: a scheduler is made again]
    Its state is not in a checkpoint. A run that resumes makes the scheduler again, and steps it as often as before: the
    bits are the same, and other arguments, such as more steps, have their effect. A state that is loaded would keep the
    old ones, and `OneCycleLR` would raise an error after its old number of steps. It may change any number of a param
    group, so all begin again, and what a callback or the optimizer has set in between is set again in its place: the
    newest of each number, as they are not added.

    Args:
        rate: Of the run; its `decay` makes the scheduler.
        optimizer: Its rates are multiplied by ``rate.scale`` before.
        evaluates: Whether there are losses for a `ReduceLROnPlateau`.

    Raises:
        ConfigurationError: The task makes no scheduler, or one that needs an evaluation.
    """

    def __init__(self, rate: LearningRate, optimizer: Optimizer, *, evaluates: bool) -> None:
        self._rate, self._optimizer, self._evaluates = rate, optimizer, evaluates
        begin = zip(_marks(optimizer), optimizer.param_groups, strict=True)
        self._begin = [{key: copy.deepcopy(group[key]) for key in marks} for marks, group in begin]
        self._restart(0, {}, [])

    def _restart(self, num_done: int, losses: Mapping[int, float], changed: list[list[Any]]) -> None:
        """Make the scheduler again, for the numbers that the optimizer began with, and step it as often."""
        groups, make = self._optimizer.param_groups, self._rate.decay
        loaded = [dict(group) for group in groups]
        for group, begin in zip(groups, self._begin, strict=True):
            group.update(copy.deepcopy(begin))  # a rate may be a tensor
            _put(group, "lr", float(group["lr"]) * self._rate.scale)
            if "initial_lr" in group:  # of a scheduler before, which this one would take; its place shows in a checksum
                group["initial_lr"] = copy.deepcopy(group["lr"])
        assert callable(make)
        made: object = make(*(self._optimizer, self._rate.num_steps)[: len(required_by(make))])
        if not isinstance(made, LRScheduler):
            raise ConfigurationError(
                f"Task.schedule, which takes the optimizer, returned a {type(made).__name__}, not a scheduler.\n"
                "Return a torch.optim.lr_scheduler.LRScheduler or ReduceLROnPlateau."
            )
        if isinstance(made, ReduceLROnPlateau) and not self._evaluates:
            raise ConfigurationError(
                "Task.schedule returned a ReduceLROnPlateau, which needs the loss of evaluations.\n"
                "Add eval_dataset=... to the task, or use another scheduler."
            )
        mark_stepped(self._optimizer)  # in the run that is resumed
        self._made, self._num_done, self._losses = made, 0, dict[int, float]()
        # What else was set in a param group: by its number and a name, the number of steps before, and the value.
        self._changed = dict[tuple[int, str], tuple[int, Any]]()
        self._seen = _marks(self._optimizer)
        for replay in [partial(self.advance, number + 1) for number in range(num_done)] + [
            partial(self.add_loss, *loss) for loss in losses.items()
        ]:
            self._change(changed)
            replay()
        self._change(changed)
        self._note_changes()
        # What the scheduler has left alone, the optimizer may have counted or adapted: as in the run that is resumed.
        for group, before, begin in zip(groups, loaded, self._begin, strict=True):
            group.update({key: before[key] for key in begin if key != "lr" and group[key] == begin[key]})
        self._seen = _marks(self._optimizer)

    def _change(self, changed: list[list[Any]]) -> None:
        for place, key, time, value in changed:
            if time == self._time:
                _put(self._optimizer.param_groups[place], key, value)

    def _note_changes(self) -> None:
        """Note what a callback or the optimizer has set since the last step of the scheduler."""
        _check_groups(self._optimizer, len(self._seen))
        before, self._seen = self._seen, _marks(self._optimizer)
        for place, (then, now) in enumerate(zip(before, self._seen, strict=True)):
            for key in (key for key, mark in now.items() if then.get(key) != mark):
                value = self._optimizer.param_groups[place][key]
                self._changed[place, key] = self._time, float(value) if isinstance(value, Tensor) else value

    @property
    def _time(self) -> int:
        """Number of steps of the scheduler."""
        return self._num_done + len(self._losses)

    def _step(self, *loss: Any) -> None:
        self._note_changes()
        self._made.step(*loss)
        self._seen = _marks(self._optimizer)

    def advance(self, num_updates: int) -> None:
        """Set the options of the optimizer for the update after ``num_updates``."""
        while self._num_done < num_updates and not isinstance(self._made, ReduceLROnPlateau):
            self._step()
            self._num_done += 1

    def add_loss(self, step: int, loss: float) -> None:
        """Step a `ReduceLROnPlateau` by the loss of the evaluation after ``step`` steps, unless it was."""
        if isinstance(self._made, ReduceLROnPlateau) and step not in self._losses:
            self._step(loss)
            self._losses[step] = loss

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the losses of evaluations by step, and what else was set, and when."""
        self._note_changes()
        changed = [[*where, *what] for where, what in self._changed.items()]
        return {"scheduler": [self._num_done, dict(self._losses), changed]}

    def load_state_dict(self, state: Mapping[str, Any], *, keeps_rates: bool) -> None:
        """Continue from the state of a run.

        Args:
            state: Of the trainer. If that run had another schedule, this one has its place from the next update on.
            keeps_rates: Whether rates that were set in that run hold; not if the task has others now.
        """
        num_done, losses, *changed = state.get("scheduler") or (state["num_updates"], {})
        self._restart(num_done, losses, [each for each in chain(*changed) if keeps_rates or each[1] != "lr"])


# --- the gradient -----------------------------------------------------------------------------------------------------


@final
class GradientList:
    """Gradients as separate tensors: the same on every rank, or each rank's shards.

    Args:
        read: Returns this rank's gradients.
        like: A parameter, for device and dtype of the norm of shards.
        group: The ranks that have the other shards; None: the gradients are the same on every rank.
    """

    def __init__(self, read: Callable[[], list[Tensor]], like: Tensor, group: Group | None = None) -> None:
        self._read, self._like, self._group = read, like, group

    def norm(self) -> Tensor:
        """Return the Euclidean norm of all, a 0-dimensional tensor. Collective with shards: every rank."""
        if self._group is None:
            return combine_norms(list_norms(self._read()))
        return norm_of_shards(self._read(), self._like, group=self._group)

    def multiply_(self, factor: Tensor) -> None:
        """Multiply this rank's gradients in place by a 0-dimensional tensor. Does not block."""
        multiply_(self._read(), factor)

    def is_finite(self, norm: Tensor) -> bool:
        """Return whether all are finite, the same on every rank. Blocks on CUDA.

        Collective with shards if the norm is not finite: every rank.

        Args:
            norm: The result of `norm` for these gradients, or its product with a finite factor.
        """
        is_finite = are_finite(self._read(), norm)
        if self._group is None or math.isfinite(float(norm)):
            return is_finite
        flag = torch.tensor([is_finite], device=self._like.device).int()
        all_reduce(flag, group=self._group, op="min")
        return bool(flag)


# --- sums over the ranks ----------------------------------------------------------------------------------------------

NUM_FLAGS = 8  # see `Reports.flags`


@dataclass
class StepMetrics:
    """Sums the loss of a step, and flags of the ranks, over micro-batches and ranks.

    Args:
        device: Device of the sums.
        group: The ranks that take part; None: only this process.
        dtype: Dtype of the sums.
        has_counts: Whether a loss of a previous step was a `Loss`.
        only_means: Whether a `Loss` is refused, because the gradient cannot be divided after backward.

    Attributes:
        loss: After `wait`: loss of the global batch, 0-dimensional; zero if the count is zero.
        count: Number of items, such as tokens, that the loss is a mean over, 0-dimensional; None: of samples.
        divisor: The remaining divisor of a gradient that was divided by the number of samples; None: one.
        flags: Numbers of unreadable samples, of ranks that request to stop, on which something failed, whose callbacks
            request the end of the run or a checkpoint, and that compare a number; the sum of these numbers, and that of
            their squares.
        report: The flags, and one more element for the norm of the gradient: what the host reads of a step.
    """

    device: torch.device
    group: Group | None
    dtype: torch.dtype
    has_counts: bool
    only_means: bool

    def __post_init__(self) -> None:
        self._parts: list[Part] = []
        self._sums: Tensor | None = None
        self._work: Work | None = None

    def add(self, parts: Sequence[Part], flags: Sequence[float] | None) -> list[Tensor]:
        """Add the losses of this process's shares of a micro-batch; return their values.

        With the ``flags`` of this rank, after the last micro-batch, start to sum over the ranks; on shm `wait` does it.
        Collective then: every rank of the group. Does not block.

        Raises:
            ConfigurationError: One is a `Loss`, and ``only_means`` is set.
        """
        if self.only_means and any(isinstance(part.out_of, Tensor) for part in parts):
            raise ConfigurationError(
                "With overlap_optimizer a loss must be a mean over samples, but the task returned a Loss, whose "
                "gradient is divided by the count of all ranks after backward.\n"
                "Return the mean, or omit overlap_optimizer."
            )
        values = [part.value.detach() for part in parts]
        self._parts += [part._replace(value=value) for part, value in zip(parts, values, strict=True)]
        # A signal reaches the ranks in different steps, and a checkpoint is written in the background. The flags are
        # sent with the sums of the losses, during the last backward. So all ranks react after the same step, and no
        # additional exchange is needed.
        if flags is not None:
            self._sums = self._sum(flags)
            # On shm the sum is made in `wait`, when the ranks have met for the gradient: there it takes microseconds.
            # Begun here, it would wait for the slowest forward in another thread, and the gradient's sum after it.
            if self.group is not None and not takes_pieces(self.group):
                self._work = all_reduce_work(self._sums, group=self.group)
        return values

    def _sum(self, flags: Sequence[float]) -> Tensor:
        """Return total and count of the loss, and the report: what the host knows in one copy, a kernel for a loss."""
        counts = [part.out_of.detach() for part in self._parts if isinstance(part.out_of, Tensor)]
        on_host = [part.out_of for part in self._parts if isinstance(part.out_of, float)]
        on_host += [float(count) for count in counts if count.is_cpu]
        sums = upload([0.0, sum(on_host), *flags, 0.0], self.dtype, self.device)
        for value, weight, _ in self._parts:
            sums[0].add_(value if value.is_cpu else value.to(self.device), alpha=weight)
        for count in counts:
            if not count.is_cpu:
                sums[1].add_(count.to(self.device))
        self.has_counts |= bool(counts)
        return sums

    def wait(self, num_samples: float, *, may_miss: bool) -> None:
        """Set the sums over the ranks. Blocks until they are complete (on a device: only the current stream waits).

        Collective after `add` with flags: every rank of the group.

        Args:
            num_samples: Samples of the global batch, by which the gradient was already divided.
            may_miss: Whether some of them may be missing, so that the divisor follows from the counts.
        """
        if self.group is not None and self._sums is not None:
            with activity.waiting("all_reduce of losses"):
                wait_for_call(self._work or all_reduce_work(self._sums, group=self.group, alone=True))
        sums = self._sum([0] * NUM_FLAGS) if self._sums is None else self._sums
        self.flags, self.report = sums[2:-1], sums[2:]
        self.count = sums[1] if self.has_counts else None
        # A rank without samples does not know, and always divides; if the losses were means, by exactly one.
        if self._parts and not may_miss and all(isinstance(part.out_of, float) for part in self._parts):
            self.loss, self.divisor = sums[0] / num_samples, None
        else:
            count = torch.where(sums[1] > 0, sums[1], 1.0)
            self.loss, self.divisor = sums[0] / count, count / num_samples


# --- the exponential moving average of the weights, `Task.ema` --------------------------------------------------------


class AveragedWeights:
    """Averages the trained parameters of ``model`` as torch's ``AveragedModel`` does with ``get_ema_multi_avg_fn``.

    Not an ``AveragedModel``, which holds a second model: buffers and parameters that were never trained are those of
    ``model``, and of a sharded parameter each rank averages its shard. All ranks hold the same, so nothing is
    exchanged. A layer may be frozen in mid-training, and then its average approaches it; or unfrozen, from when on it
    is averaged, beginning with the weights that it had: until then they were equal to their average.

    [Note: when weights are averaged]
    The average follows each update, but not at once: parameters may still be gathered, and on a device the gradient is
    checked in the next step. So it is updated before the next update, or before it is used.

    Args:
        model: The model without wrappers.
        decay: Weight of the average so far in each update.
        applied_by: Returns a context in which the optimizer itself gives the parameters its averages; see
            [Note: modes] in `optimizers`. Then `update` copies them, when they are used.

    Attributes:
        values: By the names of the parameters; empty before the first update, which copies them.
        follows: Whether it has to be updated after each step.
        is_due: Whether parameters have changed since the last update.
        is_swapped: Whether the model has the averages, and ``values`` has its parameters.
    """

    def __init__(
        self, model: nn.Module, decay: float, applied_by: Callable[[], AbstractContextManager[None]] | None = None
    ) -> None:
        self._model, self._average = model, get_ema_multi_avg_fn(decay)
        self._applied_by, self.follows = applied_by, applied_by is None
        self.values: dict[str, Tensor] = {}
        self.is_due = self.is_swapped = False

    def _parameters(self) -> dict[str, Tensor]:
        return {plain_name(name): parameter for name, parameter in self._model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average if parameters have changed; if not, add those that are to be trained. Does not block."""
        if self._applied_by is not None:
            with self._applied_by():
                self.values = {name: parameter.clone() for name, parameter in self._parameters().items()}
            return
        parameters, averaged = self._parameters(), list(self.values)
        if self.is_due or averaged:
            new = {name: p for name, p in parameters.items() if p.requires_grad and name not in self.values}
            self.values |= {name: parameter.detach().clone() for name, parameter in new.items()}
        if self.is_due and averaged:
            averages = [local_part(self.values[name]) for name in averaged]
            self._average(averages, [local_part(parameters[name].detach()) for name in averaged], 0)
        self.is_due = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block, the model has the averages."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange parameters and averages, one after the other: the parameters stay where they are in memory."""
        self.is_swapped = not self.is_swapped
        parameters = self._parameters() if self.values else {}
        for name in self.values:
            parameter = parameters[name].detach()
            copy = parameter.clone()
            parameter.copy_(self.values[name])
            self.values[name].copy_(copy)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by name; those of tied parameters under each of their names."""
        names = {id(parameter): plain_name(name) for name, parameter in self._model.named_parameters()}
        every = self._model.named_parameters(remove_duplicate=False)
        return {plain_name(name): self.values[names[id(p)]] for name, p in every if names[id(p)] in self.values}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the averages of a checkpoint, or of another rank; without any, from the parameters."""
        averaged = {name: p.detach() for name, p in self._parameters().items() if self.follows and name in state}
        self.values = {name: p.clone().copy_(read_tensors(state[name], p)) for name, p in averaged.items()}
        self.is_due = False


# --- random numbers ---------------------------------------------------------------------------------------------------


class Seeds:
    """Seeds the generators of this process and of its devices.

    Args:
        seed: Seed of the run.
        devices: Devices of this process, by share.
        shares: Shares of a global batch that this process computes.
    """

    def __init__(self, seed: int, devices: Sequence[torch.device], shares: range) -> None:
        self._seed, self._devices, self._shares = seed, devices, shares
        self._on_device = devices[0].type != "cpu"  # the generator of the CPU belongs to the process

    def all(self, *purpose: int, device: torch.device | None = None) -> None:
        """Seed all generators for ``purpose``, the same on every rank."""
        value = mix(self._seed, *purpose)
        seed_cpu(value)
        if self._on_device:
            seed_device(device or self._devices[0], value)

    def forward(self, micro: MicroBatch, index: int) -> None:
        """Seed the generators for a micro-batch; different for each step, micro-batch and share."""
        position = (self._seed, Purpose.FORWARD, micro.step, index)
        seed_cpu(mix(*position, self._shares.start))
        if self._on_device:
            for share, device in zip(self._shares, self._devices, strict=False):
                seed_device(device, mix(*position, share))


# [Note: dropout of recurrent layers]
# cuDNN keeps random state of its own for them. The first such layer after the device was seeded makes it again, from a
# number that torch draws on the device and reads, so the host would wait in each forward. Without seeding, that state
# would not follow from the position in the run. So the host computes the number itself, from the state of the generator
# after the draw, which it knows. Source: get_dropout_state in ATen/native/cudnn/RNN.cpp, and the callers of
# no_reset_rnn_state_.clear() in ATen/cuda/CUDAGeneratorImpl.cpp: each way to set seed, offset or state.


class _SeedOnHost(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is local_scalar_dense and not args[0].is_cpu:
            state = torch.get_device_module(args[0].device).get_rng_state(args[0].device)
            return mix(*state.view(torch.int64).tolist())
        return func(*args, **(kwargs or {}))


_running = threading.local()  # the layers of replicas run in threads


def _enter(_layer: nn.Module, _inputs: Any) -> None:
    _running.mode = _SeedOnHost().__enter__()


def _leave(_layer: nn.Module, _inputs: Any, _output: Any) -> None:
    _running.mode.__exit__(None, None, None)


def seed_recurrent_on_host(model: nn.Module, device: torch.device) -> ExitStack:
    """Have recurrent layers with dropout seed cuDNN without a wait, until the result is closed; see the note above."""
    hooks = ExitStack()
    for layer in model.modules() if device.type != "cpu" else ():
        if isinstance(layer, nn.RNNBase) and layer.dropout > 0:
            hooks.callback(layer.register_forward_pre_hook(_enter, prepend=True).remove)
            hooks.callback(layer.register_forward_hook(_leave, always_call=True).remove)
    return hooks


# --- out of memory ----------------------------------------------------------------------------------------------------


def explain_one_sample(error: BaseException, micro: MicroBatch) -> None:
    """Turn batch norm's error about a single sample into one that says why there is one.

    Raises:
        ConfigurationError: ``error`` is this one.
    """
    if "Expected more than 1 value per channel" in str(error) and min(micro.sizes) == 1:
        raise ConfigurationError(
            f"A batch of {micro.num_global} samples leaves this rank one in step {micro.step + 1}, on which batch norm "
            f"cannot train: {error}\nOmit an incomplete last batch (drop_last=True in the task), choose another "
            "global_batch_size, or use nn.SyncBatchNorm."
        ) from error


def explain_out_of_memory(error: BaseException, micro: MicroBatch, accumulate: int) -> None:
    """Turn an out-of-memory error of forward or backward into one with the memory of this process and advice.

    The launcher's report has the memory of the other ranks: they wait in a collective now.

    Raises:
        OutOfMemory: ``error`` is an out-of-memory error.
    """
    is_raised_as_one = isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory)
    if not is_raised_as_one and not (isinstance(error, RuntimeError) and says_out_of_memory(str(error))):
        return
    size = max(micro.sizes, default=0)
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    double = 2 * accumulate
    advice = f"Try micro-batches of {(size + 1) // 2} samples: accumulate={double} (--accumulate {double})"
    if size <= 1:
        advice = "Use a smaller model, shorter samples, more devices, or a strategy that divides the state (fsdp)"
    host = psutil.virtual_memory()
    rss, total, free = map(format_bytes, (psutil.Process().memory_info().rss, host.total, host.available))
    memory = "; ".join([*device_memory(), f"{rss} of the host's {total}, of which {free} are free"])
    raise OutOfMemory(
        f"Out of memory in step {micro.step + 1}, in a micro-batch of {plural(size, 'sample')}: {cause}\n"
        f"This rank has {memory}.\n{advice}{': the training stays the same' * (size > 1)}."
    ) from error
