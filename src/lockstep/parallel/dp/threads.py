"""A persistent pool of threads, one for each replica.

A thread is started once and then waits for work, so a step costs no thread start, a thread's number of cores is set
once, and replica i always runs on thread i (which also keeps what CUDA and autograd hold per thread in place).
"""

import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.freed_memory import keep_freed_memory
from lockstep.errors import LockstepError

_LIVENESS_CHECK_S = 1.0
"""How often a caller that waits for a result looks whether the thread that owes it still lives."""


@dataclass(frozen=True)
class _Job:
    """One call and where its result goes. ``function`` must not raise; ``errors.attempt`` sees to it."""

    index: int
    function: Callable[[], Any]
    results: queue.SimpleQueue[tuple[int, Any]]

    def run(self) -> None:
        self.results.put((self.index, self.function()))


_Tasks = queue.SimpleQueue["_Job | None"]


@dataclass(frozen=True)
class _Worker:
    tasks: _Tasks
    thread: threading.Thread


class ReplicaThreads:
    """Runs one job a thread, all at the same time; the threads end with this object.

    The threads start with the first ``run``, start again in a forked child (a fork takes only the calling thread
    along), and hold no reference to this object, so nothing outlives it.

    Args:
        size: How many threads.
        divide_cores: Give every thread ``torch.get_num_threads() // size`` cores for the inside of its operations.
            Without it each of the ``size`` threads would use all of the cores at once.
    """

    def __init__(self, size: int, *, divide_cores: bool) -> None:
        self._size = size
        self._divide_cores = divide_cores
        self._workers: list[_Worker] = []
        self._owner_pid = 0
        self._cores_divided = 0
        self._finalizer: weakref.finalize[Any, ReplicaThreads] | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call ``functions[i]`` on thread i, all of them at once, and return their results in order.

        Blocks until all are done. An interrupt (Ctrl-C) leaves the unfinished calls to threads that this object no
        longer uses; they end after their call.

        Args:
            functions: At most ``size``, none of which raises.

        Raises:
            LockstepError: A thread died.
        """
        assert len(functions) <= self._size
        if not self._workers or self._owner_pid != os.getpid():
            self._start()
        if self._divide_cores and self._cores_divided != torch.get_num_threads():
            self._set_cores(torch.get_num_threads())
        return self._dispatch(functions)

    def refuse_inside(self) -> None:
        """Raise if called from one of these threads, which would wait for itself.

        Raises:
            LockstepError: It was.
        """
        if any(worker.thread is threading.current_thread() for worker in self._workers):
            raise LockstepError(
                "A DataParallel module was called from inside one of its own replicas.\n"
                "Call the wrapped module there, not the wrapper."
            )

    def stop(self) -> None:
        """End the threads, each after the call it is in. A later ``run`` starts new ones. Does not block."""
        if self._finalizer is not None:
            self._finalizer()
        self._workers = []

    def _start(self) -> None:
        if self._divide_cores:
            keep_freed_memory()
        self._workers = [self._start_worker(index) for index in range(self._size)]
        self._owner_pid = os.getpid()
        self._cores_divided = 0
        self._finalizer = weakref.finalize(self, _stop_all, [worker.tasks for worker in self._workers])

    def _start_worker(self, index: int) -> _Worker:
        tasks: _Tasks = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(tasks,), name=f"lockstep-replica-{index}", daemon=True)
        thread.start()
        return _Worker(tasks, thread)

    def _set_cores(self, total: int) -> None:
        """Divide ``total`` cores among the threads.

        ``torch.set_num_threads`` sets the number of the calling thread and, besides, the number that threads started
        later begin with; calling it here at the end puts the latter back.
        """
        share = max(1, total // self._size)
        try:
            self._dispatch([functools.partial(_use_cores, share)] * self._size)
        finally:
            torch.set_num_threads(total)
        self._cores_divided = total

    def _dispatch(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        try:
            for index, function in enumerate(functions):
                self._workers[index].tasks.put(_Job(index, function, results))
            done: dict[int, Any] = {}
            while len(done) < len(functions):
                try:
                    index, result = results.get(timeout=_LIVENESS_CHECK_S)
                except queue.Empty:
                    self._check_alive(done, len(functions))
                else:
                    done[index] = result
        except BaseException:
            self.stop()
            raise
        return [done[index] for index in range(len(functions))]

    def _check_alive(self, done: dict[int, Any], num_jobs: int) -> None:
        for index in range(num_jobs):
            if index not in done and not self._workers[index].thread.is_alive():
                raise LockstepError(
                    f"The thread of replica {index} died without a result.\n"
                    "This happens when the interpreter is shutting down, or when native code ends the thread."
                )


def _work(tasks: _Tasks) -> None:
    """Run jobs until there is a None. No timeout: an idle thread keeps nobody waiting."""
    while (job := tasks.get()) is not None:
        job.run()
        del job  # it holds inputs and outputs, which must not live until the next job


def _use_cores(count: int) -> None:
    """Set the number of cores of the calling thread.

    torch gives a thread the process's number at the first operation that asks for it, over the thread's own; asking
    for it first gets that behind us.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


def _stop_all(queues: list[_Tasks]) -> None:
    for tasks in queues:
        tasks.put(None)
