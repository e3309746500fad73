"""Which devices a DataParallel module runs on."""

import warnings
from collections.abc import Callable, Sequence

import torch

from lockstep.errors import ConfigurationError
from lockstep.parallel.dp.scatter import Device, as_device

_IMBALANCE_RATIO = 0.75


def choose_devices(device_ids: Sequence[Device] | None) -> list[torch.device]:
    """Return the devices to replicate to: those named, else all GPUs; none where there are no GPUs.

    As with torch's class, GPUs named on a machine that has none come to no devices: the module then just runs.

    Raises:
        ConfigurationError: Devices of several types, of a type that is neither "cpu" nor "cuda", or that do not exist.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = list(range(num_gpus)) if device_ids is None else list(device_ids)
    types = {"cuda" if isinstance(device, int) else torch.device(device).type for device in named}
    if not named or (types == {"cuda"} and num_gpus == 0):
        return []
    if len(types) > 1 or not types <= {"cpu", "cuda"}:
        raise ConfigurationError(
            f"DataParallel cannot use the devices {sorted(types)} together.\n"
            'Name devices of one type in device_ids: GPUs, as in [0, 1], or the CPU, as in ["cpu", "cpu"].'
        )
    devices = [_existing(device, num_gpus, "device_ids") for device in named]
    if "cuda" in types:
        warn_imbalance(devices)
    return devices


def choose_output_device(output_device: Device | None, devices: Sequence[torch.device]) -> torch.device:
    """Return where outputs are gathered: the device named, else the first of ``devices``.

    Raises:
        ConfigurationError: It does not exist.
    """
    if output_device is None:
        return devices[0]
    if output_device == -1:
        return torch.device("cpu")
    return _existing(output_device, torch.cuda.device_count() if torch.cuda.is_available() else 0, "output_device")


def as_listed(device: torch.device) -> int | torch.device:
    """Return ``device`` as torch's class lists it: a GPU as its index."""
    return device.index if device.type == "cuda" else device


def warn_imbalance(devices: Sequence[torch.device]) -> None:
    """Warn if one GPU has less than 75% of the memory or the cores of another: the slowest sets the pace."""
    unique = list(dict.fromkeys(devices))
    measures: dict[str, Callable[[torch.device], int]] = {
        "memory": lambda device: torch.cuda.get_device_properties(device).total_memory,
        "cores": lambda device: torch.cuda.get_device_properties(device).multi_processor_count,
    }
    for what, measure in measures.items():
        weakest, strongest = min(unique, key=measure), max(unique, key=measure)
        if measure(weakest) < _IMBALANCE_RATIO * measure(strongest):
            warnings.warn(
                f"There is an imbalance between your GPUs: {weakest} has less than 75% of the {what} of {strongest}, "
                "and every step lasts as long as on the weakest. Leave it out of device_ids, or out of "
                "CUDA_VISIBLE_DEVICES.",
                stacklevel=4,
            )
            return


def _existing(device: Device, num_gpus: int, argument: str) -> torch.device:
    if isinstance(device, int):
        index: int | None = device
    else:
        device = torch.device(device)
        if device.type != "cuda":
            return as_device(device)
        index = device.index
    if index is not None and not 0 <= index < num_gpus:
        raise ConfigurationError(
            f"{argument} names GPU {index}, but this process sees {num_gpus} (numbered from 0).\n"
            "Name fewer devices, or make more visible with CUDA_VISIBLE_DEVICES."
        )
    return as_device(device)
