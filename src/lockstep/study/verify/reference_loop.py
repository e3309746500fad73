"""Run an experiment in this process: with the loop of `fit`, or with the reference loop, which simulates N ranks."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.base.containers import map_tensors
from lockstep.comm.world import World
from lockstep.data.order import BatchSplit, Purpose, mix, seed_cpu
from lockstep.errors import ConfigurationError
from lockstep.study.verify.fingerprint import StepTrace, Trace, fingerprint, fingerprint_model, read_rates
from lockstep.study.verify.interventions import Experiment, Given, Off, Sandbox, Subject, is_batch_norm, open_sandbox
from lockstep.train.settings import StrategyName
from lockstep.train.step_parts import LossModule, Objective, Part
from lockstep.train.task import build_model, build_optimizer
from lockstep.train.trainer import Trainer

Samples = Sequence[tuple[int | None, Any]]


class Share:
    """The state of one rank: its copy of the task, its model and its optimizer."""

    def __init__(self, sandbox: Sandbox, number: int, device: torch.device) -> None:
        self.number, self.device, self.seed = number, device, sandbox.subject.settings.seed
        self.task = sandbox.load_task(number).task
        # As in the loop of fit, so that all shares start from the same weights.
        seed_cpu(mix(self.seed, Purpose.INIT))
        self.model = build_model(self.task, device)
        self.optimizer = build_optimizer(self.task, self.model)
        self._module = LossModule(self.model, Objective(self.task, "fp32"))

    def forward(self, samples: Samples, step: int) -> Part:
        """Return the loss on ``samples``."""
        seed_cpu(mix(self.seed, Purpose.REFERENCE_FORWARD, step, self.number))
        if not samples:
            return self._module(None, 0)  # type: ignore[no-any-return]
        batch = (self.task.collate or default_collate)([sample for _, sample in samples])
        batch = map_tensors(batch, lambda tensor: tensor.to(self.device))
        return self._module(batch, len(samples))  # type: ignore[no-any-return]


class ReferenceLoop:
    """One process that simulates N ranks: it computes the N shares of each batch in turn.

    Each share has its own model and its own copy of the task, like a rank, but it has no rank number and does not
    communicate. Samples and learning rates are those of the run ``given``.
    """

    def __init__(self, sandbox: Sandbox, num_shares: int, device: torch.device) -> None:
        self._given = sandbox.given
        self.shares = [Share(sandbox, number, device) for number in range(num_shares)]
        self.sizes = sandbox.given.sizes
        self.models: list[nn.Module] = [share.model for share in self.shares]

    def step(self, step: int) -> tuple[float, dict[str, float]]:
        """Train on the global batch of ``step``; return loss and rates."""
        # As the engine at the beginning of forward.
        with torch.no_grad():
            for share in self.shares[1:]:
                for buffer, first in zip(share.model.buffers(), self.shares[0].model.buffers(), strict=True):
                    buffer.copy_(first)
        samples = self._given.samples[step]
        parts = []
        for share, share_samples in zip(self.shares, divide(samples, len(self.shares), self.sizes), strict=True):
            share.optimizer.zero_grad(set_to_none=True)
            part = share.forward(share_samples, step)
            # The weight of a share is its part of the samples, times the number of ranks, since the engine takes the
            # mean over ranks. So code that changes gradients in backward gets the same numbers.
            (part.value * (part.weight / len(samples) * len(self.shares))).backward()
            parts.append(part)
        out_of = sum(float(part.out_of) for part in parts)
        # One gradient for all shares, as the engine computes from those of the ranks.
        for replicas in zip(*(share.model.parameters() for share in self.shares), strict=True):
            if grads := [parameter.grad for parameter in replicas if parameter.grad is not None]:
                # A clone, because the optimizer of one share must not write into the gradient of another.
                total = sum(grads[1:], start=grads[0].clone()) / (len(self.shares) * out_of / len(samples))
                for parameter in replicas:
                    parameter.grad = total.clone()
        for share in self.shares:
            share.optimizer.step()
        loss = sum(float(part.value.detach()) * part.weight for part in parts) / max(out_of, 1e-30)
        return loss, read_rates(self.shares[0].optimizer)


def divide(samples: Samples, num_shares: int, sizes: Mapping[str, int | None]) -> list[Samples]:
    """Return the samples of each share."""
    split = BatchSplit(num_shares, range(num_shares), 1, num_lanes=sizes.get("lanes"))
    cuts = [split.positions(len(samples), share) for share in range(num_shares)]
    return [samples[part.start : part.stop] for part in cuts]


class FitLoop:
    """The loop of `fit`. Collective on ranks: every rank creates it, calls `step` and closes it."""

    def __init__(self, sandbox: Sandbox, world: World) -> None:
        on_ranks = sandbox.experiment.division == "ranks"
        task = sandbox.load_task(world.rank if on_ranks else 0)
        strategy: StrategyName = "ddp" if on_ranks else "single"
        settings = replace(sandbox.subject.settings, reproducible=sandbox.experiment.reproducible)
        try:
            self._trainer = Trainer(task.task, settings, world, strategy=strategy, devices=[world.device])
        except ConfigurationError:
            if not task.is_stream or settings.steps is not None:
                raise
            # A stream has no epochs to plan; this is known only after the task has created it.
            settings = replace(settings, epochs=None, steps=sandbox.subject.num_steps)
            self._trainer = Trainer(task.task, settings, world, strategy=strategy, devices=[world.device])
        self.drops_last = self._trainer.plan.order.drop_last
        self.sizes = {
            "samples of the data set": self._trainer.plan.order.num_samples,
            "samples of a global batch": self._trainer.plan.order.batch_size,
            "lanes": self._trainer.plan.split.num_lanes,
        }
        # Not the trainer's model, which may be a copy.
        assert task.built is not None
        self.models: list[nn.Module] = [task.built]
        self.close = self._trainer.close

    def step(self, step: int) -> tuple[float, dict[str, float]]:
        """Train on the global batch of ``step``; return loss and rates."""
        if step != self._trainer.num_steps_done:  # the epoch's last step, right after the first ones
            self._trainer.load_state_dict(self._trainer.state_dict() | {"num_steps_done": step})
        return float(self._trainer.step().loss), read_rates(self._trainer.optimizer)


def perform(subject: Subject, experiment: Experiment, given: Given, world: World) -> list[Trace]:
    """Run ``experiment`` and return the traces of this process, one for each share that has its own model.

    Collective for ``ranks``: every rank of ``world``.
    """
    return perform_and_keep(subject, experiment, given, world)[0]


def perform_and_keep(subject: Subject, experiment: Experiment, given: Given, world: World) -> tuple[list[Trace], Given]:
    """Run ``experiment``; return the traces of this process, and the data that other runs can be given.

    Collective for ``ranks``: every rank of ``world``.
    """
    with open_sandbox(subject, experiment, given) as sandbox, ExitStack() as stack:
        loop: FitLoop | ReferenceLoop
        chosen = subject.steps
        if experiment.division == "shares":
            loop = ReferenceLoop(sandbox, subject.num_devices, world.device)
        else:
            loop = FitLoop(sandbox, world)
            stack.callback(loop.close)
            chosen = chosen or choose_steps(subject.num_steps, loop.sizes, drop_last=loop.drops_last)
        initial = [fingerprint_model(model) for model in loop.models]
        state = loop.models[0].state_dict().items()
        initial_state = {name: value.detach().cpu().clone() for name, value in state if isinstance(value, Tensor)}
        steps: list[list[StepTrace]] = [[] for _ in loop.models]
        samples = {}
        for step in chosen:
            with sandbox.step(step):
                loss, rates = loop.step(step)
            loaded = [one for task in sandbox.tasks for one in task.recorder.end_step()]
            samples[step] = [(index, sample) for index, sample, _ in loaded]
            digests = tuple(sample_digest for _, _, sample_digest in loaded)
            for task, model, so_far in zip(sandbox.tasks, loop.models, steps, strict=True):
                # Gradients are those passed to the optimizer: the loop may have freed or zeroed them since.
                tensors = fingerprint_model(model)
                if task.gradients is not None:
                    tensors["gradient"] = task.gradients
                so_far.append(StepTrace(step, digests, loss, rates, tensors))
        norms = {name: type(one).__name__ for name, one in loop.models[0].named_modules() if is_batch_norm(one)}
        seen: dict[str, tuple[str, ...]] = {name: tuple(sorted(names)) for name, names in sandbox.watch.seen.items()}
        traces = [Trace(loop.sizes, start, tuple(so_far), seen) for start, so_far in zip(initial, steps, strict=True)]
        # The parameters that have changed.
        outside = (leaf for leaf, before in sandbox.outside.values() if fingerprint(leaf).digest != before)
        shapes = tuple(str(tuple(leaf.shape)) for leaf in outside)
        return traces, Given(samples, loop.sizes, initial_state, sandbox.tasks[0].rates, norms, outside=shapes)


def choose_steps(num_steps: int, sizes: dict[str, int | None], *, drop_last: bool) -> tuple[int, ...]:
    """Return the first steps, the last of them replaced by the epoch's last if its batch is not full."""
    size, batch_size = sizes["samples of the data set"], sizes["samples of a global batch"] or 1
    first = tuple(range(num_steps))
    if size is None or drop_last or size % batch_size == 0 or num_steps == 1:
        return first
    last = size // batch_size
    return first if last < num_steps else (*first[:-1], last)


