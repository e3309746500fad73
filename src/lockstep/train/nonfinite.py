"""A gradient that is NaN or infinite: seen by all ranks in the same step, traced to rank, module, parameter and sample.

[Note: the verdict]
NaN and infinity survive every sum, so the reduced gradient is its own flag: all ranks hold the same bits of it, check
their own copy and come to the same verdict in the same step, without an exchange. (Where each rank has a part of it,
the norm is summed over the ranks.) What is exchanged is what is known of a bad step, only then.

[Note: computed again]
A step that is refused has not changed the parameters, and random numbers depend on the position alone, so its
micro-batches can be computed again, each on its own and with a look at every module's output. That costs nothing as
long as all is well. Every rank computes all of its own, because synchronised layers need the others.

Where the parameters have been updated meanwhile (an optimizer in backward; ``on_nan="raise"`` on CUDA, where no step
waits for the verdict), or where the engine cannot compute without the other ranks (fsdp), what is left is the losses,
and whether this rank's part of the gradient was finite when it was handed over. The parameters that such a run stopped
with are not to be used.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.fully_shard import local_part, own_class
from lockstep.data.batch_iterator import map_tensors
from lockstep.data.loader import MicroBatch
from lockstep.data.order import BatchSplit, GlobalOrder, cut
from lockstep.data.stream import StreamOrder
from lockstep.errors import NonFiniteGradient
from lockstep.train.buffers import BufferSnapshot
from lockstep.train.settings import NanRule
from lockstep.train.step import Gradients, HostCopy
from lockstep.train.strategies.strategy import Strategy

_MOST_SAMPLES = 64
_MOST_IN_A_ROW = 5
_MOST_OF_LAST, _LAST = 10, 100
"""More bad steps than these, in a row or of the last so many, end the run whatever the rule."""

_ADVICE = (
    "Look at these samples, at the learning rate and at the parameter's layer; or go on without such steps and have "
    'them counted: on_nan="skip" (--on-nan skip).'
)

Computed = list[tuple[MicroBatch, list[Tensor]]]
"""The micro-batches of a step on this process, each with the losses of its shares."""


class Diagnosis(NamedTuple):
    """The first micro-batch of a rank whose loss or gradient is not finite.

    Args:
        rank: Which rank.
        micro: Which micro-batch, from 0; None: one of them, and ``samples`` are those of all.
        samples: Its samples: indices in the data set; of a stream, positions in the global batch.
        faulty: Those of them whose inputs are not finite.
        loss: In words, if it is not finite.
        module: The first one, in the order of computation, whose output is not finite.
        parameter: The first one, in the order of the model, whose gradient is not finite.
    """

    rank: int
    micro: int | None
    samples: list[int]
    faulty: list[int]
    loss: str | None = None
    module: str | None = None
    parameter: str | None = None


class NonFiniteStep(NamedTuple):
    """A step whose gradient is not finite, as all ranks know it.

    Args:
        step: Counted from 0 over all epochs.
        epoch: Counted from 0; None for a stream.
        diagnoses: Of the ranks that found something, in their order.
        parameter: The first one of the model whose gradient, summed over the ranks, is not finite, if that is known.
        num_ranks: How many train together.
        num_micro: Micro-batches of a rank.
        suspects: The ranks whose part of the gradient was not finite, where that was looked at in the step itself.
        again: Whether the step was computed again, with gradients to look at.
    """

    step: int
    epoch: int | None
    diagnoses: tuple[Diagnosis, ...]
    parameter: str | None
    num_ranks: int
    num_micro: int
    again: bool
    suspects: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks on which it arose."""
        return tuple(diagnosis.rank for diagnosis in self.diagnoses) or self.suspects

    @property
    def first(self) -> str | None:
        """The first parameter, of the first of these ranks if it is known there."""
        return (self.diagnoses[0].parameter if self.diagnoses else None) or self.parameter

    @property
    def samples(self) -> list[int]:
        """Those that it arose from, of the first of these ranks."""
        if not self.diagnoses:
            return []
        return self.diagnoses[0].faulty or self.diagnoses[0].samples

    @property
    def headline(self) -> str:
        """Rank, parameter and step, in one line."""
        epoch = "" if self.epoch is None else f"epoch {self.epoch + 1}, "
        where = f" on {format_ranks(self.ranks)}" if self.ranks and self.num_ranks > 1 else ""
        first = f": first that of parameter {self.first}" if self.first else ""
        return f"The gradient is not finite{where} ({epoch}step {self.step + 1}){first}."

    @property
    def text(self) -> str:
        """All that is known, and what to do."""
        return "\n".join([self.headline, *self.details, _ADVICE])

    @property
    def details(self) -> list[str]:
        """What came before the gradient, and from which samples."""
        if not self.diagnoses:
            return [self._without_diagnosis]
        diagnosis = self.diagnoses[0]
        on = f" of rank {diagnosis.rank}" if self.num_ranks > 1 else ""
        which = "batch" if self.num_micro == 1 else "step"
        if self.num_micro > 1 and diagnosis.micro is not None:
            which = f"micro-batch {diagnosis.micro + 1} of {self.num_micro}"
        noun = "Samples" if self.epoch is not None else "Positions in the global batch"
        origin = "The loss was finite" if diagnosis.loss is None else f"The loss was {diagnosis.loss}"
        origin += ": it arose in backward." if diagnosis.loss is None and diagnosis.module is None else "."
        if diagnosis.module is not None:
            origin += f" The first module whose output is not finite is {diagnosis.module}."
        lines = [origin, f"{noun} of that {which}{on}: {format_samples(diagnosis.samples)}."]
        if diagnosis.faulty:
            lines.append(f"Not finite before the model saw them: {format_samples(diagnosis.faulty)}.")
        for other in self.diagnoses[1:]:
            what = f"{noun.lower()} {format_samples(other.samples)}"
            lines.append(f"On rank {other.rank} too: first parameter {other.parameter or self.parameter}, {what}.")
        return lines

    @property
    def _without_diagnosis(self) -> str:
        if not self.again:
            unknown = "" if self.suspects else "; on which rank cannot be told"
            return f"Every loss was finite, so it arose in backward{unknown}."
        faulty = "a device or its memory is faulty"
        if self.suspects:
            return f"Computed again, it was finite on every rank. A kernel is not deterministic, or {faulty}."
        overflow = "The sum over the ranks overflowed (wire=fp16?), a kernel is not deterministic, or"
        return f"Computed again, it was finite on every rank. {overflow} {faulty}."

    @property
    def error(self) -> NonFiniteGradient:
        """What ends the run."""
        return NonFiniteGradient(self.text, step=self.step, ranks=self.ranks)


