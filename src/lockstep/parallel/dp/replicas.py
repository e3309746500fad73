"""Persistent replicas of a module, and the tensors that they have in place of its parameters and buffers."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from operator import is_
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from lockstep.errors import ConfigurationError
from lockstep.parallel.dp.gradients import (
    FixedMemory,
    Run,
    alias_of,
    coalesced_copies,
    deliver,
    is_remote,
    is_strided,
    sum_in_tree,
)
from lockstep.parallel.dp.scattered import sum_apart, sum_of_replicas, sum_over_devices
from lockstep.parallel.dp.slices import GradientSlices
from lockstep.parallel.dp.transport import Transport, make_transport

# Compiled modules: let a replica run its own compiled code, not that of the original.

_COMPILES_IN_THREADS = TorchVersion(torch.__version__) >= "2.13"
"""torch 2.11 crashes the process when two threads compile at the same time, with or without this package."""


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` returns for a module. Does not import the compiler."""
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def compiled_forward(module: Any, inner: nn.Module) -> Callable[..., Any]:
    """Compile ``inner``, a replica of what ``module`` compiles, with the options of ``module``.

    A compiled module calls through an attribute that is bound to the original, which a replica must not use. Where
    torch cannot compile in several threads, ``inner`` runs as it is written.
    """
    forward: Callable[..., Any] = module.dynamo_ctx(inner).forward if _COMPILES_IN_THREADS else inner.__call__
    return forward


# What a module tree consists of, read once and then only checked.


@dataclass(frozen=True)
class ModuleNode:
    """One module of the tree, in the order of ``modules()``; a module that is used twice is one node.

    Attributes:
        source: The module.
        kind: Its type when it was read; registering a parametrization changes it.
        children: Its ``_modules`` when it was read.
        child_nodes: The node number of each child.
        parameters: Its ``_parameters`` when they were read.
        weight_numbers: Where each parameter is in ``ModuleTree.parameters``; tied parameters have one number.
        copies_itself: Whether the type says itself how it is replicated (recurrent layers do, for one).
        compiled: Whether it is the result of ``torch.compile``.
        recurrent: Whether it keeps its parameters in a list besides, as recurrent layers do.
    """

    source: nn.Module
    kind: type[nn.Module]
    children: dict[str, nn.Module | None]
    child_nodes: dict[str, int | None]
    parameters: dict[str, nn.Parameter | None]
    weight_numbers: dict[str, int | None]
    copies_itself: bool
    compiled: bool
    recurrent: bool

    def is_current(self) -> bool:
        """Whether the module still has the type, the children and the parameters it had."""
        parameters = self.source._parameters
        return (
            type(self.source) is self.kind
            and self.source._modules == self.children
            and len(parameters) == len(self.parameters)
            and all(map(is_, parameters.values(), self.parameters.values()))
            and parameters.keys() == self.parameters.keys()
        )


@dataclass(frozen=True)
class ModuleTree:
    """A module tree: its nodes and its parameters, each once."""

    nodes: tuple[ModuleNode, ...]
    parameters: tuple[nn.Parameter, ...]

    def is_current(self) -> bool:
        """Whether no module and no parameter was added, removed or replaced since."""
        return all(node.is_current() for node in self.nodes)

    def buffers(self) -> list[Tensor]:
        """Return the buffers that the tree has now, each once."""
        buffers: dict[int, Tensor] = {}
        for node in self.nodes:
            for buffer in node.source._buffers.values():
                if buffer is not None:
                    buffers[id(buffer)] = buffer
        return list(buffers.values())


