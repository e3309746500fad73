"""Fingerprints of tensors, the trace of a run that consists of them, and the differences between two traces."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Numbers in a fingerprint. The relative error of a difference's norm is then about sqrt(2 / SIZE), 4%.
SIZE = 1024


@dataclass(frozen=True)
class Fingerprint:
    """A tensor summarized in at most about a thousand numbers: enough to measure how far apart two tensors are.

    Source: the count sketch of Charikar, Chen and Farach-Colton, 2002.

    Attributes:
        shape: Of the tensor.
        digest: Of its bits.
        values: Float64, at most `SIZE` numbers: the tensor itself if it is small enough, else sums of its elements.
        norm: The exact Euclidean norm.
    """

    shape: tuple[int, ...]
    digest: bytes
    values: Tensor
    norm: float


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor of any dtype, on any device; sparse tensors are treated as dense."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    flat = real.to("cpu").contiguous().flatten()
    # Includes shape and dtype: different tensors may have equal bytes.
    digest = blake2b(str((tuple(tensor.shape), str(tensor.dtype))).encode(), digest_size=16)
    digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    values = flat.double()
    norm = float(values.norm())
    if len(values) > SIZE:
        # Each element is added with a fixed random sign to one of SIZE sums. The sums of a difference are the
        # difference of the sums, and their norm is that of the tensor within a few percent.
        padding = -len(values) % SIZE
        values = nn.functional.pad(values * _signs(len(values)), (0, padding)).view(-1, SIZE).sum(0)
    # A copy: `double` returns the tensor itself if it is already float64, and training changes the tensor.
    return Fingerprint(tuple(tensor.shape), digest.digest(), values.clone(), norm)


@lru_cache(maxsize=8)
def _signs(size: int) -> Tensor:
    # Not by a generator whose draws are watched, or replaced, in an experiment.
    words = np.random.PCG64(size).random_raw(-(-size // 64))
    return torch.from_numpy(np.unpackbits(words.view(np.uint8))[:size].astype(np.int8)) * 2 - 1


def distance(actual: Fingerprint, expected: Fingerprint) -> float:
    """Return the norm of the difference of two tensors; infinite if shapes differ, or one is not finite.

    An estimate for tensors of more than `SIZE` elements, but 0 only for tensors of the same bits or equal sums.
    """
    # First, because NaN is not equal to itself, and two runs may have the same NaN.
    if actual.digest == expected.digest:
        return 0.0
    if actual.shape != expected.shape:
        return math.inf
    apart = float((actual.values - expected.values).norm())
    return apart if math.isfinite(apart) else math.inf


# The record of a run: everything that must be equal in two runs for them to be the same run.


# The tensors of a model by kind ("parameter", "gradient", "buffer") and name; not all parameters have a gradient.
ModelFingerprint = dict[str, dict[str, Fingerprint]]


def fingerprint_model(model: nn.Module) -> ModelFingerprint:
    """Return the current fingerprints of ``model``."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        return {
            "parameter": {name: fingerprint(value) for name, value in parameters.items()},
            "gradient": {name: fingerprint(one.grad) for name, one in parameters.items() if one.grad is not None},
            "buffer": {name: fingerprint(value) for name, value in model.named_buffers()},
        }


@dataclass(frozen=True)
class StepTrace:
    """One step of one process.

    Attributes:
        step: Counted from 0 over all epochs.
        samples: A digest of each sample that this process loaded, in order.
        loss: Of the global batch.
        rates: Learning rates and other numbers of the optimizer's groups, as used by the update.
        tensors: After the step; the gradients are those passed to the optimizer.
    """

    step: int
    samples: tuple[bytes, ...]
    loss: float
    rates: dict[str, float]
    tensors: ModelFingerprint


@dataclass(frozen=True)
class Trace:
    """The trace of a run in one process.

    Attributes:
        sizes: Number of samples of the data set (None for a stream) and of a global batch.
        initial: Before the first step.
        seen: What a `Watch` has seen of each feature; features of which it has seen nothing have no effect on the task.
    """

    sizes: dict[str, int | None]
    initial: ModelFingerprint
    steps: tuple[StepTrace, ...]
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_stream(self) -> bool:
        """Whether every process reads all samples."""
        return self.sizes["samples of the data set"] is None


def read_rates(optimizer: Optimizer) -> dict[str, float]:
    """Return every number of the optimizer's groups by name, the learning rates first."""
    rates = {}
    for index, group in enumerate(optimizer.param_groups):
        for name in sorted(group.keys() - {"params", "initial_lr"}, key=lambda name: (name != "lr", name)):
            is_many = isinstance(group[name], (tuple, list))
            for place, value in enumerate(group[name] if is_many else [group[name]]):
                is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
                if is_number and not isinstance(value, bool):
                    rates[f"{name}{f'[{place}]' if is_many else ''} of group {index}"] = float(value)
    return rates


