"""What the host does in a backward beyond a bare one: hooks, copies into buckets and launches, beside torch's reducer.

One process of a fake group of 8 ranks, whose collectives do nothing. The parameters are small, as many as ResNet-50,
a transformer and a large model have. A round gives every contender one turn of a few backwards, in an order that
rotates, and takes the fastest of each turn.

    bare            the module alone
    torch-hook      torch.nn.parallel.DistributedDataParallel with a communication hook in Python that reduces nothing
    torch-reduce    the same with a hook that starts an all-reduce; without a hook torch's class fails on a fake group
    ours            lockstep.DistributedDataParallel, which starts an all-reduce for each bucket

For each number of parameters, with the buckets that both classes make of them by themselves (one or two), and with 32
parameters in a bucket: the median time of a backward, and that of ``ours`` beyond ``bare`` over each of torch's beyond
``bare``, from the rounds' ratios, with the range that holds the true median with 90% certainty.

Usage: python -m bench.host_time [--quick] [--rounds N] [--json FILE]
"""

import functools
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
CAPS_MIB = {"usual buckets": None, "32 in a bucket": 32 * 4 * NUMEL / 2**20}
CONTENDERS = ("bare", "torch-hook", "torch-reduce", "ours")
PEERS = ("torch-hook", "torch-reduce")


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


def reduced(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """Start an all-reduce; the future of a fake one has no result."""
    dist.all_reduce(bucket.buffer(), async_op=True)
    return completed(state, bucket)


def make(contender: str, count: int, cap_mib: float | None) -> Callable[[], float]:
    """Return a step that returns the seconds of its backward."""
    model: nn.Module = Chain(count)
    if contender.startswith("torch"):
        model = TorchDDP(model, bucket_cap_mb=cap_mib)
        model.register_comm_hook(None, completed if contender == "torch-hook" else reduced)
    elif contender == "ours":
        model = lockstep.DistributedDataParallel(model, bucket_cap_mb=cap_mib)
    inputs = torch.ones(NUMEL)

    def step() -> float:
        model.zero_grad()
        loss = model(inputs).sum()
        start = time.perf_counter()
        loss.backward()
        return time.perf_counter() - start

    return step


def turn(step: Callable[[], float], count: int) -> float:
    """Return the seconds of the fastest of ``count`` backwards."""
    return min(step() for _ in range(count))


def measure(count: int, caps: str, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Measure all contenders with ``count`` parameters, and print what was found."""
    steps = {contender: make(contender, count, CAPS_MIB[caps]) for contender in CONTENDERS}
    for step in steps.values():
        turn(step, 10)
    turns = {each: functools.partial(turn, step, num_steps) for each, step in steps.items()}
    seconds = run_rounds(turns, num_rounds, f"{count} parameters, {caps}")
    beyond = {
        each: [mine - bare for mine, bare in zip(seconds[each], seconds["bare"], strict=True)] for each in CONTENDERS
    }
    found = summarize(seconds)
    print(f"\n{count} parameters, {caps}, ms: ", end="")
    print(", ".join(f"{each} {found['seconds'][each]['median'] * 1e3:.3f}" for each in CONTENDERS))
    for peer in PEERS:
        ratio = paired_ratio(beyond["ours"], beyond[peer])
        found[f"ours_over_{peer}"] = asdict(ratio)
        print(f"  ours over {peer:<13} {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})", flush=True)
    return found


def main() -> None:
    options = parser(__doc__, rounds=60).parse_args()
    num_rounds, num_steps = (3, 3) if options.quick else (options.rounds, 10)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)

    def measure_all() -> dict[str, Any]:
        return {
            f"{count} parameters, {caps}": measure(count, caps, num_rounds, num_steps)
            for caps in CAPS_MIB
            for count in NUM_PARAMETERS
        }

    record(options.json, measure_all)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
