"""Memory, processor time and devices of this machine and its ranks."""

import contextlib
import functools
import math
import os
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from lockstep.base.activity import format_bytes
from lockstep.base.env import RankEnv, process_tree, read_groups, throttled_s
from lockstep.comm.network import Sent, sent_to
from lockstep.telemetry.cost import Usage

# --- in the launcher: memory of this machine and its ranks, for the report of a rank that was killed ------------------

_OUT_OF_MEMORY = ("MemoryError", "OutOfMemory", "can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

SHM = "/dev/shm"
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
POWERCAP = Path("/sys/class/powercap")


@dataclass
class Resources:
    """The use of memory so far, updated regularly, as it cannot be read after a rank has ended.

    Attributes:
        rank_bytes: By rank, the last known memory of its processes, and the maximum so far.
        devices: By rank, a sentence on each of its devices, from its heartbeat.
        least_free_bytes: The minimum of the free memory of the machine, or of the container.
        total_bytes: The memory of the machine, or of the container.
        shm_total_bytes: The size of /dev/shm.
        shm_least_free_bytes: The minimum of its free space.
    """

    rank_bytes: dict[int, tuple[int, int]] = field(default_factory=dict)
    devices: dict[int, list[str]] = field(default_factory=dict)
    least_free_bytes: float = math.inf
    total_bytes: int = 0
    shm_total_bytes: int = 0
    shm_least_free_bytes: float = math.inf
    _kills_before: int | None = field(default_factory=lambda: num_kills())

    def update(self, pids: Mapping[int, int]) -> None:
        """Update the figures.

        Args:
            pids: The process of each rank.
        """
        for rank, pid in pids.items():
            # Children of main threads only, which is faster: this runs twice a second.
            used_bytes = sum(_resident_bytes(process_pid) for process_pid in process_tree(pid, of_all_threads=False))
            if used_bytes:  # otherwise it has just ended
                self.rank_bytes[rank] = used_bytes, max(used_bytes, self.rank_bytes.get(rank, (0, 0))[1])
        free, self.total_bytes = free_and_total_bytes()
        self.least_free_bytes = min(free, self.least_free_bytes)
        with contextlib.suppress(OSError):
            shm = psutil.disk_usage(SHM)
            self.shm_total_bytes, self.shm_least_free_bytes = shm.total, min(shm.free, self.shm_least_free_bytes)

    def was_short_of_memory(self) -> bool | None:
        """Return whether the kernel has killed processes for lack of memory since the start; ``None`` if unknown."""
        kills = num_kills()
        return None if kills is None or self._kills_before is None else kills > self._kills_before

    def of_each(self) -> str:
        """Return lines with the memory of each rank of this machine; empty if unknown."""
        if not self.rank_bytes:
            return ""
        lines = ["Last known memory of the ranks of this machine:"]
        for rank, (used_bytes, peak_bytes) in sorted(self.rank_bytes.items()):
            on_host = f"{format_bytes(used_bytes)} on the host (at most {format_bytes(peak_bytes)})"
            lines.append(f"rank {rank}: {'; '.join([*self.devices.get(rank, []), on_host])}")
        free, total = format_bytes(self.least_free_bytes), format_bytes(self.total_bytes)
        return "\n".join([*lines, f"The minimum of free memory was {free} of the host's {total}."])

    def of_shm(self) -> str:
        """Return a sentence on the shared memory; empty if unknown."""
        if not self.shm_total_bytes:
            return ""
        free, total = format_bytes(self.shm_least_free_bytes), format_bytes(self.shm_total_bytes)
        return f"The minimum of free space in /dev/shm was {free} of {total}."


def says_out_of_memory(text: str) -> bool:
    """Return whether the text of an error means that a device or the host was out of memory."""
    return any(sign in text for sign in _OUT_OF_MEMORY)


def num_kills() -> int | None:
    """Return how many processes the kernel of this machine has killed for lack of memory, also in containers."""
    with contextlib.suppress(OSError):
        counters = dict(line.split() for line in (PROC / "vmstat").read_text(errors="replace").splitlines())
        return int(counters["oom_kill"])
    return None


def free_and_total_bytes() -> tuple[int, int]:
    """Return free and total memory of the container if that is limited, or else of the machine."""
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    # The files of cgroup v2 and v1; the lowest limit of all levels counts.
    for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        texts = (read_groups("memory", name, CGROUPS, PROC / "self/cgroup") for name in names)
        for limit, used in zip(*texts, strict=False):
            if limit != "max" and int(limit) < machine.total:
                free, total = min(free, max(0, int(limit) - int(used))), min(total, int(limit))
    return free, total


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages, shared = (int(number) for number in (PROC / str(pid) / "statm").read_text(errors="replace").split()[1:3])
        # Without shared pages, which are files, or counted elsewhere.
        return (pages - shared) * resource.getpagesize()
    return 0


# --- in a rank: the use of its processes and devices ------------------------------------------------------------------

# Of NVML's reasons why a clock is low: the power cap, heat, and the power brake; the other bits mean idle or settings.
_GPU_SLOWED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80

# Fewer bytes do not measure a link: they are a few messages, each of which waits for its answer.
_TELLING_BYTES = 256 * 1024


class _Counter(NamedTuple):
    """A counter of energy: the joules that it shows, and the limit at which it starts again at 0."""

    joules: float
    limit: float


class UsageMeter:
    """Measures for how long devices are held, and the energy that they take.

    The energy of GPUs is that of NVML's counters (package ``nvidia-ml-py``). That of CPUs is that of RAPL's, which on
    most machines only root may read. Without them it is unknown; it is never estimated. A counter covers a whole GPU,
    or all CPU packages of the machine and their memory, including the work of other processes. If several ranks share
    a counter, the first that reads it counts it, and it is 0 on the others.

    Args:
        devices: Those of this process.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._num_devices, self._gpus = len(devices), [device for device in devices if device.type != "cpu"]
        self._read_at, self._counters = time.perf_counter(), self._read_counters()

    def read(self) -> Usage:
        """Return what was used since the last call, or since this object was created.

        Call it more often than a counter of RAPL starts again at 0, which takes minutes at least.
        """
        read_at_before, before = self._read_at, self._counters
        self._read_at, self._counters = time.perf_counter(), self._read_counters()
        device_s = self._num_devices * (self._read_at - read_at_before)
        if not before or before.keys() != self._counters.keys():
            return Usage(device_s, math.nan)  # a counter could not be read
        # The ranks of a job have the same port, and no other job on this machine has it. Without one, this is the job.
        job = RankEnv.from_environ(os.environ).master_port or os.getpid()
        counted_here = [name for name in before if _is_first(f"{job}-{name}", os.getpid())]
        # Modulo the limit: a counter that has passed it meanwhile shows less than before.
        used = [(self._counters[name].joules - before[name].joules) % before[name].limit for name in counted_here]
        return Usage(device_s, sum(used))

    def _read_counters(self) -> dict[str, _Counter]:
        """Return the counters by name; none if one cannot be read."""
        with contextlib.suppress(Exception):
            return _nvml_counters(self._gpus) if self._gpus else _rapl_counters()
        return {}


@functools.cache
def _is_first(name: str, pid: int) -> bool:
    """Return whether the process ``pid``, which is this one, is the first of this machine that asks for a name."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0lockstep-{name}")  # in the abstract namespace: the name is free again once the process has ended
    except OSError:
        claim.close()
        return False
    claim.detach()  # it stays open as long as this process
    return True


