"""What can be done bucket by bucket, on two CPU ranks: sizes, the wire, clipping, and optimizers within backward.

A round gives every contender one turn of a few steps, in an order that rotates, in the same processes. All train with
AdamW (``-clip`` contenders cut the norm, too).

    usual         lockstep.DistributedDataParallel as it comes
    1 MiB, one    buckets of 1 MiB, and one for all
    within        model.overlap_optimizer(optimizer): each bucket is stepped as soon as it is reduced
    bf16          compression="bf16"
    bf16-hook     torch's bf16_compress_hook, registered with ours
    clip          model.clip_grad_norm_(1.0), a bucket at a time
    clip-torch    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

For each model: the median time of a step, and the time divided by that of ``usual`` and of ``clip-torch``, from the
rounds' ratios, with the range that holds the true median with 90% certainty.

Usage: python -m bench.buckets [--quick] [--rounds N] [--backend shm|gloo] [--only MODEL]
       [--contender NAME] [--json FILE]
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from bench.harness import SECTION_TIMEOUT_S, Rounds, parser, record, run_rounds, show, summarize, timed
from bench.models import MODELS, Batch, Workload, loss_of
from lockstep import DistributedDataParallel, init, launch

OPTIONS: dict[str, dict[str, Any]] = {
    "1 MiB": {"bucket_cap_mb": 1},
    "one": {"bucket_cap_mb": 4096},
    "bf16": {"compression": "bf16"},
}
CONTENDERS = ("usual", "1 MiB", "one", "within", "bf16", "bf16-hook", "clip", "clip-torch")
WARM_UP_STEPS = 30


def make_step(contender: str, workload: Workload, batch: Batch) -> tuple[DistributedDataParallel, Callable[[], None]]:
    """Return a wrapped model and a step of its training."""
    torch.manual_seed(0)
    model = DistributedDataParallel(workload.model(), **OPTIONS.get(contender, {}))
    if contender == "bf16-hook":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if contender == "within":
        model.overlap_optimizer(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if contender == "clip":
            model.clip_grad_norm_(1.0)
        if contender == "clip-torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if contender != "within":
            optimizer.step()

    return model, step


def measure(name: str, contenders: list[str], backend: str, num_rounds: int, turn_s: float) -> Rounds:
    """Return the seconds of a step, a round each, by contender."""
    torch.set_num_threads(1)
    with init(backend=backend) as world:
        torch.manual_seed(1 + world.rank)
        batch = MODELS[name].batch()
        made = {contender: make_step(contender, MODELS[name], batch) for contender in contenders}
        for _, step in made.values():
            timed(step, WARM_UP_STEPS)
        count = max(2, math.ceil(turn_s / slowest(timed(made["usual"][1], 5))))
        turns = {each: functools.partial(turn, step, count) for each, (_, step) in made.items()}
        return run_rounds(turns, num_rounds, name, shown=world.is_rank_zero)


def turn(step: Callable[[], None], count: int) -> float:
    """Return the seconds of one of ``count`` steps on the slowest rank. Collective: every rank."""
    slowest(0.0)
    return slowest(timed(step, count))


def slowest(seconds: float) -> float:
    """Return the largest of all ranks' ``seconds``. Collective: every rank; also lets them leave together."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def main() -> None:
    made = parser(__doc__, rounds=40)
    made.add_argument("--backend", choices=("shm", "gloo"), default="shm", help="what carries the buckets (shm)")
    made.add_argument("--only", choices=MODELS, action="append", help="this model, not all; may be repeated")
    made.add_argument("--contender", choices=CONTENDERS[1:], action="append", help="beside usual; may be repeated")
    options = made.parse_args()
    contenders = list(dict.fromkeys(["usual", *(options.contender or CONTENDERS)]))
    num_rounds, turn_s = (3, 0.02) if options.quick else (options.rounds, 0.15)

    def measure_all() -> dict[str, Any]:
        figures = {}
        for name in options.only or MODELS:
            how = (name, contenders, options.backend, num_rounds, turn_s)
            found = launch(measure, *how, devices=2, timeout_s=SECTION_TIMEOUT_S)
            figures[name] = summarize(found[0])
            show(f"{name}: 2 ranks on {options.backend}, {num_rounds} rounds", found[0], ("usual", "clip-torch"))
        return {"backend": options.backend, "models": figures}

    record(options.json, measure_all)


if __name__ == "__main__":
    main()
