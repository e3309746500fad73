"""The sandbox of an experiment, and the features it turns off: random draws, batch statistics, writes, data, rank."""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Literal

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset, IterableDataset

from lockstep.base.accelerator import default_device
from lockstep.base.containers import map_tensors
from lockstep.base.torch_internals import BatchNorm, TorchDispatchMode, numpy_default, schema_of, tree_flatten
from lockstep.comm.process import single_process_view
from lockstep.data.order import Purpose, ShardOrder, mix, seed_cpu
from lockstep.data.shards import HasShardOrder
from lockstep.loop.instrument import Instrument
from lockstep.study.verify.fingerprint import DOUBLE, SINGLE, Fingerprint, Tolerance, fingerprint, fingerprint_model
from lockstep.train.settings import Settings
from lockstep.train.task import Loss, Task, call_optimizer, load_task

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
    """

    task: str | bytes
    settings: Settings
    num_devices: int
    num_steps: int
    steps: tuple[int, ...] = ()
    double: bool = True

    @property
    def tolerance(self) -> Tolerance:
        """How far apart numbers may be."""
        return DOUBLE if self.double else SINGLE


@dataclass(frozen=True)
class Given:
    """The data of the single process, which other runs use instead of their own.

    Attributes:
        samples: By step, the index (None in a stream) and value of each sample of the global batch.
        sizes: Of the data set and of a global batch.
        initial: The model's initial state.
        rates: Of each update: for every group, its options.
        norms: Batch norm layers of the model that train on statistics of the batch: their classes by name.
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
        watched: Whether it is a counterfactual run, with random numbers seeded by share; the plain run is not changed.
    """

    division: Division
    off: Off = frozenset()
    reproducible: int | None = None
    watched: bool = True


# Batch statistics.


class NoBatchStatistics(TorchFunctionMode):
    """Inside the block, batch norm uses its running statistics, also if it is called as a function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        bound = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
        x, mean, var = bound["input"], bound.get("running_mean"), bound.get("running_var")
        # A layer that keeps no statistics gets a mean of 0 and a variance of 1.
        mean = x.new_zeros(x.shape[1]) if mean is None else mean
        var = x.new_ones(x.shape[1]) if var is None else var
        return F.batch_norm(x, mean, var, bound.get("weight"), bound.get("bias"), False, eps=bound.get("eps", 1e-5))


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a layer is batch norm that is not frozen; instance norm uses each sample separately."""
    return module.training and (isinstance(module, BatchNorm) or "BatchNorm" in type(module).__name__)


# Random numbers and writes in forward: observed, or turned off.


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """While entered, observes random draws and writes of forward, and turns off the switches in ``off``.

    Torch's random operators are observed below autograd, where each of them has a tag, whichever generator it uses.
    Python's and NumPy's are observed where programs get them; see `generators`. A draw that is turned off returns a
    constant that does not depend on the division of the batch; a write into a parameter or a buffer is undone.

    Args:
        off: What to turn off: ``random``, ``state``.

    Attributes:
        current: The one whose `generators` are in place, if any.
        active: Whether random draws count: those of the data set do not.
        seen: By the switch that turns them off: names of the random operations, also of those that are replaced (those
            of private generators begin with a text in `PRIVATE`), of the parameters and buffers that forward changed,
            and of the operators of batch norm.
    """

    current: ClassVar[Watch | None] = None

    def __init__(self, off: Off) -> None:
        super().__init__()
        self.off, self.active = off, False
        self.seen: dict[Switch, set[str]] = {"random": set(), "state": set(), "batchnorm": set()}
        self._kept: dict[int, tuple[str, Tensor, Tensor]] = {}

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """See within what is written into parameters and buffers, also buffers that are replaced."""
        buffers = dict(model.named_buffers())
        named = {name: value.detach() for name, value in (*model.named_parameters(), *buffers.items()) if value.numel()}
        # A copy only if it is needed. By storage, because a view of a buffer is another tensor at another address.
        self._kept = {
            value.untyped_storage().data_ptr(): (name, value, value.clone() if "state" in self.off else value)
            for name, value in named.items()
        }
        try:
            yield
        finally:
            self._kept = {}
            # A buffer may also be replaced by another tensor, which no operator shows.
            for name, value in model.named_buffers():
                if name in buffers and value is not buffers[name]:
                    self.seen["state"].add(name)
                    if "state" in self.off:
                        owner, _, own_name = name.rpartition(".")
                        setattr(model.get_submodule(owner), own_name, buffers[name])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if schema_of(func).name == "aten::_local_scalar_dense" and not isinstance(args[0], Tensor):
            return args[0]  # torch passes a number that autograd has saved as a number, which the operator refuses
        if "batch_norm" in schema_of(func).name:
            self.seen["batchnorm"].add(schema_of(func).name)
        # Attention is tagged as random, but is so only with dropout.
        if self.active and torch.Tag.nondeterministic_seeded in func.tags and _dropout(func, args, kwargs) != 0.0:
            self.seen["random"].add(_name(func, args, kwargs))
            result = _constant(func, args, kwargs) if "random" in self.off else func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if self._kept and schema_of(func).is_mutable:
            written = [
                value.untyped_storage().data_ptr()
                for argument, value in zip(schema_of(func).arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
            ]
            for name, tensor, before in (self._kept[address] for address in written if address in self._kept):
                self.seen["state"].add(name)
                if "state" in self.off:
                    tensor.copy_(before)
        return result

    @contextmanager
    def generators(self) -> Iterator[None]:
        """Within, the random functions and generators of Python and NumPy are seen, too."""
        with Instrument() as instrument:
            for owner, name, stand_in in _STAND_INS:
                instrument.replace(owner, name, stand_in)
            instrument.replace(Watch, "current", self)
            yield


# [Note: random numbers of Python and NumPy]
# Libraries keep what they import: `from numpy.random import default_rng`, or NumPy's default generator, which SciPy's
# distributions hold. So there is one stand-in for each function and each class of generators in a process. It does what
# the original does, with the same bits, unless the forward of a `Watch` runs. The classes are subclasses of the
# originals, and an instance of an original counts as theirs: libraries pass generators on and check their kind.

_NO_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state", "bytes", "spawn")


def _public(kind: type) -> list[str]:
    """Return the names of the methods."""
    return [name for name in dir(kind) if name[0] != "_" and callable(getattr(kind, name))]


def _draws(kind: type) -> list[str]:
    """Return the names of the methods that draw."""
    return [name for name in _public(kind) if name not in _NO_DRAWS]


def _seen(label: str, owner: Any, name: str, constant: Callable[..., Any], *, is_method: bool) -> Callable[..., Any]:
    """Return a function that stands for one that draws; ``{}`` in ``label`` stands for its name."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if (watch := Watch.current) is None or not watch.active:
            return original(*args, **kwargs)
        watch.seen["random"].add(label.format(name))
        watch.active = False  # it may call others of these
        try:
            if "random" not in watch.off:
                return original(*args, **kwargs)
            return constant(name, *(args[1:] if is_method else args), **kwargs)
        finally:
            watch.active = True

    return draw