# [Note: the weights of the shares]
# The gradient of the whole batch is compared with those of its shares, at the same weights and with everything random
# turned off. If it is a linear combination of them, the factors show the kind of loss: they are the fractions of the
# samples for a mean over samples, 1 for a sum, and other numbers for a mean over tokens. A step may fit by chance: two
# samples of which one does not count look like a sum. So a kind of loss must fit every step, also those that are right.

# Kinds of loss, in the order in which they are preferred if several fit all steps:
#   right    the engine's weights are correct
#   clamped  a loss that is not zero has no gradient, while others have one
#   sum      the sum over the shares, with or without a term that does not depend on the samples
#   single   the loss of one of the shares, as with a maximum over the batch
#   mean     a mean over something else than samples
#   clipped  each share is scaled by itself, or the losses add up and the gradients do not
#   term     the mean over samples, and a term that depends on their number only
#   coupled  anything else: samples depend on each other
#
# One is measured in a single step: ``state``, if the same forward gives another loss the second time.
KINDS = ("right", "clamped", "sum", "single", "mean", "clipped", "term", "coupled")


@dataclass(frozen=True)
class StepWeights:
    """The weights that one step needs.

    Attributes:
        fits: The kinds of loss that fit; see `KINDS`.
        sizes: Samples of each share.
        counted: The weight of each share in the run.
        wanted: The weight that it needs.
        factors: The factors for the losses of the shares that give these weights.
    """

    step: int
    fits: frozenset[str]
    sizes: tuple[int, ...]
    counted: tuple[float, ...]
    wanted: tuple[float, ...]
    factors: tuple[float, ...]


