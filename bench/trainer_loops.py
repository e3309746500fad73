"""What bench/trainers.py starts on every rank: each project trains both models as its documentation writes it.

Usage: python bench/trainer_loops.py CONTENDER FOLDER, by torchrun or `lockstep run`. Rank R writes FOLDER/R.json.
"""

import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bench.models import Batch as Pair
from bench.models import Language, characters, mlp, numbers

NUM_RANKS, EPOCHS, LEARNING_RATE = 2, 4, 1e-4
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Job:
    """A model with its data, of which an epoch is ``num_steps`` global batches, and an evaluation is 4."""

    model: Callable[[], nn.Module]
    samples: Callable[[int], Pair]
    batch_size: int
    num_steps: int


JOBS = {
    "mlp": Job(lambda: mlp(64, 6), lambda size: numbers(size, 256)(), 64, 100),
    "transformer": Job(lambda: Language(128, 2, 32), lambda size: characters(size, 32)(), 16, 25),
}
"""By name, the models that are trained, in this order."""
NUM_EVALUATED = 4
STAMPS: list[float] = []
"""When the forward passes of a training began."""


class Model(nn.Module):
    """Notes when a forward pass of training begins; returns what the Trainer of Transformers wants, too."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = job.model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean loss."""
        if self.training:
            STAMPS.append(time.monotonic())
        return {"loss": F.cross_entropy(self.net(inputs).flatten(0, -2), labels.flatten())}


class Samples(Dataset[Batch]):
    """Random data in memory."""

    def __init__(self, job: Job, num_batches: int) -> None:
        torch.manual_seed(1)
        self.inputs, self.labels = job.samples(job.batch_size * num_batches)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def loss_of(model: Callable[..., dict[str, Tensor]], batch: Batch) -> Tensor:
    return model(**batch)["loss"]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, LEARNING_RATE, fused=True)


def loaders(job: Job, batch_size: int, sampler: Any = None) -> list[DataLoader[Batch]]:
    """Return the loader of an epoch and that of an evaluation; ``sampler``: the class that divides them."""
    made = []
    for samples, shuffles in ((Samples(job, job.num_steps), True), (Samples(job, NUM_EVALUATED), False)):
        divided = sampler(samples, shuffle=shuffles) if sampler else None
        made.append(DataLoader(samples, batch_size, shuffle=shuffles and not sampler, sampler=divided))
    return made


def by_hand(model: Any, optimizer: Any, loader: Any, evaluated: Any, backward: Any = Tensor.backward) -> None:
    """Train and evaluate with a loop of one's own."""
    for epoch in range(EPOCHS):
        if isinstance(loader, DataLoader) and hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            backward(loss_of(model, batch))
            optimizer.step()
        model.eval()
        total = torch.zeros(2)
        with torch.no_grad():
            for batch in evaluated:
                size = len(batch["labels"])
                total += torch.tensor([float(loss_of(model, batch)) * size, size])
        dist.all_reduce(total)


# --- the contenders: each trains `model`, with its own logging if `logs` ----------------------------------------------

Train = Callable[[Job, Model, bool, str], None]


def torch_script(job: Job, model: Model, logs: bool, folder: str) -> None:
    """Train with the classes of torch; with `lockstep run --adopt` they are ours."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    loader, evaluated = loaders(job, job.batch_size // NUM_RANKS, torch.utils.data.DistributedSampler)
    by_hand(nn.parallel.DistributedDataParallel(model), adamw(model.parameters()), loader, evaluated)


def accelerate(job: Job, model: Model, logs: bool, folder: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = (model, adamw(model.parameters()), *loaders(job, job.batch_size // NUM_RANKS))
    by_hand(*accelerator.prepare(*made), backward=accelerator.backward)


def fabric(job: Job, model: Model, logs: bool, folder: str) -> None:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=NUM_RANKS, strategy="ddp")
    runner.launch()
    made = runner.setup(model, adamw(model.parameters()))
    by_hand(*made, *runner.setup_dataloaders(*loaders(job, job.batch_size // NUM_RANKS)), backward=runner.backward)


def lightning_trainer(job: Job, model: Model, logs: bool, folder: str) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, _: int) -> Tensor:
            loss = loss_of(self.model, batch)
            if logs:
                self.log("loss", loss)
            return loss

        def validation_step(self, batch: Batch, _: int) -> None:
            self.log("eval_loss", loss_of(self.model, batch), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.parameters())

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy="ddp",
        max_epochs=EPOCHS,
        enable_checkpointing=False,
        enable_progress_bar=logs,
        enable_model_summary=logs,
        logger=None if logs else False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), *loaders(job, job.batch_size // NUM_RANKS))


def transformers_trainer(job: Job, model: Model, logs: bool, folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    optimizer = adamw(model.parameters())
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=job.batch_size // NUM_RANKS,
        per_device_eval_batch_size=job.batch_size // NUM_RANKS,
        num_train_epochs=EPOCHS,
        max_grad_norm=0.0,
        eval_strategy="epoch",
        save_strategy="no",
        prediction_loss_only=True,
        remove_unused_columns=False,
        use_cpu=True,
        disable_tqdm=not logs,
        **({} if logs else {"logging_strategy": "no", "report_to": "none"}),
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=Samples(job, job.num_steps),
        eval_dataset=Samples(job, NUM_EVALUATED),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    ).train()


def script(job: Job, model: Model, logs: bool, folder: str) -> None:
    import lockstep

    with lockstep.init():
        loader, evaluated = loaders(job, job.batch_size // NUM_RANKS, lockstep.DistributedSampler)
        by_hand(lockstep.DistributedDataParallel(model), adamw(model.parameters()), loader, evaluated)


def prepared(job: Job, model: Model, logs: bool, folder: str) -> None:
    import lockstep

    by_hand(*lockstep.prepare(model, adamw(model.parameters()), *loaders(job, job.batch_size)))


class Counter:
    """A callback as people write them."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_step_end(self, run: Any) -> None:
        """Count."""
        self.num_steps += 1


