"""What the host does in a backward beyond a bare one, as many small parameters show it, beside torch's reducer.

One process of a fake group of 8 ranks, whose collectives do nothing: what is left is the work of hooks, of copies into
buckets and of launches. A model of small parameters has about 32 of them in a bucket. A round gives every contender one
turn of a few backwards, in an order that rotates.

    bare          the module alone
    torch-hook    torch.nn.parallel.DistributedDataParallel with a communication hook in Python that returns a completed
                  future; without a hook torch's class does not work on a fake group
    torch-view    the same with gradient_as_bucket_view=True
    ours          lockstep.DistributedDataParallel

For each number of parameters: the median time of a backward, and ``ours`` beyond ``bare`` over ``torch-hook`` beyond
``bare``, from the rounds' ratios, with the range that holds the true median with 90% certainty. The aim is at most 1.1.

Usage: python -m bench.host_time [--quick] [--rounds N] [--json FILE]
"""

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing._internal.distributed.fake_pg import FakeStore

import lockstep
from bench.harness import parser, record, run_rounds, summarize
from lockstep.study.common import paired_ratio

NUM_PARAMETERS = (161, 291, 2000)
NUMEL = 64
BUCKET_CAP_MIB = 25
CONTENDERS = ("bare", "torch-hook", "torch-view", "ours")


class Chain(nn.Module):
    """Many small parameters, each used once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(NUMEL)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by each parameter."""
        for weight in self.weights:
            x = x * weight
        return x


def completed(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the gradients of this rank: the least that a communication hook can do."""
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def make(contender: str, count: int) -> Callable[[], float]:
    """Return a step that returns the seconds of its backward."""
    model: nn.Module = Chain(count)
    if contender.startswith("torch"):
        model = TorchDDP(model, bucket_cap_mb=BUCKET_CAP_MIB, gradient_as_bucket_view=contender == "torch-view")
        model.register_comm_hook(None, completed)
    elif contender == "ours":
        model = lockstep.DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MIB)
    inputs = torch.ones(NUMEL)

    def step() -> float:
        model.zero_grad()
        loss = model(inputs).sum()
        start = time.perf_counter()
        loss.backward()
        return time.perf_counter() - start

    return step


def turn(step: Callable[[], float], count: int) -> float:
    """Return the seconds of the fastest of ``count`` backwards: others share the cores."""
    return min(step() for _ in range(count))


def main() -> None:
    options = parser(__doc__, rounds=100).parse_args()
    num_rounds, num_steps = (3, 3) if options.quick else (options.rounds, 10)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)

    def measure_all() -> dict[str, Any]:
        figures = {}
        for count in NUM_PARAMETERS:
            steps = {contender: make(contender, count) for contender in CONTENDERS}
            for step in steps.values():
                turn(step, 10)
            gc.collect()
            turns = {each: functools.partial(turn, step, num_steps) for each, step in steps.items()}
            seconds = run_rounds(turns, num_rounds, f"{count} parameters")
            beyond = {
                each: [mine - bare for mine, bare in zip(seconds[each], seconds["bare"], strict=True)]
                for each in CONTENDERS[1:]
            }
            ratio = paired_ratio(beyond["ours"], beyond["torch-hook"])
            found = summarize(seconds)
            figures[str(count)] = {**found, "ours_over_torch_hook": asdict(ratio)}
            medians = "  ".join(f"{each} {found['seconds'][each]['median'] * 1e3:.3f} ms" for each in CONTENDERS)
            print(f"{count} parameters: {medians}")
            print({k: paired_ratio(beyond["ours"], beyond[k]).median for k in beyond})
            print(f"  ours over torch-hook, beyond bare: {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")
        return {"parameters": figures}

    record(options.json, measure_all)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
