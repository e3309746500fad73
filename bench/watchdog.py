"""What being watched costs a rank: a beacon's write, and the stamps by which ranks are compared.

    lockstep run bench/watchdog.py --devices 2

Steps with and without stamps are interleaved; each line is a median over all rounds, on rank zero.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

import torch
from torch import nn

import lockstep
from lockstep import activity
from lockstep.parallel.ddp.bucket_events import PaceClock
from lockstep.parallel.ddp.reducer import Event
from lockstep.telemetry.heartbeat import Heartbeat

ROUNDS, STEPS, WRITES, CALLS = 60, 10, 500, 20_000


def main() -> None:
    """Measure, and print on rank zero."""
    with lockstep.init() as world:
        model = lockstep.DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        batch = torch.randn(64, 256)

        def steps(stamped: bool) -> float:
            activity.callbacks.wants_pace = stamped
            world.barrier()
            started_s = time.perf_counter()
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
            return (time.perf_counter() - started_s) / STEPS

        for _ in range(3):
            steps(stamped=True)
        pairs = [(steps(stamped=True), steps(stamped=False)) for _ in range(ROUNDS)]
        stamped_s, plain_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        world.print(
            f"step with stamps {1e3 * stamped_s:.3f} ms, without {1e3 * plain_s:.3f} ms: {stamped_s / plain_s:.4f}"
        )
        activity.callbacks.wants_pace = True
        clock = PaceClock(world.device)
        started_s = time.perf_counter()
        for _ in range(CALLS):
            for kind in (Event.FORWARD, Event.BACKWARD, Event.BACKWARD_END, Event.CLOSED):
                clock.on_event(kind, None)
        stamps_s = (time.perf_counter() - started_s) / CALLS
        world.print(f"the stamps alone {1e6 * stamps_s:.1f} us a step: {stamps_s / plain_s:.4%} of it")
        world.print(f"a beacon's write, twice a second: {1e6 * write_s(25):.0f} us")


def write_s(depth: int) -> float:
    """Return the seconds of a write while ``depth`` Python functions are under way."""
    if depth:
        return write_s(depth - 1)
    with tempfile.TemporaryDirectory() as folder:
        beacon = Heartbeat(folder, int(os.environ.get("RANK", "0")), patience_s=60)
        started_s = time.perf_counter()
        for _ in range(WRITES):
            beacon.write()
        return (time.perf_counter() - started_s) / WRITES


if __name__ == "__main__":
    main()
