"""What a run stops at, or skips and counts: samples that cannot be read, and steps whose gradient is not finite."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.activity import format_ranks
from lockstep.base.containers import find_tensors
from lockstep.comm.collectives import Group, all_gather_object, all_reduce
from lockstep.comm.fully_shard import local_part, own_class
from lockstep.data.loader import BadSample, MicroBatch, stop_error
from lockstep.data.order import BatchSplit
from lockstep.errors import DataError, NonFiniteGradient
from lockstep.loop.buffers import BufferSnapshot
from lockstep.parallel.flat import are_finite
from lockstep.train.plan import Plan
from lockstep.train.settings import NanRule
from lockstep.train.strategies.strategy import Strategy

# --- samples that cannot be read, over all ranks ----------------------------------------------------------------------

# Number of different samples that may be bad, or fraction of the data set if that is more.
_MOST, _MOST_OF_ALL = 10, 0.01


@dataclass(kw_only=True)
class BadSamples:
    """Collects the samples that the ranks could not read.

    Args:
        skip: Whether the run continues without them.
        device: Device of this rank.
        group: The ranks that train together; None: only this process.
        num_samples: Length of the data set; None for a stream.
        evaluation: Whether this is the data set for evaluation.

    Attributes:
        skipped: The samples that were skipped so far, over all ranks.
        num_in_step: Number of bad samples in the current step that were exchanged.
        pending: Bad samples of this rank that were not exchanged yet.
    """

    skip: bool
    device: torch.device
    group: Group | None
    num_samples: int | None
    evaluation: bool = False
    skipped: list[BadSample] = field(default_factory=list)
    pending: list[BadSample] = field(default_factory=list)
    num_in_step: int = 0

    def add(self, micro: MicroBatch) -> None:
        """Add the bad samples of a micro-batch of the step.

        Raises:
            DataError: The run is to stop, and there are no other ranks.
        """
        # If there are other ranks, this rank still takes part in the step, like a rank without samples, otherwise they
        # would wait. The number is sent with the sums of the losses, so it needs no additional exchange.
        self.pending += micro.bad
        if self.pending and self.group is None:
            self._take([self.pending])

    def all_have_samples(self, micro: MicroBatch, index: int, split: BatchSplit) -> bool:
        """Return whether all ranks have samples in a micro-batch, for engines that must know it before forward.

        Collective: every rank, if there is a group and each should have samples. Blocks. Neither on a device if the run
        stops at bad samples.

        Args:
            micro: The micro-batch of this rank, after `add`.
            index: The number of the micro-batch in its step.
            split: Whether each rank should have samples follows from it.

        Raises:
            DataError: On a device, on this rank alone: it could not read its samples, and the run is to stop.
        """
        if not split.all_have_samples(micro.num_global, index):
            return False
        has_samples = bool(micro.batches)
        if self.group is None:
            return has_samples
        if self.device.type != "cpu" and not self.skip:
            if not has_samples:
                self._take([self.pending])
            return True
        flag = torch.tensor([int(has_samples)], device=self.device)
        all_reduce(flag, group=self.group, op="min")
        return bool(flag.item())

    def exchange(self, last_step: float = math.inf) -> None:
        """Exchange the bad samples of all ranks.

        Collective: every rank, if there is a group. Blocks.

        Args:
            last_step: The samples of later steps stay.

        Raises:
            DataError: There are some, and the run is to stop; or there are too many.
        """
        if self.group is None:
            return
        # On CPUs this happens before the parameters are updated. On a device it happens in the next step, so that the
        # host does not wait; the parameters of a run that stops here are not used.
        due = [list(sample) for sample in self.pending if sample.step <= last_step]
        later = [sample for sample in self.pending if sample.step > last_step]
        ranks = all_gather_object(due, group=self.group, device=self.device)
        # JSON turns tuples into lists, which are not hashable.
        self._take([[BadSample(*sample)._replace(others=tuple(sample[-1])) for sample in samples] for samples in ranks])
        self.pending = later

    def _take(self, ranks: Sequence[Sequence[BadSample]]) -> None:
        self.pending = []
        # Every rank reads the whole stream, so all report the same sample.
        different = {sample for samples in ranks for sample in samples}
        bad = sorted(different, key=lambda sample: (sample.step, sample.sample))
        if not bad:
            return
        data = "the evaluation data set" if self.evaluation else "the data set"
        if not self.skip or any(sample.others for sample in bad):
            raise stop_error(bad, data, evaluation=self.evaluation)
        self.skipped += bad
        self.num_in_step += len(bad)
        num_different = len({sample.sample for sample in self.skipped})
        num_allowed = math.inf if self.num_samples is None else max(_MOST, int(_MOST_OF_ALL * self.num_samples))
        if num_different > num_allowed:
            raise DataError(
                f'{num_different} samples of {data} cannot be read, more than bad_samples="skip" allows '
                f"({num_allowed}). The last is {bad[-1].name}\n"
                "Check that the storage is available and the files are complete. Repair or remove unreadable samples."
            )


# --- gradients that are NaN or infinite: all ranks detect them in the same step, with rank, module and samples --------

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
        recent = sum(step - _LAST < bad_step for bad_step in steps)
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
            ranks = all_gather_object(ranks[0], group=group, device=next(self.model.parameters()).device)
        firsts = [first for _, first in ranks if first is not None]
        per_epoch = self.plan.order.steps_per_epoch
        epoch = None if per_epoch is None else step // per_epoch
        origins = tuple(Origin(*origin) for origin, _ in ranks if origin is not None)
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in self.model.modules()):
            # These layers pass on what is not finite to all ranks, but the input of one is the origin.
            origins = tuple(each for each in origins if each.faulty) or origins
        parameter = names[min(firsts)] if firsts else None
        return NonFiniteStep(step, epoch, origins, parameter, len(ranks), self.plan.split.accumulate, replays)


def _first_not_finite(model: nn.Module, *, in_values: bool = False) -> str | None:
    """Return the name of the first parameter of ``model`` whose gradient, or this rank's part of it, is not finite.

    With ``in_values``, the first that is not finite itself.
    """
    for name, parameter in model.named_parameters():
        checked = parameter if in_values else parameter.grad
        if checked is not None and not are_finite([local_part(checked)]):
            return name
    return None


@contextmanager
def _watching_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Within the block, collect the modules of ``model`` whose outputs are not finite, in the order of computation."""
    names = {id(module): f"{name} ({own_class(module).__name__})" for name, module in model.named_modules() if name}
    modules: list[str] = []

    def check(module: nn.Module, _inputs: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is not None and not are_finite(find_tensors(output)):
            modules.append(name)  # replicas compute in threads, and an append is atomic

    handle = nn.modules.module.register_module_forward_hook(check)
    try:
        yield modules
    finally:
        handle.remove()


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
