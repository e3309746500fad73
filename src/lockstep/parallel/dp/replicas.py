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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parallel.dp.compiled import compiled_forward
from lockstep.parallel.dp.flat import coalesced_copies
from lockstep.parallel.dp.gradients import Run, deliver
from lockstep.parallel.dp.scattered import sum_of_replicas
from lockstep.parallel.dp.structure import Node, Structure, check_devices, read_structure
from lockstep.parallel.dp.tensors import ReplicaTensors
from lockstep.parallel.dp.transport import make_transport


class Replicas:
    """The replicas of ``module`` on ``devices``, the first of which is the module's own.

    Nothing is made before the first ``refresh``.

    Attributes:
        module: The module that is replicated.
        devices: One a replica; the same device may be named several times.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.module = module
        self.devices = tuple(devices)
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
        structure = self._current_structure()
        buffers = structure.buffers()
        self._weights = [*structure.parameters, *(buffer for buffer in buffers if buffer.requires_grad)]
        plain_buffers = [buffer for buffer in buffers if not buffer.requires_grad]
        check_devices([*self._weights, *plain_buffers], self.devices[0])

        self._tensors.hold = self._holds > 0
        stand_ins = self._tensors.leaves if leaves else self._tensors.connected
        rows = stand_ins(self._weights, num_replicas)
        copies = [
            plain_buffers,
            *coalesced_copies(plain_buffers, self.devices[1:num_replicas], self._transport.broadcast),
        ]
        for replica, (weights, own_buffers) in enumerate(zip(rows, copies, strict=True)):
            by_source = dict(zip(map(id, plain_buffers), own_buffers, strict=True))
            if len(self._weights) > len(structure.parameters):
                by_source.update(zip(map(id, self._weights), weights, strict=True))
            shells = self._shells[replica]
            for node, shell in zip(structure.nodes, shells, strict=True):
                object.__setattr__(shell, "__dict__", _state(node, shells, weights, by_source))
            self._bind_compiled(structure, shells)
        return [self._shells[replica][0] for replica in range(num_replicas)]

    def reduce_gradients(self, num_replicas: int, run: Run) -> None:
        """Sum the gradients of the first ``num_replicas`` replicas' leaves into those of the module's weights.

        Args:
            num_replicas: How many.
            run: See `sum_of_replicas`.
        """
        rows = [self._tensors.take_gradients(replica) for replica in range(num_replicas)]
        deliver(self._weights, sum_of_replicas(rows, self.devices[:num_replicas], self._transport, run))

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
