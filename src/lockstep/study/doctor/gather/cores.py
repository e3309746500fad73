"""The facts of cores, threads and control groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from lockstep.study.doctor.plan import Plan
from lockstep.study.doctor.topics.cores import CoreFacts

ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def core_facts(plan: Plan, environ: Mapping[str, str]) -> CoreFacts:
    """Return what there is, and what is to run on it."""
    logical = psutil.cpu_count() or os.cpu_count() or 1
    return CoreFacts(
        logical=logical,
        affinity=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical,
        physical=psutil.cpu_count(logical=False),
        quota=cpu_quota(),
        load=os.getloadavg()[0],
        ranks=plan.devices,
        workers=plan.workers,
        on_gpus=plan.on_gpus,
        omp=_number(environ.get("OMP_NUM_THREADS")),
        mkl=_number(environ.get("MKL_NUM_THREADS")),
        started_threads=torch.get_num_threads(),
    )


def cpu_quota(root: Path = ROOT, own: Path = _OWN) -> float | None:
    """Return the cores' worth of time that the tightest of this process's control groups allows, if one does."""
    quotas = [_quota(*text.split()) for text in read_groups("cpu", "cpu.max", root, own)]
    periods = read_groups("cpu", "cpu.cfs_period_us", root, own)
    old = zip(read_groups("cpu", "cpu.cfs_quota_us", root, own), periods, strict=False)
    quotas += [_quota(quota, period) for quota, period in old]
    return min((quota for quota in quotas if quota is not None), default=None)


def read_groups(controller: str, file: str, root: Path = ROOT, own: Path = _OWN) -> list[str]:
    """Return the texts of ``file`` in this process's control groups, from the innermost to the root, where it is there.

    Args:
        controller: Whose hierarchy, in the first version of control groups; the second has one for all.
        file: Such as ``cpu.max``.
        root: Where control groups are mounted.
        own: The list of this process's groups.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    folders: list[Path] = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "" or controller in names.split(","):
            # Inside a container the path may be that of the host, which is not there: then its root is what counts.
            inner = (Path(path) / "x").relative_to("/").parents
            bases = [root] if names == "" else [root / names, root / controller]
            folders += [base / part for base in bases for part in inner]
    found = {}
    for folder in [*folders, root]:
        try:
            found[folder] = (folder / file).read_text().strip()
        except OSError:
            continue
    return list(found.values())


def _quota(quota: str, period: str) -> float | None:
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except ValueError:  # it says "max"
        return None


def _number(text: str | None) -> int | None:
    # OMP_NUM_THREADS may be a list, one number for each level of nesting.
    first = (text or "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None
