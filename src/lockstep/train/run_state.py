"""What the ranks of a run know together, apart from the trainer: what is due, what was found, where it ends.

It is the same on every rank. A rank that takes the place of a lost one gets it as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from lockstep.checkpoints.object_store import place_of
from lockstep.train.evaluate import Evaluation

if TYPE_CHECKING:
    from lockstep.checkpoints.object_store import Place


class Action(StrEnum):
    """What may be due after a step. Each is collective, and an attempt of its own if a rank is lost in it."""

    AGREE = "agree"  # whether a checkpoint could not be written
    CHECK = "check"  # that all ranks hold the same bits
    COMPARE = "compare"  # the speed of the ranks
    EVALUATE = "evaluate"
    ON_EVALUATION = "on_evaluation"
    GRANT = "grant"  # what callbacks of any rank have asked for
    SAVE = "save"


@dataclass
class RunState:
    """The state of a run.

    Attributes:
        first_step, num_steps: Steps done before this start of the run, and the step after which it ends.
        due: What is due after the last step, in order.
        stops: Whether the run is to stop and save.
        has_evaluated: Whether there was an evaluation.
        evaluations, best: The evaluations of this start, and the best one of the run.
        has_new_best: Whether the best one has not been saved.
        checkpoint: The newest checkpoint.
        announced: The last one that callbacks got.
        saved: The step of the newest checkpoint, and the loss of an evaluation after it.
        found: Metrics after the step of the newest checkpoint.
        saves_after: The step after which callbacks have asked for a checkpoint.
    """

    first_step: int = 0
    num_steps: int = 0
    due: list[Action] = field(default_factory=list)
    stops: bool = False
    has_evaluated: bool = False
    evaluations: list[Evaluation] = field(default_factory=list)
    best: Evaluation | None = None
    has_new_best: bool = False
    checkpoint: Place | None = None
    announced: Place | None = None
    saved: tuple[int, float | None] | None = None
    found: dict[str, float] = field(default_factory=dict)
    saves_after: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain data for another rank."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        places = {name: values[name] and str(values[name]) for name in ("checkpoint", "announced")}
        return values | places | {"due": [action.value for action in self.due]}

    @classmethod
    def of(cls, state: dict[str, Any]) -> RunState:
        """Return what another rank's `state_dict` has."""
        places = {name: state[name] and place_of(state[name]) for name in ("checkpoint", "announced")}
        return cls(**state | places | {"due": [Action(name) for name in state["due"]]})
