"""Random training programs that must be the same with `lockstep.prepare` on any number of ranks, and how to run many.

    python -m tests.prepared_programs --seeds 0:500 --ranks 2

prints a line for each seed, and a summary by kind. A `Program` is a description. Run without a world it is a plain
script for one device, which is the oracle. A program is *ambiguous* if nobody can tell which batch a tensor belongs to,
or where a sampler stands: it may be refused on every rank, but never compute other numbers.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import importlib
import itertools
import os
import pickle
import queue
import random
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import lockstep
from lockstep.errors import ConfigurationError, LockstepError
from tests import forking
from tests.pool import Pool, PoolError

TOLERANCE = 1e-9

# --- The description

HIDDEN = ("python", "numpy", "own", "own generator")  # samplers whose state no loader can know


@dataclasses.dataclass(frozen=True)
class LoaderPlan:
    """A loader; the values that come first in `LOADER_KINDS` are the simple ones."""

    num_samples: int = 29
    batch_size: int = 5
    drop_last: bool = False
    sampler: str = "order"
    data: str = "tensors"
    form: str = "tuple"
    loader: str = "DataLoader"
    workers: int = 0
    persistent: bool = False

    def sizes(self) -> list[int]:
        """Return the sizes of the batches of a pass."""
        if self.sampler in ("sizes", "lists"):
            return [len(indices) for indices in _in_sizes(range(self.num_samples))]
        drawn = self.num_samples - 2 if self.sampler == "subset" else self.num_samples
        shares = [len(range(drawn)[part :: max(self.workers, 1)]) for part in range(max(self.workers, 1))]
        sizes = []
        for share in shares if self.data == "stream" else [drawn]:
            whole, rest = divmod(share, self.batch_size)
            sizes += [self.batch_size] * whole + [rest] * (rest > 0 and not self.drop_last)
        return sizes


@dataclasses.dataclass(frozen=True)
class Resume:
    """Saved after some batches of a pass, and resumed on other ranks; 0 means as many as before."""

    epoch: int
    after: int
    num_ranks: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program, right on one device."""

    seed: int
    first: LoaderPlan = LoaderPlan()
    second: LoaderPlan = LoaderPlan(num_samples=19, batch_size=7)
    held: LoaderPlan = LoaderPlan(num_samples=7, batch_size=3)
    models: str = "one"
    inputs: str = "as they are"
    penalty: str = "none"
    loop: str = "for"
    step: str = "plain"
    backwards: str = "one"
    optimizer: str = "sgd"
    schedule: bool = False
    clip: bool = False
    set_to_none: bool = True
    evaluate: str = "no"
    in_eval_mode: bool = False
    break_after: int = 0
    prepares: str = "at once"
    epochs: int = 2
    resume: Resume | None = None

    def plans(self) -> list[LoaderPlan]:
        """Return the loaders that train."""
        return [self.first, self.second] if self.loop in TWO_LOADERS else [self.first]

    def is_ambiguous(self) -> bool:
        """Return whether a refusal is right too."""
        is_derived = self.inputs in DERIVED or self.penalty == "clone" or self.models == "chain, derived"
        is_hidden = self.first.sampler in HIDDEN or self.first.loader != "DataLoader"
        has_two = self.loop in ("choose", "choose by numpy", "alternate")  # whose passes are open together
        return (
            self.loop == "cat"
            or (is_derived and (self.loop in AHEAD or has_two))
            or (self.resume is not None and is_hidden)
        )

    def kinds(self) -> list[str]:
        """Return what is not simple in it."""
        found = []
        for field in dataclasses.fields(Program):
            value = getattr(self, field.name)
            if field.name in ("seed", "first", "second", "held", "epochs") or value == field.default:
                continue
            value = "yes" if value is True else "" if isinstance(value, Resume | int) and value is not False else value
            found.append(f"{field.name} {value}".strip())
        for plan in self.plans():
            simple = LoaderPlan(workers=2) if plan.persistent else LoaderPlan()
            for name in ("drop_last", "sampler", "data", "form", "loader", "workers", "persistent"):
                if (value := getattr(plan, name)) != getattr(simple, name):
                    found.append(name if value is True else f"{name} {value}")
            if min(plan.sizes()) < 4:
                found.append("few samples")
        return sorted(set(found))

    def __str__(self) -> str:
        said = [f"seed={self.seed}"]
        for field in dataclasses.fields(Program)[1:]:
            value = getattr(self, field.name)
            is_used = field.name != "second" or self.loop in TWO_LOADERS
            if value != field.default and is_used and (field.name != "held" or "other" in self.evaluate):
                said.append(f"{field.name}={value!r}")
        return f"Program({', '.join(said)})"


