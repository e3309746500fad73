"""Run ranks under torch elastic's agent, handle signals and the watchdog, and turn all failures into one error."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from multiprocessing import connection
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, ProcessFailure, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler
from torch.distributed.elastic.utils import macros
from torch.distributed.launcher.api import LaunchConfig
from torch.numa.binding import NumaOptions

from lockstep import run_folder, torch_internals
from lockstep.activity import format_ranks, log, one_line
from lockstep.comm.network import allow_open_files, set_keepalive
from lockstep.comm.rendezvous import JOINS, poll_until
from lockstep.comm.store import InterNodeStore
from lockstep.env import AGENT_STORE, LAUNCHER_STORE
from lockstep.errors import RESUME_EXIT_CODE, LockstepError, Stopped
from lockstep.launcher import bootstrap, failure_report
from lockstep.launcher.fork_server import ForkServer, server_for, signal_handlers
from lockstep.launcher.node_rendezvous import RendezvousPerRestart, rendezvous_of, wait_for_host
from lockstep.launcher.output import LogTail
from lockstep.launcher.quorum import Lighthouse, Machines, has_begun, is_replaced, is_taken, running_job
from lockstep.launcher.reaper import Reaper, kill_sessions
from lockstep.launcher.recovery import NAME_OF_SPARE, Recovery, hide_device, visible_devices
from lockstep.telemetry.rank_state import process_state
from lockstep.telemetry.resources import Resources
from lockstep.telemetry.watchdog import Verdict, Watchdog

# How long ranks may wait for one that does nothing, by default.
_PATIENCE_S = 60.0
# For each rank the launcher has pipes for its output, a descriptor of its process, and two or three store connections.
_FILES_PER_RANK = 8


def supervise(
    job: Job, config: LaunchConfig, mode: str, target: str, args: Sequence[str] = (), python: str = sys.executable
) -> None:
    """Start the ranks of this machine and wait until all have ended without errors.

    Blocks as long as they run. Restores signal handlers and logging.

    Args:
        job: What to do with the ranks.
        config: Of torch elastic: the number of ranks, and the rendezvous of the machines.
        mode: What each rank runs: ``script``, ``module``, ``command`` (any executable) or ``call`` (a pickled
            function).
        target: The path, the name, or for a call the folder with the function.
        args: Its ``sys.argv[1:]``.
        python: The interpreter of the ranks.

    Raises:
        JobHangs: Ranks waited for each other for too long.
        RankFailed: A rank failed; the message has the first one's traceback.
        LockstepError: The rendezvous of the job's machines failed.
        Stopped: This process was requested to end, and has ended the ranks, or all of them have stopped gracefully.
    """
    allow_open_files(_FILES_PER_RANK * config.nproc_per_node, f"The launcher of {config.nproc_per_node} ranks")
    patience_s = _PATIENCE_S if job.watchdog_s is None else job.watchdog_s
    # For the ranks' titles. A call has the name of the program that made it, or of the file that its command names.
    files = [word for word in sys.argv if word.endswith(".py")] if mode == "call" else [target]
    orders = {
        "program": os.path.basename((files or ["launch"])[-1]),
        "launcher_pid": os.getpid(),
        "run_dir": str(job.folder),
        "mode": mode,
        "watchdog_s": patience_s,
        "has_pipes": job.log_tail is not None,
    }
    command = (python, "-u", bootstrap.__file__, json.dumps(orders), target, *args)
    job.is_command = mode != "call"
    job.ranks = range(config.nproc_per_node)
    # With other backends, there is no store of torch's that all launchers can reach.
    if config.max_nodes > 1 and config.rdzv_backend in ("static", "c10d", "etcd-v2"):
        job.store = InterNodeStore(config.rdzv_endpoint, config.run_id)
    is_strict = job.watchdog_action == "end" or (job.watchdog_s is not None and job.watchdog_action is None)
    watchdog = Watchdog(job.folder, patience_s, is_strict, config.max_nodes, job.store, job.resources, job.on_hang)
    with job.handling_signals(config.signals_to_handle):
        try:
            with server_for(mode, target, config.nproc_per_node) as job.server, elastic_quiet(), watchdog:
                # Kept to the end of this function: it has the store, in which `job_error` meets the other launchers.
                agent = _Agent(job, config, command)
                failures = agent.run().failures
        except SignalException as error:
            # If a signal arrived while the ranks stopped for another machine, they have already stopped and saved.
            stopped = job.stopped({0}) if isinstance(error, StoppedWhileRestarting) else None
            name = "Ctrl-C" if error.sigval == signal.SIGINT else error.sigval.name
            raise stopped or Stopped(f"Stopped by {name}; all ranks have ended.", signal=error.sigval) from None
        except (RuntimeError, OSError, ValueError, rendezvous.RendezvousError) as error:
            raise _not_met(error, config) from error
    # Ranks that stop gracefully exit with a special code, which is not a failure; ranks that hung were killed.
    stopped = None if job.hang else job.stopped({failure.exitcode for failure in failures.values()} or {0})
    if stopped is not None:
        raise stopped
    if failures:
        counts = {"num_nodes": config.max_nodes, "num_replaced": job.num_replaced}
        raise failure_report.job_error(job.exits(failures), job.ranks, hang=job.hang, store=job.store, **counts)


def _not_met(error: Exception, config: LaunchConfig) -> LockstepError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    if config.max_nodes == 1:
        return LockstepError(f"The ranks could not be started: {reason}.")
    if isinstance(error, rendezvous.RendezvousClosedError):
        return LockstepError(
            f"The job at {config.rdzv_endpoint} has ended and accepts no more machines.\n"
            "To start a new job, start the command on all machines."
        )
    if isinstance(error, rendezvous.RendezvousTimeoutError):
        reason = "fewer machines than --nnodes joined in time"
    place = "each with its own --node-rank" if config.rdzv_backend == "static" else "with the same --rdzv-id"
    return LockstepError(
        f"The machines of the job did not meet at {config.rdzv_endpoint}: {reason}.\n"
        f"This is {socket.gethostname()}. Start the same command on all {config.max_nodes} machines, {place}, and "
        "check that they reach that address, that its job has not ended, and that the port is free on the first of "
        "them."
    )


@contextmanager
def only_logged() -> Iterator[None]:
    """Log an error of the block, which cleans up: it neither makes a finished job fail, nor hides why a job failed."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, rendezvous.RendezvousError) as error:
        log(f"an error while cleaning up, which changes nothing else: {one_line(error)}")


