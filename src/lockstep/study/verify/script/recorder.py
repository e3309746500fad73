"""The trace of a script: what its loaders, models and optimizers do in one rank, recorded as it happens."""

import atexit
import gc
import os
import pickle
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from lockstep.comm.fully_shard import is_sharded
from lockstep.containers import find_tensors
from lockstep.data.loader import HasEpochs
from lockstep.data.order import mix, seed_cpu
from lockstep.errors import ConfigurationError
from lockstep.study.verify.fingerprint import Fingerprint, ModelFingerprint, fingerprint, read_rates
from lockstep.study.verify.interventions import NoBatchStatistics, Watch, is_batch_norm
from lockstep.study.verify.script.trace import Pass, ScriptStep, ScriptTrace
from lockstep.telemetry.instrument import Instrument, in_backward
from lockstep.torch_internals import INDEX_SAMPLER, BaseDataLoaderIter, describe_node
from lockstep.train.checkpoints.model_state import unwrap

# [Note: the script is cut short]
# A script is not changed, but its passes over its loaders are shorter. A pass that trains has a few updates and then
# the last batches of the pass; one that evaluates has the first batches and the last. The samplers are read to their
# end, so it is known what a whole pass would have loaded. After `_NUM_EPOCHS` passes that train, the others have one
# batch.
# All of this depends on counts only, which are the same on all ranks of a script without errors.

_NUM_EPOCHS = 3
# Updates of a pass over a stream.
_NUM_OF_STREAM = 20
# After so many passes of one batch the script ends: it may train until it has made a number of updates.
_NUM_LATE = 40

# Collectives that may combine what the ranks have evaluated.
_COMBINING = ("allreduce", "allgather", "_allgather", "gather", "reduce")

