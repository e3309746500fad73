"""What an experiment turns off, one thing at a time: random draws, batch statistics, writes."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.train.settings import Settings

# One process with the whole batch; one that computes what N ranks would, share after share; or N real ranks.
Division = Literal["one", "shares", "ranks"]

Switch = Literal[
    "data",  # every process trains on the samples that one process loaded
    "initial",  # ... starts from its initial weights
    "rates",  # ... uses its learning rates
    "random",  # random numbers in forward are constants
    "state",  # what forward writes into buffers and parameters is undone
    "batchnorm",  # batch norm uses its running statistics
    "weights",  # each share counts as much as the whole batch asks for
    "place",  # the task sees rank 0 of 1
]

Off = frozenset[Switch]


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        task: Where it is (``FILE.py`` or ``FILE.py:NAME``), or the task itself, pickled: each run gets a fresh one.
        settings: As for training.
        num_devices: Ranks, or shares where one process stands for them.
        num_steps: How many are asked for.
        steps: Which ones; worked out by the first run.
        double: Whether to compute in float64.
    """

    task: str | bytes
    settings: Settings
    num_devices: int
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
        norms: Batch norm layers of the model: their classes by name.
        factors: By step, what the loss of each share is to be multiplied by.
    """

    samples: dict[int, list[tuple[int | None, Any]]] = field(default_factory=dict)
    sizes: dict[str, int | None] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    rates: list[list[dict[str, Any]]] = field(default_factory=list)
    norms: dict[str, str] = field(default_factory=dict)
    factors: dict[int, tuple[float, ...]] = field(default_factory=dict)


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


# Batch statistics and writes to buffers.


class NoBatchStatistics(TorchFunctionMode):
    """Within, batch norm uses its running statistics, also where it is called as a function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
        x, mean, var = given["input"], given.get("running_mean"), given.get("running_var")
        # A layer that keeps no statistics gets a mean of 0 and a variance of 1.
        mean = x.new_zeros(x.shape[1]) if mean is None else mean
        var = x.new_ones(x.shape[1]) if var is None else var
        return F.batch_norm(x, mean, var, given.get("weight"), given.get("bias"), False, eps=given.get("eps", 1e-5))


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a layer is batch norm of some kind; instance norm keeps to each sample."""
    kind = nn.modules.batchnorm._BatchNorm
    return isinstance(module, kind) or "BatchNorm" in type(module).__name__


class NoWrites(TorchDispatchMode):
    """While entered and within `during`, undoes what is written into a model's parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def during(self, model: nn.Module) -> Iterator[None]:
        """Undo writes within, and buffers that were replaced."""
        tensors = [*model.parameters(), *model.buffers()]
        # A buffer may also be replaced by another tensor, which no operator shows.
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
                # By storage, because a view of a buffer is another tensor at another address.
                if is_written and isinstance(value, Tensor) and _address(value) in self._kept:
                    tensor, before = self._kept[_address(value)]
                    tensor.copy_(before)
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Random numbers in forward: recorded, or turned into constants that do not depend on how a batch is divided.

_NO_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state", "bytes")
# Kept, as `Draws.watching` puts others in their place.
_PlainRandom, _PlainState, _plain_rng = random.Random, np.random.RandomState, np.random.default_rng