def elastic_quiet() -> ExitStack:
    """Suppress the agent's warnings, until the end of its block, unless the user enabled its log.

    Our report replaces them.
    """
    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")
    names = [name for name in list(logging.Logger.manager.loggerDict) if name.startswith(prefixes)]
    is_quiet = "LOGLEVEL" not in os.environ and "TORCH_LOGS" not in os.environ
    stack = ExitStack()
    # The last logger is created later, with its own level; so loggers are disabled, instead of setting a level.
    for logger in map(logging.getLogger, (*names, "torchelastic-events-null") if is_quiet else ()):
        logger.disabled = True
        stack.callback(setattr, logger, "disabled", False)
    return stack


# The launcher's state of the ranks; hangs, and signals.


def stop_timeout_s() -> float:
    """Return how long ranks may take to stop gracefully."""
    return float(os.environ.get("LOCKSTEP_STOP_TIMEOUT_S", 120.0))


# Those that torch elastic handles; and its environment variable for those that it handles itself.
_SIGNALS = {*run_folder.STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT}
_LEFT_TO_ELASTIC = "TORCHELASTIC_SIGNALS_TO_HANDLE"


# Why the job continues after a report of the watchdog.
_CONTINUES = {
    Verdict.EARLY: "The job continues, as no rank has done an optimizer step: until then only the time-out of the "
    "process group ends it, or --watchdog SECONDS.",
    Verdict.SUSPECT: "The job continues; it ends if this lasts and no rank makes progress.",
}


