"""The sandbox of an experiment: model, data and random state, put back as they were for every run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from lockstep.comm.process import single_process_view
from lockstep.data.batch_iterator import map_tensors
from lockstep.data.order import mix, seed_cpu
from lockstep.study.verify.fingerprint import Fingerprint, take
from lockstep.study.verify.interventions import (
    Draws,
    Experiment,
    Given,
    NoBatchStatistics,
    NoWrites,
    Subject,
    Watch,
    digest,
    is_batch_norm,
    outside_stands_still,
    watched,
)
from lockstep.train.task import Loss, Task, load_task

_COUNTERFACTUAL = 40
"""Keeps the bits of counterfactual runs apart from those that training draws from the same seed."""


class Sandbox:
    """What the runs of one experiment in this process share; `open_sandbox` makes one.

    Attributes:
        draws: Sees the random numbers of forward.
    """

    def __init__(self, subject: Subject, experiment: Experiment, given: Given) -> None:
        self.subject, self.experiment, self.given = subject, experiment, given
        self.draws = Draws(off="random" in experiment.off)
        self.writes = NoWrites()
        self.places: list[SandboxedTask] = []

    def place(self, share: int) -> SandboxedTask:
        """Return a fresh copy of the task for share ``share``; the whole batch counts as share 0."""
        with self.disguised():
            place = SandboxedTask(self, share, _fresh(self.subject.task))
        self.places.append(place)
        return place

    def disguised(self) -> AbstractContextManager[None]:
        """Return the context in which the task's own code runs."""
        return single_process_view() if "place" in self.experiment.off else nullcontext()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Compute ``step`` within: only here is anything turned off."""
        for place in self.places:
            place.begin(step)
        off = self.experiment.off
        with ExitStack() as stack:
            if "batchnorm" in off:
                stack.enter_context(NoBatchStatistics())
            if "state" in off:
                stack.enter_context(self.writes)
            if self.experiment.watched:
                stack.enter_context(self.draws)
            try:
                yield
            finally:
                self.draws.active = False


class SandboxedTask:
    """One process's copy of the task, as it goes into the loop.

    Attributes:
        task: The task, fitted with what is watched and turned off.
        watch: Sees what its data set loads.
        rates: Of each update, the options of the optimizer's groups.
        batches: Digests of what the loss got in this step.
        is_stream: Whether its data set turned out to be one without a length.
        gradients: What the optimizer was called with in this step; it may change them.
    """

    def __init__(self, bench: Sandbox, share: int, plain: Task) -> None:
        self._bench, self._share, self._plain = bench, share, plain
        off, self._given = bench.experiment.off, bench.given
        self._step = self._num_calls = 0
        self.rates: list[list[dict[str, Any]]] = []
        self.gradients: dict[str, Fingerprint] | None = None
        self.batches: list[bytes] = []
        self._built: nn.Module | None = None
        self.is_stream = False
        self.watch = Watch(self._given if "data" in off else None)
        others: dict[str, Any] = {}
        if "data" in off:
            others["global_batch_size"] = self._given.sizes["samples of a global batch"]
        if plain.collate is not None:
            others["collate"] = self._collate
        self.task = dataclasses.replace(
            plain, model=self._model, dataset=self._dataset, loss=self._loss, optimizer=self._optimizer, **others
        )

    def begin(self, step: int) -> None:
        """Note that ``step`` comes."""
        self._step, self._num_calls, self.watch.step = step, 0, step
        self.gradients, self.batches = None, []

    def _dataset(self) -> Any:
        with self._bench.disguised():
            samples = self._plain.dataset()
        self.is_stream = isinstance(samples, IterableDataset)
        return watched(samples, self.watch)

    def _collate(self, samples: list[Any]) -> Any:
        assert self._plain.collate is not None
        self._set_seed()
        with self._bench.disguised():
            self._bench.draws.active = True
            batch = self._plain.collate(samples)
            self._bench.draws.active = False
        return batch

    def _set_seed(self) -> None:
        """Set the random numbers of forward by step and share, and by step alone if they should not matter."""
        if self._bench.experiment.watched:
            share = 0 if self._bench.draws.off else self._share
            seed_cpu(mix(self._bench.subject.settings.seed, _COUNTERFACTUAL, self._step, self._num_calls, share))

    def _model(self) -> nn.Module:
        with self._bench.disguised():
            model = self._plain.model()
        if not isinstance(model, nn.Module):
            return model  # type: ignore[unreachable]  # the loop says what is wrong with it
        experiment = self._bench.experiment
        if experiment.convert:
            from lockstep.parallel.sync_batchnorm import SyncBatchNorm

            model = SyncBatchNorm.convert_sync_batchnorm(model)
        if self._bench.subject.double:
            model = model.double()
        if "initial" in experiment.off:
            model.load_state_dict({**model.state_dict(), **self._given.initial})
        self._built = model
        return model

    def _optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        with self._bench.disguised():
            optimizer = self._plain.optimizer(parameters)
        if isinstance(optimizer, Optimizer):
            optimizer.register_step_pre_hook(self._before_update)
        return optimizer

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Set the rates that one process had, if so wanted, and note those that there are."""
        if self.gradients is not None:
            return  # an optimizer of the task's own may call torch's, which comes here again
        assert self._built is not None
        self.gradients = take(self._built).gradients
        number = len(self.rates)
        if "rates" in self._bench.experiment.off and number < len(self._given.rates):
            for group, known in zip(optimizer.param_groups, self._given.rates[number], strict=False):
                group.update({key: value for key, value in known.items() if key in group})
        self.rates.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])

    def _loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        bench, off = self._bench, self._bench.experiment.off
        self.watch.use()
        if bench.subject.double:
            batch = map_tensors(batch, _to_double)
        self.batches.append(digest(batch))
        self._set_seed()
        self._num_calls += 1
        if "batchnorm" in off:
            for module in model.modules():
                if is_batch_norm(module):
                    module.eval()
        with ExitStack() as stack:
            stack.enter_context(bench.disguised())
            if "state" in off:
                stack.enter_context(bench.writes.during(model))
            bench.draws.active = True
            result = self._plain.loss(model, batch)
        return self._weigh(result, model) if "weights" in off else result

    def _weigh(self, result: Tensor | Loss, model: nn.Module) -> Tensor:
        factor = self._given.factors[self._step][self._share]
        if factor == 0.0:  # it may not even be finite
            return sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
        return as_mean(result) * factor


