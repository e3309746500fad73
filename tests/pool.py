"""A pool of worker processes that all tests of a session share: an interpreter that imports torch costs seconds.

``Pool.ranks(n)`` gives a `Ranks`; calling it runs a function on each of ``n`` ranks of a fresh Gloo group. Workers that
hang or die are replaced before the next call.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from tests import forking

TESTS = Path(__file__).parent
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""Without it Gloo connects through whatever address the host's name has, if it has one."""
MAX_WORKERS = 4
# For each function that it pickles, it would look through all modules for those that a worker may have to import. What
# tests use of packages is imported there: the worker is forked off a process that has done so.
cloudpickle.cloudpickle._find_imported_submodules = lambda code, dependencies: []
START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 10.0
RELEASE_S = 2.0
"""After the first error, how long before the ranks that failed are ended: what they hold open holds up the others."""
GRACE_S = 10.0
"""After the first error, how long the others may go on."""


READY = "ready"
"""Waits for its first call."""
IDLE = "idle"
"""Has torn its process group down, apart from sockets that nobody uses, and waits for the next call."""


@dataclass(frozen=True)
class Call:
    """One function to run on one rank; ``payload`` is the cloudpickled ``(fn, args)``."""

    payload: bytes
    rank: int
    world_size: int
    port: int
    """Of the store where the ranks meet."""
    prefix: str
    """Of the names that this call has there."""
    group_timeout_s: float
    warnings: str


@dataclass(frozen=True)
class Reply:
    """How a call ended; ``payload`` is the cloudpickled result or, if it failed, the exception."""

    failed: bool
    payload: bytes
    trace: str
    ended_at: float
    """``time.monotonic()``, which all processes of a machine share: the smallest one failed first."""


class PoolError(AssertionError):
    """A rank did not answer; names the ranks and carries what they wrote."""


@dataclass(frozen=True)
class Outcome:
    """The result of a rank, or the error that it raised."""

    rank: int
    result: Any
    error: BaseException | None
    ended_at: float


