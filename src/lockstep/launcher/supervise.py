"""Run ranks under torch elastic's agent, and turn what goes wrong into one message."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lockstep.errors import JobHangs, LockstepError, RankFailed, Stopped
from lockstep.launcher import bootstrap
from lockstep.launcher.agent import StoppedMeanwhile, telling
from lockstep.launcher.elsewhere import cause_elsewhere, ending_of, exchange, retold, with_memory
from lockstep.launcher.ends import ends_of
from lockstep.launcher.failure import describe, first_of, lines
from lockstep.launcher.guard import Guard
from lockstep.launcher.orderly import OrderlyStop
from lockstep.launcher.response import DEFAULT_WATCH, Response, Watch
from lockstep.launcher.restarts import RestartReport
from lockstep.launcher.streams import Streams
from lockstep.launcher.surroundings import elastic_quiet, second_signal_kills, signals_restored
from lockstep.telemetry.resources import Resources


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
    streams: Streams | None = None


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
        "patience_s": watch.patience_s,
        "streams": program.streams is not None,
    }
    args = ["-u", bootstrap.__file__, json.dumps(orders), program.target, *program.args]
    resources, response = Resources(), Response(watch, config, guard)
    with ExitStack() as stack:
        stack.enter_context(signals_restored())
        stack.enter_context(second_signal_kills(guard))
        stack.enter_context(elastic_quiet())
        stop = OrderlyStop(guard.run_dir, config.nproc_per_node)
        config = stack.enter_context(stop.handling(config))

        def started(ranks: range, num_restarts_left: int) -> None:
            stop.num_ranks = len(ranks)
            response.started(num_restarts_left)

        report = RestartReport(
            guard.run_dir, lambda failures: ends_of(failures, guard, resources), started, program.streams
        )
        may_shrink = config.min_nodes < config.max_nodes
        stack.enter_context(telling(report, guard.run_dir, min_ranks=program.min_ranks, may_shrink=may_shrink))
        try:
            with response.watchdog(resources):
                elastic_launch(config, python)(*args)
        except ChildFailedError as error:
            exit_codes = {failure.exitcode for failure in error.failures.values()}
            stopped = None if response.hangs else stop.outcome(exit_codes)
            raise stopped or _failure(error, config, guard, resources, response) from None
        except StoppedMeanwhile as error:
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
    error: ChildFailedError, config: LaunchConfig, guard: Guard, resources: Resources, response: Response
) -> LockstepError:
    """Return what to raise after ranks have failed. With several machines, waits some seconds for what they say."""
    ends = ends_of(error.failures, guard, resources)
    some_rank, some_failure = next(iter(error.failures.items()))
    lowest = some_rank - some_failure.local_rank
    first = first_of(ends)
    mine = replace(ending_of(first), hang="\n".join(response.hangs), memory=resources.of_each())
    others = exchange(response.bulletin, mine, num_nodes=config.max_nodes)
    cause = cause_elsewhere(mine, others)
    if hang := (cause or mine).hang:
        return JobHangs(hang)
    ranks = range(lowest, lowest + config.nproc_per_node)
    report = describe(with_memory(ends, others), ranks) if cause is None else retold(cause, lines(ends, ranks))
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
