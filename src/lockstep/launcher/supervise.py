"""Run ranks under torch elastic's agent, and turn what goes wrong into one message."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lockstep.comm.bulletin import Bulletin
from lockstep.errors import JobHangs, LockstepError, RankFailed, Stopped
from lockstep.launcher import bootstrap
from lockstep.launcher.agent import telling
from lockstep.launcher.failure import RankEnd, describe, first_of, tidy_crash
from lockstep.launcher.guard import Guard
from lockstep.launcher.orderly import OrderlyStop
from lockstep.launcher.restarts import RestartReport
from lockstep.launcher.surroundings import elastic_quiet, second_signal_kills, signals_restored
from lockstep.monitor.verdict import Verdict
from lockstep.monitor.watchdog import Watchdog


@dataclass(frozen=True)
class Program:
    """What each rank becomes.

    Attributes:
        mode: ``script``, ``module``, ``command`` (any executable) or ``call`` (a pickled function).
        target: The path, the name, or for a call the folder with the function.
        captures: Whether its output goes into files in the run's folder.
        min_ranks: After a rank was killed, a restart goes on with one fewer, but no fewer than this.
    """

    mode: str
    target: str
    args: Sequence[str] = ()
    adopt: bool = False
    captures: bool = False
    min_ranks: int | None = None


@dataclass(frozen=True)
class Watch:
    """What is done about ranks that wait for each other.

    Attributes:
        patience_s: How long they may wait for one that does nothing; not watched if zero.
        action: ``end`` the job, also if a rank that computes keeps the others waiting five times as long; end it only
            if ``certain`` that nothing moves, and warn else; or ``warn`` only.
    """

    patience_s: float = 60.0
    action: Literal["end", "certain", "warn"] = "certain"


DEFAULT_WATCH = Watch()


def watch_of(patience_s: float | None, action: str | None) -> Watch:
    """Return what the user asked for; who sets a patience is taken to mean it for ranks that compute as well."""
    if patience_s is None and action is None:
        return DEFAULT_WATCH
    return Watch(DEFAULT_WATCH.patience_s if patience_s is None else patience_s, "warn" if action == "warn" else "end")


def supervise(
    config: LaunchConfig, program: Program, guard: Guard, *, python: str, watch: Watch = DEFAULT_WATCH
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
        "watched": watch.patience_s > 0,
    }
    args = ["-u", bootstrap.__file__, json.dumps(orders), program.target, *program.args]
    hangs: list[str] = []
    bulletin = Bulletin(config.rdzv_endpoint, config.run_id) if config.max_nodes > 1 else None
    with ExitStack() as stack:
        stack.enter_context(signals_restored())
        stack.enter_context(second_signal_kills(guard))
        stack.enter_context(elastic_quiet())
        stop = OrderlyStop(guard.run_dir, config.nproc_per_node)
        config = stack.enter_context(stop.handling(config))
        report = RestartReport(guard.run_dir, lambda failures: _ends(failures, guard), lambda _: None)
        stack.enter_context(telling(report, min_ranks=program.min_ranks))
        try:
            with _watchdog(watch, config, guard, hangs, bulletin):
                elastic_launch(config, python)(*args)
        except ChildFailedError as error:
            if hangs:
                raise JobHangs(hangs[0]) from None
            exit_codes = {failure.exitcode for failure in error.failures.values()}
            raise stop.outcome(exit_codes) or _failure(error, config, guard) from None
        except SignalException as error:
            raise _stopped(error.sigval) from None
        except KeyboardInterrupt:  # before the agent had its own handlers in place
            raise _stopped(signal.SIGINT) from None
        except (RuntimeError, OSError, ValueError) as error:
            raise _not_met(error, config) from error
        if (stopped := stop.outcome({0})) is not None:
            raise stopped


def _watchdog(
    watch: Watch, config: LaunchConfig, guard: Guard, hangs: list[str], bulletin: Bulletin | None
) -> Watchdog:
    def on_report(text: str, verdict: Verdict) -> bool:
        if verdict is Verdict.HANGS and watch.action != "warn":
            hangs.append(text)
            guard.kill_ranks()
            return False
        goes_on = "The job goes on, as --watchdog-action warn says."
        if watch.action != "warn":
            goes_on = "The job goes on for now; it ends if this lasts and nothing moves."
        print(f"lockstep: {text}\n{goes_on}", file=sys.stderr, flush=True)
        return True

    return Watchdog(
        guard.run_dir,
        watch.patience_s,
        is_strict=watch.action == "end",
        num_nodes=config.max_nodes,
        bulletin=bulletin,
        on_report=on_report,
        on_slow=lambda text: print(f"lockstep: {text}", file=sys.stderr, flush=True),
    )


def _stopped(number: signal.Signals) -> Stopped:
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    return Stopped(f"Stopped by {name}; no rank is left.", signal=number)


def _failure(error: ChildFailedError, config: LaunchConfig, guard: Guard) -> RankFailed:
    ends = _ends(error.failures, guard)
    some_rank, some_failure = next(iter(error.failures.items()))
    lowest = some_rank - some_failure.local_rank
    first = first_of(ends)
    return RankFailed(describe(ends, range(lowest, lowest + config.nproc_per_node)), rank=first.rank)


def _ends(failures: Mapping[int, ProcessFailure], guard: Guard) -> list[RankEnd]:
    ended = guard.ended_at_ns({failure.pid for failure in failures.values()})
    return [_end(rank, failure, ended, guard.run_dir) for rank, failure in failures.items()]


def _end(rank: int, failure: ProcessFailure, ended: dict[int, int], run_dir: Path) -> RankEnd:
    # Written by our bootstrap, or by elastic's own `record`, which has less; else a text of elastic's.
    said: Any = failure.message
    record = {"message": said.get("message", ""), **said.get("extraInfo", {})} if isinstance(said, dict) else {}
    crash = run_dir / f"crash-{rank}"
    trace = record.get("py_callstack", "")
    return RankEnd(
        rank=rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        ended_at_ns=ended.get(failure.pid),
        failed_at_ns=record.get("time_ns"),
        message=record.get("message", ""),
        error_type=record.get("type", ""),
        where=record.get("where", ""),
        # An exit on purpose has said what it had to say.
        trace="" if record.get("type") == "SystemExit" else trace,
        crash=tidy_crash(crash.read_text(), own_folder=str(Path(__file__).parent)) if crash.is_file() else "",
    )


def _not_met(error: Exception, config: LaunchConfig) -> LockstepError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    if config.max_nodes == 1:
        return LockstepError(f"The ranks could not be started: {reason}.")
    return LockstepError(
        f"The machines of the job did not come together at {config.rdzv_endpoint}: {reason}.\n"
        f"This is {socket.gethostname()}. Start the same command on all {config.max_nodes} machines, each with its own "
        "--node-rank, and check that they reach that address and that the port is free on node 0."
    )