DERIVED = ("added", "cast", "concatenated")
TWO_LOADERS = ("zip", "zip, cycle", "nested", "nested, both", "choose", "choose by numpy", "alternate", "cat")
# Loops in which the batch that is trained on need not be the one that was read last.
AHEAD = ("ahead", "window", "window, one step", "list", "thread", "zip", "zip, cycle", "nested", "nested, both", "cat")
LOADER_KINDS: dict[str, list[Any]] = {
    "drop_last": [True],
    "sampler": [
        *("shuffle", "shuffle", "generator", "weighted", "subset", "torch", "python", "numpy", "own"),
        *("own generator", "sizes", "lists"),
    ],
    "data": ["getitems", "getitems only", "subset", "stream", "stream"],
    "form": ["dict", "named tuple", "dataclass", "tensor"],
    "loader": ["scaled", "ahead"],
}
KINDS: dict[str, list[Any]] = {
    "models": ["batchnorm", "batchnorm", "chain", "chain, derived", "gan", "pair"],
    "inputs": ["slice", "flat", "view", *DERIVED],
    "penalty": ["clone", "detach", "leaf"],
    "loop": [
        *("ahead", "window", "window, one step", "list", "thread", "next_iter", "no_grad_fetch"),
        *TWO_LOADERS,
    ],
    "step": ["accumulate", "no_sync", "lbfgs", "sam", "scaled", "keep"],
    "backwards": ["each"],
    "optimizer": ["adam"],
    "schedule": [True],
    "clip": [True],
    "set_to_none": [False],
    "evaluate": [
        f"{what}, {where}, {how}"
        for what in ("other", "same")
        for where in ("epoch", "step")
        for how in ("eval", "no_grad")
    ],
    "in_eval_mode": [True],
    "break_after": [1, 2, 3],
    "prepares": ["models first"],
}
MORE = ("sizes", "loader kind", "loader kind", "workers", "resume", "loop", "step", "models")  # more often


def write_program(seed: int) -> Program:
    """Return the program of a seed; half of them are not simple in one or two ways only."""
    draw = random.Random(seed)
    program = Program(seed)
    names = [*KINDS, *MORE]
    for name in draw.sample(names, draw.choice([1, 1, 2, 2, 3, 4, 6, 9])):
        if name in KINDS:
            program = dataclasses.replace(program, **{name: draw.choice(KINDS[name])})
        elif name == "resume":
            program = dataclasses.replace(
                program, resume=Resume(draw.randrange(2), draw.randint(1, 9), draw.randint(0, 4))
            )
        else:
            program = dataclasses.replace(program, first=_varied(program.first, name, draw))
    if program.loop in TWO_LOADERS and draw.random() < 0.5:
        second = _varied(program.second, "sizes", draw)
        if draw.random() < 0.5:
            second = _varied(second, "loader kind", draw)
        program = dataclasses.replace(program, second=second)
    if draw.random() < 0.5:
        program = dataclasses.replace(program, held=_varied(program.held, "sizes", draw))
    return _made_right(program, draw)


def _varied(plan: LoaderPlan, name: str, draw: random.Random) -> LoaderPlan:
    if name == "sizes":
        batch_size = draw.choice([1, 2, 3, 4, 6, 7])
        return dataclasses.replace(
            plan, batch_size=batch_size, num_samples=draw.randint(batch_size + 3, 4 * batch_size + 3)
        )
    if name == "workers":  # slow
        return dataclasses.replace(plan, workers=2 * (draw.random() < 0.4), persistent=draw.random() < 0.4)
    name = draw.choice(["sampler", "sampler", "sampler", "data", "data", "form", "loader", "drop_last"])
    return dataclasses.replace(plan, **{name: draw.choice(LOADER_KINDS[name])})


def _made_right(program: Program, draw: random.Random) -> Program:
    """Replace what would not be right on one device."""
    with_batchnorm = program.models == "batchnorm"
    plans = {name: _plan_made_right(getattr(program, name), with_batchnorm) for name in ("first", "second", "held")}
    change: dict[str, Any] = dict(plans)
    first, loop, step = plans["first"], program.loop, program.step
    if program.resume:
        loop = "for"
        step = step if step in ("sam", "scaled") else "plain"
        change["evaluate"] = "no"
    if loop in ("thread", "next_iter", "choose", "choose by numpy"):
        first = change["first"] = dataclasses.replace(first, workers=0, persistent=False)
    if program.models == "gan":
        loop, step = "for" if loop == "cat" else loop, "plain"
    if with_batchnorm:
        change["penalty"] = "none"  # twice differentiable it is not
    elif program.inputs != "as they are" and program.penalty == "leaf":
        change["penalty"] = "detach"
    if step == "lbfgs":
        change |= {"optimizer": "sgd", "clip": False}
    if loop == "thread" and "step" in program.evaluate:
        change["evaluate"] = program.evaluate.replace("step", "epoch")  # two threads would draw
    if "same, step" in change.get("evaluate", program.evaluate):
        change["first"] = dataclasses.replace(first, workers=0, persistent=False)
    if loop not in ("for", "ahead", "window", "zip", "no_grad_fetch") or program.resume:
        change["break_after"] = 0
    if program.resume:
        size = len(first.sizes())
        if size < 2:
            change["resume"] = None
        else:
            after = 1 + program.resume.after % (size - 1)
            change["resume"] = dataclasses.replace(program.resume, after=after)
    evaluate = change.get("evaluate", program.evaluate)
    plan = change["held" if evaluate.startswith("other") else "first"]
    if evaluate.endswith(", eval") and (program.in_eval_mode or plan.sizes()[0] < 4):
        # Nothing tells a first batch without a part from one of a training in evaluation mode.
        change["evaluate"] = evaluate.replace("eval", "no_grad")
    return dataclasses.replace(program, loop=loop, step=step, **change)