_PRECISIONS = {torch.float64: "float64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

# Attributes of every module.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


class _ShortSampler:
    """The index sampler of a loader; each iteration is a pass, see [Note: the script is cut short]."""

    def __init__(self, recorder: "ScriptRecorder", dataset: Any, sampler: Any) -> None:
        self._recorder, self._dataset, self._sampler = recorder, dataset, sampler
        self.newest: Pass | None = None

    def __len__(self) -> int:
        """Return the number of batches of a whole pass."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield what the sampler yields for the batches that are loaded."""
        self.newest = pass_ = self._recorder.begin_pass(self._dataset, self._sampler)
        rest = iter(self._sampler)
        for indices in rest:
            pass_.waiting.append(pass_.note(indices))
            yield indices
            if self._recorder.is_enough(pass_):
                break
        left = [] if pass_.is_stream else [(indices, pass_.note(indices)) for indices in rest]
        for indices, noted in left[len(left) - self._recorder.num_last(pass_, len(left)) :]:
            pass_.waiting.append(noted)
            yield indices


class ScriptRecorder:
    """Records the script of this rank; the launcher's bootstrap creates one before the script starts.

    Args:
        folder: Gets the trace when the script ends, in a file named after the rank.
        num_steps: Updates of a pass.
        off: What to turn off: ``random``, ``batchnorm``; see `Switch`.
    """

    def __init__(self, folder: str, num_steps: int, off: Sequence[str]) -> None:
        self._file, self._num_steps = Path(folder) / os.environ["RANK"], num_steps
        self._steps: list[ScriptStep] = []
        self._initial: dict[str, Fingerprint] = {}
        self._norms: set[str] = set()
        self._precisions: set[tuple[int, str]] = set()  # bytes of a number, and the name
        self._engine, self._is_augmented = "none", False
        self._passes: list[Pass] = []
        self._epochs: Counter[int] = Counter()  # passes that train, by id of the data set
        self._num_late, self._has_loaded = 0, False
        self._updates: Counter[int] = Counter()  # by id of the optimizer
        self._order: dict[int, int] = {}  # of the parameters that were updated, by id
        self._owned: dict[str, Tensor] = {}  # by the optimizer that updates now
        self._others: dict[str, Tensor] = {}
        self._used: tuple[dict[str, Fingerprint], dict[str, float]] = {}, {}  # gradients and rates
        self._is_in_forward, self._num_open_steps = False, 0
        self._called: nn.Module | None = None  # the outermost module of the newest forward that trains
        self._before_draws = b""
        self._inputs: list[bytes] = []  # digests of the rows that forward got
        self._begin_step()
        self._watch = Watch(frozenset({"random"}))
        self._instrument = Instrument()  # kept: what it has entered is undone when it is freed
        self._arm(self._instrument, off)
        atexit.register(self._write)

    def _begin_step(self) -> None:
        # Of each batch: its pass, the indices of its samples, and their digests.
        self._fetched: list[tuple[Pass, list[Any], list[bytes]]] = []
        self._trained_on = frozenset(self._inputs)
        self._inputs, self._evaluated = [], False
        self._losses: list[float] = []
        self._operations: tuple[str, ...] = ()
        self._first_state = b""
        self._draws = self._bypassed = False
        self._clipped: bytes | None = None

    def _arm(self, instrument: Instrument, off: Sequence[str]) -> None:
        """Install all hooks; they are not removed."""
        # A script without seeds draws other numbers in each run and on each rank; now only on each rank.
        value = mix(int(os.environ["RANK"]))
        seed_cpu(value)
        torch.manual_seed(value)
        original = getattr(DataLoader, INDEX_SAMPLER).fget
        short: weakref.WeakKeyDictionary[Any, _ShortSampler] = weakref.WeakKeyDictionary()

        def index_sampler(loader: Any) -> _ShortSampler:
            if loader not in short:
                short[loader] = _ShortSampler(self, loader.dataset, original(loader))
            return short[loader]

        instrument.replace(DataLoader, INDEX_SAMPLER, property(index_sampler))
        instrument.wrap(DataLoader, "__iter__", self._around_load)
        instrument.wrap(BaseDataLoaderIter, "__next__", self._around_next)
        instrument.wrap(nn.Module, "__call__", self._around_forward)
        instrument.before(torch.autograd, "backward", self._before_backward)
        instrument.optimizers(self._before_update, self._after_update)
        instrument.collectives(self._before_collective, in_ddp=False)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            instrument.before(nn.utils, name, self._before_clipping)
        if "random" in off:
            instrument.enter_context(self._watch.generators())
            instrument.enter_context(self._watch)
        if "batchnorm" in off:
            instrument.enter_context(NoBatchStatistics())

    def _write(self) -> None:
        initial: ModelFingerprint = {"parameter": self._initial, "gradient": {}, "buffer": {}}
        trace = ScriptTrace(
            {"samples of the data set": 0},  # the sampler, not the data set, says how many there are
            initial,
            tuple(self._steps),
            draws=tuple(sorted(self._watch.draws)),
            passes=tuple(self._passes),
            norms=tuple(sorted(self._norms)),
            precision=min(self._precisions, default=(4, "fp32"))[1],
            engine=self._engine,
            is_augmented=self._is_augmented,
        )
        self._file.write_bytes(pickle.dumps(trace))

    def _end_script(self) -> None:
        """End the script: each rank comes here after the same update."""
        self._write()
        sys.stdout.flush()
        os._exit(0)

    # --- Loaders

    @property
    def _num_updates(self) -> int:
        """The updates of the script; of several optimizers, those of the one with the most."""
        return max(self._updates.values(), default=0)

    def begin_pass(self, dataset: Any, sampler: Any) -> Pass:
        """Return a new pass over a data set, by a sampler of indices or of lists of them."""
        sampler, is_stream = getattr(sampler, "sampler", sampler), isinstance(dataset, IterableDataset)
        kind = type(dataset).__name__ if is_stream else f"{type(dataset).__name__} of {len(dataset)}"
        shuffles = isinstance(sampler, HasEpochs) and bool(getattr(sampler, "shuffle", False))
        is_late = self._epochs[id(dataset)] >= _NUM_EPOCHS
        new_pass = Pass(kind, is_stream, shuffles, id(dataset), self._num_updates, is_late)
        self._num_late += is_late
        if self._num_late > _NUM_LATE:
            self._end_script()
        if not is_late:
            self._passes.append(new_pass)
        return new_pass

    def is_enough(self, pass_: Pass) -> bool:
        """Return whether of the rest of a pass only the last batches are loaded."""
        if pass_.is_late or not pass_.is_training:
            return pass_.is_late or pass_.num_loaded > self._num_steps
        # The end of a stream can only be seen by reading it.
        num_steps = _NUM_OF_STREAM if pass_.is_stream else self._num_steps - 1
        return self._num_updates - pass_.num_before >= num_steps

    def num_last(self, pass_: Pass, num_left: int) -> int:
        """Return how many of the last batches are loaded: those of one update."""
        if pass_.is_late or not num_left:
            return 0
        per_update = round(pass_.num_loaded / max(1, self._num_updates - pass_.num_before)) if pass_.is_training else 1
        return (num_left - 1) % max(1, per_update) + 1

    def _around_load(self, original: Callable[..., Any], loader: Any) -> Any:
        """Around the start of a pass, and each of its batches: what is drawn for data does not count."""
        self._note_draws()
        self._watch.active = True  # from here on: how weights and data sets are made stays random
        draws = set(self._watch.draws)
        try:
            return original(loader)
        finally:
            self._watch.draws = draws
            self._before_draws = _random_state()

    def _around_next(self, original: Callable[..., Any], iterator: Any) -> Any:
        sampler: _ShortSampler = getattr(iterator, INDEX_SAMPLER)
        before = _random_state()
        try:
            batch = self._around_load(original, iterator)
        except StopIteration:
            if sampler.newest is not None:
                sampler.newest.is_over = True
            raise
        if (pass_ := sampler.newest) is not None:
            indices, rows = pass_.waiting.popleft(), _row_digests(batch)
            if pass_.is_stream:
                pass_.indices += rows
                indices = rows
            if len(rows) == len(indices):
                pass_.contents.update(zip(indices, rows, strict=True))
            # The first batch of a pass is preceded by the sampler's draws.
            self._is_augmented |= pass_.num_loaded > 0 and before != _random_state()
            pass_.num_loaded += 1
            self._fetched.append((pass_, indices, rows))
        return batch

    def _note_draws(self) -> None:
        """Note whether the script has drawn since the newest batch was loaded, or forward began."""
        if self._before_draws and self._before_draws != _random_state():
            self._draws = True
        self._before_draws = b""

    # --- Forward and backward

    def _around_forward(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_in_forward or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        self._is_in_forward = True
        try:
            if not module.training or not torch.is_grad_enabled() or in_backward():
                self._note_evaluation(module, (args, kwargs))
                return original(module, *args, **kwargs)
            self._before_forward(module, (args, kwargs))
            output = original(module, *args, **kwargs)
            self._note_draws()
            # What a script draws outside of forward may be which samples it takes, if it has no loader.
            self._before_draws = _random_state() if self._fetched else b""
            return output
        finally:
            self._is_in_forward = False

    def _note_evaluation(self, module: nn.Module, inputs: Any) -> None:
        """Add what a model is evaluated on, without a loader, to a pass."""
        if self._called is None or unwrap(module) is not unwrap(self._called) or self._fetched or self._num_late:
            return
        rows = _row_digests(inputs)
        if self._trained_on.isdisjoint(rows):
            if not self._evaluated:
                self._passes.append(Pass("tensors"))
            self._evaluated = True
            self._passes[-1].indices += rows

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        self._watch.active = True
        self._before_draws = self._before_draws or _random_state()
        self._first_state = self._first_state or self._before_draws
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:  # a module of losses
            return
        self._called = module
        for name, layer in unwrap(module).named_modules():
            if is_batch_norm(layer) and layer.training and "Sync" not in type(layer).__name__:
                self._norms.add(name)
        device, dtype = parameters[0].device.type, parameters[0].dtype.to_real()
        if is_autocast := torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        name = _PRECISIONS.get(dtype, str(dtype).removeprefix("torch."))
        self._precisions.add((dtype.itemsize, f"{name} autocast" if is_autocast else name))
        if not self._epochs and not self._fetched:  # the script makes its batches by itself
            self._inputs += _row_digests(inputs)

    def _before_backward(self, tensors: Any, *_args: Any, **_kwargs: Any) -> None:
        if in_backward():  # of a checkpoint
            return
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._losses += [float(root.detach().sum()) for root in roots]
        self._operations = _operations(roots[0])
        for pass_, *_ in self._fetched:
            if not pass_.is_over and not pass_.is_training:
                pass_.is_training = True
                self._epochs[pass_.source] += 1
        if self._called is not None:
            is_wrapper = isinstance(self._called, DistributedDataParallel)
            self._bypassed = not is_wrapper or not self._called.require_backward_grad_sync

    def _before_clipping(self, *_args: Any, **_kwargs: Any) -> None:
        grads = [] if self._called is None else [p.grad for p in self._called.parameters()]
        hasher = blake2b(b"".join(fingerprint(grad).digest for grad in grads if grad is not None), digest_size=16)
        self._clipped = self._clipped or hasher.digest()

    def _before_collective(self, name: str, *_args: Any, **_kwargs: Any) -> None:
        if name.startswith(_COMBINING) and not in_backward() and self._passes:
            self._passes[-1].is_combined = True

    # --- Updates

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_open_steps += 1
        if self._num_open_steps > 1 or self._num_late:  # an optimizer may call another
            return
        self._note_draws()
        if self._epochs and not self._has_loaded:
            # What it has trained before, without a loader, may be a step of the preparation, on one rank only.
            self._has_loaded = True
            self._steps.clear()
            self._initial.clear()
            self._updates.clear()
            for past_pass in self._passes:
                past_pass.num_before = 0
        owned = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        if any(map(is_sharded, owned.values())):
            raise ConfigurationError(
                "verify compares whole parameters, and this script shards them.\nVerify it without fully_shard."
            )
        for parameter in owned:
            self._order.setdefault(parameter, len(self._order))
        named = _tensors(self._order, optimizer)
        self._owned = {name: tensor for name, tensor in named.items() if id(tensor) in owned}
        self._others = {name: tensor for name, tensor in named.items() if id(tensor) not in owned}
        for name, tensor in self._owned.items():
            self._initial.setdefault(name, fingerprint(tensor))
        # Now, as the update may change them.
        grads = {name: fingerprint(p.grad) for name, p in self._owned.items() if p.grad is not None}
        self._used = grads, read_rates(optimizer)

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_open_steps -= 1
        if self._num_open_steps:
            return
        if not self._num_late:
            self._record()
        self._updates[id(optimizer)] += 1
        self._begin_step()
        if not self._epochs and self._num_updates >= _NUM_EPOCHS * self._num_steps:
            self._end_script()

    def _record(self) -> None:
        trained = [(ids, rows) for pass_, ids, rows in self._fetched if pass_.is_training] or [([], self._inputs)]
        indices = [index for ids, rows in trained for index in ids or rows]
        samples = [sample for ids, rows in trained for sample in (rows if len(rows) >= len(ids) else ids)]
        grads, rates = self._used
        tensors: ModelFingerprint = {
            "gradient": grads,
            "parameter": {name: fingerprint(tensor) for name, tensor in self._owned.items()},
            "buffer": {name: fingerprint(tensor) for name, tensor in self._others.items()},
        }
        wrappers = [item for item in gc.get_objects() if issubclass(type(item), DistributedDataParallel)]
        self._engine = "ddp" if wrappers else self._engine
        wrapped = {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}
        self._steps.append(
            ScriptStep(
                len(self._steps),
                tuple(map(_to_bytes, samples)),
                sum(self._losses) / max(1, len(self._losses)),
                rates,
                tensors,
                indices=tuple(map(_to_bytes, indices)),
                draws=self._draws,
                random_state=self._first_state,
                operations=self._operations,
                before_clipping=self._clipped,
                outside=tuple(name for name, p in self._owned.items() if wrapped and id(p) not in wrapped),
                bypassed=self._bypassed and bool(wrapped),
                attributes=_attributes(self._order),
            )
        )


def _to_bytes(sample: Any) -> bytes:
    return sample if isinstance(sample, bytes) else str(sample).encode()


def _random_state() -> bytes:
    """Return a digest of the state of the generators of torch, Python and NumPy."""
    hasher = blake2b(torch.get_rng_state().numpy().data, digest_size=16)
    if torch.accelerator.is_available():
        state = torch.get_device_module(torch.accelerator.current_accelerator()).get_rng_state()
        hasher.update(state.numpy().data)
    hasher.update(pickle.dumps((random.getstate(), np.random.get_state())))
    return hasher.digest()


def _row_digests(batch: Any) -> list[bytes]:
    """Return a digest of each sample of a batch: of what its tensors have at one place of their first dimension."""
    tensors = [tensor.detach() for tensor in find_tensors(batch) if tensor.dim() > 0]
    if not tensors:
        return []
    num = len(tensors[0])
    rows = [t.to("cpu").reshape(num, -1).contiguous() for t in tensors if len(t) == num and t.numel()]
    views = [row.view(torch.uint8).numpy() for row in rows]
    return [blake2b(b"".join(view[row].tobytes() for view in views), digest_size=12).digest() for row in range(num)]


def _operations(loss: Tensor) -> tuple[str, ...]:
    """Return the last operations that made a loss, the last one first."""
    operations: list[str] = []
    node = loss.grad_fn
    while node is not None and len(operations) < 6:
        operations.append(describe_node(node))
        node = next((child for child, _ in node.next_functions if child is not None), None)
    return tuple(operations)


def _roots(order: dict[int, int]) -> dict[str, nn.Module]:
    """Return the outermost modules, without wrappers, by a prefix for the names of what they have.

    First those that were trained, in the order of the updates; then others whose class no other has, such as averages.
    """
    modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module) and "_modules" in vars(item)]
    inner = {id(child) for module in modules for child in module.children()}
    placed: list[tuple[int, nn.Module]] = []
    for module in (module for module in modules if id(module) not in inner):
        places = [order[id(p)] for p in module.parameters() if id(p) in order]
        placed.append((min(places, default=len(order)), unwrap(module)))
    trained = sorted((item for item in placed if item[0] < len(order)), key=lambda item: item[0])
    kinds = Counter(type(module) for place, module in placed if place == len(order))
    roots = {"" if len(trained) == 1 else f"{number}:": module for number, (_, module) in enumerate(trained)}
    others = [module for place, module in placed if place == len(order) and kinds[type(module)] == 1]
    return roots | {f"{type(module).__name__}:": module for module in others}


def _tensors(order: dict[int, int], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return parameters and buffers of all models by name, and what else the optimizer updates."""
    tensors = {
        prefix + name: tensor
        for prefix, module in _roots(order).items()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    named = {id(tensor) for tensor in tensors.values()}
    for number, group in enumerate(optimizer.param_groups):
        rest = {f"parameter {place} of group {number}": p for place, p in enumerate(group["params"])}
        tensors.update((name, tensor) for name, tensor in rest.items() if id(tensor) not in named)
    return tensors


def _attributes(order: dict[int, int]) -> dict[str, Any]:
    """Return the numbers and tensors that modules have as plain attributes, by name."""
    values: dict[str, Any] = {}
    for prefix, root in _roots(order).items():
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                if name not in _OWN_ATTRIBUTES and not name.startswith("_") and isinstance(value, Tensor | int | float):
                    full_name = f"{prefix}{path}{'.' * bool(path)}{name}"
                    values[full_name] = fingerprint(value).digest if isinstance(value, Tensor) else value
    return values
