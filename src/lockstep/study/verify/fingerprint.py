"""Fingerprints of tensors, the trace of a run made of them, and where two traces differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# A tensor in a thousand numbers: enough to say whether two runs hold the same one, and how far apart they are.
#
# Processes compare every gradient and every weight of every step. Small tensors travel whole; of larger ones each
# element is added, with a fixed random sign, to one of a thousand sums. The sums of a difference are the difference
# of the sums, and their norm is that of the tensor, give or take a few percent.
#
# Source: the count sketch of Charikar, Chen and Farach-Colton, 2002.

SIZE = 1024
"""Numbers of a sketch; the norm of a difference is then uncertain by about sqrt(2 / SIZE), 4%."""


@dataclass(frozen=True)
class Fingerprint:
    """What is kept of a tensor.

    Attributes:
        shape: Of the tensor.
        digest: Of its bits.
        values: Float64, at most `SIZE` numbers: the tensor itself if it is that small, else sums.
        norm: Euclidean, exact.
    """

    shape: tuple[int, ...]
    digest: bytes
    values: Tensor
    norm: float


def sketch(tensor: Tensor) -> Fingerprint:
    """Return the sketch of a tensor of any dtype, on any device; sparse ones count as dense."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    flat = real.to("cpu").contiguous().flatten()
    digest = blake2b(str((tuple(tensor.shape), str(tensor.dtype))).encode(), digest_size=16)
    digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    values = flat.double()
    norm = float(values.norm())
    return Fingerprint(
        tuple(tensor.shape), digest.digest(), values.clone() if len(values) <= SIZE else _sums(values), norm
    )


def distance(found: Fingerprint, expected: Fingerprint) -> float:
    """Return the norm of the difference of two tensors of one shape; infinite if either is not finite and they differ.

    An estimate for tensors of more than `SIZE` elements, but 0 only for tensors of the same bits or equal sums.
    """
    if found.digest == expected.digest:
        return 0.0
    if found.shape != expected.shape:
        return math.inf
    apart = float((found.values - expected.values).norm())
    return apart if math.isfinite(apart) else math.inf


def _sums(values: Tensor) -> Tensor:
    signed = values * _signs(len(values))
    padding = -len(values) % SIZE
    return torch.nn.functional.pad(signed, (0, padding)).view(-1, SIZE).sum(0)


@lru_cache(maxsize=8)
def _signs(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8) * 2 - 1


# What is written down of a run: everything that two runs must have in common to be the same run.


@dataclass(frozen=True)
class Tensors:
    """Parameters, gradients and buffers by name; a parameter without a gradient has none here either."""

    parameters: dict[str, Fingerprint]
    gradients: dict[str, Fingerprint]
    buffers: dict[str, Fingerprint]


@dataclass(frozen=True)
class StepTrace:
    """One step of one process.

    Attributes:
        step: Counted from 0 over all epochs.
        samples: A digest of each sample that this process loaded, in order.
        loss: Of the global batch.
        rates: Learning rates and the other numbers of the optimizer's groups, that the update used.
        tensors: After the step; the gradients are those that the optimizer got.
        batches: A digest of each batch that the loss got, as it was collated.
    """

    step: int
    samples: tuple[bytes, ...]
    loss: float
    rates: dict[str, float]
    tensors: Tensors
    batches: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Trace:
    """A run as one process saw it.

    Attributes:
        sizes: Numbers that the whole run hangs on: samples of the data set and of a global batch.
        initial: Before the first step.
        is_stream: Whether every process reads all samples.
        draws: Names of the random operations that forward used; known only where they were watched.
    """

    sizes: dict[str, int | None]
    initial: Tensors
    steps: tuple[StepTrace, ...]
    is_stream: bool = False
    draws: tuple[str, ...] = ()


def take(model: nn.Module) -> Tensors:
    """Return what there is of a model now."""
    with torch.no_grad():
        return Tensors(
            {name: sketch(value) for name, value in model.named_parameters()},
            {name: sketch(value.grad) for name, value in model.named_parameters() if value.grad is not None},
            {name: sketch(value) for name, value in model.named_buffers()},
        )


def read_rates(optimizer: Optimizer) -> dict[str, float]:
    """Return every number of the optimizer's groups by name, the learning rates first."""
    found = {}
    for index, group in enumerate(optimizer.param_groups):
        names = sorted((name for name in group if name not in ("params", "initial_lr")), key=lambda name: name != "lr")
        for name in names:
            for part, value in _numbers(group[name]):
                found[f"{name}{part} of group {index}"] = value
    return found


def _numbers(value: object) -> list[tuple[str, float]]:
    if isinstance(value, (tuple, list)):
        return [(f"[{index}]", float(item)) for index, item in enumerate(value) if isinstance(item, (int, float))]
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
        return []
    return [("", float(value))] if not isinstance(value, torch.Tensor) or value.numel() == 1 else []


