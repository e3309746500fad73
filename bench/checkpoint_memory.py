"""The memory of every rank while a model is built, saved, loaded on another number of ranks, and exported.

    python bench/checkpoint_memory.py --mib 400 --ranks 4 --readers 3 [--url s3://bucket/run]

On CPUs, with `fit`'s strategies fsdp and ddp-zero1 and Adam: the model has ``--mib``, the whole state three times that.
Shown is, for every rank, how many MiB of its own (anonymous and shared memory, not the pages of files) it held before,
and by how many this rose at most, sampled every 2 ms. Each line is of processes of its own, but ``first step``, which
follows the load: ZeRO-1 lays its buffers then.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoints.checkpoint import Checkpoints
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer

NUM_LAYERS = 8


def own_mib() -> float:
    """Return what this process holds of memory that is not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


class Peak:
    """Samples the memory of this process within: ``before``, and by how much it ``rose``."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed would take what comes without a trace
        self.before = self._most = own_mib()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self._most = max(self._most, own_mib())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.rose = max(self._most, own_mib()) - self.before


def make_trainer(mib: float, strategy: Any, world: lockstep.World, *, device: str = "cpu") -> Trainer:
    width = int((mib * 2**20 / 4 / NUM_LAYERS) ** 0.5)

    def model() -> nn.Module:
        return nn.Sequential(*[nn.Linear(width, width, bias=False, device=device) for _ in range(NUM_LAYERS)])

    task = lockstep.Task(
        model=model,
        dataset=lambda: TensorDataset(torch.randn(24, width)),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-5),
        global_batch_size=12,
    )
    return Trainer(task, Settings(check_replicas=0), world, strategy=strategy, devices=[torch.device("cpu")])


def folder_of(place: str) -> Any:
    if "://" not in place:
        return Path(place)
    from lockstep.checkpoints.object_store import place_of

    return place_of(place)


def build(mib: float, strategy: str, place: str, how: str) -> list[tuple[str, float, float]]:
    with lockstep.init(device="cpu") as world:
        make_trainer(1, strategy, world)  # what is imported and set up once
        with Peak() as peak:
            trainer = make_trainer(mib, strategy, world, device="meta" if "meta" in how else "cpu")
        del trainer
        return [(how, peak.before, peak.rose)]


def save(mib: float, strategy: str, place: str, how: str) -> list[tuple[str, float, float]]:
    """Return the name, the memory before, and by how much it rose, of each measurement on this rank."""
    with lockstep.init(device="cpu") as world:
        trainer = make_trainer(mib, strategy, world)
        for _ in range(2):
            trainer.step()
        trainer.optimizer.zero_grad()
        with Checkpoints(folder_of(place), world, blocking=how == "save, blocking") as checkpoints, Peak() as peak:
            checkpoints.save(trainer.state_dict(), step=2)
            checkpoints.finish()
        return [(how, peak.before, peak.rose)]


def export(mib: float, strategy: str, place: str, how: str) -> list[tuple[str, float, float]]:
    with lockstep.init(device="cpu") as world, tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(mib, strategy, world)
        trainer.step()
        trainer.optimizer.zero_grad()
        with Peak() as peak:
            if hasattr(trainer, "export"):
                trainer.export(Path(folder) / "weights.safetensors", writes=world.is_rank_zero)
            else:  # before there was one
                from lockstep.checkpoints.model_state import export_weights

                model = trainer.model
                if world.is_rank_zero:
                    export_weights(model, Path(folder) / "weights.safetensors")
        return [(how, peak.before, peak.rose)]


def load(mib: float, strategy: str, place: str, how: str) -> list[tuple[str, float, float]]:
    with lockstep.init(device="cpu") as world:
        trainer = make_trainer(mib, strategy, world)
        with Checkpoints(folder_of(place), world) as checkpoints:
            with Peak() as peak:
                state = checkpoints.load(required=True)
                assert state is not None
                trainer.load_state_dict(state)
                del state
            with Peak() as step:
                trainer.step()
        return [(how, peak.before, peak.rose), ("first step", step.before, step.rose)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=400.0, help="size of the model")
    parser.add_argument("--ranks", type=int, default=4, help="that save")
    parser.add_argument("--readers", type=int, default=3, help="that load")
    parser.add_argument("--strategies", default="fsdp,ddp-zero1", metavar="S,..")
    parser.add_argument("--url", help="in an object store, to save to; a temporary folder if not given")
    args = parser.parse_args()
    print(f"model {args.mib:.0f} MiB, state {3 * args.mib:.0f} MiB; by rank: MiB before + at most")
    for strategy in args.strategies.split(","):
        with tempfile.TemporaryDirectory() as name:
            place = f"{name}/run" if args.url is None else f"{args.url}/{strategy}"
            for how, function, num_ranks in (
                ("build", build, args.ranks),
                ("build, meta", build, args.ranks),
                ("save, blocking", save, args.ranks),
                ("save", save, args.ranks),
                ("load", load, args.readers),
                ("export", export, args.ranks),
            ):
                ranks = lockstep.launch(function, args.mib, strategy, place, how, devices=num_ranks)
                for line in zip(*ranks, strict=True):
                    text = "  ".join(f"{before:6.0f} + {rose:5.0f}" for _, before, rose in line)
                    print(f"{strategy:10} {line[0][0]:15} {text}", flush=True)


if __name__ == "__main__":
    main()
