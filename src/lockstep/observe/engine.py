"""What exchanges gradients in a script, and what it tells of that."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from lockstep.observe.step import Step
from lockstep.parallel.ddp.bucket_stamps import BucketStamps, StepStamps
from lockstep.train.recorded_lines import hidden_s
from lockstep.train.stopwatch import seconds_between

Kind = Literal["single", "ddp", "torch-ddp", "dp", "torch-dp", "unknown"]


@dataclass
class Engine:
    """What exchanges gradients.

    Attributes:
        kind: ``single`` if nobody has to, ``unknown`` if it is something else than the engines named so in docs/fit.
        ours: Wrappers of ours.
        stamps: What takes their moments, by wrapper.
        torch_module: torch's wrapper.
    """

    kind: Kind
    ours: list[Any] = field(default_factory=list)
    stamps: list[BucketStamps] = field(default_factory=list)
    torch_module: Any = None
    _last_iteration: Any = None

    def include(self, other: Engine) -> None:
        """Take in what exchanges the gradients of one more model."""
        self.ours += [each for each in other.ours if all(each is not known for known in self.ours)]
        if self.kind in ("single", "unknown"):
            self.kind, self.torch_module = other.kind, other.torch_module

    def stamp(self, device: torch.device) -> None:
        """Have the buckets of our engines stamped from now on."""
        for module in self.ours[len(self.stamps) :]:
            self.stamps.append(BucketStamps(device))
            module.stamp_buckets(self.stamps[-1])

    def stop(self) -> None:
        """Have nothing stamped any more."""
        for module in self.ours:
            module.stamp_buckets(None)

    def look_closely(self, closely: bool) -> None:
        """Have single buckets stamped in the coming step, or not."""
        for each in self.stamps:
            each.closely = closely

    def take(self) -> list[StepStamps]:
        """Return what was stamped of the backward that has just ended."""
        return [found for each in self.stamps if (found := each.take()) is not None]

    def waited_s(self, step: Step) -> float | None:
        """Return how long backward waited for communication after its own work; None if that cannot be seen."""
        if self.kind == "single":
            return 0.0
        if not step.has_backward:
            return None
        if self.kind == "ddp":
            return sum(_waited_s(stamps) for stamps in step.stamps)
        if self.kind == "torch-ddp":
            return sum(seconds_between(*wait) for wait in step.waits)
        return None

    def hidden_s(self, step: Step) -> float | None:
        """Return the time in which buckets travelled beside backward, of a step that was looked at closely."""
        if not step.stamps:
            return step.hidden_s
        known = [found for each in step.stamps if (found := hidden_s(each, step.begin)) is not None]
        return sum(known) if known else None

    def torch_hidden_s(self) -> float | None:
        """Return the time in which buckets of torch's engine travelled beside its last backward, if it knows.

        It measures that in some steps, and works it out as the next forward begins.
        """
        told = self.torch_module._get_ddp_logging_data()
        before, self._last_iteration = self._last_iteration, told.get("iteration")
        nanoseconds = told.get("backward_compute_comm_overlap_time", 0)
        return nanoseconds / 1e9 if self._last_iteration != before and nanoseconds > 0 else None

    def last_wait(self, step: Step) -> Any:
        """Return from when to when the last backward waited; None if that cannot be seen."""
        if self.kind == "torch-ddp":
            return step.waits[-1] if step.waits else None
        return step.stamps[-1].waited if step.stamps else None


def _waited_s(stamps: StepStamps) -> float:
    if stamps.exposed_s is not None:
        return stamps.exposed_s
    return 0.0 if stamps.waited is None else seconds_between(*stamps.waited)


def find_engine(models: Sequence[nn.Module], num_ranks: int) -> Engine:
    """Return what exchanges the gradients of ``models`` among so many ranks."""
    modules = [module for model in models for module in model.modules()]
    ours = [each for each in modules if isinstance(each, _class("lockstep.parallel.ddp.per_bucket", "PerBucket"))]
    if ours:
        return Engine("ddp", ours)
    theirs = [each for each in modules if isinstance(each, TorchDistributedDataParallel)]
    if theirs:
        return Engine("torch-ddp", torch_module=theirs[0])
    if any(isinstance(each, _class("lockstep.parallel.data_parallel", "DataParallel")) for each in modules):
        return Engine("dp")
    if any(isinstance(each, nn.DataParallel) for each in modules):
        return Engine("torch-dp")
    return Engine("single" if num_ranks == 1 else "unknown")


def _class(module: str, name: str) -> Any:
    """Return a class of ours if the script uses it, else what nothing is an instance of."""
    found = sys.modules.get(module)
    return () if found is None else getattr(found, name)
