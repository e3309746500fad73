"""Say in words what the C library returns as a number."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from lockstep.comm.shm import library as lib
from lockstep.comm.shm.kinds import describe
from lockstep.errors import CollectiveError


def failure(
    code: int, native: ctypes.CDLL, handle: int, *, operation: str, ranks: Sequence[int], me: int, timeout_s: float
) -> CollectiveError:
    """Return the error for ``code``; ranks are named as the whole job counts them.

    Args:
        code: What the library returned, not ``OK``.
        native: The library.
        handle: The group in it.
        operation: What was called.
        ranks: The global rank of each rank of the group.
        me: This rank in the group.
        timeout_s: How long it may have waited.
    """
    where = f"Rank {ranks[me]} in {operation} on shm"
    if code == lib.STOPPED:
        return CollectiveError(f"{where}: the group was closed in this process meanwhile.")
    if code == lib.TIMED_OUT:
        missing = native.lockstep_missing(handle)
        names = ", ".join(str(rank) for index, rank in enumerate(ranks) if missing >> index & 1)
        return CollectiveError(
            f"{where} waited {timeout_s:g} s for rank {names}.\n"
            "That process lives, but is stopped, stuck or slow, or does not call as many collectives as the others. "
            "If it is only slow, pass a longer timeout when the group is made."
        )
    index = native.lockstep_culprit(handle)
    culprit = ranks[index]
    if code == lib.MISMATCH:
        return CollectiveError(_mismatch(where, native, handle, culprit, index, me))
    return peer_failure(code, native, handle, where=where, culprit=culprit, index=index)


def peer_failure(
    code: int, native: ctypes.CDLL, handle: int, *, where: str, culprit: int, index: int
) -> CollectiveError:
    """Return the error about a rank that will never come."""
    if code == lib.DIED:
        return CollectiveError(
            f"{where} waited for rank {culprit}, whose process has ended.\n"
            f"It was killed, or failed first: look at the output of rank {culprit}."
        )
    if code == lib.WENT:
        return CollectiveError(
            f"{where} waited for rank {culprit}, which has left the group.\n"
            "It destroyed its process group before this call; all ranks must call the same collectives."
        )
    reason = (native.lockstep_reason(handle, index) or b"").decode(errors="replace")
    return CollectiveError(f"{where} waited for rank {culprit}, which gave up:\n{reason}")


def _mismatch(where: str, native: ctypes.CDLL, handle: int, culprit: int, index: int, me: int) -> str:
    mine, theirs = (describe(native.lockstep_call_of(handle, rank).contents) for rank in (me, index))
    if mine == theirs:
        return (
            f"{where}: rank {culprit} sends another number of bytes than this rank has room for.\n"
            "The tensors must have the same shapes and dtypes on all ranks."
        )
    return (
        f"{where}: the ranks do not call the same. This rank calls {mine}; rank {culprit} calls {theirs}.\n"
        "All ranks must call the same collectives in the same order, with the same shapes and dtypes."
    )