def _plan_made_right(plan: LoaderPlan, with_batchnorm: bool) -> LoaderPlan:
    if plan.data == "stream":
        plan = dataclasses.replace(plan, sampler="order")
    if plan.sampler in ("sizes", "lists"):
        plan = dataclasses.replace(plan, drop_last=False, num_samples=max(plan.num_samples, 9))
    plan = dataclasses.replace(plan, persistent=plan.persistent and plan.workers > 0)
    least = 2 if with_batchnorm else 1  # it needs two samples to have a variance
    plan = dataclasses.replace(plan, batch_size=max(plan.batch_size, least))
    while not plan.sizes() or min(plan.sizes()) < least:
        plan = dataclasses.replace(plan, num_samples=plan.num_samples + 1)
    return plan


# --- Data


class Named(NamedTuple):
    x: Tensor
    z: Tensor
    y: Tensor


@dataclasses.dataclass
class Batch:
    x: Tensor
    z: Tensor
    y: Tensor


def parts(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs, what is to be drawn from or added, and the targets, of a batch of any form."""
    if isinstance(batch, Tensor):
        flat = batch.flatten(1)
        return batch, flat[:, :3], flat.sin().sum(1, keepdim=True)
    if isinstance(batch, dict):
        return batch["x"], batch["z"], batch["y"]
    return (batch.x, batch.z, batch.y) if isinstance(batch, Batch) else tuple(batch)


def changed(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: change(each) for name, each in batch.items()}
    if isinstance(batch, Named):
        return Named(*map(change, batch))
    return Batch(*map(change, parts(batch))) if isinstance(batch, Batch) else [change(each) for each in batch]


def as_dataclass(samples: list[Any]) -> Batch:
    return Batch(*default_collate([tuple(sample) for sample in samples]))


class Rows(Dataset):
    """Samples in the form of the plan."""

    def __init__(self, tensors: tuple[Tensor, ...], form: str) -> None:
        self.tensors, self.form = tensors, form

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        x, z, y = (tensor[index] for tensor in self.tensors)
        if self.form == "dict":
            return {"x": x, "z": z, "y": y}
        return x if self.form == "tensor" else Named(x, z, y) if self.form == "named tuple" else (x, z, y)


class ReadAtOnce(Rows):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [super(ReadAtOnce, self).__getitem__(index) for index in indices]


class ReadAtOnceOnly(ReadAtOnce):
    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("reads whole batches only")


class Stream(IterableDataset):
    """Divides the samples among the loader's processes, as torch's documentation recommends."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(info.id if info else 0, len(self.rows), info.num_workers if info else 1):
            yield self.rows[index]


def _in_sizes(order: Iterable[int]) -> list[list[int]]:
    """Cut into batches of 5, 2, 3 and 4; none holds a single sample."""
    order, found = list(order), []
    for size in itertools.cycle((5, 2, 3, 4)):
        if not order:
            return found
        size = size if len(order) - size != 1 else len(order)
        found.append(order[:size])
        order = order[size:]


class InSizes:
    """A batch sampler with batches of several sizes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return len(_in_sizes(range(self.size)))

    def __iter__(self) -> Iterator[list[int]]:
        yield from _in_sizes(torch.randperm(self.size).tolist())


class Draws(Sampler):
    """Draws an order from a generator, when a pass begins."""

    def __init__(self, size: int, source: str) -> None:
        self.size, self.source = size, source
        self.own, self.rng = random.Random(7), torch.Generator().manual_seed(7)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(
            {
                "torch": lambda: torch.randperm(self.size).tolist(),
                "python": lambda: random.sample(range(self.size), self.size),
                "numpy": lambda: np.random.permutation(self.size).tolist(),
                "own": lambda: self.own.sample(range(self.size), self.size),
                "own generator": lambda: torch.randperm(self.size, generator=self.rng).tolist(),
            }[self.source]()
        )


class Scaled(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield changed(batch, lambda tensor: tensor * 1.5)


class Ahead(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return ahead(super().__iter__())


def make_loader(plan: LoaderPlan, shape: tuple[int, ...], seed: int) -> DataLoader:
    size, draw = plan.num_samples, torch.Generator().manual_seed(seed)
    x, z = (torch.randn(size, *of, generator=draw, dtype=torch.float64) for of in (shape, (3,)))
    tensors = x, z, x.flatten(1).sin().sum(1, keepdim=True) + z[:, :1]
    rows: Any = {"getitems": ReadAtOnce, "getitems only": ReadAtOnceOnly}.get(plan.data, Rows)(tensors, plan.form)
    if plan.data == "tensors" and plan.form == "tuple":
        rows = TensorDataset(*tensors)
    elif plan.data == "stream":
        rows = Stream(rows)
    elif plan.data == "subset":
        rows = Subset(Rows([torch.cat([each, each]) for each in tensors], plan.form), list(range(1, 2 * size, 2)))
    settings: dict[str, Any] = {"batch_size": plan.batch_size, "drop_last": plan.drop_last}
    if plan.sampler in ("shuffle", "generator"):
        settings["shuffle"] = True
        settings["generator"] = torch.Generator().manual_seed(3) if plan.sampler == "generator" else None
    elif plan.sampler in ("sizes", "lists"):
        settings = {"batch_sampler": InSizes(size) if plan.sampler == "sizes" else _in_sizes(range(size))}
    elif plan.sampler == "weighted":
        settings["sampler"] = WeightedRandomSampler(torch.linspace(1, 2, size), size)
    elif plan.sampler == "subset":
        settings["sampler"] = SubsetRandomSampler(range(2, size))
    elif plan.sampler != "order":
        settings["sampler"] = Draws(size, plan.sampler)
    if plan.form == "dataclass":
        settings["collate_fn"] = as_dataclass
    settings |= {"num_workers": plan.workers, "persistent_workers": plan.persistent}
    return {"scaled": Scaled, "ahead": Ahead}.get(plan.loader, DataLoader)(rows, **settings)


# --- Loops


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    now = next(batches, None)
    while now is not None:
        following = next(batches, None)
        yield now
        now = following


def windows(loader: Iterable[Any], size: int) -> Iterator[list[Any]]:
    batches = iter(loader)
    while window := list(itertools.islice(batches, size)):
        yield window


def in_thread(loader: Iterable[Any]) -> Iterator[Any]:
    read: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        try:
            for batch in loader:
                read.put((batch, None))
            read.put((None, None))
        except BaseException as error:
            read.put((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    while True:
        batch, error = read.get()
        if error is not None:
            raise error
        if batch is None:
            thread.join()
            return
        yield batch


def without_gradients(loader: Iterable[Any]) -> Iterator[Any]:
    batches = iter(loader)
    while True:
        with torch.no_grad():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


# --- The script


def mlp(*sizes: int, norm: bool = False) -> nn.Sequential:
    middle = [nn.BatchNorm1d(sizes[1])] if norm else []
    first = nn.Linear(sizes[0], sizes[1], bias=not norm)  # a bias before it has a gradient of nothing but rounding
    return nn.Sequential(first, *middle, nn.Tanh(), nn.Linear(sizes[1], sizes[2])).double()


class Saved(Exception):
    """The program has reached the place at which it is to be saved; has the state, taken before the pass is left."""


class Script:
    """A program at work: without a world as it is for one device, else with `prepare`."""

    def __init__(self, program: Program, world: Any) -> None:
        self.program, self.world = program, world
        torch.manual_seed(program.seed)
        random.seed(program.seed)
        np.random.seed(program.seed)
        if program.models.startswith("chain"):
            models = [mlp(6, 5, 4), mlp(4, 3, 1)]
        elif program.models == "gan":
            models = [mlp(3, 4, 6), mlp(6, 5, 1)]
        else:
            models = [mlp(6, 5, 1, norm=program.models == "batchnorm") for _ in range(1 + (program.models == "pair"))]
        self.bare = models
        if world is not None and program.models == "batchnorm":
            self.bare = models = [lockstep.SyncBatchNorm.convert_sync_batchnorm(model) for model in models]
        optimizers = [
            self._optimizer(each) for each in ([[m] for m in models] if program.models == "gan" else [models])
        ]
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 4, gamma=0.5) for each in optimizers]
        shape = {"slice": (8,), "flat": (2, 3), "view": (3, 2), "concatenated": (3,)}.get(program.inputs, (6,))
        plans = (program.first, program.second, program.held)
        loaders = [make_loader(plan, shape, 10 * program.seed + place) for place, plan in enumerate(plans)]
        if world is not None:
            everything = [*models, *optimizers, *schedulers, *loaders]
            if program.prepares == "at once":
                everything = lockstep.prepare(*everything)
            else:
                count = len(models) + len(optimizers)
                prepared = lockstep.prepare(*everything[:count])
                everything = [*prepared, *(lockstep.prepare(each) for each in everything[count:])]
            found = iter(everything)
            models, optimizers, schedulers, loaders = (
                list(itertools.islice(found, len(each))) for each in (models, optimizers, schedulers, loaders)
            )
        self.models, self.optimizers, self.schedulers, self.loaders = models, optimizers, schedulers, loaders
        self.num_steps = self.num_backwards = self.epoch = 0
        self.sums = [0.0, 0.0, 0.0]
        self._train()

    def _optimizer(self, models: list[nn.Module]) -> torch.optim.Optimizer:
        parameters = [parameter for model in models for parameter in model.parameters()]
        if self.program.step == "lbfgs":
            return torch.optim.LBFGS(parameters, lr=0.05, max_iter=3)
        if self.program.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=0.02, eps=1e-5)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def _train(self) -> None:
        for model in self.models:
            model.train(not self.program.in_eval_mode)

    # --- losses

    def inputs(self, batch: Any) -> Tensor:
        x, z, _ = parts(batch)
        return {
            "slice": lambda: x[:, 1:7],
            "flat": lambda: x.flatten(1),
            "view": lambda: x.view(x.shape[0], 6),
            "added": lambda: x.clone() + 0.1,
            "cast": lambda: x.float().double(),
            "concatenated": lambda: torch.cat([x, z], 1),
        }.get(self.program.inputs, lambda: x)()

    def predict(self, x: Tensor) -> Tensor:
        if self.program.models == "chain":
            return self.models[1](self.models[0](x))
        if self.program.models == "chain, derived":
            return self.models[1](self.models[0](x).sin() + 0.1)
        return self.models[-1](x)

    def losses(self, batch: Any) -> Iterator[Tensor]:
        x, y = self.inputs(batch), parts(batch)[2]
        yield F.mse_loss(self.predict(x), y)
        if self.program.models == "pair":
            yield F.l1_loss(self.models[0](x), y)
        if self.program.penalty != "none":
            yield self.penalty(x)

    def penalty(self, x: Tensor) -> Tensor:
        if self.program.penalty != "leaf":
            x = x.clone() if self.program.penalty == "clone" else x.detach()
        x.requires_grad_()
        (slope,) = torch.autograd.grad(self.predict(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def backward(self, batches: tuple[Any, ...], scale: float = 1.0) -> Tensor:
        if self.program.loop == "cat":
            x, y = (torch.cat(each) for each in zip(*((self.inputs(b), parts(b)[2]) for b in batches), strict=True))
            (loss := F.mse_loss(self.predict(x), y) * scale).backward()
            return loss
        losses = (loss * scale for batch in batches for loss in self.losses(batch))
        if self.program.backwards == "one":
            (loss := sum(losses)).backward()
            return loss
        total = torch.zeros(())
        for loss in losses:
            loss.backward()
            total = total + loss.detach()
        return total

    # --- steps

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.program.set_to_none)

    def update(self, *which: int, closure: Any = None) -> None:
        for place in which or range(len(self.optimizers)):
            if self.program.clip:
                parameters = [each for group in self.optimizers[place].param_groups for each in group["params"]]
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            self.optimizers[place].step(*[closure] * (closure is not None))
            if self.program.schedule:
                self.schedulers[place].step()

    def step(self, *batches: Any) -> None:
        self.num_steps += 1
        if "step" in self.program.evaluate:
            self.evaluate()
        kind = "gan" if self.program.models == "gan" else self.program.step
        getattr(self, f"step_{kind}")(*batches)

    def step_plain(self, *batches: Any) -> None:
        self.zero_grad()
        self.backward(batches)
        self.update()

    def step_accumulate(self, *batches: Any, silent: bool = False) -> None:
        self.num_backwards += 1
        is_last = self.num_backwards % 2 == 0
        with contextlib.ExitStack() as stack:
            for model in self.models if silent and not is_last and self.world is not None else []:
                stack.enter_context(model.no_sync())
            self.backward(batches, 0.5)
        if is_last:
            self.update()
            self.zero_grad()

    def step_no_sync(self, *batches: Any) -> None:
        self.step_accumulate(*batches, silent=True)

    def step_keep(self, *batches: Any) -> None:
        if self.num_steps % 2:
            self.zero_grad()
        self.backward(batches)
        self.update()

    def step_scaled(self, *batches: Any) -> None:
        self.zero_grad()
        self.backward(batches, 1024.0)
        for model in self.models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(1024.0)
        self.update()

    def step_lbfgs(self, *batches: Any) -> None:
        def closure() -> Tensor:
            self.zero_grad()
            return self.backward(batches)

        self.update(closure=closure)

    def step_sam(self, *batches: Any) -> None:
        self.zero_grad()
        self.backward(batches)
        parameters = [each for model in self.models for each in model.parameters() if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        kept = [each.detach().clone() for each in parameters]
        with torch.no_grad():
            for each in parameters:
                each.add_(each.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()
        self.backward(batches)
        with torch.no_grad():
            for each, before in zip(parameters, kept, strict=True):
                each.copy_(before)
        self.update()

    def step_gan(self, *batches: Any) -> None:
        make, judge = self.models
        for batch in batches:
            real, noise = self.inputs(batch), parts(batch)[1]
            self.optimizers[1].zero_grad(set_to_none=self.program.set_to_none)
            losses = [F.softplus(-judge(real)).mean(), F.softplus(judge(make(noise).detach())).mean()]
            if self.program.penalty != "none":
                losses.append(self.penalty(real))
            for loss in [sum(losses)] if self.program.backwards == "one" else losses:
                loss.backward()
            self.update(1)
            self.optimizers[0].zero_grad(set_to_none=self.program.set_to_none)
            F.softplus(-judge(make(noise))).mean().backward()
            self.update(0)

    def evaluate(self) -> None:
        """Add up what a pass over all samples gives; over the ranks the sums are those of one device."""
        what, _, how = self.program.evaluate.split(", ")
        for model in self.models:
            model.eval()
        with torch.no_grad() if how == "no_grad" else contextlib.nullcontext():
            for batch in self.loaders[2 if what == "other" else 0]:
                x = self.inputs(batch)
                found = (x.shape[0], x.detach().sum(), self.predict(x).detach().sum())
                self.sums = [total + float(each) for total, each in zip(self.sums, found, strict=True)]
        self._train()

    # --- loops

    def run_epoch(self) -> None:
        first, second = self.loaders[:2]
        loop, stop = self.program.loop, self.program.break_after
        if loop in READ:
            for number, batch in enumerate(READ[loop](first), 1):
                self.step(batch)
                if number == stop:
                    break
                self.save_if_due(number)
        elif loop == "window":
            for number, window in enumerate(windows(first, 2), 1):
                for batch in window:
                    self.step(batch)
                if number == stop:
                    break
        elif loop == "window, one step":
            for window in windows(first, 3):
                self.step(*window)
        elif loop == "next_iter":
            for _ in range(3):
                self.step(next(iter(first)))
        elif loop == "nested":
            for outer in first:
                for inner in second:
                    self.step(inner)
                    break
                self.step(outer)
        elif loop == "nested, both":
            for outer in first:
                for inner in itertools.islice(second, 2):
                    self.step(inner, outer)
        elif loop.startswith("choose"):
            batches = [forever(first), forever(second)]
            for _ in range(6):
                self.step(next(batches[random.choice((0, 1)) if loop == "choose" else int(np.random.randint(2))]))
        elif loop == "alternate":
            for loader in (first, second):
                for batch in loader:
                    self.step(batch)
        else:
            pairs = zip(first, itertools.cycle(second) if loop == "zip, cycle" else second, strict=False)
            for number, pair in enumerate(pairs, 1):
                self.step(*pair)
                if number == stop:
                    break

    def save_if_due(self, number: int) -> None:
        resume = self.program.resume
        if self.world is not None and resume and (self.epoch, number) == (resume.epoch, resume.after):
            raise Saved(self.state())

    def run(self) -> dict[str, Any]:
        """Train, from the epoch of the saved state on, and return the result; until it is to be saved, a state."""
        try:
            for epoch in range(self.epoch, self.program.epochs):
                self.epoch = epoch
                self.run_epoch()
                if "epoch" in self.program.evaluate:
                    self.evaluate()
        except Saved as saved:
            return {"state": saved.args[0]}
        state = [each for model in self.bare for each in (*model.parameters(), *model.buffers())]
        weights = torch.cat([each.detach().double().flatten() for each in state])
        return {"weights": weights.tolist(), "sums": self.sums, "steps": self.num_steps}

    def state(self) -> dict[str, Any]:
        parts = {name: [each.state_dict() for each in getattr(self, name)] for name in STATEFUL}
        return {**parts, "loader": self.loaders[0].state_dict(), "epoch": self.epoch, "num_steps": self.num_steps}

    def load(self, state: dict[str, Any]) -> None:
        for name in STATEFUL:
            for each, saved in zip(getattr(self, name), state[name], strict=True):
                each.load_state_dict(saved)
        self.loaders[0].load_state_dict(state["loader"])
        self.epoch, self.num_steps = state["epoch"], state["num_steps"]
        self.program = dataclasses.replace(self.program, resume=None)


READ: dict[str, Callable[[Any], Iterable[Any]]] = {
    "for": lambda loader: loader,
    "ahead": lambda loader: ahead(iter(loader)),
    "list": list,
    "thread": in_thread,
    "no_grad_fetch": without_gradients,
}
STATEFUL = ("bare", "optimizers", "schedulers")


def run_program(program: Program, world: Any = None, state: Any = None) -> dict[str, Any]:
    script = Script(program, world)
    if state is not None:
        script.load(state)
    return script.run()


# --- On ranks
#
# A program that fails leaves ranks in the middle of a collective. So each rank writes the outcome of each program to a
# file, and begins the next one when all ranks have succeeded; otherwise the rest runs in another call.


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a rank raised."""

    name: str
    text: str
    is_refusal: bool
    trace: str = ""


PATIENCE_S = 15.0


def run_on_rank(world: Any, folder: str, tasks: bytes) -> None:
    """Run programs until one fails, and leave the outcomes in the folder."""
    torch.set_num_threads(1)
    for number, program, state in pickle.loads(tasks):
        found = outcome_of(program, world, state)
        gc.collect()  # what it left in cycles must not count as prepared in the next one
        part = Path(folder, f"{number}.{world.rank}.part")
        part.write_bytes(pickle.dumps(found))
        part.rename(part.with_suffix(".done"))
        deadline = time.monotonic() + PATIENCE_S
        everyones = [Path(folder, f"{number}.{rank}.done") for rank in range(world.world_size)]
        while not all(map(os.path.exists, everyones)):
            if time.monotonic() > deadline:
                raise RuntimeError("another rank hangs")  # so that the pool ends this process
            time.sleep(0.0005)
        if any(isinstance(pickle.loads(each.read_bytes()), Failure) for each in everyones):
            return


def outcome_of(program: Program, world: Any, state: Any) -> Any:
    try:
        return run_program(program, world, state)
    except Exception as error:
        # Not e.g. a CollectiveError: that is how a rank learns that another one has failed.
        is_refusal = type(error) in (ConfigurationError, LockstepError)
        return Failure(type(error).__name__, str(error), is_refusal, traceback.format_exc())


def call_on_rank(world: Any, folder: str, tasks: bytes) -> None:
    # The module is imported there: processes of loaders send objects of its classes.
    importlib.import_module("tests.prepared_programs").run_on_rank(world, folder, tasks)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a program went, in a word.

    It may be ok, refused, REFUSED though it is not ambiguous, OFF, an ERROR, HANGS; invalid if the plain script fails,
    and unstable if rounding alone changes it.
    """

    program: Program
    num_ranks: int
    word: str
    detail: str = ""
    trace: str = ""

    @property
    def is_right(self) -> bool:
        return self.word in ("ok", "refused", "unstable")

    def __str__(self) -> str:
        return f"{self.program.seed} on {self.num_ranks}: {self.word} {self.detail}".rstrip()


def run_on_ranks(
    ranks: Callable[[int], Any], programs: list[Program], num_ranks: int, *, at_once: int = 25, timeout_s: float = 60.0
) -> Iterator[Verdict]:
    """Yield the verdicts of programs, in another order: those that are resumed come last."""
    resumed: dict[int, list[tuple[Program, Any]]] = collections.defaultdict(list)
    run = functools.partial(_outcomes, ranks, at_once=at_once, timeout_s=timeout_s)
    for program, found in run([(program, None) for program in programs], num_ranks):
        if isinstance(found[0], dict) and "state" in found[0] and None not in found:
            resumed[program.resume.num_ranks or num_ranks].append((program, found[0]["state"]))
        else:
            yield judge(program, num_ranks, found)
    for others, tasks in resumed.items():
        for program, found in run(tasks, others):
            yield judge(program, num_ranks, found)


def _outcomes(
    ranks: Callable[[int], Any], tasks: list[tuple[Program, Any]], num_ranks: int, *, at_once: int, timeout_s: float
) -> Iterator[tuple[Program, list[Any]]]:
    """Yield each program with the outcomes of its ranks; None is that of a rank that hangs."""
    numbered = [(number, *task) for number, task in enumerate(tasks)]
    while numbered:
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.suppress(PoolError):
                ranks(num_ranks).each(call_on_rank, folder, pickle.dumps(numbered[:at_once]), timeout=timeout_s)
            for number, program, _ in numbered[:at_once]:
                files = [Path(folder, f"{number}.{rank}.done") for rank in range(num_ranks)]
                found = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
                numbered.pop(0)
                yield program, found
                if not all(isinstance(each, dict) for each in found):
                    break


@functools.cache
def oracle(program: Program) -> Any:
    """Return the outcome of the plain script."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return outcome_of(program, None, None)


def is_unstable(program: Program) -> bool:
    """Return whether rounding alone changes the result of the plain script: L-BFGS can diverge."""
    script = Script(program, None)
    with torch.no_grad():
        for model in script.bare:
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-14)
    return _difference(script.run()["weights"], oracle(program)["weights"]) > TOLERANCE / 10


