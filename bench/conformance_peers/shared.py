"""What all trainings of bench/conformance.py share: the cases, data, models, the record, and one plain process."""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

BATCH = 12
"""Samples of an optimizer step, over all ranks and micro-batches."""
LEARNING_RATE, MOMENTUM = 0.2, 0.9
HALVES_EVERY = 3
"""Steps after which the schedule halves the rate."""
WIDTH, CLASSES, LONGEST = 8, 4, 7
PADDING = -100
VICTIM = 1
"""The rank that is killed, has one batch less, or edits a parameter."""
DIVERGES_AFTER = 3
"""The step after which it does."""
SEEDS = "a seed for each rank"
"""The switch of a script that seeds its ranks differently."""
UNUSED = "find_unused_parameters=True"
"""The switch of torch's DDP, and of what wraps it: the layer is frozen behind the wrapping."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A training; each peer does all that is asked of it, or raises `NotOffered`."""

    model: str = "mlp"
    num_samples: int = 48
    epochs: int = 2
    accumulate: int = 1
    clip: float | None = None
    schedule: bool = False
    shuffle: bool = False
    looks: bool = False
    """Rank 0 takes one batch from the loader before the training."""
    edits: bool = False
    """The script doubles the gradient of the first parameter between backward and the step."""
    evaluates: bool = False
    """Only evaluate: the mean loss and the accuracy over all samples."""
    stop_at: int | None = None
    """Save after this step, and end."""
    resumes: bool = False
    """Go on from what was saved."""
    kill_at: int | None = None
    """Rank 1 is killed before backward of this step, in its first life; the script saves as its documentation says."""
    fewer: bool = False
    """The loader of rank 1 has one batch less than the others'."""
    alone: bool = False
    """After the first epoch, rank 0 alone calls a collective."""
    diverges: bool = False
    """After step 3, rank 1 adds 1 to the first parameter."""
    unfreezes: bool = False
    """The first layer is frozen until the second epoch."""
    evaluates_first: bool = False
    """Evaluate before the training, with a loader of its own."""
    second: bool = False
    """A second loader, with batches of half the size and no labels, gives the loss a second term."""
    ahead: bool = False
    """The loop reads the next batch before each step."""
    divided: bool = False
    """The data set is a stream of which each rank reads its own part."""
    dtype: str = "float64"
    switch: str = ""
    """Of the peer: one of its SWITCHES."""
    folder: str = ""
    """For checkpoints; the launches of a cell share it."""

    def micro_batch(self, num_ranks: int) -> int:
        """Return the samples of a forward pass of one rank."""
        return BATCH // num_ranks // self.accumulate


class NotOffered(Exception):
    """The project has no such thing."""


# --- the record -------------------------------------------------------------------------------------------------------

_OUT = "CONFORMANCE_OUT"


def _rank() -> int:
    """Return the rank of this process; torchft's replicas are launched each by itself."""
    return int(os.environ.get("REPLICA_GROUP_ID") or os.environ.get("RANK", 0))


def record(what: str, **values: Any) -> None:
    """Append a line to the file of this process, whole, so that a killed process has written all that it did."""
    line = json.dumps({"t": time.monotonic(), "what": what, "rank": _rank(), **values}) + "\n"
    file = os.open(Path(os.environ[_OUT]) / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


def flat(tensors: Iterable[Tensor]) -> list[float]:
    """Return all numbers. Collective if the tensors are shards."""
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in tensors]
    return torch.cat([each.detach().reshape(-1).double() for each in whole]).tolist()


def watched(optimizer: torch.optim.Optimizer) -> Any:
    """Record the weights after each step of ``optimizer``; return it."""

    def stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        record("step", weights=flat(each for group in optimizer.param_groups for each in group["params"]))

    optimizer.register_step_post_hook(stepped)
    return optimizer


