"""Wait for the ranks of one call: their results, their errors, and how to end a call that does not end by itself."""

import time
from multiprocessing.connection import Connection, wait

import cloudpickle

from tests.pool_messages import IDLE, Outcome, Reply
from tests.pool_process import PoolError, Worker

RELEASE_S = 2.0
"""After the first error, how long before the ranks that failed are ended: what they hold open holds up the others."""
GRACE_S = 10.0
"""After the first error, how long the others may go on."""


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
            status = self.workers[rank].wait()
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
