"""Run ranks under torch elastic's agent, answer the watchdog, and turn what goes wrong into one error."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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

from lockstep.comm.store import InterNodeStore
from lockstep.errors import JobHangs, LockstepError, RankFailed, Stopped
from lockstep.launcher import bootstrap
from lockstep.launcher.elastic import GracefulShutdown, RestartReport, StoppedWhileRestarting, extended_agent
from lockstep.launcher.failure_report import (
    exchange_failures,
    failure_report,
    first_failure,
    rank_exits,
    rank_lines,
    remote_cause,
    remote_failure_of,
    remote_report,
    with_memory,
    write_failure,
)
from lockstep.launcher.output import LogTail
from lockstep.launcher.reaper import Reaper
from lockstep.telemetry.resources import Resources
from lockstep.telemetry.watchdog import Verdict, Watchdog

# What torch elastic's agent does to the process that it runs in, undone or kept away.

_ELASTIC_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def signals_restored() -> Iterator[None]:
    """Undo the handlers that the agent installs and never removes."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may, and so the agent does not.
        return
    before = {number: signal.getsignal(number) for number in _ELASTIC_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def second_signal_kills(guard: Reaper) -> Iterator[None]:
    """Kill the ranks at the second signal: after the first, the agent waits long for them to end by themselves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    def watch() -> None:
        count = 0
        while number := theirs.recv(1):
            count += number[0] in _ELASTIC_SIGNALS
            if count > 1:
                guard.kill_ranks()

    with ours, theirs:
        # The interpreter writes the number of each signal there, beside calling its handler.
        before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=watch, name="lockstep-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            ours.shutdown(socket.SHUT_WR)
            thread.join()


@contextmanager
def environment_restored() -> Iterator[None]:
    """Undo all changes to ``os.environ`` made inside."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def elastic_quiet() -> Iterator[None]:
    """Keep the agent's warnings to itself unless the user asked for its log: our report replaces them."""
    if "LOGLEVEL" in os.environ or "TORCH_LOGS" in os.environ:
        yield
        return
    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")
    names = [name for name in list(logging.Logger.manager.loggerDict) if name.startswith(prefixes)]
    # This one is made later, with a level of its own; so loggers are disabled here, not lowered.
    loggers = [logging.getLogger(name) for name in (*names, "torchelastic-events-null")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


# What the launcher does about ranks that wait for each other: tell, end the job, or start the ranks again.


@dataclass(frozen=True)
class WatchdogPolicy:
    """What is done about ranks that wait for each other.

    Attributes:
        patience_s: How long they may wait for one that does nothing; not watched if zero.
        action: ``end`` the job, also if a rank that computes keeps the others waiting five times as long; end it only
            if ``certain`` that nothing moves, and warn else; or ``warn`` only.
        tells_slow: Whether it is said if one rank is persistently slower than the others.
    """

    patience_s: float = 60.0
    action: Literal["end", "certain", "warn"] = "certain"
    tells_slow: bool = True


DEFAULT_WATCHDOG_POLICY = WatchdogPolicy()


def watchdog_policy(patience_s: float | None, action: str | None) -> WatchdogPolicy:
    """Return what the user asked for; who sets a patience is taken to mean it for ranks that compute as well."""
    if patience_s is None and action is None:
        return DEFAULT_WATCHDOG_POLICY
    return WatchdogPolicy(
        DEFAULT_WATCHDOG_POLICY.patience_s if patience_s is None else patience_s, "warn" if action == "warn" else "end"
    )


class WatchdogResponse:
    """Answers the watchdog's reports for one run.

    Attributes:
        hangs: The report for which the job was ended, if it was.
        bulletin: Where the launchers of several machines tell each other what they see.
    """

    def __init__(self, watch: WatchdogPolicy, config: LaunchConfig, guard: Reaper) -> None:
        self.hangs: list[str] = []
        self._watch, self._config, self._guard = watch, config, guard
        self._num_restarts_left = 0
        # Other backends meet in something else than a store of torch's.
        has_store = config.max_nodes > 1 and config.rdzv_backend in ("static", "c10d")
        self.bulletin = InterNodeStore(config.rdzv_endpoint, config.run_id) if has_store else None

    def started(self, num_restarts_left: int) -> None:
        """Take note that ranks have been started, and how often that may be done again after a failure."""
        self._num_restarts_left = num_restarts_left

    def watchdog(self, resources: Resources) -> Watchdog:
        """Return what watches the ranks, to be entered while they run."""
        config, watch = self._config, self._watch
        return Watchdog(
            self._guard.run_dir,
            watch.patience_s,
            is_strict=watch.action == "end",
            num_nodes=config.max_nodes,
            bulletin=self.bulletin,
            resources=resources,
            on_report=self._answer,
            on_slow=_print if watch.tells_slow else _ignore,
        )

    def _answer(self, text: str, verdict: Verdict, awaited: dict[int, int]) -> bool:
        """Act on a report; return whether to go on watching."""
        if self._watch.action == "warn":
            _print(f"{text}\nThe job goes on, as --watchdog-action warn says.")
            return True
        if verdict is not Verdict.HANGS:
            _print(f"{text}\nThe job goes on for now; it ends if this lasts and nothing moves.")
            return True
        if self._num_restarts_left and awaited:
            _print(f"{text}\nThe ranks are started again.")
            for rank, pid in awaited.items():
                write_failure(self._guard.run_dir, rank, "JobHangs: it kept the others waiting; the report is above")
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            return True
        self.hangs.append(text)
        self._guard.kill_ranks()
        return False


def _ignore(text: str) -> None:
    """Take ``text`` and keep it."""


def _print(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)


# Run ranks under torch elastic's agent, and turn what goes wrong into one message.


@dataclass(frozen=True)
class Program:
    """What each rank becomes.

    Attributes:
        mode: ``script``, ``module``, ``command`` (any executable) or ``call`` (a pickled function).
        target: The path, the name, or for a call the folder with the function.
        captures: Whether its output goes into files in the run's folder.
        min_ranks: After a rank was killed, a restart goes on with one fewer, but no fewer than this.
        streams: Reads the pipes that its output goes into, if it does not write to the terminal itself.
    """

    mode: str
    target: str
    args: Sequence[str] = ()
    adopt: bool = False
    captures: bool = False
    min_ranks: int | None = None
    streams: LogTail | None = None


def supervise(
    config: LaunchConfig,
    program: Program,
    guard: Reaper,
    *,
    python: str,
    watch: WatchdogPolicy = DEFAULT_WATCHDOG_POLICY,
) -> None:
    """Start the ranks of this machine and wait until all have ended well.

    Blocks as long as they run. Leaves signal handlers and logging as they were.

    Args:
        config: Of torch elastic: how many ranks, and where the machines meet.
        program: What each rank becomes.
        guard: Watches the ranks.
        python: The interpreter of the ranks.
        watch: What is done about ranks that wait for each other.

    Raises:
        JobHangs: Ranks waited for each other for too long.
        RankFailed: A rank failed; the message has the first one's traceback.
        LockstepError: The machines of the job did not come together.
        Stopped: This process was told to end, and has ended the ranks, or all of them have stopped in order.
    """
    orders = {
        "launcher_pid": os.getpid(),
        "run_dir": str(guard.run_dir),
        "mode": program.mode,
        "adopt": program.adopt,
        "captures": program.captures,
        "patience_s": watch.patience_s,
        "streams": program.streams is not None,
    }
    args = ["-u", bootstrap.__file__, json.dumps(orders), program.target, *program.args]
    resources, response = Resources(), WatchdogResponse(watch, config, guard)
    with ExitStack() as stack:
        stack.enter_context(signals_restored())
        stack.enter_context(second_signal_kills(guard))
        stack.enter_context(elastic_quiet())
        stop = GracefulShutdown(guard.run_dir, config.nproc_per_node)
        config = stack.enter_context(stop.handling(config))

        def started(ranks: range, num_restarts_left: int) -> None:
            stop.num_ranks = len(ranks)
            response.started(num_restarts_left)

        report = RestartReport(
            guard.run_dir, lambda failures: rank_exits(failures, guard, resources), started, program.streams
        )
        may_shrink = config.min_nodes < config.max_nodes
        stack.enter_context(extended_agent(report, guard.run_dir, min_ranks=program.min_ranks, may_shrink=may_shrink))
        try:
            with response.watchdog(resources):
                elastic_launch(config, python)(*args)
        except ChildFailedError as error:
            exit_codes = {failure.exitcode for failure in error.failures.values()}
            stopped = None if response.hangs else stop.outcome(exit_codes)
            raise stopped or _failure(error, config, guard, resources, response) from None
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


def _stopped(number: signal.Signals) -> Stopped:
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    return Stopped(f"Stopped by {name}; no rank is left.", signal=number)


def _failure(
    error: ChildFailedError, config: LaunchConfig, guard: Reaper, resources: Resources, response: WatchdogResponse
) -> LockstepError:
    """Return what to raise after ranks have failed. With several machines, waits some seconds for what they say."""
    ends = rank_exits(error.failures, guard, resources)
    some_rank, some_failure = next(iter(error.failures.items()))
    lowest = some_rank - some_failure.local_rank
    first = first_failure(ends)
    mine = replace(remote_failure_of(first), hang="\n".join(response.hangs), memory=resources.of_each())
    others = exchange_failures(response.bulletin, mine, num_nodes=config.max_nodes)
    cause = remote_cause(mine, others)
    if hang := (cause or mine).hang:
        return JobHangs(hang)
    ranks = range(lowest, lowest + config.nproc_per_node)
    report = (
        failure_report(with_memory(ends, others), ranks)
        if cause is None
        else remote_report(cause, rank_lines(ends, ranks))
    )
    return RankFailed(report, rank=(cause or first).rank)


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