# The differences of two runs: the first tensor that differs, and the largest difference.

Kind = Literal[
    "size", "initial parameter", "initial buffer", "sample", "loss", "learning rate", "gradient", "parameter", "buffer"
]

# In the order in which they occur in a run.
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that counts as rounding.

    Args:
        relative: Relative to the norm of the tensor.
        floor: The smallest norm to use, relative to the norm of all tensors of the kind: a gradient that should be
            zero is pure rounding.
    """

    relative: float
    floor: float


DOUBLE, SINGLE = Tolerance(1e-8, 1e-2), Tolerance(1e-3, 1e-1)
# With bf16 or fp16, sums over another number of samples are rounded otherwise.
HALF = Tolerance(5e-2, 1e-1)
EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class Difference:
    """One difference.

    Attributes:
        step: Counted from 0; None before the first.
        name: Of the tensor, or of the number.
        ranks: The ranks with the difference; empty if all have it, or if there are no ranks.
        size: Relative to the expected value; infinite if that is not defined.
        words: Such as ``0.2 instead of 0.1``; empty if it is within the tolerance.
    """

    kind: Kind
    step: int | None
    name: str
    ranks: tuple[int, ...]
    size: float
    words: str

    def __str__(self) -> str:
        """Return its name for a sentence."""
        name = "" if self.name in (self.kind, "batch") else f" {self.name}"
        step = "" if self.step is None else f" at step {self.step}"
        ranks = f" on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        kind = {"size": "size:", "sample": "samples"}.get(self.kind, self.kind)
        return f"{kind}{name}{step}{ranks} ({self.words})"


@dataclass(frozen=True)
class TraceComparison:
    """The comparison of two runs.

    Attributes:
        differences: The differences beyond the tolerance, in the order in which they occurred.
        worst: By kind, the largest relative difference, including differences within the tolerance.
    """

    differences: tuple[Difference, ...]
    worst: dict[str, float]

    @property
    def first(self) -> Difference | None:
        """The first difference, if there is any."""
        return self.differences[0] if self.differences else None

    @property
    def same(self) -> bool:
        """Whether it is the same run."""
        return not self.differences

    def of_kind(self, *kinds: Kind) -> Difference | None:
        """Return the first difference of the first of ``kinds`` that has one."""
        return next((difference for kind in kinds for difference in self.differences if difference.kind == kind), None)

    def __str__(self) -> str:
        """Return the result in a few words."""
        return "the same" if self.first is None else f"differ: {self.first}"


def compare(
    expected: Sequence[Trace], actual: Sequence[Trace], tolerance: Tolerance, *, skip: Sequence[Kind] = ()
) -> TraceComparison:
    """Compare two runs, given the traces of all their processes or shares.

    Args:
        expected: One trace, or as many as ``actual``.
        actual: A trace for each rank or share.
        tolerance: The differences that count as equal.
        skip: Kinds that are not compared.
    """
    # One process against many: each of them should have the same trace, except for the samples.
    expected = expected if len(expected) == len(actual) else list(expected) * len(actual)
    compared = [one for one in _compare_all(expected, actual, tolerance) if one.kind not in skip]
    worst: dict[str, float] = dict.fromkeys((kind for kind in KINDS if kind not in skip), 0.0)
    for difference in compared:
        worst[difference.kind] = max(worst[difference.kind], difference.size)
    return TraceComparison(tuple(difference for difference in compared if difference.words), worst)


def _compare_all(expected: Sequence[Trace], actual: Sequence[Trace], tolerance: Tolerance) -> Iterator[Difference]:
    """Yield every difference in any bit."""
    for name, size in expected[0].sizes.items():
        if ranks := [rank for rank, trace in enumerate(actual) if trace.sizes[name] != size]:
            words = f"{actual[ranks[0]].sizes[name]} instead of {size}"
            yield Difference("size", None, name, _some(ranks, actual), math.inf, words)
    models = [(reference.initial, trace.initial) for reference, trace in zip(expected, actual, strict=True)]
    yield from _compare_tensors(models, None, tolerance, "initial parameter")
    yield from _compare_tensors(models, None, tolerance, "initial buffer")
    for number, step in enumerate(expected[0].steps):
        steps = [trace.steps[number] for trace in actual]
        yield from _compare_samples(step, steps, is_stream=expected[0].is_stream)
        yield from _compare_losses(step, steps, tolerance)
        yield from _compare_rates(step, steps)
        models = [(trace.steps[number].tensors, one.tensors) for trace, one in zip(expected, steps, strict=True)]
        yield from _compare_tensors(models, step.step, tolerance, "gradient")
        yield from _compare_tensors(models, step.step, tolerance, "parameter")
        yield from _compare_tensors(models, step.step, tolerance, "buffer")


def _compare_samples(expected: StepTrace, actual: Sequence[StepTrace], *, is_stream: bool) -> Iterator[Difference]:
    parts, ranks = [step.samples for step in actual], []
    if is_stream or len(actual) == 1:  # each process has all samples
        ranks = [rank for rank, samples in enumerate(parts) if samples != expected.samples]
        loaded = parts[ranks[0]] if ranks else expected.samples
    else:
        loaded = tuple(sample for part in parts for sample in part)
    if loaded != expected.samples:
        words = _sample_words(expected.samples, loaded)
        yield Difference("sample", expected.step, "batch", _some(ranks, actual), math.inf, words)


def _sample_words(expected: tuple[bytes, ...], actual: tuple[bytes, ...]) -> str:
    if len(actual) != len(expected):
        return f"{len(actual)} samples instead of {len(expected)}"
    if sorted(actual) == sorted(expected):
        return "the same samples in another order"
    wrong = sum(a != b for a, b in zip(expected, actual, strict=True))
    return f"{wrong} of {len(expected)} samples are others"


def _compare_losses(expected: StepTrace, actual: Sequence[StepTrace], tolerance: Tolerance) -> Iterator[Difference]:
    # All ranks have the loss of the global batch, so only the rank with the largest difference is named.
    prints = [
        fingerprint(torch.tensor(loss, dtype=torch.float64)) for loss in (expected.loss, *(one.loss for one in actual))
    ]
    sizes = [_relative_distance(prints[0], one, tolerance.floor) for one in prints[1:]]
    if size := max(sizes):
        loss = actual[sizes.index(size)].loss
        words = f"{loss:.6g} instead of {expected.loss:.6g}" if size > tolerance.relative else ""
        yield Difference("loss", expected.step, "loss", (), size, words)


def _compare_rates(expected: StepTrace, actual: Sequence[StepTrace]) -> Iterator[Difference]:
    # Without a tolerance: all processes compute rates from step and settings alone, by the same operations.
    for name in {**expected.rates, **actual[0].rates}:
        rate = expected.rates.get(name)
        if ranks := [rank for rank, step in enumerate(actual) if step.rates.get(name) != rate]:
            rank_rate = actual[ranks[0]].rates.get(name)
            size = abs(rank_rate - rate) / abs(rate) if rank_rate is not None and rate else math.inf
            words = f"{rank_rate} instead of {rate}"
            yield Difference("learning rate", expected.step, name, _some(ranks, actual), size, words)


def _compare_tensors(
    models: Sequence[tuple[ModelFingerprint, ModelFingerprint]], step: int | None, tolerance: Tolerance, kind: Kind
) -> Iterator[Difference]:
    key = kind.removeprefix("initial ")
    pairs = [(reference[key], model[key]) for reference, model in models]
    # A gradient that should be zero is compared with the norm of all gradients.
    scale = math.hypot(*(one.norm for one in pairs[0][0].values()))
    # Buffers are unrelated, so each is compared with its own norm. From a gradient that is pure rounding, Adam makes
    # steps of full size, so parameters have a larger tolerance than gradients.
    floor = 0.0 if "buffer" in kind else tolerance.floor * (10 if kind == "parameter" else 1)
    least = floor * scale if math.isfinite(scale) else 0.0
    for name in {**pairs[0][0], **pairs[0][1]}:
        sizes = [_relative_distance(reference.get(name), tensors.get(name), least) for reference, tensors in pairs]
        if not any(sizes):
            continue
        ranks = [rank for rank, size in enumerate(sizes) if size > tolerance.relative]
        reference, tensors = pairs[ranks[0] if ranks else 0]
        words = _tensor_words(reference.get(name), tensors.get(name), max(sizes)) if ranks else ""
        yield Difference(kind, step, name, _some(ranks, models), max(sizes), words)


def _relative_distance(expected: Fingerprint | None, actual: Fingerprint | None, least: float) -> float:
    if expected is None or actual is None:
        return 0.0 if expected is actual else math.inf
    apart, norm = distance(actual, expected), max(expected.norm, least)
    if apart == 0.0:
        return 0.0
    return apart / norm if norm > 0 and math.isfinite(norm) else math.inf


def _tensor_words(expected: Fingerprint | None, actual: Fingerprint | None, size: float) -> str:
    if actual is None:
        return "there is none"
    if expected is None:
        return "there should be none"
    if expected.shape != actual.shape:
        return f"of shape {actual.shape} instead of {expected.shape}"
    return "not finite" if not math.isfinite(actual.norm) else f"off by {size:.1e} of its size"


def _some(ranks: Sequence[int], items: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks, or an empty tuple if it is all of them."""
    return tuple(ranks) if len(ranks) < len(items) else ()