class Worker:
    """One process and the pipe to it; ready after a moment, or when what it is forked off has imported torch."""

    def __init__(self, rank: int, folder: Path, *, simulated: bool = False) -> None:
        self.log_path = folder / f"worker-{time.monotonic_ns()}.log"
        self.log_start = 0
        self.connection, theirs = Pipe()
        # Neighbouring ranks are forked off different processes: see tests/forking.py.
        own = {"OMP_NUM_THREADS": "1", forking.SERVER: str(rank % 2), **LOOPBACK}
        words = [sys.executable, "-m", "tests.pool_worker", str(os.getpid()), *(["simulated"] if simulated else [])]
        with theirs, self.log_path.open("wb") as log:
            pipes = {"stdin": theirs.fileno(), "stdout": log, "stderr": log}
            environ, place = {**os.environ, **own}, TESTS.parent  # a test may have gone elsewhere
            self.process = subprocess.Popen(words, env=environ, cwd=place, start_new_session=True, **pipes)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def await_start(self, deadline: float) -> None:
        """Wait until the worker can be called.

        Raises:
            PoolError: It did not get that far before ``deadline``.
        """
        with contextlib.suppress(OSError, EOFError):
            started = self.connection.poll(max(0.0, deadline - time.monotonic()))
            if started and self.connection.recv() == READY:
                return
        raise PoolError(f"a worker of the pool did not start\n{self.log()}")

    def mark_log(self) -> None:
        """Forget what was written so far."""
        self.log_start = self.log_path.stat().st_size

    def log(self) -> str:
        """Return what was written since the mark."""
        return self.log_path.read_bytes()[self.log_start :].decode(errors="replace").strip()

    def dump_stacks(self) -> None:
        """Have the worker write the stack of each of its threads to its log."""
        self.process.send_signal(signal.SIGQUIT)

    def kill(self) -> None:
        """End the process and its children, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its children too, also if it has ended
        self.process.wait(END_TIMEOUT_S)
        self.connection.close()


class Gathering:
    """The replies of the ranks of one call; ``workers`` are the ranks in their order.

    A rank is busy until it has replied and torn its process group down.
    """

    def __init__(self, workers: list[Worker], timeout_s: float, *, patient: bool) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        self.patient = patient
        self.outcomes: dict[int, Outcome] = {}
        self.busy = {worker.connection: rank for rank, worker in enumerate(workers)}
        self.deadline = time.monotonic() + timeout_s
        self.release_at: float | None = None

    def all(self) -> list[Outcome]:
        """Return the outcomes by rank; those of ranks that outlived an error by too much are missing.

        Raises:
            PoolError: A rank died, or did not finish in time although no other failed.
        """
        while self.busy:
            until = self.deadline if self.release_at is None else min(self.deadline, self.release_at)
            for connection in wait(list(self.busy), max(0.0, until - time.monotonic())):
                self._receive(connection)
            if self.release_at is not None and time.monotonic() >= self.release_at:
                self._end_failed()
            if self.busy and time.monotonic() >= self.deadline:
                self._give_up()
                break
        return [self.outcomes[rank] for rank in sorted(self.outcomes)]

    def _receive(self, connection: Connection) -> None:
        rank = self.busy[connection]
        try:
            message = connection.recv()
        except (EOFError, OSError):
            status = self.workers[rank].process.wait(END_TIMEOUT_S)
            raise PoolError(
                f"rank {rank} of {len(self.workers)} died with exit status {status}{self._logs()}"
            ) from None
        if message == IDLE:
            del self.busy[connection]
            return
        self.outcomes[rank] = open_reply(message, rank, self.workers)
        if message.failed and self.release_at is None:
            self.release_at = time.monotonic() + RELEASE_S
            if not self.patient:
                self.deadline = min(self.deadline, time.monotonic() + GRACE_S)

    def _end_failed(self) -> None:
        """If ranks have not replied, end those that failed, as a failed process would have ended by itself.

        Gloo closes its sockets only when nothing refers to the group any more, and much can: a hook, a compiled graph.
        """
        self.release_at = None
        if len(self.outcomes) == len(self.workers):
            return
        for rank, outcome in self.outcomes.items():
            if outcome.error is not None:
                self.busy.pop(self.workers[rank].connection, None)
                self.workers[rank].kill()

    def _give_up(self) -> None:
        """End the busy ranks; if another failed, its error is the likely cause and worth more than a timeout."""
        stuck = sorted(self.busy.values())
        for rank in stuck:
            self.workers[rank].dump_stacks()
        time.sleep(0.5)
        logs = self._logs()
        for rank in stuck:
            self.workers[rank].kill()
        failed = [outcome.error for outcome in self.outcomes.values() if outcome.error is not None]
        if not failed:
            raise PoolError(f"ranks {stuck} of {len(self.workers)} did not finish within {self.timeout_s:g} s{logs}")
        for error in failed:
            error.add_note(f"--- ranks {stuck} were still running and have been ended{logs}")

    def _logs(self) -> str:
        logs = {rank: worker.log() for rank, worker in enumerate(self.workers)}
        return "".join(f"\n--- rank {rank} wrote:\n{log}" for rank, log in logs.items() if log)


def open_reply(reply: Reply, rank: int, workers: list[Worker]) -> Outcome:
    """Unpickle a reply; an error gets the rank's traceback and output as a note."""
    value = cloudpickle.loads(reply.payload)
    if not reply.failed:
        return Outcome(rank, value, None, reply.ended_at)
    log = workers[rank].log()
    wrote = f"\n--- rank {rank} wrote:\n{log}" if log else ""
    value.add_note(f"--- raised by rank {rank} of {len(workers)}:\n{reply.trace.rstrip()}{wrote}")
    return Outcome(rank, None, value, reply.ended_at)


