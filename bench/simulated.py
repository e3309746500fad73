"""What slows a GPU and needs none to be counted, a step, on the simulated accelerator of tests/simulated_device.

    synchronizations  the host waited until a stream had nothing left to do: a copy that blocks, .item(), synchronize()
    event waits       the host waited for an event that it did not know to be over, which one of a step ago soon is
    kernels           operators on tensors of the device; in brackets those beyond the step of one rank by itself
    collectives       of the backend of the device, each on its stream
    to device, host   bytes copied; between devices nothing is
    allocations       tensors that were given memory; in brackets beyond the step of one rank by itself
    segments          those that freed memory could not serve, which costs a real device a synchronization

Averages over steady steps of rank 0 of two, with AdamW. ``none`` is one rank by itself, in the same loop as ``torch``
(torch's DistributedDataParallel) and ``ours`` (lockstep.DistributedDataParallel); batches come from pinned memory.
``fit`` is lockstep.fit with strategy ddp, without logging, on the same model and batches.

Usage: python -m bench.simulated [--quick] [--places] [--json FILE]
"""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from bench.harness import SECTION_TIMEOUT_S, parser, progress, record
from bench.models import MODELS, Batch, loss_of
from tests import simulated_device

NUM_RANKS = 2
WARM_UP, STEPS = 5, 4
CONTENDERS = ("none", "torch", "ours", "fit")
TRAINED = ("gpt", "cnn")
COLUMNS = {
    "synchronizations": "synchronizations",
    "event_waits": "event waits",
    "kernels": "kernels",
    "collectives": "collectives",
    "host_to_device_bytes": "B to device",
    "device_to_host_bytes": "B to host",
    "allocations": "allocations",
    "segments": "segments",
}
RELATIVE = ("kernels", "allocations")
Figures = dict[str, float]


class Window:
    """Counts from the call number `WARM_UP` to the call `STEPS` later; to be called once in each step."""

    def __init__(self) -> None:
        self.calls, self.stack, self.counts = 0, ExitStack(), None

    def __call__(self) -> None:
        """Count from this call on, or up to it, if it is the one."""
        if self.calls == WARM_UP:
            self.counts = self.stack.enter_context(torch.sim.counting())
        if self.calls == WARM_UP + STEPS:
            self.stack.close()
        self.calls += 1

    def figures(self) -> tuple[Figures, Counter]:
        """Return the averages, and how often each line waited or copied in all counted steps."""
        assert self.calls > WARM_UP + STEPS, "too few steps"
        return {name: getattr(self.counts, name) / STEPS for name in COLUMNS}, self.counts.places


def measure(contender: str, name: str) -> tuple[Figures, Counter]:
    """Return what rank 0 counted. Collective: every rank."""
    torch.set_num_threads(1)
    simulated_device.load()
    torch.manual_seed(0)
    window = Window()
    if contender == "fit":
        train_by_fit(name, window)
    else:
        with lockstep.init() as world:
            train(contender, name, world.device, window)
    return window.figures()


def train(contender: str, name: str, device: torch.device, window: Window) -> None:
    """Train in a plain loop."""
    model = MODELS[name].model().to(device)
    if contender == "torch":
        model = TorchDDP(model, device_ids=[device.index])
    elif contender == "ours":
        model = lockstep.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [tuple(part.pin_memory() for part in MODELS[name].batch()) for _ in range(WARM_UP + STEPS + 1)]
    for batch in batches:
        window()
        optimizer.zero_grad()
        loss_of(model, tuple(part.to(device, non_blocking=True) for part in batch)).backward()
        optimizer.step()


def train_by_fit(name: str, window: Window) -> None:
    """Train by `lockstep.fit` on as many samples a step as `train` has."""

    def samples() -> torch.utils.data.TensorDataset:  # called with the seed set, so it is the same on all ranks
        batches: list[Batch] = [MODELS[name].batch() for _ in range(NUM_RANKS * (WARM_UP + STEPS + 2))]
        return torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        window()
        return loss_of(model, batch)

    task = lockstep.Task(
        model=MODELS[name].model,
        dataset=samples,
        loss=loss,
        optimizer=torch.optim.AdamW,
        global_batch_size=NUM_RANKS * len(MODELS[name].batch()[0]),
    )
    lockstep.fit(task, strategy="ddp", epochs=1)


def main() -> None:
    options = parser(__doc__, rounds=1)
    options.add_argument("--places", action="store_true", help="also print the lines that waited or copied")
    options = options.parse_args()
    trained = TRAINED[:1] if options.quick else TRAINED
    simulated_device.build()

    def measure_all() -> dict[str, Any]:
        counted: dict[str, dict[str, Figures]] = {}
        for name in progress(trained, "models"):
            run: Callable[[str], Any] = functools.partial(run_one, name)
            found = {contender: run(contender) for contender in CONTENDERS}
            counted[name] = {contender: figures for contender, (figures, _) in found.items()}
            show(name, counted[name])
            if options.places:
                show_places({contender: places for contender, (_, places) in found.items()})
        return {"counts_per_step": counted}

    record(options.json, measure_all)


def run_one(name: str, contender: str) -> tuple[Figures, Counter]:
    ranks = 1 if contender == "none" else NUM_RANKS
    return lockstep.launch(measure, contender, name, devices=ranks, timeout_s=SECTION_TIMEOUT_S, log_level="warning")[0]


def show(name: str, counted: dict[str, Figures]) -> None:
    print(f"\n{name}, a step of one rank\n  {'':<7}" + "".join(f"{title:>18}" for title in COLUMNS.values()))
    for contender, figures in counted.items():
        line = f"  {contender:<7}"
        for column in COLUMNS:
            extra = figures[column] - counted["none"][column]
            beyond = f" ({extra:+g})" if column in RELATIVE and contender != "none" else ""
            line += f"{f'{figures[column]:g}{beyond}':>18}"
        print(line, flush=True)


def show_places(found: dict[str, Counter]) -> None:
    for contender, places in found.items():
        for (kind, line), count in places.most_common():
            print(f"    {contender}: {count / STEPS:g} a step: {kind}: {line}")


if __name__ == "__main__":
    main()
