"""Strategies ``local-sgd`` and ``diloco``: ranks or machines train independently and exchange parameters sometimes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.comm.collectives import Group, split_group
from lockstep.comm.world import World
from lockstep.data.loader import MicroBatch
from lockstep.errors import ConfigurationError
from lockstep.parallel.consistency import Replica, replica_of
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.local_sgd import DiLoCo, LocalSGD
from lockstep.train.checkpoints.checkpoint_storage import states_of_ranks
from lockstep.train.checkpoints.model_state import load_state_dict, plain_names, read_tensors, unwrap
from lockstep.train.settings import Settings
from lockstep.train.step import Objective, Part
from lockstep.train.strategies.strategy import Distributed, Pass, Single, Strategy
from lockstep.train.task import build_model

_SYNC_EVERY = {"local-sgd": 8, "diloco": 50}


@final
class LocalSteps(Strategy):
    """Replicas of the model train independently, each on its share of every global batch.

    A replica is a rank, or with ``across="machines"`` the ranks of a machine. Its gradient is the mean over its own
    samples. In an exchange, its weight is the number of samples, or tokens, that it has trained on since the last one.
    """

    exchanges = True

    def __init__(
        self, name: str, model: nn.Module, objective: Objective, world: World, settings: Settings, num_steps: int
    ) -> None:
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
            raise ConfigurationError(
                f"SyncBatchNorm exchanges statistics in every step, but strategy {name} does not communicate in every "
                "step.\nUse nn.BatchNorm, whose running statistics are averaged in exchanges, or strategy ddp."
            )
        self.group: Group = world.group
        self._device, self._task = world.device, objective.task
        self._model, self._num_steps = model, num_steps
        inside = machine_group(world) if settings.across == "machines" else None
        self._inner: Single | Distributed
        if inside is None:
            self._inner = Single(model, objective)
        else:
            self._inner = Distributed(model, objective, inside, world.device, DistributedDataParallel)
        self.step_group = self._inner.group
        self.gradients, self.part_was_bad = self._inner.gradients, self._inner.part_was_bad
        self.num_replicas = world.world_size // (1 if inside is None else inside.size())
        # The ranks of a replica have the same state: the first of them saves it.
        self._replica_rank = world.rank - (0 if inside is None else inside.rank())
        every = settings.sync_every or _SYNC_EVERY[name]
        options = ["fragments", "sync_delay", "compression", *(("outer_lr", "outer_momentum") * (name == "diloco"))]
        given = {option: getattr(settings, option) for option in options if getattr(settings, option) is not None}
        averaging = DiLoCo if name == "diloco" else LocalSGD
        self._averaging = averaging(model, None, every, process_group=world.group, **given)
        self._weight: float | Tensor = 0.0
        who = "ranks" if inside is None else "machines"
        self.note = f"{who} exchange parameters every {every} steps: by design not the same run as on one device"

    @override
    def take_over(self, optimizer: Optimizer) -> Optimizer:
        return self._inner.take_over(optimizer)

    @override
    def whole(self, model: nn.Module) -> nn.Module:
        """Return a new model with the outer parameters, and the buffers of the last exchange."""
        copy = build_model(self._task, self._device)
        load_state_dict(copy, None, {"model": self._outer_model_state()})
        return copy.train(model.training)

    @override
    def stamp_buckets(self, stamps: BucketStamps) -> bool:
        return self._inner.stamp_buckets(stamps)

    @override
    def run(self, micro: MicroBatch, how: Pass) -> None:
        """Collective in the replica, as `Distributed`."""

        def on_losses(parts: list[Part]) -> None:
            for part in parts:
                self._weight = self._weight + part.out_of
            how.on_losses(parts)

        # A replica has only its part of the sum over the global batch, and scales it to its own mean.
        self._inner.run(micro, replace(how, factor=how.factor * self.num_replicas, on_losses=on_losses))

    @override
    def agrees(self, step: int) -> bool:
        return bool(self._averaging.schedule.due(step + 1)) or step + 1 == self._num_steps

    @override
    def end_step(self, step: int) -> None:
        """Exchange the parameters that are due after this step; all of them after the last step of the run."""
        weight, self._weight = self._weight, 0.0
        self._averaging.step(weight)
        if step + 1 == self._num_steps:
            self._averaging.sync()

    @override
    def replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Return the state that is equal on all ranks also between exchanges: outer parameters and outer optimizer."""
        outer = {f"outer {name}": value for name, value in self._averaging.outer_state().items() if value.numel()}
        return {**outer, **replica_of(nn.Module(), self._averaging.outer_optimizer, buffers="same")}

    # --- checkpoints: the outer model, which is equal on all ranks, and the state of each replica ---

    def _outer_model_state(self) -> dict[str, Any]:
        """Return the state of the model with outer parameters; tied parameters under each of their names."""
        outer, model = self._averaging.outer_state(), unwrap(self._model)
        names = {id(each): name for name, each in (*self._model.named_parameters(), *self._model.named_buffers())}
        return {
            name: outer.get(names.get(id(value), ""), value)
            for name, value in plain_names(model.state_dict(keep_vars=True)).items()
        }

    @override
    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the outer model instead of this rank's model, and ``replicas``. Collective: every rank. Blocks."""
        state = self._averaging.state_dict()
        own, mine = state.pop("own"), {}
        if own["rank"] == self._replica_rank:
            mine = {**own, "model": plain_names(unwrap(self._model).state_dict())}
            if own["rank"]:  # the optimizer of rank 0 is the checkpoint's ``optimizer``
                mine["optimizer"] = optimizer.state_dict()["state"]
        everyone = states_of_ranks(mine, group=self.group, device=self._device)
        return {"model": self._outer_model_state(), "replicas": {**state, "own": everyone}}

    @override
    def load_state_dict(self, state: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Continue from ``state``, whose outer model and optimizer of rank 0 were loaded. Blocks.

        With the same number of ranks the run continues with the same bits. With another number, all replicas start
        from the outer parameters; each rank gets the optimizer state of the rank of its number, and new ranks that of
        rank 0. After a run with another strategy, all start from its state.
        """
        if "replicas" not in state:
            self._averaging.restart(state["num_steps_done"])
            return
        replicas = dict(state["replicas"])
        everyone = replicas.pop("own")
        kept = read_tensors(everyone[self._replica_rank]) if self._replica_rank < len(everyone) else {}
        load_state_dict(self._model, None, {"model": kept.get("model", state["model"])})
        if "optimizer" in kept:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": kept["optimizer"]})
        # All ranks of a replica continue with the state of its first rank.
        own = {**kept, "rank": self.group.rank(), "world_size": len(everyone) if kept else 0}
        self._averaging.load_state_dict({**read_tensors(replicas), "own": own})


def machine_group(world: World) -> Group:
    """Return the group of the ranks on this machine. Collective: every rank. Blocks.

    Raises:
        ConfigurationError: All ranks are on one machine.
    """
    # A separate group: the groups of a hierarchy run the stages of its collectives in their own order.
    inside = split_group(world.node_rank, group=world.group, device=world.device)
    if inside.size() == world.world_size > 1:
        raise ConfigurationError(
            "across=machines needs several machines, but all ranks are on one.\nOmit across, or use strategy ddp."
        )
    return inside
