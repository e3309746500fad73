"""Which devices a run trains on, checked against what there is."""

from __future__ import annotations

import torch

from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.train.settings import FitSettings

PER_PROCESS = ("ddp", "ddp-zero1", "fsdp", "torch-ddp")
"""The strategies with one process for each device."""


def devices_of(settings: FitSettings, world: World) -> list[torch.device]:
    """Return this process's devices.

    Raises:
        ConfigurationError: ``devices`` does not fit the processes that were started, or the GPUs of this machine.
    """
    strategy, wanted = settings.strategy, settings.devices
    if strategy in PER_PROCESS:
        if wanted is not None and wanted != world.world_size:
            started = f"{world.world_size} process{'es' * (world.world_size > 1)}"
            raise ConfigurationError(
                f"Strategy {strategy} on {wanted} devices needs as many processes, but this run has {started}.\n"
                f"Start them with `lockstep run SCRIPT --devices {wanted}`, or leave devices out."
            )
        return [world.device]
    if world.world_size > 1:
        raise ConfigurationError(
            f"Strategy {strategy} trains in one process, but {world.world_size} were started.\n"
            "Start one, or use strategy ddp, which trains in all of them."
        )
    if strategy == "single":
        if wanted is not None and wanted > 1:
            raise ConfigurationError(
                f"Strategy single trains on one device, but devices={wanted}.\nUse strategy dp or ddp for more."
            )
        return [world.device]
    if world.device.type != "cuda":
        return [world.device] * (wanted or 1)
    return [torch.device("cuda", index) for index in range(num_devices(wanted))]


def num_devices(wanted: int | None) -> int:
    """Return the number of devices: what was asked for, else every GPU of this machine, else one CPU.

    Raises:
        ConfigurationError: The machine has fewer GPUs.
    """
    check_gpus(wanted)
    return wanted or torch.cuda.device_count() or 1


def check_gpus(wanted: int | None) -> None:
    """Check that a machine with GPUs has ``wanted`` of them.

    Raises:
        ConfigurationError: It has fewer.
    """
    there = torch.cuda.device_count()
    if wanted is not None and 0 < there < wanted:
        raise ConfigurationError(
            f"devices={wanted}, but this machine has {there} GPU{'s' if there > 1 else ''}.\n"
            f"Ask for at most {there}, or hide the GPUs to train on CPUs: CUDA_VISIBLE_DEVICES= ."
        )