def record_end(module: nn.Module) -> None:
    """Record the state of the trained module, without wrappers. Collective if it is in shards."""
    state = [value for value in module.state_dict().values() if value.is_floating_point()]
    record("end", weights=flat(state))


def kill_if_due(case: Case, rank: int, step: int) -> None:
    """End this process by SIGKILL if it is the victim in its first life; ``step`` counts from 1."""
    marker = Path(case.folder) / "killed"
    if step == case.kill_at and rank == VICTIM and not marker.exists():
        marker.touch()
        record("killed")
        os.kill(os.getpid(), signal.SIGKILL)


def edit_if_due(case: Case, rank: int, step: int, module: nn.Module) -> None:
    """Add 1 to a parameter of the victim, if it is due after ``step``."""
    if case.diverges and rank == VICTIM and step == DIVERGES_AFTER:
        with torch.no_grad():
            first_parameter(module).add_(1)


def freeze_late(case: Case, module: Any) -> None:
    """Freeze the first layer behind the wrapping, if the switch says so."""
    if case.unfreezes and case.switch == UNUSED:
        module[0].requires_grad_(False)


def unfreeze_if_due(case: Case, epoch: int, module: Any) -> None:
    """Unfreeze the first layer in the second epoch."""
    if case.unfreezes and epoch == 1:
        module[0].requires_grad_(True)


def recorded(train: Callable[[Case], None], case: Case) -> None:
    """Train, and record how it ended."""
    record("start")
    try:
        train(case)
    except NotOffered as error:
        record("not offered", error=str(error))
    except Exception as error:
        record("failed", error=f"{type(error).__name__}: {error}")
        raise
    record("done")


# --- data and models --------------------------------------------------------------------------------------------------


class Samples(Dataset[Batch]):
    """Random vectors with classes; with ``tokens``, rows of 1 to 7 of them, padded to 7."""

    def __init__(self, number: int, dtype: str = "float64", *, tokens: bool = False) -> None:
        random = torch.Generator().manual_seed(7)
        shape = (number, LONGEST) if tokens else (number,)
        self.inputs = torch.randn(*shape, WIDTH, generator=random, dtype=torch.float64).to(getattr(torch, dtype))
        self.labels = torch.randint(CLASSES, shape, generator=random)
        if tokens:
            lengths = torch.randint(1, LONGEST + 1, (number, 1), generator=random)
            self.labels[torch.arange(LONGEST) >= lengths] = PADDING

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        """Return a sample, with its number."""
        return {"index": torch.tensor(index), "inputs": self.inputs[index], "labels": self.labels[index]}


class DividedStream(IterableDataset[Batch]):
    """The samples of this rank: every n-th, if there are n ranks."""

    def __init__(self, data: Samples) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Batch]:
        """Yield them."""
        rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        return (self.data[index] for index in range(rank, len(self.data), num_ranks))


class Dropout(nn.Dropout):
    """Records what it has dropped."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Drop."""
        outputs = super().forward(inputs)
        if self.training:
            record("dropped", digest=hashlib.sha256((outputs == 0).numpy().tobytes()).hexdigest()[:8])
        return outputs


def make_data(case: Case) -> Any:
    """Return the data set of the case."""
    data = Samples(case.num_samples, case.dtype, tokens=case.model == "tokens")
    return DividedStream(data) if case.divided else data


def make_second(case: Case) -> Samples:
    """Return the data set of the second loader; it has as many batches as the first."""
    return Samples(case.num_samples // 2, case.dtype)


def make_model(case: Case) -> nn.Sequential:
    """Return the model of the case, with the same weights each time."""
    torch.manual_seed(0)
    extra: dict[str, list[nn.Module]] = {"batchnorm": [nn.BatchNorm1d(16)], "dropout": [Dropout(0.5)]}
    layers = [nn.Linear(WIDTH, 16), *extra.get(case.model, []), nn.Tanh(), nn.Linear(16, CLASSES)]
    model = nn.Sequential(*layers).to(getattr(torch, case.dtype))
    if case.unfreezes and case.switch != UNUSED:
        model[0].requires_grad_(False)
    return model


def make_optimizer(parameters: Any) -> Any:
    """Return one that is not blind to the scale of gradients, as Adam is."""
    return watched(torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM))


