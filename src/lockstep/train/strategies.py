"""The strategies by name: how each divides a global batch, and who computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.comm.world import World
from lockstep.data.division import Division
from lockstep.errors import ConfigurationError
from lockstep.train.devices import PER_PROCESS
from lockstep.train.engine import check_engine, leave_alone, our_wrapper, torch_data_parallel
from lockstep.train.objective import Objective
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.strategy import Distributed, Replicated, Single, Strategy


def divide(name: StrategyName, world: World, devices: Sequence[torch.device], settings: Settings) -> Division:
    """Return how strategy ``name`` divides a global batch, and what of it falls to this process.

    Raises:
        ConfigurationError: It divides a batch evenly whatever ``settings.shares`` are.
    """
    accumulate, shares = settings.accumulate, settings.shares
    if name in PER_PROCESS:
        return Division(world.world_size, range(world.rank, world.rank + 1), accumulate, shares)
    if name == "torch-dp" and shares is not None:
        raise ConfigurationError(
            "Strategy torch-dp cannot follow shares: torch.nn.DataParallel divides a batch evenly.\n"
            "Use strategy dp, or leave shares out."
        )
    num_shares = len(devices) if name in ("dp", "dp-zero1") else 1  # torch's DataParallel divides the batch itself
    return Division(num_shares, range(num_shares), accumulate, shares)


def make_strategy(
    name: StrategyName,
    model: nn.Module,
    objective: Objective,
    world: World,
    devices: Sequence[torch.device],
    settings: Settings,
) -> Strategy:
    """Return the strategy ``name`` for the bare ``model``, which is on the first of ``devices``.

    Collective for strategies with a process for each device: every rank.

    Raises:
        ConfigurationError: It cannot run on these devices.
    """
    check_engine(name, settings)
    has_sync_layers = any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())
    if has_sync_layers and name not in PER_PROCESS:
        leave_alone(model)
    if has_sync_layers and name == "torch-ddp" and devices[0].type == "cpu":
        raise ConfigurationError(
            "torch's DistributedDataParallel refuses SyncBatchNorm layers on the CPU, lockstep's too.\n"
            "Use strategy ddp, and leave torch-ddp out of a comparison (--strategies dp,ddp)."
        )
    if name == "single":
        return Single(model, objective)
    if name in ("dp", "dp-zero1"):
        return Replicated(model, objective, devices, shards_optimizer=name == "dp-zero1")
    if name == "torch-dp":
        return Single(torch_data_parallel(model, devices), objective)
    if name == "ddp":
        return Distributed(model, objective, world, our_wrapper(settings), watches_part=settings.overlap_optimizer)
    if name == "ddp-zero1":
        from lockstep.train.zero1 import Zero1

        return Zero1(model, objective, world, our_wrapper(settings))
    if name == "fsdp":
        from lockstep.train.fsdp import FullyShard

        return FullyShard(model, objective, world, devices[0])
    return Distributed(model, objective, world, nn.parallel.DistributedDataParallel)
