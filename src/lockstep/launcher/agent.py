"""torch elastic's agent with ears: it says why ranks are started again, and with how many."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast
from unittest.mock import patch

import torch
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from lockstep.errors import RESUME_EXIT_CODE
from lockstep.launcher import guardian, requests
from lockstep.launcher.failure import RankEnd
from lockstep.launcher.orderly import stop_limit_s
from lockstep.launcher.rounds import Rounds, in_rounds

_STOPPING_S = 10
"""How long ranks have to end before they are started again; what they wait for is gone."""

_PAUSE_S = 0.1
_NUM_MEETINGS = 3
"""How often to try to meet the other machines, if one of them is lost meanwhile."""

_HEARD_S = 3.0
"""How soon a launcher learns that another one has left the round; it looks once a second."""


@dataclass(frozen=True)
class Restart:
    """Ranks are about to be started again.

    Attributes:
        first: How the rank ended that failed first; ``None`` if only other machines came or left.
        number: Of this restart, from 1.
        limit: How many there may be.
        num_ranks: On this machine from now on.
        is_fewer: Whether that is one fewer than before.
    """

    first: RankEnd | None
    number: int
    limit: int
    num_ranks: int
    is_fewer: bool


Failures = Mapping[int, ProcessFailure]


class Listener(Protocol):
    """Whom the agent tells."""

    def started(self, ranks: range, *, num_restarts_left: int) -> None:
        """Take note that these ranks of this machine have been started."""

    def first_of(self, failures: Failures) -> RankEnd:
        """Return how the rank ended that failed first."""

    def stops_for_others(self) -> None:
        """Take note that the ranks have been asked to save and stop, as another machine waits to join."""

    def restarts(self, restart: Restart) -> None:
        """Take note that the old ranks have ended, and new ones are about to start."""


class StoppedMeanwhile(SignalException):
    """A signal came while the ranks stopped for another machine: they have stopped for that, and stay so."""


@contextmanager
def telling(listener: Listener, folder: Path, *, min_ranks: int | None, may_shrink: bool) -> Iterator[None]:
    """Within, elastic's launcher tells of the ranks that it starts, and of why it starts them again.

    Args:
        listener: Whom it tells.
        folder: Of the run, in which ranks are asked to stop.
        min_ranks: After a rank was killed, go on with one fewer, but no fewer than this; as many as before if ``None``.
        may_shrink: Whether the job goes on with fewer machines than it has.
    """

    class Agent(_Agent):
        def __init__(self, spec: WorkerSpec, *args: Any, **kwargs: Any) -> None:
            spec.rdzv_handler = in_rounds(spec.rdzv_handler, lambda: requests.asked_by_signal(folder))
            super().__init__(spec, *args, **kwargs)
            self.listener, self.folder, self.min_ranks, self.may_shrink = listener, folder, min_ranks, may_shrink
            self.num_restarts = -1

    with patch.object(api, "LocalElasticAgent", Agent):
        yield


class _Agent(LocalElasticAgent):
    listener: Listener
    folder: Path
    min_ranks: int | None
    may_shrink: bool
    num_restarts: int
    """How often the ranks of the job have been started again, for whatever reason; the same on all machines."""

    def run(self, *args: Any) -> RunResult:
        # A machine that was to spare until the end has no result.
        return cast(RunResult | None, super().run(*args)) or RunResult(WorkerState.SUCCEEDED)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other machines; anew if one of those that came is lost before it has said what the others need."""
        handler = worker_group.spec.rdzv_handler
        for attempt in range(_NUM_MEETINGS):
            try:
                super()._rendezvous(worker_group)
                number = self.num_restarts + 1
                self.num_restarts = handler.agree_on_restarts(number) if isinstance(handler, Rounds) else number
                return
            except RuntimeError:  # of the store
                if not isinstance(handler, Rounds) or attempt == _NUM_MEETINGS - 1:
                    raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # What torch tells the ranks is made from this. It counts failures only, and each machine those that it saw.
        left, self._remaining_restarts = self._remaining_restarts, worker_group.spec.max_restarts - self.num_restarts
        try:
            return cast(dict[int, Any], super()._start_workers(worker_group))
        finally:
            self._remaining_restarts = left

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        super()._initialize_workers(worker_group)
        ranks = [worker.global_rank for worker in worker_group.workers]
        self.listener.started(range(min(ranks), max(ranks) + 1), num_restarts_left=self._remaining_restarts)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._last = cast(RunResult, super()._monitor_workers(worker_group))
        codes = {failure.exitcode for failure in self._last.failures.values()}
        if RESUME_EXIT_CODE in codes and codes <= {RESUME_EXIT_CODE, -signal.SIGTERM}:
            self._follow_others(worker_group)
        return self._last

    def _follow_others(self, worker_group: WorkerGroup) -> None:
        """The ranks have saved and stopped since another launcher asked theirs to: its machine leaves, or one joins."""
        handler = worker_group.spec.rdzv_handler
        if not isinstance(handler, Rounds) or not requests.reports(self.folder):
            return
        # A signal may have been meant for all machines, and come here a moment later.
        _await(lambda: requests.asked_by_signal(self.folder) or handler.num_nodes_waiting() > 0, _HEARD_S)
        if requests.asked_by_signal(self.folder):
            raise StoppedMeanwhile("a signal came meanwhile", sigval=signal.SIGTERM)
        if self.may_shrink or handler.num_nodes_waiting() > 0:
            self._last = RunResult(WorkerState.HEALTHY)
            self._restart_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec, failures = worker_group.spec, self._last.failures
        if not failures and self._is_done_after_stop(worker_group):
            return
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, _STOPPING_S)
            for pid in self._pcontext.pids().values():
                guardian.kill_session(pid)  # the loader processes of a killed rank, which would go on for some seconds
        first = self.listener.first_of(failures) if failures else None
        was_killed = first is not None and first.exit_code < 0
        is_fewer = self.min_ranks is not None and was_killed and spec.local_world_size > self.min_ranks
        if is_fewer:
            assert first is not None
            _hide_device(failures[first.rank].local_rank, spec.local_world_size)
            spec.local_world_size -= 1
        number = spec.max_restarts - self._remaining_restarts
        self.listener.restarts(Restart(first, number, spec.max_restarts, spec.local_world_size, is_fewer))
        super()._restart_workers(worker_group)

    def _is_done_after_stop(self, worker_group: WorkerGroup) -> bool:
        """Have the ranks save and stop for another machine, if all of them can; tell whether they came to their end."""
        if requests.num_announced(self.folder) != worker_group.spec.local_world_size:
            return False
        requests.ask(self.folder, requests.ANOTHER_MACHINE)
        self.listener.stops_for_others()
        monitor = super()._monitor_workers
        _await(lambda: monitor(worker_group).state != WorkerState.HEALTHY, stop_limit_s())
        if requests.asked_by_signal(self.folder):
            raise StoppedMeanwhile("a signal came meanwhile", sigval=signal.SIGTERM)
        return monitor(worker_group).state == WorkerState.SUCCEEDED and not requests.reports(self.folder)

    def _exit_barrier(self) -> None:
        if not requests.asked_by_signal(self.folder):  # else this machine leaves, and the others may go on
            super()._exit_barrier()  # type: ignore[no-untyped-call]


def _await(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait until ``condition`` holds, at most ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)


def _hide_device(index: int, num_ranks: int) -> None:
    """Keep the GPU of a rank that was lost from the ranks to come."""
    if torch.cuda.device_count() < num_ranks:
        return  # the ranks are on the CPU
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:index] + visible[index + 1 :])
