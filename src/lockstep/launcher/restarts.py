"""What the user hears when ranks are started again: who failed, how, where, and how often that may still happen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import final

from lockstep.comm.link import probe_connections
from lockstep.launcher import requests
from lockstep.launcher.agent import Failures, Restart
from lockstep.launcher.failure import RankEnd, brief, first_of
from lockstep.launcher.streams import Streams
from lockstep.telemetry.step_mark import read_mark


@final
class RestartReport:
    """Listens to the agent, and tells on standard error.

    Args:
        run_dir: The run's folder, with the ranks' beacons.
        ends_of: Makes our own records of elastic's.
        on_start: Called with the numbers of this machine's ranks whenever they have been started, and with how often
            they may still be after a failure.
        streams: Reads what the ranks write, if anybody does.
    """

    def __init__(
        self,
        run_dir: Path,
        ends_of: Callable[[Failures], list[RankEnd]],
        on_start: Callable[[range, int], None],
        streams: Streams | None,
    ) -> None:
        self._run_dir, self._ends_of, self._on_start, self._streams = run_dir, ends_of, on_start, streams

    def started(self, ranks: range, *, num_restarts_left: int) -> None:
        """Pass on which ranks of this machine have been started."""
        probe_connections()  # to the launchers of other machines
        if self._streams is not None:
            self._streams.started(ranks)
        self._on_start(ranks, num_restarts_left)

    def first_of(self, failures: Failures) -> RankEnd:
        """Return how the rank ended that failed first."""
        return first_of(self._ends_of(failures))

    def stops_for_others(self) -> None:
        """Say so."""
        told = "another machine waits to join; the ranks stop after this step, and start again with it"
        print(f"lockstep: {told}", file=sys.stderr, flush=True)

    def restarts(self, restart: Restart) -> None:
        """Say why, and clear away what the old ranks said of themselves."""
        if self._streams is not None:
            self._streams.settle()
        first = restart.first
        step = None if first is None else last_step(self._run_dir, first.rank)
        for kind in ("beacon", "step", "failure", "crash"):
            for path in self._run_dir.glob(f"{kind}-*"):
                path.unlink(missing_ok=True)  # of ranks that may not come again
        requests.forget(self._run_dir)
        print("\n".join(_lines(restart, step)), file=sys.stderr, flush=True)


def _lines(restart: Restart, step: int | None) -> list[str]:
    first = restart.first
    if first is None:
        return ["lockstep: machines came or left; the ranks start again"]
    where = "" if step is None else f" in step {step}"
    what = f"{restart.num_ranks} rank{'s' * (restart.num_ranks != 1)}" if restart.is_fewer else ""
    trace = (first.trace or first.crash).rstrip()
    return [
        *filter(None, [trace]),
        f"lockstep: rank {first.rank} {brief(first)}{where}; restart {restart.number} of {restart.limit}"
        f"{f' with {what}' if what else ''}",
    ]


def last_step(run_dir: Path, rank: int) -> int | None:
    """Return the step, counted from 1, that a rank was in; ``None`` if it had not begun with any, or nobody counted."""
    step, num_updates = read_mark(run_dir, rank)
    if step is not None:
        return step + 1
    return num_updates + 1 if num_updates else None
