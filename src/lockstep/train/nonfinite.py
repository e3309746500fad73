"""A gradient that is NaN or infinite: found on all ranks in one step, traced to rank, module, parameter and samples."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
from lockstep.train.step import Gradients, Outcome

# Where a gradient that is not finite came from: the step's micro-batches, computed again and looked at.
#
# [Note: computed again]
# A step that is refused has not changed the parameters, and random numbers depend on the position alone, so its
# micro-batches can be computed again, each on its own and with a look at every module's output. That costs nothing as
# long as all is well. Every rank computes all of its own, because synchronised layers need the others. Only then do the
# ranks tell each other what they found.
#
# Where the engine can compute a micro-batch only with the sum over the ranks at its end, the gradients of this rank
# are looked at on their way there. Where the parameters have been updated meanwhile, what is left is whether this
# rank's part of the gradient was finite when it left, and the samples that it came from.

Losses = list[Tensor]
"""Of one micro-batch: for each share of this process that has samples."""


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
    loss: str | None
    module: str | None
    parameter: str | None


class Replay(NamedTuple):
    """How a bad step is looked at.

    Args:
        compute: Computes a micro-batch, leaves its gradient in ``param.grad`` and returns the losses. Collective.
        is_possible: Whether it can be computed again at all.
        part_is_bad: Tells whether this rank's part of the last gradient was not finite, where that is known.
    """

    compute: Callable[[MicroBatch, int], Losses]
    is_possible: bool
    part_is_bad: Callable[[], bool]


class Traced(NamedTuple):
    """What computing a micro-batch again has shown."""

    losses: Losses
    module: str | None
    parameter: str | None
    has_gradients: bool


def replay_and_trace(model: nn.Module, compute: Callable[[], Losses]) -> Traced:
    """Compute a micro-batch and look at all that comes of it. Blocks. Collective where ``compute`` is.

    Args:
        model: The bare model; its gradients are None.
        compute: Runs forward and backward, leaves gradients in ``param.grad``, returns the losses.
    """
    with _watching(model) as found:
        losses = compute()
    has_gradients = any(parameter.grad is not None for parameter in model.parameters())
    first = first_not_finite(model)
    return Traced(losses, found[0] if found else None, first, has_gradients)


def first_not_finite(model: nn.Module) -> str | None:
    """Return the name of the first parameter of ``model`` whose gradient, or this rank's part of it, is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _is_finite(local_part(parameter.grad)):
            return name
    return None


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[str]]:
    """Within, take note of the modules of ``model`` whose outputs are not finite, in the order of computation."""
    names = {id(module): f"{name} ({own_class(module).__name__})" for name, module in model.named_modules() if name}
    found: list[str] = []
    lock = threading.Lock()  # replicas compute in threads

    def look(module: nn.Module, _inputs: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is not None and not all(map(_is_finite, tensors_in(output))):
            with lock:
                found.append(name)

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in any structure."""
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


def words_for(loss: Tensor) -> str | None:
    """Return what ``loss`` is, if it is not finite. Blocks."""
    value = float(loss)
    return None if math.isfinite(value) else str(value)


def diagnose(
    rank: int, index: int, shares: Sequence[Sequence[int]], micro: MicroBatch, seen: Traced
) -> Diagnosis | None:
    """Return what is wrong with micro-batch ``index`` of a rank, None if nothing is. Blocks.

    Args:
        rank: Which.
        index: Which.
        shares: The samples of each of its shares that has any.
        micro: With its inputs, if they are still there.
        seen: What came of it.
    """
    words = [words_for(loss) for loss in seen.losses]
    if seen.parameter is None and not any(words):
        return None
    wrong = list(range(len(shares)))
    if len(words) == len(shares) and any(words):
        wrong = [share for share, word in enumerate(words) if word is not None]
    samples = [sample for share in wrong for sample in shares[share]]
    faulty = [
        sample
        for share in wrong
        if share < len(micro.batches)
        for sample in _faulty_inputs(micro.batches[share], shares[share])
    ]
    return Diagnosis(rank, index, samples, faulty, next(filter(None, words), None), seen.module, seen.parameter)


def diagnose_part(rank: int, shares: Sequence[Sequence[Sequence[int]]], micros: Sequence[MicroBatch]) -> Diagnosis:
    """Return what is known of a rank whose part of the gradient was not finite, though its losses were. Blocks.

    Args:
        rank: Which.
        shares: By micro-batch, the samples of each of its shares that has any.
        micros: With their inputs, if they are still there.
    """
    faulty = [_faulty_in(micro, of_micro) for micro, of_micro in zip(micros, shares, strict=True)]
    which = next((index for index, found in enumerate(faulty) if found), 0 if len(micros) == 1 else None)
    looked_at = shares if which is None else [shares[which]]
    samples = [sample for of_micro in looked_at for share in of_micro for sample in share]
    return Diagnosis(rank, which, samples, [] if which is None else faulty[which], None, None, None)


def _faulty_in(micro: MicroBatch, shares: Sequence[Sequence[int]]) -> list[int]:
    """Return those samples of a micro-batch whose inputs are not finite, as far as the inputs are still there."""
    pairs = zip(micro.batches, shares, strict=False)
    return [sample for batch, samples in pairs for sample in _faulty_inputs(batch, samples)]


def _faulty_inputs(batch: Any, samples: Sequence[int]) -> list[int]:
    """Return those ``samples`` for which a tensor of their ``batch``, stacked in this order, is not finite."""
    faulty: set[int] = set()
    for tensor in tensors_in(batch):
        if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.shape[:1] == (len(samples),):
            rows = torch.isfinite(tensor.detach().reshape(len(samples), -1)).all(dim=1)
            faulty |= {sample for sample, is_good in zip(samples, rows.tolist(), strict=True) if not is_good}
    return [sample for sample in samples if sample in faulty]


def samples_of(
    order: GlobalOrder | StreamOrder, division: BatchSplit, micro: MicroBatch, index: int
) -> list[list[int]]:
    """Return the samples of micro-batch ``index`` that this process has read, for each share that has any."""
    shares = []
    batch = order.batch(micro.step).tolist() if isinstance(order, GlobalOrder) else list(range(micro.num_global))
    bad = {sample.sample for sample in micro.bad} if isinstance(order, GlobalOrder) else set()
    for number in micro.numbers:
        positions = division.positions(len(batch), number)
        part = cut(len(positions), division.accumulate, index)
        mine = batch[positions.start + part.start : positions.start + part.stop]
        shares.append([sample for sample in mine if sample not in bad])
    return shares


# A step whose gradient is not finite, in words: where it came from, and what to do.

_MOST_SAMPLES = 64
_ADVICE = (
    "Look at these samples, at the learning rate and at the parameter's layer; or go on without such steps and have "
    'them counted: on_nan="skip" (--on-nan skip).'
)


class NonFiniteStep(NamedTuple):
    """A step whose gradient is not finite, as all ranks know it.

    Args:
        step: Counted from 0 over all epochs.
        epoch: Counted from 0; None for a stream.
        clues: Of the ranks that found something, in their order.
        parameter: The first one of the model whose gradient, summed over the ranks, is not finite, if that is known.
        num_ranks: How many train together.
        num_micro: Micro-batches of a rank.
        suspects: The ranks whose part of the gradient was not finite, where that was looked at in the step itself.
        again: Whether the step was computed again, with gradients to look at.
    """

    step: int
    epoch: int | None
    clues: tuple[Diagnosis, ...]
    parameter: str | None
    num_ranks: int
    num_micro: int
    again: bool
    suspects: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks on which it arose."""
        return tuple(clue.rank for clue in self.clues) or self.suspects

    @property
    def first(self) -> str | None:
        """The first parameter, of the first of these ranks if it is known there."""
        return (self.clues[0].parameter if self.clues else None) or self.parameter

    @property
    def samples(self) -> list[int]:
        """Those that it arose from, of the first of these ranks."""
        if not self.clues:
            return []
        return self.clues[0].faulty or self.clues[0].samples

    @property
    def headline(self) -> str:
        """Rank, parameter and step, in one line."""
        epoch = "" if self.epoch is None else f"epoch {self.epoch + 1}, "
        where = f" on {ranks_in_words(self.ranks)}" if self.ranks and self.num_ranks > 1 else ""
        first = f": first that of parameter {self.first}" if self.first else ""
        return f"The gradient is not finite{where} ({epoch}step {self.step + 1}){first}."

    @property
    def done(self) -> str:
        """What a run that goes on did about it."""
        return "skipped"

    @property
    def text(self) -> str:
        """All that is known, and what to do."""
        return "\n".join([self.headline, *self.details, _ADVICE])

    @property
    def details(self) -> list[str]:
        """What came before the gradient, and from which samples."""
        if not self.clues:
            return [self._without_clues]
        clue = self.clues[0]
        on = f" of rank {clue.rank}" if self.num_ranks > 1 else ""
        which = "batch" if self.num_micro == 1 else "step"
        if self.num_micro > 1 and clue.micro is not None:
            which = f"micro-batch {clue.micro + 1} of {self.num_micro}"
        noun = "Samples" if self.epoch is not None else "Positions in the global batch"
        origin = "The loss was finite" if clue.loss is None else f"The loss was {clue.loss}"
        origin += ": it arose in backward." if clue.loss is None and clue.module is None else "."
        if clue.module is not None:
            origin += f" The first module whose output is not finite is {clue.module}."
        lines = [origin, f"{noun} of that {which}{on}: {listed(clue.samples)}."]
        if clue.faulty:
            lines.append(f"Not finite before the model saw them: {listed(clue.faulty)}.")
        for other in self.clues[1:]:
            what = f"{noun.lower()} {listed(other.samples)}"
            lines.append(f"On rank {other.rank} too: first parameter {other.parameter or self.parameter}, {what}.")
        return lines

    @property
    def _without_clues(self) -> str:
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


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, ``ranks 1 and 3`` or ``ranks 1, 2 and 5``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def listed(numbers: Sequence[int]) -> str:
    """Return ``numbers`` in a row, not more than a reader needs."""
    rest = len(numbers) - _MOST_SAMPLES
    return ", ".join(map(str, numbers[:_MOST_SAMPLES])) + (f", and {rest} more" if rest > 0 else "")


# What happens to a step whose gradient is not finite: the same on every rank, and none asks another whether it is.
#
# [Note: the verdict]
# NaN and infinity survive every sum, so the reduced gradient is its own flag: all ranks hold the same bits of it,
# look at their own copy and come to the same verdict in the same step, without an exchange. (Where each rank has a
# part of it, the norm is summed over the ranks.) What is exchanged is what is known of a bad step, only then.
#
# [Note: sooner or later]
# On CPUs, and wherever something depends on it, the verdict comes before the parameters are updated. With
# ``on_nan="raise"`` on CUDA the host would wait for it in every step; so it looks when the next step begins, or
# before anything is evaluated, kept or returned. The parameters that such a run stopped with are not to be used, and
# the report goes by the losses.

MOST_IN_A_ROW = 5
MOST_OF_LAST, LAST = 10, 100
"""More bad steps than these, in a row or of the last so many, end the run whatever the rule."""


class HostCopy:
    """A 0-dimensional tensor on its way to the host, where it may be read later without waiting for what came after."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._value = tensor.detach()
        if tensor.device.type == "cuda":
            self._value = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._value.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """Return it, on the host. Blocks until it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._value


@dataclass(frozen=True)
class GuardContext:
    """What a guard has to know of the loop.

    Args:
        order: Which samples are in which step.
        division: Which of them are this process's.
        rank: This process, among those that train together.
        gather: Returns every rank's value, see `Loop`. Collective.
        looks_later: Whether the verdict comes when the step is long over, so that its inputs need not be kept.
        again: How a bad step is looked at.
    """

    order: GlobalOrder | StreamOrder
    division: BatchSplit
    rank: int
    gather: Callable[[Any], list[Any]]
    looks_later: bool
    again: Replay


class NonFiniteGuard:
    """Refuses steps whose gradient is not finite.

    Args:
        rule: What happens then.
        model: The bare model.
        optimizer: Of its parameters.
        gradients: What backward leaves in it.
        place: Where in the run.

    Attributes:
        found: The bad steps, oldest first.
    """

    def __init__(
        self, rule: NanRule, model: nn.Module, optimizer: Optimizer, gradients: Gradients, place: GuardContext
    ) -> None:
        self._rule, self._model, self._optimizer = rule, model, optimizer
        self._gradients, self._place = gradients, place
        self._micros: list[MicroBatch] = []
        self._losses: list[Losses] = []
        self._buffers = BufferSnapshot(model) if rule == "skip" else None
        self._late: Callable[[], None] | None = None
        self.found: list[NonFiniteStep] = []

    def begin_step(self, step: int, num_updates: int) -> None:
        """Begin a step: see `settle`, whose errors it raises. Collective: every rank.

        Args:
            step: Counted from 0.
            num_updates: Made so far.
        """
        self.settle()
        if self._buffers is not None:
            self._buffers.keep()

    def begin_again(self, division: BatchSplit) -> None:
        """Forget the micro-batches of the step, which is done again in others."""
        self._micros, self._losses = [], []
        self._place = replace(self._place, division=division)

    def add(self, micro: MicroBatch, losses: Losses) -> None:
        """Take note of a micro-batch of this process that was computed."""
        self._micros.append(micro._replace(batches=[]) if self._place.looks_later else micro)
        self._losses.append(losses)

    def conclude(self, outcome: Outcome, step: int, num_updates: int) -> int:
        """End a step: go by the rule if its gradient was not finite. Return the updates that the model has seen then.

        Collective if it was not: every rank.

        Args:
            outcome: What became of the step.
            step: Counted from 0.
            num_updates: That the model has seen now.

        Raises:
            NonFiniteGradient: On every rank: the rule is to raise, or there were too many such steps.
        """
        if outcome.verdict is None:
            light = [micro._replace(batches=[]) for micro in self._micros]
            self._late = partial(self._look_later, HostCopy(outcome.norm), light, self._losses, step)
        if outcome.verdict is not False:
            return num_updates
        bad = self._describe(
            self._micros, self._losses, step, replays=not outcome.updated and self._place.again.is_possible
        )
        self._act(bad)
        return num_updates

    def end_step(self) -> None:
        """Let go of the step's micro-batches."""
        self._micros, self._losses = [], []

    def settle(self) -> None:
        """Learn whether the last step's gradient was finite, if that was left for later.

        Collective if it was not: every rank. Blocks until the backward pass of that step is done.

        Raises:
            NonFiniteGradient: On every rank: it was not.
        """
        late, self._late = self._late, None
        if late is not None:
            late()

    def _look_later(self, norm: HostCopy, micros: list[MicroBatch], losses: list[Losses], step: int) -> None:
        value = norm.read()
        if value.isfinite() or (value.isinf() and self._gradients.is_finite(value)):
            return
        self._act(self._describe(micros, losses, step, replays=False))

    def _act(self, bad: NonFiniteStep) -> None:
        self.found.append(bad)
        self._optimizer.zero_grad(set_to_none=True)
        if self._rule == "raise":
            raise bad.error
        self._check_number(bad.step)
        if self._buffers is not None:
            self._buffers.restore()

    def _check_number(self, step: int) -> None:
        steps = [bad.step for bad in self.found]
        if steps[-MOST_IN_A_ROW - 1 :] == list(range(step - MOST_IN_A_ROW, step + 1)):
            raise too_many(self.found, f"{MOST_IN_A_ROW + 1} steps in a row")
        recent = sum(step - LAST < each for each in steps)
        if recent > MOST_OF_LAST:
            raise too_many(self.found, f"{recent} of the last {min(LAST, step + 1)} steps")

    def _describe(self, micros: list[MicroBatch], losses: list[Losses], step: int, *, replays: bool) -> NonFiniteStep:
        """Return what all ranks together know of a bad step. Collective: every rank. Blocks.

        Args:
            micros: Those of this process.
            losses: Theirs.
            step: Counted from 0.
            replays: Whether they can be computed again, as the parameters are still what they were.
        """
        place, order = self._place, self._place.order
        summed = first_not_finite(self._model)
        is_suspect = place.again.part_is_bad()
        shares = [samples_of(order, place.division, micro, index) for index, micro in enumerate(micros)]
        clues: list[Diagnosis] = []
        has_gradients = False
        for index, (micro, values) in enumerate(zip(micros, losses, strict=True)):
            seen = Traced(values, None, None, False)
            if replays:
                self._optimizer.zero_grad(set_to_none=True)
                seen = replay_and_trace(self._model, partial(place.again.compute, micro, index))
                has_gradients = has_gradients or seen.has_gradients
            clue = diagnose(place.rank, index, shares[index], micro, seen)
            clues += [] if clue is None else [clue]
        if is_suspect and not clues and not replays:
            clues = [diagnose_part(place.rank, shares, micros)]
        names = [name for name, _ in self._model.named_parameters()]
        mine = [clues[0] if clues else None, None if summed is None else names.index(summed), has_gradients, is_suspect]
        ranks = place.gather(mine)
        firsts = [first for _, first, *_ in ranks if first is not None]
        return NonFiniteStep(
            step=step,
            epoch=order.epoch(step) if isinstance(order, GlobalOrder) else None,
            clues=tuple(Diagnosis(*clue) for clue, *_ in ranks if clue is not None),
            parameter=names[min(firsts)] if firsts else None,
            num_ranks=len(ranks),
            num_micro=place.division.accumulate,
            again=any(each for _, _, each, _ in ranks),
            suspects=tuple(rank for rank, (*_, each) in enumerate(ranks) if each),
        )
