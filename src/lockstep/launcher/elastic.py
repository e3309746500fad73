"""torch elastic's agent, extended: it stops ranks gracefully, goes on with fewer, and reports why they restart."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast, final
from unittest.mock import patch

import torch
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api
from torch.distributed.launcher.api import LaunchConfig

from lockstep import run_folder
from lockstep.comm.network import set_keepalive
from lockstep.errors import RESUME_EXIT_CODE, Stopped
from lockstep.launcher import reaper
from lockstep.launcher.failure_report import RankExit, brief, first_failure
from lockstep.launcher.node_rendezvous import RendezvousPerRestart, rendezvous_per_restart
from lockstep.launcher.output import LogTail
from lockstep.telemetry.heartbeat import read_step_counter
from lockstep.telemetry.live.region import say_at_once

# The launcher's first answer to a signal: it asks the ranks to stop in order, if all of them can.

STOP_TIMEOUT = "LOCKSTEP_STOP_TIMEOUT_S"
"""The environment variable that says how many seconds ranks may take to stop in order."""
DEFAULT_STOP_TIMEOUT_S = 120.0

_ELASTICS_OWN = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_LEFT_TO_ELASTIC = "SIGHUP,SIGQUIT"


def stop_timeout_s() -> float:
    """Return how long ranks may take to stop in order."""
    return float(os.environ.get(STOP_TIMEOUT, DEFAULT_STOP_TIMEOUT_S))


class GracefulShutdown:
    """Asks the ranks at the first signal; ends them, as torch elastic does, at the second or when the time is up.

    Args:
        folder: Of the run.
        num_ranks: On this machine, to begin with.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._folder = folder
        self._num_signals = 0
        self._asked_for: signal.Signals | None = None
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def handling(self, config: LaunchConfig) -> Iterator[LaunchConfig]:
        """Take the signals over, and give what makes torch elastic leave them alone. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread() or config.signals_to_handle != _ELASTICS_OWN:
            yield config
            return
        before = {number: signal.signal(number, self._on_signal) for number in run_folder.STOP_SIGNALS}
        try:
            yield dataclasses.replace(config, signals_to_handle=_LEFT_TO_ELASTIC)
        finally:
            if self._timer is not None:
                self._timer.cancel()  # or it would signal this process, which may live on
                self._timer.join(1.0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def outcome(self, exit_codes: set[int]) -> Stopped | None:
        """Return what to raise after the ranks have ended with ``exit_codes``; None if they did not stop in order."""
        said = run_folder.stop_reports(self._folder)
        if self._asked_for is None and exit_codes != {RESUME_EXIT_CODE}:
            return None  # ranks of other machines may have been asked
        if not said or not exit_codes <= {0, RESUME_EXIT_CODE}:
            return None
        return Stopped(said[0], signal=self._asked_for or signal.SIGTERM, saved=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        sigval = signal.Signals(number)
        self._num_signals += sigval != signal.SIGUSR1  # which comes ahead of SIGTERM
        if self._asked_for is None and self._can_stop():
            self._asked_for = sigval
            if sigval is signal.SIGINT:
                say_at_once(run_folder.FIRST_CTRL_C_MESSAGE)
            run_folder.request_stop(self._folder, sigval.name)
            self._timer = threading.Timer(stop_timeout_s(), self._give_up, [sigval])
            self._timer.daemon = True
            self._timer.start()
        elif self._asked_for is None or self._num_signals > 1:
            raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)

    def _can_stop(self) -> bool:
        """Tell whether all ranks of this machine stop in order if they are asked to, or have done so already."""
        told = run_folder.num_graceful_ranks(self._folder), len(run_folder.stop_reports(self._folder))
        return self.num_ranks in told

    def _give_up(self, sigval: signal.Signals) -> None:
        self._num_signals += 2
        os.kill(os.getpid(), sigval)


# torch elastic's agent with ears: it says why ranks are started again, and with how many.

_STOPPING_S = 10
"""How long ranks have to end before they are started again; what they wait for is gone."""

_POLL_S = 0.1
_NUM_RENDEZVOUS_ATTEMPTS = 3
"""How often to try to meet the other machines, if one of them is lost meanwhile."""

_NOTICED_S = 3.0
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

    first: RankExit | None
    number: int
    limit: int
    num_ranks: int
    is_fewer: bool


Failures = Mapping[int, ProcessFailure]


class AgentListener(Protocol):
    """Whom the agent tells."""

    def started(self, ranks: range, *, num_restarts_left: int) -> None:
        """Take note that these ranks of this machine have been started."""

    def first_failure(self, failures: Failures) -> RankExit:
        """Return how the rank ended that failed first."""

    def stops_for_others(self) -> None:
        """Take note that the ranks have been asked to save and stop, as another machine waits to join."""

    def restarts(self, restart: Restart) -> None:
        """Take note that the old ranks have ended, and new ones are about to start."""


class StoppedWhileRestarting(SignalException):
    """A signal came while the ranks stopped for another machine: they have stopped for that, and stay so."""


@contextmanager
def extended_agent(listener: AgentListener, folder: Path, *, min_ranks: int | None, may_shrink: bool) -> Iterator[None]:
    """Within, elastic's launcher tells of the ranks that it starts, and of why it starts them again.

    Args:
        listener: Whom it tells.
        folder: Of the run, in which ranks are asked to stop.
        min_ranks: After a rank was killed, go on with one fewer, but no fewer than this; as many as before if ``None``.
        may_shrink: Whether the job goes on with fewer machines than it has.
    """

    class Agent(_Agent):
        def __init__(self, spec: WorkerSpec, *args: Any, **kwargs: Any) -> None:
            spec.rdzv_handler = rendezvous_per_restart(
                spec.rdzv_handler, lambda: run_folder.is_stopped_by_signal(folder)
            )
            super().__init__(spec, *args, **kwargs)
            self.listener, self.folder, self.min_ranks, self.may_shrink = listener, folder, min_ranks, may_shrink
            self.num_restarts = -1

    with patch.object(api, "LocalElasticAgent", Agent):
        yield


class _Agent(LocalElasticAgent):
    listener: AgentListener
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
        for attempt in range(_NUM_RENDEZVOUS_ATTEMPTS):
            try:
                super()._rendezvous(worker_group)
                number = self.num_restarts + 1
                self.num_restarts = (
                    handler.agree_on_restarts(number) if isinstance(handler, RendezvousPerRestart) else number
                )
                return
            except RuntimeError:  # of the store
                if not isinstance(handler, RendezvousPerRestart) or attempt == _NUM_RENDEZVOUS_ATTEMPTS - 1:
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
        if not isinstance(handler, RendezvousPerRestart) or not run_folder.stop_reports(self.folder):
            return
        # A signal may have been meant for all machines, and come here a moment later.
        _await(lambda: run_folder.is_stopped_by_signal(self.folder) or handler.num_nodes_waiting() > 0, _NOTICED_S)
        if run_folder.is_stopped_by_signal(self.folder):
            raise StoppedWhileRestarting("a signal came meanwhile", sigval=signal.SIGTERM)
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
                reaper.kill_session(pid)  # the loader processes of a killed rank, which would go on for some seconds
        first = self.listener.first_failure(failures) if failures else None
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
        if run_folder.num_graceful_ranks(self.folder) != worker_group.spec.local_world_size:
            return False
        run_folder.request_stop(self.folder, run_folder.ANOTHER_MACHINE)
        self.listener.stops_for_others()
        monitor = super()._monitor_workers
        _await(lambda: monitor(worker_group).state != WorkerState.HEALTHY, stop_timeout_s())
        if run_folder.is_stopped_by_signal(self.folder):
            raise StoppedWhileRestarting("a signal came meanwhile", sigval=signal.SIGTERM)
        return monitor(worker_group).state == WorkerState.SUCCEEDED and not run_folder.stop_reports(self.folder)

    def _exit_barrier(self) -> None:
        if not run_folder.is_stopped_by_signal(self.folder):  # else this machine leaves, and the others may go on
            super()._exit_barrier()  # type: ignore[no-untyped-call]


def _await(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait until ``condition`` holds, at most ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _hide_device(index: int, num_ranks: int) -> None:
    """Keep the GPU of a rank that was lost from the ranks to come."""
    if torch.cuda.device_count() < num_ranks:
        return  # the ranks are on the CPU
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:index] + visible[index + 1 :])


# What the user hears when ranks are started again: who failed, how, where, and how often that may still happen.


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
        ends_of: Callable[[Failures], list[RankExit]],
        on_start: Callable[[range, int], None],
        streams: LogTail | None,
    ) -> None:
        self._run_dir, self._ends_of, self._on_start, self._streams = run_dir, ends_of, on_start, streams

    def started(self, ranks: range, *, num_restarts_left: int) -> None:
        """Pass on which ranks of this machine have been started."""
        set_keepalive()  # to the launchers of other machines
        if self._streams is not None:
            self._streams.started(ranks)
        self._on_start(ranks, num_restarts_left)

    def first_failure(self, failures: Failures) -> RankExit:
        """Return how the rank ended that failed first."""
        return first_failure(self._ends_of(failures))

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
        run_folder.forget_stop(self._run_dir)
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
    step, num_updates = read_step_counter(run_dir, rank)
    if step is not None:
        return step + 1
    return num_updates + 1 if num_updates else None
