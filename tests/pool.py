"""A pool of worker processes that all tests of a session share: an interpreter that imports torch costs seconds.

``Pool.ranks(n)`` gives a `Ranks`; calling it runs a function on each of ``n`` ranks of a fresh Gloo group. After a
timeout or the death of a worker, all workers are killed and the next test gets fresh ones.
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
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle

from tests.pool_messages import IDLE, READY, Call, Outcome, Reply

TESTS = Path(__file__).parent
MAX_WORKERS = 4
START_TIMEOUT_S = 90.0
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""Without it Gloo connects through whatever address the host's name has, if it has one."""
GRACE_S = 10.0
"""How long the other ranks may go on after the first one failed."""


class PoolError(AssertionError):
    """A rank did not answer; names the ranks and carries what they wrote."""


class Worker:
    """One process, the pipe to it, and the file that holds what it writes."""

    def __init__(self, index: int, folder: Path) -> None:
        self.connection, theirs = Pipe()
        self.log_path = folder / f"worker{index}-{time.monotonic_ns()}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.pool_worker", str(theirs.fileno()), str(os.getpid())],
                cwd=TESTS.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1", **LOOPBACK},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A group of its own: Ctrl-C reaches only the session, and a kill reaches the worker's children too.
                start_new_session=True,
            )
        theirs.close()
        self.log_start = 0

    def mark_log(self) -> None:
        """Forget what was written so far."""
        self.log_start = self.log_path.stat().st_size

    def log(self) -> str:
        """Return what was written since the mark."""
        return self.log_path.read_bytes()[self.log_start :].decode(errors="replace").strip()

    def dump_stacks(self) -> None:
        """Have the worker write the stack of each of its threads to its log."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the process and its children, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


@dataclass(frozen=True)
class Job:
    """``fn(world, *args)`` on each of ``num_ranks`` ranks; ``patient`` lets ranks go on after one has failed."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    num_ranks: int
    timeout_s: float
    warnings: str
    patient: bool


class Pool:
    """Up to `MAX_WORKERS` persistent workers, started when first needed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
        self._workers: list[Worker] = []
        self._num_calls = 0

    def ranks(self, num_ranks: int, *, warnings: str = "error") -> "Ranks":
        """Return what runs functions on ``num_ranks`` ranks; ``warnings`` is the action of their warning filter."""
        if not 1 <= num_ranks <= MAX_WORKERS:
            raise ValueError(f"ranks({num_ranks}): the pool has 1 to {MAX_WORKERS} ranks")
        return Ranks(self, num_ranks, warnings)

    def run(self, job: Job) -> list[Outcome]:
        """Run a job on fresh or idle workers; whatever goes wrong, none of them is left in the middle of it."""
        register_test_modules()
        payload = cloudpickle.dumps((job.fn, job.args))
        try:
            workers = self._ready_workers(job.num_ranks)
            store_path = str(Path(self._folder.name) / f"store{self._num_calls}")
            self._num_calls += 1
            for rank, worker in enumerate(workers):
                worker.mark_log()
                # Half the time, so that a collective that waits in vain says so before the pool gives up.
                call = Call(payload, rank, job.num_ranks, store_path, job.timeout_s / 2, job.warnings)
                worker.connection.send(call)
            return self._collect(workers, job)
        except BaseException:
            self.kill()
            raise

    def _ready_workers(self, num_ranks: int) -> list[Worker]:
        """Start the missing workers, all at once, and wait until they can be called."""
        fresh = [Worker(index, Path(self._folder.name)) for index in range(len(self._workers), num_ranks)]
        self._workers += fresh
        deadline = time.monotonic() + START_TIMEOUT_S
        for worker in fresh:
            try:
                started = worker.connection.poll(max(0.0, deadline - time.monotonic()))
                started = started and worker.connection.recv() == READY
            except EOFError:
                started = False
            if not started:
                raise PoolError(f"a worker of the pool did not start\n{worker.log()}")
        return self._workers[:num_ranks]

    def _collect(self, workers: list[Worker], job: Job) -> list[Outcome]:
        """Wait until every rank has replied and is idle again."""
        outcomes: dict[int, Outcome] = {}
        busy = {worker.connection: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + job.timeout_s
        while busy:
            ready = wait(list(busy), max(0.0, deadline - time.monotonic()))
            if not ready:
                return self._give_up(workers, outcomes, sorted(busy.values()), job.timeout_s)
            for connection in ready:
                rank = busy[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    raise PoolError(
                        f"rank {rank} of {len(workers)} died with exit status {workers[rank].process.wait()}"
                        f"{self._logs(workers)}"
                    ) from None
                if message == IDLE:
                    del busy[connection]
                    continue
                outcomes[rank] = open_reply(message, rank, len(workers), workers[rank].log())
                if message.failed and not job.patient:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return [outcomes[rank] for rank in range(len(workers))]

    def _give_up(
        self, workers: list[Worker], outcomes: dict[int, Outcome], stuck: list[int], timeout_s: float
    ) -> list[Outcome]:
        """Kill the workers; return the outcomes if one is an error, since it is the likely cause of the silence."""
        for rank in stuck:
            workers[rank].dump_stacks()
        time.sleep(0.5)
        logs = self._logs(workers)
        self.kill()
        failed = [outcome for outcome in outcomes.values() if outcome.error is not None]
        if not failed:
            raise PoolError(f"ranks {stuck} of {len(workers)} did not finish within {timeout_s:g} s{logs}")
        for outcome in failed:
            outcome.error.add_note(f"ranks {stuck} were still running when the pool was killed{logs}")
        return list(outcomes.values())

    def _logs(self, workers: list[Worker]) -> str:
        logs = {rank: worker.log() for rank, worker in enumerate(workers)}
        return "".join(f"\n--- rank {rank} wrote:\n{log}" for rank, log in logs.items() if log)

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
        outcomes = self._pool.run(Job(fn, args, self._num_ranks, timeout, self._warnings, patient=False))
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            raise min(failed, key=lambda outcome: outcome.ended_at).error
        return [outcome.result for outcome in outcomes]

    def each(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Outcome]:
        """Run like a call, but return every rank's result or error, for tests that expect all ranks to raise.

        Raises:
            PoolError: A rank died, or did not finish within ``timeout`` seconds.
        """
        outcomes = self._pool.run(Job(fn, args, self._num_ranks, timeout, self._warnings, patient=True))
        if len(outcomes) < self._num_ranks:
            missing = sorted(set(range(self._num_ranks)) - {outcome.rank for outcome in outcomes})
            error = next(outcome.error for outcome in outcomes if outcome.error is not None)
            raise PoolError(f"ranks {missing} of {self._num_ranks} did not finish within {timeout:g} s") from error
        return outcomes


def open_reply(reply: Reply, rank: int, num_ranks: int, log: str) -> Outcome:
    """Unpickle a reply; an error gets the rank's traceback and output as a note."""
    value = cloudpickle.loads(reply.payload)
    if not reply.failed:
        return Outcome(rank, value, None, reply.ended_at)
    wrote = f"\n--- rank {rank} wrote:\n{log}" if log else ""
    value.add_note(f"--- raised by rank {rank} of {num_ranks}:\n{reply.trace.rstrip()}{wrote}")
    return Outcome(rank, None, value, reply.ended_at)


def register_test_modules() -> None:
    """Have test modules travel by value, so that workers need not import them (nor what only the session needs)."""
    by_reference = {__name__, Call.__module__}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name not in by_reference and Path(file).is_relative_to(TESTS):
            cloudpickle.register_pickle_by_value(module)
