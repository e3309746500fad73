"""`launch`: run a function on every device, from a plain script or a notebook."""

import linecache
import os
import pickle
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import cloudpickle
import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import determine_local_world_size

from lockstep.accelerator import check_count
from lockstep.env import open_closed_streams, usable_cores
from lockstep.errors import CollectiveError, ConfigurationError, LaunchTimeout, LockstepError, RankFailed, Stopped
from lockstep.launcher.node_rendezvous import LOCAL_BACKEND
from lockstep.launcher.output import LogSettings, LogTail
from lockstep.launcher.reaper import Reaper
from lockstep.launcher.supervise import Job, supervise
from lockstep.run_folder import ERROR, RESULT, rank_file, rank_files


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
        recover: See `lockstep.launcher.supervise.Job`.
        min_ranks: After a rank was killed, go on with one fewer, but no fewer than this; as many as before if ``None``.
        logs: Settings for the ranks' output.
        watchdog_s: How long ranks may wait for each other; see `lockstep.launcher.supervise.Job`.
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


# Sending the call to the ranks and the results back, as files in the run's folder. `run_call` in bootstrap.py is the
# ranks' side.


def _send_call(run_dir: Path, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Write the call into ``run_dir``, for every rank to read."""
    # The source of code typed into a notebook or a console, for the tracebacks of the ranks.
    typed = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}
    # The ranks use the import path of this process, such as the folder of a notebook.
    origin = sys.path, {name: list(entry[2]) for name, entry in typed.items()}
    try:
        (run_dir / "call").write_bytes(pickle.dumps(origin) + cloudpickle.dumps((fn, args)))
    except Exception as error:
        raise ConfigurationError(
            f"The function or one of its arguments cannot be sent to the ranks: {error}\n"
            "Create what cannot be pickled, such as locks, open files and CUDA tensors, inside the function."
        ) from error


def _results(run_dir: Path) -> list[Any]:
    return [cloudpickle.loads(file.read_bytes()) for _, file in sorted(rank_files(run_dir, RESULT).items())]


def _exception_of(run_dir: Path, rank: int | None) -> BaseException | None:
    """Return the exception that a rank raised, if it could be sent."""
    with suppress(Exception):
        return cast(BaseException, cloudpickle.loads(rank_file(run_dir, ERROR, str(rank)).read_bytes()))
    return None
