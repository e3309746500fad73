"""Where the host waits for its GPU in a step of `lockstep.fit`, for bench/gpu_proof.py.

Each setting of `SETTINGS` trains on all GPUs, first as it is, with the clock around each wait for an event or for a
device (these are what torch.cuda.set_sync_debug_mode does not see): where, in which part of the step, how often and how
long. Then, in a run of its own, under set_sync_debug_mode("error"), which raises at the waits that it does see.
"""

import contextlib
import json
import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from bench.gpu_steps import Kind, fit_run, join
from bench.models import tiny_layers
from lockstep.base import accelerator

WARM_UP_STEPS, STEPS = 10, 20
SAMPLES = 16
SOURCES = Path(lockstep.__file__).parent
BEFORE, FORWARD, BACKWARD, UPDATE = (
    "before the forward",
    "in the forward",
    "after the forward",
    "in the update or after",
)


BESIDE = "beside the steps, in thread"


class Mixed(nn.Module):
    """Two heads, of which one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.heads = tiny_layers(20), nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        outputs: Tensor = self.heads[0](self.layers(inputs))
        return outputs


class Recurrent(nn.Module):
    """An LSTM with dropout, whose state cuDNN keeps on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 16, num_layers=2, dropout=0.1, batch_first=True), nn.Linear(16, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        outputs: Tensor = self.head(self.lstm(inputs.unflatten(1, (4, 4)))[0][:, -1])
        return outputs


def mean(model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def weighted(model: Callable[[Tensor], Tensor], batch: Any) -> lockstep.Loss:
    total = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return lockstep.Loss(total, (batch[1] >= 0).sum())


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping": {"clip": 1.0},
    "weights": {"loss": weighted},
    "unused parameters": {"model": Mixed},
    "accumulating": {"accumulate": 2},
    "fp16": {"precision": "fp16"},
    "on_nan=skip": {"on_nan": "skip"},
    "LSTM with dropout": {"model": Recurrent},
    "fused": {"fused": True},
    "fp16, fused": {"precision": "fp16", "fused": True},
    "on_nan=skip, fused": {"on_nan": "skip", "fused": True},
    "ddp-zero1": {"strategy": "ddp-zero1"},
}


class Waits:
    """Counts waits for events and devices, by place and part of the step, in all threads; see `watching`."""

    def __init__(self) -> None:
        self.part = BEFORE
        self.found: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._local = threading.local()

    def timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``wait`` with the clock around it, but not around waits within other waits."""

        def waiting(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._local, "waits", False):
                return wait(*args, **kwargs)
            self._local.waits, start = True, time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                self._local.waits = False
                self.found[place_of(sys._getframe(1)), self.part].append(time.perf_counter() - start)

        return waiting

    def figures(self) -> list[dict[str, Any]]:
        """Return them by the seconds that they took."""
        found = [
            {"place": place, "part": part, "per_step": len(each) / STEPS, "seconds_per_step": sum(each) / STEPS}
            for (place, part), each in self.found.items()
        ]
        return sorted(found, key=lambda each: -each["seconds_per_step"])


def place_of(frame: FrameType | None) -> str:
    """Return the line of Lockstep's that waits, but for the function that all use, and the thread if it is its own."""
    while frame is not None and (
        SOURCES not in Path(frame.f_code.co_filename).parents or frame.f_code.co_filename == accelerator.__file__
    ):
        frame = frame.f_back
    name = threading.current_thread().name
    place = "elsewhere" if frame is None else f"{Path(frame.f_code.co_filename).relative_to(SOURCES)}:{frame.f_lineno}"
    # Autograd's threads, which Python calls dummies, are a part of the step.
    return place if name == "MainThread" or name.startswith("Dummy-") else f"{place} ({BESIDE} {name})"


@contextlib.contextmanager
def watching(waits: Waits) -> Iterator[None]:
    """Have the functions that wait tell ``waits`` how long; undone at the end. Call it when all has been imported.

    A ``torch.Event`` cannot be patched; the package waits for its own through one function.
    """
    owners: list[Any] = [torch.cuda.Event, torch.cuda.Stream, torch.cuda, torch.accelerator]
    ours = accelerator.synchronize
    owners += [each for name, each in sys.modules.items() if name.startswith("lockstep") and holds(each, ours)]
    before = [(owner, owner.synchronize) for owner in owners]
    try:
        for owner, wait in before:
            owner.synchronize = waits.timed(wait)
        yield
    finally:
        for owner, wait in before:
            owner.synchronize = wait


def holds(module: ModuleType, function: Callable[..., Any]) -> bool:
    return vars(module).get("synchronize") is function


def run_of(world: Any, setting: dict[str, Any], waits: Waits) -> Any:
    """Return a run of `fit` that says to ``waits`` which part of a step begins. Collective: every rank."""
    changes = dict(setting)
    loss_of, fused = changes.pop("loss", mean), changes.pop("fused", None)
    count = SAMPLES * world.world_size

    def loss(model: Any, batch: Any) -> Any:
        waits.part = FORWARD
        found = loss_of(model, batch)
        waits.part = BACKWARD
        return found

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=1e-3, fused=fused)
        made.register_step_pre_hook(lambda *_: setattr(waits, "part", UPDATE))
        return made

    task = lockstep.Task(
        model=changes.pop("model", partial(tiny_layers, 20)),
        dataset=lambda: TensorDataset(torch.randn(4 * count, 16), torch.randint(10, (4 * count,))),
        loss=loss,
        optimizer=optimizer,
        global_batch_size=count,
    )
    return fit_run(task, world, **changes)


def is_late(world: lockstep.World, deadline: float) -> bool:
    """Return whether it is past ``deadline`` by some rank's clock. Collective: every rank."""
    late = torch.tensor([time.time() > deadline], device=world.device).int()
    torch.distributed.all_reduce(late, torch.distributed.ReduceOp.MAX)
    return bool(late)


def measure(names: list[str], kind: Kind, folder: str, deadline: float = math.inf) -> None:
    """Write the waits of rank 0 into a file for each setting that begins in time. Collective: every rank."""
    with join(kind) as world:
        for name in names:
            if is_late(world, deadline):
                break
            waits = Waits()
            with watching(waits), contextlib.closing(run_of(world, SETTINGS[name], waits)) as run:
                for number in range(WARM_UP_STEPS + STEPS):
                    if number == WARM_UP_STEPS:
                        waits.found.clear()
                    waits.part = BEFORE
                    run.step()
            if world.is_rank_zero:
                Path(folder, f"{name}.json").write_text(json.dumps(waits.figures()))


def check(names: list[str], kind: Kind, folder: str, deadline: float = math.inf) -> None:
    """Run whole steps in which torch raises where the host waits; leave a file for each setting that came through.

    No setting begins after ``deadline``. Collective: every rank.
    """
    with join(kind) as world:
        for name in names:
            if is_late(world, deadline):
                break
            with contextlib.closing(run_of(world, SETTINGS[name], Waits())) as run:
                for _ in range(WARM_UP_STEPS):
                    run.step()
                set_mode(kind, "error")
                try:
                    for _ in range(STEPS):
                        run.step()
                finally:
                    set_mode(kind, "default")
            world.barrier()
            if world.is_rank_zero:
                Path(folder, name).touch()


def set_mode(kind: Kind, mode: str) -> None:
    if kind == "cuda":
        torch.cuda.set_sync_debug_mode(mode)
