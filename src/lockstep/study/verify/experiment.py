"""An experiment: who computes, and what is turned off."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]
import torch

from lockstep.train.settings import Settings
from lockstep.train.task import Task

Division = Literal["one", "shares", "ranks"]
"""One process with the whole batch; one that computes what N ranks would, share after share; or N real ranks."""

Switch = Literal[
    "data",  # every process trains on the samples that one process loaded
    "initial",  # ... starts from its initial weights
    "rates",  # ... uses its learning rates
    "random",  # random numbers in forward are constants
    "state",  # what forward writes into buffers and parameters is undone
    "batchnorm",  # batch norm uses its running statistics
    "weights",  # each share counts as much as the whole batch asks for
    "place",  # the task sees rank 0 of 1
    "outside",  # clock and the system's random numbers stand still
    "operators",  # only deterministic operators
    "threads",  # one thread
]

Off = frozenset[Switch]


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        task: Where it is (``FILE.py`` or ``FILE.py:NAME``), or the task itself, pickled: each run gets a fresh one.
        settings: As for training.
        num_devices: Ranks, or shares where one process stands for them.
        torch_ddp: Whether to examine torch's class, used as a hand-written loop does.
        num_steps: How many are asked for.
        steps: Which ones; worked out by the first run.
        double: Whether to compute in float64.
    """

    task: str | bytes
    settings: Settings
    num_devices: int
    torch_ddp: bool
    num_steps: int
    steps: tuple[int, ...] = ()
    double: bool = True


@dataclass(frozen=True)
class Given:
    """What one process had, to be used in place of what others have.

    Attributes:
        samples: By step, the index (None in a stream) and value of each sample of the global batch.
        sizes: Of the data set and of a global batch.
        initial: The model's initial state.
        rates: Of each update: for every group, its options.
        factors: By step, what the loss of each share is to be multiplied by.
    """

    samples: dict[int, list[tuple[int | None, Any]]] = field(default_factory=dict)
    sizes: dict[str, int | None] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    rates: list[list[dict[str, Any]]] = field(default_factory=list)
    factors: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One run.

    Attributes:
        reproducible: Number of virtual shards, or None for the ordinary mode.
        convert: Whether batch norm layers are replaced by `lockstep.SyncBatchNorm`.
        watched: Whether it is one of the counterfactuals, whose random numbers are set by share; the plain run is
            left as it is.
    """

    division: Division
    off: Off = frozenset()
    reproducible: int | None = None
    convert: bool = False
    watched: bool = True

    def without(self, *switches: Switch) -> Experiment:
        """Return the same with more turned off."""
        return replace(self, off=self.off | frozenset(switches))


def of_task(task: Task | str) -> str | bytes:
    """Return the form of a task that every run can make a fresh copy of."""
    return task if isinstance(task, str) else bytes(cloudpickle.dumps(task))
