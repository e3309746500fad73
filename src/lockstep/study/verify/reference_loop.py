"""Run an experiment in this process: with the loop of `fit`, or with the reference loop, which simulates N ranks."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.comm.world import World
from lockstep.containers import map_tensors
from lockstep.data.order import cut, mix, seed_cpu
from lockstep.errors import ConfigurationError
from lockstep.study.verify.fingerprint import StepTrace, Trace, fingerprint, fingerprint_model, read_rates
from lockstep.study.verify.interventions import Experiment, Given, Off, Subject, is_batch_norm
from lockstep.study.verify.sandbox import Sandbox, open_sandbox
from lockstep.train.settings import StrategyName
from lockstep.train.step import INIT, LossModule, Objective, Part
from lockstep.train.task import build_model, build_optimizer
from lockstep.train.trainer import Trainer

# Separates the random numbers of forward from those that training draws from the same seed.
_FORWARD = 42

Samples = Sequence[tuple[int | None, Any]]


class Share:
    """The state of one rank: its copy of the task, its model and its optimizer."""

    def __init__(self, sandbox: Sandbox, number: int, device: torch.device) -> None:
        self.number, self.device, self.seed = number, device, sandbox.subject.settings.seed
        self.task = sandbox.load_task(number).task
        # As in the loop of fit, so that all shares start from the same weights.
        seed_cpu(mix(self.seed, INIT))
        self.model = build_model(self.task, device).train()
        self.optimizer = build_optimizer(self.task, self.model)
        self._module = LossModule(self.model, Objective(self.task, "fp32"))

    def forward(self, samples: Samples, step: int) -> Part:
        """Return the loss on ``samples``."""
        seed_cpu(mix(self.seed, _FORWARD, step, self.number))
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
        for share, mine in zip(self.shares, divide(samples, len(self.shares)), strict=True):
            share.optimizer.zero_grad(set_to_none=True)
            part = share.forward(mine, step)
            # The weight of a share is its part of the samples, times the number of ranks, since the engine takes the
            # mean over ranks. So code that changes gradients in backward gets the same numbers.
            (part.value * (part.weight / len(samples) * len(self.shares))).backward()
            parts.append(part)
        out_of = sum(float(part.out_of) for part in parts)
        # One gradient for all shares, as the engine computes from those of the ranks.
        for replicas in zip(*(share.model.parameters() for share in self.shares), strict=True):
            grads = [parameter.grad for parameter in replicas if parameter.grad is not None]
            if grads:
                # A clone, because the optimizer of one share must not write into the gradient of another.
                total = sum(grads[1:], start=grads[0].clone()) / (len(self.shares) * out_of / len(samples))
                for parameter in replicas:
                    parameter.grad = total.clone()
        for share in self.shares:
            share.optimizer.step()
        loss = sum(float(part.value.detach()) * part.weight for part in parts) / max(out_of, 1e-30)
        return loss, read_rates(self.shares[0].optimizer)


def divide(samples: Samples, num_shares: int) -> list[Samples]:
    """Return the samples of each share."""
    cuts = [cut(len(samples), num_shares, share) for share in range(num_shares)]
    return [samples[part.start : part.stop] for part in cuts]


class FitLoop:
    """The loop of `fit`. Collective on ranks: every rank creates it, calls `step` and closes it."""

    def __init__(self, sandbox: Sandbox, world: World) -> None:
        on_ranks = sandbox.experiment.division == "ranks"
        task = sandbox.load_task(world.rank if on_ranks else 0)
        strategy: StrategyName = sandbox.experiment.strategy if on_ranks else "single"
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
            "samples of a global batch": self._trainer.plan.batch_size,
        }
        # Not the trainer's model, which may be a copy.
        assert task.built is not None
        self.models: list[nn.Module] = [task.built]
        self.close = self._trainer.close

    def step(self, step: int) -> tuple[float, dict[str, float]]:
        """Train on the global batch of ``step``; return loss and rates."""
        if step != self._trainer.num_steps_done:  # the epoch's last step, right after the first ones
            self._trainer.load_state_dict(self._trainer.state_dict() | {"num_steps_done": step})
        loss = float(self._trainer.step().loss)
        return loss, read_rates(self._trainer.optimizer)


def perform(subject: Subject, experiment: Experiment, given: Given, world: World) -> list[Trace]:
    """Run ``experiment`` and return the traces of this process, one for each share that has its own model.

    Collective for ``ranks``: every rank of ``world``.
    """
    return perform_and_keep(subject, experiment, given, world, lambda: None)[0]


def perform_and_keep(
    subject: Subject, experiment: Experiment, given: Given, world: World, after_step: Callable[[], None]
) -> tuple[list[Trace], Given]:
    """Run ``experiment``; return the traces of this process, and the data that other runs can be given.

    Collective for ``ranks``: every rank of ``world``. Calls ``after_step`` after each step.
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
        norms = {name: type(one).__name__ for name, one in loop.models[0].named_modules() if is_batch_norm(one)}
        steps: list[list[StepTrace]] = [[] for _ in loop.models]
        samples = {}
        for step in chosen:
            with sandbox.step(step):
                loss, rates = loop.step(step)
            # With a device, the next batch is already loaded.
            ahead = world.device.type != "cpu"
            loaded = [one for task in sandbox.tasks for one in task.recorder.end_step(ahead=ahead)]
            samples[step] = [(index, sample) for index, sample, _ in loaded]
            digests = tuple(found for _, _, found in loaded)
            for task, model, so_far in zip(sandbox.tasks, loop.models, steps, strict=True):
                # Gradients are those passed to the optimizer: the loop may have freed or zeroed them since.
                tensors = fingerprint_model(model)
                if task.gradients is not None:
                    tensors["gradient"] = task.gradients
                so_far.append(StepTrace(step, digests, loss, rates, tensors))
            after_step()
        seen = tuple(sorted(sandbox.watch.draws)), frozenset(sandbox.watch.live)
        traces = [Trace(loop.sizes, start, tuple(so_far), *seen) for start, so_far in zip(initial, steps, strict=True)]
        # Those that have changed.
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


