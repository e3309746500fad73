"""What being watched costs a rank: a heartbeat's write, on rank zero.

lockstep run bench/watchdog.py --devices 2
"""

from __future__ import annotations

import os
import tempfile
import time

import lockstep
from lockstep.health.heartbeat import Heartbeat

WRITES = 500


def main() -> None:
    """Measure, and print on rank zero."""
    with lockstep.init() as world:
        world.print(f"a heartbeat's write, twice a second: {1e6 * write_s(25):.0f} us")


def write_s(depth: int) -> float:
    """Return the seconds of a write while ``depth`` Python functions are under way."""
    if depth:
        return write_s(depth - 1)
    with tempfile.TemporaryDirectory() as folder:
        heartbeat = Heartbeat(folder, int(os.environ.get("RANK", "0")), patience_s=60)
        started_s = time.perf_counter()
        for _ in range(WRITES):
            heartbeat.write()
        return (time.perf_counter() - started_s) / WRITES


if __name__ == "__main__":
    main()
