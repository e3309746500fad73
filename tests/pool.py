"""A pool of worker processes that all tests of a session share: an interpreter that imports torch costs seconds.

``Pool.ranks(n)`` gives a `Ranks`; calling it runs a function on each of ``n`` ranks of a fresh Gloo group. Workers that
hang or die are replaced before the next call.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from tests.pool_gather import Gathering
from tests.pool_messages import Call, Outcome
from tests.pool_process import PoolError, Worker

__all__ = ["Pool", "PoolError", "Ranks"]

TESTS = Path(__file__).parent
MAX_WORKERS = 4
# For each function that it pickles, it would look through all modules for those that a worker may have to import. What
# tests use of packages is imported there: the worker is forked off a process that has done so.
cloudpickle.cloudpickle._find_imported_submodules = lambda code, dependencies: []
START_TIMEOUT_S = 90.0


class Pool:
    """Up to `MAX_WORKERS` persistent workers, started when first needed.

    Args:
        templates: Where the processes listen that workers are forked off; see `Templates`.
        simulated: Have each worker load the simulated accelerator; the rank r is on ``sim:r``.
    """

    def __init__(self, templates: list[str], *, simulated: bool = False) -> None:
        self._templates = templates
        self._simulated = simulated
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
        self._workers: list[Worker] = []
        self._num_calls = 0

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
            template = self._templates[rank % len(self._templates)]
            fresh.append(Worker(template, Path(self._folder.name), simulated=self._simulated))
            self._workers[rank : rank + 1] = fresh[-1:]
        deadline = time.monotonic() + START_TIMEOUT_S
        for worker in fresh:
            worker.await_start(deadline)
        return self._workers[:num_ranks]

    def new_store_path(self) -> str:
        """Return where a process group's ranks can meet: a file that does not exist yet."""
        self._num_calls += 1
        return str(Path(self._folder.name) / f"store{self._num_calls}")

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
            store_path = self._pool.new_store_path()
            for rank, worker in enumerate(workers):
                worker.mark_log()
                # Half the time, so that a collective that waits in vain says so before the pool gives up.
                call = Call(payload, rank, self._num_ranks, store_path, timeout_s / 2, self._warnings)
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
