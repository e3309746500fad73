"""Start ranks and wait for them: `launch` runs a function on every device, `supervise` any program.

All failures become one error.
"""

import json
import linecache
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import CodeType
from typing import Any, cast

import cloudpickle
import psutil
import torch
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import determine_local_world_size
from typing_extensions import override

from lockstep.base.accelerator import check_count
from lockstep.base.env import open_closed_streams, usable_cores
from lockstep.base.rank_files import ERROR, RESULT, files_by_rank, rank_file
from lockstep.comm.network import allow_open_files
from lockstep.comm.store import InterNodeStore
from lockstep.errors import CollectiveError, ConfigurationError, LaunchTimeout, LockstepError, RankFailed, Stopped
from lockstep.health.watchdog import Watchdog
from lockstep.launcher import bootstrap, failure_report
from lockstep.launcher.agent import Agent, StoppedWhileRestarting
from lockstep.launcher.fork_server import server_for
from lockstep.launcher.job import Job
from lockstep.launcher.node_rendezvous import LOCAL_BACKEND
from lockstep.launcher.output import LogSettings, LogTail
from lockstep.launcher.reaper import Reaper

# How long ranks may wait for one that does nothing, by default.
_PATIENCE_S = 60.0
# For each rank the launcher has pipes for its output, a descriptor of its process, and two or three store connections.
_FILES_PER_RANK = 8


def launch(
    fn: Callable[..., Any],
    *args: Any,
    devices: int | str | None = None,
    timeout_s: float | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    log_level: str = "info",
) -> list[Any]:
    """Run ``fn(*args)`` on every device of this machine, each in its own process, and return the results by rank.

    The function calls `lockstep.init` to get its rank. It is sent with its arguments by cloudpickle, so functions of a
    notebook cell, closures and lambdas work, and a script needs no ``if __name__ == "__main__"``. Output of the ranks
    appears as usual. In a notebook, or with ``log_dir``, it is merged into one stream as by ``lockstep run``.

    Blocks until all ranks have finished, or have stopped gracefully, as `fit` does at a signal. If one rank fails, or
    this process ends in any way, the others are ended.

    Args:
        fn: The function that each rank runs; its result must be picklable.
        args: The same for every rank.
        devices: The number of ranks; if ``None``, one per GPU, or one per CPU core if there is no GPU.
        timeout_s: How long the ranks may take; without limit if ``None``.
        log_dir: Folder for a file ``rank-N.log`` with the output of each rank.
        log_level: What is shown: ``info`` all, ``warning`` only the ranks' standard error, ``error`` nothing.

    Raises:
        JobHangs: Ranks waited for more than a minute for one that does nothing.
        RankFailed: A rank raised; the message has its traceback, ``rank`` its number, and ``__cause__`` the exception.
        LaunchTimeout: The ranks did not finish in time.
        ConfigurationError: There are fewer devices, the function cannot be sent, or this process is itself a rank.
    """
    logs = LogSettings(folder=log_dir, level=log_level, merges=False)
    try:
        return launch_with(fn, args, devices=devices, timeout_s=timeout_s, logs=logs)
    except Stopped as error:
        if error.results is None:
            raise
        return error.results


def launch_with(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    devices: int | str | None = None,
    timeout_s: float | None = None,
    max_restarts: int = 0,
    min_ranks: int | None = None,
    num_spares: int = 0,
    recover: str | None = None,
    logs: LogSettings,
    watchdog_s: float | None = None,
    watchdog_action: str | None = None,
) -> list[Any]:
    """Like `launch`, with additional options for commands.

    Args:
        fn: As for `launch`.
        args: Likewise.
        devices: Likewise.
        timeout_s: Likewise.
        max_restarts: How often all ranks are started again after one has failed.
        num_spares: How many processes wait to take the place of a lost rank; each needs a device of its own.
        recover: See `lockstep.launcher.job.Job`.
        min_ranks: After a rank was killed, go on with one fewer, but no fewer than this; as many as before if ``None``.
        logs: Settings for the ranks' output.
        watchdog_s: How long ranks may wait for each other; see `lockstep.launcher.job.Job`.
        watchdog_action: The watchdog's action after that time.

    Raises:
        Stopped: A signal arrived, and all ranks have stopped gracefully; contains their results.
    """
    _refuse_inside_a_rank()
    open_closed_streams()
    num_ranks = choose_num_ranks(devices, f"devices={devices!r}", num_spares)
    with environment_restored(), Reaper() as reaper:  # the agent sets variables of this process
        if num_ranks > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(threads_for(num_ranks)))
        _send_call(reaper.run_dir, fn, args)
        # The same configuration as from torchrun's flags for one machine.
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=str(uuid.uuid4()),
            rdzv_backend=LOCAL_BACKEND,
            max_restarts=max_restarts,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=str(reaper.run_dir / "elastic")),
        )
        is_merged = logs.need_launcher(num_ranks) or not _shares_output_with_children()
        timer = threading.Timer(timeout_s or 0.0, reaper.kill_ranks)
        timer.daemon = True
        try:
            with LogTail(reaper.run_dir, num_ranks, logs) if is_merged else nullcontext() as log_tail:
                if timeout_s is not None:
                    timer.start()
                job = Job(reaper, log_tail, min_ranks, watchdog_s, watchdog_action, num_spares, recover)
                supervise(job, config, "call", str(reaper.run_dir))
            return _results(reaper.run_dir)
        except RankFailed as error:
            if timer.finished.is_set():
                raise LaunchTimeout(
                    f"The {num_ranks} ranks did not finish within {timeout_s:g} s and were ended.\n"
                    "Pass a longer timeout_s, or look for a rank that waits for another."
                ) from None
            raise error from _exception_of(reaper.run_dir, error.rank)
        except Stopped as error:
            if error.saved:
                error.results = _results(reaper.run_dir)
                raise
            stopped_by = error.signal
            reaper.kill_ranks()  # torch elastic forgets ranks that it had started if a signal arrives during the start
        finally:
            timer.cancel()
    # Everything is cleaned up: now the signal has its normal effect on this process.
    signal.raise_signal(stopped_by)
    raise KeyboardInterrupt if stopped_by == signal.SIGINT else Stopped("The ranks were stopped.", signal=stopped_by)


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
                agent = Agent(job, config, command)
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