def _nvml_counters(gpus: Sequence[torch.device]) -> dict[str, _Counter]:
    nvml, handles = _nvml_handles(gpus)
    read_mj = nvml.nvmlDeviceGetTotalEnergyConsumption
    return {name: _Counter(read_mj(handle) / 1e3, 2.0**64) for name, handle in handles.items()}


def _nvml_handles(gpus: Sequence[torch.device]) -> tuple[Any, dict[str, Any]]:
    """Return NVML's module, and its handle of each GPU by UUID: NVML also numbers GPUs that are hidden from CUDA."""
    nvml = import_module("pynvml")
    nvml.nvmlInit()
    names = [f"GPU-{torch.get_device_module(gpu).get_device_properties(gpu).uuid}" for gpu in gpus]
    return nvml, {name: nvml.nvmlDeviceGetHandleByUUID(name) for name in names}


def _rapl_counters() -> dict[str, _Counter]:
    counters = {}
    for zone in POWERCAP.glob("intel-rapl:*"):  # the name on AMD, too
        # Other zones are parts of a package, or hold all packages: they would count twice.
        if (zone / "name").read_text(errors="replace").startswith(("package", "dram")):
            energy_uj, limit_uj = (int((zone / name).read_bytes()) for name in ("energy_uj", "max_energy_range_uj"))
            counters[zone.name] = _Counter(energy_uj / 1e6, limit_uj / 1e6)
    return counters


