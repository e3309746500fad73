"""The versions that this rank runs."""

from __future__ import annotations

import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lockstep.study.doctor.topics.versions import VersionFacts

_DRIVER = Path("/sys/module/nvidia/version")
_CPUS = Path("/proc/cpuinfo")


def version_facts(rank: int, *, on_gpus: bool) -> VersionFacts:
    """Return the versions of rank ``rank``, which is this process."""
    return VersionFacts(
        rank=rank,
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=torch.__version__,
        lockstep=_own(),
        cuda=torch.version.cuda or "",
        nccl=_nccl(),
        driver=_first(_DRIVER, ""),
        processor=torch.cuda.get_device_name()
        if on_gpus and torch.cuda.device_count()
        else _first(_CPUS, "model name"),
    )


def _own() -> str:
    try:
        return version("lockstep-torch")
    except PackageNotFoundError:
        return ""


def _nccl() -> str:
    if not torch.cuda.is_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _first(file: Path, beginning: str) -> str:
    """Return the first line of ``file`` that begins so, or what follows its colon."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    line = next((line for line in lines if line.startswith(beginning)), "")
    return line.partition(":")[2].strip() if beginning else line.strip()
