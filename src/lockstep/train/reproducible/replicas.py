"""Compute virtual shards on the devices of this process, each with random numbers of its own."""

from __future__ import annotations

import pickle
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.errors import ConfigurationError
from lockstep.parallel.dp.engine import ReplicaGradients
from lockstep.train.arithmetic import Arithmetic, use_threads
from lockstep.train.objective import Objective, Part
from lockstep.train.reproducible.buffers import ShardBuffers
from lockstep.train.strategy import Pass, scaled


class Shard(NamedTuple):
    """A virtual shard that has samples."""

    leaf: int
    batch: object
    num_samples: int


class ShardResult(NamedTuple):
    """What came of it; ``gradients`` are one a parameter of the model."""

    part: Part
    gradients: Sequence[Tensor | None]


class LocalReplicas(ABC):
    """The replicas of the model in this process."""

    @abstractmethod
    def compute(self, shards: Mapping[int, Shard], how: Pass, buffers: ShardBuffers) -> dict[int, ShardResult]:
        """Run forward and backward of at most one shard a replica, from the model as it is.

        Args:
            shards: By number of the replica.
            how: As for any strategy.
            buffers: Records what each shard leaves there; the model has those that the step started with again.

        Returns:
            By number of the replica. ``param.grad`` of the model is None.
        """


@final
class OneReplica(LocalReplicas):
    """The model itself."""

    def __init__(self, model: nn.Module, objective: Objective, device: torch.device) -> None:
        self._model, self._objective, self._device = model, objective, device
        self._parameters = list(model.parameters())

    @override
    def compute(self, shards: Mapping[int, Shard], how: Pass, buffers: ShardBuffers) -> dict[int, ShardResult]:
        """Run forward and backward of the only shard."""
        results = {}
        for replica, shard in shards.items():
            how.watch.begins("forward")
            how.seed(shard.leaf, self._device)
            part = self._objective(self._model, shard.batch, shard.num_samples)
            how.watch.lap("forward_s")
            scaled(part, how.scale).backward()
            gradients = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
            how.watch.lap("backward_s")
            buffers.record(shard.leaf, self._model)
            buffers.restore()
            results[replica] = ShardResult(part._replace(value=part.value.detach()), gradients)
        return results


@final
class ManyReplicas(LocalReplicas):
    """Our `DataParallel`: a thread for each device.

    Random numbers come from generators that belong to the process (Python's, numpy's, torch's for the CPU) or to a
    device. Threads that draw from the same one at the same time get what their timing gives them, so replicas that
    share one take turns: on the CPU always, and elsewhere from the first step on in which a shared one was drawn from.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, devices: Sequence[torch.device], arithmetic: Arithmetic
    ) -> None:
        from lockstep.parallel.data_parallel import DataParallel

        self._engine = DataParallel(model, device_ids=list(devices))
        self._objective, self._devices, self._arithmetic = objective, list(devices), arithmetic
        self._take_turns = devices[0].type == "cpu" or len(set(devices)) < len(devices)

    @override
    def compute(self, shards: Mapping[int, Shard], how: Pass, buffers: ShardBuffers) -> dict[int, ShardResult]:
        """Run forward and backward of the shards, all at the same time where that is safe."""
        if not self._take_turns:
            before = _shared_state()
            found = self._differentiate(shards, how)
            self._take_turns = _shared_state() != before
            if not self._take_turns:
                return self._results(shards, found, buffers)
            buffers.restore()
        results: dict[int, ShardResult] = {}
        for replica, shard in shards.items():
            alone = {replica: shard}
            results |= self._results(alone, self._differentiate(alone, how), buffers)
        return results

    def _differentiate(self, shards: Mapping[int, Shard], how: Pass) -> dict[int, tuple[Part, ReplicaGradients]]:
        """Run forward and backward of all ``shards`` at the same time."""
        parts: dict[int, Part] = {}

        def loss(module: nn.Module, item: tuple[int, Shard]) -> Tensor:
            replica, shard = item
            if self._arithmetic.threads is not None:
                use_threads(self._arithmetic.threads)
            part = self._objective(module, shard.batch, shard.num_samples)
            parts[replica] = part._replace(value=part.value.detach())
            return scaled(part, how.scale)

        for replica, shard in shards.items():
            how.seed(shard.leaf, self._devices[replica])
        items = [(index, shards[index]) if index in shards else None for index in range(max(shards) + 1)]
        how.watch.begins("replicas")
        found = self._engine.gradients(loss, items, [1.0] * len(items))  # the same roundings as in one replica
        how.watch.lap("backward_s")
        return {replica: (parts[replica], gradients) for replica, gradients in found.items()}

    def _results(
        self, shards: Mapping[int, Shard], found: Mapping[int, tuple[Part, ReplicaGradients]], buffers: ShardBuffers
    ) -> dict[int, ShardResult]:
        for replica, (_, computed) in found.items():
            buffers.record(shards[replica].leaf, computed.module)
        buffers.restore()
        return {replica: ShardResult(part, computed.gradients) for replica, (part, computed) in found.items()}


def _shared_state() -> tuple[object, ...]:
    """Return the state of the generators that all threads share, to see whether anybody drew from them."""
    numpy_state = pickle.dumps(np.random.get_state())
    return random.getstate(), numpy_state, torch.get_rng_state().numpy().tobytes()


def check_gradients(names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
    """Check that gradients can be summed in the tree.

    Raises:
        ConfigurationError: One is sparse.
    """
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"The gradient of {name} is sparse, which reproducible does not sum.\n"
                "Make the embedding with sparse=False, and use an optimizer for dense gradients."
            )
