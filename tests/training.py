"""Small tasks in float64 that the tests of training share, and one process on the whole batch as their oracle."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer

NUM_SAMPLES = 50
BATCH_SIZE = 24


def samples(size: int = NUM_SAMPLES) -> TensorDataset:
    """Return inputs, targets, and for each sample how many of its outputs count (for some none do)."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, targets, torch.randint(4, (size,), generator=generator))


def network() -> nn.Module:
    """Return a network whose first and last layer share a parameter."""
    first, last = nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)
    middle = nn.Linear(8, 8, dtype=torch.float64)
    return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), middle, last)


def mean_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean over the samples."""
    inputs, targets, _ = batch
    return (model(inputs) - targets).square().mean()


def token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> lockstep.Loss:
    """Return the sum over the outputs that count."""
    inputs, targets, lengths = batch
    counts = torch.arange(4, device=lengths.device) < lengths.unsqueeze(1)
    return lockstep.Loss(((model(inputs) - targets).square() * counts).sum(), counts.sum())


def make_task(**changes: Any) -> lockstep.Task:
    """Return a task with momentum, so that a wrong gradient shows in all later steps."""
    fields: dict[str, Any] = {
        "model": network,
        "dataset": samples,
        "loss": mean_loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "global_batch_size": BATCH_SIZE,
    }
    return lockstep.Task(**{**fields, **changes})


def train(world: Any, task: lockstep.Task, strategy: str, num_steps: int, **settings: Any) -> dict[str, Any]:
    """Train for some steps; return each step's loss, gradient and sample count, and the weights at the end."""
    devices = [torch.device("cpu")] * (len(settings.get("shares", (1, 1))) if strategy == "dp" else 1)
    loop = Trainer(task, Settings(**settings), world, strategy=strategy, devices=devices)
    losses, grads, counts = [], [], []
    for _ in range(num_steps):
        record = loop.step()
        losses.append(float(record.loss))
        counts.append(record.num_samples)
        grads.append(torch.cat([parameter.grad.flatten() for parameter in loop.model.parameters()]).clone())
    loop.close()
    weights = torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])
    return {"losses": losses, "grads": grads, "counts": counts, "weights": weights}


def whole_batch(task: lockstep.Task, num_steps: int, **settings: Any) -> dict[str, Any]:
    """Return what plain torch makes of ``task``: no loop, sampler, scaling or division of ours but the sample order."""
    loop = Trainer(task, Settings(**settings), None, strategy="single", devices=[torch.device("cpu")])
    data, order = samples(), loop.plan.order
    optimizer = task.optimizer(list(loop.model.parameters()))
    losses, grads, counts = [], [], []
    for step in range(num_steps):
        indices = order.batch(step)
        loss = task.loss(loop.model, tuple(tensor[indices] for tensor in data.tensors))
        loss = loss.total / loss.count if isinstance(loss, lockstep.Loss) else loss
        optimizer.zero_grad()
        loss.backward()
        if (clip := settings.get("clip")) is not None:
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
        counts.append(len(indices))
        grads.append(torch.cat([parameter.grad.flatten() for parameter in loop.model.parameters()]).clone())
    weights = torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])
    return {"losses": losses, "grads": grads, "counts": counts, "weights": weights}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to that of what was expected."""
    return float((found - expected).norm() / expected.norm())


def read_state(path):
    """Return the whole state in one checkpoint of a run, such as ``FitResult.checkpoint``, on the CPU."""
    from lockstep.checkpoints import checkpoint_storage as storage
    from lockstep.checkpoints.model_state import read_tensors
    from lockstep.checkpoints.object_store import place_of

    path = place_of(path)
    manifest = storage.read_manifest(path)
    storage.verify_files(path, manifest)
    parts = read_tensors(storage.read_parts(path, manifest))
    return {**parts.pop("state"), **parts}