class Draws(TorchDispatchMode):
    """While entered and ``active``, records every random draw; with ``off``, replaces it by a constant.

    Torch's are seen below autograd, where every operator that draws is tagged as such, whoever calls it and whatever
    generator it uses. Python's and numpy's are seen where programs get them from: functions of the modules, and the
    classes and functions that make private generators.

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
        # Attention is tagged as random, but is so only with dropout.
        is_random = torch.Tag.nondeterministic_seeded in func.tags and _dropout(func, args, kwargs) != 0.0
        if not self.active or not is_random:
            return func(*args, **kwargs)
        self.seen.add(f"torch {func._schema.name.partition('::')[2].strip('_')}")
        return _constant(func, args, kwargs) if self.off else func(*args, **kwargs)

    def _watch(self, name: str, original: Callable[..., Any], constant: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that stands for ``original`` of Python's or numpy's generators."""

        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            self.seen.add(name)  # also where it is replaced: the evidence names what forward draws
            return constant(*args, **kwargs) if self.off else original(*args, **kwargs)

        return draw

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, Python's and numpy's random functions and private generators are seen too."""
        # All names at once: the functions are bound to one generator each when the modules are imported.
        kept = [(module, dict(vars(module))) for module in (random, np.random)]
        try:
            for module, kind, constant in (
                (random, random.Random, _python_constant),
                (np.random, np.random.RandomState, _numpy_constant),
            ):
                for name in dir(kind):
                    function = getattr(module, name, None)
                    if callable(function) and not name.startswith("_") and name not in _NO_DRAWS:
                        stand_in = functools.partial(constant, name)
                        setattr(module, name, self._watch(f"{module.__name__}.{name}", function, stand_in))
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
                return draws._watch("random.Random", super().random, lambda: 0.5)()  # type: ignore[no-any-return]

            def getrandbits(self, k: int, /) -> int:
                return draws._watch("random.Random", super().getrandbits, lambda _: 0)(k)  # type: ignore[no-any-return]

        return Private

    def _private_numpy(self, make: Callable[..., Any]) -> Callable[..., Any]:
        draws = self

        class Private:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._real = make(*args, **kwargs)

            def __getattr__(self, name: str) -> Any:
                value, constant = getattr(self._real, name), functools.partial(_numpy_constant, name)
                return draws._watch(f"numpy generator.{name}", value, constant) if callable(value) else value

        return Private


def _dropout(func: Any, args: Any, kwargs: Any) -> float | None:
    """Return with which probability this call of attention drops out; None of other operators."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get("dropout_p", 0.0) if "dropout_p" in names else None


def _constant(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what is as good as a draw but the same for every element, and not 0, which would hide what it scales."""
    name = func._schema.name.partition("::")[2]
    if _dropout(func, args, kwargs) is not None:
        names = [argument.name for argument in func._schema.arguments]
        return func(**dict(zip(names, args, strict=False)) | kwargs | {"dropout_p": 0.0})
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if name in ("bernoulli", "bernoulli_"):
        probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if name == "bernoulli_" else args[0])
        target: Tensor = args[0] if name == "bernoulli_" else args[0].clone()
        return target.copy_(torch.as_tensor(probability))
    # A generator of the task's own must not advance: how often would again depend on the division.
    if isinstance(kwargs.get("generator"), torch.Generator):
        kwargs = {**kwargs, "generator": None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name.endswith("_"):  # one number of that distribution: more are drawn another way from 16 on
            return args[0].copy_(func(args[0].new_empty(1), *args[1:], **kwargs))
        result = func(*args, **kwargs)
    if name == "randperm":
        return torch.arange(len(result), dtype=result.dtype, device=result.device)
    if name.startswith(("rand", "normal", "multinomial")):
        is_number = result.is_floating_point() or result.is_complex()
        return result.fill_(0.5 if is_number else int(result.flatten()[0])) if result.numel() else result
    return result


def _python_constant(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(_PlainRandom(0), name)(*args, **kwargs)


def _numpy_constant(name: str, *args: Any, **kwargs: Any) -> Any:
    if name == "shuffle":
        return None
    if name in ("permutation", "permuted") and args:
        return np.arange(args[0]) if isinstance(args[0], int) else np.array(args[0])
    # Methods that only the newer generators have, such as integers.
    maker: Any = _PlainState if hasattr(_PlainState, name) else _plain_rng
    result = getattr(maker(0), name)(*args, **kwargs)
    return np.full_like(result, result.flat[0]) if isinstance(result, np.ndarray) and result.size else result
