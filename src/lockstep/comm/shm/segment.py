"""Memory that several processes map. It has no name in any file system, so it cannot be left behind."""

import ctypes
import mmap
import os
import secrets
import struct
from collections.abc import Callable

TOKEN_BYTES = 16
# Where the others find the memory: pid, descriptor, size, token.
_OFFER = struct.Struct(f"=qqq{TOKEN_BYTES}s")
OFFER_BYTES = _OFFER.size


class Segment:
    """A mapping of shared memory in this process; ``fd`` stays open until `close_file`.

    [Note: memory without a name]
    One rank creates an anonymous file (memfd) and the others open it through ``/proc/<pid>/fd/<number>``. The kernel
    frees it with the last process that maps it, however the processes end. /dev/shm is not used, so its size does not
    matter. Opening fails if the ranks do not share a host, a process namespace and a user. Then they cannot share
    memory this way, and every rank learns that before the memory is used. A random token in the memory distinguishes
    it from a file of another host that has the same number by chance.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.memory = mmap.mmap(fd, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close_file(self) -> None:
        """Close the file; the memory stays mapped as long as there is a reference to ``memory``."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def share_segment(
    rank: int, num_bytes: int, broadcast: Callable[[bytes], bytes], agree: Callable[[str], str], *, objection: str = ""
) -> tuple[Segment | None, str]:
    """Return memory that all ranks have mapped; or ``None``, on all ranks, and why one of them could not map it.

    Collective: every rank.

    Args:
        rank: This rank; rank 0 allocates the memory.
        num_bytes: Its size.
        broadcast: Returns rank 0's bytes on every rank; their number is always the same.
        agree: Returns an objection of any rank on every rank, once all ranks have called it.
        objection: Why this rank cannot take part, if it cannot.
    """
    segment: Segment | None = None
    # An empty offer: if rank 0 gets no memory, it must not leave the others waiting.
    offer = bytes(OFFER_BYTES)
    if rank == 0 and not objection:
        segment, offer, objection = make_segment(num_bytes)
    offer = broadcast(offer)
    if rank != 0 and not objection and any(offer):
        segment, objection = map_segment(offer)
    # No rank may use the memory before all have mapped it. If one could not, none uses it.
    objection = agree(objection)
    if objection and segment is not None:
        segment.close_file()
        segment = None
    return segment, objection


def make_segment(num_bytes: int) -> tuple[Segment | None, bytes, str]:
    """Allocate at least ``num_bytes`` of zeroed memory, with all pages reserved; return it and an offer of it.

    If there is not enough memory, or the system has no anonymous files: None, an empty offer, and why.
    """
    fd = -1
    try:
        fd = os.memfd_create("lockstep")
        # Reserved now: a lack of memory at the first access to a page would be a SIGBUS.
        os.posix_fallocate(fd, 0, num_bytes)
        segment = Segment(fd, num_bytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        why = f"{num_bytes / 2**20:.1f} MiB of shared memory cannot be allocated ({error.strerror}); if there is "
        advice = "no room, raise the memory limit of the container, or start fewer ranks"
        return None, bytes(OFFER_BYTES), why + advice
    token = secrets.token_bytes(TOKEN_BYTES)
    segment.memory[:TOKEN_BYTES] = token
    return segment, _OFFER.pack(os.getpid(), fd, num_bytes, token), ""


def map_segment(offer: bytes) -> tuple[Segment | None, str]:
    """Map the memory that another process of this host offers.

    If this process cannot open it, which belongs to another host, container or user: return None, and why.
    """
    pid, peer_fd, num_bytes, token = _OFFER.unpack(offer)
    path, fd = f"/proc/{pid}/fd/{peer_fd}", -1
    reason = "not all ranks run on one host, in one container and as one user"
    try:
        if os.readlink(path).startswith("/memfd:lockstep"):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(fd).st_size == num_bytes and os.pread(fd, TOKEN_BYTES, 0) == token:
                return Segment(fd, num_bytes), ""
    except OSError as error:
        reason = f"{reason if fd < 0 else 'the memory cannot be mapped'} ({error.strerror})"
    if fd >= 0:
        os.close(fd)
    return None, reason