# What two runs differ in: the first tensor, and by how much at worst.

Kind = Literal[
    "size", "initial parameter", "initial buffer", "sample", "loss", "learning rate", "gradient", "parameter", "buffer"
]

KINDS: tuple[Kind, ...] = (
    "size", "initial parameter", "initial buffer", "sample", "loss", "learning rate", "gradient", "parameter", "buffer",
)  # fmt: skip
"""In the order in which they come about in a run."""


@dataclass(frozen=True)
class Tolerance:
    """How far apart numbers may be that differ in rounding only.

    Args:
        relative: To the norm of the tensor.
        floor: What counts as norm at least, as a part of the norm of all tensors of the kind: a gradient that
            should be zero is pure rounding.
    """

    relative: float
    floor: float

    def floor_of(self, kind: str) -> float:
        """Return the floor for a kind of tensor: Adam makes steps of such gradients too, so weights get more room."""
        return 10 * self.floor if kind == "parameter" else self.floor


DOUBLE, SINGLE = Tolerance(1e-8, 1e-2), Tolerance(1e-3, 1e-1)
EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        step: Counted from 0; None before the first.
        name: Of the tensor, or of the number.
        ranks: Those that have it differently; empty if all do, or if there are none.
        size: Relative to what was expected; infinite where that makes no sense.
        words: Such as ``0.2 instead of 0.1``.
    """

    kind: Kind
    step: int | None
    name: str
    ranks: tuple[int, ...]
    size: float
    words: str


@dataclass(frozen=True)
class TraceComparison:
    """Two runs side by side.

    Attributes:
        differences: In the order in which they came about.
        worst: By kind, the largest relative difference, also where it is within the tolerance.
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

    def has(self, *kinds: Kind) -> bool:
        """Return whether anything of these kinds differs."""
        return any(difference.kind in kinds for difference in self.differences)


def compare(
    expected: Sequence[Trace],
    found: Sequence[Trace],
    tolerance: Tolerance,
    *,
    skip: Sequence[Kind] = (),
    strided: bool = False,
) -> TraceComparison:
    """Compare runs, each as every process or share of it saw it.

    Args:
        expected: One trace, or as many as ``found``.
        found: A trace for each rank or share.
        tolerance: What counts as equal.
        skip: Kinds that are not looked at.
        strided: Whether rank r has every n-th sample from the r-th on, not a contiguous part.
    """
    worst: dict[str, float] = dict.fromkeys((kind for kind in KINDS if kind not in skip), 0.0)
    differences = []
    expected = expected if len(expected) == len(found) else list(expected) * len(found)
    for difference in _all(expected, found, tolerance, strided=strided):
        if difference.kind in skip:
            continue
        worst[difference.kind] = max(worst[difference.kind], difference.size)
        if difference.words:
            differences.append(difference)
    return TraceComparison(tuple(differences), worst)


def _all(
    expected: Sequence[Trace], found: Sequence[Trace], tolerance: Tolerance, *, strided: bool
) -> Iterator[Difference]:
    """Yield every comparison; those without words are within the tolerance."""
    for name, size in expected[0].sizes.items():
        ranks = [rank for rank, trace in enumerate(found) if trace.sizes[name] != size]
        if ranks:
            words = f"{found[ranks[0]].sizes[name]} instead of {size}"
            yield Difference("size", None, name, _some(ranks, found), math.inf, words)
    starts = [trace.initial for trace in expected], [trace.initial for trace in found]
    yield from _tensors(*starts, None, tolerance, ("initial parameter", "parameters"))
    yield from _tensors(*starts, None, tolerance, ("initial buffer", "buffers"))
    for number, step in enumerate(expected[0].steps):
        theirs, ours = [trace.steps[number] for trace in expected], [trace.steps[number] for trace in found]
        yield from _samples(theirs, ours, is_stream=expected[0].is_stream, strided=strided)
        yield from _loss(step, ours, tolerance)
        yield from _rates(step, ours)
        tensors = [one.tensors for one in theirs], [one.tensors for one in ours]
        yield from _tensors(*tensors, step.step, tolerance, ("gradient", "gradients"))
        yield from _tensors(*tensors, step.step, tolerance, ("parameter", "parameters"))
        yield from _tensors(*tensors, step.step, tolerance, ("buffer", "buffers"))


def _samples(
    expected: Sequence[StepTrace], found: Sequence[StepTrace], *, is_stream: bool, strided: bool
) -> Iterator[Difference]:
    one = expected[0].samples
    if is_stream or len(found) == 1:
        wrong = [(rank, step.samples) for rank, step in enumerate(found) if step.samples != one]
        ranks, theirs = [rank for rank, _ in wrong], wrong[0][1] if wrong else one
    else:
        parts = [step.samples for step in found]
        theirs = _interleaved(parts) if strided else tuple(sample for part in parts for sample in part)
        ranks = []
    if theirs == one:
        return
    yield Difference("sample", found[0].step, "batch", _some(ranks, found), math.inf, _sample_words(one, theirs))