def explain(steps: Sequence[StepWeights]) -> tuple[str, StepWeights]:
    """Return the first kind of loss that fits all steps, or an empty string, and a step that differs."""
    differing = [step for step in steps if "right" not in step.fits]
    if stateful := [step for step in differing if "state" in step.fits]:
        return "state", stateful[0]  # measured, whatever the other steps look like
    common = frozenset.intersection(*(step.fits for step in steps))
    return next((kind for kind in KINDS if kind in common), ""), [*differing, steps[0]][0]


def measure_weights(subject: Subject, given: Given, off: Off, device: torch.device) -> list[StepWeights]:
    """Train in one process, and find for each step the weights with which its shares add up."""
    experiment = Experiment("one", off | {"random", "batchnorm", "state", "data", "rates"})
    weights, num_devices = [], subject.num_devices
    with open_sandbox(subject, experiment, given) as sandbox:
        loop = ReferenceLoop(sandbox, 1, device)  # all parts in one model, at the same weights
        for step, following in zip(subject.steps, (*subject.steps[1:], subject.steps[0]), strict=True):
            samples = given.samples[step]
            # As many others, or the same in other shares.
            others = [*given.samples[following], *samples][1 : len(samples) + 1]
            with sandbox.step(step):
                measured, other = (
                    [_measure(loop.shares[0], part, step) for part in (batch, *divide(batch, num_devices, given.sizes))]
                    for batch in (samples, others)
                )
                again = _measure(loop.shares[0], samples, step)
                loop.step(step)
            weights.append(_solve(step, 1e-7 if subject.double else 3e-3, measured, other, again))
    return weights


