"""The queue of a group's calls, and the two of the C library that almost all of them are made of.

Tensors that are not contiguous are copied when a call runs, and back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor

from lockstep.comm.shm import kinds
from lockstep.comm.shm.buckets import NOWHERE, Buckets, Place
from lockstep.comm.shm.member import Member
from lockstep.comm.shm.staging import Staged, pointers, sizes
from lockstep.comm.shm.work import Queue, ShmWork
from lockstep.errors import CollectiveError

Call = Callable[..., None]
"""Calls a function of the C library with the group, the arguments and the time-out, and raises what comes of it."""


class Calls:
    """What one rank does on its group, one call after the other."""

    def __init__(self, member: Member, name: str) -> None:
        self.member = member
        self.buckets = Buckets(member)
        self.queue = Queue(f"lockstep-shm-{name}")

    def submit(self, name: str, action: Callable[[Call], None], outputs: Sequence[Any], opts: Any = None) -> ShmWork:
        """Queue ``action``, which makes its calls with what it is given; return the handle."""
        self.member.ensure_usable(name)
        call = partial(self.member.call, name, self.timeout_of(opts))

        def guarded() -> None:
            try:
                action(call)
            except Exception as error:
                # The others are in this collective, or will be: without this they would wait for the time-out.
                self.member.give_up(CollectiveError(f"{name} failed: {error}"))
                raise

        work = ShmWork(self.queue, guarded, outputs)
        self.queue.add(work, is_async=getattr(opts, "asyncOp", True))
        return work

    def timeout_of(self, opts: Any) -> float:
        """Return the time-out in the options of a call, or the group's."""
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
        return seconds if seconds > 0 else self.member.timeout_s

    def reduce_now(self, call: Call, tensor: Tensor, number: int, *, root: int) -> None:
        """Reduce one tensor, in the thread whose turn it is."""
        wanted = root in (-1, self.member.rank)
        with Staged([tensor], write_back=wanted) as (staged,):
            data = kinds.as_numbers(staged)
            alloc, offset, parts = self.buckets.find(data)
            call(
                self.member.native.lockstep_all_reduce,
                data.data_ptr(),
                data.numel(),
                kinds.dtype_number(data.dtype),
                number,
                root,
                alloc,
                offset,
                parts,
            )

    def exchange_now(
        self,
        call: Call,
        kind: int,
        sends: Sequence[Tensor | None],
        receives: Sequence[Tensor | None],
        *,
        root: int = -1,
        same: bool = False,
        place: Place = NOWHERE,
    ) -> None:
        """Exchange contiguous tensors, in the thread whose turn it is; with ``same``, each rank sends one tensor.

        ``place`` is that of what is received, if this rank sends what already lies at its own place in it.
        """
        call(
            self.member.native.lockstep_exchange,
            kind,
            root,
            int(same),
            pointers(sends),
            sizes(sends),
            pointers(receives),
            sizes(receives),
            *place,
        )
