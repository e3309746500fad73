"""Choose the device and the backend of a rank."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from lockstep.env import Launcher, RankEnv
from lockstep.errors import ConfigurationError


def choose_device(env: RankEnv, wanted: str | torch.device | None) -> torch.device:
    """Return this rank's device and make it the current one, before anything else touches it.

    With no wish it is the GPU of the local rank where there are GPUs, else the CPU.

    Raises:
        ConfigurationError: There is no such device.
    """
    device = _parse(wanted) if wanted is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigurationError(
            f"device={str(wanted)!r} was asked for, but this machine has no usable CUDA GPU.\n"
            "Pass device='cpu', or check `nvidia-smi` and that this torch was built for CUDA "
            f"(torch.version.cuda is {torch.version.cuda})."
        )
    index = device.index if device.index is not None else _gpu_of(env, count)
    if index >= count:
        who = f"Local rank {env.local_rank}" if device.index is None else f"device={str(wanted)!r}"
        raise ConfigurationError(
            f"{who} has no GPU of its own: this process sees {count} (cuda:0 to cuda:{count - 1}).\n"
            f"Start at most {count} ranks on this machine, or pass device='cpu'."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def choose_backend(device: torch.device, wanted: str | None) -> str:
    """Return the name of the backend for ``device``: NCCL for CUDA; for the CPU shm, which needs to be tried, or Gloo.

    Raises:
        ConfigurationError: The backend that was asked for is unknown, or cannot serve the device here.
    """
    if wanted is None and device.type == "cpu" and sys.platform == "linux":
        return "shm"
    backend = (wanted or dist.get_default_backend_for_device(device)).lower()
    for name in (part.rpartition(":")[2] for part in backend.split(",")):
        if not dist.is_backend_available(name):
            usable = sorted(name for name in dist.Backend.backend_list if dist.is_backend_available(name))
            raise ConfigurationError(
                f"The backend {name!r} is not available in this torch.\nAvailable: {', '.join(usable)}."
            )
    if backend == "nccl" and device.type != "cuda":
        raise ConfigurationError(
            f"The backend 'nccl' moves CUDA tensors only, but the device is {str(device)!r}.\n"
            "Leave backend out, or pass backend='gloo'."
        )
    return backend


def _parse(wanted: str | torch.device) -> torch.device:
    try:
        return torch.device(wanted)
    except RuntimeError:
        raise ConfigurationError(
            f"device={wanted!r} is no device.\nPass 'cpu', 'cuda', 'cuda:<index>' or a torch.device."
        ) from None


def _gpu_of(env: RankEnv, count: int) -> int:
    # Schedulers may show each task only its own GPU, which then is number 0 for all of them.
    if count == 1 and env.launcher in (Launcher.SLURM, Launcher.OPEN_MPI, Launcher.PMI):
        return 0
    return env.local_rank