@dataclass(frozen=True)
class _Measured:
    """Gradient and loss of some samples, as one vector; their weight and their number."""

    vector: Tensor
    out_of: float
    size: int

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are."""
        return bool(self.vector.isfinite().all())


def _measure(share: Share, samples: Samples, step: int) -> _Measured:
    if not samples:
        return _Measured(torch.zeros(0), 0.0, 0)
    share.optimizer.zero_grad(set_to_none=True)
    part = share.forward(samples, step)
    # The loss of this part alone.
    value = part.value * (part.weight / torch.as_tensor(part.out_of, device=part.value.device).clamp(min=1e-30))
    value.backward()
    parameters = [parameter for parameter in share.model.parameters() if parameter.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    # Large gradients are replaced by their fingerprints: these are linear, so the same factors combine them.
    vector = torch.cat([*(fingerprint(grad).values for grad in grads), value.detach().double().reshape(1).cpu()])
    share.optimizer.zero_grad(set_to_none=True)
    return _Measured(vector, float(torch.as_tensor(part.out_of).detach()), len(samples))


class _Division:
    """The gradients of a batch and of its shares, of which a combination should be that of the batch."""

    def __init__(self, measured: Sequence[_Measured], shares: Sequence[int], limit: float) -> None:
        self.whole = measured[0].vector
        self._parts = torch.stack([measured[1 + share].vector for share in shares], dim=1)
        # The whole may cancel out although its parts do not: then errors are relative to the parts.
        self._size = max(float(self.whole.norm()), float(self._parts.norm()) * 1e-3, 1e-300)
        self._limit = limit * self._size

    def is_close(self, actual: Tensor, expected: Tensor) -> bool:
        return float((actual - expected).norm()) <= self._limit

    def rest(self, weights: Tensor) -> Tensor:
        """Return what is missing if shares have these weights."""
        return self.whole - self._parts @ weights

    def solve(self, importance_of_sum: float) -> Tensor:
        """Return the weights of the nearest combination; with an importance, they should add up to 1."""
        last = torch.full((1, 1 + self._parts.shape[1]), importance_of_sum * self._size, dtype=self.whole.dtype)
        rows = torch.cat([torch.cat([self._parts, self.whole.unsqueeze(1)], dim=1), last])
        solution: Tensor = torch.linalg.lstsq(rows[:, :-1], rows[:, -1:], driver="gelsd").solution
        return solution.flatten()


def _solve(
    step: int, limit: float, measured: Sequence[_Measured], others: Sequence[_Measured], again: _Measured
) -> StepWeights:
    """Find the weights with which the shares add up to the whole, and the kinds of loss that fit.

    Args:
        step: The step.
        limit: The largest difference that counts as rounding.
        measured: Of its samples: the whole batch, and each share.
        others: The same of other samples.
        again: Of the whole batch, after all others.
    """
    whole, *parts = measured
    total = sum(part.out_of for part in parts)
    counted = [part.out_of / total if total else 0.0 for part in parts]
    sizes = tuple(part.size for part in parts)
    filled = [share for share, part in enumerate(parts) if part.size]
    usable = [share for share in filled if parts[share].is_finite]
    fits, wanted = {"coupled"}, counted
    if usable and whole.is_finite:
        division = _Division(measured, usable, limit)
        nothing = torch.zeros_like(division.whole)
        as_counted = torch.tensor([counted[share] for share in usable], dtype=nothing.dtype)
        ones = torch.ones_like(as_counted)
        # Simple explanations first: similar shares can be combined in many ways.
        tried = as_counted, division.solve(1.0), ones, division.solve(0.0)
        if solutions := [weights for weights in tried if division.is_close(division.rest(weights), nothing)]:
            by_share = dict(zip(usable, solutions[0].tolist(), strict=True))
            wanted = [by_share.get(share, 0.0) for share in range(len(parts))]
            fits |= _kinds_of(solutions, as_counted, slack=10 * max(limit, 1e-6))
        elif usable == filled and abs(division.rest(as_counted)[-1]) <= limit * abs(whole.vector[-1]):
            fits.add("clipped")
        if usable != filled:
            fits.discard("right")
        elif all(part.is_finite for part in others):
            # What does not add up is the same for other samples: it does not depend on them.
            other = _Division(others, usable, limit)
            pairs = (("term", as_counted), ("sum", ones))
            fits |= {kind for kind, weights in pairs if division.is_close(division.rest(weights), other.rest(weights))}
        if not division.is_close(again.vector, whole.vector):
            fits = {"state"}
    # A loss that is not zero, but depends on no parameter at these weights.
    constant = [bool(part.size and part.vector[-1]) and not part.vector[:-1].any() for part in (whole, *parts)]
    if "right" not in fits and sum(constant) not in (0, len(constant)):
        fits.add("clamped")
    factors = tuple(weight * sum(sizes) / size if size else 1.0 for weight, size in zip(wanted, sizes, strict=True))
    return StepWeights(step, frozenset(fits), sizes, tuple(counted), tuple(wanted), factors)


def _kinds_of(solutions: Sequence[Tensor], counted: Tensor, slack: float) -> set[str]:
    """Return the kinds of loss that fit, by the weights with which the shares add up to the whole."""
    kinds = {"sum"} if any(bool((weights == 1).all()) for weights in solutions) else set()
    if solutions[0] is counted:  # also other kinds may look right in a step, but not a sum
        return kinds | {"right", "clamped", "mean", "clipped"} | ({"single"} if len(counted) == 1 else set())
    for weights in solutions:
        ratios = weights / counted
        if float(weights.max()) > 1 - slack and float(weights.abs().sum()) < 1 + slack:
            kinds.add("single")
        is_mean = float(weights.min()) > -slack and abs(float(weights.sum()) - 1) < max(slack, 1e-3)
        is_scaled = float(ratios.max() - ratios.min()) <= 1e-3 * float(ratios.max())
        kinds.add("mean" if is_mean or is_scaled else "clipped")
    return kinds
