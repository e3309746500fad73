"""What synchronisation costs as ranks grow: 1, 2, 4, 8 and 16 ranks on the cores there are, the same work for each.

With more ranks than cores, who waits takes the core from who works, unless waiting is done asleep. Every rank trains
the same model on a batch of its own: with N ranks and C cores a step cannot take less than N / C times one rank's. What
it takes beyond no synchronisation ("none") is what that costs. bench/contenders.py says what the contenders are.

For each number of ranks: the median time of a step on the slowest rank, interleaved, and the time divided by that of no
synchronisation, from the rounds' ratios, with the range that holds the true median with 90% certainty.

Usage: python -m bench.ranks [--quick] [--rounds N] [--json FILE]
"""

import functools
import math
from typing import Any

import torch

from bench.contenders import join_ranks, make_trainee
from bench.harness import SECTION_TIMEOUT_S, Rounds, parser, record, run_rounds, show, slowest, summarize
from bench.models import MODELS
from bench.steps import turn
from lockstep import init, launch

NUM_RANKS = (1, 2, 4, 8, 16)
CONTENDERS = ("none", "torch", "torch-shm", "ours")
TRAINED = ("lstm", "tiny layers")
"""One whose steps are mostly computing, one whose steps are mostly many small messages and bookkeeping."""
WARM_UP_STEPS = 3


def measure(name: str, num_rounds: int, turn_s: float) -> Rounds:
    """Return the seconds of a step on the slowest rank, a round each, by contender. Collective: every rank."""
    torch.set_num_threads(1)
    with init(backend="gloo") as world:
        ranks = join_ranks(MODELS[name])
        trainees = {contender: make_trainee(contender, MODELS[name], ranks) for contender in CONTENDERS}
        for trainee in trainees.values():
            turn(trainee, ranks, WARM_UP_STEPS)
        count = max(2, math.ceil(turn_s / turn(trainees["none"], ranks, 2)))
        turns = {other: functools.partial(turn, trainee, ranks, count) for other, trainee in trainees.items()}
        title = f"{name}, {world.world_size} ranks"
        seconds = run_rounds(turns, num_rounds, title, shown=world.is_rank_zero)
        slowest(0.0)
        return seconds


def main() -> None:
    options = parser(__doc__, rounds=10).parse_args()
    num_rounds, turn_s = (3, 0.02) if options.quick else (options.rounds, 0.4)

    def measure_all() -> dict[str, Any]:
        figures: dict[str, dict[str, Any]] = {name: {} for name in TRAINED}
        for num_ranks in NUM_RANKS:
            for name in TRAINED:
                seconds = launch(measure, name, num_rounds, turn_s, devices=num_ranks, timeout_s=SECTION_TIMEOUT_S)[0]
                figures[name][str(num_ranks)] = summarize(seconds)
                show(f"{name}: {num_ranks} ranks, {num_rounds} rounds", seconds, ("none", "torch"))
        return {"models": figures}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
