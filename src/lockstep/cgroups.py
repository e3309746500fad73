"""The control groups of this process, of both versions, and the cores that they leave it. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def group_folders(controller: str, root: Path | None = None, own: Path | None = None) -> list[Path]:
    """Return the folders of this process's control groups, from the innermost to the root; some may not be there.

    Args:
        controller: Whose hierarchy, in the first version of control groups; the second has one for all.
        root: Where control groups are mounted.
        own: The list of this process's groups.
    """
    root, own = root or ROOT, own or OWN
    folders = list(dict.fromkeys(_listed(controller, root, own)))
    return [*folders, *([] if root in folders else [root])]


def _listed(controller: str, root: Path, own: Path) -> Iterator[Path]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "" or controller in names.split(","):
            # Inside a container the path may be that of the host, which is not there: then its root is what counts.
            inner = (Path(path) / "x").relative_to("/").parents
            bases = [root] if names == "" else [root / names, root / controller]
            yield from (base / part for base in bases for part in inner)


def read_groups(controller: str, file: str, root: Path | None = None, own: Path | None = None) -> list[str]:
    """Return the texts of ``file``, such as ``cpu.max``, in those of `group_folders` where it is there."""
    found = []
    for folder in group_folders(controller, root, own):
        try:
            found.append((folder / file).read_text().strip())
        except OSError:
            continue
    return found


def cpu_quota(root: Path | None = None, own: Path | None = None) -> float | None:
    """Return the cores' worth of time that the tightest of this process's control groups allows, if one does."""
    quotas = [_quota(*text.split()) for text in read_groups("cpu", "cpu.max", root, own)]
    periods = read_groups("cpu", "cpu.cfs_period_us", root, own)
    old = zip(read_groups("cpu", "cpu.cfs_quota_us", root, own), periods, strict=False)
    quotas += [_quota(quota, period) for quota, period in old]
    return min((quota for quota in quotas if quota is not None), default=None)


def usable_cores() -> int:
    """Return how many logical cores this process may keep busy: of those it may run on, what the quota allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


def _quota(quota: str, period: str) -> float | None:
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except ValueError:  # it says "max"
        return None
