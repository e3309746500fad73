"""`launch`: run a function on every device, from a plain script or a notebook."""

from __future__ import annotations

import contextlib
import json
import linecache
import operator
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import determine_local_world_size

from lockstep.env import usable_cores
from lockstep.errors import ConfigurationError, LaunchTimeout, LockstepError, RankFailed, Stopped
from lockstep.launcher.node_rendezvous import LOCAL_BACKEND
from lockstep.launcher.output import DEFAULT_MIB, LogSettings, LogTail, forwarded, is_shared_with_children
from lockstep.launcher.reaper import Reaper
from lockstep.launcher.supervise import (
    DEFAULT_WATCHDOG_POLICY,
    Program,
    WatchdogPolicy,
    environment_restored,
    supervise,
)

# How many ranks to start on this machine, and how many threads each of them may use.

RANK_BYTES = 250 * 2**20
"""Memory of a process that has imported torch, before it has a model."""


def choose_num_ranks(wanted: str | int | None) -> int | str:
    """Return the number of ranks for this machine: what was asked for, else one a GPU, else one a CPU core.

    Words such as ``gpu`` are returned as they are, for torchrun's own code to interpret.

    Raises:
        ConfigurationError: It is no positive number, there are fewer GPUs, or memory for fewer processes.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is None:
        return num_gpus or ("auto" if torch.accelerator.is_available() else num_cores())
    if wanted == "cpu":
        return num_cores()
    try:
        count = int(wanted) if isinstance(wanted, str) else operator.index(wanted)
    except (TypeError, ValueError):
        return str(wanted)
    if count < 1:
        raise ConfigurationError(f"{count} devices cannot run anything.\nAsk for at least one.")
    if 0 < num_gpus < count:
        raise ConfigurationError(
            f"{count} devices were asked for, but this machine has {num_gpus} GPU{'s' if num_gpus > 1 else ''}.\n"
            f"Ask for at most {num_gpus}, or hide the GPUs to use the CPU: CUDA_VISIBLE_DEVICES= lockstep run ..."
        )
    if num_gpus == 0:
        _check_memory(count)
    return count


def _check_memory(num_ranks: int) -> None:
    """Refuse CPU ranks that would be killed before they begin; more ranks than cores are slow, but work."""
    free_bytes = psutil.virtual_memory().available
    if num_ranks * RANK_BYTES > free_bytes:
        most = max(1, free_bytes // RANK_BYTES)
        raise ConfigurationError(
            f"{num_ranks} devices were asked for, but this machine has no GPU, {num_cores()} CPU cores and free memory "
            f"for about {most} processes.\nAsk for at most {most}; more than {num_cores()} gain no speed."
        )


def num_cores() -> int:
    """Return the number of physical CPU cores that this process may use."""
    usable = usable_cores()
    return min(usable, psutil.cpu_count(logical=False) or usable)


def threads_for(num_ranks: int) -> int:
    """Return how many threads each of ``num_ranks`` ranks may use, so that together they use every core once."""
    return max(1, num_cores() // num_ranks)


# A function on its way to the ranks and its results on their way back, as files in the run's folder.


def write_call(run_dir: Path, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Write the call into ``run_dir``, for every rank to read.

    Raises:
        ConfigurationError: The function or an argument cannot be pickled.
    """
    # The ranks import from where this process does, such as the folder of a notebook.
    (run_dir / "sys_path.json").write_text(json.dumps(sys.path))
    (run_dir / "sources.json").write_text(json.dumps(_sources_without_file()))
    try:
        with _unimportable_by_value(fn), open(run_dir / "call", "wb") as file:
            cloudpickle.dump((fn, args), file)
    except Exception as error:
        raise ConfigurationError(
            f"The function or one of its arguments cannot be sent to the ranks: {error}\n"
            "Make what cannot be pickled, such as locks, open files and CUDA tensors, inside the function."
        ) from error