def fit(
    job: Job,
    model: Model,
    logs: bool,
    folder: str,
    *,
    ema: float | None = None,
    callbacks: Sequence[object] = (),
    reproducible: int | None = None,
) -> None:
    import lockstep

    task = lockstep.Task(
        model=lambda: model,
        dataset=lambda: Samples(job, job.num_steps),
        eval_dataset=lambda: Samples(job, NUM_EVALUATED),
        loss=loss_of,
        optimizer=adamw,
        global_batch_size=job.batch_size,
        callbacks=callbacks,
        ema=ema,
    )
    lockstep.fit(task, strategy="ddp", epochs=EPOCHS, quiet=not logs, reproducible=reproducible)


TRAIN: dict[str, Train] = {
    "torch": torch_script,
    "accelerate": accelerate,
    "fabric": fabric,
    "lightning": lightning_trainer,
    "transformers": transformers_trainer,
    "adopt": torch_script,
    "script": script,
    "prepare": prepared,
    "fit": fit,
    "fit-ema": partial(fit, ema=0.99, callbacks=[Counter()]),
    "fit-exact": partial(fit, reproducible=NUM_RANKS),
}
NEEDS = {
    "accelerate": "accelerate",
    "fabric": "lightning",
    "lightning": "lightning",
    "transformers": "transformers",
}
HAVE_LOGS = ("lightning", "transformers", "fit", "fit-ema", "fit-exact")
"""The others print nothing unless their script does."""


def missing() -> dict[str, str]:
    """Return why contenders cannot run here, by name."""
    absent = {name: module for name, module in NEEDS.items() if not importlib.util.find_spec(module)}
    return {name: f"{module} is not installed" for name, module in absent.items()}


def seconds(job: Job) -> dict[str, float]:
    """Return the seconds of a step and of an epoch of the training that has just ended, without its first epoch.

    Raises:
        AssertionError: There was not one forward pass for each step: a step that does less is no faster step.
    """
    if len(STAMPS) != EPOCHS * job.num_steps:
        raise AssertionError(f"{len(STAMPS)} forward passes, not {EPOCHS * job.num_steps}.")
    epochs = [STAMPS[start : start + job.num_steps] for start in range(0, len(STAMPS), job.num_steps)]
    steps_s = sum(epoch[-1] - epoch[0] for epoch in epochs[1:])
    return {
        "step": steps_s / (EPOCHS - 1) / (job.num_steps - 1),
        "epoch": (epochs[-1][0] - epochs[1][0]) / (EPOCHS - 2),
    }


def main(contender: str, folder: str) -> None:
    """Train, and write the seconds, when the first step of all had ended, and what the weights are."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"models": {}, "weights": []}
    for name, job in JOBS.items():
        found["models"][name] = {}
        for logs in (True, False) if contender in HAVE_LOGS else (True,):
            STAMPS.clear()
            model = Model(job)
            TRAIN[contender](job, model, logs, folder)
            found.setdefault("first_step", STAMPS[1])
            found["models"][name]["logs" if logs else "quiet"] = seconds(job)
            state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
            found["weights"].append(hashlib.sha256(state).hexdigest())
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
