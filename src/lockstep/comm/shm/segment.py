"""Memory that several processes map: it has no name in any file system, so nothing can be left behind.

[Note: memory without a name]
One rank makes an anonymous file (memfd) and the others open it through ``/proc/<pid>/fd/<number>``. The kernel frees it
with the last process that has it mapped, whoever dies how and when; /dev/shm is not used, so its size does not matter.
Opening fails where the ranks do not share a host, a process namespace and a user: then they cannot share memory this
way, and every rank learns that before anything is built on it. A random token in the memory tells it from another
host's file that happens to have the same number.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import struct
from typing import NamedTuple

from lockstep.errors import LockstepError

TOKEN_BYTES = 16
_OFFER = struct.Struct(f"=qqq{TOKEN_BYTES}s")
OFFER_BYTES = _OFFER.size


class NoSharedMemory(LockstepError):
    """This process cannot get or map the memory; the message is the reason, in words that go into a sentence."""


class Offer(NamedTuple):
    """Where the others find the memory."""

    pid: int
    fd: int
    num_bytes: int
    token: bytes

    def pack(self) -> bytes:
        """Return what `unpack` reads, always of the same length."""
        return _OFFER.pack(*self)

    @staticmethod
    def unpack(data: bytes) -> Offer:
        """Return the offer that was packed."""
        return Offer(*_OFFER.unpack(data))


class Segment:
    """A mapping of shared memory in this process; ``fd`` stays open until `close_file`."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.memory = mmap.mmap(fd, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close_file(self) -> None:
        """Close the file; the memory stays mapped as long as somebody holds ``memory``."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def make_segment(num_bytes: int) -> tuple[Segment, Offer]:
    """Make memory of at least ``num_bytes``, zeroed, with all of its pages reserved.

    Raises:
        NoSharedMemory: There is not so much memory, or the system does not have anonymous files.
    """
    try:
        fd = os.memfd_create("lockstep")
    except OSError as error:
        raise NoSharedMemory(f"the system gives no anonymous file: {error.strerror}") from error
    try:
        # Now, not when a page is first touched: then it would be a SIGBUS.
        os.posix_fallocate(fd, 0, num_bytes)
        segment = Segment(fd, num_bytes)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
            raise NoSharedMemory(f"the system gives no shared memory: {error.strerror}") from error
        raise NoSharedMemory(
            f"there is no room for {num_bytes / 2**20:.1f} MiB of shared memory ({error.strerror}); raise the memory "
            "limit of the container, or start fewer ranks"
        ) from error
    token = secrets.token_bytes(TOKEN_BYTES)
    segment.memory[:TOKEN_BYTES] = token
    return segment, Offer(os.getpid(), fd, num_bytes, token)


def map_segment(offer: Offer) -> Segment:
    """Map what another process of this host offers.

    Raises:
        NoSharedMemory: It is not there for this process: another host, container or user.
    """
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    elsewhere = "not all ranks run on one host, in one container and as one user"
    try:
        if not os.readlink(path).startswith("/memfd:lockstep"):
            raise NoSharedMemory(elsewhere)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NoSharedMemory(f"{elsewhere} ({error.strerror})") from error
    try:
        if os.fstat(fd).st_size != offer.num_bytes or os.pread(fd, TOKEN_BYTES, 0) != offer.token:
            raise NoSharedMemory(elsewhere)
        return Segment(fd, offer.num_bytes)
    except OSError as error:
        os.close(fd)
        raise NoSharedMemory(f"the memory cannot be mapped: {error.strerror}") from error
    except NoSharedMemory:
        os.close(fd)
        raise