def run_call(run_dir: str) -> None:
    """Make the call in this rank, and leave the result, or the exception, in ``run_dir``."""
    folder, rank = Path(run_dir), int(os.environ["RANK"])
    if rank == 0:  # after a restart there may be fewer
        (folder / "world_size").write_text(os.environ["WORLD_SIZE"])
    for name, lines in json.loads((folder / "sources.json").read_text()).items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    with open(folder / "call", "rb") as file:
        fn, args = cloudpickle.load(file)
    try:
        result = fn(*args)
    except Exception as error:
        # A courtesy: the traceback travels as text in any case.
        with contextlib.suppress(Exception):
            _dump(folder / f"error-{rank}", error)
        raise
    try:
        _dump(folder / f"result-{rank}", result)
    except Exception as error:
        raise LockstepError(
            f"What {getattr(fn, '__name__', 'the function')} returned on rank {rank} cannot be sent back: {error}\n"
            "Return numbers, CPU tensors or other data that can be pickled."
        ) from error


def read_results(run_dir: Path) -> list[Any]:
    """Read what the ranks returned, by rank."""
    num_ranks = int((run_dir / "world_size").read_text())
    return [_load(run_dir / f"result-{rank}") for rank in range(num_ranks)]


def read_error(run_dir: Path, rank: int | None) -> BaseException | None:
    """Return the exception that a rank raised, if it could be sent."""
    with contextlib.suppress(Exception):
        error = _load(run_dir / f"error-{rank}")
        return error if isinstance(error, BaseException) else None
    return None


def _dump(path: Path, value: object) -> None:
    with open(path, "wb") as file:
        cloudpickle.dump(value, file)


def _load(path: Path) -> Any:
    with open(path, "rb") as file:
        return cloudpickle.load(file)


def _sources_without_file() -> dict[str, list[str]]:
    """Return the source of what was typed into a notebook or a console, for the tracebacks of the ranks."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}
    return {name: list(entry[2]) for name, entry in entries.items()}


@contextlib.contextmanager
def _unimportable_by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Send the function's whole module along when a rank could not import it by its name."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    name = module.__name__ if module is not None else "__main__"
    if module is None or name == "__main__" or _importable(name):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable(name: str) -> bool:
    top, _, rest = name.partition(".")
    if top in sys.builtin_module_names:
        return True
    found = PathFinder.find_spec(top, sys.path)
    if found is None or not rest or found.submodule_search_locations is None:
        return found is not None and not rest
    path: list[str] = list(found.submodule_search_locations)
    full = top
    for part in rest.split("."):
        full = f"{full}.{part}"
        found = PathFinder.find_spec(full, path)
        if found is None:
            return False
        path = list(found.submodule_search_locations or [])
    return True


# `launch`: run a function on every device from a plain script or a notebook.

RAW_LOGS = LogSettings(merges=False)
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
    logs = LogSettings(folder=log_dir, json_file=log_json, size_mib=log_size, level=log_level, merges=False)
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
    logs: LogSettings = RAW_LOGS,
    watch: WatchdogPolicy = DEFAULT_WATCHDOG_POLICY,
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
    with environment_restored(), Reaper() as guard:
        if num_ranks > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(threads_for(num_ranks)))
        write_call(guard.run_dir, fn, args)
        config = _config(num_ranks, guard, max_restarts)
        captures = not is_shared_with_children()
        program = Program("call", str(guard.run_dir), captures=captures, min_ranks=min_ranks)
        try:
            with ExitStack() as stack:
                if not captures and logs.are_read(num_ranks):
                    streams = LogTail(guard.run_dir, num_ranks, logs.level, logs.open_files())
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
            raise error from read_error(guard.run_dir, error.rank)
        except Stopped as error:
            if error.saved:
                error.results = read_results(guard.run_dir)
                raise
            stopped_by = error.signal
        else:
            return read_results(guard.run_dir)
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


def _config(num_ranks: int, guard: Reaper, max_restarts: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=str(uuid.uuid4()),
        role="default",
        rdzv_backend=LOCAL_BACKEND,
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(guard.run_dir / "elastic")),
    )


@contextmanager
def _time_limit(guard: Reaper, timeout_s: float | None) -> Iterator[threading.Event]:
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
