"""What the ranks of bench/recovery.py and goodput.py run: a small model in the loop of each contender's documentation.

Each process appends lines to FOLDER/log: seconds of the clock that all processes share, what happened (``start``,
``spare``, ``built``, ``ready``, ``begin`` or ``done`` of a step), rank, process, step, its part of the global batch.
With --digests each rank writes a digest of its weights to FOLDER/weights-STEP-RANK now and then.
"""

import argparse
import hashlib
import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

CHECKPOINT_EVERY = 10
BATCH, WIDTH = 24, 64
STEPS_OF_FIT = 10  # between evaluations, and between checkpoints
DIGEST_EVERY = 20
# Machines may have the same pids: their numbers in the log differ by the number of the machine.
MACHINE, MOST_PIDS = "BENCH_MACHINE", 10_000_000


class Log:
    """The file of a job to which each process adds its lines."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log"
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @property
    def rank(self) -> int:
        """This rank, which may change; of torchft's the group."""
        return int(os.environ.get("REPLICA_GROUP_ID") or os.environ["RANK"])

    def __call__(self, what: str, step: int = 0, share: float = 0.0) -> None:
        """Add a line; it is whole, as it is written by one call."""
        pid = int(os.environ.get(MACHINE, "0")) * MOST_PIDS + os.getpid()
        line = f"{time.monotonic():.6f} {what} {self.rank} {pid} {step} {share:.6f}\n"
        os.write(self._file, line.encode())


def parse() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("loop", choices=tuple(LOOPS))
    made.add_argument("folder", type=Path)
    made.add_argument("--steps", type=int, default=1_000_000)
    made.add_argument("--pause", type=float, default=0.0, help="seconds that computing takes in a step")
    made.add_argument("--build", type=float, default=0.0, help="seconds that it takes to make the model")
    made.add_argument("--backend")
    made.add_argument("--digests", action="store_true")
    made.add_argument("--checkpoints", action="store_true", help="of fit")
    made.add_argument("--every", type=int, default=CHECKPOINT_EVERY, help="steps between checkpoints, not of fit")
    made.add_argument("--save", type=float, default=0.0, help="seconds that writing one takes, not of fit")
    return made.parse_args()


def main() -> None:
    options = parse()
    log = Log(options.folder)
    log("spare" if "LOCKSTEP_SPARE" in os.environ else "start")
    import torch

    torch.set_num_threads(1)
    LOOPS[options.loop](options, log)


def done(options: argparse.Namespace, log: Log, module: Any, step: int, share: float) -> None:
    """Log that a step is done."""
    log("done", step, share)
    if options.digests and step % DIGEST_EVERY == 0:
        weights = b"".join(tensor.detach().numpy().tobytes() for tensor in module.state_dict().values())
        path = options.folder / f"weights-{step}-{log.rank}"
        path.with_suffix(".new").write_text(hashlib.sha256(weights).hexdigest())
        path.with_suffix(".new").replace(path)


def make_net(options: argparse.Namespace) -> Any:
    """Return the model, the same on every rank."""
    import torch
    from torch import nn

    time.sleep(options.build)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))


def loss_of(model: Any, step: int, part: int, num_parts: int, pause_s: float) -> Any:
    """Return the mean loss over this rank's part of a global batch, which follows from the number of the step."""
    import torch

    samples = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    loss = model(samples[part::num_parts]).square().mean()
    time.sleep(pause_s)
    return loss


def in_place(options: argparse.Namespace, log: Log) -> None:
    """Train as the docstring of `lockstep.Recovery` says."""
    import torch

    import lockstep

    with lockstep.init(backend=options.backend) as world:
        module = make_net(options)
        model = lockstep.DistributedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        log("built")
        recovery = lockstep.Recovery(world, model=model, optimizer=optimizer)
        while recovery.step < options.steps:
            step = recovery.step
            with recovery.attempt():
                log("begin", step + 1)
                loss_of(model, step, world.rank, world.world_size, options.pause).backward()
                optimizer.step()
                optimizer.zero_grad()
            if recovery.step > step:
                done(options, log, module, recovery.step, 1 / world.world_size)


def restart(options: argparse.Namespace, log: Log) -> None:
    """Train with Lockstep, from the newest checkpoint."""
    import lockstep

    with lockstep.init(backend=options.backend):
        from_checkpoint(options, log, lockstep.DistributedDataParallel)


