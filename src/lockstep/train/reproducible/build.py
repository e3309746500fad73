"""Put the reproducible mode together: the virtual shards of this process, and the strategy that computes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.model_sync import ModelSync
from lockstep.train.arithmetic import Arithmetic
from lockstep.train.objective import Objective
from lockstep.train.reproducible.placement import VirtualShards, place
from lockstep.train.reproducible.replicas import LocalReplicas, ManyReplicas, OneReplica
from lockstep.train.reproducible.strategy import Reproducible
from lockstep.train.settings import Settings, StrategyName


def virtual_shards(
    name: StrategyName, world: World, devices: Sequence[torch.device], settings: Settings
) -> VirtualShards | None:
    """Return the virtual shards if ``settings`` ask for them, else None.

    Raises:
        ConfigurationError: The strategy is torch's, or there are fewer shards than devices.
    """
    if settings.reproducible is None:
        return None
    if name not in ("single", "dp", "ddp"):
        is_torchs = name.startswith("torch-")
        why = "torch's engine sums in an order of its own" if is_torchs else "it works on slices, which end anywhere"
        instead = "dp" if "dp" in (name.removeprefix("torch-"), name.removesuffix("-zero1")) else "ddp"
        raise ConfigurationError(
            f"Strategy {name} cannot be reproducible: {why}.\nUse strategy {instead}, or leave reproducible out."
        )
    num_devices = world.world_size if name == "ddp" else len(devices) if name == "dp" else 1
    placement = place(settings.reproducible, num_devices, settings.shares)
    ranges = placement.ranges
    return VirtualShards(placement, (ranges[world.rank],) if name == "ddp" else ranges)


def make_reproducible(
    shards: VirtualShards,
    name: StrategyName,
    model: nn.Module,
    objective: Objective,
    world: World,
    devices: Sequence[torch.device],
    arithmetic: Arithmetic,
) -> Reproducible:
    """Return the strategy for the bare ``model``, which is on the first of ``devices``.

    Collective for ``ddp``: every rank, which all take over the model of rank 0.

    Raises:
        ConfigurationError: The model has layers or buffers that cannot be summed.
        ModelMismatch: The model differs between ranks.
    """
    group = world.group if name == "ddp" else None
    if group is not None:
        sync = ModelSync(model, set(), group, devices[0])
        sync.check(with_buffers=True)
        sync.broadcast(src=0, with_buffers=True)
    replicas: LocalReplicas = (
        ManyReplicas(model, objective, devices, arithmetic)
        if name == "dp" and len(devices) > 1
        else OneReplica(model, objective, devices[0])
    )
    return Reproducible(model, replicas, shards.placement, devices, group)
