"""`launch`: run a function on every device from a plain script or a notebook."""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import determine_local_world_size

from lockstep.errors import ConfigurationError, LaunchTimeout, RankFailed, Stopped
from lockstep.launcher import call
from lockstep.launcher.devices import choose_num_ranks, threads_for
from lockstep.launcher.guard import Guard
from lockstep.launcher.local_rendezvous import BACKEND
from lockstep.launcher.log_files import DEFAULT_MIB
from lockstep.launcher.logs import Logs
from lockstep.launcher.output import forwarded, is_shared_with_children
from lockstep.launcher.response import DEFAULT_WATCH, Watch
from lockstep.launcher.streams import Streams
from lockstep.launcher.supervise import Program, supervise
from lockstep.launcher.surroundings import environment_restored

AS_THEY_COME = Logs(merges=False)
"""Ranks write to the terminal themselves."""


def launch(
    fn: Callable[..., Any],
    *args: Any,
    devices: int | str | None = None,
    timeout_s: float | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    log_json: str | os.PathLike[str] | None = None,
    log_size: float = DEFAULT_MIB,
    log_level: str = "info",
) -> list[Any]:
    """Run ``fn(*args)`` on every device of this machine, each in a process of its own, and return the results by rank.

    The function calls `lockstep.init` to learn its rank. It and its arguments travel by cloudpickle, so functions of a
    notebook cell, closures and lambdas work, and a script needs no ``if __name__ == "__main__"``. What the ranks print
    appears as usual; if it is to be kept, merged into one stream as by ``lockstep run``.

    Blocks until all ranks have finished, or have stopped in order, as `fit` does at a signal. When one fails, or this
    process ends in any way, the others are ended.

    Args:
        fn: What each rank runs; what it returns must be something that can be pickled.
        args: The same for every rank.
        devices: The number of ranks; every GPU if ``None``, or every CPU core where there is none.
        timeout_s: How long the ranks may take; without limit if ``None``.
        log_dir: Folder for a file ``rank-N.log`` of all that each rank writes.
        log_json: File for every line of all ranks as JSON: its time, rank, stream and text.
        log_size: Bound of each of these files in MiB; at half of it a file begins anew, with the half before beside it.
        log_level: What is shown: ``info`` all, ``warning`` only what ranks write to standard error, ``error`` nothing.

    Raises:
        JobHangs: Ranks waited for more than a minute for one that does nothing.
        RankFailed: A rank raised; the message has its traceback, ``rank`` its number, and ``__cause__`` the exception.
        LaunchTimeout: The ranks were not finished in time.
        ConfigurationError: There are fewer devices, the function cannot be sent, or this is a rank itself.
    """
    logs = Logs(folder=log_dir, json_file=log_json, size_mib=log_size, level=log_level, merges=False)
    try:
        return launch_with(fn, args, devices=devices, timeout_s=timeout_s, logs=logs)
    except Stopped as error:
        if error.results is None:
            raise
        return error.results  # which tell it


def launch_with(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    devices: int | str | None = None,
    timeout_s: float | None = None,
    max_restarts: int = 0,
    min_ranks: int | None = None,
    logs: Logs = AS_THEY_COME,
    watch: Watch = DEFAULT_WATCH,
) -> list[Any]:
    """Do as `launch`, with what only commands offer.

    Args:
        fn: As for `launch`.
        args: Likewise.
        devices: Likewise.
        timeout_s: Likewise.
        max_restarts: How often all ranks are started again, after one has failed.
        min_ranks: After a rank was killed, go on with one fewer, but no fewer than this; as many as before if ``None``.
        logs: What becomes of what ranks write.
        watch: What is done about ranks that wait for each other.

    Raises:
        Stopped: A signal came, and all ranks have stopped in order; has what they returned.
    """
    _refuse_inside_a_rank()
    num_ranks = _num_ranks(devices)
    with environment_restored(), Guard() as guard:
        if num_ranks > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(threads_for(num_ranks)))
        call.send(guard.run_dir, fn, args)
        config = _config(num_ranks, guard, max_restarts)
        captures = not is_shared_with_children()
        program = Program("call", str(guard.run_dir), captures=captures, min_ranks=min_ranks)
        try:
            with ExitStack() as stack:
                if not captures and logs.are_read(num_ranks):
                    streams = Streams(guard.run_dir, num_ranks, logs.level, logs.open_files())
                    program = replace(program, streams=stack.enter_context(streams))
                is_over = stack.enter_context(_time_limit(guard, timeout_s))
                if captures:
                    stack.enter_context(forwarded(guard.run_dir, num_ranks, logs))
                supervise(config, program, guard, python=sys.executable, watch=watch)
        except RankFailed as error:
            if is_over.is_set():
                raise LaunchTimeout(
                    f"The {num_ranks} ranks had not finished within {timeout_s:g} s and were ended.\n"
                    "Pass a longer timeout_s, or look for a rank that waits for another."
                ) from None
            raise error from call.error_of(guard.run_dir, error.rank)
        except Stopped as error:
            if error.saved:
                error.results = call.results(guard.run_dir)
                raise
            stopped_by = error.signal
        else:
            return call.results(guard.run_dir)
    # Everything is cleared away: now the signal does here what it would have done without us.
    signal.raise_signal(stopped_by)
    raise KeyboardInterrupt if stopped_by == signal.SIGINT else Stopped("The ranks were stopped.", signal=stopped_by)


def _refuse_inside_a_rank() -> None:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is not None and ("TORCHELASTIC_RUN_ID" in os.environ or world_size not in (None, "1")):
        raise ConfigurationError(
            f"launch() was called inside rank {rank} of {world_size}, which has been launched already.\n"
            "Call the function itself, or run the script with plain python instead of `lockstep run` or torchrun."
        )


def _num_ranks(devices: int | str | None) -> int:
    try:
        return int(determine_local_world_size(str(choose_num_ranks(devices))))
    except ConfigurationError:
        raise
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"devices={devices!r}: {str(error).rstrip('.')}.\nPass a number, 'gpu', 'cpu' or 'auto'."
        ) from None


def _config(num_ranks: int, guard: Guard, max_restarts: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=str(uuid.uuid4()),
        role="default",
        rdzv_backend=BACKEND,
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(guard.run_dir / "elastic")),
    )


@contextmanager
def _time_limit(guard: Guard, timeout_s: float | None) -> Iterator[threading.Event]:
    """End the ranks when the time is up; the event says that this has happened."""
    is_over = threading.Event()
    if timeout_s is None:
        yield is_over
        return

    def end() -> None:
        is_over.set()
        guard.kill_ranks()

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield is_over
    finally:
        timer.cancel()
