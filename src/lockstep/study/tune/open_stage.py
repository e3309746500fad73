"""A stage while it is tried: its rounds, what was lost in it, and the judgement in the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lockstep.study.common import Spread
from lockstep.study.tune.candidates import Candidate, Stage
from lockstep.study.tune.effects import Effect
from lockstep.study.tune.judge import Round, is_decided, is_gain, ratio_of, why_not
from lockstep.study.tune.values import Values


@dataclass(frozen=True)
class Result:
    """What came of a change.

    Args:
        stage: In which it was tried.
        candidate: The change.
        effect: What becomes of the training.
        ratio: How many times as fast it was; None if it did not run.
        num_rounds: In which it ran.
        kept: Whether it is part of what was found.
        why: Why it was not kept, or what else there is to say.
    """

    stage: str
    candidate: Candidate
    effect: Effect
    ratio: Spread | None
    num_rounds: int
    kept: bool
    why: str = ""


@dataclass
class OpenStage:
    """A stage that is being tried on top of ``base``, since ``began_at_s``."""

    stage: Stage
    base: Values
    began_at_s: float
    rounds: list[Round] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def running(self) -> list[Candidate]:
        """What is neither lost nor decided."""
        candidates = self.stage.candidates
        return [each for each in candidates if each.name not in self.lost and not is_decided(each.name, self.rounds)]

    def judge(
        self, effects: Mapping[str, Effect], forbidden: Callable[[Effect], str]
    ) -> tuple[list[Result], Candidate | None, list[Candidate]]:
        """Return what came of each change, the best one that may be kept, and the other gains that might have been.

        Args:
            effects: What becomes of the training, by name of the change.
            forbidden: Says why a change with such an effect is not kept; nothing if it is.
        """
        ratios = {each.name: ratio_of(each.name, self.rounds) for each in self.stage.candidates}
        counts = {name: sum(name in each for each in self.rounds) for name in ratios}
        gains = {name for name in ratios if name not in self.lost and is_gain(ratios[name], counts[name])}
        allowed = [each for each in self.stage.candidates if each.name in gains and not forbidden(effects[each.name])]
        best = max(allowed, key=lambda each: getattr(ratios[each.name], "median", 0.0), default=None)
        results = []
        for each in self.stage.candidates:
            name = each.name
            why = self.lost.get(name) or why_not(ratios[name], counts[name])
            if name in gains:
                why = "" if each is best else forbidden(effects[name]) or "another was better"
            results.append(Result(self.stage.name, each, effects[name], ratios[name], counts[name], each is best, why))
        return results, best, [each for each in allowed if each is not best]
