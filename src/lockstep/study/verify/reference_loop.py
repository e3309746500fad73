"""The reference loop, written by hand, which one device and each rank run; and how much each rank's gradient counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from torch.utils.data.distributed import DistributedSampler

from lockstep.comm.collectives import all_reduce
from lockstep.comm.world import World
from lockstep.data.batch_iterator import map_tensors
from lockstep.data.order import cut, mix, seed_cpu
from lockstep.errors import ConfigurationError
from lockstep.study.verify.fingerprint import StepTrace, Trace, read_rates, sketch, take
from lockstep.study.verify.interventions import Experiment, Given, Off, Subject
from lockstep.study.verify.sandbox import Sandbox, SandboxedTask, open_sandbox
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.step import DATA, INIT, LearningRate, LossModule, Objective, Part, base_rates, set_rates
from lockstep.train.task import build_dataset, build_model, build_optimizer
from lockstep.train.trainer import Trainer

# Steps by hand: one process that stands for N ranks, and torch's class as a hand-written loop uses it.
#
# `Loop` is what is verified; this is what it is compared with. A process that computes the N shares of each batch one
# after the other, each with a model and a copy of the task of its own, has all that N ranks have but the number of
# the rank and the communication. Their gradients become one as the engine has it: ours weighs each share by its
# samples (or its count); with torch's class it is the plain mean over the ranks of each rank's own loss, on samples
# from torch's own sampler with its padding.

_SAMPLE, _FORWARD = 41, 42
"""Keep the bits of samples and forward apart."""

Samples = list[tuple[int | None, Any]]


class Share:
    """What a rank has: its copy of the task, its model and its optimizer."""

    def __init__(self, bench: Sandbox, number: int, device: torch.device) -> None:
        self.number, self.device = number, device
        self.place: SandboxedTask = bench.place(number)
        seed = bench.subject.settings.seed
        seed_cpu(mix(seed, DATA))
        self.samples = build_dataset(self.place.task)
        seed_cpu(mix(seed, INIT))
        self.model = build_model(self.place.task).to(device).train()
        self.optimizer = build_optimizer(self.place.task, self.model)
        self.base_rates = base_rates(self.optimizer)
        self.module: nn.Module = LossModule(self.model, Objective(self.place.task, "fp32"))

    def load(self, indices: Sequence[int], *, seed: int, epoch: int) -> Samples:
        """Load samples, each with random numbers of its own."""
        found: Samples = []
        for index in indices:
            seed_cpu(mix(seed, _SAMPLE, epoch, index))
            found.append((index, self.samples[index]))
        return found

    def forward(self, samples: Samples, seed: int, step: int) -> Part:
        """Return the loss on ``samples``."""
        seed_cpu(mix(seed, _FORWARD, step, self.number))
        if not samples:
            return self.module(None, 0)  # type: ignore[no-any-return]
        batch = (self.place.task.collate or default_collate)([sample for _, sample in samples])
        batch = map_tensors(batch, lambda tensor: tensor.to(self.device))
        return self.module(batch, len(samples))  # type: ignore[no-any-return]


class ReferenceLoop:
    """Trains a step at a time.

    Args:
        bench: With the task and what is turned off.
        num_shares: That the global batch is divided into.
        world: The ranks, each with one share; None if this process stands for all.
        device: Of this process.

    Collective if there is a world: every rank makes it and calls `step`.
    """

    def __init__(self, bench: Sandbox, num_shares: int, world: World | None, device: torch.device) -> None:
        self._bench, self._num_shares, self._world = bench, num_shares, world
        self._subject, self._settings = bench.subject, bench.subject.settings
        numbers = range(num_shares) if world is None else [world.rank]
        self.shares = [Share(bench, number, device) for number in numbers]
        first = self.shares[0]
        self.is_stream = first.place.is_stream
        if self._subject.torch_ddp and self.is_stream:
            raise ConfigurationError(
                "The data set is a stream, which torch's DistributedSampler cannot divide.\n"
                "Leave --torch-ddp out, or give the data set a length."
            )
        if world is not None:
            for share in self.shares:
                share.module = nn.parallel.DistributedDataParallel(share.module, process_group=world.group)
        batch_size = self._settings.global_batch_size or first.place.task.global_batch_size
        self.sizes = {
            "samples of the data set": None if self.is_stream else len(first.samples),
            "samples of a global batch": batch_size,
        }

    def step(self, step: int, number: int) -> tuple[float, dict[str, float]]:
        """Train on the global batch of ``step``, the ``number``-th that is trained on; return loss and rates.

        Collective if there is a world: every rank.
        """
        parts = [self._load(share, step) for share in self.shares]
        num_samples = sum(map(len, parts))
        self._take_buffers_of_first()
        losses = []
        for share, samples in zip(self.shares, parts, strict=True):
            share.optimizer.zero_grad(set_to_none=True)
            part = share.forward(samples, self._settings.seed, step)
            value = own_mean(part) if self._subject.torch_ddp else part.value * (part.weight / num_samples)
            value.backward()
            losses.append(part)
        self._combine(losses, num_samples)
        factor = self._rate(number)
        for share in self.shares:
            set_rates(share.optimizer, share.base_rates, factor)
            share.optimizer.step()
        return self._loss(losses), read_rates(self.shares[0].optimizer)

    def _load(self, share: Share, step: int) -> Samples:
        """Return the samples of a share: those that one process had where these are known."""
        known = self._bench.given.samples.get(step)
        if not self._subject.torch_ddp:
            assert known is not None
            part = cut(len(known), self._num_shares, share.number)
            return known[part.start : part.stop]
        if "data" in self._bench.experiment.off and known is not None:
            return known[share.number :: self._num_shares]  # what the sampler gives, without its padding
        size, batch_size = len(share.samples), (self.sizes["samples of a global batch"] or 1) // self._num_shares
        sampler: DistributedSampler[int] = DistributedSampler(
            range(size),  # type: ignore[arg-type]  # all it asks for is the length
            num_replicas=self._num_shares,
            rank=share.number,
            seed=self._settings.seed,
        )
        steps_per_epoch = -(-len(sampler) // batch_size)
        epoch, position = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        indices = list(sampler)[position * batch_size : (position + 1) * batch_size]
        return share.load(indices, seed=self._settings.seed, epoch=epoch)

    def _take_buffers_of_first(self) -> None:
        """Do what the engines do at the beginning of forward; both take rank zero's buffers."""
        with torch.no_grad():
            for share in self.shares[1:]:
                for mine, first in zip(share.model.buffers(), self.shares[0].model.buffers(), strict=True):
                    mine.copy_(first)

    def _combine(self, parts: list[Part], num_samples: int) -> None:
        """Make the shares' gradients one, as the ranks' become; torch's class has done so already."""
        if self._world is not None:
            return
        if self._subject.torch_ddp:
            divisor = float(len(self.shares))
        else:
            divisor = float(sum(torch.as_tensor(part.out_of).double() for part in parts)) / num_samples
        for replicas in zip(*(share.model.parameters() for share in self.shares), strict=True):
            grads = [parameter.grad for parameter in replicas if parameter.grad is not None]
            if grads:
                total = sum(grads[1:], start=grads[0].clone()) / divisor
                for parameter in replicas:
                    parameter.grad = total.clone()

    def _rate(self, number: int) -> float:
        """Return the factor on the learning rates at the ``number``-th update; it falls over the task's own epochs."""
        task, size = self.shares[0].place.task, self.sizes["samples of the data set"]
        batch_size = self.sizes["samples of a global batch"] or 1
        num_steps = self._subject.num_steps if size is None else task.epochs * -(-size // batch_size)
        return LearningRate(1.0, 0, num_steps, task.schedule or "constant").factor(number)

    def _loss(self, parts: list[Part]) -> float:
        if not self._subject.torch_ddp:
            total = sum(float(part.value.detach()) * part.weight for part in parts)
            return total / max(sum(float(part.out_of) for part in parts), 1e-30)
        mean = torch.stack([own_mean(part).detach() for part in parts]).double().mean().reshape(1)
        if self._world is not None:
            all_reduce(mean, group=self._world.group)
            mean /= self._world.world_size
        return float(mean)


def own_mean(part: Part) -> Tensor:
    """Return what the loss of a part comes to by itself; zero without samples."""
    return part.value * (part.weight / torch.as_tensor(part.out_of, device=part.value.device).clamp(min=1e-30))


# Run an experiment in this process, and write down what happens.


class TracedRun(Protocol):
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
    with open_sandbox(subject, experiment, given) as bench, _trainer(bench, world) as trainer:
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
def _trainer(bench: Sandbox, world: World) -> Iterator[TracedRun]:
    subject, division = bench.subject, bench.experiment.division
    if subject.torch_ddp or division == "shares":
        num_shares = 1 if division == "one" else subject.num_devices
        yield _HandTrainer(ReferenceLoop(bench, num_shares, world if division == "ranks" else None, world.device))
        return
    settings = replace(subject.settings, reproducible=bench.experiment.reproducible)
    trainer = _LoopTrainer(bench, settings, world)
    try:
        yield trainer
    finally:
        trainer.loop.close()


class _LoopTrainer:
    """The loop of `fit`."""

    def __init__(self, bench: Sandbox, settings: Settings, world: World) -> None:
        on_ranks = bench.experiment.division == "ranks"
        place = bench.place(world.rank if on_ranks else 0)
        strategy: StrategyName = "ddp" if on_ranks else "single"
        try:
            self.loop = Trainer(place.task, settings, world, strategy=strategy, devices=[world.device])
        except ConfigurationError:
            if not place.is_stream or settings.steps is not None:
                raise
            # A stream has no epochs that could be planned; nobody can know before the task has made it.
            settings = replace(settings, epochs=None, steps=bench.subject.num_steps)
            self.loop = Trainer(place.task, settings, world, strategy=strategy, devices=[world.device])
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

    def __init__(self, by_hand: ReferenceLoop) -> None:
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


# What each share of a batch would have to count so that the shares make up the whole batch.
#
# The gradient of the whole batch is compared with those of its parts, at the same weights and with everything random
# turned off. If it is a combination of them, the factors say what kind of loss it is: they are the portions of the
# samples for a mean over samples, one for a sum, and something else for a mean over tokens. If it is none, samples
# depend on each other.

WeightKind = Literal["right", "sum", "other", "one", "none"]
"""As the engine weighs them; a sum; a mean over something else; only one of the parts counts; no combination at all."""


@dataclass(frozen=True)
class StepWeights:
    """What one step asks for.

    Attributes:
        sizes: Samples of each share.
        counted: What each share counts in the run.
        wanted: What it would have to count.
        residual: What is left of the gradient of the whole batch then, relative.
        factors: What the loss of each share is to be multiplied by, so that it counts that.
    """

    step: int
    kind: WeightKind
    sizes: tuple[int, ...]
    counted: tuple[float, ...]
    wanted: tuple[float, ...]
    residual: float
    factors: tuple[float, ...]

    @property
    def by_samples(self) -> bool:
        """Whether each share would have to count as many samples as it has."""
        return _close(list(self.wanted), [size / sum(self.sizes) for size in self.sizes], 1e-6)


def measure_weights(subject: Subject, given: Given, off: Off, device: torch.device) -> list[StepWeights]:
    """Train in one process, and find for each step how its shares add up."""
    experiment = Experiment("one", off | {"random", "batchnorm", "state", "data", "rates"})
    found = []
    with open_sandbox(subject, experiment, given) as bench:
        by_hand = ReferenceLoop(bench, 1, None, device)
        share = by_hand.shares[0]
        for number, step in enumerate(subject.steps):
            samples = given.samples[step]
            with bench.step(step):
                whole = _look(share, samples, subject, step)
                parts = [_look(share, part, subject, step) for part in divide(samples, subject)]
                by_hand.step(step, number)
            found.append(_solve(subject, step, whole, parts))
    return found


def divide(samples: Samples, subject: Subject) -> list[Samples]:
    """Return the samples of each share."""
    num = subject.num_devices
    if subject.torch_ddp:
        return [samples[share::num] for share in range(num)]
    cuts = [cut(len(samples), num, share) for share in range(num)]
    return [samples[part.start : part.stop] for part in cuts]


@dataclass(frozen=True)
class _Look:
    """Loss and gradient of some samples, as one vector; what they count for, and how many they are."""

    vector: Tensor
    out_of: float
    size: int


def _look(share: Share, samples: Samples, subject: Subject, step: int) -> _Look:
    if not samples:
        return _Look(torch.zeros(0), 0.0, 0)
    share.optimizer.zero_grad(set_to_none=True)
    part: Part = share.forward(samples, subject.settings.seed, step)
    value = own_mean(part)
    value.backward()
    loss = value.detach().double().reshape(1).cpu()
    vector = torch.cat([_gradient(share.model), loss])
    share.optimizer.zero_grad(set_to_none=True)
    return _Look(vector, float(torch.as_tensor(part.out_of).detach()), len(samples))


def _gradient(model: nn.Module) -> Tensor:
    """Return a linear function of the gradient; a sketch of it, where it is large."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([sketch(p.grad if p.grad is not None else torch.zeros_like(p)).values for p in parameters])


def _solve(subject: Subject, step: int, whole: _Look, parts: list[_Look]) -> StepWeights:
    limit = 1e-7 if subject.double else 3e-3
    sizes = tuple(part.size for part in parts)
    total = sum(part.out_of for part in parts)
    counted = tuple(1 / len(parts) if subject.torch_ddp else part.out_of / total if total else 0.0 for part in parts)
    usable = [index for index, part in enumerate(parts) if part.size and bool(part.vector.isfinite().all())]
    wanted, residual = _fit(whole.vector, [parts[index].vector for index in usable], usable, counted, limit)
    kind: WeightKind = "other"
    if residual > limit:
        kind, wanted = "none", list(counted)
    elif _close(wanted, [w if sizes[i] else 0.0 for i, w in enumerate(counted)], limit) and len(usable) == sum(
        size > 0 for size in sizes
    ):
        kind = "right"
    elif _close(wanted, [float(index in usable) for index in range(len(parts))], limit):
        kind = "sum"
    elif len(usable) > 1 and _close(sorted(wanted), [0.0] * (len(parts) - 1) + [1.0], limit):
        kind = "one"
    portions = [size / sum(sizes) for size in sizes]
    engine = [1 / len(parts)] * len(parts) if subject.torch_ddp else portions
    factors = tuple(w / e if e else 1.0 for w, e in zip(wanted, engine, strict=True))
    return StepWeights(step, kind, sizes, counted, tuple(wanted), residual, factors)


def _close(found: list[float], expected: list[float], limit: float) -> bool:
    return all(abs(a - b) <= max(limit, 1e-6) * 10 for a, b in zip(found, expected, strict=True))


def _fit(
    whole: Tensor, vectors: list[Tensor], usable: list[int], counted: tuple[float, ...], limit: float
) -> tuple[list[float], float]:
    """Return the weight of every part, zero for those that cannot be used, and the relative residual.

    Simple explanations first: parts that are alike can be combined in many ways.
    """
    size = float(whole.norm())
    if not vectors or not math.isfinite(size):
        return list(counted), math.inf
    matrix = torch.stack(vectors, dim=1)
    size = max(size, float(matrix.norm()) * 1e-3, 1e-300)
    solved = torch.linalg.lstsq(matrix, whole.unsqueeze(1), driver="gelsd").solution.flatten()
    candidates = [
        torch.tensor([counted[index] for index in usable], dtype=torch.float64),
        torch.ones(len(usable), dtype=torch.float64),
        solved,
    ]
    residuals = [float((whole - matrix @ candidate).norm()) / size for candidate in candidates]
    best = next((index for index, residual in enumerate(residuals) if residual <= limit), len(candidates) - 1)
    weights = [0.0] * len(counted)
    for index, weight in zip(usable, candidates[best].tolist(), strict=True):
        weights[index] = weight
    return weights, residuals[best]
