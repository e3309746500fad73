"""Run ranks under torch elastic's agent, answer signals and the watchdog, and turn what goes wrong into one error."""

import contextlib
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Literal

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lockstep import run_folder
from lockstep.comm.store import InterNodeStore
from lockstep.errors import RESUME_EXIT_CODE, JobHangs, LockstepError, RankFailed, Stopped
from lockstep.launcher import bootstrap, failure_report
from lockstep.launcher.elastic import Job, StoppedWhileRestarting, extended_agent, log, stop_timeout_s
from lockstep.launcher.output import LogTail
from lockstep.launcher.reaper import Reaper
from lockstep.telemetry.watchdog import Verdict, Watchdog


@dataclass(frozen=True)
class Program:
    """What each rank becomes.

    Attributes:
        mode: ``script``, ``module``, ``command`` (any executable) or ``call`` (a pickled function).
        target: The path, the name, or for a call the folder with the function.
        args: What it finds in ``sys.argv[1:]``.
        min_ranks: After a rank was killed, a restart goes on with one fewer, but no fewer than this.
    """

    mode: str
    target: str
    args: Sequence[str] = ()
    min_ranks: int | None = None


@dataclass(frozen=True)
class WatchdogPolicy:
    """What is done about ranks that wait for each other.

    Attributes:
        patience_s: How long they may wait for one that does nothing; not watched if zero.
        action: ``end`` the job, also if a rank that computes keeps the others waiting five times as long; end it only
            if ``certain`` that nothing moves, and warn else; or ``warn`` only.
        reports_slow: Whether it is reported if one rank is persistently slower than the others.
    """

    patience_s: float = 60.0
    action: Literal["end", "certain", "warn"] = "certain"
    reports_slow: bool = True


DEFAULT_POLICY = WatchdogPolicy()


def watchdog_policy(patience_s: float | None, action: str | None) -> WatchdogPolicy:
    """Return what the user asked for; who sets a patience is taken to mean it for ranks that compute as well."""
    if patience_s is None and action is None:
        return DEFAULT_POLICY
    patience_s = DEFAULT_POLICY.patience_s if patience_s is None else patience_s
    return WatchdogPolicy(patience_s, "warn" if action == "warn" else "end")


def supervise(
    config: LaunchConfig,
    program: Program,
    reaper: Reaper,
    *,
    python: str,
    policy: WatchdogPolicy = DEFAULT_POLICY,
    log_tail: LogTail | None = None,
) -> None:
    """Start the ranks of this machine and wait until all have ended well.

    Blocks as long as they run. Leaves signal handlers and logging as they were.

    Args:
        config: Of torch elastic: how many ranks, and where the machines meet.
        program: What each rank becomes.
        reaper: Clears the ranks away.
        python: The interpreter of the ranks.
        policy: What is done about ranks that wait for each other.
        log_tail: Reads the pipes that the ranks' output goes into, if they do not write to the terminal themselves.

    Raises:
        JobHangs: Ranks waited for each other for too long.
        RankFailed: A rank failed; the message has the first one's traceback.
        LockstepError: The machines of the job did not come together.
        Stopped: This process was requested to end, and has ended the ranks, or all of them have stopped gracefully.
    """
    orders = {
        "launcher_pid": os.getpid(),
        "run_dir": str(reaper.run_dir),
        "mode": program.mode,
        "watchdog_s": policy.patience_s,
        "has_pipes": log_tail is not None,
    }
    args = ["-u", bootstrap.__file__, json.dumps(orders), program.target, *program.args]
    may_shrink = config.min_nodes < config.max_nodes
    job = Job(reaper.run_dir, range(config.nproc_per_node), log_tail, program.min_ranks, may_shrink)
    # The watchdog kills the ranks of a job that hangs; then its report is the cause, not how they ended.
    hangs: list[str] = []
    # Other backends meet in something else than a store of torch's.
    has_store = config.max_nodes > 1 and config.rdzv_backend in ("static", "c10d")
    store = InterNodeStore(config.rdzv_endpoint, config.run_id) if has_store else None
    watchdog = Watchdog(
        reaper.run_dir,
        policy.patience_s,
        is_strict=policy.action == "end",
        num_nodes=config.max_nodes,
        store=store,
        resources=job.resources,
        on_report=partial(_on_report, job, reaper, policy, hangs),
        on_slow=log if policy.reports_slow else lambda text: None,
    )
    stop = GracefulShutdown(reaper, job)
    with stop.handling(config) as config, elastic_quiet(), extended_agent(job):
        try:
            with watchdog:
                elastic_launch(config, python)(*args)
        except ChildFailedError as error:
            # Ranks that stop gracefully leave with a code of their own, which is no failure; those that hung were
            # killed.
            exit_codes = {failure.exitcode for failure in error.failures.values()}
            stopped = None if hangs else stop.outcome(exit_codes)
            raise stopped or _failure(job, store, config.max_nodes, hangs, error) from None
        except StoppedWhileRestarting as error:
            raise stop.outcome({0}) or _stopped(error.sigval) from None
        except SignalException as error:
            raise _stopped(error.sigval) from None
        except KeyboardInterrupt:  # before the agent had its own handlers in place
            raise _stopped(signal.SIGINT) from None
        except (RuntimeError, OSError, ValueError, RendezvousError) as error:
            raise _not_met(error, config) from error
        if (stopped := stop.outcome({0})) is not None:
            raise stopped


