"""The updates of a script: what its models and optimizers compute, as plain data at each ``optimizer.step()``."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.base.torch_internals import describe_node
from lockstep.checkpoints.model_state import unwrap
from lockstep.comm.fully_shard import is_sharded
from lockstep.errors import ConfigurationError
from lockstep.loop.instrument import Instrument, in_backward
from lockstep.study.verify.fingerprint import Fingerprint, ModelFingerprint, fingerprint, read_rates
from lockstep.study.verify.interventions import is_batch_norm
from lockstep.study.verify.script.data_recorder import DataRecorder
from lockstep.study.verify.script.draws import Draws
from lockstep.study.verify.script.trace import ScriptStep

# Attributes of every module.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))

_PRECISIONS = {torch.float64: "float64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Models:
    """All modules of this process, and the names of their tensors."""

    def __init__(self) -> None:
        # Not a WeakSet: a module may define ``__eq__``.
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._order: dict[int, int] = {}  # of the parameters that were updated, by id

    def arm(self, instrument: Instrument) -> None:
        """Record each module when it is made, or copied."""
        for name in ("__init__", "__setstate__"):
            instrument.before(nn.Module, name, self._add)

    def _add(self, module: nn.Module, *_args: Any, **_kwargs: Any) -> None:
        self._modules[id(module)] = weakref.ref(module)

    def all(self) -> list[nn.Module]:
        """Return the modules that are in use."""
        found = {key: module for key, ref in self._modules.items() if (module := ref()) is not None}
        self._modules = {key: self._modules[key] for key in found}
        return [module for module in found.values() if "_modules" in vars(module)]

    def updated(self, optimizer: Optimizer) -> dict[int, Tensor]:
        """Return the parameters of an optimizer by id; names follow the order of the updates."""
        owned = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in owned:
            self._order.setdefault(parameter, len(self._order))
        return owned

    def roots(self) -> dict[str, nn.Module]:
        """Return the outermost modules, without wrappers, by a prefix for the names of what they have.

        First the modules that were trained, in the order of the updates; then others whose class no other has, such as
        averages.
        """
        modules = self.all()
        inner = {id(child) for module in modules for child in module.children()}
        placed: list[tuple[int, nn.Module]] = []
        for module in (module for module in modules if id(module) not in inner):
            places = [self._order[id(p)] for p in module.parameters() if id(p) in self._order]
            placed.append((min(places, default=len(self._order)), unwrap(module)))
        last = len(self._order)
        trained = sorted((item for item in placed if item[0] < last), key=lambda item: item[0])
        kinds = Counter(type(module) for place, module in placed if place == last)
        roots = {"" if len(trained) == 1 else f"{number}:": module for number, (_, module) in enumerate(trained)}
        others = [module for place, module in placed if place == last and kinds[type(module)] == 1]
        return roots | {f"{type(module).__name__}:": module for module in others}

    def wrapped(self) -> set[int]:
        """Return the ids of the parameters in data-parallel wrappers."""
        wrappers = [module for module in self.all() if isinstance(module, DistributedDataParallel)]
        return {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}


class UpdateRecorder:
    """Records forwards, backwards and updates of this process.

    Args:
        data: Is told what forwards are given.
        draws: Is told when forwards begin and end.
        on_update: Called after each update.

    Attributes:
        steps: The updates.
        initial: The parameters before the first.
        norms: Layers of batch norm that normalise with the statistics of this rank's part.
        synchronized: The other layers of batch norm.
        precision: The lowest in which a model is computed: bytes of a number, and the name.
        engine: ``ddp`` if a model is in a wrapper, otherwise ``none``.
    """

    def __init__(self, data: DataRecorder, draws: Draws, on_update: Callable[[], None]) -> None:
        self._data, self._draws, self._on_update = data, draws, on_update
        self.steps: list[ScriptStep] = []
        self.initial: dict[str, Fingerprint] = {}
        self.norms: set[str] = set()
        self.synchronized: set[str] = set()
        self.precision, self.engine = (16, "fp32"), "none"
        self._models = Models()
        self._num_updates: Counter[int] = Counter()  # by id of the optimizer
        self._has_loaders = False
        self._is_in_forward, self._num_open_steps = False, 0
        self._called: nn.Module | None = None  # the outermost module of the newest forward that trains
        self._unsettled: tuple[nn.Module, Any] | None = None  # the newest forward in evaluation mode, and its inputs
        # Of the update that is being computed: the losses of its backwards, what made the last one, the gradients when
        # they were clipped, and whether the wrapper was passed by.
        self._losses: list[float] = []
        self._operations: tuple[str, ...] = ()
        self._clipped: bytes | None = None
        self._is_bypassed = False
        self._first: dict[int, Fingerprint] = {}  # before the first update of each parameter, by id
        # What it updates and what else models have, by name; gradients and rates that it uses.
        self._owned: dict[str, Tensor] = {}
        self._others: dict[str, Tensor] = {}
        self._grads: dict[str, Fingerprint] = {}
        self._rates: dict[str, float] = {}

    def arm(self, instrument: Instrument) -> None:
        """Install the hooks."""
        self._models.arm(instrument)
        instrument.wrap(nn.Module, "__call__", self._around_forward)
        instrument.before(torch.autograd, "backward", self._before_backward)
        instrument.optimizers(self._before_update, self._after_update)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            instrument.before(nn.utils, name, self._before_clipping)

    # --- Forward and backward

    def _around_forward(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_in_forward or torch.compiler.is_compiling():
            if module.training and not torch.compiler.is_compiling():
                self._note_precision(module)  # forward itself may use autocast
            return original(module, *args, **kwargs)
        self._is_in_forward = True
        try:
            self._settle(trains=False)
            if not module.training or not torch.is_grad_enabled() or in_backward():
                self._unsettled = module, (args, kwargs)
                if not torch.is_grad_enabled() or in_backward():
                    self._settle(trains=False)
                return original(module, *args, **kwargs)
            self._draws.begin()
            self._before_forward(module, (args, kwargs))
            output = original(module, *args, **kwargs)
            # What a script draws outside of forward may be which samples it takes, if it has no loader.
            self._draws.note(goes_on=self._data.has_batches)
            return output
        finally:
            self._is_in_forward = False

    def _settle(self, *, trains: bool) -> None:
        """Decide whether a forward in evaluation mode was an evaluation: not if a backward follows it."""
        if self._unsettled is None:
            return
        (module, inputs), self._unsettled = self._unsettled, None
        if trains:
            self._before_forward(module, inputs)
        elif self._called is not None and unwrap(module) is unwrap(self._called):
            self._data.evaluate(inputs)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._data.forward(inputs, has_parameters=bool(parameters))
        if not parameters:  # a module of losses
            return
        self._called = module
        for name, layer in _named_modules(unwrap(module)):
            if is_batch_norm(layer) and layer.training:
                (self.synchronized if "Sync" in type(layer).__name__ else self.norms).add(name)
        self._note_precision(module)

    def _note_precision(self, module: nn.Module) -> None:
        if (parameter := next(module.parameters(), None)) is not None:
            device = parameter.device.type
            is_autocast = torch.is_autocast_enabled(device)
            kind = torch.get_autocast_dtype(device) if is_autocast else parameter.dtype.to_real()
            name = f"{_PRECISIONS.get(kind, str(kind))}{' autocast' * is_autocast}"
            self.precision = min(self.precision, (kind.itemsize, name))

    def _before_backward(self, tensors: Any, *_args: Any, **_kwargs: Any) -> None:
        if in_backward():  # of a checkpoint
            return
        self._settle(trains=True)
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._losses += [float(root.detach().sum()) for root in roots]
        self._operations = tuple(_operations(roots[0]))
        self._data.backward()
        if self._called is not None:
            is_wrapper = isinstance(self._called, DistributedDataParallel)
            self._is_bypassed = not is_wrapper or not self._called.require_backward_grad_sync

    def _before_clipping(self, *_args: Any, **_kwargs: Any) -> None:
        grads = [] if self._called is None else [p.grad for p in self._called.parameters()]
        hasher = blake2b(b"".join(fingerprint(grad).digest for grad in grads if grad is not None), digest_size=16)
        self._clipped = self._clipped or hasher.digest()

    # --- Updates

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._num_open_steps += 1
        if self._num_open_steps > 1 or self._data.num_late:  # an optimizer may call another
            return None
        self._draws.note()
        if (self._data.has_loaders or self._data.has_batches) and not self._has_loaders:
            # What it has trained before, without a loader, may be a step of the preparation, on one rank only.
            self._has_loaders = True
            self.steps.clear()
            self.initial.clear()
            self._first.clear()
            self._num_updates.clear()
            self._data.restart()
        owned = self._models.updated(optimizer)
        if any(map(is_sharded, owned.values())):
            raise ConfigurationError(
                "verify compares whole parameters, and this script shards them.\nVerify it without fully_shard."
            )
        named = dict(self._named(optimizer))
        self._owned = {name: tensor for name, tensor in named.items() if id(tensor) in owned}
        self._others = {name: tensor for name, tensor in named.items() if id(tensor) not in owned}
        for name, tensor in self._owned.items():
            # By id, as names change when another optimizer updates for the first time.
            self.initial[name] = self._first.setdefault(id(tensor), fingerprint(tensor))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._use(optimizer)
            return None
        self._grads = {}

        def call() -> Any:
            loss = closure()
            if not self._grads:  # the first of several evaluations, as in L-BFGS
                self._use(optimizer)
            return loss

        return (args[0], call, *args[2:]) if len(args) > 1 else args, kwargs if len(args) > 1 else {"closure": call}

    def _use(self, optimizer: Optimizer) -> None:
        """Record gradients and rates before the update, which may change them."""
        self._grads = {name: fingerprint(p.grad) for name, p in self._owned.items() if p.grad is not None}
        self._rates = read_rates(optimizer)

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_open_steps -= 1
        if self._num_open_steps:
            return
        self._draws.note()  # what a closure has drawn
        samples, indices = self._data.update()
        drawn = self._draws.update()
        if not self._data.num_late:
            self._record(samples, indices, drawn)
        self._losses, self._operations, self._clipped, self._is_bypassed = [], (), None, False
        self._num_updates[id(optimizer)] += 1
        self._data.num_updates = max(self._num_updates.values())
        self._on_update()

    def _record(self, samples: tuple[bytes, ...], indices: tuple[bytes, ...], drawn: dict[str, bytes]) -> None:
        tensors: ModelFingerprint = {
            "gradient": self._grads,
            "parameter": {name: fingerprint(tensor) for name, tensor in self._owned.items()},
            "buffer": {name: fingerprint(tensor) for name, tensor in self._others.items()},
        }
        wrapped = self._models.wrapped()
        self.engine = "ddp" if wrapped else self.engine
        self.steps.append(
            ScriptStep(
                *(len(self.steps), samples, sum(self._losses), self._rates, tensors),
                indices=indices,
                drawn=drawn,
                num_backwards=len(self._losses),
                operations=self._operations,
                before_clipping=self._clipped,
                outside=tuple(name for name, p in self._owned.items() if wrapped and id(p) not in wrapped),
                bypassed=self._is_bypassed and bool(wrapped),
                attributes=dict(self._attributes()),
            )
        )

    def _named(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and buffers of all models by name, and what else the optimizer updates."""
        named: set[int] = set()
        for prefix, module in self._models.roots().items():
            for path, layer in _named_modules(module):
                for name, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
                    if id(tensor) not in named and not tensor.is_meta:  # such as of a model that is only counted
                        named.add(id(tensor))
                        yield f"{prefix}{path}{'.' * bool(path)}{name}", tensor
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in named:
                    yield f"parameter {place} of group {number}", parameter

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield the numbers and tensors that modules have as plain attributes, by name."""
        for prefix, root in self._models.roots().items():
            for path, module in _named_modules(root):
                for name, value in vars(module).items():
                    is_value = isinstance(value, Tensor | int | float)
                    if name not in _OWN_ATTRIBUTES and not name.startswith("_") and is_value:
                        full_name = f"{prefix}{path}{'.' * bool(path)}{name}"
                        yield full_name, fingerprint(value).digest if isinstance(value, Tensor) else value


def _named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by name, as if none in it were wrapped: a script may wrap on several ranks only."""
    wrappers = {path for path, module in root.named_modules() if unwrap(module) is not module}
    for path, module in root.named_modules():
        parts = path.split(".")
        if path not in wrappers:
            yield ".".join(part for i, part in enumerate(parts) if ".".join(parts[:i]) not in wrappers), module


def _operations(loss: Tensor) -> Iterator[str]:
    """Yield the last operations that made a loss, the last one first."""
    node = loss.grad_fn
    for _ in range(6):
        if node is None:
            return
        yield describe_node(node)
        node = next((child for child, _ in node.next_functions if child is not None), None)
