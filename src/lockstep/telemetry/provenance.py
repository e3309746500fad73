"""The versions, the machine and the commits of a measurement."""

import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Provenance:
    """What is needed to repeat a measurement.

    Attributes:
        when: UTC, ISO 8601.
        versions: By name: lockstep, torch, python, and CUDA if torch was built with it.
        machine: Facts by name.
        commits: Of the git checkouts of lockstep and of the task, if any; with a ``+`` if tracked files were changed.
    """

    when: str
    versions: dict[str, str]
    machine: dict[str, str]
    commits: dict[str, str]

    def facts(self) -> list[tuple[str, str]]:
        """Return all as pairs of a name and a text."""
        commits = [(f"{name} commit", short_commit(commit)) for name, commit in self.commits.items()]
        return [("measured", self.when), *self.versions.items(), *self.machine.items(), *commits]


def gather(task_path: Path | None = None) -> Provenance:
    """Describe this machine and these versions; ``task_path`` adds the commit of the task's checkout."""
    paths = {"lockstep": Path(__file__), "task": task_path and task_path.resolve()}
    commits = {name: commit for name, path in paths.items() if path and (commit := commit_of(path.parent))}
    return Provenance(datetime.now(UTC).isoformat(timespec="seconds"), versions(), _machine(), commits)


def commit_of(folder: Path) -> str | None:
    """Return the commit checked out in ``folder``, if any, with a ``+`` if tracked files differ from it."""
    describe = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(describe, capture_output=True, errors="replace", timeout=GIT_TIMEOUT_S, check=True)
        return done.stdout.strip()
    return None


def short_commit(commit: str) -> str:
    """Return what `commit_of` has found for a reader."""
    return commit[:12] + " + changes" * commit.endswith("+")


def versions() -> dict[str, str]:
    """Return the versions of Lockstep, torch and Python, and of the CUDA, ROCm or XPU that torch was built for."""
    lockstep_version = sys.modules["lockstep"].__version__  # not imported: the public names are above all layers
    numbers = {"lockstep": lockstep_version, "torch": torch.__version__, "python": sys.version.split()[0]}
    built_for = {"cuda": torch.version.cuda, "rocm": torch.version.hip, "xpu": torch.version.xpu}
    return numbers | {name: str(number) for name, number in built_for.items() if number}


def _machine() -> dict[str, str]:
    facts = {
        "os": platform.platform(),
        "cpu": cpu_model(),
        "cores": f"{len(os.sched_getaffinity(0))}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    if gpu := torch.accelerator.current_accelerator(check_available=True):
        names = [str(torch.get_device_module(gpu).get_device_name(i)) for i in range(torch.accelerator.device_count())]
        facts["gpus"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return facts


def cpu_model() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
