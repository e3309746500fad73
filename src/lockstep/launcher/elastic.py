"""torch elastic's agent, extended: stops ranks gracefully, goes on with fewer, and reports why they restart."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from lockstep import run_folder
from lockstep.comm.network import set_keepalive
from lockstep.errors import RESUME_EXIT_CODE
from lockstep.launcher.failure_report import SIGTERM_S, RankExit, first_failure, rank_exits, restart_report
from lockstep.launcher.node_rendezvous import RendezvousPerRestart, rendezvous_per_restart
from lockstep.launcher.output import LogTail
from lockstep.launcher.reaper import kill_session
from lockstep.telemetry.heartbeat import read_step_counter
from lockstep.telemetry.resources import Resources

# The environment variable with how many seconds ranks may take to stop gracefully.
STOP_TIMEOUT = "LOCKSTEP_STOP_TIMEOUT_S"
_DEFAULT_STOP_TIMEOUT_S = 120.0

_POLL_S = 0.1
# How often to try to meet the other machines, if one of them is lost meanwhile.
_NUM_RENDEZVOUS_ATTEMPTS = 3
# How soon a launcher learns that another one has left; it polls once a second.
_NOTICED_S = 3.0


def stop_timeout_s() -> float:
    """Return how long ranks may take to stop gracefully."""
    return float(os.environ.get(STOP_TIMEOUT, _DEFAULT_STOP_TIMEOUT_S))


@dataclass
class Job:
    """What the launcher knows of the ranks of this machine.

    Attributes:
        folder: Of the run, in which ranks are requested to stop.
        ranks: Their numbers, which may be others after a restart.
        log_tail: Reads the pipes that their output goes into, if they do not write to the terminal themselves.
        min_ranks: After a rank was killed, go on with one fewer, but no fewer than this; as many as before if ``None``.
        may_shrink: Whether the job goes on with fewer machines than it has.
        resources: What they hold.
        num_restarts_left: How often they may be started again after a failure.
        stopped_at_ns: When the launcher began to stop each process that still ran, in nanoseconds since the epoch.
        ended_at_ns: When each process ended.
    """

    folder: Path
    ranks: range
    log_tail: LogTail | None = None
    min_ranks: int | None = None
    may_shrink: bool = False
    resources: Resources = field(default_factory=Resources)
    num_restarts_left: int = 0
    stopped_at_ns: dict[int, int] = field(default_factory=dict)
    ended_at_ns: Mapping[int, int] = field(default_factory=dict)

    def exits(self, failures: Mapping[int, ProcessFailure]) -> list[RankExit]:
        """Return how the ranks ended that did not end well."""
        return rank_exits(failures, self.stopped_at_ns, self.ended_at_ns, self.folder, self.resources)


def log(text: str) -> None:
    """Print a line of the launcher's own."""
    print(f"lockstep: {text}", file=sys.stderr, flush=True)


class StoppedWhileRestarting(SignalException):
    """A signal came while the ranks stopped for another machine: they have stopped for that, and stay so."""


@contextmanager
def extended_agent(job: Job) -> Iterator[None]:
    """Within, torch elastic's launcher uses the agent of this file."""
    # torch makes handler and agent in one function that takes neither from outside.
    with patch.object(api, "LocalElasticAgent", partial(_Agent, job)):
        yield


