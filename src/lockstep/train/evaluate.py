"""Evaluation that counts every sample exactly once, however many ranks share it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep import activity
from lockstep.comm.collectives import all_gather_object, all_reduce, broadcast_coalesced
from lockstep.data.batch_iterator import to_device
from lockstep.data.loader import BadSample, MicroBatch, Request, load
from lockstep.data.order import mix, seed_cpu, seed_device
from lockstep.data.stream import check_same_length
from lockstep.errors import ConfigurationError
from lockstep.parallel.reduction_tree import ReductionTree
from lockstep.train.bad_samples import BadSamples
from lockstep.train.buffers import BufferSnapshot
from lockstep.train.display import Display, format_metrics
from lockstep.train.recording import RunRecord
from lockstep.train.step import Objective, autocast
from lockstep.train.task import Loss, Task, build_dataset
from lockstep.train.trainer import Trainer


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation after ``step`` steps found: the loss and the task's metrics, by name."""

    step: int
    metrics: dict[str, float]

    @property
    def loss(self) -> float:
        """Its loss, infinite if that is NaN: then any other is better."""
        loss = self.metrics["loss"]
        return math.inf if math.isnan(loss) else loss


_EVALUATE = 5
"""Keeps the bits for random numbers in evaluation apart from those that other purposes draw from the same seed."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the model of a loop on the task's evaluation data.

    Args:
        task: With ``eval_dataset``.
        loop: Whose model, division over the ranks, precision and seed are used.
        samples: With ``len`` and ``[]``.
        skipped: Those that the last evaluation went without, as they could not be read.
    """

    task: Task
    loop: Trainer
    samples: Sequence[Any]
    skipped: list[BadSample] = field(default_factory=list)

    def run(self) -> dict[str, float]:
        """Return the loss and the task's metrics, over all samples, by name.

        Collective for ``ddp`` and ``torch-ddp``: every rank; all get the same numbers. Blocks.

        Raises:
            ConfigurationError: A metric is neither one value for each sample nor a `Loss`.
        """
        model, group = self.loop.model, self.loop.group
        if group is not None:  # batch-norm statistics are each rank's own until its next forward
            buffers = [buffer for buffer in model.buffers() if buffer.numel()]
            broadcast_coalesced(buffers, group=group, src=0)
        sums: dict[int, dict[str, Tensor]] = {share: {} for share in self._parts()}
        bad = self._bad_samples()
        kept = BufferSnapshot(model)  # a model that counts what it sees must not count this
        kept.keep()
        current = None
        model.eval()
        try:
            with self.loop.arithmetic.applied(), torch.no_grad():
                for batch in self._batches():
                    bad.add(batch)
                    if not batch.batches:
                        continue
                    if batch.numbers[0] != current:  # each part sees the same buffers, whoever evaluates it
                        kept.restore()
                        current = batch.numbers[0]
                    part = sums[current]
                    for name, value in self._measure(model, batch).items():
                        part[name] = part[name] + value if name in part else value
        finally:
            kept.restore()
            model.train()
        bad.exchange()
        self.skipped[:] = bad.skipped
        totals = self._total(sums) if self.loop.tree is None else self._total_in_tree(sums, self.loop.tree)
        return {name: total / count if count else math.nan for name, (total, count) in totals.items()}

    def _total(self, sums: dict[int, dict[str, Tensor]]) -> dict[str, tuple[float, float]]:
        """Return the sums of the only part of each rank, over all ranks."""
        (mine,), group = sums.values(), self.loop.group
        names = list(mine)
        if group is not None:  # a rank without samples knows no names
            lists: list[list[str]] = all_gather_object(names, group=group, device=self.loop.device)
            names = list(dict.fromkeys(name for names in lists for name in names))
        table = torch.stack([mine.get(name, self._zero()) for name in names])
        if group is not None:
            all_reduce(table, group=group)
        pairs: list[tuple[float, float]] = table.tolist()
        return dict(zip(names, pairs, strict=True))

    def _total_in_tree(self, sums: dict[int, dict[str, Tensor]], tree: ReductionTree) -> dict[str, tuple[float, float]]:
        """Return the sums of the virtual shards of all ranks, in the order of the tree."""
        mine = [{name: pair.tolist() for name, pair in part.items()} for part in sums.values()]
        group = self.loop.group
        ranks = [mine] if group is None else all_gather_object(mine, group=group, device=self.loop.device)
        parts: list[dict[str, list[float]]] = [part for parts in ranks for part in parts]
        names = list(dict.fromkeys(name for part in parts for name in part))
        nothing = [0.0, 0.0]

        def total(name: str, column: int) -> float:
            leaves = {range(leaf, leaf + 1): part.get(name, nothing)[column] for leaf, part in enumerate(parts)}
            return tree.combine(leaves, float.__add__)

        return {name: (total(name, 0), total(name, 1)) for name in names}

    def _bad_samples(self) -> BadSamples:
        """Return what takes note of the samples that cannot be read."""
        loop = self.loop
        skip, size = loop.settings.bad_samples == "skip", len(self.samples)
        return BadSamples(skip=skip, device=loop.device, group=loop.group, num_samples=size, evaluation=True)

    def _parts(self) -> dict[int, range]:
        """Return the samples that this rank evaluates: contiguous, its share or each of its virtual shards."""
        division, size = self.loop.plan.division, len(self.samples)
        if self.loop.tree is not None:
            return {share: division.positions(size, share) for share in division.shares}
        if self.loop.group is None:
            return {0: range(size)}
        return {division.shares.start: division.positions_here(size)}

    def _batches(self) -> Iterator[MicroBatch]:
        """Return this rank's samples, part after part, in batches as large as those of training."""
        division, loop = self.loop.plan.division, self.loop
        requests = []
        for share, mine in self._parts().items():
            size = max(1, len(division.positions(loop.plan.batch_size, share)) // division.accumulate)
            requests += [
                Request(0, number, len(self.samples), [share], [list(mine[start : start + size])])
                for number, start in enumerate(range(0, len(mine), size))
            ]
        seed = mix(loop.settings.seed, _EVALUATE)
        batches = load(self.samples, requests, loop.load_options(self.task, loop.settings.workers), seed=seed)
        for batch in batches:
            position = mix(seed, batch.step, *batch.numbers)
            seed_cpu(position)
            seed_device(loop.device, position)
            yield to_device(batch, dict.fromkeys(batch.numbers, loop.device))

    def _measure(self, model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
        """Return what to sum of the loss and of each metric: total and count."""
        (batch,), (num_samples,) = micro.batches, micro.sizes
        part = Objective(self.task, self.loop.settings.precision)(model, batch, num_samples)
        sums = {"loss": self._pair(part.value.to(self._zero()) * part.weight, part.out_of)}
        if self.task.metrics is not None:
            with autocast(self.loop.settings.precision, self.loop.device):
                metrics = self.task.metrics(model, batch)
            for name, value in metrics.items():
                sums[name] = self._metric(name, value, num_samples)
        return sums

    def _metric(self, name: str, value: object, num_samples: int) -> Tensor:
        if isinstance(value, Loss):
            return self._pair(value.total, value.count)
        if not isinstance(value, Tensor) or value.shape != (num_samples,):
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigurationError(
                f"The metric {name!r} of a batch of {num_samples} samples is a {found}.\n"
                f"Return a tensor of shape ({num_samples},), one value for each sample, or a Loss(total, count)."
            )
        return self._pair(value.to(self._zero()).sum(), num_samples)

    def _pair(self, total: Tensor, count: Tensor | float) -> Tensor:
        zero = self._zero()
        return torch.stack([torch.as_tensor(item).to(zero) for item in (total, count)])

    def _zero(self) -> Tensor:
        dtype = torch.float32 if self.loop.device.type == "mps" else torch.float64
        return torch.zeros(2, dtype=dtype, device=self.loop.device)


# The evaluations of a run: when they are made, what they found, and which was the best.


@final
class Evaluations:
    """Evaluates the model of a loop, if the task has what to evaluate it on.

    Collective: every rank makes one, and evaluates.

    Args:
        task: Says on what.
        loop: That trains.
        keep_best: Whether one that finds the lowest loss so far is worth a checkpoint.

    Attributes:
        made: In this call, in order.
        best: Of the whole run.
        has_new_best: Whether the last one is to be kept.
        is_owed: Whether a run that was stopped has not come to one.
    """

    def __init__(self, task: Task, loop: Trainer, *, keep_best: bool) -> None:
        self._loop, self._keep_best = loop, keep_best
        self.made: list[Evaluation] = []
        self.best: Evaluation | None = None
        self.has_new_best = self.is_owed = False
        self._evaluator = None
        if task.eval_dataset is not None:
            samples = build_dataset(task, evaluation=True)
            check_same_length(samples, "eval_dataset", group=loop.group, device=loop.device)
            self._evaluator = Evaluator(task, loop, samples)

    @property
    def are_wanted(self) -> bool:
        """Whether there is what to evaluate on."""
        return self._evaluator is not None

    def restore(self, best: dict[str, object] | None, *, is_owed: bool) -> None:
        """Go on from what a checkpoint says."""
        self.is_owed = is_owed and self.are_wanted
        if best is not None:
            self.best = Evaluation(**best)  # type: ignore[arg-type]

    def loss_after(self, step: int) -> float | None:
        """Return the loss that an evaluation after ``step`` steps found, if the last one was then."""
        return self.made[-1].metrics["loss"] if self.made and self.made[-1].step == step else None

    def make(self, num_steps: int, display: Display, record: RunRecord) -> None:
        """Evaluate, and tell what was found. The device is at rest.

        Args:
            num_steps: Of the whole run.
            display: To whom it is told,
            record: ... and to whom,
        """
        assert self._evaluator is not None
        activity.now.phase = "evaluation"
        step = self._loop.num_steps_done
        found = Evaluation(step, self._evaluator.run())
        self.made.append(found)
        if self.best is None or found.metrics["loss"] < self.best.loss:
            self.best = found
            self.has_new_best = self._keep_best
        epoch = "" if self._loop.epoch is None else f"epoch {self._loop.epoch:.1f}  "
        skipped = self._evaluator.skipped
        without = f"  without {len(skipped)} that cannot be read" if skipped else ""
        what = f"evaluation: {format_metrics(found.metrics)}{without}"
        display.say(f"{epoch}step {step}/{num_steps}  {what}")
        record.event("evaluation", what, found.metrics)
