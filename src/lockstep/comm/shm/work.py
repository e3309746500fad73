"""The op queue of a group: its calls in order, and their handles."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep.base import activity
from lockstep.errors import CollectiveError

STOP_TIMEOUT_S = 2.0
_end_lock = threading.Lock()


class OpQueue:
    """The calls of one group that have not run yet.

    [Note: who runs a call]
    Calls run in the order in which they were made, one at a time. A synchronous call is run by the thread that waits
    for it, which saves two thread switches. An asynchronous call is run by the group's own thread, which starts with
    the first such call. A thread that runs a call first takes ``_turn``, and then the oldest call in the queue.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._waiting: deque[ShmWork] = deque()
        self._signals: SimpleQueue[bool] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._start_lock = threading.Lock()

    def add(self, work: ShmWork, *, is_async: bool) -> None:
        """Append a call. A synchronous one runs in its ``wait()``."""
        self._waiting.append(work)
        if is_async:
            self.signal()

    def signal(self) -> None:
        """Make the group's own thread run the queued calls."""
        # Not started at creation: most groups of a job never make an asynchronous call.
        if not self._threads:
            self._ensure_idle_thread()
        self._signals.put(True)

    def _ensure_idle_thread(self) -> None:
        with self._start_lock:
            if self._num_idle == 0:
                self._num_idle += 1
                self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
                self._threads[-1].start()

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Run calls in this thread until ``is_over`` returns true."""
        while not is_over():
            with self._turn:
                # Another thread may have run it while this one waited for its turn.
                ran = None if is_over() else self._run_oldest()
            if ran is not None:
                ran.complete_futures()

    def _run_oldest(self) -> ShmWork | None:
        work = self._waiting.popleft() if self._waiting else None
        if work is not None:
            work.run()
        return work

    def take_turn(self) -> bool:
        """Let this thread make a call, until `end_turn`; return False if calls are queued or running."""
        if self._waiting or not self._turn.acquire(blocking=False):
            return False
        if self._waiting:  # added in the meantime
            self._turn.release()
            return False
        return True

    def end_turn(self) -> None:
        """Let other threads make calls."""
        self._turn.release()

    def stop(self) -> bool:
        """End the threads and fail queued calls; return whether the threads ended in time."""
        # A callback of a future runs in one of these threads and may close the group.
        threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for _ in self._threads:
            self._signals.put(False)
        for thread in threads:
            thread.join(STOP_TIMEOUT_S)
        while self._waiting:
            work = self._waiting.popleft()
            work.fail(CollectiveError("The process group was closed before this call could run."))
            work.complete_futures()
        return not any(thread.is_alive() for thread in threads)

    def drain(self) -> None:
        """Run the queued calls in this thread."""
        self.run_until(lambda: not self._waiting)

    def _run(self) -> None:
        while self._signals.get():
            with self._start_lock:
                self._num_idle -= 1
            with self._turn:
                work = self._run_oldest()
            if work is not None and work._futures:
                # A callback in this thread may make calls and wait for them: another thread must be there to run them.
                self._ensure_idle_thread()
                work.complete_futures()
            with self._start_lock:
                self._num_idle += 1


class ShmWork(dist.Work):
    """A call that runs or will run: torch's work handle.

    Args:
        operation: Its description, for messages and for the watchdog.
        queue: The queue it is in; ``None`` if something else runs it, such as p2p.
        action: What it does.
        outputs: The tensors that it writes.
    """

    def __init__(
        self, operation: str, queue: OpQueue | None, action: Callable[[], Any], outputs: Sequence[Any]
    ) -> None:
        super().__init__()
        self.operation = operation
        self._queue = queue
        self._action: Callable[[], Any] | None = action
        self._outputs = list(outputs)
        self._futures: list[Future[Any]] = []
        self._error: BaseException | None = None
        self._source = -1
        self._ended: threading.Event | None = None  # created when a thread waits for another one to run it
        self.has_ended = False

    def run(self, source: int = -1) -> None:
        """Run the call in this thread; an error is raised in `wait`. ``source``: the rank that sent a message."""
        assert self._action is not None
        self._source = source
        try:
            with torch.no_grad():
                self._action()
        except BaseException as error:
            self._error = error
        self._end()

    def fail(self, error: BaseException) -> None:
        """End without running."""
        self._error = error
        self._end()

    def _end(self) -> None:
        with _end_lock:
            # Its staged copies and tensors are not needed any more, but callers may keep the handle for long.
            self._action = None
            self.has_ended = True
            if self._ended is not None:
                self._ended.set()

    def complete_futures(self) -> None:
        """Complete the futures after the end. The caller must hold no lock, because callbacks may make calls."""
        with _end_lock:
            futures, self._futures = self._futures, []
        for future in futures:
            future.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the call has run, at most ``timeout`` if that is positive; raise the call's error."""
        limit_s = timeout.total_seconds()
        if not self.has_ended:
            with activity.waiting(self.operation):
                if self._queue is not None and limit_s <= 0:
                    self._queue.run_until(lambda: self.has_ended)
                elif not self._wait_for_end(limit_s):
                    raise CollectiveError(
                        f"{self.operation} on shm has not ended within {limit_s:g} s.\nAnother rank may be late."
                    )
        if self._error is not None:
            raise self._error
        return True

    def _wait_for_end(self, limit_s: float) -> bool:
        """Wait for another thread to run the call: a thread that runs a call itself cannot stop at its own timeout."""
        with _end_lock:
            if self.has_ended:
                return True
            self._ended = self._ended or threading.Event()
        # The group's own thread must run it, because this one could not stop in the middle at its timeout.
        if self._queue is not None:
            self._queue.signal()
        return self._ended.wait(limit_s if limit_s > 0 else None)

    def is_completed(self) -> bool:
        """Return whether the call has run; make sure that it will."""
        if not self.has_ended and self._queue is not None:
            self._queue.signal()
        return self.has_ended

    def is_success(self) -> bool:
        """Return whether the call has run without an error."""
        return self.has_ended and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that the call raised, if any."""
        return self._error

    def result(self) -> list[Any]:
        """Return the tensors that the call wrote."""
        return self._outputs

    def synchronize(self) -> None:
        """Do the same as `wait`."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank that a message came from."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensors that the call writes."""
        ended: Future[Any] = Future()
        # An exception in a callback is the only way in Python to make a future that C++ also sees as failed.
        outcome: Future[list[Tensor]] = ended.then(self._outcome)
        with _end_lock:
            pending = not self.has_ended
            if pending:
                self._futures.append(ended)
        if not pending:
            ended.set_result(None)
        elif self._queue is not None:
            self._queue.signal()
        return outcome

    def _outcome(self, _: Future[Any]) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._outputs


# The handle of a call that had run before the handle was returned, for callers that only wait for it.
ENDED = ShmWork("", None, lambda: None, [])
ENDED.run()
