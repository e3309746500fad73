"""The sandbox of an experiment: model, data and random state, restored for every run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from lockstep.comm.process import single_process_view
from lockstep.containers import map_tensors
from lockstep.data.order import mix, seed_cpu
from lockstep.study.verify import interventions
from lockstep.study.verify.fingerprint import Fingerprint, fingerprint, fingerprint_model
from lockstep.study.verify.interventions import Experiment, Given, Subject
from lockstep.torch_internals import tree_flatten
from lockstep.train.task import Loss, Task, load_task

# Separates the random numbers of counterfactual runs from those that training draws from the same seed.
_COUNTERFACTUAL = 40

# The samples that a process loads: recorded, or replaced by those of another process.


def digest(sample: Any) -> bytes:
    """Return a digest of a sample of any structure: equal for equal values, in any process."""
    leaves, structure = tree_flatten(dict(sample) if isinstance(sample, Mapping) else sample)
    found = blake2b(str(structure).encode(), digest_size=12)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.update(fingerprint(leaf).digest)
        else:
            found.update(cloudpickle.dumps(leaf))
    return found.digest()


# Index, value and digest.
LoadedSample = tuple[int | None, Any, bytes]


class SampleRecorder:
    """Records the samples that were loaded for the current step.

    Args:
        given: The run whose samples are used instead, or None.
    """

    def __init__(self, given: Given | None) -> None:
        self.given = given
        self.step = 0
        self._pending: list[LoadedSample] = []
        self._used: list[LoadedSample] = []

    def record(self, index: int | None, sample: Any) -> Any:
        """Record a loaded sample, and return it."""
        self._pending.append((index, sample, digest(sample)))
        return sample

    def mark_used(self) -> None:
        """Assign all samples loaded so far to this step; later ones may be loaded ahead."""
        self._used += self._pending
        self._pending = []

    def end_step(self) -> list[LoadedSample]:
        """Return the samples of the step; those loaded after the last use belong to the next step."""
        used, self._used = self._used, []
        return used

    def given_sample(self, index: int) -> Any:
        """Return the given sample for ``index`` in this step, or in a later one if it is loaded ahead."""
        assert self.given is not None
        # In order, because the same index may have another value in another epoch.
        for step in sorted(step for step in self.given.samples if step >= self.step):
            for known, sample in self.given.samples[step]:
                if known == index:
                    return sample
        raise LookupError(f"sample {index} was not loaded in step {self.step} by one process")


class RecordedSamples(Dataset[Any]):
    """A recorded data set with a length."""

    def __init__(self, samples: Any, recorder: SampleRecorder) -> None:
        self._samples, self._recorder = samples, recorder

    def __len__(self) -> int:
        """Return the number of samples."""
        given = self._recorder.given
        return len(self._samples) if given is None else int(given.sizes["samples of the data set"] or 0)

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        is_own = self._recorder.given is None
        return self._recorder.record(index, self._samples[index] if is_own else self._recorder.given_sample(index))


class RecordedStream(IterableDataset[Any]):
    """A recorded stream."""

    def __init__(self, stream: Any, recorder: SampleRecorder) -> None:
        self._stream, self._recorder = stream, recorder

    def __iter__(self) -> Iterator[Any]:
        """Return the samples."""
        given, stream = self._recorder.given, self._stream
        if given is not None:
            stream = [sample for step in sorted(given.samples) for _, sample in given.samples[step]]
        for sample in stream:
            yield self._recorder.record(None, sample)


class Sandbox:
    """The common state of one experiment's runs in this process; created by `open_sandbox`.

    Attributes:
        watch: Observes the random draws and the writes of forward.
        tasks: The copies of the task, one for each share that this process computes.
        outside: Parameters that losses depend on, but no module registers: by id, each with its first digest.
    """

    def __init__(self, subject: Subject, experiment: Experiment, given: Given) -> None:
        self.subject, self.experiment, self.given = subject, experiment, given
        self.watch = interventions.Watch(experiment.off)
        self.tasks: list[SandboxedTask] = []
        self.outside: dict[int, tuple[nn.Parameter, bytes]] = {}

    def load_task(self, share: int) -> SandboxedTask:
        """Return a fresh copy of the task for share ``share``; the whole batch counts as share 0."""
        task = self.subject.task
        with self.rank_view():
            plain = load_task(task) if isinstance(task, str) else cloudpickle.loads(task)
            self.tasks.append(SandboxedTask(self, share, plain))
        return self.tasks[-1]

    def rank_view(self) -> AbstractContextManager[None]:
        """Return the context for the task's own code, which may hide the rank from it."""
        return single_process_view() if "place" in self.experiment.off else nullcontext()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Compute ``step`` in this context; the experiment's settings apply only inside it."""
        for task in self.tasks:
            task.begin(step)
        with ExitStack() as stack:
            stack.enter_context(self.rank_view())  # backward and update also run the task's code
            if "batchnorm" in self.experiment.off:
                stack.enter_context(interventions.NoBatchStatistics())
            if self.experiment.watched:
                stack.enter_context(self.watch)
            try:
                yield
            finally:
                # Forward has turned it on. It stays on in backward, which may draw again, as in checkpointing.
                self.watch.active = False