def as_mean(result: Tensor | Loss) -> Tensor:
    """Return what a loss comes to."""
    return result.total / result.count if isinstance(result, Loss) else result


def _to_double(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def open_sandbox(subject: Subject, experiment: Experiment, given: Given) -> Iterator[Sandbox]:
    """Make a bench for one run, with what must be turned off before the task is loaded; undo all of it at the end."""
    bench, off = Sandbox(subject, experiment, given), experiment.off
    kept_dtype, kept_threads = torch.get_default_dtype(), torch.get_num_threads()
    kept_strictness = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, kept_dtype)
        stack.enter_context(_modules_forgotten(subject.task))
        if "outside" in off:
            stack.enter_context(outside_stands_still())
        if experiment.watched:
            stack.enter_context(bench.draws.watching())
        if "operators" in off:
            stack.callback(torch.use_deterministic_algorithms, kept_strictness)
            torch.use_deterministic_algorithms(True)
        if "threads" in off:
            stack.callback(torch.set_num_threads, kept_threads)
            torch.set_num_threads(1)
        if subject.double:
            torch.set_default_dtype(torch.float64)
        yield bench


def _fresh(task: str | bytes) -> Task:
    if isinstance(task, str):
        return load_task(task)
    found: Task = cloudpickle.loads(task)
    return found


@contextmanager
def _modules_forgotten(task: str | bytes) -> Iterator[None]:
    """Forget at the end what the task's file and its neighbours imported, so that the next run starts afresh."""
    kept_path, kept = list(sys.path), set(sys.modules)
    folder = Path(task.rpartition(".py")[0] or ".").resolve().parent if isinstance(task, str) else None
    is_beside: Callable[[str], bool] = partial(_is_under, folder)
    try:
        yield
    finally:
        sys.path[:] = kept_path
        for name in set(sys.modules) - kept:
            if is_beside(getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]


def _is_under(folder: Path | None, file: str) -> bool:
    return folder is not None and file != "" and Path(file).resolve().is_relative_to(folder)