# The weights that the shares of a batch need so that they add up to the whole batch.
#
# The gradient of the whole batch is compared with those of its parts, at the same weights and with everything random
# turned off. If it is a linear combination of them, the factors show the kind of loss: they are the fractions of the
# samples for a mean over samples, 1 for a sum, and other numbers for a mean over tokens. If it is not, samples depend
# on each other.


@dataclass(frozen=True)
class StepWeights:
    """The weights that one step needs.

    Attributes:
        kind: ``right``: the engine's weights are correct; ``sum``; ``other``: a mean over something else; ``clipped``:
            each share is scaled separately, or the losses add up and the gradients do not; ``clamped``: a loss that is
            not zero has no gradient; ``none``: no combination of the shares, or a single one, as with a maximum over
            the batch.
        sizes: Samples of each share.
        counted: The weight of each share in the run.
        wanted: The weight that it needs.
        factors: The factors for the losses of the shares that give these weights.
    """

    step: int
    kind: str
    sizes: tuple[int, ...]
    counted: tuple[float, ...]
    wanted: tuple[float, ...]
    factors: tuple[float, ...]


def measure_weights(subject: Subject, given: Given, off: Off, device: torch.device) -> list[StepWeights]:
    """Train in one process, and find for each step the weights with which its shares add up."""
    experiment = Experiment("one", off | {"random", "batchnorm", "state", "data", "rates"})
    found = []
    with open_sandbox(subject, experiment, given) as sandbox:
        loop = ReferenceLoop(sandbox, 1, device)  # all parts in one model, at the same weights
        for step in subject.steps:
            samples = given.samples[step]
            with sandbox.step(step):
                whole = _measure_gradient(loop.shares[0], samples, step)
                parts = [_measure_gradient(loop.shares[0], part, step) for part in divide(samples, subject.num_devices)]
                loop.step(step)
            found.append(_solve(step, whole, parts, limit=1e-7 if subject.double else 3e-3))
    return found


@dataclass(frozen=True)
class _Measured:
    """Gradient and loss of some samples, as one vector; their weight and their number."""

    vector: Tensor
    out_of: float
    size: int


def _measure_gradient(share: Share, samples: Samples, step: int) -> _Measured:
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


def _is_constant(measured: _Measured) -> bool:
    """Return whether a loss that is not zero depends on no parameter at these weights."""
    return bool(measured.size) and bool(measured.vector[-1]) and not measured.vector[:-1].any()


def _solve(step: int, whole: _Measured, parts: list[_Measured], limit: float) -> StepWeights:
    """Find the weights with which the parts add up to the whole, and the kind of loss with these weights."""
    total = sum(part.out_of for part in parts)
    counted = [part.out_of / total if total else 0.0 for part in parts]
    filled = [index for index, part in enumerate(parts) if part.size]
    usable = [index for index in filled if bool(parts[index].vector.isfinite().all())]
    kind, wanted = "none", counted
    size = float(whole.vector.norm())
    if usable and math.isfinite(size):
        matrix = torch.stack([parts[index].vector for index in usable], dim=1)
        # The whole may cancel out although its parts do not: then errors are relative to the parts.
        size = max(size, float(matrix.norm()) * 1e-3, 1e-300)
        solved = torch.linalg.lstsq(matrix, whole.vector.unsqueeze(1), driver="gelsd").solution.flatten()
        as_counted = torch.tensor([counted[index] for index in usable], dtype=torch.float64)
        is_right = "right" if usable == filled else "other"
        # Simple explanations first: similar parts can be combined in many ways.
        for name, weights in ((is_right, as_counted), ("sum", torch.ones_like(solved)), ("other", solved)):
            residual = float((whole.vector - matrix @ weights).norm()) / size
            if residual <= limit:
                found = dict(zip(usable, weights.tolist(), strict=True))
                kind, wanted = name, [found.get(index, 0.0) for index in range(len(parts))]
                break
        expected = float(matrix[-1] @ as_counted)
        if kind == "none" and usable == filled and abs(float(whole.vector[-1]) - expected) <= limit * abs(expected):
            kind = "clipped"
    if kind != "right" and _is_constant(whole) + sum(map(_is_constant, parts)) not in (0, len(parts) + 1):
        kind = "clamped"
    slack = 10 * max(limit, 1e-6)
    if kind == "other" and len(usable) > 1:
        ratios = [wanted[index] / counted[index] for index in usable if counted[index]]
        if max(wanted) > 1 - slack and sum(map(abs, wanted)) < 1 + slack:
            kind = "none"
        elif abs(sum(wanted) - 1) > max(slack, 1e-3) and max(ratios) - min(ratios) > 1e-3 * max(ratios):
            kind = "clipped"
    sizes = tuple(part.size for part in parts)
    factors = tuple(weight * sum(sizes) / size if size else 1.0 for weight, size in zip(wanted, sizes, strict=True))
    return StepWeights(step, kind, sizes, tuple(counted), tuple(wanted), factors)
