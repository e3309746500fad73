"""What an experiment turns off, one thing at a time: random draws, batch statistics, writes, the samples' order."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal
from unittest.mock import patch

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, IterableDataset

from lockstep.train.settings import Settings
from lockstep.train.task import Task

# An experiment: who computes, and what is turned off.

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


# Turn off, for a while, other things that a run may hang on: batch statistics, writes to buffers, the outside.


class NoBatchStatistics(TorchFunctionMode):
    """Within, batch norm uses its running statistics, also where it is called as a function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return _by_running(*args, **kwargs)
        if func is torch.batch_norm:
            x, weight, bias, mean, var, _, momentum, eps, _ = args
            return _by_running(x, mean, var, weight, bias, True, momentum, eps)
        return func(*args, **kwargs)


def _by_running(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return what batch norm gives in evaluation; with a mean of 0 and a variance of 1 where it keeps none."""
    mean = x.new_zeros(x.shape[1]) if running_mean is None else running_mean
    var = x.new_ones(x.shape[1]) if running_var is None else running_var
    return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a layer is batch norm of some kind; instance norm keeps to each sample."""
    kind = nn.modules.batchnorm._BatchNorm
    return isinstance(module, kind) or "BatchNorm" in type(module).__name__


def is_synchronised(module: nn.Module) -> bool:
    """Return whether a layer talks to other ranks in forward, so that one process cannot stand for them."""
    return is_batch_norm(module) and "Sync" in type(module).__name__


class NoWrites(TorchDispatchMode):
    """While entered and within `during`, undoes what is written into a model's parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def during(self, model: nn.Module) -> Iterator[None]:
        """Undo writes within, and buffers that were replaced."""
        tensors = [*model.parameters(), *model.buffers()]
        owners = [(module, dict(module._buffers)) for module in model.modules()]
        with torch.no_grad():
            self._kept = {_address(t): (t.detach(), t.detach().clone()) for t in tensors if t.numel()}
        try:
            yield
        finally:
            self._kept = {}
            for module, buffers in owners:
                module._buffers.update(buffers)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._kept and func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                if is_written and isinstance(value, Tensor) and _address(value) in self._kept:
                    tensor, before = self._kept[_address(value)]
                    tensor.copy_(before)
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def outside_stands_still() -> Iterator[None]:
    """Within, the clock stands still and the system's random numbers are always the same.

    The monotonic clock goes on: others wait by it.
    """

    def system_bytes(size: int) -> bytes:
        return b"\x2a" * size

    plain = random.Random

    class Seeded(plain):  # type: ignore[misc, valid-type]
        def __init__(self, x: Any = 0) -> None:
            super().__init__(0 if x is None else x)

    with (
        patch.object(time, "time", lambda: 1e9),
        patch.object(time, "time_ns", lambda: 10**18),
        patch.object(time, "perf_counter", lambda: 1e3),
        patch.object(time, "perf_counter_ns", lambda: 10**12),
        patch.object(os, "urandom", system_bytes),
        patch.object(random, "_urandom", system_bytes),
        patch.object(random, "Random", Seeded),
        patch.object(torch, "seed", lambda: int(torch.manual_seed(42).initial_seed())),
    ):
        yield


# Random numbers in forward: noticed, or turned into constants that no longer depend on how a batch is divided.
#
# Torch's are seen below autograd, where every operator that draws is tagged as such, whoever calls it and whatever
# generator it uses. Python's and numpy's are seen where programs get them from: functions of the modules, and the
# classes and functions that make private generators.

_NO_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state", "bytes")


class Draws(TorchDispatchMode):
    """While entered and ``active``, notes every random draw; with ``off``, replaces it by a constant.

    Args:
        off: Whether to replace draws.

    Attributes:
        active: Whether forward is running: what the data set draws is another matter.
        seen: Names of the operations.
    """

    def __init__(self, *, off: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.off, self.active = off, False
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active or torch.Tag.nondeterministic_seeded not in func.tags or not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        self.seen.add(f"torch {func._schema.name.partition('::')[2].strip('_')}")
        return _constant(func, args, kwargs) if self.off else func(*args, **kwargs)

    def call(self, name: str, original: Callable[..., Any], fixed: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that stands for ``original`` of Python's or numpy's generators."""

        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            self.seen.add(name)
            return fixed(*args, **kwargs) if self.off else original(*args, **kwargs)

        return draw

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, Python's and numpy's random functions and private generators are seen too."""
        kept = [(module, dict(vars(module))) for module in (random, np.random)]
        try:
            for module, kind, fixed in ((random, random.Random, _python), (np.random, np.random.RandomState, _numpy)):
                for name in dir(kind):
                    function = getattr(module, name, None)
                    if callable(function) and not name.startswith("_") and name not in _NO_DRAWS:
                        setattr(module, name, self.call(f"{module.__name__}.{name}", function, fixed(name)))
            random.Random = self._private_python()  # type: ignore[misc]
            for maker in ("default_rng", "RandomState"):
                setattr(np.random, maker, self._private_numpy(getattr(np.random, maker)))
            yield
        finally:
            for module, names in kept:
                vars(module).update(names)

    def _private_python(self) -> type[random.Random]:
        draws = self

        class Private(random.Random):
            def random(self) -> float:
                value = super().random()
                return draws.call("random.Random", lambda: value, lambda: 0.5)()  # type: ignore[no-any-return]

            def getrandbits(self, k: int, /) -> int:
                value = super().getrandbits(k)
                return draws.call("random.Random", lambda: value, lambda: 0)()  # type: ignore[no-any-return]

        return Private

    def _private_numpy(self, make: Callable[..., Any]) -> Callable[..., Any]:
        draws = self

        class Private:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._real = make(*args, **kwargs)

            def __getattr__(self, name: str) -> Any:
                value = getattr(self._real, name)
                return draws.call(f"numpy generator.{name}", value, _numpy(name)) if callable(value) else value

        return Private


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether this call draws: attention is tagged as random, but is so only with dropout."""
    index = _place(func, "dropout_p")
    if index is None:
        return True
    return bool(kwargs.get("dropout_p", args[index] if index < len(args) else 0.0))


def _place(func: Any, name: str) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index(name) if name in names else None


def _constant(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what is as good as a draw but the same for every element: a middling value of the distribution."""
    name = func._schema.name.partition("::")[2]
    place = _place(func, "dropout_p")
    if place is not None:
        kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*(0.0 if index == place else value for index, value in enumerate(args)), **kwargs)
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if name in ("bernoulli", "bernoulli_"):
        probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if name == "bernoulli_" else args[0])
        target: Tensor = args[0] if name == "bernoulli_" else args[0].clone()
        return target.copy_(torch.as_tensor(probability))
    result = _from_fresh_seed(func, args, kwargs)
    if name == "randperm":
        return torch.arange(len(result), dtype=result.dtype, device=result.device)
    if name == "multinomial":
        most = args[0].shape[-1]
        return args[0].topk(result.shape[-1], dim=-1).indices if result.shape[-1] <= most else result.zero_()
    if name.startswith(("rand", "uniform", "normal", "exponential", "log_normal", "cauchy", "geometric", "random")):
        if result.is_floating_point() or result.is_complex():
            return result.fill_(_middle(name, args, kwargs))
        return result.fill_(int(result.flatten()[0])) if result.numel() else result
    return result


def _middle(name: str, args: Any, kwargs: Any) -> float:
    """Return a value that is neither 0, which would hide what is multiplied by it, nor at the edge."""
    if name == "uniform_":
        low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])[:2]
        return float(kwargs.get("from", low) + kwargs.get("to", high)) / 2
    if name == "normal_":
        mean, std = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])[:2]
        return float(kwargs.get("mean", mean) + 0.5 * kwargs.get("std", std))
    return 0.5


def _from_fresh_seed(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw from a generator that was just seeded, and leave all generators as they were."""
    if isinstance(kwargs.get("generator"), torch.Generator):
        kwargs = {**kwargs, "generator": None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return func(*args, **kwargs)


def _python(name: str) -> Callable[..., Any]:
    def fixed(*args: Any, **kwargs: Any) -> Any:
        return getattr(_PlainRandom(0), name)(*args, **kwargs)

    return fixed


_PlainRandom, _PlainState, _plain_rng = random.Random, np.random.RandomState, np.random.default_rng


def _numpy(name: str) -> Callable[..., Any]:
    def fixed(*args: Any, **kwargs: Any) -> Any:
        if name == "shuffle":
            return None
        if name in ("permutation", "permuted") and args:
            return np.arange(args[0]) if isinstance(args[0], int) else np.array(args[0])
        maker: Any = _PlainState if hasattr(_PlainState, name) else _plain_rng
        result = getattr(maker(0), name)(*args, **kwargs)
        return np.full_like(result, result.flat[0]) if isinstance(result, np.ndarray) and result.size else result

    return fixed


# The samples that a process loads: noted, and replaced by those that another process had.


def digest(sample: Any) -> bytes:
    """Return a digest of a sample of any structure: equal for equal values, in any process."""
    found = blake2b(digest_size=12)
    for part in _parts(sample):
        found.update(part)
    return found.digest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        yield f"{tuple(dense.shape)}{dense.dtype}".encode()
        yield dense.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.shape}{value.dtype}".encode() + value.tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from _parts(item)
    elif isinstance(value, (str, bytes, int, float, complex, type(None))):
        yield repr(value).encode()
    else:
        yield cloudpickle.dumps(value)


class Watch:
    """Keeps what was loaded for the step that is being computed.

    Args:
        given: Where samples are taken from instead, or None.
    """

    def __init__(self, given: Given | None) -> None:
        self.given = given
        self.step = 0
        self._pending: list[tuple[int | None, Any, bytes]] = []
        self._used: list[tuple[int | None, Any, bytes]] = []

    def note(self, index: int | None, sample: Any) -> None:
        """Take note of a sample that was loaded."""
        self._pending.append((index, sample, digest(sample)))

    def use(self) -> None:
        """All that was loaded until now belongs to this step; what comes may be loaded ahead."""
        self._used += self._pending
        self._pending = []

    def end_step(self, *, ahead: bool) -> list[tuple[int | None, Any, bytes]]:
        """Return what the step loaded; ``ahead``: what came after the last use is of the next step."""
        if not ahead:
            self.use()
        used, self._used = self._used, []
        return used

    def replace(self, index: int) -> Any:
        """Return the sample that was given for ``index`` in this step, or in the next if it is loaded ahead."""
        assert self.given is not None
        later = [step for step in sorted(self.given.samples) if step >= self.step]
        for step in later:
            for known, sample in self.given.samples[step]:
                if known == index:
                    return sample
        raise LookupError(f"sample {index} was not loaded in step {self.step} by one process")


class WatchedSamples(Dataset[Any]):
    """A data set with a length, watched."""

    def __init__(self, samples: Any, watch: Watch) -> None:
        self._samples, self._watch = samples, watch

    def __len__(self) -> int:
        """Return the number of samples."""
        given = self._watch.given
        return len(self._samples) if given is None else int(given.sizes["samples of the data set"] or 0)

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        sample = self._samples[index] if self._watch.given is None else self._watch.replace(index)
        self._watch.note(index, sample)
        return sample


class WatchedStream(IterableDataset[Any]):
    """A stream, watched."""

    def __init__(self, stream: Any, watch: Watch) -> None:
        self._stream, self._watch = stream, watch

    def __iter__(self) -> Iterator[Any]:
        """Return the samples."""
        given = self._watch.given
        for sample in self._stream if given is None else _in_order(given):
            self._watch.note(None, sample)
            yield sample


def _in_order(given: Given) -> Iterator[Any]:
    for step in sorted(given.samples):
        for _, sample in given.samples[step]:
            yield sample


def watched(samples: Any, watch: Watch) -> Any:
    """Return ``samples``, watched."""
    return WatchedStream(samples, watch) if isinstance(samples, IterableDataset) else WatchedSamples(samples, watch)
