"""Evaluation that counts every sample exactly once, on any number of ranks."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.accelerator import widest_dtype
from lockstep.comm.collectives import all_gather_object, broadcast_coalesced
from lockstep.data.loader import BadSample, MicroBatch, Request, load, to_device
from lockstep.data.order import mix, seed_cpu, seed_device
from lockstep.errors import ConfigurationError
from lockstep.parallel.reduction_tree import ReductionTree
from lockstep.train.skipping import BadSamples, BufferSnapshot
from lockstep.train.step import Objective, autocast
from lockstep.train.task import Loss, Task
from lockstep.train.trainer import Trainer

# A separate stream of random numbers for evaluation; see the purposes in step.py.
_EVALUATE = 5


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
class Evaluator:
    """Evaluates the model of a trainer on the task's evaluation data.

    Args:
        task: A task with ``eval_dataset``.
        trainer: Provides the model, the split of batches over the ranks, precision and seed.
        samples: The data, with ``len`` and ``[]``.
        skipped: Samples that the last evaluation skipped, because they could not be read.
    """

    task: Task
    trainer: Trainer
    samples: Sequence[Any]
    skipped: list[BadSample] = field(default_factory=list)

    def run(self) -> dict[str, float]:
        """Return the loss and the task's metrics, over all samples, by name.

        Collective for strategies with a process for each device: every rank; all get the same numbers. Blocks.

        Raises:
            ConfigurationError: A metric is neither a tensor with one value for each sample nor a `Loss`.
        """
        trainer, size = self.trainer, len(self.samples)
        model, group, device = trainer.model, trainer.group, trainer.device
        if group is not None:  # batch-norm statistics differ between ranks until the next forward
            broadcast_coalesced([buffer for buffer in model.buffers() if buffer.numel()], group=group, src=0)
        parts = self._parts()
        sums: dict[int, dict[str, Tensor]] = {number: {} for number in parts}
        bad = BadSamples(skip=trainer.loading.skip_bad, device=device, group=group, num_samples=size, evaluation=True)
        buffers = BufferSnapshot(model)  # evaluation must not change the state of the model
        buffers.keep()
        current = None
        try:
            with in_eval_mode(model), trainer.arithmetic.applied(), torch.no_grad():
                for batch in self._batches(parts):
                    bad.add(batch)
                    if not batch.batches:
                        continue
                    if batch.numbers[0] != current:  # each part starts with the same buffers, on any rank
                        buffers.restore()
                        current = batch.numbers[0]
                    part = sums[current]
                    for name, value in self._measure(model, batch).items():
                        part[name] = part[name] + value if name in part else value
        finally:
            buffers.restore()
        # Not in the loop, because the ranks have different numbers of batches.
        bad.exchange()
        self.skipped[:] = bad.skipped
        mine = [{name: pair.tolist() for name, pair in part.items()} for part in sums.values()]
        ranks = [mine] if group is None else all_gather_object(mine, group=group, device=device)
        return _means([part for parts in ranks for part in parts])

    def _parts(self) -> dict[int, range]:
        """Return the contiguous samples that this rank evaluates: its share, or each of its virtual shards."""
        split, size = self.trainer.plan.split, len(self.samples)
        if self.trainer.settings.reproducible is not None:
            return {share: split.positions(size, share) for share in split.shares}
        return {split.shares.start: split.positions_here(size)}

    def _batches(self, parts: dict[int, range]) -> Iterator[MicroBatch]:
        """Yield this rank's samples, part after part, in batches of the size of training."""
        trainer, split = self.trainer, self.trainer.plan.split
        seed, requests = mix(trainer.settings.seed, _EVALUATE), []
        for share, mine in parts.items():
            # The size of a micro-batch of training is known to fit in memory.
            size = max(1, len(split.positions(trainer.plan.order.batch_size, share)) // split.accumulate)
            for number, start in enumerate(range(0, len(mine), size)):
                requests.append(Request(0, number, len(self.samples), {share: list(mine[start : start + size])}))
        for batch in load(self.samples, requests, trainer.loading, seed=seed):
            # By position, so that a model that uses random numbers in evaluation gets the same on any rank.
            position = mix(seed, batch.step, *batch.numbers)
            seed_cpu(position)
            seed_device(trainer.device, position)
            yield to_device(batch, dict.fromkeys(batch.numbers, trainer.device))

    def _measure(self, model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
        """Return total and count of the loss and of each metric."""
        (batch,), (num_samples,) = micro.batches, micro.sizes
        precision = self.trainer.settings.precision
        part = Objective(self.task, precision)(model, batch, num_samples)
        # Multiplied in the dtype of the sums, because a product in half precision would be rounded.
        sums = {"loss": self._pair(self._sum_dtype(part.value) * part.weight, part.out_of)}
        if self.task.metrics is not None:
            with autocast(precision, self.trainer.device):
                metrics = self.task.metrics(model, batch)
            for name, value in metrics.items():
                if isinstance(value, Loss):
                    sums[name] = self._pair(value.total, value.count)
                elif isinstance(value, Tensor) and value.shape == (num_samples,):
                    sums[name] = self._pair(self._sum_dtype(value).sum(), num_samples)
                else:
                    found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                    raise ConfigurationError(
                        f"The metric {name!r} of a batch of {num_samples} samples is a {found}.\n"
                        f"Return a tensor of shape ({num_samples},), one value for each sample, or a "
                        "Loss(total, count)."
                    )
        return sums

    def _pair(self, total: Tensor, count: Tensor | float) -> Tensor:
        return torch.stack([self._sum_dtype(torch.as_tensor(item)) for item in (total, count)])

    def _sum_dtype(self, value: Tensor) -> Tensor:
        return value.to(self.trainer.device, widest_dtype(self.trainer.device))


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
        total, count = (
            tree.combine({range(leaf, leaf + 1): pair[column] for leaf, pair in enumerate(pairs)}, float.__add__)
            for column in (0, 1)
        )
        means[name] = total / count if count else math.nan
    return means
