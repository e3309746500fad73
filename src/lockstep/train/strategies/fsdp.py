"""Strategy ``fsdp``: torch's own ``fully_shard``, for models that are too large for one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.accelerator import is_on_meta
from lockstep.comm import fully_shard
from lockstep.comm.fully_shard import fully_shard_units, local_part, sum_gradients
from lockstep.comm.world import World
from lockstep.data.loader import MicroBatch
from lockstep.errors import ConfigurationError
from lockstep.parallel.consistency import refuse_difference, replica_of
from lockstep.train.step import GradientList, LossModule, Objective, Part
from lockstep.train.strategies.strategy import Pass, Strategy, scaled
from lockstep.train.task import build_model, initialize


@final
class FullyShard(Strategy):
    """One process for each device; each rank keeps its part of the parameters, gradients and optimizer state.

    The root is the module that computes the loss, so parameters outside of the units are whole during that time.
    """

    buffers = "own"
    can_replay = False  # torch's engine would add unreduced gradients to those of the next step

    def __init__(self, model: nn.Module, objective: Objective, world: World, device: torch.device) -> None:
        self.group = world.group
        self._task, self._device, self._num_ranks = objective.task, device, world.world_size
        # Every rank builds its own part: the model must depend on the seed alone, not on the rank.
        replica = replica_of(model, buffers="same")
        refuse_difference(
            {name: torch.tensor(each.shape) if each.is_meta else each for name, each in replica.items()},
            group=world.group,
            device=world.device,
            now=" when they begin",
            since="Under fsdp the model must depend on the seed alone, not on the rank.",
        )
        self._module = LossModule(model, objective)
        units = find_units(model) if self._task.shard is None else list(self._task.shard(model))
        self._counts_waits = fully_shard_units(self._module, units, group=world.group, device=device)
        if is_on_meta(model):
            initialize(model, device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def local_gradients() -> list[Tensor]:
            return [local_part(parameter.grad) for parameter in trained if parameter.grad is not None]

        self.gradients = GradientList(local_gradients, local_part(trained[0]), world.group)

    @override
    def whole(self, model: nn.Module) -> nn.Module:
        """Return a new model with all parameters, on this rank's device. Collective: every rank. Blocks."""
        state = {name: fully_shard.whole(value) for name, value in model.state_dict().items()}
        copy = build_model(self._task, self._device)
        copy.load_state_dict(state)
        return copy.train(model.training)

    @override
    def weights(self, model: nn.Module) -> nn.Module:
        return model

    @override
    def run(self, micro: MicroBatch, how: Pass) -> None:
        """Collective: every rank, with samples.

        Raises:
            ConfigurationError: On every rank: some have no samples.
        """
        if not how.all_have_samples():
            raise ConfigurationError(
                "A batch leaves ranks without samples, which would not take part in fsdp's collectives.\n"
                "Omit the last batch of an epoch (drop_last=True in the task), or use strategy ddp-zero1."
            )
        # Set in each micro-batch, because torch's engine keeps the setting of the last one.
        sum_gradients(self._module, over_ranks=how.sync)
        how.timer.begin("forward")
        part: Part = self._module(micro.batches[0], micro.sizes[0])
        how.timer.begin("backward")
        how.on_losses([part])
        scaled(part, how.scale * self._num_ranks).backward()  # torch's mean over the ranks becomes the sum again
        if self._counts_waits:
            how.timer.mark_waits_counted()


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return the units of sharding: each child with parameters of the outermost ``ModuleList`` and ``Sequential``.

    Blocks that share parameters with other modules belong to the root.
    """
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    units = []
    for unit in dict.fromkeys(_children_of_lists(model)):
        inside = Counter(id(parameter) for module in unit.modules() for parameter in module.parameters(recurse=False))
        if inside and all(uses[each] == count for each, count in inside.items()):
            units.append(unit)
    return units


def _children_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            yield child
        else:
            yield from _children_of_lists(child)
