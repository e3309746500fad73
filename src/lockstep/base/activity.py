"""The current activity of this process, for other threads to read; standard library only.

`now` is written by whoever does the work: plain attributes, so that a write costs nothing and nobody waits for anybody;
the heartbeat reads them from a thread of its own.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

T = TypeVar("T")

# Operations of `waiting`: the host waits for its device, which may itself wait for other ranks; and a rank that needs
# nothing any more waits for the others to leave with them. The ranks that are left wait for one that is new.
DEVICE, CLOSE, REJOIN = "a wait for its device", "World.close", "World.rejoin"


@dataclass(slots=True)
class Activity:
    """The activity of one process.

    Attributes:
        device: The index of this rank's device, if it has one.
        step_counter: ``step``, counted from 1, and ``num_steps``: in a file, for the launcher to read after a kill.
        phase: The current part of the step: ``loader``, ``forward``, ``backward``, ``optimizer``, ``evaluation`` ...
        bucket: The bucket whose reduction this rank waits for: its number and its parameters' names.
        collective: The operation that the main thread waits in, such as ``all_reduce``; empty if none. See `waiting`.
        has_captured: Whether a collective was captured in a CUDA graph, which keeps its group open while it lives.
        num_calls: Communication calls on groups that do not count their calls themselves.
        waited_s: Seconds that this rank has spent in blocking collectives since its start.
        failure: The exception that ended this rank's part in the job, although its process may go on; empty if none.
        on_failure: Called with the exception of `fail`: the launcher is to learn of it before the peers fail.
        on_rank: Called when this process has another number, or is a spare no more, with the name that its files have.
    """

    device: int | None = None
    step_counter: memoryview = field(default_factory=lambda: memoryview(bytearray(16)).cast("q"))
    phase: str = ""
    bucket: tuple[int, Sequence[str]] | None = None
    collective: str = ""
    has_captured: bool = False
    num_calls: int = 0
    waited_s: float = 0.0
    failure: str = ""
    on_failure: Callable[[BaseException], None] | None = None
    on_rank: Callable[[str], None] | None = None

    @property
    def step(self) -> int | None:
        """The current step, counted from 0; ``None`` in a user's own loop."""
        number = self.step_counter[0]
        return number - 1 if number else None

    @step.setter
    def step(self, value: int | None) -> None:
        self.step_counter[0] = 0 if value is None else value + 1

    @property
    def num_steps(self) -> int:
        """Optimizer steps that this process has done, as far as they were counted."""
        return int(self.step_counter[1])

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.step_counter[1] = value

    def fail(self, error: BaseException) -> None:
        """Record an exception after which this rank does not take part any more, and report it at once."""
        self.failure = one_line(error)
        if self.on_failure is not None:
            self.on_failure(error)


# The activity of this process.
now = Activity()

_MAIN_THREAD = threading.main_thread().ident


class waiting:
    """Inside the block, mark that the main thread waits for other ranks in ``operation``, for the watchdog.

    Other threads mark nothing: if two of them left in another order than they entered, a mark would stay, and the
    rank would seem to wait forever.
    """

    __slots__ = ("_operation", "_outer")

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN_THREAD:
            self._outer = now.collective
            # A nested wait is a part of the outer one: ranks in different parts of one exchange are in the same call.
            now.collective = self._outer or self._operation

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == _MAIN_THREAD:
            now.collective = self._outer


_IN_TIME = "lockstep-in-time"


def goes_on() -> bool:
    """Return whether an action of `in_time` has taken longer and still goes on."""
    return any(thread.name == _IN_TIME for thread in threading.enumerate())


def settle(outcome: Future[T], action: Callable[[], T]) -> None:
    """Call ``action``, and give its result or its error to ``outcome``."""
    try:
        outcome.set_result(action())
    except BaseException as error:
        outcome.set_exception(error)


def in_time(seconds: float, action: Callable[..., T], *args: Any) -> T:
    """Return what ``action(*args)`` returns, or raise what it raises. Blocks at most ``seconds``.

    An action that takes longer continues in a thread that ends with the process: a call to a name server, a file system
    or a service that does not answer cannot be cancelled.

    Raises:
        TimeoutError: The action took longer.
    """
    outcome: Future[T] = Future()
    # Not an executor: Python waits for its threads at exit.
    threading.Thread(target=settle, args=(outcome, partial(action, *args)), name=_IN_TIME, daemon=True).start()
    if not wait([outcome], seconds).done:
        raise TimeoutError(f"no answer in {seconds:.3g} s")
    return outcome.result()


def text_of(error: BaseException) -> str:
    """Return the text of an exception, whose class may be of a user who has never printed it."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # as in tracebacks


def one_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its text."""
    first = text_of(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def log(text: str) -> None:
    """Print a line about the job, which is not an output of the user's program."""
    print(f"lockstep: {text}", file=sys.stderr, flush=True)


def name_of_bucket(names: Sequence[str]) -> str:
    """Return a short name for the parameters of a bucket, such as ``layers.7.mlp.*``."""
    if len(names) == 1:
        return names[0]
    module = os.path.commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    return f"{module}.*" if module else f"{names[0]} ... {names[-1]}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-2, 5``."""
    # In a run of successive numbers, each differs from its place by the same amount.
    grouped = groupby(enumerate(sorted(ranks)), lambda placed: placed[1] - placed[0])
    runs = [[rank for _, rank in run] for _, run in grouped]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(parts)}"


def plural(number: int, noun: str) -> str:
    """Return the number with its noun, which forms the plural with an s."""
    return f"{number} {noun if number == 1 else noun + 's'}"


def format_bytes(num_bytes: float) -> str:
    """Return a size in GiB or MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


# --- Waiting for a core

# The file of each thread that uses `core_use`. It stays open: opening it takes ten times as long as reading it.
_schedstat = threading.local()


def _forget_files() -> None:
    """In a forked child: its thread has another file."""
    global _schedstat
    with contextlib.suppress(AttributeError, OSError):
        os.close(_schedstat.file)
    _schedstat = threading.local()


os.register_at_fork(after_in_child=_forget_files)


def core_use() -> bytes:
    """Return how long this thread has had a core and has waited for one so far; see `core_wait_s`. Takes about 1 us.

    The times are in nanoseconds, from /proc/thread-self/schedstat (proc(5)). A thread that is throttled by a quota also
    waits. If there is no such file, as on gVisor, only the first of the two numbers is returned.
    """
    try:
        return os.pread(_schedstat.file, 64, 0)
    except AttributeError:
        with contextlib.suppress(OSError):
            _schedstat.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            # Kernels that do not count write zeros.
            if not os.pread(_schedstat.file, 64, 0).startswith(b"0 "):
                return core_use()
        _schedstat.file = -1
    except OSError:
        pass
    return b"%d" % time.thread_time_ns()


def core_wait_s(uses: Sequence[tuple[bytes, bytes]], working_s: float) -> float:
    """Return how long a thread has waited for a core in one or more periods, in seconds.

    Args:
        uses: The results of `core_use` in that thread at the beginning and at the end of each period.
        working_s: How long it had work to do. If the kernel does not count, it waited in the rest of this time.
    """
    pairs = [zip(begin.split()[:2], end.split()[:2], strict=True) for begin, end in uses]
    differences = ([int(now) - int(before) for before, now in pair] for pair in pairs)
    ran_ns, *waited_ns = map(sum, zip(*differences, strict=True))
    return (waited_ns[0] if waited_ns else max(0.0, 1e9 * working_s - ran_ns)) / 1e9
