"""How good the advice is: tasks with planted causes, what is predicted for each change, and what it gives.

    python bench/advice.py [--minutes M] [--only NAME]

Each task is tuned for M minutes (0.7 if not given) with nothing else running.
"""

import argparse
import math
import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.study.tune import tune


class Sleepy(Dataset):
    """Samples that come from a slow disk."""

    def __init__(self, seconds: float, width: int) -> None:
        self.seconds, self.samples = seconds, torch.randn(512, width)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Tensor:
        time.sleep(self.seconds)
        return self.samples[number]


class Busy(Sleepy):
    """Samples that take a processor to prepare."""

    def __getitem__(self, number: int) -> Tensor:
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass
        return self.samples[number]


def mlp(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers)


def loss(model: nn.Module, batch: list[Tensor] | Tensor) -> Tensor:
    inputs = batch if isinstance(batch, Tensor) else batch[0]
    return model(inputs).square().mean()


def make(
    width: int, depth: int, batch: int, dataset: Dataset | None = None, optimizer=torch.optim.SGD
) -> lockstep.Task:
    return lockstep.Task(
        model=lambda: mlp(width, depth),
        dataset=lambda: TensorDataset(torch.randn(2048, width)) if dataset is None else dataset,
        loss=loss,
        optimizer=lambda params: optimizer(params, lr=1e-3),
        global_batch_size=batch,
    )


PLANTED = {
    "slow disk": (make(256, 4, 64, Sleepy(0.001, 256)), {}),
    "loader that computes": (make(256, 4, 64, Busy(0.0005, 256)), {}),
    "tiny buckets": (make(256, 24, 64), {"bucket_cap_mb": 0.05}),
    "tiny model": (make(16, 2, 32), {}),
    "much to update": (make(1024, 4, 16, optimizer=torch.optim.AdamW), {}),
    "many parameters, little to compute": (make(1024, 4, 8), {}),
    "sound": (make(512, 6, 1024), {}),
}
"""By what was planted: a task, and the settings to begin with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.7)
    parser.add_argument("--only", choices=list(PLANTED))
    options = parser.parse_args()
    errors = []
    for name, (task, start) in PLANTED.items():
        if options.only not in (None, name):
            continue
        outcome = tune(task, devices=2, minutes=options.minutes, start=start, quiet=True)
        print(f"{name} ({outcome.seconds:.0f} s)", flush=True)
        for check in outcome.checks:
            predicted = f"{'at most ' if check.at_most else ''}{check.predicted:.2f}"
            if check.measured is None:
                print(f"    {predicted:>13}  {'-':>20}  {check.change} ({check.why})")
                continue
            spread = f"{check.measured.median:.2f} ({check.measured.low:.2f} - {check.measured.high:.2f})"
            print(f"    {predicted:>13}  {spread:>20}  {check.error:+5.0%}  {check.change}", flush=True)
            if not check.at_most:  # a bound says too little to be judged beside the others
                errors.append(abs(math.log1p(check.error)))
        if not outcome.checks:
            print("    no advice")
        print(f"    found {outcome.found}", flush=True)
    if errors:
        print(f"typical error of {len(errors)} predictions: a factor of {math.exp(median(errors)):.2f}")


if __name__ == "__main__":
    main()