def make_schedule(optimizer: Any) -> Any:
    """Return a schedule that halves the rate every three steps."""
    return torch.optim.lr_scheduler.StepLR(optimizer, HALVES_EVERY, 0.5)


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Return the mean over samples, or over the tokens that are no padding; the samples are recorded.

    With a batch of the second loader, add its own mean.
    """
    if torch.is_grad_enabled():
        record("samples", indices=batch["index"].tolist())
    loss = loss_from(model(batch["inputs"]), batch["labels"])
    return loss + model(batch["unlabelled"]).square().mean() if "unlabelled" in batch else loss


def loss_from(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the labels that are no padding."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=PADDING)


def count_of(batch: Batch) -> Tensor:
    """Return the number of labels that are no padding."""
    return (batch["labels"] != PADDING).sum()


def right_of(logits: Tensor, batch: Batch) -> Tensor:
    """Return for each sample whether it was classified correctly."""
    return logits.argmax(-1) == batch["labels"]


def first_parameter(module: nn.Module) -> nn.Parameter:
    """Return the parameter whose gradient a script edits."""
    return next(module.parameters())


def shorter(case: Case, rank: int, batches: Any) -> Iterator[Any]:
    """Yield the batches of a loader, one less on the victim if the case says so."""
    last = len(batches) - 1 if case.fewer and rank == VICTIM else None
    for number, batch in enumerate(batches):
        if number == last:
            return
        yield batch


def read(case: Case, rank: int, loader: Any, second: Any = None) -> Iterator[Any]:
    """Yield the batches of a pass as the loop of the case reads them."""
    batches = shorter(case, rank, loader)
    if case.second:
        batches = ({**batch, "unlabelled": other["inputs"]} for batch, other in zip(batches, second, strict=True))
    if not case.ahead:
        yield from batches
        return
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch
        batch = following


def groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step; the last step of an epoch may have fewer."""
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


# --- one process ------------------------------------------------------------------------------------------------------


def plain(case: Case, order: Sequence[Sequence[int]]) -> tuple[list[list[float]], list[float]]:
    """Train in this process, without any library; ``order`` has the samples of each epoch.

    Returns:
        The weights after each step, and the state at the end.
    """
    data, second, model = make_data(replace(case, divided=False)), make_second(case), make_model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    schedule, steps = make_schedule(optimizer), []
    freeze_late(case, model)
    for number, epoch in enumerate(order):
        unfreeze_if_due(case, number, model)
        for start in range(0, len(epoch), BATCH):
            chosen = list(epoch[start : start + BATCH])
            loss = loss_from(model(data.inputs[chosen]), data.labels[chosen])
            if case.second:
                loss = loss + model(second.inputs[start // 2 : (start + BATCH) // 2]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if case.edits:
                first_parameter(model).grad.mul_(2)
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            if case.schedule:
                schedule.step()
            steps.append(flat(model.parameters()))
    return steps, flat(value for value in model.state_dict().values() if value.is_floating_point())


def plain_metrics(case: Case) -> dict[str, float]:
    """Return the metrics of the untrained model, each sample counted once."""
    data, model = make_data(case), make_model(case).eval()
    with torch.no_grad():
        logits = model(data.inputs)
    return {
        "loss": loss_from(logits, data.labels).item(),
        "accuracy": (logits.argmax(-1) == data.labels).double().mean().item(),
    }


# --- launchers --------------------------------------------------------------------------------------------------------

SCRIPT = str(Path(__file__).with_name("__main__.py"))


def torchrun(num_ranks: int, restarts: int) -> list[str]:
    """Return the command of torchrun."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [*run, f"--max-restarts={restarts}", SCRIPT]
