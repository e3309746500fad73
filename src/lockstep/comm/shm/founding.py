"""Make a group on shared memory, or find out, on all ranks alike, that it cannot be."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lockstep.comm.shm.library import MAX_RANKS, library
from lockstep.comm.shm.member import Member
from lockstep.comm.shm.process_group import ShmProcessGroup
from lockstep.comm.shm.segment import NoSharedMemory, Offer, Segment, make_segment, map_segment

CHUNK_BYTES = 2**18
"""How much of a tensor a rank has in the segment at a time: small enough for the processor's cache."""

MIN_CHUNK_BYTES = 2**16
RING_BYTES = 2**16


def found_group(options: Any, _: Any = None) -> Any:
    """Return the process group that c10d asks for; where the ranks cannot share memory, Gloo's backend.

    Collective: every rank of the new group. Blocks until all have come. All ranks decide alike, by what each of them
    could really map.

    Args:
        options: c10d's ``_DistributedBackendOptions``.
    """
    rank, size = options.group_rank, options.group_size
    store = PrefixStore("lockstep/shm", options.store)
    native = library()
    segment, reason = _share(store, native, rank, size)
    if isinstance(native, str) or segment is None:
        if rank == 0:
            print(f"lockstep: no shm for this group, Gloo serves it: {reason}.", file=sys.stderr)
        return dist.ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
    ranks = options.global_ranks_in_group
    member = Member(native, segment, rank, size, ranks, options.timeout.total_seconds())
    # Only now may anybody look whether this rank lives.
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{other}" for other in range(size)])
    return ShmProcessGroup(options.store, member, str(options.group_id), options)


def why_not(store: dist.Store, rank: int, size: int) -> str:
    """Return why these ranks cannot have a group on shm, the same on all of them; nothing if they can.

    Collective: every rank. Blocks until all have come. Tries what `found_group` does.
    """
    segment, reason = _share(store, library(), rank, size)
    if segment is not None:
        segment.close_file()
    return reason


def _share(store: dist.Store, native: ctypes.CDLL | str, rank: int, size: int) -> tuple[Segment | None, str]:
    """Return a segment that all ranks have mapped, or ``None`` and why not. Collective: every rank."""
    segment, objection = None, native if isinstance(native, str) else ""
    if size > MAX_RANKS:
        objection = f"it serves up to {MAX_RANKS} ranks"
    if rank == 0:
        offer = b""
        if not objection:
            try:
                segment, made = _make(native, size)
                offer = made.pack()
            except NoSharedMemory as error:
                objection = str(error)
        store.set("offer", json.dumps([offer.hex(), objection]))
    else:
        text, theirs = json.loads(store.get("offer"))
        objection = theirs or objection
        if not objection:
            try:
                segment = map_segment(Offer.unpack(bytes.fromhex(text)))
            except NoSharedMemory as error:
                objection = str(error)
    store.set(f"answer/{rank}", objection)
    answers = [store.get(f"answer/{other}").decode() for other in range(size)]
    objection = next((answer for answer in answers if answer), "")
    if objection and segment is not None:
        segment.close_file()
        segment = None
    return segment, objection


def _make(native: Any, size: int) -> tuple[Segment, Offer]:
    """Make and format a segment for ``size`` ranks, with smaller chunks where memory is short."""
    chunk_bytes = CHUNK_BYTES
    while True:
        try:
            segment, offer = make_segment(native.lockstep_segment_bytes(size, chunk_bytes, RING_BYTES))
        except NoSharedMemory:
            if chunk_bytes <= MIN_CHUNK_BYTES:
                raise
            chunk_bytes //= 2
            continue
        native.lockstep_format(segment.address, chunk_bytes, RING_BYTES)
        return segment, offer
