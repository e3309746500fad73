"""One rank's part in a contender: its loop, warmed up, and brought to rest between its turns."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
from torch.utils.data import IterableDataset

from lockstep.comm.world import World
from lockstep.data.loader import LoadOptions
from lockstep.study.tune.values import Values, loop_settings, strategy_of, value_of
from lockstep.train.step import DATA, Seeds
from lockstep.train.task import Task, build_dataset
from lockstep.train.trainer import Trainer

NUM_WARMUP = 4
"""Buckets are built anew after the first step, and the optimizer makes its state in it."""


def task_to_tune(task: Task, batch_size: int, *, seed: int, device: torch.device) -> Task:
    """Return ``task`` as all contenders train it: on one data set, whole global batches only, without evaluation."""
    Seeds(seed, [device], range(1)).all(DATA)
    samples = build_dataset(task)
    task = replace(task, eval_dataset=None, metrics=None, after=None)
    if isinstance(samples, IterableDataset):  # may have a state of its own
        return task
    return replace(task, dataset=lambda: samples, drop_last=task.drop_last or len(samples) >= batch_size)


class Entrant:
    """A contender on this rank.

    Collective for strategies with a process for each device: every rank makes it, and calls its methods.

    Args:
        task: See `task_to_tune`.
        values: Its settings.
        world: All ranks.
        devices: Of this process.
        num_threads: Of this process in its turns.
        is_here: Whether this rank takes part; the others only know of it.
    """

    def __init__(
        self,
        task: Task,
        values: Values,
        world: World,
        devices: Sequence[torch.device],
        num_threads: int,
        *,
        is_here: bool,
    ) -> None:
        self.strategy, self.num_threads, self.step_s = strategy_of(values), num_threads, 0.0
        self._values = values
        self.loop: Trainer | None = None
        if is_here:
            self.loop = Trainer(task, loop_settings(values), world, strategy=self.strategy, devices=devices)

    def warm_up(self) -> None:
        """Run the steps that are not measured, and take the time of the last ones."""
        assert self.loop is not None
        seconds = [self._step() for _ in range(NUM_WARMUP)]
        self.step_s = median(seconds[-3:])
        self.rest()

    def settle(self) -> None:
        """Use up what loader processes have loaded ahead while they had time."""
        assert self.loop is not None
        if self._workers:
            ahead = self._workers * (value_of(self._values, "prefetch") or LoadOptions.ahead)
            for _ in range(math.ceil(ahead / self.loop.plan.division.accumulate) + 1):
                self._step()

    def rest(self) -> None:
        """End the loader processes, which would go on to load in the turn of another."""
        assert self.loop is not None
        if not self._workers:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a stream that does not say where it stands: that is no news here
            state = self.loop.feed.state()
        if state is not None or not isinstance(self.loop.samples, IterableDataset):
            self.loop.feed.seek(self.loop.num_steps_done, state)

    def close(self) -> None:
        """End all that it has."""
        if self.loop is not None:
            self.loop.close()

    @property
    def _workers(self) -> int:
        return 0 if self.loop is None else self.loop.workers

    def _step(self) -> float:
        assert self.loop is not None
        begin = time.perf_counter()
        self.loop.step().loss.item()
        return time.perf_counter() - begin
