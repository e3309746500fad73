"""What it costs to look after a run: is each step's gradient finite, and do the ranks still hold the same bits?

Two ranks train a task with the defaults of `fit`. After each step, what it did for these two is done once more and
timed: the verdict on the gradient, which is part of every step, and the comparison of parameters, buffers and optimizer
state, which comes once in `check_replicas` (100) steps. Shown are medians with quartiles over the steps, and what both
come to, in parts of a step.

Usage: python bench/health.py [TASK.py ...] [--steps N] > bench/results/health.txt
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import lockstep
from lockstep import launch
from lockstep.train.settings import Settings
from lockstep.train.task import load_task
from lockstep.train.trainer import Trainer

EXAMPLES = ("examples/digits.py", "examples/gpt.py")
WARMUP, TIMEOUT_S = 5, 500.0


def seconds(function: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(path: str, num_steps: int) -> tuple[int, list[tuple[float, float, float]]]:
    """Return the size of the state in bytes, and for each step its seconds, those of the verdict and of a check."""
    with lockstep.init(device="cpu") as world:
        torch.set_num_threads(1)
        settings = Settings(check_replicas=0, steps=num_steps + WARMUP)
        loop = Trainer(load_task(path), settings, world, strategy="ddp", devices=[torch.device("cpu")])
        gradients = loop.updater.gradients
        rows = []

        def verdict() -> None:
            assert gradients.is_finite(gradients.norm())

        for step in range(num_steps + WARMUP):
            world.barrier()
            row = (seconds(loop.step), seconds(verdict), seconds(loop.check_replicas))
            rows += [row] if step >= WARMUP else []
        state = [value for entries in loop.optimizer.state.values() for value in entries.values()]
        size = sum(each.nbytes for each in [*loop.model.parameters(), *state] if isinstance(each, torch.Tensor))
        loop.close()
        return size, rows


def spread(values: list[float]) -> str:
    """Return median and quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle * 1e3:9.3f}  ({low * 1e3:.3f} to {high * 1e3:.3f})"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks", nargs="*", default=EXAMPLES)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    every = Settings().check_replicas
    for path in options.tasks:
        size, rows = launch(measure, path, options.steps, devices=2, timeout_s=TIMEOUT_S)[0]
        steps, verdicts, checks = (list(column) for column in zip(*rows, strict=True))
        step, verdict, check = map(statistics.median, (steps, verdicts, checks))
        print(f"{path}: {size / 2**20:.1f} MiB of parameters and optimizer state")
        print(f"  step, ms                    {spread(steps)}")
        print(f"  verdict on a gradient, ms   {spread(verdicts)}   {verdict / step:.2%} of a step")
        print(f"  check of replicas, ms       {spread(checks)}   {check / every / step:.3%} of a step at {every}")


if __name__ == "__main__":
    main()
