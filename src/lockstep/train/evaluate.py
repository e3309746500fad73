"""Evaluation that counts every sample exactly once, on any number of ranks."""

import math
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset

from lockstep.base.accelerator import default_device, widest_dtype
from lockstep.base.containers import map_tensors
from lockstep.base.torch_internals import averaged_states
from lockstep.comm.collectives import Group, broadcast_coalesced, gather_states
from lockstep.data.comparison import check_same_samples, checksum
from lockstep.data.loader import BadSample, LoadOptions, MicroBatch, Request, load, to_device
from lockstep.data.order import BatchSplit, Purpose, mix, seed_cpu, seed_device
from lockstep.data.stream import StreamOrder
from lockstep.errors import ConfigurationError
from lockstep.loop.buffers import BufferSnapshot
from lockstep.parallel.reduction_tree import ReductionTree
from lockstep.train.settings import Settings
from lockstep.train.skipping import BadSamples
from lockstep.train.step_parts import Objective, autocast
from lockstep.train.strategies.reproducible import Arithmetic
from lockstep.train.task import Loss, Task
from lockstep.train.trainer import Trainer


@dataclass(frozen=True)
class Evaluation:
    """The loss and the task's metrics, by name, after ``step`` steps."""

    step: int
    metrics: dict[str, float]

    @property
    def loss(self) -> float:
        """The loss; infinite if it is NaN, so that any other loss is better."""
        loss = self.metrics["loss"]
        return math.inf if math.isnan(loss) else loss