def _on_report(
    job: Job,
    reaper: Reaper,
    policy: WatchdogPolicy,
    hangs: list[str],
    text: str,
    verdict: Verdict,
    awaited: dict[int, int],
) -> bool:
    """Act on the watchdog's report about the ranks ``awaited``, with their processes; return whether to go on watching.

    A report for which the job is ended is added to ``hangs``.
    """
    if policy.action == "warn":
        log(f"{text}\nThe job goes on, as --watchdog-action warn says.")
    elif verdict is not Verdict.HANGS:
        log(f"{text}\nThe job goes on for now; it ends if this lasts and nothing moves.")
    elif job.num_restarts_left and awaited:
        log(f"{text}\nThe ranks are started again.")
        # They cannot write it themselves any more, and a bare SIGKILL would be reported as "killed from outside".
        failure = {"message": "JobHangs: it kept the others waiting; the report is above", "type": "JobHangs"}
        for rank, pid in awaited.items():
            run_folder.write_failure(job.folder, rank, failure)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    else:
        hangs.append(text)
        reaper.kill_ranks()
        return False
    return True


def _failure(
    job: Job, store: InterNodeStore | None, num_nodes: int, hangs: list[str], error: ChildFailedError
) -> LockstepError:
    """Return what to raise after ranks have failed. With several machines, waits some seconds for the others."""
    exits = job.exits(error.failures)
    first = failure_report.first_failure(exits)
    mine = failure_report.node_failure(first, hang="\n".join(hangs))
    others = failure_report.exchange_failures(store, mine, num_nodes=num_nodes)
    cause = failure_report.remote_cause(mine, others)
    if hang := (cause or mine).hang:
        return JobHangs(hang)
    if cause is not None:
        return RankFailed(failure_report.remote_report(cause, exits, job.ranks), rank=cause.rank)
    return RankFailed(failure_report.failure_report(exits, job.ranks), rank=first.rank)


def _stopped(number: signal.Signals) -> Stopped:
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    return Stopped(f"Stopped by {name}; no rank is left.", signal=number)


def _not_met(error: Exception, config: LaunchConfig) -> LockstepError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    if config.max_nodes == 1:
        return LockstepError(f"The ranks could not be started: {reason}.")
    if isinstance(error, RendezvousClosedError):
        return LockstepError(
            f"The job at {config.rdzv_endpoint} has ended, and takes up no more machines.\n"
            "To start another one, start the command on all machines."
        )
    if isinstance(error, RendezvousTimeoutError):
        reason = "fewer came in time than --nnodes asks for"
    elif isinstance(error, RendezvousConnectionError):
        reason = "nothing answers there, or no longer; the job may have ended, or its first machine is lost"
    place = "each with its own --node-rank" if config.rdzv_backend == "static" else "with the same --rdzv-id"
    return LockstepError(
        f"The machines of the job did not come together at {config.rdzv_endpoint}: {reason}.\n"
        f"This is {socket.gethostname()}. Start the same command on all {config.max_nodes} machines, {place}, and "
        "check that they reach that address and that the port is free on the first of them."
    )


# Signals.