def torch_ddp(options: argparse.Namespace, log: Log) -> None:
    """Train with torch's DDP, from the newest checkpoint."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    from_checkpoint(options, log, DistributedDataParallel)
    dist.destroy_process_group()


def from_checkpoint(options: argparse.Namespace, log: Log, wrap: Callable[[Any], Any]) -> None:
    import torch
    import torch.distributed as dist

    module, path, step = make_net(options), options.folder / "checkpoint.pt", 0
    model = wrap(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if path.exists():
        state = torch.load(path)
        step = state["step"]
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    rank, size = dist.get_rank(), dist.get_world_size()
    while step < options.steps:
        log("begin", step + 1)
        loss_of(model, step, rank, size, options.pause).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        done(options, log, module, step, 1 / size)
        if step % options.every == 0 and rank == 0:
            time.sleep(options.save)
            state = {"step": step, "model": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{path}.new")
            os.replace(f"{path}.new", path)


def torchft(options: argparse.Namespace, log: Log) -> None:
    """Train as torchft's README says: a replica group of one rank, and a part of the batch for each group.

    Its DistributedDataParallel ends with an AssertionError when a peer is lost (0.2.0 with torch 2.13).
    """
    from datetime import timedelta

    import torch
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import PureDistributedDataParallel

    module, group, num_groups = make_net(options), log.rank, int(os.environ["NUM_REPLICA_GROUPS"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def state_dict() -> dict[str, Any]:
        return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        replica_id=f"train_{group}",
        timeout=timedelta(seconds=30),
    )
    model, managed = PureDistributedDataParallel(manager, module), Optimizer(manager, optimizer)
    log("ready")
    # At the start of the job all groups wait for each other: else the first would train alone.
    while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and log.path.read_text().count(" ready ") < num_groups:
        time.sleep(0.01)
    while (step := manager.current_step()) < options.steps:
        managed.zero_grad()
        log("begin", step + 1)
        loss_of(model, step, group, num_groups, options.pause).backward()
        takes_part = manager.num_participants() > 0 and manager.is_participating()
        before = manager.current_step()  # that of the others, in a group that joins
        managed.step()
        if manager.current_step() > before:
            done(options, log, module, manager.current_step(), takes_part / num_groups)
    manager.shutdown(wait=False)


def fit(options: argparse.Namespace, log: Log) -> None:
    """Train a task with batch normalisation and dropout with `lockstep.fit`, and evaluate it now and then."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import TensorDataset

    import lockstep

    class Logged(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            first = self.param_groups[0]["params"][0]
            log("done", int(self.state[first]["step"]), 1 / dist.get_world_size())

    def model() -> nn.Module:
        norm, drop = nn.BatchNorm1d(32), nn.Dropout(0.1)
        time.sleep(options.build)
        return nn.Sequential(nn.Linear(16, 32), norm, nn.ReLU(), drop, nn.Linear(32, 4))

    def samples(number: int) -> TensorDataset:
        random = torch.Generator().manual_seed(number)
        return TensorDataset(
            torch.randn(number, 16, generator=random), torch.randint(0, 4, (number,), generator=random)
        )

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            log("begin")
            time.sleep(options.pause)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    task = lockstep.Task(
        name="recovery",
        model=model,
        dataset=lambda: samples(240),
        eval_dataset=lambda: samples(48),
        loss=loss,
        optimizer=lambda parameters: Logged(parameters, lr=1e-2),
        global_batch_size=BATCH,
    )
    kept = {"checkpoint": options.folder / "kept", "checkpoint_every": STEPS_OF_FIT} if options.checkpoints else {}
    export = options.folder / "weights.safetensors"
    # `fit` chooses the backend itself, and goes on in place only in groups that it has made.
    importlib.import_module("lockstep.train.fit").init = partial(lockstep.init, backend=options.backend)  # type: ignore[attr-defined]
    lockstep.fit(task, steps=options.steps, eval_every=STEPS_OF_FIT, export=export, quiet=True, **kept)


LOOPS: dict[str, Callable[[argparse.Namespace, Log], None]] = {
    "in-place": in_place,
    "restart": restart,
    "torch": torch_ddp,
    "torchft": torchft,
    "fit": fit,
}

if __name__ == "__main__":
    main()
