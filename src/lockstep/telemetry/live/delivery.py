"""Hands snapshots to whoever takes them, so that neither their slowness nor their errors reach training."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import replace

from typing_extensions import override

from lockstep.telemetry.live.snapshot import Snapshot, SnapshotSink

CLOSE_S = 10.0
"""How long the end of a run waits for a sink."""


class Delivery(ABC):
    """Gives snapshots to one sink."""

    @abstractmethod
    def give(self, snapshot: Snapshot) -> None:
        """Hand on ``snapshot``. Does not raise."""

    @abstractmethod
    def close(self) -> None:
        """Let the sink finish. Does not raise."""


class Direct(Delivery):
    """Calls the sink at once, in the thread that makes snapshots: for those that take no time.

    Args:
        sink: Who takes them.
    """

    def __init__(self, sink: SnapshotSink) -> None:
        self._sink = sink
        self._is_off = False

    @override
    def give(self, snapshot: Snapshot) -> None:
        if self._is_off:
            return
        try:
            self._sink.update(snapshot)
        except Exception as error:
            self._is_off = True
            warn(self._sink, error)

    @override
    def close(self) -> None:
        try:
            self._sink.close()
        except Exception as error:
            if not self._is_off:
                warn(self._sink, error)
            self._is_off = True


class Threaded(Delivery):
    """Calls the sink in a thread of its own. While it is busy snapshots are left out, but for their events.

    Args:
        sink: Who takes them.
    """

    def __init__(self, sink: SnapshotSink) -> None:
        self._direct = Direct(sink)
        self._wake = threading.Condition()
        self._next: Snapshot | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="lockstep-sink", daemon=True)
        self._thread.start()

    @override
    def give(self, snapshot: Snapshot) -> None:
        with self._wake:
            if self._next is not None:
                snapshot = replace(snapshot, events=self._next.events + snapshot.events)
            self._next = snapshot
            self._wake.notify()

    @override
    def close(self) -> None:
        with self._wake:
            self._is_over = True
            self._wake.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._next is None and not self._is_over:
                    self._wake.wait()
                snapshot, self._next = self._next, None
            if snapshot is None:
                self._direct.close()
                return
            self._direct.give(snapshot)


def warn(sink: SnapshotSink, error: Exception) -> None:
    """Say on standard error that a sink gets nothing any more."""
    first = (str(error).splitlines() or [""])[0]
    print(
        f"lockstep: {type(sink).__name__} gets no more figures of this run: {type(error).__name__}: {first}",
        file=sys.stderr,
        flush=True,
    )