class _Agent(LocalElasticAgent):
    """Starts the ranks, polls them, stops all when one fails, and meets the other machines again, as torch does.

    What is added:

    - Ranks that can are requested to save and stop before they are started again with another machine
      (`_is_done_after_stop`); a machine whose ranks stopped because another one asked theirs to follows it
      (`_follow_others`).
    - After a rank was killed, a job on one machine may go on with one fewer (``min_ranks``).
    - The number of restarts is that of the whole job; torch's launchers each count the failures that they saw.
    - It is noted when each rank ended, and which ones still ran when the launcher began to stop them: those are never
      the cause.
    """

    def __init__(self, job: Job, spec: WorkerSpec, **kwargs: Any) -> None:
        spec.rdzv_handler = rendezvous_per_restart(
            spec.rdzv_handler, lambda: run_folder.is_stopped_by_signal(job.folder)
        )
        super().__init__(spec, **kwargs)
        self.job = job
        # How often the ranks of the job have been started again, for whatever reason; the same on all machines.
        self.num_restarts = -1

    def run(self, *args: Any) -> RunResult:
        # A machine that was to spare until the end has no result.
        return cast(RunResult | None, super().run(*args)) or RunResult(WorkerState.SUCCEEDED)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other machines; again if one that came is lost before it has written what the others need."""
        handler = worker_group.spec.rdzv_handler
        for attempt in range(_NUM_RENDEZVOUS_ATTEMPTS):
            try:
                super()._rendezvous(worker_group)
                self.num_restarts += 1
                if isinstance(handler, RendezvousPerRestart):
                    self.num_restarts = handler.agree_on_restarts(self.num_restarts)
                return
            except RuntimeError:  # of the store
                if not isinstance(handler, RendezvousPerRestart) or attempt == _NUM_RENDEZVOUS_ATTEMPTS - 1:
                    raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # torch makes the ranks' TORCHELASTIC_RESTART_COUNT of this number, which counts failures of this machine.
        left, self._remaining_restarts = self._remaining_restarts, worker_group.spec.max_restarts - self.num_restarts
        try:
            started = cast(dict[int, Any], super()._start_workers(worker_group))
        finally:
            self._remaining_restarts = left
        assert self._pcontext is not None
        self.job.ended_at_ns, watcher = _note_ends(self._pcontext.pids().values())
        stop = self._pcontext.close

        # torch calls this itself, in the midst of the poll that has found the first failed rank: the only moment at
        # which it can be told who failed and who is merely stopped for that.
        def close(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            """End the ranks, as torch does; without a signal it does so because one of them has failed."""
            assert self._pcontext is not None
            for pid in filter(_runs, self._pcontext.pids().values()):
                self.job.stopped_at_ns[pid] = time.time_ns()
            stop(death_sig or signal.SIGTERM, SIGTERM_S if death_sig is None else timeout)
            watcher.join(_POLL_S)  # no rank is left; its last notes may be a moment late

        self._pcontext.close = close  # type: ignore[method-assign]
        return started

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        super()._initialize_workers(worker_group)
        set_keepalive()  # to the launchers of other machines
        first = worker_group.workers[0].global_rank
        self.job.ranks = range(first, first + len(worker_group.workers))
        self.job.num_restarts_left = self._remaining_restarts
        self.job.stopped_at_ns.clear()  # the numbers may be used again
        if self.job.log_tail is not None:
            self.job.log_tail.started(self.job.ranks)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._last = cast(RunResult, super()._monitor_workers(worker_group))
        codes = {failure.exitcode for failure in self._last.failures.values()}
        # Scripts of one's own pass this code on after `fit` has stopped; the others may have been stopped by torch.
        if RESUME_EXIT_CODE in codes and codes <= {RESUME_EXIT_CODE, -signal.SIGTERM}:
            self._follow_others(worker_group)
        return self._last

    def _follow_others(self, worker_group: WorkerGroup) -> None:
        """The ranks have saved and stopped since another launcher asked theirs to: its machine leaves, or one joins."""
        handler = worker_group.spec.rdzv_handler
        if not isinstance(handler, RendezvousPerRestart) or not run_folder.stop_reports(self.job.folder):
            return
        # A signal may have been meant for all machines, and come here a moment later.
        _wait_for(
            lambda: run_folder.is_stopped_by_signal(self.job.folder) or handler.num_nodes_waiting() > 0, _NOTICED_S
        )
        self._raise_if_signalled()
        if self.job.may_shrink or handler.num_nodes_waiting() > 0:
            self._last = RunResult(WorkerState.HEALTHY)  # no failure: none of the restarts is spent
            self._restart_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec, failures = worker_group.spec, self._last.failures
        if not failures and self._is_done_after_stop(worker_group):
            return
        if self._pcontext is not None:
            self._pcontext.close()
            for pid in self._pcontext.pids().values():
                kill_session(pid)  # the loader processes of a killed rank, which would go on for some seconds
        first = first_failure(self.job.exits(failures)) if failures else None
        was_killed = first is not None and first.exit_code < 0
        # A rank that raised would raise again on any number of devices; one that was killed may have lost its device.
        min_ranks = self.job.min_ranks
        is_fewer = min_ranks is not None and was_killed and spec.local_world_size > min_ranks
        if is_fewer:
            assert first is not None
            _hide_device(failures[first.rank].local_rank, spec.local_world_size)
            spec.local_world_size -= 1
        fewer = f" with {spec.local_world_size} rank{'s' * (spec.local_world_size != 1)}" if is_fewer else ""
        number = spec.max_restarts - self._remaining_restarts
        if self.job.log_tail is not None:
            self.job.log_tail.settle()
        text = "lockstep: machines came or left; the ranks start again"
        if first is not None:
            # A step in a loop of ours is counted from 0 while it runs; in others, the steps that are done are counted.
            step, num_steps = read_step_counter(self.job.folder, first.rank)
            step = step if step is not None else num_steps or None
            restart = f"restart {number} of {spec.max_restarts}{fewer}"
            text = restart_report(first, None if step is None else step + 1, restart)
        run_folder.forget_ranks(self.job.folder)
        run_folder.forget_stop(self.job.folder)
        print(text, file=sys.stderr, flush=True)
        super()._restart_workers(worker_group)

    def _is_done_after_stop(self, worker_group: WorkerGroup) -> bool:
        """Have the ranks save and stop for another machine, if all can; return whether they came to their end."""
        if run_folder.num_graceful_ranks(self.job.folder) != worker_group.spec.local_world_size:
            return False
        run_folder.request_stop(self.job.folder, run_folder.ANOTHER_MACHINE)
        log("another machine waits to join; the ranks stop after this step, and start again with it")
        monitor = super()._monitor_workers
        _wait_for(lambda: monitor(worker_group).state != WorkerState.HEALTHY, stop_timeout_s())
        self._raise_if_signalled()
        return monitor(worker_group).state == WorkerState.SUCCEEDED and not run_folder.stop_reports(self.job.folder)

    def _raise_if_signalled(self) -> None:
        if run_folder.is_stopped_by_signal(self.job.folder):
            raise StoppedWhileRestarting("a signal came meanwhile", sigval=signal.SIGTERM)

    def _exit_barrier(self) -> None:
        if not run_folder.is_stopped_by_signal(self.job.folder):  # else this machine leaves, and the others may go on
            super()._exit_barrier()  # type: ignore[no-untyped-call]


def _note_ends(pids: Iterable[int]) -> tuple[Mapping[int, int], threading.Thread]:
    """Return a mapping to which a thread adds each process with the time of its end, in nanoseconds since the epoch.

    torch notices an end at its next poll only, in whole seconds and in the order of the ranks, whichever was first.
    """
    ended_at_ns: dict[int, int] = {}
    selector = selectors.DefaultSelector()
    for pid in pids:
        # Nobody has asked for its exit status yet, so the number cannot belong to another process.
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)

    def watch() -> None:
        with selector:
            while selector.get_map():
                for key, _ in selector.select():  # the kernel makes it readable when the process ends
                    ended_at_ns[key.data] = time.time_ns()
                    selector.unregister(key.fd)
                    os.close(key.fd)

    watcher = threading.Thread(target=watch, name="lockstep-rank-ends", daemon=True)
    watcher.start()
    return ended_at_ns, watcher


def _runs(pid: int) -> bool:
    """Return whether a child of this process has not ended yet; leaves its exit status to torch."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # its status has been read already
        return False


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait until ``condition`` holds, at most ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _hide_device(index: int, num_ranks: int) -> None:
    """Keep the GPU of a rank that was lost from the ranks to come."""
    if torch.cuda.device_count() < num_ranks:
        return  # the ranks are on the CPU
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:index] + visible[index + 1 :])
