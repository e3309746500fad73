"""How fast the folder for checkpoints takes data, measured."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from lockstep.study.doctor.gather.in_time import in_time
from lockstep.study.doctor.quantities import MIB
from lockstep.study.doctor.topics.disk import DiskFacts

MOST_BYTES, ENOUGH_S = 64 * MIB, 0.8
_FIRST_BYTES = MIB
_SILENT_S = 3.0
"""A file system that has not answered by then, as one over a broken network, is said to be silent."""


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
    except OSError as error:
        return DiskFacts(shown, problem=error.strerror or str(error), filesystem=filesystem)
    measured = in_time(_SILENT_S, lambda: _measure(place, min(MOST_BYTES, free // 4)))
    if isinstance(measured.error, OSError):
        return DiskFacts(shown, problem=measured.error.strerror or str(measured.error), filesystem=filesystem)
    if measured.value is None:
        return DiskFacts(shown, problem=f"it did not take a few MiB within {_SILENT_S:g} s", filesystem=filesystem)
    written, seconds = measured.value
    return DiskFacts(shown, None, filesystem, free, written, seconds, checkpoint_bytes)


def _measure(folder: Path, most_bytes: int) -> tuple[int, float]:
    """Return how many bytes were written down to the disk, and in what time."""
    piece = os.urandom(_FIRST_BYTES)  # which no file system can compress
    written, num_pieces = 0, 1
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        # More at a time from time to time: a slow disk is known soon, and a fast one is not measured by its latency.
        while written + num_pieces * _FIRST_BYTES <= most_bytes and time.perf_counter() - began < ENOUGH_S:
            written += sum(file.write(piece) for _ in range(num_pieces))
            os.fsync(file.fileno())
            num_pieces *= 2
        return written, time.perf_counter() - began


def _filesystem(folder: Path) -> str:
    """Return the kind of the file system that ``folder`` lies on; empty if the system does not tell."""
    best, kind = -1, ""
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        if folder.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), partition.fstype
    return str(kind)