class SandboxedTask:
    """One process's copy of the task, for the training loop.

    Attributes:
        task: The task, changed to record what the experiment needs and to turn features off.
        recorder: Records the samples that its data set loads.
        rates: Of each update, the options of the optimizer's groups.
        built: The model.
        is_stream: Whether its data set has no length.
        gradients: The gradients before the optimizer's step, which may change them.
    """

    def __init__(self, sandbox: Sandbox, share: int, plain: Task) -> None:
        self._sandbox, self._share, self._plain = sandbox, share, plain
        self._step = self._num_calls = 0
        self.rates: list[list[dict[str, Any]]] = []
        self.gradients: dict[str, Fingerprint] | None = None
        self.built: nn.Module | None = None
        self.is_stream = False
        is_given = "data" in sandbox.experiment.off
        self.recorder = SampleRecorder(sandbox.given if is_given else None)
        others: dict[str, Any] = {}
        if is_given:
            others["global_batch_size"] = sandbox.given.sizes["samples of a global batch"]
        if plain.collate is not None:
            others["collate"] = self._collate
        self.task = dataclasses.replace(
            plain, model=self._model, dataset=self._dataset, loss=self._loss, optimizer=self._optimizer, **others
        )

    def begin(self, step: int) -> None:
        """Prepare for ``step``."""
        self._step, self._num_calls, self.recorder.step = step, 0, step
        self.gradients = None

    def _dataset(self) -> Any:
        with self._sandbox.rank_view():
            samples = self._plain.dataset()
        self.is_stream = isinstance(samples, IterableDataset)
        return (RecordedStream if self.is_stream else RecordedSamples)(samples, self.recorder)

    def _collate(self, samples: list[Any]) -> Any:
        assert self._plain.collate is not None
        self._set_seed()
        with self._sandbox.rank_view():
            self._sandbox.watch.active = True
            batch = self._plain.collate(samples)
            self._sandbox.watch.active = False
        return batch

    def _set_seed(self) -> None:
        """Seed the random numbers of forward by step and share, or by step alone if shares must not differ."""
        if self._sandbox.experiment.watched:
            share = 0 if "random" in self._sandbox.experiment.off else self._share
            seed_cpu(mix(self._sandbox.subject.settings.seed, _COUNTERFACTUAL, self._step, self._num_calls, share))

    def _model(self) -> nn.Module:
        experiment = self._sandbox.experiment
        with self._sandbox.rank_view():
            model = self._plain.model()
        if not isinstance(model, nn.Module):
            return model  # type: ignore[unreachable]  # the loop's own error explains what is wrong
        # Also parameters that the task creates with an explicit dtype.
        if self._sandbox.subject.double:
            model = model.double()
        if "initial" in experiment.off:
            model.load_state_dict({**model.state_dict(), **self._sandbox.given.initial})
        self.built = model
        return model

    def _optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        if self._sandbox.experiment.is_sgd:
            return torch.optim.SGD(parameters, lr=0.01)
        with self._sandbox.rank_view():
            optimizer = self._plain.optimizer(parameters)
        if isinstance(optimizer, Optimizer):
            optimizer.register_step_pre_hook(self._before_update)
        return optimizer

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Set the rates of the single-process run, if the experiment requires it, and record the rates."""
        if self.gradients is not None:
            return  # the task's own optimizer may call torch's, which calls this again
        assert self.built is not None
        # Recorded now: the loop has divided and clipped them, and some optimizers write into them.
        self.gradients = fingerprint_model(self.built)["gradient"]
        number, given = len(self.rates), self._sandbox.given.rates
        if "rates" in self._sandbox.experiment.off and number < len(given):
            for group, known in zip(optimizer.param_groups, given[number], strict=False):
                group.update({key: value for key, value in known.items() if key in group})
        self.rates.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])

    def _loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        sandbox, off = self._sandbox, self._sandbox.experiment.off
        self.recorder.mark_used()
        # Here instead of in the data set, because samples must have the same bits in all experiments.
        if sandbox.subject.double:
            batch = map_tensors(batch, _to_double)
        self._set_seed()
        self._num_calls += 1
        if "batchnorm" in off:  # the values that they would write into their running statistics
            for module in model.modules():
                if interventions.is_batch_norm(module):
                    module.eval()
        with sandbox.rank_view(), sandbox.watch.forward(model) if sandbox.experiment.watched else nullcontext():
            sandbox.watch.active = True
            result = self._plain.loss(model, batch)
        if not sandbox.experiment.watched:
            known = {*map(id, model.parameters()), *sandbox.outside}
            for leaf in _leaves(result.total if isinstance(result, Loss) else result):
                if id(leaf) not in known:
                    sandbox.outside[id(leaf)] = leaf, fingerprint(leaf).digest
        if "weights" not in off:
            return result
        factor = sandbox.given.factors[self._step][self._share]
        if factor == 0.0:  # the value may not be finite
            return sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
        return (result.total / result.count if isinstance(result, Loss) else result) * factor


def _leaves(loss: Tensor) -> Iterator[nn.Parameter]:
    """Yield the parameters that ``loss`` depends on, also those outside of the model."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
            if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
                yield leaf


def _to_double(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def open_sandbox(subject: Subject, experiment: Experiment, given: Given) -> Iterator[Sandbox]:
    """Create a sandbox for one run; turn off some features before the task is loaded; undo everything at the end."""
    sandbox = Sandbox(subject, experiment, given)
    # The callback restores what is set after it, even if the task's file raises.
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.enter_context(_modules_forgotten(subject.task))
        # Also in plain runs, in which libraries may be imported that keep what they import.
        stack.enter_context(sandbox.watch.generators())
        if subject.double:
            torch.set_default_dtype(torch.float64)
        yield sandbox


@contextmanager
def _modules_forgotten(task: str | bytes) -> Iterator[None]:
    """At the end, forget modules in the folder of the task's file, so that the next run imports them again."""
    kept_path, kept = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = kept_path
        # Only files in the task's folder: a library that is imported twice has two copies of each class.
        folder = Path(task.rpartition(".py")[0]).resolve().parent if isinstance(task, str) else None
        for name in set(sys.modules) - kept:
            file = getattr(sys.modules[name], "__file__", None)
            if folder is not None and file and Path(file).resolve().is_relative_to(folder):
                del sys.modules[name]
