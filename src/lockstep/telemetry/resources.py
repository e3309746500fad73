"""Memory, processor time and devices of this machine and its ranks."""

import contextlib
import math
import os
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.comm.network import Sent, sent_to
from lockstep.env import group_folders
from lockstep.telemetry.rank_state import format_bytes, process_tree

# --- in the launcher: memory of this machine and its ranks, for when one is killed ------------------------------------

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

SHM = "/dev/shm"
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass
class Resources:
    """What was seen of memory so far; updated now and then, as the figures are gone with the ranks.

    Attributes:
        rank_bytes: By rank, the memory that it and its processes held when last seen.
        peak_bytes: By rank, the most that was seen.
        devices: By rank, what its heartbeat has of its devices, a sentence each.
        least_free_bytes: The least free memory that was seen on the machine, or in the container.
        total_bytes: How much there is.
        shm_total_bytes: The size of /dev/shm.
        shm_least_free_bytes: The least that was free there.
    """

    rank_bytes: dict[int, int] = field(default_factory=dict)
    peak_bytes: dict[int, int] = field(default_factory=dict)
    devices: dict[int, list[str]] = field(default_factory=dict)
    least_free_bytes: float = math.inf
    total_bytes: int = 0
    shm_total_bytes: int = 0
    shm_least_free_bytes: float = math.inf
    _kills_before: int | None = field(default_factory=lambda: num_kills())

    def update(self, pids: Mapping[int, int]) -> None:
        """Take what is used now.

        Args:
            pids: The process of each rank.
        """
        for rank, pid in pids.items():
            # Children of main threads only: this runs twice a second, and is quicker so.
            held = sum(_resident_bytes(each) for each in process_tree(pid, of_all_threads=False))
            if held:  # else it has just ended, and what it held before is of interest
                self.rank_bytes[rank] = held
                self.peak_bytes[rank] = max(held, self.peak_bytes.get(rank, 0))
        free, self.total_bytes = free_and_total_bytes()
        self.least_free_bytes = min(free, self.least_free_bytes)
        with contextlib.suppress(OSError):
            shm = os.statvfs(SHM)
            self.shm_total_bytes, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
            self.shm_least_free_bytes = min(free, self.shm_least_free_bytes)

    def was_short_of_memory(self) -> bool | None:
        """Return whether the kernel has killed for lack of memory since this was made; ``None`` if that is unknown."""
        kills = num_kills()
        return None if kills is None or self._kills_before is None else kills > self._kills_before

    def of_each(self) -> str:
        """Return a line with the memory of each rank of this machine; empty if nothing was seen."""
        if not self.rank_bytes:
            return ""
        lines = ["Memory of the ranks of this machine, as last seen:"]
        for rank, held in sorted(self.rank_bytes.items()):
            on_host = f"{format_bytes(held)} on the host (at most {format_bytes(self.peak_bytes[rank])})"
            lines.append(f"rank {rank}: {'; '.join([*self.devices.get(rank, []), on_host])}")
        free, total = format_bytes(self.least_free_bytes), format_bytes(self.total_bytes)
        return "\n".join([*lines, f"At the worst, {free} of the host's {total} were free."])

    def of_shm(self) -> str:
        """Return a sentence with the figures of shared memory; empty if nothing was seen."""
        if not self.shm_total_bytes:
            return ""
        free, total = format_bytes(self.shm_least_free_bytes), format_bytes(self.shm_total_bytes)
        return f"Of /dev/shm, {free} of {total} were free at the worst that was seen."


def says_out_of_memory(text: str) -> bool:
    """Return whether the text of an error means that there was no memory left, on a device or on the host."""
    return any(sign in text for sign in _OUT_OF_MEMORY)


