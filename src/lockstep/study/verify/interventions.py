"""The features that an experiment turns off, one at a time: random draws, batch statistics, writes."""

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

from lockstep.accelerator import default_device
from lockstep.train.settings import Settings, StrategyName

# One process with the whole batch; one that simulates N ranks, share after share; or N real ranks.
Division = Literal["one", "shares", "ranks"]

Switch = Literal[
    "data",  # every process trains on the samples that one process loaded
    "initial",  # ... starts from its initial weights
    "rates",  # ... uses its learning rates
    "random",  # random numbers in forward are constants
    "state",  # writes of forward into buffers and parameters are undone
    "batchnorm",  # batch norm uses its running statistics
    "weights",  # each share has the weight that the whole batch requires
    "place",  # the task sees rank 0 of 1
]

Off = frozenset[Switch]


@dataclass(frozen=True)
class Subject:
    """The task to examine.

    Attributes:
        task: Where it is (``FILE.py`` or ``FILE.py:NAME``), or the task itself, pickled: each run gets a new copy.
        settings: As for training.
        num_devices: Ranks, or shares if one process simulates them.
        num_steps: The requested number of steps.
        steps: The steps; determined by the first run.
        double: Whether to compute in float64.
        shows: Whether processes report their progress.
    """

    task: str | bytes
    settings: Settings
    num_devices: int
    num_steps: int
    steps: tuple[int, ...] = ()
    double: bool = True
    shows: bool = False


@dataclass(frozen=True)
class Given:
    """The data of the single process, which other runs use instead of their own.

    Attributes:
        samples: By step, the index (None in a stream) and value of each sample of the global batch.
        sizes: Of the data set and of a global batch.
        initial: The model's initial state.
        rates: Of each update: for every group, its options.
        norms: Batch norm layers of the model: their classes by name.
        factors: By step, the factor of each share's loss.
        outside: The shapes of parameters that it trained, but that no module of the model registers.
    """

    samples: dict[int, list[tuple[int | None, Any]]] = field(default_factory=dict)
    sizes: dict[str, int | None] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    rates: list[list[dict[str, Any]]] = field(default_factory=list)
    norms: dict[str, str] = field(default_factory=dict)
    factors: dict[int, tuple[float, ...]] = field(default_factory=dict)
    outside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """One run.

    Attributes:
        reproducible: Number of virtual shards, or None for the ordinary mode.
        convert: Whether batch norm layers are replaced by `lockstep.SyncBatchNorm`.
        watched: Whether it is a counterfactual run, with random numbers seeded by share; the plain run is not changed.
        strategy: Of ranks.
        is_sgd: Whether parameters are updated by SGD instead of the task's optimizer.
    """

    division: Division
    off: Off = frozenset()
    reproducible: int | None = None
    convert: bool = False
    watched: bool = True
    strategy: StrategyName = "ddp"
    is_sgd: bool = False


# Batch statistics and writes to buffers.


class NoBatchStatistics(TorchFunctionMode):
    """Inside the block, batch norm uses its running statistics, also if it is called as a function."""

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
    """Return whether a layer is batch norm of some kind; instance norm uses each sample separately."""
    kind = nn.modules.batchnorm._BatchNorm
    return isinstance(module, kind) or "BatchNorm" in type(module).__name__


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Random numbers and writes in forward: observed, or turned off.

_NO_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state", "bytes")
# Kept, because `Watch.generators` replaces them.
_PlainRandom, _PlainState, _plain_rng = random.Random, np.random.RandomState, np.random.default_rng


class Watch(TorchDispatchMode):
    """While entered, observes random draws and writes of forward, and turns off those in ``off``.

    Torch's random operators are observed below autograd, where each of them has a tag, whichever generator it uses.
    Python's and NumPy's are observed where programs get them: functions of the modules, and the classes and functions
    that create private generators. A draw that is turned off returns a constant that does not depend on the division of
    the batch; a write into a parameter or a buffer is undone.

    Args:
        off: What to turn off: ``random``, ``state``.

    Attributes:
        active: Whether random draws count: those of the data set do not.
        draws: Names of the random operations.
        live: The switches that have an effect on the task: it draws, writes, or uses batch norm.
    """

    def __init__(self, off: Off) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.off, self.active = off, False
        self.draws: set[str] = set()
        self.live: set[Switch] = set()
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """See within what is written into parameters and buffers, also buffers that are replaced."""
        tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()]
        # A buffer may also be replaced by another tensor, which no operator shows.
        owners = [(module, dict(module._buffers)) for module in model.modules()]
        # A copy only if it is needed.
        self._kept = {_address(one): (one, one.clone() if "state" in self.off else one) for one in tensors}
        try:
            yield
        finally:
            self._kept = {}
            for module, buffers in owners:
                if any(module._buffers.get(name) is not buffer for name, buffer in buffers.items()):
                    self.live.add("state")
                if "state" in self.off:
                    module._buffers.update(buffers)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "batch_norm" in func._schema.name:
            self.live.add("batchnorm")
        # Attention is tagged as random, but is so only with dropout.
        if self.active and torch.Tag.nondeterministic_seeded in func.tags and _dropout(func, args, kwargs) != 0.0:
            self._note_draw(f"torch {func._schema.name.partition('::')[2].strip('_')}")
            result = _constant(func, args, kwargs) if "random" in self.off else func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if self._kept and func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                # By storage, because a view of a buffer is another tensor at another address.
                if is_written and isinstance(value, Tensor) and _address(value) in self._kept:
                    self.live.add("state")
                    tensor, before = self._kept[_address(value)]
                    if "state" in self.off:
                        tensor.copy_(before)
        return result

    def _note_draw(self, name: str) -> None:
        self.draws.add(name)
        self.live.add("random")

    def _watch(self, name: str, original: Callable[..., Any], constant: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that stands for ``original`` of Python's or NumPy's generators."""

        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            self._note_draw(name)  # also where it is replaced: the evidence names what forward draws
            return constant(*args, **kwargs) if "random" in self.off else original(*args, **kwargs)

        return draw

    @contextmanager
    def generators(self) -> Iterator[None]:
        """Within, the random functions and private generators of Python and NumPy are seen too."""
        # Now: the first operator that is seen would import it, and it creates a generator.
        import torch._dynamo  # noqa: F401

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
        watch = self

        class Private(random.Random):
            def random(self) -> float:
                return watch._watch("random.Random", super().random, lambda: 0.5)()  # type: ignore[no-any-return]

            def getrandbits(self, k: int, /) -> int:
                return watch._watch("random.Random", super().getrandbits, lambda _: 0)(k)  # type: ignore[no-any-return]

        return Private

    def _private_numpy(self, make: Callable[..., Any]) -> Callable[..., Any]:
        watch = self

        class Private:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._real = make(*args, **kwargs)

            def __getattr__(self, name: str) -> Any:
                value, constant = getattr(self._real, name), functools.partial(_numpy_constant, name)
                return watch._watch(f"numpy generator.{name}", value, constant) if callable(value) else value

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
    # Without a list it is the state of every device, with a warning where there are several; torch 2.11 assumes CUDA.
    here = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    with torch.random.fork_rng(here, device_type=default_device().type):
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
