"""What it costs to know the samples of a step, by the length of the data set; against a table of the whole epoch.

Processor time, in one thread, so that other work on the machine hardly shows. "at once" is the first batch of 256 after
nothing was known, as in a run that is resumed in the middle of an epoch; "a batch" the mean over those that follow, to
which a block of 16384 samples is worked out now and then. Median and quartiles over rounds with other seeds.
`torch.randperm`, which samplers make for every epoch, holds 8 bytes for each sample.

Usage: python bench/order.py [--rounds N] > bench/results/order.txt
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from lockstep.data import order
from lockstep.data.order import GlobalOrder

BATCH, NUM_BATCHES = 256, 1000
LENGTHS = (10**3, 10**6, 10**8, 10**12)
LONGEST_TABLE = 10**8


def seconds(function: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def batches(samples: GlobalOrder, first: int, number: int) -> None:
    """Work out so many batches, one after the other."""
    for step in range(first, first + number):
        samples.batch(step)


def spread(values: list[float], unit: float) -> str:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle / unit:9.3f}   {low / unit:.3f} to {high / unit:.3f}"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{rounds} rounds\n\n{'samples':>18}{'':16}{'median':>9}   quartiles")
    for length in LENGTHS:
        at_once, each, table = [], [], []
        for seed in range(rounds):
            samples = GlobalOrder(length, BATCH, seed)
            first = samples.steps_per_epoch // 2
            order._block.cache_clear()
            at_once.append(seconds(lambda samples=samples, first=first: batches(samples, first, 1)))
            each.append(
                seconds(lambda samples=samples, first=first: batches(samples, first, NUM_BATCHES)) / NUM_BATCHES
            )
            if length < LONGEST_TABLE or (length == LONGEST_TABLE and seed < 3):
                table.append(seconds(lambda length=length: torch.randperm(length)))
        print(f"{length:18,}  at once, ms   {spread(at_once, 1e-3)}")
        print(f"{'':18}  a batch, ms   {spread(each, 1e-3)}")
        if table:
            print(f"{'':18}  randperm, ms  {spread(table, 1e-3)}")


if __name__ == "__main__":
    main()
