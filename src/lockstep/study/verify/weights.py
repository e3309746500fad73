"""What each share of a batch would have to count so that the shares make up the whole batch.

The gradient of the whole batch is compared with those of its parts, at the same weights and with everything random
turned off. If it is a combination of them, the factors say what kind of loss it is: they are the portions of the
samples for a mean over samples, one for a sum, and something else for a mean over tokens. If it is none, samples depend
on each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lockstep.data.order import cut
from lockstep.study.verify.bench import open_bench
from lockstep.study.verify.by_hand import ByHand, Samples, Share, own_mean
from lockstep.study.verify.experiment import Experiment, Given, Off, Subject
from lockstep.study.verify.sketch import sketch
from lockstep.train.objective import Part

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
    with open_bench(subject, experiment, given) as bench:
        by_hand = ByHand(bench, 1, None, device)
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
