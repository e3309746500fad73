"""What a step waits for when a checkpoint is saved: beside the training, within the step, and with torch's own means.

    python bench/checkpoint.py --mib 200 --rounds 11

One process on the CPU, or on a GPU with ``--device cuda``. Each round saves the same state with every contender, in
changing order, with some steps before each; a save is followed by steps until what it writes is on disk, so that the
next contender has the disk to itself. Shown is how long the training waits at the save, against ``torch.save`` of the
same round, and how much slower the steps are while it is being written. Only Lockstep computes checksums, and only
Lockstep and dcp wait until the disk has what they wrote.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lockstep
from lockstep.checkpoints.checkpoint import Checkpoints

State = dict[str, Any]
Save = Callable[[State, int], Callable[[], bool]]
"""Saves a state; returns what tells whether all of it is on disk."""


def network(mib: float) -> nn.Module:
    """Return a network whose parameters and Adam state have about ``mib`` MiB."""
    width = int((mib * 2**20 / 4 / 3 / 8) ** 0.5)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(width, width, bias=False), nn.Tanh())])


def contenders(folder: Path, world: lockstep.World) -> dict[str, Save]:
    """Return what saves a state, by name."""
    beside = Checkpoints(folder / "beside", world)
    within = Checkpoints(folder / "within", world, blocking=True)

    def ours(checkpoints: Checkpoints) -> Save:
        def save(state: State, number: int) -> Callable[[], bool]:
            checkpoints.save(state, step=number)
            return lambda: all(write.done() for write in checkpoints._writes)

        return save

    def torch_save(state: State, number: int) -> Callable[[], bool]:
        torch.save(state, folder / "torch.pt")
        return lambda: True

    def dcp_async(state: State, number: int) -> Callable[[], bool]:
        target = folder / "dcp"
        shutil.rmtree(target, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = dcp.async_save(state, checkpoint_id=target)
        assert isinstance(done, Future)

        def is_done() -> bool:
            return done.done() and done.result() is not None

        return is_done

    return {
        "torch.save": torch_save,
        "lockstep, within the step": ours(within),
        "dcp.async_save": dcp_async,
        "lockstep, beside the training": ours(beside),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=100.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps before each save")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder if not given")
    args = parser.parse_args()
    with lockstep.init(device=args.device) as world, tempfile.TemporaryDirectory(dir=args.folder) as name:
        measure(args, world, Path(name))


def measure(args: argparse.Namespace, world: lockstep.World, folder: Path) -> None:
    device = world.device
    torch.manual_seed(0)
    model = network(args.mib).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batch = torch.randn(64, model[0].in_features, device=device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def step() -> float:
        began_at = now()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        return now() - began_at

    step()
    saves = contenders(folder, world)
    waits: dict[str, list[float]] = {name: [] for name in saves}
    beside: dict[str, list[float]] = {name: [] for name in saves}
    alone: list[float] = []
    number = 0
    for round_number in range(args.rounds + 1):
        for name in random.sample(list(saves), len(saves)):
            alone += [step() for _ in range(args.steps)]
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            number += 1
            began_at = now()
            is_done = saves[name](state, number)
            # With CUDA the copies are still under way, and the next kernels wait for them: that counts as well.
            waited = now() - began_at
            during = []
            while not is_done():
                during.append(step())
            if round_number:  # the first of each allocates
                waits[name].append(waited)
                beside[name] += during
    size = sum(value.nbytes for value in model.state_dict().values()) * 3 / 2**20
    usual = statistics.median(alone)
    print(f"state {size:.0f} MiB on {device.type}; {args.rounds} rounds; a step takes {usual * 1e3:.1f} ms")
    print(f"{'':32}{'waits (ms)':>12}{'spread':>18}{'of torch.save':>15}{'steps meanwhile':>17}")
    base = waits["torch.save"]
    for name, values in waits.items():
        low, high = (quantile * 1e3 for quantile in _quartiles(values))
        ratio = statistics.median([mine / theirs for mine, theirs in zip(values, base, strict=True)])
        slower = f"x {statistics.median(beside[name]) / usual:.2f}" if beside[name] else "-"
        print(
            f"{name:32}{statistics.median(values) * 1e3:12.1f}{f'{low:.1f} - {high:.1f}':>18}{ratio:15.3f}{slower:>17}"
        )


def _quartiles(values: list[float]) -> tuple[float, float]:
    cut = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return cut[0], cut[2]


if __name__ == "__main__":
    main()
