"""Run an experiment in this process, and write down what happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.study.verify.bench import Bench, open_bench
from lockstep.study.verify.by_hand import ByHand
from lockstep.study.verify.experiment import Experiment, Given, Subject
from lockstep.study.verify.trace import StepTrace, Trace, read_rates, take
from lockstep.train.loop import Loop
from lockstep.train.settings import Settings, StrategyName


class Trainer(Protocol):
    """Trains a step at a time: the loop of `fit`, or by hand."""

    sizes: dict[str, int | None]
    is_stream: bool
    loads_ahead: bool

    drops_last: bool

    @property
    def models(self) -> list[nn.Module]:
        """The bare model of each share that this process computes."""

    def step(self, step: int, number: int) -> tuple[float, dict[str, float]]:
        """Train on the global batch of ``step``, the ``number``-th one trained on; return loss and rates."""


def perform(subject: Subject, experiment: Experiment, given: Given, world: World) -> list[Trace]:
    """Run ``experiment`` and return what this process saw; a trace for each share that has a model of its own.

    Collective for ``ranks``: every rank of ``world``.
    """
    return perform_and_keep(subject, experiment, given, world)[0]


def perform_and_keep(
    subject: Subject, experiment: Experiment, given: Given, world: World
) -> tuple[list[Trace], Given, tuple[int, ...]]:
    """Run ``experiment``; return what this process saw, what others may be given of it, and the steps it took.

    Collective for ``ranks``: every rank of ``world``.
    """
    with open_bench(subject, experiment, given) as bench, _trainer(bench, world) as trainer:
        chosen = subject.steps or choose_steps(subject.num_steps, trainer.sizes, drop_last=trainer.drops_last)
        initial = [take(model) for model in trainer.models]
        given_state = _state(trainer.models[0])
        steps: list[list[StepTrace]] = [[] for _ in trainer.models]
        samples = {}
        for number, step in enumerate(chosen):
            with bench.step(step):
                loss, rates = trainer.step(step, number)
            loaded = [item for place in bench.places for item in place.watch.end_step(ahead=trainer.loads_ahead)]
            samples[step] = [(index, sample) for index, sample, _ in loaded]
            digests = tuple(found for _, _, found in loaded)
            for place, model, so_far in zip(bench.places, trainer.models, steps, strict=True):
                tensors = take(model)
                gradients = tensors.gradients if place.gradients is None else place.gradients
                tensors = replace(tensors, gradients=gradients)
                so_far.append(StepTrace(step, digests, loss, rates, tensors, tuple(place.batches)))
        traces = [
            Trace(trainer.sizes, start, tuple(so_far), trainer.is_stream, tuple(sorted(bench.draws.seen)))
            for start, so_far in zip(initial, steps, strict=True)
        ]
        return traces, Given(samples, trainer.sizes, given_state, bench.places[0].rates), chosen


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: value.detach().cpu().clone() for name, value in tensors.items()}


def choose_steps(num_steps: int, sizes: dict[str, int | None], *, drop_last: bool) -> tuple[int, ...]:
    """Return the first steps, the last of them replaced by the epoch's last if its batch is not full."""
    size, batch_size = sizes["samples of the data set"], sizes["samples of a global batch"] or 1
    first = tuple(range(num_steps))
    if size is None or drop_last or size % batch_size == 0 or num_steps == 1:
        return first
    last = size // batch_size
    return first if last < num_steps else (*first[:-1], last)


@contextmanager
def _trainer(bench: Bench, world: World) -> Iterator[Trainer]:
    subject, division = bench.subject, bench.experiment.division
    if subject.torch_ddp or division == "shares":
        num_shares = 1 if division == "one" else subject.num_devices
        yield _HandTrainer(ByHand(bench, num_shares, world if division == "ranks" else None, world.device))
        return
    settings = replace(subject.settings, reproducible=bench.experiment.reproducible)
    trainer = _LoopTrainer(bench, settings, world)
    try:
        yield trainer
    finally:
        trainer.loop.close()


class _LoopTrainer:
    """The loop of `fit`."""

    def __init__(self, bench: Bench, settings: Settings, world: World) -> None:
        on_ranks = bench.experiment.division == "ranks"
        place = bench.place(world.rank if on_ranks else 0)
        strategy: StrategyName = "ddp" if on_ranks else "single"
        try:
            self.loop = Loop(place.task, settings, world, strategy=strategy, devices=[world.device])
        except ConfigurationError:
            if not place.is_stream or settings.steps is not None:
                raise
            # A stream has no epochs that could be planned; nobody can know before the task has made it.
            settings = replace(settings, epochs=None, steps=bench.subject.num_steps)
            self.loop = Loop(place.task, settings, world, strategy=strategy, devices=[world.device])
        order = self.loop.plan.order
        self.drops_last = order.drop_last
        self.is_stream = place.is_stream
        self.loads_ahead = world.device.type == "cuda"
        self.sizes = {
            "samples of the data set": order.num_samples,
            "samples of a global batch": self.loop.plan.batch_size,
        }

    @property
    def models(self) -> list[nn.Module]:
        return [self.loop.model]

    def step(self, step: int, number: int) -> tuple[float, dict[str, float]]:
        if step != self.loop.num_steps_done:
            self.loop.load_state_dict(self.loop.state_dict() | {"num_steps_done": step})
        loss = float(self.loop.step().loss)
        return loss, read_rates(self.loop.optimizer)


class _HandTrainer:
    """By hand: a model for each share."""

    loads_ahead = False

    def __init__(self, by_hand: ByHand) -> None:
        self._by_hand = by_hand
        self.sizes, self.is_stream = by_hand.sizes, by_hand.is_stream
        self.drops_last = by_hand.shares[0].place.task.drop_last

    @property
    def models(self) -> list[nn.Module]:
        return [share.model for share in self._by_hand.shares]

    def step(self, step: int, number: int) -> tuple[float, dict[str, float]]:
        return self._by_hand.step(step, number)


def require_some(subject: Subject) -> None:
    """Check what can be checked without the task.

    Raises:
        ConfigurationError: A number is out of range.
    """
    for name, value in (("devices", subject.num_devices), ("steps", subject.num_steps)):
        if value < 1:
            raise ConfigurationError(f"{name}={value} is not allowed.\nGive a whole number of at least 1.")