def judge(program: Program, num_ranks: int, found: list[Any]) -> Verdict:
    """Compare the outcomes of all ranks with that of the plain script."""
    say = functools.partial(Verdict, program, num_ranks)
    expected = oracle(program)
    if isinstance(expected, Failure) or not np.isfinite(expected["weights"]).all():
        trace = expected.trace if isinstance(expected, Failure) else str(expected)
        return say("invalid", "the plain script fails", trace)
    failures = [each for each in found if isinstance(each, Failure)]
    if len(failures) == num_ranks and all(each.is_refusal for each in failures):
        return say("refused" if program.is_ambiguous() else "REFUSED", failures[0].text, failures[0].trace)
    if failures:
        names = " / ".join("ok" if isinstance(each, dict) else each.name if each else "hangs" for each in found)
        worst = next((each for each in failures if each.name != "CollectiveError"), failures[0])
        return say("ERROR", f"{names}: {worst.text}", worst.trace)
    if None in found:
        return say("HANGS", f"ranks {[rank for rank, each in enumerate(found) if each is None]}")
    sums = np.sum([each["sums"] for each in found], axis=0)
    errors = {
        "weights": max(_difference(each["weights"], expected["weights"]) for each in found),
        "sums": _difference(sums, expected["sums"]),
        "steps": max(abs(each["steps"] - expected["steps"]) for each in found),
    }
    off = [f"{name} {error:.1e}" for name, error in errors.items() if not error < TOLERANCE]
    if off and is_unstable(program):
        return say("unstable", "rounding alone changes the result of the plain script")
    return say("OFF", ", ".join(off)) if off else say("ok")


