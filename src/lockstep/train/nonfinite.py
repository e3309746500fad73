"""Non-finite (NaN, infinite) gradients: detected by all ranks in the same step, with rank, module and samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.activity import format_ranks
from lockstep.comm.collectives import all_gather_object
from lockstep.comm.fully_shard import local_part, own_class
from lockstep.containers import find_tensors
from lockstep.data.loader import MicroBatch
from lockstep.errors import NonFiniteGradient
from lockstep.train.buffers import BufferSnapshot
from lockstep.train.plan import Plan
from lockstep.train.settings import NanRule
from lockstep.train.strategies.strategy import Strategy

_MOST_SAMPLES = 64
_MOST_IN_A_ROW = 5
# More bad steps than these, in a row or of the last steps, end the run with any rule.
_MOST_OF_LAST, _LAST = 10, 100

_ADVICE = (
    "Check these samples, the learning rate and the parameter's layer; or skip and count such steps: "
    'on_nan="skip" (--on-nan skip).'
)

# The micro-batches of a step on this process, each with the losses of its shares.
Computed = list[tuple[MicroBatch, list[Tensor]]]


class Origin(NamedTuple):
    """The first micro-batch of a rank whose loss or gradient is not finite.

    Args:
        rank: The rank.
        micro: The micro-batch, from 0; None: unknown, and ``samples`` are those of all micro-batches.
        samples: Its samples: indices in the data set; of a stream, positions in the global batch.
        faulty: The samples whose inputs are not finite.
        loss: The loss as text, if it is not finite.
        module: The first module, in the order of computation, whose output is not finite.
        parameter: The first parameter, in the order of the model, whose gradient is not finite.
    """

    rank: int
    micro: int | None
    samples: list[int]
    faulty: list[int]
    loss: str | None = None
    module: str | None = None
    parameter: str | None = None


class NonFiniteStep(NamedTuple):
    """A step whose gradient is not finite; the same on all ranks.

    Args:
        step: Counted from 0 over all epochs.
        epoch: Counted from 0; None for a stream.
        origins: The origins that the ranks found, in the order of the ranks.
        parameter: The first parameter whose gradient, summed over the ranks, is not finite, if known.
        num_ranks: Number of ranks that train together.
        num_micro: Number of micro-batches of a rank.
        again: Whether the step was computed again to check the outputs of all modules and the gradient.
    """

    step: int
    epoch: int | None
    origins: tuple[Origin, ...]
    parameter: str | None
    num_ranks: int
    num_micro: int
    again: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the origins."""
        return tuple(origin.rank for origin in self.origins)

    @property
    def first(self) -> str | None:
        """The first parameter: of the first of these ranks if known there."""
        return (self.origins[0].parameter if self.origins else None) or self.parameter

    @property
    def samples(self) -> list[int]:
        """The samples of the origin on the first of these ranks."""
        return (self.origins[0].faulty or self.origins[0].samples) if self.origins else []

    @property
    def headline(self) -> str:
        """Rank, parameter and step, in one line."""
        epoch = "" if self.epoch is None else f"epoch {self.epoch + 1}, "
        where = f" on {format_ranks(list(self.ranks))}" if self.ranks and self.num_ranks > 1 else ""
        first = f": first that of parameter {self.first}" if self.first else ""
        return f"The gradient is not finite{where} ({epoch}step {self.step + 1}){first}."

    @property
    def details(self) -> list[str]:
        """Lines about losses, modules and samples."""
        faulty = "a kernel is not deterministic, or a device or its memory is faulty"
        if not self.origins:
            if not self.again:
                return ["Every loss was finite, so the error arose in backward; the rank is not known."]
            overflow = "The sum over the ranks overflowed (compression=fp16?)"
            return [f"Recomputed, the gradient was finite on every rank. {overflow}, {faulty}."]
        origin = self.origins[0]
        lines = ["The loss was finite." if origin.loss is None else f"The loss was {origin.loss}."]
        if origin.module is not None:
            lines[0] += f" The first module whose output is not finite is {origin.module}."
        elif origin.loss is None and self.again and origin.parameter is None:
            lines[0] = f"Recomputed, the gradient was finite: {faulty}."
        elif origin.loss is None:
            lines[0] = "The loss was finite: the error arose in backward."
        which = "batch" if self.num_micro == 1 else "step"
        if self.num_micro > 1 and origin.micro is not None:
            which = f"micro-batch {origin.micro + 1} of {self.num_micro}"
        on = f" of rank {origin.rank}" if self.num_ranks > 1 else ""
        noun = "Samples" if self.epoch is not None else "Positions in the global batch"
        lines.append(f"{noun} of that {which}{on}: {_format_samples(origin.samples)}.")
        if origin.faulty:
            lines.append(f"Not finite in the input: {_format_samples(origin.faulty)}.")
        for other in self.origins[1:]:
            what = f"{noun.lower()} {_format_samples(other.samples)}"
            lines.append(f"On rank {other.rank} too: first parameter {other.parameter or self.parameter}, {what}.")
        return lines


