"""A step whose gradient is not finite, in words: where it came from, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.errors import NonFiniteGradient
from lockstep.train.culprit import Clue

_MOST_SAMPLES = 64
_ADVICE = (
    "Look at these samples, at the learning rate and at the parameter's layer; or go on without such steps and have "
    'them counted: on_nan="skip" (--on-nan skip).'
)


class NotFinite(NamedTuple):
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
        back_to: The number of steps after which the state was that the run went back to; None: it did not.
    """

    step: int
    epoch: int | None
    clues: tuple[Clue, ...]
    parameter: str | None
    num_ranks: int
    num_micro: int
    again: bool
    suspects: tuple[int, ...] = ()
    back_to: int | None = None

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
        return "skipped" if self.back_to is None else f"went back to the state after step {self.back_to}"

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


def too_many(steps: Sequence[NotFinite], how_many: str) -> NonFiniteGradient:
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