class MachineSampler:
    """Samples this process, its loader processes and its devices, each time it is called.

    Args:
        devices: Of this process.

    Attributes:
        used: The use up to the last call.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device for device in devices if device.type != "cpu"]
        self.used, self._meter, self._num_devices = Usage(), UsageMeter(devices), len(devices)
        self._process = psutil.Process()
        self._workers: dict[int, psutil.Process] = {}
        self._sent: dict[str, Sent] = {}
        self._host: dict[str, float] = {}
        self._sample_cores([])  # percentages refer to the time since the last call

    def __call__(self) -> dict[str, Any]:
        """Return the figures as a line; see docs/reference/metrics.md."""
        used = self._meter.read()  # first, as the calls below may fail
        self.used += used
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
            "num_threads": torch.get_num_threads(),
            "cpu_percent": self._process.cpu_percent(),
            "workers_cpu_percent": workers_cpu,
            **self._sample_cores([self._process.pid, *self._workers]),
            "load": os.getloadavg()[0],
            "gpu_percent": self._ask_driver("utilization"),
            "gpu_power_w": self._ask_driver("power_draw", scale=1e-3),
            "gpu_temperature_c": self._ask_driver("temperature"),
            "gpu_throttled_percent": self._gpu_throttled_percent(),
            **self._sample_links(),
            "num_devices": self._num_devices,
            "device_s": used.device_s,
            "energy_j": None if math.isnan(used.energy_j) else used.energy_j,
        }

    def _ask_driver(self, figure: str, *, scale: float = 1.0) -> float | None:
        with contextlib.suppress(Exception):  # NVML's module is not installed, or the driver lacks this figure
            return scale * float(getattr(torch.get_device_module(self._gpus[0]), figure)(self._gpus[0]))
        return None

    def _gpu_throttled_percent(self) -> float | None:
        with contextlib.suppress(Exception):  # as above
            nvml, handles = _nvml_handles(self._gpus[:1])
            (reasons,) = map(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handles.values())
            return 100.0 * bool(reasons & _GPU_SLOWED)
        return None

    def _sample_cores(self, pids: Sequence[int]) -> dict[str, float | None]:
        """Return how much of the cores others used since the last call, in percent of a core.

        Args:
            pids: Of this rank; the longest wait of a main thread for a core counts.
        """
        times = psutil.cpu_times()
        now = {"steal": times.steal, "throttled": throttled_s(), "at": time.monotonic()}
        # The fields after the eighth are parts of the others.
        now["host_cpu"] = sum(times[:8]) - times.idle - times.iowait - times.steal
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
                now[str(pid)] = int((PROC / str(pid) / "schedstat").read_text(errors="replace").split()[1]) / 1e9
        before, self._host = self._host, now
        past_s = now["at"] - before.get("at", 0.0)
        percent = {name: 100 * (now[name] - before[name]) / past_s for name in now if name in before}
        waits = [percent[name] for name in map(str, pids) if name in percent]
        percents = {f"{name}_percent": percent.get(name) for name in ("host_cpu", "steal", "throttled")}
        return percents | {"core_wait_percent": max(waits, default=None)}

    def _sample_links(self) -> dict[str, Any]:
        """Return the bytes sent to other machines, and the slowest link since the last call."""
        before, self._sent = self._sent, sent_to()
        rates = {}
        for peer, traffic in self._sent.items():
            sent, busy_s = (new - old for new, old in zip(traffic, before.get(peer, Sent(0, 0.0)), strict=True))
            if sent >= _TELLING_BYTES and busy_s > 0:
                rates[peer] = sent / busy_s
        slowest = min(rates, key=rates.__getitem__, default=None)
        total = sum(traffic.num_bytes for traffic in self._sent.values()) if self._sent else None
        return {"sent_bytes": total, "link_bytes_per_s": rates.get(slowest or ""), "link_peer": slowest}

    def _sample_workers(self) -> tuple[float, int]:
        workers: dict[int, psutil.Process] = {}
        percent, rss_bytes = 0.0, 0
        for pid in process_tree(self._process.pid):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if pid != self._process.pid:
                    # The same object as before, as its percentage refers to the time since its last call.
                    workers[pid] = self._workers.get(pid) or psutil.Process(pid)
                    percent += workers[pid].cpu_percent()
                    rss_bytes += workers[pid].memory_info().rss
        self._workers = workers
        return percent, rss_bytes
