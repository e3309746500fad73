"""The settings of the process that change the bits of a sum: threads and the choice of kernels."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_NO_DETERMINISTIC_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")


def use_threads(count: int) -> None:
    """Set the number of cores that an operation of the calling thread may use.

    torch gives a thread the process's number at the first operation that asks for it, over the thread's own; asking
    for it first gets that behind us.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


@dataclass(frozen=True)
class Arithmetic:
    """How a process computes.

    Args:
        threads: Cores that an operation on the CPU may use; as many as torch likes if None.
        deterministic: Whether to take deterministic kernels wherever there are some.
    """

    threads: int | None
    deterministic: bool

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Compute this way inside, and as before afterwards."""
        threads = torch.get_num_threads()
        deterministic, warn_only = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        benchmark = torch.backends.cudnn.benchmark
        if self.deterministic:
            # cuBLAS reads it when it is first used in the process.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=not deterministic or warn_only)
            torch.backends.cudnn.benchmark = False
        if self.threads is not None:
            use_threads(self.threads)
        try:
            yield
        finally:
            if self.threads is not None:
                torch.set_num_threads(threads)
            if self.deterministic:
                torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
                torch.backends.cudnn.benchmark = benchmark


@contextmanager
def watch_for_other_kernels(found: list[str]) -> Iterator[None]:
    """Add to ``found`` the operations that have no deterministic kernel here; other warnings go on as they are."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        match = _NO_DETERMINISTIC_KERNEL.match(str(warning.message))
        if match is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif match[1] not in found:
            found.append(match[1])


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return what the bits of a sum depend on besides program and data, by name."""
    machine = {"torch": torch.__version__.partition("+")[0]}
    if device.type == "cuda":
        return machine | {"device": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda)}
    return machine | {"device": _cpu_name(), "instructions": torch.backends.cpu.get_cpu_capability()}


def differences(first: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return in words in what ``other`` differs from ``first``."""
    names = dict.fromkeys([*first, *other])
    return [
        f"{name} {other.get(name, 'none')} instead of {first.get(name, 'none')}"
        for name in names
        if first.get(name) != other.get(name)
    ]


def first_unlike(machines: Sequence[dict[str, str]]) -> str | None:
    """Return in words the first of the ranks' ``machines`` that differs from rank 0's, and in what, or None."""
    for rank, machine in enumerate(machines):
        if unlike := differences(machines[0], machine):
            return f"rank {rank} computes elsewhere than rank 0: {', '.join(unlike)}"
    return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else "CPU"
