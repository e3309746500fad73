"""This process as a member of a group: the segment, the C library's view of it, and its errors."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence

from lockstep.comm.shm import library as lib
from lockstep.comm.shm.failure import failure
from lockstep.comm.shm.segment import Segment
from lockstep.errors import CollectiveError, LockstepError

SPINS = 2000
"""Looks at a word before going to sleep, some tens of microseconds; none where ranks must share cores."""


class Member:
    """One rank of a group that shares a segment.

    Attributes:
        native: The C library.
        handle: What it knows the group by.
        rank: This rank in the group.
        size: The number of ranks.
        ranks: Each member's rank in the whole job, for messages.
        timeout_s: How long a call may wait.
    """

    def __init__(
        self, native: ctypes.CDLL, segment: Segment, rank: int, size: int, ranks: Sequence[int], timeout_s: float
    ) -> None:
        self.native, self.rank, self.size = native, rank, size
        self.ranks = list(ranks) or list(range(size))
        self.timeout_s = timeout_s
        self._segment = segment
        self._pid = os.getpid()
        self._signal: BaseException | None = None
        self._broken: LockstepError | None = None
        interruptions = self._interruptions()
        next(interruptions)
        self._callback = lib.INTERRUPTED_TYPE(interruptions.__next__)  # kept: the C library holds only its address
        spins = SPINS if size <= len(os.sched_getaffinity(0)) else 0
        handle = native.lockstep_join(segment.address, segment.fd, rank, size, spins, self._callback)
        if handle is None:
            raise CollectiveError(f"Rank {rank} cannot join the shared segment: its place is taken.")
        self.handle: int = handle
        self._joined = True

    def ensure_usable(self, operation: str) -> None:
        """Raise if the group cannot be used (any more).

        Raises:
            LockstepError: It failed before, was closed, or was made in another process.
        """
        me = self.ranks[self.rank]
        if os.getpid() != self._pid:
            raise CollectiveError(
                f"Process {os.getpid()} was forked from rank {me} and calls {operation} on its group.\n"
                "A forked process is no member. Start processes that communicate with the spawn method."
            )
        if self._broken is not None:
            raise type(self._broken)(*self._broken.args) from self._broken
        if not self._joined:
            raise CollectiveError(f"Rank {me} calls {operation}, but has destroyed this process group already.")

    def call(self, operation: str, timeout_s: float, function: Callable[..., int], *args: object) -> None:
        """Call a collective of the C library. Collective: every rank. Blocks at most about ``timeout_s``.

        Raises:
            LockstepError: It failed; the group is of no more use, and the other ranks hear why.
        """
        self.ensure_usable(operation)
        code = function(self.handle, *args, int(timeout_s * 1000))
        if code == lib.OK:
            return
        if code == lib.INTERRUPTED:
            assert self._signal is not None
            error, self._signal = self._signal, None
            self.give_up(CollectiveError(f"Rank {self.ranks[self.rank]} was interrupted in {operation} on shm."))
            raise error
        found = failure(
            code,
            self.native,
            self.handle,
            operation=operation,
            ranks=self.ranks,
            me=self.rank,
            timeout_s=timeout_s,
        )
        self.give_up(found)
        raise found

    def give_up(self, reason: LockstepError) -> None:
        """Tell the other ranks that this one will not come any more, and why."""
        if self._joined and self._broken is None:
            self._broken = reason
            self.native.lockstep_fail(self.handle, str(reason).encode()[:500])

    def stop(self) -> None:
        """Let calls in other threads of this process return soon."""
        if self._joined:
            self.native.lockstep_stop(self.handle)

    def leave(self) -> None:
        """Leave the group. No thread may be in a call any more."""
        if self._joined and os.getpid() == self._pid:
            self._joined = False
            self.native.lockstep_leave(self.handle)
            # Lets go of the lock by which the others know that this process lives.
            self._segment.close_file()

    def _interruptions(self) -> Iterator[int]:
        """Give 0 again and again, 1 after a signal handler has raised; called while the main thread waits in C.

        A generator, because handlers run as soon as Python code does, and so inside of ``try`` only where the code goes
        on after a ``yield``; a function would begin before its ``try``.
        """
        while True:
            try:
                while True:
                    yield 0
            except GeneratorExit:
                return
            except BaseException as error:  # KeyboardInterrupt, or what a handler raised: passed on by `call`
                self._signal = error
            yield 1

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.leave()