def _interleaved(parts: Sequence[tuple[bytes, ...]]) -> tuple[bytes, ...]:
    longest = max(map(len, parts))
    return tuple(part[place] for place in range(longest) for part in parts if place < len(part))


def _sample_words(expected: tuple[bytes, ...], found: tuple[bytes, ...]) -> str:
    if len(found) > len(expected) and found[: len(expected)] == expected:
        extra = len(found) - len(expected)
        return f"{extra} sample{'s' * (extra > 1)} more than there are"
    if len(found) != len(expected):
        return f"{len(found)} samples instead of {len(expected)}"
    if sorted(found) == sorted(expected):
        return "the same samples in another order"
    wrong = sum(a != b for a, b in zip(expected, found, strict=True))
    return f"{wrong} of {len(expected)} samples are others"


def _loss(expected: StepTrace, found: Sequence[StepTrace], tolerance: Tolerance) -> Iterator[Difference]:
    for rank, step in enumerate(found):
        if step.loss == expected.loss or (math.isnan(step.loss) and math.isnan(expected.loss)):
            continue
        apart = abs(step.loss - expected.loss)
        size = apart / max(abs(expected.loss), tolerance.floor) if expected.loss or tolerance.floor else math.inf
        size = size if math.isfinite(size) else math.inf
        wrong = size > tolerance.relative
        words = f"{step.loss:.6g} instead of {expected.loss:.6g}" if wrong else ""
        yield Difference("loss", expected.step, "loss", (), size, words)
        if wrong or rank == len(found) - 1:
            return


def _rates(expected: StepTrace, found: Sequence[StepTrace]) -> Iterator[Difference]:
    for name in {**expected.rates, **found[0].rates}:
        ranks = [rank for rank, step in enumerate(found) if step.rates.get(name) != expected.rates.get(name)]
        if ranks:
            ours, theirs = found[ranks[0]].rates.get(name), expected.rates.get(name)
            size = abs(ours - theirs) / abs(theirs) if ours is not None and theirs else math.inf
            words = f"{ours} instead of {theirs}"
            yield Difference("learning rate", expected.step, name, _some(ranks, found), size, words)


def _tensors(
    expected: Sequence[Tensors],
    found: Sequence[Tensors],
    step: int | None,
    tolerance: Tolerance,
    what: tuple[Kind, str],
) -> Iterator[Difference]:
    kind, attribute = what
    groups: list[tuple[Mapping[str, Fingerprint], Mapping[str, Fingerprint]]] = [
        (getattr(theirs, attribute), getattr(ours, attribute)) for theirs, ours in zip(expected, found, strict=True)
    ]
    scale = math.hypot(*(one.norm for one in groups[0][0].values())) if groups[0][0] else 0.0
    scale = scale if math.isfinite(scale) and "buffer" not in kind else 0.0
    least = tolerance.floor_of(kind) * scale
    for name in {**groups[0][0], **groups[0][1]}:
        apart = [_apart(name, theirs, ours) for theirs, ours in groups]
        limits = [theirs[name].norm if name in theirs else 0.0 for theirs, _ in groups]
        limits = [tolerance.relative * max(norm, least) for norm in limits]
        sizes = [_relative(a, theirs.get(name), least) for a, (theirs, _) in zip(apart, groups, strict=True)]
        if not any(apart):
            continue
        ranks = [rank for rank, limit in enumerate(limits) if not apart[rank] <= limit]
        worst = max((sizes[rank] for rank in ranks), default=max(sizes))
        words = _tensor_words(name, *groups[ranks[0]], worst) if ranks else ""
        yield Difference(kind, step, name, _some(ranks, found), worst, words)


def _apart(name: str, expected: Mapping[str, Fingerprint], found: Mapping[str, Fingerprint]) -> float:
    if (name in expected) != (name in found):
        return math.inf
    return distance(found[name], expected[name]) if name in expected else 0.0


def _relative(apart: float, expected: Fingerprint | None, least: float) -> float:
    if apart == 0.0:
        return 0.0
    norm = max(expected.norm if expected else 0.0, least)
    return apart / norm if norm > 0 and math.isfinite(norm) else math.inf


def _tensor_words(name: str, expected: Mapping[str, Fingerprint], found: Mapping[str, Fingerprint], size: float) -> str:
    if name not in found:
        return "there is none"
    if name not in expected:
        return "there should be none"
    if expected[name].shape != found[name].shape:
        return f"of shape {found[name].shape} instead of {expected[name].shape}"
    return "not finite" if not math.isfinite(found[name].norm) else f"off by {size:.1e} of its size"


def _some(ranks: Sequence[int], found: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks, or none if it is all of them."""
    return tuple(ranks) if len(ranks) < len(found) else ()
