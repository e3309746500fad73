"""From the name of a strategy to the strategy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.parallel.consistency import check_models_agree
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.sync_batchnorm import SyncBatchNorm, describe_apart, synchronise
from lockstep.train.plan import PER_PROCESS, Plan
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.step_parts import Objective
from lockstep.train.strategies import strategy as strategies


def share_batch_norms(
    name: StrategyName, model: nn.Module, settings: Settings, world: World, devices: Sequence[torch.device]
) -> str | None:
    """Make the batch norms of ``model`` normalise over all ranks, in place, with the strategies whose ranks can.

    Returns:
        A line about them; None if there are none, or there is one device.
    """
    if settings.sync_batchnorm is not False and name in ("ddp", "ddp-zero1"):
        return synchronise(model, world)
    has_several = len(devices) > 1 or (name in PER_PROCESS and world.world_size > 1)
    return describe_apart(model) if has_several else None


def make_strategy(
    name: StrategyName,
    model: nn.Module,
    objective: Objective,
    settings: Settings,
    world: World,
    devices: Sequence[torch.device],
    plan: Plan,
    *,
    is_first: bool,
) -> strategies.Strategy:
    """Return the strategy ``name``. Collective for strategies with a process for each device: every rank.

    ``model`` is on the first of ``devices``, which are this process's. After a recovery, which is not the first time,
    all ranks hold the same model.

    Raises:
        ConfigurationError: It cannot run on these devices.
    """
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
        if name == "torch-ddp" and devices[0].type == "cpu":
            raise ConfigurationError(
                "torch's DistributedDataParallel does not support SyncBatchNorm layers on the CPU.\n"
                "Use strategy ddp, and omit torch-ddp from a comparison (--strategies dp,ddp)."
            )
        for layer in model.modules():
            if name not in PER_PROCESS and isinstance(layer, SyncBatchNorm):
                # The ranks of a process group, if there is one, do not train this model: do not wait for them.
                layer.alone = True
    if name == "single":
        return strategies.Single(model, objective)
    if name == "dp":
        return strategies.Replicated(model, objective, devices)
    if name == "torch-dp":
        if any(device.type != "cuda" for device in devices):
            raise ConfigurationError(
                "Strategy torch-dp needs CUDA devices: torch.nn.DataParallel does nothing on CPUs.\n"
                "Use strategy dp, which runs on CPUs too."
            )
        return strategies.Single(nn.DataParallel(model, device_ids=[device.index for device in devices]), objective)
    if name in ("fsdp", "torch-ddp"):  # torch's classes do not compare names
        named = model.named_parameters(remove_duplicate=False)
        check_models_agree(named, model.named_buffers(), group=world.group, device=world.device)
    if name == "fsdp":
        return strategies.FullyShard(model, objective, world, devices[0], compiles=settings.compile)
    distributed = partial(strategies.Distributed, model, objective, world.group, world.device)
    if name == "torch-ddp":
        return distributed(nn.parallel.DistributedDataParallel)
    compression, cap_mb = settings.compression, settings.bucket_cap_mb
    every = 1000 if settings.check_replicas else 0  # besides the checks of this class
    wrap = partial(
        DistributedDataParallel,
        compression=compression,
        bucket_cap_mb=cap_mb,
        init_sync=is_first,
        check_replicas=every,
    )
    if name in ("local-sgd", "diloco"):
        return strategies.LocalSteps(name, model, objective, world, settings, plan.num_steps)
    return distributed(
        wrap,
        overlap_optimizer=settings.overlap_optimizer,
        shards_optimizer=name == "ddp-zero1",
        redundancy=settings.redundancy > 0,
    )
