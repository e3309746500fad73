"""Persistent replicas of a module.

[Note: replicas]

A replica is a tree of *shells*: objects of the types of the module's own modules, made once. Before each use a shell
gets a fresh copy of its module's ``__dict__`` (so it has every attribute as it is now: flags, hooks, ``training``),
with its own children, the weights of its replica (see the note in ``tensors``) and its own buffers put in. What
a forward sets on a shell is therefore gone at the next one, as with torch's replicas; what it writes *into* a buffer of
the first replica stays, since those are the module's own buffers, and into those of the others is lost.

Copying one ``__dict__`` costs half a microsecond, so there is no need to find out what has changed in it. Only where
the tree itself, a type or the set of parameters changed are the shells made again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parallel.dp.compiled import compiled_forward
from lockstep.parallel.dp.flat import FixedMemory, coalesced_copies, is_plain
from lockstep.parallel.dp.gradients import Run, deliver
from lockstep.parallel.dp.scattered import sum_apart, sum_of_replicas
from lockstep.parallel.dp.slices import GradientSlices
from lockstep.parallel.dp.structure import Node, Structure, check_devices, read_structure
from lockstep.parallel.dp.tensors import ReplicaTensors
from lockstep.parallel.dp.transport import make_transport


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
    structure: Structure
    weights: Sequence[Sequence[Tensor]]
    source_buffers: Sequence[Tensor]
    buffers: Sequence[Sequence[Tensor]]

    def place(self, replica: int) -> tuple[object, ...]:
        """Return all that a step of a replica takes from here, but for values: which memory, and whether to train."""
        tensors = (*self.weights[replica], *self.buffers[replica])
        memory = [(each.data_ptr() if is_plain(each) else id(each), each.requires_grad) for each in tensors]
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
        self._structure: Structure | None = None
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
                object.__setattr__(shell, "__dict__", _state(node, shells, weights, by_source))
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

    def _bind_compiled(self, structure: Structure, shells: Sequence[nn.Module]) -> None:
        """Have compiled modules call the code of their replica; compiled once, at its first call."""
        for node, shell in zip(structure.nodes, shells, strict=True):
            if node.compiled:
                inner = node.child_nodes["_orig_mod"]
                assert inner is not None
                if shell not in self._compiled:
                    self._compiled[shell] = compiled_forward(node.source, shells[inner])
                vars(shell)["forward"] = self._compiled[shell]

    def _current_structure(self) -> Structure:
        if self._structure is None or not self._structure.is_current():
            self._structure = read_structure(self.module)
            self._tensors = ReplicaTensors(self.devices, self._transport)
            self._fixed_buffers = [FixedMemory() for _ in self.devices]
            self._generation += 1
            self._compiled = {}
            self._shells = [[object.__new__(node.kind) for node in self._structure.nodes] for _ in self.devices]
        return self._structure


def _state(
    node: Node, shells: Sequence[nn.Module], weights: Sequence[Tensor], buffers: dict[int, Tensor]
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
