"""What the engines cost in a world of one rank: a step with ours and with torch's, over the bare training loop.

Scripts are written for many ranks and tried with one; there, nothing is to be synchronised. A round gives every
contender one short turn, in an order that rotates, in one process. bench/contenders.py says what they are.

For each model: the median time of a step, and the time divided by the bare loop's ("none"), from the rounds' ratios,
with the range that holds the true median with 90% certainty.

Usage: python -m bench.one_rank [--quick] [--rounds N] [--json FILE]
"""

import functools
import math
from typing import Any

import torch

from bench.contenders import join_ranks, make_trainee
from bench.harness import SECTION_TIMEOUT_S, Rounds, parser, record, run_rounds, show, summarize
from bench.models import MODELS, SMALL
from bench.steps import WARM_UP_STEPS, turn
from lockstep import init, launch

CONTENDERS = ("none", "again", "torch", "ours")
"""``again`` is the bare loop once more: how well this machine can tell two things apart that are the same."""
TRAINED = {"small mlp": SMALL, "tiny layers": MODELS["tiny layers"], "gpt": MODELS["gpt"]}


def measure(name: str, num_rounds: int, turn_s: float) -> Rounds:
    """Return the seconds of a step, a round each, by contender."""
    torch.set_num_threads(1)
    with init():
        ranks = join_ranks(TRAINED[name])
        trainees = {
            contender: make_trainee("none" if contender == "again" else contender, TRAINED[name], ranks)
            for contender in CONTENDERS
        }
        for trainee in trainees.values():
            turn(trainee, ranks, WARM_UP_STEPS)
        count = max(2, math.ceil(turn_s / turn(trainees["none"], ranks, 5)))
        turns = {other: functools.partial(turn, trainee, ranks, count) for other, trainee in trainees.items()}
        return run_rounds(turns, num_rounds, name)


def main() -> None:
    options = parser(__doc__, rounds=150).parse_args()
    num_rounds, turn_s = (5, 0.01) if options.quick else (options.rounds, 0.05)

    def measure_all() -> dict[str, Any]:
        figures = {}
        for name in TRAINED:
            seconds = launch(measure, name, num_rounds, turn_s, devices=1, timeout_s=SECTION_TIMEOUT_S)[0]
            figures[name] = summarize(seconds)
            show(f"{name}: 1 rank, {num_rounds} rounds", seconds, ("none",))
        return {"models": figures}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
