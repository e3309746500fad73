"""What a process and its devices take: memory, processor time, and what NVML says of a GPU where it can be asked."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import psutil
import torch

from lockstep.telemetry.life import family


class MachineSampler:
    """Looks at this process, its loader processes and its devices, each time it is called.

    Args:
        devices: Those of this process.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._process = psutil.Process()
        self._workers: dict[int, psutil.Process] = {}
        self._process.cpu_percent()
        self._nvml = _Nvml(self._gpus[0]) if self._gpus else None

    def __call__(self) -> dict[str, Any]:
        """Return the figures as a line; see ``MACHINE`` in names.py."""
        workers_cpu, workers_rss = self._look_at_workers()
        gpu = (None, None, None) if self._nvml is None else self._nvml.read()
        return {
            "kind": "machine",
            "time": time.time(),
            "memory_bytes": self._memory(torch.cuda.memory_allocated),
            "memory_peak_bytes": self._memory(torch.cuda.max_memory_allocated),
            "rss_bytes": self._process.memory_info().rss,
            "rss_peak_bytes": _peak_bytes(),
            "workers_rss_bytes": workers_rss,
            "num_workers": len(self._workers),
            "cpu_percent": self._process.cpu_percent(),
            "workers_cpu_percent": workers_cpu,
            "load": os.getloadavg()[0],
            "gpu_percent": gpu[0],
            "gpu_power_w": gpu[1],
            "gpu_temperature_c": gpu[2],
        }

    def _memory(self, ask: Any) -> int | None:
        return sum(ask(gpu) for gpu in self._gpus) if self._gpus else None

    def _look_at_workers(self) -> tuple[float, int]:
        pids = [pid for pid in family(self._process.pid) if pid != self._process.pid]
        found: dict[int, psutil.Process] = {}
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                found[pid] = self._workers.get(pid) or psutil.Process(pid)
        self._workers = found
        percent, rss_bytes = 0.0, 0
        for worker in self._workers.values():
            with contextlib.suppress(psutil.Error):  # it has just ended
                percent += worker.cpu_percent()
                rss_bytes += worker.memory_info().rss
        return percent, rss_bytes


class _Nvml:
    """What NVML says of one GPU; nothing where it is not installed or does not answer."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        with contextlib.suppress(Exception):  # not installed, no driver, no permission
            nvml = import_module("pynvml")
            nvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._nvml = nvml

    def read(self) -> tuple[float | None, float | None, float | None]:
        """Return utilisation in percent, power in watts, temperature in degrees Celsius."""
        nvml = self._nvml
        if nvml is None:
            return None, None, None
        percent = watts = degrees = None
        with contextlib.suppress(Exception):
            percent = float(nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        with contextlib.suppress(Exception):
            watts = nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        with contextlib.suppress(Exception):
            degrees = float(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU))
        return percent, watts, degrees


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
