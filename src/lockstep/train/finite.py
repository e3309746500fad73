"""What happens to a step whose gradient is not finite: the same on every rank, and none asks another whether it is.

[Note: the verdict]
NaN and infinity survive every sum, so the reduced gradient is its own flag: all ranks hold the same bits of it, look at
their own copy and come to the same verdict in the same step, without an exchange. (Where each rank has a part of it,
the norm is summed over the ranks.) What is exchanged is what is known of a bad step, only then.

[Note: sooner or later]
On CPUs, and wherever something depends on it, the verdict comes before the parameters are updated. With
``on_nan="raise"`` on CUDA the host would wait for it in every step; so it looks when the next step begins, or before
anything is evaluated, kept or returned. The parameters that such a run stopped with are not to be used, and the report
goes by the losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.data.division import Division
from lockstep.data.loader import MicroBatch
from lockstep.data.order import GlobalOrder
from lockstep.data.stream_reader import StreamOrder
from lockstep.train.buffers import KeptBuffers
from lockstep.train.culprit import (
    Again,
    Clue,
    Losses,
    Traced,
    clue_of_part,
    first_not_finite,
    make_clue,
    samples_of,
    trace,
)
from lockstep.train.gradients import Gradients
from lockstep.train.last_good import LastGood
from lockstep.train.not_finite import NotFinite, too_many
from lockstep.train.settings import NanRule
from lockstep.train.update import Outcome

MOST_IN_A_ROW = 5
MOST_OF_LAST, LAST = 10, 100
"""More bad steps than these, in a row or of the last so many, end the run whatever the rule."""

KEEP_EVERY = 100
"""Steps between copies of the state that ``rewind`` goes back to."""


class Arriving:
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
class Place:
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
    division: Division
    rank: int
    gather: Callable[[Any], list[Any]]
    looks_later: bool
    again: Again


class FiniteGuard:
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
        self, rule: NanRule, model: nn.Module, optimizer: Optimizer, gradients: Gradients, place: Place
    ) -> None:
        self._rule, self._model, self._optimizer = rule, model, optimizer
        self._gradients, self._place = gradients, place
        self._micros: list[MicroBatch] = []
        self._losses: list[Losses] = []
        self._buffers = KeptBuffers(model) if rule == "skip" else None
        self._last_good = LastGood(model, optimizer) if rule == "rewind" else None
        self._late: Callable[[], None] | None = None
        self.found: list[NotFinite] = []

    def begin_step(self, step: int, num_updates: int) -> None:
        """Begin a step: see `settle`, whose errors it raises. Collective: every rank.

        Args:
            step: Counted from 0.
            num_updates: Made so far.
        """
        self.settle()
        if self._buffers is not None:
            self._buffers.keep()
        if self._last_good is not None and (self._last_good.is_empty or step % KEEP_EVERY == 0):
            self._last_good.keep(step, num_updates)

    def begin_again(self, division: Division) -> None:
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
            self._late = partial(self._look_later, Arriving(outcome.norm), light, self._losses, step)
        if outcome.verdict is not False:
            return num_updates
        bad = self._describe(self._micros, self._losses, step, replays=not outcome.updated)
        if self._last_good is not None:
            bad = bad._replace(back_to=self._last_good.num_steps)
        self._act(bad)
        return num_updates if self._last_good is None else self._last_good.restore()

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

    def _look_later(self, norm: Arriving, micros: list[MicroBatch], losses: list[Losses], step: int) -> None:
        value = norm.read()
        if value.isfinite() or (value.isinf() and self._gradients.is_finite(value)):
            return
        self._act(self._describe(micros, losses, step, replays=False))

    def _act(self, bad: NotFinite) -> None:
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

    def _describe(self, micros: list[MicroBatch], losses: list[Losses], step: int, *, replays: bool) -> NotFinite:
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
        clues: list[Clue] = []
        has_gradients = False
        for index, (micro, values) in enumerate(zip(micros, losses, strict=True)):
            seen = Traced(values, None, None, False)
            if replays:
                self._optimizer.zero_grad(set_to_none=True)
                seen = trace(self._model, partial(place.again.compute, micro, index), summed=place.again.sums)
                has_gradients = has_gradients or seen.has_gradients
            clue = make_clue(place.rank, index, shares[index], micro, seen)
            clues += [] if clue is None else [clue]
        if is_suspect and not clues and not replays:
            clues = [clue_of_part(place.rank, shares, micros)]
        names = [name for name, _ in self._model.named_parameters()]
        mine = [clues[0] if clues else None, None if summed is None else names.index(summed), has_gradients, is_suspect]
        ranks = place.gather(mine)
        firsts = [first for _, first, *_ in ranks if first is not None]
        return NotFinite(
            step=step,
            epoch=order.epoch(step) if isinstance(order, GlobalOrder) else None,
            clues=tuple(Clue(*clue) for clue, *_ in ranks if clue is not None),
            parameter=names[min(firsts)] if firsts else None,
            num_ranks=len(ranks),
            num_micro=place.division.accumulate,
            again=any(each for _, _, each, _ in ranks),
            suspects=tuple(rank for rank, (*_, each) in enumerate(ranks) if each),
        )