def too_many(steps: Sequence[NonFiniteStep], how_many: str) -> NonFiniteGradient:
    """Return the error that ends a run in which such ``steps`` come too often.

    Args:
        steps: Oldest first.
        how_many: In words.
    """
    last = steps[-1]
    lines = [
        f"{how_many} had a gradient that is not finite, which is no accident any more.",
        f"The last of them: {last.headline}",
        *last.details,
        "Lower the learning rate, clip the gradient (--clip), or mend the data or the loss.",
    ]
    return NonFiniteGradient("\n".join(lines), step=last.step, ranks=last.ranks)


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, ``ranks 1 and 3`` or ``ranks 1, 2 and 5``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def format_samples(numbers: Sequence[int]) -> str:
    """Return ``numbers`` in a row, not more than a reader needs."""
    rest = len(numbers) - _MOST_SAMPLES
    return ", ".join(map(str, numbers[:_MOST_SAMPLES])) + (f", and {rest} more" if rest > 0 else "")


class NonFiniteGuard:
    """Refuses steps whose gradient is not finite, and says where they went wrong.

    Args:
        rule: What happens then.
        model: The bare model.
        optimizer: Of its parameters.
        gradients: What backward leaves in it.
        strategy: Who computes.
        order, split: Which samples are in which step, and which of them are this process's.
        gather: Returns every rank's value. Collective.
        replay: Computes a micro-batch again, leaves its gradient in ``param.grad`` and returns the losses. Collective.

    Attributes:
        found: The bad steps, oldest first.
    """

    def __init__(
        self,
        rule: NanRule,
        model: nn.Module,
        optimizer: Optimizer,
        gradients: Gradients,
        strategy: Strategy,
        order: GlobalOrder | StreamOrder,
        split: BatchSplit,
        gather: Callable[[Any], list[Any]],
        replay: Callable[[MicroBatch, int], list[Tensor]],
    ) -> None:
        self._rule, self._model, self._optimizer, self._gradients = rule, model, optimizer, gradients
        self._strategy, self._order, self._split = strategy, order, split
        self._gather, self._replay = gather, replay
        self._buffers = BufferSnapshot(model) if rule == "skip" else None
        self._unsettled: tuple[HostCopy, Computed, int] | None = None
        self.found: list[NonFiniteStep] = []

    def begin_step(self) -> None:
        """Keep the buffers that a skipped step must leave as they are."""
        if self._buffers is not None:
            self._buffers.keep()

    def refuse(self, computed: Computed, step: int, *, updated: bool) -> None:
        """Go by the rule for a step, counted from 0, whose gradient is not finite.

        Collective: every rank. Blocks.

        Args:
            computed: The micro-batches of this process.
            step: Counted from 0.
            updated: Whether the parameters have been updated, so that nothing can be computed again.

        Raises:
            NonFiniteGradient: On every rank: the rule is to raise, or there were too many such steps.
        """
        bad = self._describe(computed, step, replays=self._strategy.can_replay and not updated)
        self.found.append(bad)
        self._optimizer.zero_grad(set_to_none=True)
        if self._rule == "raise":
            raise bad.error
        self._check_number(step)
        if self._buffers is not None:
            self._buffers.restore()

    def check_later(self, norm: Tensor, computed: Computed, step: int) -> None:
        """Leave it to `settle` to check whether the gradient was finite, whose norm is on its way."""
        light = [(micro._replace(batches=[]), losses) for micro, losses in computed]  # the inputs need their memory
        self._unsettled = HostCopy(norm), light, step

    def settle(self) -> None:
        """Check the gradient of the last step, if that was left for later.

        Collective if it was not finite: every rank. Blocks until the backward pass of that step is done.

        Raises:
            NonFiniteGradient: On every rank: it was not.
        """
        if self._unsettled is None:
            return
        (norm, computed, step), self._unsettled = self._unsettled, None
        value = norm.read()
        if value.isfinite() or (value.isinf() and self._gradients.is_finite(value)):
            return
        self.refuse(computed, step, updated=True)

    def _check_number(self, step: int) -> None:
        steps = [bad.step for bad in self.found]
        if steps[-_MOST_IN_A_ROW - 1 :] == list(range(step - _MOST_IN_A_ROW, step + 1)):
            raise too_many(self.found, f"{_MOST_IN_A_ROW + 1} steps in a row")
        recent = sum(step - _LAST < each for each in steps)
        if recent > _MOST_OF_LAST:
            raise too_many(self.found, f"{recent} of the last {min(_LAST, step + 1)} steps")

    def _describe(self, computed: Computed, step: int, *, replays: bool) -> NonFiniteStep:
        """Return what all ranks together know of a bad step. Collective: every rank. Blocks."""
        group = self._strategy.group
        rank = 0 if group is None else group.rank()
        summed = first_not_finite(self._model)
        is_suspect = self._strategy.part_is_bad()
        shares = [self._samples_of(micro, index) for index, (micro, _) in enumerate(computed)]
        found: list[Diagnosis] = []
        has_gradients = False
        for index, (micro, losses) in enumerate(computed):
            module = parameter = None
            if replays:
                self._optimizer.zero_grad(set_to_none=True)
                with _watching_outputs(self._model) as bad_outputs:
                    losses = self._replay(micro, index)
                module = bad_outputs[0] if bad_outputs else None
                parameter = first_not_finite(self._model)
                has_gradients = has_gradients or any(each.grad is not None for each in self._model.parameters())
            bad_losses = [None if math.isfinite(float(loss)) else str(float(loss)) for loss in losses]
            if parameter is None and not any(bad_losses):
                continue
            wrong = list(range(len(shares[index])))
            if len(bad_losses) == len(wrong) and any(bad_losses):
                wrong = [share for share, loss in enumerate(bad_losses) if loss is not None]
            samples = [sample for share in wrong for sample in shares[index][share]]
            faulty = [sample for sample in _faulty_inputs(micro, shares[index]) if sample in samples]
            loss = next(filter(None, bad_losses), None)
            found.append(Diagnosis(rank, index, samples, faulty, loss, module, parameter))
        if is_suspect and not found and not replays:
            found = [_diagnose_part(rank, shares, [micro for micro, _ in computed])]
        names = [name for name, _ in self._model.named_parameters()]
        first = None if summed is None else names.index(summed)
        ranks = self._gather([found[0] if found else None, first, has_gradients, is_suspect])
        firsts = [first for _, first, *_ in ranks if first is not None]
        return NonFiniteStep(
            step=step,
            epoch=self._order.epoch(step) if isinstance(self._order, GlobalOrder) else None,
            diagnoses=tuple(Diagnosis(*diagnosis) for diagnosis, *_ in ranks if diagnosis is not None),
            parameter=names[min(firsts)] if firsts else None,
            num_ranks=len(ranks),
            num_micro=self._split.accumulate,
            again=any(each for _, _, each, _ in ranks),
            suspects=tuple(rank for rank, (*_, each) in enumerate(ranks) if each),
        )

    def _samples_of(self, micro: MicroBatch, index: int) -> list[list[int]]:
        """Return the samples of micro-batch ``index`` that this process has read, for each share that has any."""
        if isinstance(self._order, GlobalOrder):
            batch, bad = self._order.batch(micro.step).tolist(), {sample.sample for sample in micro.bad}
        else:
            batch, bad = list(range(micro.num_global)), set()
        shares = []
        for number in micro.numbers:
            positions = self._split.positions(len(batch), number)
            part = cut(len(positions), self._split.accumulate, index)
            mine = batch[positions.start + part.start : positions.start + part.stop]
            shares.append([sample for sample in mine if sample not in bad])
        return shares