@dataclass(frozen=True)
class Inference:
    """A model that is run on samples without training.

    Args:
        model: Without wrappers; each rank has a whole one.
        settings: Seed, precision, and whether there are virtual shards.
        split: How samples are divided among the ranks, or virtual shards.
        batch_size: Samples of a global batch of training; a micro-batch of it is known to fit in memory.
        loading, arithmetic: As in training.
        device: Of this rank.
        group: The ranks that divide the samples; None: only this process.
    """

    model: nn.Module
    settings: Settings
    split: BatchSplit
    batch_size: int
    loading: LoadOptions
    arithmetic: Arithmetic
    device: torch.device
    group: Group | None

    @classmethod
    def of(cls, trainer: Trainer) -> Self:
        """Return that of a trainer at this moment. Collective with fsdp: every rank."""
        plan = trainer.plan
        options = plan.split, plan.order.batch_size, trainer.loading, trainer.arithmetic, trainer.device, trainer.group
        return cls(trainer.model, trainer.settings, *options)

    def run(self, samples: Any, act: Callable[[int, MicroBatch], None]) -> list[BadSample]:
        """Call ``act`` for each batch of this rank, with the number of its part; return what could not be read.

        A part is what this rank evaluates, or each of its virtual shards. The model is in evaluation mode, and its
        state does not change. Collective: every rank.
        """
        model, group = self.model, self.group
        if group is not None:  # batch-norm statistics differ between ranks until the next forward
            broadcast_coalesced([buffer for buffer in model.buffers() if buffer.numel()], group=group, src=0)
        size = None if isinstance(samples, IterableDataset) else len(samples)
        bad = BadSamples(skip=self.loading.skip_bad, device=self.device, group=group, num_samples=size, evaluation=True)
        buffers = BufferSnapshot(model)  # evaluation must not change the state of the model
        buffers.keep()
        current, is_exact, read = None, self.settings.reproducible is not None, ""
        try:
            with in_eval_mode(model), self.arithmetic.applied(), torch.no_grad():
                for batch in self._batches(samples):
                    bad.add(batch)
                    if batch.note is not None:
                        read = checksum([read, batch.note.checksum])
                    if not batch.batches:
                        continue
                    number = batch.numbers[0] if is_exact else self.numbers[0]
                    # Each part starts with the same buffers, on any rank; parts of a stream take turns on some ranks.
                    begun = number, batch.step if is_exact and size is None else 0
                    if begun != current:
                        buffers.restore()
                        current = begun
                    act(number, batch)
        finally:
            buffers.restore()
        # Not in the loop, because the ranks have different numbers of batches.
        bad.exchange()
        if size is None:
            check_same_samples(read, "Task.eval_dataset", 0, group=group, device=self.device)
        return bad.skipped

    def alone(self) -> Self:
        """Return that of one process, the same on every rank, with batches of the size of the smallest micro-batch."""
        sizes = (len(self.split.positions(self.batch_size, share)) for share in range(self.split.num_shares))
        size = max(1, min(sizes) // self.split.accumulate)
        loading = replace(self.loading, workers=0, skip_bad=True)
        return replace(self, split=BatchSplit(1, range(1), 1), batch_size=size, loading=loading, group=None)

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of this rank's parts: of its virtual shards, or of its first share."""
        return self.split.shares[: None if self.settings.reproducible is not None else 1]

    def _batches(self, samples: Any) -> Iterator[MicroBatch]:
        """Yield this rank's samples, part after part, in batches of the size of training; of a stream, in its order."""
        split, seed, requests = self.split, mix(self.settings.seed, Purpose.EVALUATE), []
        if isinstance(samples, IterableDataset):
            batches = _one_by_one(StreamOrder(self.batch_size, seed, num_epochs=1), samples, split, self.loading)
        else:
            is_exact = self.settings.reproducible is not None
            for share in self.numbers:
                positions = split.positions(len(samples), share) if is_exact else split.positions_here(len(samples))
                size = max(1, len(split.positions(self.batch_size, share)) // split.accumulate)
                for number, start in enumerate(range(0, len(positions), size)):
                    requests.append(Request(0, number, len(samples), {share: list(positions[start : start + size])}))
            batches = load(samples, requests, self.loading, seed=seed)
        for batch in batches:
            # By position, so that a model that uses random numbers in evaluation gets the same on any rank.
            position = mix(seed, batch.step, *batch.numbers)
            seed_cpu(position)
            seed_device(self.device, position)
            yield to_device(batch, dict.fromkeys(batch.numbers, self.device))


def _one_by_one(order: StreamOrder, stream: Any, split: BatchSplit, options: LoadOptions) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a stream with one share each, after one without any that has the note."""
    for micro in order.load(stream, split, options, 0, None):
        yield micro._replace(numbers=[], samples=[], batches=[])
        for number, samples, batch in zip(micro.numbers, micro.samples, micro.batches, strict=True):
            yield micro._replace(numbers=[number], samples=[samples], batches=[batch], note=None)


@dataclass
class _First(IterableDataset[Any]):
    """The first samples of a stream."""

    stream: Any
    size: int

    def __iter__(self) -> Iterator[Any]:
        return islice(self.stream, self.size)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model on the task's evaluation data.

    Args:
        task: A task with ``eval_dataset``.
        inference: Returns the model and how it is run; collective with fsdp.
        samples: The data, with ``len`` and ``[]``, or a stream that ends.
        skipped: Samples that the last evaluation skipped, because they could not be read.
        metrics: The metrics of torchmetrics, which every rank knows after `try_out`.
    """

    task: Task
    inference: Callable[[], Inference]
    samples: Any
    skipped: list[BadSample] = field(default_factory=list)
    metrics: "_MetricStates" = field(default_factory=lambda: _MetricStates())

    def run(self) -> dict[str, float]:
        """Return the loss and the task's metrics, over all samples, by name.

        Collective for strategies with a process for each device: every rank; all get the same numbers. Blocks.

        Raises:
            ConfigurationError: A metric is neither a tensor with one value for each sample, a `Loss`, nor a metric of
                torchmetrics with one number.
        """
        if not self.metrics.are_known:  # of a rank that takes the place of a lost one
            self.try_out()
        return self._run(self.inference(), self.samples)

    def try_out(self) -> list[str]:
        """Evaluate the first batch on every rank, so that what is wrong is found before the training.

        Model, metrics and random state are unchanged afterwards. Returns the names of the metrics; empty if no sample
        of the batch can be read.

        Collective with fsdp: every rank. Blocks.

        Raises:
            ConfigurationError: As for `run`.
        """
        self.metrics.are_known = True
        with random_state_restored():
            inference = self.inference().alone()
            is_stream, size = isinstance(self.samples, IterableDataset), inference.batch_size
            first = (
                _First(self.samples, size) if is_stream else Subset(self.samples, range(min(size, len(self.samples))))
            )
            names = self._run(inference, first, is_trial=True).keys()
        return sorted({*names, *self.metrics.names}) if names else []

    def _run(self, inference: Inference, samples: Any, *, is_trial: bool = False) -> dict[str, float]:
        sums: dict[int, dict[str, Tensor]] = {number: {} for number in inference.numbers}

        def act(number: int, micro: MicroBatch) -> None:
            self.metrics.begin(number, micro.sizes[0])
            part = sums[number]
            for name, value in self._measure(inference, micro).items():
                part[name] = part[name] + value if name in part else value

        self.skipped[:] = inference.run(samples, act)
        row = [{name: pair.tolist() for name, pair in part.items()} for part in sums.values()], self.metrics.end()
        ranks = [row] if inference.group is None else gather_states(row, group=inference.group, device=inference.device)
        means = _means([part for parts, _ in ranks for part in parts])
        return means | self.metrics.compute([states for _, metrics in ranks for states in metrics], is_trial=is_trial)

    def _measure(self, inference: Inference, micro: MicroBatch) -> dict[str, Tensor]:
        """Return total and count of the loss and of each metric; of metrics of torchmetrics the states are kept."""
        (batch,), (num_samples,) = micro.batches, micro.sizes
        precision, model = inference.settings.precision, inference.model
        part = Objective(self.task, precision)(model, batch, num_samples)

        def sum_dtype(value: Tensor) -> Tensor:
            return value.to(inference.device, widest_dtype(inference.device))

        def pair(total: Tensor, count: Tensor | float) -> Tensor:
            return torch.stack([sum_dtype(torch.as_tensor(item)) for item in (total, count)])

        # Multiplied in the dtype of the sums, because a product in half precision would be rounded.
        sums = {"loss": pair(sum_dtype(part.value) * part.weight, part.out_of)}
        if self.task.metrics is None:
            return sums
        with autocast(precision, inference.device):
            metrics = self.metrics.measure(self.task.metrics, model, batch, inference.device)
        for name, value in metrics.items():
            if self.metrics.take(name, value):
                continue
            if isinstance(value, Loss):
                sums[name] = pair(value.total, value.count)
            elif isinstance(value, Tensor) and value.shape == (num_samples,):
                sums[name] = pair(sum_dtype(value).sum(), num_samples)
            else:
                kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ConfigurationError(
                    f"The metric {name!r} of a batch of {num_samples} samples is a {kind}.\n"
                    f"Return a tensor of shape ({num_samples},), one value for each sample, a Loss(total, count), or a "
                    "metric of torchmetrics that was updated."
                )
        return sums


class _MetricStates:
    """The states of torchmetrics' metrics, which the task's function has updated: those of each part, then of all.

    torchmetrics would gather the states of all ranks itself, but not those of virtual shards in their order.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._part: int | None = None
        self._kept: dict[int, dict[str, dict[str, Any]]] = {}
        self._sizes: dict[int, int] = {}  # samples of each part
        self.are_known = False

    @property
    def names(self) -> Iterable[str]:
        """Of the metrics that were returned so far."""
        return self._metrics

    def measure(
        self, function: Callable[..., Mapping[str, Any]], model: nn.Module, batch: Any, device: torch.device
    ) -> Mapping[str, Any]:
        """Return the task's metrics of ``batch``, after those of torchmetrics on another device have moved to it."""
        try:
            return function(model, batch)
        except RuntimeError as error:
            torchmetrics: Any = sys.modules.get("torchmetrics")
            if torchmetrics is None:
                raise
            # They are known only when they are returned. Before that, they are seen where the error was raised.
            seen = [value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values()]
            elsewhere = [value for value in seen if isinstance(value, torchmetrics.Metric) and value.device != device]
            if not elsewhere:
                raise
        for metric in elsewhere:
            metric.to(device)
        return self.measure(function, model, batch, device)

    def take(self, name: str, value: Any) -> bool:
        """Return whether ``value`` is a metric, or several; then it belongs to the evaluation."""
        torchmetrics: Any = sys.modules.get("torchmetrics")
        if torchmetrics is not None and isinstance(value, torchmetrics.MetricCollection):
            self._metrics |= dict(value.items())
        elif torchmetrics is not None and isinstance(value, torchmetrics.Metric):
            self._metrics[name] = value
        else:
            return False
        return True

    def begin(self, part: int, size: int = 0) -> None:
        """Go on with the states of ``part``, and ``size`` more samples."""
        self._sizes[part] = self._sizes.get(part, 0) + size
        if part == self._part:
            return
        if self._part is not None:
            # Copied: `reset` empties lists. Tensors it replaces.
            states = {name: metric.metric_state.items() for name, metric in self._metrics.items()}
            self._kept[self._part] = {name: {key: copy(item) for key, item in items} for name, items in states.items()}
        self._part = part
        for name, metric in self._metrics.items():
            metric.reset()
            for attribute, value in self._kept.get(part, {}).get(name, {}).items():
                setattr(metric, attribute, value)

    def end(self) -> list[tuple[int, dict[str, Any]]]:
        """Reset the metrics; return their states in this rank's parts, on the CPU, each after its number of samples."""
        self.begin(-1)
        states_of_parts, sizes = map_tensors(self._kept, lambda tensor: tensor.detach().cpu()), self._sizes
        self._kept, self._sizes, self._part = {}, {}, None
        return [(sizes[part], states) for part, states in sorted(states_of_parts.items())]

    def compute(self, parts: Sequence[tuple[int, dict[str, Any]]], *, is_trial: bool) -> dict[str, float]:
        """Return the metrics, by name, of the states of all parts in their order; in a trial, where there are enough.

        Raises:
            ConfigurationError: One is not a single number, or its states cannot be combined.
        """
        values = {}
        for name, metric in self._metrics.items():
            states = [(size, part[name]) for size, part in parts if name in part]
            if not metric.metric_state:
                raise ConfigurationError(
                    f"The metric {name!r} is a {type(metric).__name__}, which keeps its states in other metrics.\n"
                    "Return these by name."
                )
            try:
                value = _combined(metric, states)
            except Exception:
                if not is_trial:
                    raise
                continue  # it may need more samples than those of one batch
            if not (isinstance(value, Tensor) and value.numel() == 1):
                raise ConfigurationError(
                    f"The metric {name!r} is a {type(metric).__name__} with more than one number.\n"
                    'Choose a mean, such as average="macro", or return one metric for each number.'
                )
            values[name] = float(value)
        return values


def _combined(metric: Any, parts: Sequence[tuple[int, Mapping[str, Any]]]) -> Any:
    """Return what ``metric`` computes from the states after parts of so many samples; it reduces them as of ranks."""
    whole, states, averaged = metric.clone().cpu(), [state for _, state in parts], averaged_states(metric)
    gathered: dict[int, list[Tensor]] = {}
    for attribute, first in states[0].items():
        if isinstance(first, Tensor):
            values = [state[attribute] for state in states]
            if attribute in averaged:  # it would give each part the same weight
                total = sum(size * value.double() for (size, _), value in zip(parts, values, strict=True))
                values = [torch.as_tensor(total / sum(size for size, _ in parts)).to(first.dtype)]
            setattr(whole, attribute, first)
            gathered[id(first)] = values
        else:  # a list, of which the parts are the items
            setattr(whole, attribute, [tensor for state in states for tensor in state[attribute]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this copy was not updated
        whole.dist_sync_fn = lambda tensor, group=None: gathered.get(id(tensor), [tensor])
        whole.distributed_available_fn = lambda: True
        if not whole.sync_on_compute:
            whole.sync(whole.dist_sync_fn)
        return whole.compute()


@contextmanager
def random_state_restored() -> Iterator[None]:
    """Restore the generators of Python, numpy, torch's CPU and the current device after the block."""
    here = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(here, device_type=default_device().type):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode within the block; afterwards each module has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():  # each before its children
            if module.training != mode:
                module.train(mode)  # which a module may define, for example to take merged weights apart
            module.training = mode


def _means(parts: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Return the mean of each metric from the totals and counts of all parts, which are the same on all ranks.

    They are added in a tree over the parts, so with virtual shards the bits do not depend on the number of ranks.
    """
    tree, means = ReductionTree(len(parts)), {}
    for name in dict.fromkeys(name for part in parts for name in part):  # a rank without samples has no names
        pairs = [part.get(name, [0.0, 0.0]) for part in parts]
        total, count = map(tree.total, zip(*pairs, strict=True))
        means[name] = total / count if count else math.nan
    return means