class _SameKind(type):
    """The class of a stand-in for a class, of which instances of the original are instances, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        original = vars(cls).get("original")  # none in a subclass that the task defines
        return super().__instancecheck__(instance) if original is None else isinstance(instance, original)


def _seen_class(label: str, kind: type, constant: Callable[..., Any]) -> Any:
    """Return a subclass of a kind of generator; ``{}`` in ``label`` stands for the name of the method that draws."""
    methods = {name: _seen(label, kind, name, constant, is_method=True) for name in _draws(kind)}
    return _SameKind(kind.__name__, (kind,), {"__module__": kind.__module__, "original": kind, **methods})


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


_PlainRandom, _PlainState, _plain_rng = random.Random, np.random.RandomState, np.random.default_rng
_Random = _seen_class("random.Random", _PlainRandom, _python_constant)
_State = _seen_class("numpy generator.{}", _PlainState, _numpy_constant)
_Generator = _seen_class("numpy generator.{}", np.random.Generator, _numpy_constant)


def _default_rng(seed: Any = None) -> Any:
    made = _plain_rng(seed)
    return made if made is seed else _Generator(made.bit_generator)


def _stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Yield module, name and stand-in of everything that draws, or makes generators, in Python and NumPy."""
    functions: dict[str, Any] = {}
    for module, kind, constant in ((random, _PlainRandom, _python_constant), (np.random, _PlainState, _numpy_constant)):
        for name in _draws(kind):
            if hasattr(module, name):
                functions[name] = _seen(f"{module.__name__}.{{}}", module, name, constant, is_method=False)
                yield module, name, functions[name]
    yield random, "Random", _Random
    yield np.random, "RandomState", _State
    yield np.random, "Generator", _Generator
    yield np.random, "default_rng", _default_rng
    # The default generator itself, from which SciPy and scikit-learn draw unless they are given another.
    owner, place, default = numpy_default()
    methods = {name: staticmethod(functions.get(name) or getattr(default, name)) for name in _public(_PlainState)}
    yield owner, place, type("RandomState", (_PlainState,), methods)()