def read_tree(module: nn.Module) -> ModuleTree:
    """Read the tree under ``module``.

    Raises:
        ConfigurationError: It holds a TorchScript module or a parameter that has no shape yet.
    """
    sources = list(module.modules())
    node_numbers = {source: number for number, source in enumerate(sources)}
    parameters = list(module.parameters())
    weight_numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for name, source in module.named_modules():
        _check_replicable(name, source)
    nodes = [
        ModuleNode(
            source=source,
            kind=type(source),
            children=dict(source._modules),
            child_nodes={
                name: None if child is None else node_numbers[child] for name, child in source._modules.items()
            },
            parameters=dict(source._parameters),
            weight_numbers={
                name: None if parameter is None else weight_numbers[id(parameter)]
                for name, parameter in source._parameters.items()
            },
            copies_itself=_copies_itself(source),
            compiled=is_compiled(source),
            recurrent=isinstance(source, nn.RNNBase),
        )
        for source in sources
    ]
    return ModuleTree(tuple(nodes), tuple(parameters))


def check_devices(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Check that parameters and buffers are where the first replica runs.

    Raises:
        ConfigurationError: One of them is elsewhere.
    """
    for tensor in tensors:
        if tensor.device != device:
            raise ConfigurationError(
                f"module must have its parameters and buffers on device {device} (device_ids[0]) but found one of them "
                f"on device: {tensor.device}\n"
                f'Move the module with .to("{device}"), or name its device first in device_ids.'
            )


def _check_replicable(name: str, source: nn.Module) -> None:
    where = f"its submodule {name!r}" if name else "it"
    if isinstance(source, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"DataParallel cannot replicate the module: {where} is a TorchScript module.\n"
            "Wrap the Python module, and script or trace the bare module for export."
        )
    own_tensors = [*source._parameters.values(), *source._buffers.values()]
    if any(tensor is not None and nn.parameter.is_lazy(tensor) for tensor in own_tensors):
        raise ConfigurationError(
            f"DataParallel cannot replicate the module: {where} has parameters or buffers without a shape.\n"
            "Run one forward of the bare module first, so that its lazy layers see an input."
        )


def _copies_itself(source: nn.Module) -> bool:
    """Whether the class has its own ``_replicate_for_data_parallel``.

    That of a ``GraphModule`` does not count: it compiles the graph again, while sharing the class does as well.
    """
    method: Any = type(source)._replicate_for_data_parallel
    return method not in (nn.Module._replicate_for_data_parallel, torch.fx.GraphModule._replicate_for_data_parallel)


# The tensors that replicas have in place of the module's parameters.
#
# [Note: which tensor a replica sees]
#
# A *weight* is a parameter, or a buffer that requires a gradient. Per replica there are two ways to stand in for it:
#
# - *connected*: autograd leads from the replica's weight to the module's, so that ``backward`` of an output fills the
# ``grad`` of the module. On the CPU it is the module's own tensor. On CUDA it is an output of ``_Fan``, which in its
# backward sums the replicas' gradients in one fixed order. Used by ``DataParallel.forward``. - *leaf*: a tensor with
# a ``grad`` of its own, so that every replica can run its own backward in its own thread. Used by
# ``DataParallel.backward``, which sums the gradients afterwards. Leaves are made once and then only pointed
# elsewhere.
#
# The values: on the device of the module (which is the first replica's) every replica's weight lies over the memory of
# the module's weight, so there is nothing to copy and nothing that could be out of date. Other devices get coalesced
# copies.
#
# Those copies are made anew whenever the replicas are refreshed, unless the caller has promised that the weights do not
# change (``hold``). Finding out is no option: a write through ``weight.data``, NumPy or a foreign kernel moves neither
# the version counter nor the pointer of a weight, and WGAN clipping and weight averages are usually written just so.
# Under ``hold`` the counters and pointers are still looked at, since that is free.


class ReplicaTensors:
    """Stand-ins for the weights of a module, for replicas on ``devices``; the weights are on ``devices[0]``.

    Args:
        devices: One a replica.
        transport: Between them.

    Attributes:
        hold: The caller's promise that the weights do not change until it is False again.
        fixed: Whether copies are to lie where they lay the last time.
    """

    def __init__(self, devices: Sequence[torch.device], transport: Transport) -> None:
        self._devices, self._transport = tuple(devices), transport
        self._leaves: list[list[Tensor | None]] = [[] for _ in devices]
        self._held_copies: dict[torch.device, list[Tensor]] = {}
        self._held_stamp: list[tuple[int, int]] = []
        self.hold = False
        self.fixed = False
        self._fixed: dict[torch.device, FixedMemory] = {}

    def connected(self, weights: Sequence[Tensor], num_replicas: int) -> list[Sequence[Tensor]]:
        """Return the connected stand-ins of each of the first ``num_replicas`` replicas, ordered as ``weights``."""
        values = self._values(weights, num_replicas)
        if all(row is weights for row in values) and shares_tensors(self._devices[0]):
            return values
        trainable = [weight.requires_grad and torch.is_grad_enabled() for weight in weights]
        outputs: Iterator[Tensor] = iter(())
        if any(trainable):
            chosen = [list(compress(row, trainable)) for row in values]
            devices = self._devices[:num_replicas]
            outputs = iter(_Replicate.apply(devices, self._transport, chosen, *compress(weights, trainable)))  # type: ignore[no-untyped-call]
        return [
            [
                next(outputs) if fans else value if replica == 0 else alias_of(value)
                for fans, value in zip(trainable, row, strict=True)
            ]
            for replica, row in enumerate(values)
        ]

    def leaves(self, weights: Sequence[Tensor], num_replicas: int) -> list[Sequence[Tensor]]:
        """Return the leaves of each of the first ``num_replicas`` replicas; a frozen weight needs none."""
        rows: list[Sequence[Tensor]] = []
        with torch.inference_mode(False):
            for replica, values in enumerate(self._values(weights, num_replicas)):
                known = self._leaves[replica] if len(self._leaves[replica]) == len(weights) else [None] * len(weights)
                row = [_leaf_over(*three) for three in zip(known, weights, values, strict=True)]
                self._leaves[replica] = [
                    leaf if weight.requires_grad else None for leaf, weight in zip(row, weights, strict=True)
                ]
                rows.append(row)
        return rows

    def take_gradients(self, replica: int) -> list[Tensor | None]:
        """Return the gradients of the leaves of ``replica``, in the order of the weights, and forget them."""
        gradients: list[Tensor | None] = []
        for leaf in self._leaves[replica]:
            gradients.append(None if leaf is None else leaf.grad)
            if leaf is not None:
                leaf.grad = None
        return gradients

    def _values(self, weights: Sequence[Tensor], num_replicas: int) -> list[Sequence[Tensor]]:
        """Return per replica the tensors that hold the values: the weights themselves, or copies on its device."""
        source = self._devices[0]
        devices = self._devices[:num_replicas]
        remote = list(dict.fromkeys(device for device in devices if is_remote(device, source)))
        copies = self._copies(weights, remote) if remote else {}
        if self.fixed:
            copies = {
                device: self._fixed.setdefault(device, FixedMemory()).renew(row) for device, row in copies.items()
            }
        return [copies[device] if device in remote else weights for device in devices]

    def _copies(self, weights: Sequence[Tensor], devices: list[torch.device]) -> dict[torch.device, list[Tensor]]:
        if not self.hold:
            self._held_copies = {}
            return self._sent(weights, devices)
        stamp = [(weight.data_ptr(), weight._version) for weight in weights]
        if stamp != self._held_stamp or not self._held_copies.keys() >= set(devices):
            self._held_copies = self._sent(weights, devices)
            self._held_stamp = stamp
        return self._held_copies

    def _sent(self, weights: Sequence[Tensor], devices: list[torch.device]) -> dict[torch.device, list[Tensor]]:
        return dict(zip(devices, coalesced_copies(weights, devices, self._transport.broadcast), strict=True))


class _Replicate(torch.autograd.Function):
    """From each weight to its stand-in in every replica; backward sums the gradients of the stand-ins.

    Takes the devices of the replicas, the transport between them, ``values`` (per replica the tensors that hold the
    values) and the weights; returns the stand-ins, those of the first replica first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        devices: Sequence[torch.device],
        transport: Transport,
        values: list[list[Tensor]],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_weights = len(weights)
        ctx.devices, ctx.transport = devices, transport
        return tuple(alias_of(value) for row in values for value in row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count = ctx.num_weights
        rows = [list(gradients[start : start + count]) for start in range(0, len(gradients), count)]
        if torch.is_grad_enabled():  # create_graph: the sum must be differentiable
            return (None, None, None, *(_plain_sum(parts, ctx.devices[0]) for parts in zip(*rows, strict=True)))
        if len(set(ctx.devices)) > 1:
            return (None, None, None, *sum_over_devices(rows, ctx.devices, ctx.transport, owned=False))
        return (None, None, None, *sum_in_tree(rows, ctx.devices, owned=False))


def shares_tensors(device: torch.device) -> bool:
    """Whether replicas on ``device`` may use the very tensors of a module there.

    Not on CUDA, where recurrent layers move their weights to other memory, each replica in its own thread, and where
    the backward of the replicas runs in the threads of their devices, so that the order of sums would vary.
    """
    return device.type == "cpu"


def _leaf_over(known: Tensor | None, weight: Tensor, value: Tensor) -> Tensor:
    """Return a leaf over the memory of ``value``: ``known`` if there is one, pointed there if it was elsewhere."""
    if not weight.requires_grad:
        return value
    if known is None:
        leaf = nn.Parameter(value.detach()) if isinstance(weight, nn.Parameter) else value.detach().requires_grad_()
    else:
        leaf = known
        if not is_strided(value) or not leaf.is_set_to(value) or leaf.dtype != value.dtype:
            leaf.data = value.detach()
    if attributes := vars(weight):
        vars(leaf).update(attributes)
    return leaf


def _plain_sum(parts: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            moved = part.to(device)
            total = moved if total is None else total + moved
    return total


# Persistent replicas of a module.
#
# [Note: replicas]
#
# A replica is a tree of *shells*: objects of the types of the module's own modules, made once. Before each use a
# shell gets a fresh copy of its module's ``__dict__`` (so it has every attribute as it is now: flags, hooks,
# ``training``), with its own children, the weights of its replica (see the note in ``tensors``) and its own buffers
# put in. What a forward sets on a shell is therefore gone at the next one, as with torch's replicas; what it writes
# *into* a buffer of the first replica stays, since those are the module's own buffers, and into those of the others
# is lost.
#
# Copying one ``__dict__`` costs half a microsecond, so there is no need to find out what has changed in it. Only where
# the tree itself, a type or the set of parameters changed are the shells made again.


@dataclass(frozen=True)
class ReplicaState:
    """The tensors of some replicas, up to date.

    Attributes:
        generation: Another one for other modules, types or sets of parameters.
        structure: The module's.
        weights: By replica, what stands in for each weight.
        source_buffers: The module's, but for those that are weights.
        buffers: By replica, what stands in for those.
    """

    generation: int
    structure: ModuleTree
    weights: Sequence[Sequence[Tensor]]
    source_buffers: Sequence[Tensor]
    buffers: Sequence[Sequence[Tensor]]

    def place(self, replica: int) -> tuple[object, ...]:
        """Return all that a step of a replica takes from here, but for values: which memory, and whether to train."""
        tensors = (*self.weights[replica], *self.buffers[replica])
        memory = [(each.data_ptr() if is_strided(each) else id(each), each.requires_grad) for each in tensors]
        return self.generation, tuple(node.source.training for node in self.structure.nodes), tuple(memory)


class Replicas:
    """The replicas of ``module`` on ``devices``, the first of which is the module's own.

    Nothing is made before the first ``refresh``.

    Attributes:
        module: The module that is replicated.
        devices: One a replica; the same device may be named several times.
        slices: Returns where gradients go that a divided optimizer wants in slices, if there is one.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.module = module
        self.devices = tuple(devices)
        self.slices: Callable[[], GradientSlices | None] = lambda: None
        self._generation = 0
        self._fixed_buffers: list[FixedMemory] = []
        self._holds = 0
        self._holding = Lock()
        self._structure: ModuleTree | None = None
        self._shells: list[list[nn.Module]] = []
        self._transport = make_transport(self.devices)
        self._tensors = ReplicaTensors(self.devices, self._transport)
        self._weights: list[Tensor] = []
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Promise that no weight changes inside, so that copies on other devices need not be made again.

        Any number of threads may hold at the same time.
        """
        with self._holding:
            self._holds += 1
        try:
            yield
        finally:
            with self._holding:
                self._holds -= 1

    def refresh(self, num_replicas: int, *, leaves: bool) -> list[nn.Module]:
        """Bring the first ``num_replicas`` replicas up to date and return them: always the same objects.

        Args:
            num_replicas: How many are needed now.
            leaves: Whether their weights are leaves with gradients of their own, or connected to the module's by
                autograd.

        Raises:
            ConfigurationError: The module cannot be replicated, or is not on the first device.
        """
        return self.assemble(self.prepare(num_replicas, leaves=leaves))

    def prepare(self, num_replicas: int, *, leaves: bool, fixed: bool = False) -> ReplicaState:
        """Bring weights and buffers up to date, and not the replicas' modules; for the arguments see `refresh`.

        Args:
            num_replicas: See `refresh`.
            leaves: See `refresh`.
            fixed: Whether they must lie where they lay the last time, as far as they do not share the module's memory.

        Raises:
            ConfigurationError: See `refresh`.
        """
        structure = self._current_structure()
        buffers = structure.buffers()
        self._weights = [*structure.parameters, *(buffer for buffer in buffers if buffer.requires_grad)]
        plain_buffers = [buffer for buffer in buffers if not buffer.requires_grad]
        check_devices([*self._weights, *plain_buffers], self.devices[0])

        self._tensors.hold = self._holds > 0
        self._tensors.fixed = fixed
        stand_ins = self._tensors.leaves if leaves else self._tensors.connected
        rows = stand_ins(self._weights, num_replicas)
        others = self.devices[1:num_replicas]
        copies = coalesced_copies(plain_buffers, others, self._transport.broadcast)
        if fixed:
            copies = [self._fixed_buffers[index + 1].renew(row) for index, row in enumerate(copies)]
        return ReplicaState(self._generation, structure, rows, plain_buffers, [plain_buffers, *copies])

    def assemble(self, state: ReplicaState) -> list[nn.Module]:
        """Bring the replicas' modules up to date, with ``state`` in them, and return them."""
        structure = state.structure
        for replica, (weights, own_buffers) in enumerate(zip(state.weights, state.buffers, strict=True)):
            by_source = dict(zip(map(id, state.source_buffers), own_buffers, strict=True))
            if len(self._weights) > len(structure.parameters):
                by_source.update(zip(map(id, self._weights), weights, strict=True))
            shells = self._shells[replica]
            for node, shell in zip(structure.nodes, shells, strict=True):
                object.__setattr__(shell, "__dict__", _shell_state(node, shells, weights, by_source))
            self._bind_compiled(structure, shells)
        return [self._shells[replica][0] for replica in range(len(state.weights))]

    def reduce_gradients(
        self, num_replicas: int, run: Run, recorded: Mapping[int, Sequence[Tensor | None]] | None = None
    ) -> None:
        """Sum the gradients of the first ``num_replicas`` replicas' leaves into those of the module's weights.

        Args:
            num_replicas: How many.
            run: See `sum_of_replicas`.
            recorded: Gradients of replicas to take instead of those of the leaves; they are not written to or kept.
        """
        rows = [self._tensors.take_gradients(replica) for replica in range(num_replicas)]
        devices = self.devices[:num_replicas]
        if recorded:
            rows = [list(recorded.get(replica, row)) for replica, row in enumerate(rows)]
        slices = self.slices()
        if slices is not None:
            rows = slices.take(self._weights, rows, self._transport)
        if recorded:
            sums = sum_apart(rows, devices, self._transport)
        else:
            sums = sum_of_replicas(rows, devices, self._transport, run)
        deliver(self._weights, sums)

    def take_all_gradients(self, replica: int) -> list[Tensor | None]:
        """Return the gradients of one replica's leaves, in the order of the weights, and clear them."""
        return self._tensors.take_gradients(replica)

    def take_gradients(self, replica: int) -> list[Tensor | None]:
        """Return the gradients of one replica's leaves, in the order of the module's parameters, and clear them."""
        assert self._structure is not None
        return self._tensors.take_gradients(replica)[: len(self._structure.parameters)]

    def drop_gradients(self, num_replicas: int) -> None:
        """Forget the gradients of the leaves, after a step that failed."""
        for replica in range(num_replicas):
            self._tensors.take_gradients(replica)

    def forget(self) -> None:
        """Make new shells and leaves at the next ``refresh``: the present ones are in use by threads left behind."""
        self._structure = None
        self._tensors = ReplicaTensors(self.devices, self._transport)

    def _bind_compiled(self, structure: ModuleTree, shells: Sequence[nn.Module]) -> None:
        """Have compiled modules call the code of their replica; compiled once, at its first call."""
        for node, shell in zip(structure.nodes, shells, strict=True):
            if node.compiled:
                inner = node.child_nodes["_orig_mod"]
                assert inner is not None
                if shell not in self._compiled:
                    self._compiled[shell] = compiled_forward(node.source, shells[inner])
                vars(shell)["forward"] = self._compiled[shell]

    def _current_structure(self) -> ModuleTree:
        if self._structure is None or not self._structure.is_current():
            self._structure = read_tree(self.module)
            self._tensors = ReplicaTensors(self.devices, self._transport)
            self._fixed_buffers = [FixedMemory() for _ in self.devices]
            self._generation += 1
            self._compiled = {}
            self._shells = [[object.__new__(node.kind) for node in self._structure.nodes] for _ in self.devices]
        return self._structure


def _shell_state(
    node: ModuleNode, shells: Sequence[nn.Module], weights: Sequence[Tensor], buffers: dict[int, Tensor]
) -> dict[str, Any]:
    """Return the ``__dict__`` of the shell of ``node`` in one replica. Called once a module and step: kept quick."""
    source: Any = node.source
    state: dict[str, Any] = vars(source._replicate_for_data_parallel() if node.copies_itself else source).copy()
    state["_is_replica"] = True  # zero_grad() warns in a replica
    state["_compiled_call_impl"] = None  # of module.compile(), which is bound to the original: run as written
    children: dict[str, Any] = node.child_nodes.copy()
    for name, child in node.child_nodes.items():
        children[name] = child if child is None else shells[child]
    parameters: dict[str, Any] = node.weight_numbers.copy()
    for name, number in node.weight_numbers.items():
        parameters[name] = number if number is None else weights[number]
    own_buffers: dict[str, Tensor | None] = source._buffers.copy()
    for name, buffer in source._buffers.items():
        own_buffers[name] = buffer if buffer is None else buffers[id(buffer)]
    state["_modules"], state["_parameters"], state["_buffers"] = children, parameters, own_buffers
    if node.recurrent:
        state["_flat_weights"] = [
            parameters.get(name, weight)
            for name, weight in zip(source._flat_weights_names, source._flat_weights, strict=True)
        ]
    return state