_SIGNALS_OF_ELASTIC = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_LEFT_TO_ELASTIC = "SIGHUP,SIGQUIT"


class GracefulShutdown:
    """Requests the ranks to stop at the first signal, if all of them can; ends them at the next or when the time is up.

    Ranks that cannot stop gracefully get the signal at once, as under torch elastic, which waits for half a minute; a
    further signal kills them.

    Args:
        reaper: Kills the ranks.
        job: The ranks of this machine.
    """

    def __init__(self, reaper: Reaper, job: Job) -> None:
        self._reaper, self._folder, self._job = reaper, reaper.run_dir, job
        self._num_signals = 0
        self._requested_for: signal.Signals | None = None
        self._timer: threading.Timer | None = None

    @contextmanager
    def handling(self, config: LaunchConfig) -> Iterator[LaunchConfig]:
        """Take the signals over, and give what makes torch elastic leave them alone. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield config
            return
        # elastic installs handlers for all of these, and never removes them.
        numbers = {*run_folder.STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT}
        before = {number: signal.getsignal(number) for number in numbers}
        is_ours = config.signals_to_handle == _SIGNALS_OF_ELASTIC  # else the user chose
        try:
            if is_ours:
                for number in run_folder.STOP_SIGNALS:
                    signal.signal(number, self._on_signal)
            yield replace(config, signals_to_handle=_LEFT_TO_ELASTIC) if is_ours else config
        finally:
            if self._timer is not None:
                self._timer.cancel()  # or it would signal this process, which may live on
                self._timer.join(1.0)
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def outcome(self, exit_codes: set[int]) -> Stopped | None:
        """Return what to raise after ranks ended with ``exit_codes``; ``None`` if they did not stop gracefully."""
        reports = run_folder.stop_reports(self._folder)
        if self._requested_for is None and exit_codes != {RESUME_EXIT_CODE}:
            return None  # ranks of other machines may have been requested to
        if not reports or not exit_codes <= {0, RESUME_EXIT_CODE}:
            return None
        return Stopped(reports[0], signal=self._requested_for or signal.SIGTERM, saved=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        sigval = signal.Signals(number)
        # Runs in the midst of whatever the main thread does, which may be printing: so nothing here prints.
        self._num_signals += sigval != signal.SIGUSR1  # which comes ahead of SIGTERM
        if self._requested_for is None and self._can_stop():
            self._requested_for = sigval
            if sigval is signal.SIGINT and self._job.log_tail is not None:
                self._job.log_tail.print(run_folder.FIRST_CTRL_C_MESSAGE.decode())
            elif sigval is signal.SIGINT:
                os.write(2, run_folder.FIRST_CTRL_C_MESSAGE)  # print() may be in the midst of another line
            run_folder.request_stop(self._folder, sigval.name)
            self._timer = threading.Timer(stop_timeout_s(), self._give_up, [sigval])
            self._timer.daemon = True
            self._timer.start()
        elif self._requested_for is None or self._num_signals > 1:
            if self._num_signals > 1:
                self._reaper.kill_ranks()  # torch's agent would wait for half a minute
            raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)

    def _can_stop(self) -> bool:
        """Return whether all ranks of this machine stop gracefully if requested, or have done so already."""
        counts = run_folder.num_graceful_ranks(self._folder), len(run_folder.stop_reports(self._folder))
        return len(self._job.ranks) in counts

    def _give_up(self, sigval: signal.Signals) -> None:
        # As if the user had sent it twice; by a signal, as only the main thread may raise out of elastic's loop.
        self._num_signals += 2
        os.kill(os.getpid(), sigval)


@contextmanager
def elastic_quiet() -> Iterator[None]:
    """Keep the agent's warnings away unless the user asked for its log: our report replaces them."""
    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")
    names = [name for name in list(logging.Logger.manager.loggerDict) if name.startswith(prefixes)]
    # The last is made later, with a level of its own; so loggers are disabled here, not lowered.
    loggers = [logging.getLogger(name) for name in (*names, "torchelastic-events-null")]
    is_quiet = "LOGLEVEL" not in os.environ and "TORCH_LOGS" not in os.environ
    for logger in loggers:
        logger.disabled = is_quiet
    try:
        yield
    finally:
        for logger in loggers:
            logger.disabled = False