_STAND_INS = tuple(_stand_ins())


# The names of torch's draws, and what stands for them.

# Generators other than the default ones: --reproducible does not seed them.
PRIVATE = ("torch generator.", "numpy generator.", "random.Random")


def _name(func: Any, args: Any, kwargs: Any) -> str:
    """Return the name of a draw; that of dropout has the probability, which must not depend on the rank."""
    name = schema_of(func).name.partition("::")[2]
    if isinstance(kwargs.get("generator"), torch.Generator):
        return f"torch generator.{name.strip('_')}"
    probability = args[1] if name == "native_dropout" else _dropout(func, args, kwargs)
    # Dropout on a CPU, which draws 1 for what stays; torch leaves out arguments that are the default.
    if name == "bernoulli_" and not isinstance(stays := [*args, 0.5][1], Tensor):
        probability = 1 - stays
    return f"torch {name.strip('_')}" if probability is None else f"dropout of {probability:g}"


def _dropout(func: Any, args: Any, kwargs: Any) -> float | None:
    """Return with which probability this call of attention drops out; None of other operators."""
    names = [argument.name for argument in schema_of(func).arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    return bound.get("dropout_p", 0.0) if "dropout_p" in names else None


def _constant(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what is as good as a draw but the same for every element, and not 0, which would hide what it scales."""
    name = schema_of(func).name.partition("::")[2]
    if _dropout(func, args, kwargs) is not None:
        names = [argument.name for argument in schema_of(func).arguments]
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
            return args[0].copy_(func(args[0].new_empty(1), *args[1:], **kwargs)[0])
        result = func(*args, **kwargs)
    if name == "randperm":
        return torch.arange(len(result), dtype=result.dtype, device=result.device)
    if name.startswith(("rand", "normal", "multinomial")):
        is_number = result.is_floating_point() or result.is_complex()
        return result.fill_(0.5 if is_number else int(result.flatten()[0])) if result.numel() else result
    return result


# The samples that a process loads: recorded, or replaced by those of another process.


def digest(sample: Any) -> bytes:
    """Return a digest of a sample of any structure: equal for equal values, in any process."""
    leaves, structure = tree_flatten(dict(sample) if isinstance(sample, Mapping) else sample)
    hasher = blake2b(str(structure).encode(), digest_size=12)
    for leaf in leaves:
        hasher.update(fingerprint(leaf).digest if isinstance(leaf, Tensor) else cloudpickle.dumps(leaf))
    return hasher.digest()


# Index, value and digest.
LoadedSample = tuple[int | None, Any, bytes]


class SampleRecorder:
    """Records the samples that were loaded for the current step.

    Args:
        given: The run whose samples are used instead, or None.
    """

    def __init__(self, given: Given | None) -> None:
        self.given = given
        self.step = 0
        self._pending: list[LoadedSample] = []
        self._used: list[LoadedSample] = []

    def record(self, index: int | None, sample: Any) -> Any:
        """Record a loaded sample, and return it."""
        self._pending.append((index, sample, digest(sample)))
        return sample

    def mark_used(self) -> None:
        """Assign all samples loaded so far to this step; later ones may be loaded ahead."""
        self._used += self._pending
        self._pending = []

    def end_step(self) -> list[LoadedSample]:
        """Return the samples of the step; samples loaded after the last use belong to the next step."""
        used, self._used = self._used, []
        return used

    def given_sample(self, index: int) -> Any:
        """Return the given sample for ``index`` in this step, or in a later one if it is loaded ahead."""
        assert self.given is not None
        # In order, because the same index may have another value in another epoch.
        for step in sorted(step for step in self.given.samples if step >= self.step):
            for loaded_index, sample in self.given.samples[step]:
                if loaded_index == index:
                    return sample
        raise LookupError(f"sample {index} was not loaded in step {self.step} by one process")


class RecordedSamples(Dataset[Any]):
    """A recorded data set with a length."""

    def __init__(self, samples: Any, recorder: SampleRecorder) -> None:
        self._samples, self._recorder = samples, recorder

    def __len__(self) -> int:
        """Return the number of samples."""
        given = self._recorder.given
        return len(self._samples) if given is None else int(given.sizes["samples of the data set"] or 0)

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        is_own = self._recorder.given is None
        return self._recorder.record(index, self._samples[index] if is_own else self._recorder.given_sample(index))


class RecordedShards(RecordedSamples):
    """A recorded data set that is read in an order of its own."""

    def make_order(self, batch_size: int, seed: int, *, drop_last: bool) -> ShardOrder:
        """Return the order of the data set."""
        order: ShardOrder = self._samples.make_order(batch_size, seed, drop_last=drop_last)
        return order


class RecordedStream(IterableDataset[Any]):
    """A recorded stream."""

    def __init__(self, stream: Any, recorder: SampleRecorder) -> None:
        self._stream, self._recorder = stream, recorder

    def __iter__(self) -> Iterator[Any]:
        """Return the samples."""
        given, stream = self._recorder.given, self._stream
        if given is not None:
            stream = [sample for step in sorted(given.samples) for _, sample in given.samples[step]]
        for sample in stream:
            yield self._recorder.record(None, sample)


class Sandbox:
    """The common state of one experiment's runs in this process; created by `open_sandbox`.

    Attributes:
        watch: Observes the random draws and the writes of forward.
        tasks: The copies of the task, one for each share that this process computes.
        outside: Parameters that losses depend on, but no module registers: by id, each with its first digest.
    """

    def __init__(self, subject: Subject, experiment: Experiment, given: Given) -> None:
        self.subject, self.experiment, self.given = subject, experiment, given
        self.watch = Watch(experiment.off)
        self.tasks: list[SandboxedTask] = []
        self.outside: dict[int, tuple[nn.Parameter, bytes]] = {}

    def load_task(self, share: int) -> SandboxedTask:
        """Return a fresh copy of the task for share ``share``; the whole batch counts as share 0."""
        task = self.subject.task
        with self.rank_view():
            plain = load_task(task) if isinstance(task, str) else cloudpickle.loads(task)
            self.tasks.append(SandboxedTask(self, share, plain))
        return self.tasks[-1]

    def rank_view(self) -> AbstractContextManager[None]:
        """Return the context for the task's own code, which may hide the rank from it."""
        return single_process_view() if "place" in self.experiment.off else nullcontext()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Compute ``step`` in this context; the experiment's settings apply only inside it."""
        for task in self.tasks:
            task.begin(step)
        with ExitStack() as stack:
            stack.enter_context(self.rank_view())  # backward and update also run the task's code
            if "batchnorm" in self.experiment.off:
                stack.enter_context(NoBatchStatistics())
            if self.experiment.watched:
                stack.enter_context(self.watch)
            try:
                yield
            finally:
                # Forward has turned it on. It stays on in backward, which may draw again, as in checkpointing.
                self.watch.active = False


class SandboxedTask:
    """One process's copy of the task, for the training loop.

    Attributes:
        task: The task, changed to record what the experiment needs and to turn features off.
        recorder: Records the samples that its data set loads.
        rates: Of each update, the options of the optimizer's groups.
        built: The model.
        is_stream: Whether its data set has no length.
        gradients: The gradients before the optimizer's step, which may change them.
    """

    def __init__(self, sandbox: Sandbox, share: int, plain: Task) -> None:
        self._sandbox, self._share, self._plain = sandbox, share, plain
        self._step = self._num_calls = 0
        self.rates: list[list[dict[str, Any]]] = []
        self.gradients: dict[str, Fingerprint] | None = None
        self.built: nn.Module | None = None
        self.is_stream = False
        is_given = "data" in sandbox.experiment.off
        self.recorder = SampleRecorder(sandbox.given if is_given else None)
        others: dict[str, Any] = {}
        if is_given:
            others["global_batch_size"] = sandbox.given.sizes["samples of a global batch"]
        if plain.collate is not None:
            others["collate"] = self._collate
        self.task = replace(
            plain, model=self._model, dataset=self._dataset, loss=self._loss, optimizer=self._optimizer, **others
        )

    def begin(self, step: int) -> None:
        """Prepare for ``step``."""
        self._step, self._num_calls, self.recorder.step = step, 0, step
        self.gradients = None

    def _dataset(self) -> Any:
        with self._sandbox.rank_view():
            samples = self._plain.dataset()
        self.is_stream = isinstance(samples, IterableDataset)
        if self.is_stream:
            return RecordedStream(samples, self.recorder)
        return (RecordedShards if isinstance(samples, HasShardOrder) else RecordedSamples)(samples, self.recorder)

    def _collate(self, samples: list[Any]) -> Any:
        assert self._plain.collate is not None
        self._set_seed()
        with self._sandbox.rank_view():
            self._sandbox.watch.active = True
            batch = self._plain.collate(samples)
            self._sandbox.watch.active = False
        return batch

    def _set_seed(self) -> None:
        """Seed the random numbers of forward by step and share, or by step alone if shares must not differ."""
        if self._sandbox.experiment.watched:
            share = 0 if "random" in self._sandbox.experiment.off else self._share
            seed = self._sandbox.subject.settings.seed
            seed_cpu(mix(seed, Purpose.COUNTERFACTUAL, self._step, self._num_calls, share))

    def _model(self) -> nn.Module:
        experiment = self._sandbox.experiment
        with self._sandbox.rank_view():
            model = self._plain.model()
        if not isinstance(model, nn.Module):
            return model  # type: ignore[unreachable]  # the loop's own error explains what is wrong
        # Also parameters that the task creates with an explicit dtype.
        if self._sandbox.subject.double:
            model = model.double()
        if "initial" in experiment.off:
            model.load_state_dict({**model.state_dict(), **self._sandbox.given.initial})
        self.built = model
        return model

    def _optimizer(self, model: nn.Module) -> Any:
        with self._sandbox.rank_view():
            optimizer = call_optimizer(self._plain.optimizer, model)
        if isinstance(optimizer, Optimizer):
            optimizer.register_step_pre_hook(self._before_update)
        return optimizer  # if it is none, the loop's own error explains what is wrong

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Set the rates of the single-process run, if the experiment requires it, and record the rates."""
        if self.gradients is not None:
            return  # the task's own optimizer may call torch's, which calls this again
        assert self.built is not None
        # Recorded now: the loop has divided and clipped them, and some optimizers write into them.
        self.gradients = fingerprint_model(self.built)["gradient"]
        number, given = len(self.rates), self._sandbox.given.rates
        if "rates" in self._sandbox.experiment.off and number < len(given):
            for group, rates in zip(optimizer.param_groups, given[number], strict=False):
                group.update({key: value for key, value in rates.items() if key in group})
        self.rates.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])

    def _loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        sandbox, off = self._sandbox, self._sandbox.experiment.off
        self.recorder.mark_used()
        # Here instead of in the data set, because samples must have the same bits in all experiments.
        if sandbox.subject.double:
            batch = map_tensors(batch, _to_double)
        self._set_seed()
        self._num_calls += 1
        if "batchnorm" in off:  # the values that they would write into their running statistics
            for module in model.modules():
                if is_batch_norm(module):
                    module.eval()
        with sandbox.rank_view(), sandbox.watch.forward(model) if sandbox.experiment.watched else nullcontext():
            sandbox.watch.active = True
            result = self._plain.loss(model, batch)
        if not sandbox.experiment.watched:
            ids = {*map(id, model.parameters()), *sandbox.outside}
            for leaf in _leaves(result.total if isinstance(result, Loss) else result):
                if id(leaf) not in ids:
                    sandbox.outside[id(leaf)] = leaf, fingerprint(leaf).digest
        if "weights" not in off:
            return result
        factor = sandbox.given.factors[self._step][self._share]
        if factor == 0.0:  # the value may not be finite
            return sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
        return (result.total / result.count if isinstance(result, Loss) else result) * factor


def _leaves(loss: Tensor) -> Iterator[nn.Parameter]:
    """Yield the parameters that ``loss`` depends on, also parameters outside of the model."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen:
            seen.add(node)
            nodes += [child for child, _ in node.next_functions]
            if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
                yield leaf


def _to_double(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def open_sandbox(subject: Subject, experiment: Experiment, given: Given) -> Iterator[Sandbox]:
    """Create a sandbox for one run; turn off some features before the task is loaded; undo everything at the end."""
    sandbox = Sandbox(subject, experiment, given)
    # The callback restores what is set after it, even if the task's file raises.
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.enter_context(_modules_forgotten(subject.task))
        # Also in plain runs, in which libraries may be imported that keep what they import.
        stack.enter_context(sandbox.watch.generators())
        if subject.double:
            torch.set_default_dtype(torch.float64)
        yield sandbox


@contextmanager
def _modules_forgotten(task: str | bytes) -> Iterator[None]:
    """At the end, forget modules in the folder of the task's file, so that the next run imports them again."""
    kept_path, modules_before = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = kept_path
        # Only files in the task's folder: a library that is imported twice has two copies of each class.
        folder = Path(task.rpartition(".py")[0]).resolve().parent if isinstance(task, str) else None
        for name in set(sys.modules) - modules_before:
            file = getattr(sys.modules[name], "__file__", None)
            if folder is not None and file and Path(file).resolve().is_relative_to(folder):
                del sys.modules[name]
