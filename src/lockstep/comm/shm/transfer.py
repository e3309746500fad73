"""A message on its way."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

from lockstep.comm.shm.work import ShmWork
from lockstep.errors import CollectiveError

HEADER = struct.Struct("=qQ")
"""Tag and number of bytes."""


class Part:
    """Bytes of which some have been moved."""

    def __init__(self, storage: bytearray | Tensor) -> None:
        self.storage = storage
        if isinstance(storage, Tensor):
            self._start, self._size = storage.data_ptr(), storage.nbytes
        else:
            self._start = ctypes.addressof((ctypes.c_char * len(storage)).from_buffer(storage)) if storage else 0
            self._size = len(storage)
        self.rewind()

    def rewind(self) -> None:
        """Begin again."""
        self.address, self.num_left = self._start, self._size

    def advance(self, count: int) -> None:
        """Count ``count`` bytes as moved."""
        self.address += count
        self.num_left -= count

    def fill(self, data: bytearray) -> None:
        """Overwrite all bytes."""
        if data:
            ctypes.memmove(self._start, (ctypes.c_char * len(data)).from_buffer(data), len(data))
        self.num_left = 0


class Stash:
    """A message that nobody has asked for yet."""

    def __init__(self, num_bytes: int) -> None:
        self.data = bytearray(num_bytes)
        self.payload = Part(self.data)


class Inbox:
    """What arrives from one rank: who waits for it, and the message that is half read."""

    def __init__(self) -> None:
        self.wanted: deque[Transfer] = deque()
        self.aside: deque[tuple[int, Stash]] = deque()
        self.header_data = bytearray(HEADER.size)
        self.header = Part(self.header_data)
        self.target: Transfer | Stash | None = None
        self.tag = 0


class Transfer(ShmWork):
    """A send or a receive.

    Args:
        what: In words, for messages.
        peer: The other rank in the group.
        tag: Messages of one pair and tag arrive in order.
        data: Contiguous, on the CPU.
        limit_s: How long it may take.
        finish: Called after a receive.
    """

    def __init__(
        self, what: str, peer: int, tag: int, data: Tensor, limit_s: float, finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__(None, finish or (lambda: None), [data])
        self.what, self.peer, self.tag = what, peer, tag
        self.payload = Part(data)
        self.header = Part(bytearray(HEADER.pack(tag, data.nbytes)))
        self.limit_s, self.deadline = limit_s, time.monotonic() + limit_s
        self._event = threading.Event()

    def succeed(self, source: int = -1) -> None:
        """End: all bytes have been moved."""
        self._source = source
        self.run()

    def _end(self) -> None:
        super()._end()
        self._event.set()

    def _wait_elsewhere(self, limit_s: float) -> None:
        if not self._event.wait(limit_s if limit_s > 0 else None):
            raise CollectiveError(f"{self.what} has not ended within {limit_s:g} s.\nThe other rank may be late.")
