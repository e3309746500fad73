"""Evaluation that counts every sample exactly once, however many ranks share it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_object, all_reduce, broadcast_coalesced
from lockstep.data.device import to_device
from lockstep.data.loader import LoadOptions, MicroBatch, Request, load
from lockstep.data.seeding import mix, seed_cpu, seed_device
from lockstep.errors import ConfigurationError
from lockstep.train.loop import Loop
from lockstep.train.objective import Objective
from lockstep.train.precision import autocast
from lockstep.train.task import Loss, Task

_EVALUATE = 5
"""Keeps the bits for random numbers in evaluation apart from those that other purposes draw from the same seed."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the model of a loop on the task's evaluation data.

    Args:
        task: With ``eval_dataset``.
        loop: Whose model, division over the ranks, precision and seed are used.
        samples: With ``len`` and ``[]``.
    """

    task: Task
    loop: Loop
    samples: Sequence[Any]

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
        sums: dict[str, Tensor] = {}
        model.eval()
        try:
            with torch.no_grad():
                for batch in self._batches():
                    for name, value in self._measure(model, batch).items():
                        sums[name] = sums[name] + value if name in sums else value
        finally:
            model.train()
        names = list(sums)
        if group is not None:  # a rank without samples knows no names
            lists: list[list[str]] = all_gather_object(names, group=group, device=self.loop.device)
            names = list(dict.fromkeys(name for names in lists for name in names))
        table = torch.stack([sums.get(name, self._zero()) for name in names])
        if group is not None:
            all_reduce(table, group=group)
        pairs: list[tuple[float, float]] = table.tolist()
        return {name: total / count if count else math.nan for name, (total, count) in zip(names, pairs, strict=True)}

    def _batches(self) -> Iterator[MicroBatch]:
        """Return this rank's contiguous part of the samples, in batches as large as those of training."""
        division, loop = self.loop.plan.division, self.loop
        share = division.shares.start if loop.group is not None else 0
        mine = division.positions_here(len(self.samples)) if loop.group is not None else range(len(self.samples))
        size = max(1, len(division.positions(loop.plan.batch_size, share)) // division.accumulate)
        requests = [
            Request(0, number, len(self.samples), [share], [list(mine[start : start + size])])
            for number, start in enumerate(range(0, len(mine), size))
        ]
        on_cuda = loop.device.type == "cuda"
        seed = mix(loop.settings.seed, _EVALUATE)
        how = LoadOptions(self.task.collate, loop.settings.workers, pin_memory=on_cuda)
        batches = load(self.samples, requests, how, seed=seed)
        for batch in batches:
            position = mix(seed, batch.step, division.shares.start)
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