def _difference(found: Any, expected: Any) -> float:
    """Return the maximal difference, relative to the largest number."""
    found, expected = np.array(found), np.array(expected)
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-3))


# --- The command


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.prepared_programs", description="Run random programs.")
    parser.add_argument("--seeds", default="0:200", help="a range, FROM:TO, or seeds with commas between them")
    parser.add_argument("--ranks", default="2", help="the numbers of ranks, with commas between them")
    parser.add_argument(
        "--kind", action="append", default=[], help="only programs of this kind, e.g. 'loop ahead'; repeatable"
    )
    parser.add_argument("--simple", action="store_true", help="only programs that have at most one kind")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each program, and the tracebacks")
    options = parser.parse_args()
    if ":" in options.seeds:
        seeds: Iterable[int] = range(*map(int, options.seeds.split(":")))
    else:
        seeds = map(int, options.seeds.split(","))
    programs = [program for program in map(write_program, seeds) if {*options.kind} <= {*program.kinds()}]
    if options.simple:
        programs = [program for program in programs if len(program.kinds()) <= 1]
    torch.set_num_threads(1)
    forking.install(forking.connection_to_server, for_single_ranks=True)
    began, verdicts, pool = time.monotonic(), [], Pool()
    try:
        for num_ranks in map(int, options.ranks.split(",")):
            for verdict in run_on_ranks(pool.ranks, programs, num_ranks):
                verdicts.append(verdict)
                text = str(verdict) if options.verbose else str(verdict).split("\n")[0][:200]
                print(text, f"\n    {verdict.program}" if verdict.word != "ok" or options.verbose else "", flush=True)
                if options.verbose and verdict.trace:
                    print(verdict.trace, flush=True)
    finally:
        pool.close()
    print(summary(verdicts))
    print(f"{len(verdicts)} runs in {time.monotonic() - began:.0f} s")
    raise SystemExit(any(not each.is_right for each in verdicts))