@contextmanager
def raising_task_errors() -> Iterator[None]:
    """Raise a rank's error about task or settings without its traceback: all ranks found the same error."""
    try:
        yield
    except RankFailed as error:
        if isinstance(error.__cause__, LockstepError) and not isinstance(error.__cause__, CollectiveError):
            raise error.__cause__ from None
        raise


@contextmanager
def environment_restored() -> Iterator[None]:
    """Undo all changes to ``os.environ`` inside the block, one by one, because other threads may read it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _refuse_inside_a_rank() -> None:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is not None and ("TORCHELASTIC_RUN_ID" in os.environ or world_size not in (None, "1")):
        raise ConfigurationError(
            f"launch() was called inside rank {rank} of {world_size}, which has been launched already.\n"
            "Call the function itself, or run the script with plain python instead of `lockstep run` or torchrun."
        )


def _shares_output_with_children() -> bool:
    """Return whether output of child processes appears where our own prints do; in a notebook it does not."""
    with suppress(AttributeError, OSError, ValueError):
        return sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    return False


# The number of ranks, and of threads per rank.


def choose_num_ranks(wanted: str | int | None, given_as: str, num_spares: int = 0) -> int:
    """Return the number of ranks for this machine: the requested number, else one per GPU, else one per CPU core.

    Args:
        wanted: A number, or a word such as ``gpu``, which torchrun's own code interprets.
        given_as: How the user gave it, for the error.
        num_spares: The number of processes that wait to take the place of a rank, each with a GPU of its own.

    Raises:
        ConfigurationError: It is not a positive number, or there are fewer GPUs.
    """
    if wanted is None:
        wanted = torch.accelerator.device_count() or "cpu"
    if wanted == "cpu":
        return num_cores()
    try:
        count = int(determine_local_world_size(str(wanted)))
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"{given_as}: {str(error).rstrip('.')}.\nPass a number, 'gpu', 'cpu' or 'auto'."
        ) from None
    if count < 1:
        raise ConfigurationError(f"{count} is not a valid number of devices.\nUse at least one.")
    check_count(count + num_spares)
    return count


def num_cores() -> int:
    """Return the number of physical CPU cores that this process may use."""
    usable = usable_cores()
    return min(usable, psutil.cpu_count(logical=False) or usable)


def threads_for(num_ranks: int) -> int:
    """Return how many threads each of ``num_ranks`` ranks may use, so that together they use every core once."""
    return max(1, num_cores() // num_ranks)


# Sending the call to the ranks and the results back, as files in the launcher's folder. `run_call` in bootstrap.py is
# the ranks' side.


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Keeps the file of sent code, for tracebacks; cloudpickle 3.1.3 leaves it out."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, CodeType):
            return super().reducer_override(obj)
        make, fields = self.dispatch_table[CodeType](obj)
        return _in_file, (make, fields, obj.co_filename)


def _in_file(make: Callable[..., CodeType], fields: Sequence[Any], file: str) -> CodeType:
    return make(*fields).replace(co_filename=file)


def _send_call(run_dir: Path, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Write the call into ``run_dir``, for every rank to read."""
    # The source of code typed into a notebook or a console, for the tracebacks of the ranks.
    typed = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}
    # The ranks use the import path of this process, such as the folder of a notebook.
    origin = sys.path, {name: list(entry[2]) for name, entry in typed.items()}
    try:
        with (run_dir / "call").open("wb") as sent:
            pickle.dump(origin, sent)
            _Pickler(sent).dump((fn, args))
    except Exception as error:
        raise ConfigurationError(
            f"The function or one of its arguments cannot be sent to the ranks: {error}\n"
            "Create what cannot be pickled, such as locks, open files and CUDA tensors, inside the function."
        ) from error


def _results(run_dir: Path) -> list[Any]:
    return [cloudpickle.loads(file.read_bytes()) for _, file in sorted(files_by_rank(run_dir, RESULT).items())]


def _exception_of(run_dir: Path, rank: int | None) -> BaseException | None:
    """Return the exception that a rank raised, if it could be sent."""
    with suppress(Exception):
        return cast(BaseException, cloudpickle.loads(rank_file(run_dir, ERROR, str(rank)).read_bytes()))
    return None