class Pool:
    """Up to `MAX_WORKERS` persistent workers, started when first needed.

    Args:
        simulated: Have each worker load the simulated accelerator; the rank r is on ``sim:r``.
    """

    def __init__(self, *, simulated: bool = False) -> None:
        self._simulated = simulated
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
        self._workers: list[Worker] = []
        self._num_calls = 0
        self._store: Any = None

    def ranks(self, num_ranks: int, *, warnings: str = "error") -> "Ranks":
        """Return what runs functions on ``num_ranks`` ranks; ``warnings`` is the action of their warning filter."""
        if not 1 <= num_ranks <= MAX_WORKERS:
            raise ValueError(f"ranks({num_ranks}): the pool has 1 to {MAX_WORKERS} ranks")
        return Ranks(self, num_ranks, warnings)

    def ready_workers(self, num_ranks: int) -> list[Worker]:
        """Start the missing workers, all at once, and wait until they can be called."""
        fresh = []
        for rank in range(num_ranks):
            if rank < len(self._workers) and self._workers[rank].is_alive:
                continue
            fresh.append(Worker(rank, Path(self._folder.name), simulated=self._simulated))
            self._workers[rank : rank + 1] = fresh[-1:]
        deadline = time.monotonic() + START_TIMEOUT_S
        for worker in fresh:
            worker.await_start(deadline)
        return self._workers[:num_ranks]

    def meeting(self) -> tuple[int, str]:
        """Return where a process group's ranks can meet: the port of a store, and a prefix of their own.

        Not in a file, as ranks that wait for others read it every 10 ms only.
        """
        if self._store is None:
            from torch.distributed import TCPStore  # not at once: the session may use no ranks

            self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._num_calls += 1
        return self._store.port, f"call{self._num_calls}"

    def kill(self) -> None:
        """End all workers; the next call starts fresh ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def close(self) -> None:
        """End all workers and remove their files."""
        self.kill()
        self._folder.cleanup()


class Ranks:
    """Runs functions on a fixed number of ranks."""

    def __init__(self, pool: Pool, num_ranks: int, warnings: str) -> None:
        self._pool = pool
        self._num_ranks = num_ranks
        self._warnings = warnings

    def __call__(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Run ``fn(world, *args)`` on every rank and return the results by rank.

        Raises:
            Exception: What the rank that failed first raised, with its traceback and output as a note.
            PoolError: A rank died, or did not finish within ``timeout`` seconds.
        """
        outcomes = self._run(fn, args, timeout, patient=False)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            raise min(failed, key=lambda outcome: outcome.ended_at).error
        return [outcome.result for outcome in outcomes]

    def each(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Outcome]:
        """Run like a call, but return every rank's result or error, for tests that expect all ranks to raise.

        Raises:
            PoolError: A rank died, or did not finish within ``timeout`` seconds.
        """
        outcomes = self._run(fn, args, timeout, patient=True)
        if len(outcomes) < self._num_ranks:
            missing = sorted(set(range(self._num_ranks)) - {outcome.rank for outcome in outcomes})
            error = next(outcome.error for outcome in outcomes if outcome.error is not None)
            raise PoolError(f"ranks {missing} of {self._num_ranks} did not finish within {timeout:g} s") from error
        return outcomes

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, *, patient: bool) -> list[Outcome]:
        register_test_modules()
        payload = cloudpickle.dumps((fn, args))
        try:
            workers = self._pool.ready_workers(self._num_ranks)
            meeting = self._pool.meeting()
            for rank, worker in enumerate(workers):
                worker.mark_log()
                # Half the time, so that a collective that waits in vain says so before the pool gives up.
                call = Call(payload, rank, self._num_ranks, *meeting, timeout_s / 2, self._warnings)
                worker.connection.send(call)
            return Gathering(workers, timeout_s, patient=patient).all()
        except BaseException:
            # Ctrl-C, a test's own timeout, a dead rank: no worker may be left in the middle of something.
            self._pool.kill()
            raise


_seen: set[str] = set()


def register_test_modules() -> None:
    """Have test modules travel by value, so that workers need not import them (nor what only the session needs)."""
    new = [name for name in sys.modules if name not in _seen]  # thousands of modules, hundreds of calls
    _seen.update(new)
    for module in map(sys.modules.__getitem__, new):
        file = getattr(module, "__file__", None) or ""
        if not file.startswith(f"{TESTS}/"):
            continue
        path = Path(file)
        if not path.name.startswith("pool") and "simulated_device" not in path.parts:
            cloudpickle.register_pickle_by_value(module)