def summary(verdicts: list[Verdict]) -> str:
    """Return a table by kind; behind the bar stand programs that have no other kind, or only fewer samples."""
    words = ("ok", "refused", "REFUSED", "OFF", "ERROR", "HANGS", "invalid", "unstable")
    rows: dict[str, list[Verdict]] = collections.defaultdict(list)
    for verdict in verdicts:
        for kind in ["all", *(verdict.program.kinds() or ["none"])]:
            rows[kind].append(verdict)
    lines = [
        "".join(f"{word:>9}" for word in words) + " |" + "".join(f"{word:>9}" for word in ("right", "not")) + "  kind"
    ]
    for kind, those in sorted(rows.items(), key=lambda row: (row[0] != "all", row[0])):
        counts = collections.Counter(each.word for each in those)
        alone = [each.is_right for each in those if {*each.program.kinds()} <= {kind, "few samples"} or kind == "all"]
        numbers = "".join(f"{counts[word] or '.':>9}" for word in words)
        lines.append(f"{numbers} |{sum(alone) or '.':>9}{len(alone) - sum(alone) or '.':>9}  {kind}")
    return "\n".join(lines)


if __name__ == "__main__":
    # Under its own name: ranks import it, and objects of its classes are sent between processes.
    importlib.import_module("tests.prepared_programs").main()
