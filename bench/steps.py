"""Training steps on two CPU ranks: ours, torch's, what is built on torch's, and no synchronisation at all.

Every contender trains the same model from the same weights on the same samples: forward, loss, backward and AdamW, one
core a rank. A round gives each of them one turn of a few steps, in the same processes; the order rotates and every
other round runs backwards, so that whatever else the machine does hits all alike. A turn lasts as long as its slowest
rank takes. bench/contenders.py says what each contender is, bench/models.py what the models are.

For each model: the median time of a step, and the time divided by that of no synchronisation and of torch's, from the
rounds' ratios, with the range that holds the true median with 90% certainty. The weights of all contenders that compute
the same thing must agree at the end, or the script fails: a step that does less is no faster step.

Usage: python -m bench.steps [--quick] [--rounds N] [--fused] [--large] [--only MODEL] [--contender NAME] [--json FILE]
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.contenders import MAKE, Ranks, Trainee, join_ranks, make_trainee, missing
from bench.harness import SECTION_TIMEOUT_S, Rounds, parser, record, run_rounds, show, slowest, summarize, timed
from bench.models import LARGE_MODELS, MODELS
from lockstep import init, launch

NUM_RANKS = 2
WARM_UP_STEPS = 6
REFERENCE = "torch"
DIFFERENT_ON_PURPOSE = ("none", "single")
"""One trains each rank by itself, the other normalises over the whole batch where there is batch norm."""
WEIGHT_TOLERANCE = 1e-3
"""Largest difference of weights at the end, relative to their norm: sums in another order, over hundreds of steps."""


@dataclass(frozen=True)
class Plan:
    """How long to measure whom."""

    rounds: int
    turn_s: float
    contenders: list[str]
    fused: bool = False


def measure(name: str, plan: Plan) -> Rounds:
    """Return the seconds of a step on the slowest rank, a round each, by contender. Collective: every rank."""
    torch.set_num_threads(1)
    with init(backend="gloo") as world:
        workload = {**MODELS, **LARGE_MODELS}[name]
        ranks = join_ranks(workload, fused=plan.fused)
        trainees = {contender: make_trainee(contender, workload, ranks) for contender in plan.contenders}
        for trainee in trainees.values():
            turn(trainee, ranks, WARM_UP_STEPS)
        count = max(3, math.ceil(plan.turn_s / turn(trainees[REFERENCE], ranks, 3)))
        for other in (contender for contender in trainees if contender != REFERENCE):
            turn(trainees[other], ranks, 3)
        turns = {other: functools.partial(turn, trainee, ranks, count) for other, trainee in trainees.items()}
        seconds = run_rounds(turns, plan.rounds, name, shown=world.is_rank_zero)
        reference = trainees[REFERENCE]
        assert reference is not None
        for other, trainee in trainees.items():
            if other not in DIFFERENT_ON_PURPOSE and trainee is not None:
                require_equal(other, trainee.bare, reference.bare)
        return seconds


def turn(trainee: Trainee | None, ranks: Ranks, count: int) -> float:
    """Return the seconds of one of ``count`` steps on the slowest rank. Collective: every rank."""
    slowest(0.0)
    if trainee is None:
        return slowest(0.0)
    batch, step = ranks.batches[ranks.gloo.rank()], trainee.step
    return slowest(timed(lambda: step(batch), count))


def require_equal(name: str, model: nn.Module, reference: nn.Module) -> None:
    """Check that both were trained alike."""
    first, second = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, reference))
    difference = float((first - second).norm() / second.norm())
    if not difference <= WEIGHT_TOLERANCE:
        raise AssertionError(f"The weights of {name} and {REFERENCE} differ by {difference:.1e} of their norm.")


def main() -> None:
    made = parser(__doc__, rounds=20)
    made.add_argument("--only", choices=[*MODELS, *LARGE_MODELS], action="append", help="this model; may be repeated")
    made.add_argument(
        "--contender", choices=MAKE, action="append", help=f"besides {REFERENCE}, not all; may be repeated"
    )
    made.add_argument("--fused", action="store_true", help="the fused AdamW instead of torch's default")
    made.add_argument("--large", action="store_true", help="the larger models instead")
    options = made.parse_args()
    absent = missing()
    wanted = [*(options.contender or MAKE), REFERENCE]
    contenders = [name for name in MAKE if name in wanted and name not in absent]
    rounds, turn_s = (3, 0.02) if options.quick else (options.rounds, 0.25)
    plan = Plan(rounds, turn_s, contenders, options.fused)

    def measure_all() -> dict[str, Any]:
        for name, reason in absent.items():
            print(f"{name} is missing: {reason}")
        figures = {}
        for name in options.only or (LARGE_MODELS if options.large else MODELS):
            # The ranks have measured the same, as the slowest one counts.
            seconds = launch(measure, name, plan, devices=NUM_RANKS, timeout_s=SECTION_TIMEOUT_S)[0]
            figures[name] = summarize(seconds)
            show(f"{name}: {NUM_RANKS} ranks, {plan.rounds} rounds", seconds, ("none", REFERENCE))
        return {"missing": absent, "models": figures}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
