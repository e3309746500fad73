"""How fast the folder for checkpoints takes data, measured."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from lockstep.study.doctor.quantities import MIB
from lockstep.study.doctor.topics.disk import DiskFacts

MOST_BYTES, MOST_S = 64 * MIB, 0.8
_CHUNK_BYTES = 4 * MIB


def disk_facts(folder: Path, checkpoint_bytes: int | None) -> DiskFacts:
    """Measure ``folder``, or the nearest folder above that is there, by writing for less than a second or so.

    The file has no name where the system allows that, and is removed in any case.
    """
    place = folder.expanduser().resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    shown = str(folder)
    if not place.is_dir():
        return DiskFacts(shown, problem=f"{place} is no folder")
    filesystem = _filesystem(place)
    try:
        free = shutil.disk_usage(place).free
        written, seconds = _measure(place, min(MOST_BYTES, free // 4))
    except OSError as error:
        return DiskFacts(shown, problem=error.strerror or str(error), filesystem=filesystem)
    return DiskFacts(shown, None, filesystem, free, written, seconds, checkpoint_bytes)


def _measure(folder: Path, most_bytes: int) -> tuple[int, float]:
    """Return how many bytes were written down to the disk, and in what time."""
    chunk = os.urandom(_CHUNK_BYTES)  # which no file system can compress
    written = 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        while written < most_bytes and time.perf_counter() - began < MOST_S:
            written += file.write(chunk)
            os.fsync(file.fileno())
        return written, time.perf_counter() - began


def _filesystem(folder: Path) -> str:
    """Return the kind of the file system that ``folder`` lies on; empty if the system does not tell."""
    best, kind = -1, ""
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        if folder.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), partition.fstype
    return str(kind)