@dataclass
class Job:
    """The launcher's state of the ranks of this machine, and what it does when they hang, end, or a signal arrives.

    Attributes:
        reaper: Kills them; has the folder of the run, in which they are requested to stop.
        log_tail: Reads the pipes with their output, if they do not write to the terminal themselves.
        min_ranks: After a rank was killed, a restart goes on with one fewer, but no fewer than this; with as many as
            before if ``None``.
        watchdog_s: How long ranks may wait for one that does nothing; zero: no watchdog. If it or the action is set,
            the watchdog also covers ranks that compute: they may keep the others waiting five times as long.
        watchdog_action: The action after that time: ``end`` the job, or ``warn`` only.
        num_spares: How many processes wait to take the place of a lost rank.
        recover: Which lost ranks are replaced while the others go on: of those that died, or that raised
            ``exceptions``, too.
        ranks: Their numbers, which may change after a restart.
        store: The store in which the launchers of several machines exchange notes.
        server: Forks the ranks, if they need not be new interpreters.
        resources: The memory that the ranks use.
        num_restarts_left: How often they may be started again after a failure.
        num_replaced: How many ranks were replaced while the others went on.
        lighthouse: As for `supervise`.
        is_command: Whether this process is the command ``lockstep run``, which a signal may end before the ranks start.
        has_started: Whether ranks were started.
        recovery: Replaces lost ranks while the others go on, if they can.
        hang: The watchdog's report, if the ranks were killed: then this is the cause, not the ranks' exit codes.
        requested_for: The signal for which they were requested to stop gracefully.
        stop_by_s: Until when they must have stopped then.
        num_signals: How many signals have arrived.
        stopped_at_ns: When the launcher began to stop each process that still ran, in nanoseconds since the epoch.
        ended_at_ns: When each process ended.
    """

    reaper: Reaper
    log_tail: LogTail | None = None
    min_ranks: int | None = None
    watchdog_s: float | None = None
    watchdog_action: str | None = None
    num_spares: int = 0
    recover: str | None = None
    ranks: range = range(0)
    store: InterNodeStore | None = None
    server: ForkServer | None = None
    resources: Resources = field(default_factory=Resources)
    num_restarts_left: int = 0
    num_replaced: int = 0
    lighthouse: str | None = None
    is_command: bool = False
    has_started: bool = False
    recovery: Recovery | None = None
    hang: str = ""
    requested_for: signal.Signals | None = None
    stop_by_s: float = math.inf
    num_signals: int = 0
    stopped_at_ns: dict[int, int] = field(default_factory=dict)
    ended_at_ns: dict[int, int] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.reaper.run_dir

    def exits(self, failures: Mapping[int, ProcessFailure]) -> list[failure_report.RankExit]:
        """Return how the ranks have ended; show all their output, and keep the tracebacks beside it."""
        exits = failure_report.rank_exits(failures, self.stopped_at_ns, self.ended_at_ns, self.folder, self.resources)
        if self.log_tail is not None:
            self.log_tail.settle({exit.rank: exit.record.trace for exit in exits})
        return exits

    def on_hang(self, text: str, verdict: Verdict, awaited: dict[int, int]) -> bool:
        """Act on the watchdog's report about the ranks ``awaited``, with their processes; return whether to go on."""
        if self.watchdog_action == "warn":
            log(f"{text}\nThe job continues, because of --watchdog-action warn.")
        elif verdict is not Verdict.HANGS:
            log(f"{text}\n{_CONTINUES[verdict]}")
        elif self.num_restarts_left and awaited:
            is_replaced = self.recovery is not None and self.recovery.can_replace(awaited)
            who = f"{format_ranks(list(awaited))} {'is' if len(awaited) == 1 else 'are'}"
            log(f"{text}\n{f'{who[0].upper()}{who[1:]} replaced.' if is_replaced else 'The ranks are started again.'}")
            # They cannot write it themselves any more, and a bare SIGKILL would be reported as "killed from outside".
            message = "JobHangs: it kept the others waiting; the report is above"
            for rank, pid in awaited.items():
                failure = run_folder.FailureRecord(message, "JobHangs", time_ns=time.time_ns(), pid=pid)
                failure.write(self.folder, rank)
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        else:
            self.hang = text
            self.reaper.kill_ranks()
            return False
        return True

    def handling_signals(self, names: str) -> AbstractContextManager[None]:
        """Handle the signals that torch elastic would, inside the block. Works in the main thread only."""
        names += ",SIGUSR1" * (names == "SIGTERM,SIGINT,SIGHUP,SIGQUIT")  # torch elastic's default
        return signal_handlers([signal.Signals[name.strip()] for name in names.split(",")], self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        """Request the ranks to stop at the first signal, if all of them can; end them at the next.

        Ranks that cannot stop gracefully get the signal at once, as under torch elastic, which waits for half a minute;
        a further signal kills them.
        """
        sigval = signal.Signals(number)
        # Interrupts the main thread, possibly while it prints: so this function must not print.
        self.num_signals += sigval != signal.SIGUSR1  # sent before SIGTERM
        if self.is_command and not self.has_started:
            # An exception could be lost: what torch does at a start catches some. The reaper removes what is left.
            signal.signal(sigval, signal.SIG_DFL)
            signal.raise_signal(sigval)
        # Ranks that have stopped already count as those that can.
        stops = len(run_folder.stop_reports(self.folder)) == len(self.ranks)
        # A rank that takes the place of a lost one stops with the others.
        ranks = set(self.ranks) if self.recovery is None else self.recovery.settled_ranks
        stops = stops or (bool(ranks) and ranks <= run_folder.graceful_ranks(self.folder))
        if self.requested_for is None and number in run_folder.STOP_SIGNALS and stops:
            self.requested_for = sigval
            if sigval is signal.SIGINT and self.log_tail is not None:
                self.log_tail.print(run_folder.FIRST_CTRL_C_MESSAGE.decode())
            elif sigval is signal.SIGINT:
                os.write(2, run_folder.FIRST_CTRL_C_MESSAGE)  # print() may have been interrupted within a line
            run_folder.request_stop(self.folder, sigval.name)
            self.stop_by_s = time.monotonic() + stop_timeout_s()
        elif self.requested_for is None or self.num_signals > 1:
            run_folder.request_stop(self.folder, sigval.name)  # so that ranks know that none has failed
            if self.num_signals > 1:
                self.reaper.kill_ranks()  # torch's agent would wait for half a minute
            raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)

    def stopped(self, exit_codes: set[int]) -> Stopped | None:
        """Return the error to raise after ranks ended with ``exit_codes``; ``None`` if they did not stop gracefully."""
        reports = run_folder.stop_reports(self.folder)
        # Ranks of other machines may have been requested to.
        is_requested = self.requested_for is not None or exit_codes == {RESUME_EXIT_CODE}
        if not is_requested or not reports or not exit_codes <= {0, RESUME_EXIT_CODE}:
            return None
        return Stopped(reports[0], signal=self.requested_for or signal.SIGTERM, saved=True)