def num_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory, here or in this container."""
    groups = _groups()
    files = (PROC / "vmstat", groups[0] / "memory.events", *(folder / "memory.oom_control" for folder in groups))
    found = [_entry(path, "oom_kill") for path in files]
    known = [number for number in found if number is not None]
    return sum(known) if known else None


def free_and_total_bytes() -> tuple[int, int]:
    """Return the free memory of the container if that is limited, or else of the machine, and the whole."""
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    # The files of cgroup v2, and those of v1; whichever level limits most is what the kernel acts on.
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for folder in _groups():
        for limit_name, used_name in names:
            with contextlib.suppress(OSError, ValueError):  # ValueError: it is "max"
                limit = int((folder / limit_name).read_text())
                if limit < machine.total:
                    free = min(free, max(0, limit - int((folder / used_name).read_text())))
                    total = min(total, limit)
    return free, total


def _groups() -> list[Path]:
    return group_folders("memory", CGROUPS, PROC / "self/cgroup")


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages, shared = (int(number) for number in (PROC / str(pid) / "statm").read_text().split()[1:3])
        return (pages - shared) * os.sysconf("SC_PAGE_SIZE")  # what it shares is counted elsewhere, or is a file
    return 0


def _entry(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            fields = line.split()
            if fields and fields[0] == name:
                return int(fields[1])
    return None


# --- in a rank: what its process and devices take ---------------------------------------------------------------------

# Less than this says nothing of a link: a few messages, each of which waits for its answer.
_TELLING_BYTES = 256 * 1024


class MachineSampler:
    """Samples this process, its loader processes and its devices, each time it is called.

    Args:
        devices: Those of this process.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device for device in devices if device.type != "cpu"]
        self._process = psutil.Process()
        self._workers: dict[int, psutil.Process] = {}
        self._sent: dict[str, Sent] = {}
        self._process.cpu_percent()  # percentages are of the time since the call before

    def __call__(self) -> dict[str, Any]:
        """Return the figures as a line; see docs/reference/metrics.md."""
        workers_cpu, workers_rss = self._sample_workers()
        return {
            "kind": "machine",
            "time": time.time(),
            "memory_bytes": sum(map(torch.accelerator.memory_allocated, self._gpus)) if self._gpus else None,
            "memory_peak_bytes": sum(map(torch.accelerator.max_memory_allocated, self._gpus)) if self._gpus else None,
            "rss_bytes": self._process.memory_info().rss,
            "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "workers_rss_bytes": workers_rss,
            "num_workers": len(self._workers),
            "cpu_percent": self._process.cpu_percent(),
            "workers_cpu_percent": workers_cpu,
            "load": os.getloadavg()[0],
            "gpu_percent": self._ask_driver("utilization"),
            "gpu_power_w": self._ask_driver("power_draw", scale=1e-3),
            "gpu_temperature_c": self._ask_driver("temperature"),
            **self._sample_links(),
        }

    def _ask_driver(self, what: str, *, scale: float = 1.0) -> float | None:
        with contextlib.suppress(Exception):  # NVML's module is not installed, or the driver does not give this figure
            return scale * float(getattr(torch.get_device_module(self._gpus[0]), what)(self._gpus[0]))
        return None

    def _sample_links(self) -> dict[str, Any]:
        """Return what was sent to other machines, and the slowest way there since the call before."""
        before, self._sent = self._sent, sent_to()
        rates = {}
        for peer, now in self._sent.items():
            sent, busy_s = (new - old for new, old in zip(now, before.get(peer, Sent(0, 0.0)), strict=True))
            if sent >= _TELLING_BYTES and busy_s > 0:
                rates[peer] = sent / busy_s
        slowest = min(rates, key=rates.__getitem__, default=None)
        total = sum(each.num_bytes for each in self._sent.values())
        rate = None if slowest is None else rates[slowest]
        return {"sent_bytes": total if self._sent else None, "link_bytes_per_s": rate, "link_peer": slowest}

    def _sample_workers(self) -> tuple[float, int]:
        found: dict[int, psutil.Process] = {}
        percent, rss_bytes = 0.0, 0
        for pid in process_tree(self._process.pid):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if pid != self._process.pid:
                    # The object of the sample before, as it remembers since when its percentage is to be.
                    found[pid] = self._workers.get(pid) or psutil.Process(pid)
                    percent += found[pid].cpu_percent()
                    rss_bytes += found[pid].memory_info().rss
        self._workers = found
        return percent, rss_bytes
