"""The launcher's state of the ranks, and what it does when they hang, when they end, and when a signal arrives."""

import math
import os
import signal
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException

from lockstep.base import rank_files
from lockstep.base.activity import format_ranks, log
from lockstep.comm.store import InterNodeStore
from lockstep.errors import RESUME_EXIT_CODE, Stopped
from lockstep.health.watchdog import Verdict
from lockstep.launcher import failure_report
from lockstep.launcher.fork_server import ForkServer, signal_handlers
from lockstep.launcher.output import LogTail
from lockstep.launcher.reaper import Reaper
from lockstep.launcher.replacement import RankReplacement
from lockstep.telemetry.resources import Resources

# Why the job continues after a report of the watchdog.
_CONTINUES = {
    Verdict.EARLY: "The job continues, as no rank has done an optimizer step: until then only the time-out of the "
    "process group ends it, or --watchdog SECONDS.",
    Verdict.SUSPECT: "The job continues; it ends if this lasts and no rank makes progress.",
}


def stop_timeout_s() -> float:
    """Return how long ranks may take to stop gracefully."""
    return float(os.environ.get("LOCKSTEP_STOP_TIMEOUT_S", 120.0))


@dataclass
class Job:
    """The launcher's state of the ranks of this machine, and what it does when they hang, end, or a signal arrives.

    Attributes:
        reaper: Kills them; has the launcher's folder, in which they are requested to stop.
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
        lighthouse: As for `Machines`.
        is_command: Whether this process is the command ``lockstep run``, which a signal may end before the ranks start.
        has_started: Whether ranks were started.
        replacement: Replaces lost ranks while the others go on, if they can.
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
    replacement: RankReplacement | None = None
    hang: str = ""
    requested_for: signal.Signals | None = None
    stop_by_s: float = math.inf
    num_signals: int = 0
    stopped_at_ns: dict[int, int] = field(default_factory=dict)
    ended_at_ns: dict[int, int] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The launcher's folder."""
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
            is_replaced = self.replacement is not None and self.replacement.can_replace(awaited)
            who = f"{format_ranks(list(awaited))} {'is' if len(awaited) == 1 else 'are'}"
            log(f"{text}\n{f'{who[0].upper()}{who[1:]} replaced.' if is_replaced else 'The ranks are started again.'}")
            # They cannot write it themselves any more, and a bare SIGKILL would be reported as "killed from outside".
            message = "JobHangs: it kept the others waiting; the report is above"
            for rank, pid in awaited.items():
                failure = rank_files.FailureRecord(message, "JobHangs", time_ns=time.time_ns(), pid=pid)
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
        numbers = [signal.Signals[name.strip()] for name in names.split(",")]
        if names == "SIGTERM,SIGINT,SIGHUP,SIGQUIT":  # torch elastic's default
            # A program that calls `launch` may use the others for itself.
            others = [each for each in rank_files.EARLY_SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
            numbers += {signal.SIGUSR1, *others}
        return signal_handlers(numbers, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        """Request the ranks to stop at the first signal, if all of them can; end them at the next.

        Ranks that cannot stop gracefully get the signal at once, as under torch elastic, which waits for half a minute;
        a further signal kills them.
        """
        sigval = signal.Signals(number)
        # Interrupts the main thread, possibly while it prints: so this function must not print.
        self.num_signals += sigval not in rank_files.EARLY_SIGNALS  # sent before SIGTERM
        if self.is_command and not self.has_started:
            # An exception could be lost: what torch does at a start catches some. The reaper removes what is left.
            signal.signal(sigval, signal.SIG_DFL)
            signal.raise_signal(sigval)
        # Ranks that have stopped already count as ranks that can.
        stops = len(rank_files.stop_reports(self.folder)) == len(self.ranks)
        # A rank that takes the place of a lost one stops with the others.
        ranks = set(self.ranks) if self.replacement is None else self.replacement.settled_ranks
        stops = stops or (bool(ranks) and ranks <= rank_files.graceful_ranks(self.folder))
        if self.requested_for is None and number in rank_files.STOP_SIGNALS and stops:
            self.requested_for = sigval
            if sigval is signal.SIGINT and self.log_tail is not None:
                self.log_tail.print(rank_files.FIRST_CTRL_C_MESSAGE.decode())
            elif sigval is signal.SIGINT:
                os.write(2, rank_files.FIRST_CTRL_C_MESSAGE)  # print() may have been interrupted within a line
            rank_files.request_stop(self.folder, sigval.name)
            self.stop_by_s = time.monotonic() + stop_timeout_s()
        elif self.requested_for is None or self.num_signals > 1:
            rank_files.request_stop(self.folder, sigval.name)  # so that ranks know that none has failed
            if self.num_signals > 1:
                self.reaper.kill_ranks()  # torch's agent would wait for half a minute
            raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)

    def stopped(self, exit_codes: set[int]) -> Stopped | None:
        """Return the error to raise after ranks ended with ``exit_codes``; ``None`` if they did not stop gracefully."""
        reports = rank_files.stop_reports(self.folder)
        # Ranks of other machines may have been requested to.
        is_requested = self.requested_for is not None or exit_codes == {RESUME_EXIT_CODE}
        if not is_requested or not reports or not exit_codes <= {0, RESUME_EXIT_CODE}:
            return None
        return Stopped(reports[0], signal=self.requested_for or signal.SIGTERM, saved=True)