def first_not_finite(model: nn.Module) -> str | None:
    """Return the name of the first parameter of ``model`` whose gradient, or this rank's part of it, is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _is_finite(local_part(parameter.grad)):
            return name
    return None


@contextmanager
def _watching_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Within, take note of the modules of ``model`` whose outputs are not finite, in the order of computation."""
    names = {id(module): f"{name} ({own_class(module).__name__})" for name, module in model.named_modules() if name}
    found: list[str] = []
    lock = threading.Lock()  # replicas compute in threads

    def check(module: nn.Module, _inputs: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is not None and not all(map(_is_finite, _tensors_in(output))):
            with lock:
                found.append(name)

    handle = nn.modules.module.register_module_forward_hook(check)
    try:
        yield found
    finally:
        handle.remove()


def _tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = tensor.detach()
    return bool(torch.isfinite(values.coalesce().values() if values.is_sparse else values).all())


def _diagnose_part(rank: int, shares: Sequence[Sequence[Sequence[int]]], micros: Sequence[MicroBatch]) -> Diagnosis:
    """Return what is known of a rank whose part of the gradient was not finite, though its losses were. Blocks.

    Args:
        rank: Which.
        shares: By micro-batch, the samples of each of its shares that has any.
        micros: With their inputs, if they are still there.
    """
    faulty = [_faulty_inputs(micro, of_micro) for micro, of_micro in zip(micros, shares, strict=True)]
    which = next((index for index, found in enumerate(faulty) if found), 0 if len(micros) == 1 else None)
    suspected = shares if which is None else [shares[which]]
    samples = [sample for of_micro in suspected for share in of_micro for sample in share]
    return Diagnosis(rank, which, samples, [] if which is None else faulty[which])


def _faulty_inputs(micro: MicroBatch, shares: Sequence[Sequence[int]]) -> list[int]:
    """Return those samples of a micro-batch whose inputs are not finite, as far as the inputs are still there."""
    faulty: list[int] = []
    for batch, samples in zip(micro.batches, shares, strict=False):
        bad: set[int] = set()
        for tensor in _tensors_in(batch):
            # A tensor of the batch that was stacked from the samples has a row for each, in their order.
            if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.shape[:1] == (len(samples),):
                rows = torch.isfinite(tensor.detach().reshape(len(samples), -1)).all(dim=1)
                bad |= {sample for sample, is_good in zip(samples, rows.tolist(), strict=True) if not is_good}
        faulty += [sample for sample in samples if sample in bad]
    return faulty
