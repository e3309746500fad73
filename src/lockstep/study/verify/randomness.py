"""Random numbers in forward: noticed, or turned into constants that no longer depend on how a batch is divided.

Torch's are seen below autograd, where every operator that draws is tagged as such, whoever calls it and whatever
generator it uses. Python's and numpy's are seen where programs get them from: functions of the modules, and the classes
and functions that make private generators.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