def _format_samples(numbers: Sequence[int]) -> str:
    """Return the first ``numbers`` as text."""
    rest = len(numbers) - _MOST_SAMPLES
    return ", ".join(map(str, numbers[:_MOST_SAMPLES])) + (f", and {rest} more" if rest > 0 else "")


@dataclass
class NonFiniteGuard:
    """Refuses steps whose gradient is not finite, and finds the origin.

    Args:
        rule: Whether to raise an error or to skip the step.
        model: The model without wrappers.
        optimizer: The optimizer of its parameters.
        strategy: The strategy.
        plan: The plan of the run.
        replay: Computes a micro-batch again, leaves its gradient in ``param.grad`` and returns the losses. Collective.

    Attributes:
        found: The bad steps, oldest first.
        buffers: Those of the model when the step began, which a skipped step must not change; None: steps are not
            skipped.
    """

    rule: NanRule
    model: nn.Module
    optimizer: Optimizer
    strategy: Strategy
    plan: Plan
    replay: Callable[[MicroBatch, int], list[Tensor]]
    found: list[NonFiniteStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffers = BufferSnapshot(self.model) if self.rule == "skip" else None

    def refuse(self, computed: Computed, step: int, *, is_over: bool) -> None:
        """Apply the rule to a step whose gradient is not finite.

        Collective: every rank. Blocks.

        Args:
            computed: The micro-batches of this process.
            step: Counted from 0.
            is_over: Whether the update is over, and maybe the next forward, so that nothing can be computed again.

        Raises:
            NonFiniteGradient: On every rank: the rule is to raise, or there were too many such steps.
        """
        # A refused step has not changed the parameters, and random numbers depend only on the position. So its
        # micro-batches can be computed again one by one, with a check of the output of every module. This costs nothing
        # in normal steps. If the update is over (an optimizer in backward; on a device, where the check comes a forward
        # later), or the engine cannot compute without the other ranks (fsdp), the only information is the losses, and
        # whether this rank's part of the gradient was finite before the reduction.
        bad = self._describe(computed, step, is_over=is_over)
        self.found.append(bad)
        if not is_over or self.rule == "raise":
            self.optimizer.zero_grad(set_to_none=True)
        if self.rule == "raise":
            raise NonFiniteGradient("\n".join([bad.headline, *bad.details, _ADVICE]), step=step, ranks=bad.ranks)
        self._check_number(step)
        if self.buffers is not None and not is_over:  # otherwise the trainer has
            self.buffers.restore()

    def _check_number(self, step: int) -> None:
        steps = [bad.step for bad in self.found]
        recent = sum(step - _LAST < each for each in steps)
        if steps[-_MOST_IN_A_ROW - 1 :] == list(range(step - _MOST_IN_A_ROW, step + 1)):
            number = f"{_MOST_IN_A_ROW + 1} steps in a row"
        elif recent > _MOST_OF_LAST:
            number = f"{recent} of the last {min(_LAST, step + 1)} steps"
        else:
            return
        last = self.found[-1]
        lines = [
            f"{number} had a gradient that is not finite, which is too many to skip.",
            f"The last of them: {last.headline}",
            *last.details,
            "Decrease the learning rate, clip the gradient (--clip), or correct the data or the loss.",
        ]
        raise NonFiniteGradient("\n".join(lines), step=last.step, ranks=last.ranks)

    def _describe(self, computed: Computed, step: int, *, is_over: bool) -> NonFiniteStep:
        """Return the description of a bad step from all ranks. Collective: every rank. Blocks."""
        replays = self.strategy.can_replay and not is_over
        group = self.strategy.step_group
        rank = 0 if group is None else group.rank()
        names = [name for name, _ in self.model.named_parameters()]
        # Before a replay replaces the gradients. After an update, they may be gone, but show in the parameters.
        summed = _first_not_finite(self.model, in_values=is_over)
        is_suspect = self.strategy.part_was_bad is not None and self.strategy.part_was_bad()
        origin: Origin | None = None
        for index, (micro, losses) in enumerate(computed):
            module = parameter = None
            if replays:  # all, although the first bad one is sufficient: synchronised layers need every rank
                self.optimizer.zero_grad(set_to_none=True)
                with _watching_outputs(self.model) as bad_outputs:
                    losses = self.replay(micro, index)
                module = bad_outputs[0] if bad_outputs else None
                parameter = _first_not_finite(self.model)
            values = [float(loss) for loss in losses]
            bad = [share for share, value in enumerate(values) if not math.isfinite(value)]
            if origin is None and (parameter is not None or bad):
                wrong = bad if bad and len(values) == len(micro.samples) else range(len(micro.samples))
                samples = [sample for share in wrong for sample in micro.samples[share].tolist()]
                faulty = [sample for sample in _faulty_inputs(micro) if sample in samples]
                loss = str(values[bad[0]]) if bad else None
                origin = Origin(rank, index, samples, faulty, loss, module, parameter)
        if is_suspect and origin is None:  # every loss was finite, so any sample of the step may be the origin
            samples = [sample for micro, _ in computed for share in micro.samples for sample in share.tolist()]
            faulty = [sample for micro, _ in computed for sample in _faulty_inputs(micro)]
            origin = Origin(rank, 0 if len(computed) == 1 else None, samples, faulty)
        first = None if summed is None else names.index(summed)
        ranks: list[Any] = [[origin, first]]
        if group is not None:
            device = next(self.model.parameters()).device
            ranks = all_gather_object(ranks[0], group=group, device=device)
        firsts = [first for _, first in ranks if first is not None]
        per_epoch = self.plan.order.steps_per_epoch
        epoch = None if per_epoch is None else step // per_epoch
        origins = tuple(Origin(*origin) for origin, _ in ranks if origin is not None)
        parameter = names[min(firsts)] if firsts else None
        return NonFiniteStep(step, epoch, origins, parameter, len(ranks), self.plan.split.accumulate, replays)


def _first_not_finite(model: nn.Module, *, in_values: bool = False) -> str | None:
    """Return the name of the first parameter of ``model`` whose gradient, or this rank's part of it, is not finite.

    With ``in_values``, the first that is not finite itself.
    """
    for name, parameter in model.named_parameters():
        checked = parameter if in_values else parameter.grad
        if checked is not None and not _is_finite(local_part(checked)):
            return name
    return None


@contextmanager
def _watching_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Within the block, collect the modules of ``model`` whose outputs are not finite, in the order of computation."""
    names = {id(module): f"{name} ({own_class(module).__name__})" for name, module in model.named_modules() if name}
    found: list[str] = []

    def check(module: nn.Module, _inputs: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is not None and not all(map(_is_finite, find_tensors(output))):
            found.append(name)  # replicas compute in threads, and an append is atomic

    handle = nn.modules.module.register_module_forward_hook(check)
    try:
        yield found
    finally:
        handle.remove()


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = tensor.detach()
    return bool(torch.isfinite(values.coalesce().values() if values.is_sparse else values).all())


def _faulty_inputs(micro: MicroBatch) -> list[int]:
    """Return the samples of a micro-batch whose inputs are not finite, if the inputs are still in memory."""
    faulty: list[int] = []
    for batch, samples in zip(micro.batches, micro.samples, strict=False):
        is_bad = np.zeros(len(samples), bool)
        for tensor in find_tensors(batch):
            # A tensor that was stacked from the samples has one row for each of them, in their order.
            if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.shape[:1] == (len(samples),):
                is_bad |= ~torch.isfinite(tensor.detach().reshape(len(samples), -1)).all(dim=1).cpu().numpy()
        faulty += samples[is_bad].tolist()
    return faulty