# torch elastic's agent, extended.

_POLL_S = 0.1
# How often to try the rendezvous, if one of the machines is lost during it.
_NUM_RENDEZVOUS_ATTEMPTS = 3
# How long it takes until a launcher notices that another one has left; it polls once a second.
_NOTICED_S = 3.0


class StoppedWhileRestarting(SignalException):
    """A signal arrived while the ranks stopped for another machine: they have stopped, and are not started again."""


class _Agent(LocalElasticAgent):
    """Starts the ranks, polls them, stops all when one fails, and repeats the rendezvous, as torch does.

    Additions to torch's agent:

    - Ranks that support it are requested to save and stop before they are started again with another machine
      (`_is_done_after_stop`). If a machine's ranks stopped at the request of another machine, this one follows it
      (`_follow_others`).
    - After a rank was killed, a job on one machine may go on with one fewer (``min_ranks``).
    - The number of restarts is that of the whole job; each of torch's launchers counts the failures that it saw.
    - It records when each rank ended, and which ones still ran when the launcher began to stop them: those are never
      the cause.
    """

    def __init__(self, job: Job, config: LaunchConfig, command: tuple[str, ...]) -> None:
        self.job, self.config = job, config
        # How often the ranks of the job have been started again, for any reason; and how often because a rank of this
        # machine failed.
        self.num_restarts, self.num_failures = -1, 0
        # What torch has found at the last poll of the ranks.
        self._last = RunResult(WorkerState.HEALTHY)
        # Where the launchers of several machines agree on recovery; and the running job that this one joins.
        has_board = config.rdzv_backend in ("static", "c10d") and config.max_nodes > 1 and config.max_restarts > 0
        self._board = InterNodeStore(config.rdzv_endpoint, config.run_id) if has_board else None
        self._joins: Lighthouse | None = None
        # The start of the job that this machine has taken part in last, by its lighthouse.
        self._left = ""
        self._machines: Machines | None = None
        with self._ending_at_once():
            handler = rendezvous_of(config, lambda: run_folder.is_stopped_by_signal(job.folder))
        # What torchrun's flags say about ranks, logs and NUMA bindings: the settings that both have in this torch.
        common = {each.name: getattr(config, each.name) for each in fields(WorkerSpec) if hasattr(config, each.name)}
        common |= {"local_world_size": config.nproc_per_node, "entrypoint": command[0], "args": command[1:]}
        spec = WorkerSpec(**common, rdzv_handler=handler)
        # How long ranks may take to end after a signal: an argument since torch 2.13.
        patience: dict[str, Any] = {name: value for name, value in vars(config).items() if name == "shutdown_timeout"}
        super().__init__(spec, cast(LogsSpecs, config.logs_specs), **patience)

    def _ending_at_once(self) -> AbstractContextManager[None]:
        """Make the kernel end this process at a signal, inside the block; the reaper removes what is left.

        While it waits for other machines in torch's C++ code, no handler in Python would run.
        """
        return signal_handlers(_SIGNALS if self.job.is_command else (), signal.SIG_DFL)

    def run(self, *args: Any) -> RunResult:
        """Run until all ranks have ended, as torch's ``launch_agent`` does."""
        try:
            # A spare machine that was never used has no result.
            return cast(RunResult | None, super().run(*args)) or RunResult(WorkerState.SUCCEEDED)
        finally:
            is_leaving = isinstance(sys.exception(), SignalException)  # else all machines end
            with only_logged():
                self._leave_machines()
            with only_logged():
                if not is_leaving:
                    self.get_worker_group().spec.rdzv_handler.shutdown()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Run the rendezvous; repeat it if a machine is lost before it has written what the others need."""
        handler = worker_group.spec.rdzv_handler
        found = None
        if (board := self._board) is not None:
            # Only the first machine knows how often the ranks were started, and it may be about to start them again.
            if self.config.rdzv_configs.get("rank", 0) != 0 and has_begun(board):
                with self._ending_at_once():
                    poll_until(lambda: running_job(board) is not None, stop_timeout_s(), _POLL_S)
            found = running_job(board)
        # Machines that this one has left before they had come together also go on without it.
        can_join = found is not None and (found.have_met or found.job == self._left)
        self._joins = found if can_join else None
        self.num_restarts += 1
        if self._joins is not None:
            # The ranks begin alone, as on a single machine.
            worker_group.spec.rdzv_handler = self._alone = RendezvousPerRestart(self.config, None, bool)
            super()._rendezvous(worker_group)
            worker_group.spec.rdzv_handler = handler
            return
        if found is not None:
            self.num_restarts = found.start  # the ranks of the first machine wait for those of this one
        for attempt in range(_NUM_RENDEZVOUS_ATTEMPTS):
            try:
                with self._ending_at_once():
                    super()._rendezvous(worker_group)
                    if isinstance(handler, RendezvousPerRestart):
                        self.num_restarts = handler.num_restarts
                        if self.job.store is not None:  # the rendezvous store may be lost, or not be torch's
                            self.job.store.move_to(handler.store_address)
                return
            except (RuntimeError, rendezvous.RendezvousConnectionError):  # an error of the store
                if not isinstance(handler, RendezvousPerRestart) or attempt == _NUM_RENDEZVOUS_ATTEMPTS - 1:
                    raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks with the variables of torchrun, as `_RankProcesses`."""
        spec = worker_group.spec
        of_all = {
            "GROUP_RANK": worker_group.group_rank,
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_WORLD_SIZE": worker_group.group_world_size,
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": worker_group.master_port,
            "TORCHELASTIC_RESTART_COUNT": self.num_restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            AGENT_STORE: spec.rdzv_handler.use_agent_store,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        if spec.rdzv_handler.use_agent_store:
            of_all[LAUNCHER_STORE] = f"{worker_group.master_addr}:{worker_group.master_port}"
        if self._joins is not None:
            of_all[JOINS] = 1
        envs: dict[int, dict[str, str]] = {}
        args = {}
        for worker in worker_group.workers:
            number = worker.local_rank
            own = {"RANK": worker.global_rank, "WORLD_SIZE": worker.world_size}
            own |= {"ROLE_RANK": worker.role_rank, "ROLE_WORLD_SIZE": worker.role_world_size}
            envs[number] = {name: str(value) for name, value in (of_all | own).items()}
            args[number] = tuple(macros.substitute(list(spec.args), str(number)))  # torchrun's ${local_rank}
        torch_internals.prepare_elastic_ranks(self, envs)
        # elastic would install its own handlers at each start of the ranks, and never remove them.
        os.environ[_LEFT_TO_ELASTIC] = ""
        filters = spec.duplicate_stdout_filters, spec.duplicate_stderr_filters
        where = spec.role, cast(str, spec.entrypoint), args, envs, cast(LogsSpecs, self.config.logs_specs), None
        ranks = self._pcontext = _RankProcesses(*where, spec.numa_options, *filters)
        ranks.job, ranks.numa_options, ranks.spares = self.job, spec.numa_options, {}
        self.job.has_started = True
        ranks.start()
        return ranks.pids()

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        super()._initialize_workers(worker_group)
        set_keepalive()  # for connections to the launchers of other machines
        first = worker_group.workers[0].global_rank
        self.job.ranks = range(first, first + len(worker_group.workers))
        self.job.num_restarts_left = worker_group.spec.max_restarts - self.num_failures
        self.job.stopped_at_ns.clear()  # pids may be reused
        ranks, self.job.recovery = self._pcontext, None
        can_agree = self.config.max_nodes == 1 or self._board is not None
        if isinstance(ranks, _RankProcesses) and self.job.num_restarts_left > 0 and can_agree:
            workers = {worker.id: worker.global_rank for worker in worker_group.workers}
            recovery = self.job.recovery = Recovery(
                self.job.folder,
                workers,
                self.job.num_restarts_left,
                start=ranks.start_late,
                start_spare=ranks.start_spare,
                num_spares=self.job.num_spares,
                exceptions=self.job.recover == "exceptions",
                min_ranks=self.job.min_ranks,
                spares=ranks.spares,
                server=self.job.server,
            )
            if self._board is not None:
                self._machines = recovery.machines = Machines(
                    self.job.folder,
                    list(workers),
                    self._board,
                    self.config.local_addr or socket.getfqdn(),
                    worker_group.group_rank if self._joins is None else self.config.rdzv_configs.get("rank"),
                    cast(int, worker_group.group_world_size),
                    self.config.min_nodes,
                    self.config.max_nodes,
                    self.num_restarts,
                    self.job.lighthouse,
                    self._joins,
                )
        if self.job.log_tail is not None:
            self.job.log_tail.started(self.job.ranks)

    def _leave_machines(self) -> None:
        if self._machines is not None:
            self._machines.close()
            self._left = self._machines.found.job if self._machines.found is not None else ""
            self._machines = None

    def _join_again(self, worker_group: WorkerGroup, reason: str) -> None:
        """End the ranks of this machine, as the others may go on without them, and start others."""
        log(reason)
        assert self._pcontext is not None
        kill_sessions(self._pcontext.pids().values())
        run_folder.forget_ranks(self.job.folder)
        spec = worker_group.spec
        with self._ending_at_once():
            wait_for_host(self.config)
            # The store may be another one now.
            self._board = board = InterNodeStore(self.config.rdzv_endpoint, self.config.run_id)
            if self.config.rdzv_backend == "static" and self.config.rdzv_configs["rank"] != 0:
                spec.rdzv_handler = rendezvous_of(self.config, bool)
                spec.rdzv_handler.next_rendezvous()
                had_place = self._machines is not None and self._machines.number >= 0
                if had_place and is_replaced(board, self.config.rdzv_configs["rank"]):
                    raise is_taken(self.config.rdzv_configs["rank"])
                # A new launcher on the first machine begins to count again, and waits for this one before it writes
                # anything.
                if not has_begun(board):
                    self.num_restarts = -1
        self._last = RunResult(WorkerState.HEALTHY)  # not a failure: no restart is used up
        self._restart_workers(worker_group)

    def _recover(self, worker_group: WorkerGroup) -> bool:
        """Replace lost ranks, if the others can go on; return whether torch is to poll the ranks.

        It is not while some run and none is lost for good: it would end the job for one that is lost meanwhile.
        """
        recovery, ranks = self.job.recovery, self._pcontext
        if recovery is None or not isinstance(ranks, _RankProcesses):
            return True
        recovery.poll()
        self._follow(recovery, worker_group)
        if (machines := self._machines) is not None:
            handler = worker_group.spec.rdzv_handler
            if isinstance(handler, RendezvousPerRestart):
                handler.is_quorum_used = machines.number >= 0 or self._joins is not None
            if (reason := machines.poll()) is not None:
                self._join_again(worker_group, reason)
                return False
        codes = {local: handler.proc.poll() for local, handler in ranks.subprocess_handlers.items()}
        if not (ended := {local: code for local, code in codes.items() if code}):
            return None not in codes.values()
        failures = {}
        for local, code in ended.items():
            worker = worker_group.workers[local]
            failures[worker.global_rank] = ProcessFailure(local, worker.id, code, ranks.error_files[local])
        pids = {rank: failure.pid for rank, failure in failures.items()}
        exits = failure_report.rank_exits(failures, {}, self.job.ended_at_ns, self.job.folder, self.job.resources)
        lost = [exit for exit in exits if exit.rank in failures]
        if all(recovery.is_harmless(exit, pids[exit.rank]) for exit in lost):
            for local in ended:
                ranks.subprocess_handlers[local].proc.returncode = 0
            log("; ".join(map(failure_report.how_it_ended, lost)) + "; the training was complete")
            return self._recover(worker_group)
        normal = {worker_group.workers[local].id for local, code in codes.items() if code == 0}
        if (reason := recovery.why_not(lost, {*pids.values(), *normal})) is not None:
            if reason:
                log(f"the ranks cannot go on in place: {reason}")
            return True
        new = recovery.replace(lost, pids)
        handlers = {handler.proc.pid: handler for handler in (*ranks.subprocess_handlers.values(), *new.values())}
        by_rank = sorted(recovery.ranks, key=recovery.ranks.__getitem__)
        ranks.subprocess_handlers = {local: handlers[pid] for local, pid in enumerate(by_rank)}
        torch_internals.set_num_processes(ranks, len(by_rank))
        del worker_group.workers[len(by_rank) :]
        for worker, pid in zip(worker_group.workers, by_rank, strict=True):
            worker.id = pid
        worker_group.spec.local_world_size = len(by_rank)
        self._follow(recovery, worker_group)
        ranks.watch(handler.proc.pid for handler in new.values())
        self.num_failures += len(lost)
        self.job.num_restarts_left -= len(lost)
        self.job.num_replaced += len(lost)
        return False

    def _follow(self, recovery: Recovery, worker_group: WorkerGroup) -> None:
        """Take over the ranks' numbers, of which there may be fewer than before."""
        for worker in worker_group.workers:
            worker.global_rank = recovery.ranks[worker.id]
        first = min(recovery.ranks.values())
        if (ranks := range(first, first + len(recovery.ranks))) != self.job.ranks:
            self.job.ranks = ranks
            if self.job.log_tail is not None:
                self.job.log_tail.started(ranks)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        is_to_poll = self._recover(worker_group)
        if time.monotonic() > self.job.stop_by_s:
            self.job.reaper.kill_ranks()
            raise SignalException("the ranks have not stopped in time", sigval=self.job.requested_for or signal.SIGTERM)
        if not is_to_poll:
            return RunResult(WorkerState.HEALTHY)
        self._last = cast(RunResult, super()._monitor_workers(worker_group))
        codes = {failure.exitcode for failure in self._last.failures.values()}
        # Users' scripts exit with this code after `fit` has stopped; torch may have stopped the others.
        if RESUME_EXIT_CODE in codes and codes <= {RESUME_EXIT_CODE, -signal.SIGTERM}:
            self._follow_others(worker_group)
        return self._last

    def _follow_others(self, worker_group: WorkerGroup) -> None:
        """Handle ranks that saved and stopped because another launcher stopped its ranks: a machine leaves or joins."""
        handler = worker_group.spec.rdzv_handler
        if not isinstance(handler, RendezvousPerRestart) or not run_folder.stop_reports(self.job.folder):
            return
        # A signal may have been sent to all machines, and arrive here a moment later.
        is_stopped = run_folder.is_stopped_by_signal
        poll_until(lambda: is_stopped(self.job.folder) or handler.num_nodes_waiting() > 0, _NOTICED_S, _POLL_S)
        self._raise_if_signalled()
        if self.config.min_nodes < self.config.max_nodes or handler.num_nodes_waiting() > 0:
            self._last = RunResult(WorkerState.HEALTHY)  # not a failure: no restart is used up
            self._restart_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec, failures = worker_group.spec, self._last.failures
        if not failures and self._is_done_after_stop(worker_group):
            return
        if self._pcontext is not None:
            self._pcontext.close()
            # The loader processes of a killed rank would go on for some seconds.
            kill_sessions(self._pcontext.pids().values())
        exits = self.job.exits(failures)
        self._leave_machines()
        text = "lockstep: machines joined or left; the ranks start again"
        if failures:
            first = failure_report.first_failure(exits)
            self.num_failures += 1
            restart = f"restart {self.num_failures} of {spec.max_restarts}"
            # A rank that raised would raise again on any number of devices; one that was killed may have lost its own.
            if first.exit_code < 0 and spec.local_world_size > (self.job.min_ranks or math.inf):
                hide_device(failures[first.rank].local_rank, spec.local_world_size)
                spec.local_world_size -= 1
                restart += f" with {spec.local_world_size} rank{'s' * (spec.local_world_size != 1)}"
            text = failure_report.restart_report(first, restart)
        run_folder.forget_ranks(self.job.folder)
        print(text, file=sys.stderr, flush=True)
        super()._restart_workers(worker_group)

    def _is_done_after_stop(self, worker_group: WorkerGroup) -> bool:
        """Make the ranks save and stop for another machine, if all can; return whether their programs are done."""
        if len(run_folder.graceful_ranks(self.job.folder)) != worker_group.spec.local_world_size:
            return False
        run_folder.request_stop(self.job.folder, run_folder.ANOTHER_MACHINE)
        log("another machine waits to join; the ranks stop after this step, and start again with it")
        monitor = super()._monitor_workers
        poll_until(lambda: monitor(worker_group).state != WorkerState.HEALTHY, stop_timeout_s(), _POLL_S)
        self._raise_if_signalled()
        return monitor(worker_group).state == WorkerState.SUCCEEDED and not run_folder.stop_reports(self.job.folder)

    def _raise_if_signalled(self) -> None:
        if run_folder.is_stopped_by_signal(self.job.folder):
            raise StoppedWhileRestarting("a signal arrived meanwhile", sigval=signal.SIGTERM)

    def _exit_barrier(self) -> None:
        if not run_folder.is_stopped_by_signal(self.job.folder):  # else this machine leaves, and the others may go on
            if self._machines is not None and self._machines.number >= 0:
                self._machines.finish()  # the machines may not be those of the rendezvous
                return
            with self._ending_at_once():
                super()._exit_barrier()  # type: ignore[no-untyped-call]


class _RankProcesses(SubprocessContext):
    """The processes of the ranks: forked if there is a server, otherwise new interpreters, which torch starts.

    Records when each one ended, and which ones still ran when the launcher began to stop them.
    """

    job: Job
    numa_options: NumaOptions | None
    watcher: threading.Thread | None = None
    # The spares, by number.
    spares: dict[int, SubprocessHandler]

    def _start(self) -> None:
        for rank in self.envs:
            # Each at once, so that the agent ends those that have started if a signal arrives meanwhile.
            self.subprocess_handlers[rank] = self._start_rank(rank, self.envs[rank])
        self.job.ended_at_ns.clear()  # pids may be reused
        self.watch(self.pids().values())

    def watch(self, pids: Iterable[int]) -> None:
        """Record when these processes end."""
        # No exit status has been read yet, so no pid can belong to another process.
        running = {os.pidfd_open(pid): pid for pid in pids}
        self.watcher = threading.Thread(target=self._note_ends, args=(running,), name="lockstep-rank-ends", daemon=True)
        self.watcher.start()

    def _note_ends(self, running: dict[int, int]) -> None:
        """Record when each process ends: torch notices it at its next poll, in the order of the ranks."""
        while running:
            for descriptor in cast(list[int], connection.wait(running)):  # the kernel makes it readable at the end
                self.job.ended_at_ns[running.pop(descriptor)] = time.time_ns()
                os.close(descriptor)

    def start_late(self, rank: int, local: int, num_ranks: int) -> SubprocessHandler:
        """Start a process for the place of a rank in a running job, which has so many ranks on this machine."""
        env, newest = self.envs[local], run_folder.Generation.read(self.job.folder)
        num_others = int(env["WORLD_SIZE"]) - int(env["LOCAL_WORLD_SIZE"])
        if newest is not None:  # this machine may have begun with other machines, or alone
            num_others = newest.world_size - len(newest.ranks) - len(newest.waiting)
        changed = {"RANK": rank, "WORLD_SIZE": num_others + num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        return self._start_rank(local, env | {name: str(number) for name, number in changed.items()} | {JOINS: "1"})

    def start_spare(self, number: int) -> SubprocessHandler:
        """Start a spare, which prepares as if it were the last rank, with a device of its own."""
        last = len(self.subprocess_handlers) - 1
        env = self.envs[last] | {JOINS: "1", run_folder.SPARE: NAME_OF_SPARE.format(number)}
        if (found := visible_devices(last + 1 + number)) is not None:
            variable, visible = found
            visible[last] = visible[last + number]
            env[variable] = ",".join(visible)
        return self._start_rank(last, env)

    def _start_rank(self, rank: int, env: dict[str, str]) -> SubprocessHandler:
        # The output of a spare, which is no rank yet, is that of the launcher.
        streams = ("", "") if run_folder.SPARE in env else (self.stdouts[rank], self.stderrs[rank])
        own = cast(str, self.entrypoint), self.args[rank], env, *streams, rank, self.numa_options
        return self._fork(rank, env, streams) or get_subprocess_handler(*own)

    def _fork(self, rank: int, env: dict[str, str], streams: tuple[str, str]) -> SubprocessHandler | None:
        server = self.job.server
        # Others are wrapped in numactl, or run an interpreter that the user chose.
        if server is None or self.entrypoint != sys.executable or self.numa_options is not None:
            return None
        with ExitStack() as stack:
            # The path is empty for the launcher's own stream.
            paths = enumerate(streams, 1)
            files = [stack.enter_context(open(path, "w")).fileno() if path else own for own, path in paths]
            return cast(SubprocessHandler | None, server.fork(self.args[rank], {**os.environ, **env}, [0, *files]))

    @only_logged()
    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End the ranks, as torch does; without a signal it does so because one of them has failed.

        torch calls this during the poll that has found the first failed rank: only at this moment can failed ranks be
        distinguished from ranks that are stopped because of the failure.
        """
        for pid in self.pids().values():
            if process_state(pid)[0]:
                self.job.stopped_at_ns[pid] = time.time_ns()
        super().close(death_sig or signal.SIGTERM, failure_report.SIGTERM_S if death_sig is None else timeout)
        kill_sessions(spare.proc.pid for spare in self.spares.values())
        for spare in self.spares.values():
            spare.proc.wait(failure_report.SIGTERM_S)
        self.spares.clear()
        if self.watcher is not None:
            self.watcher.join(_POLL_S)  # no rank is left; its last records may be a moment late
