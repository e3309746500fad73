"""torch elastic's rendezvous, with a store for each round in which the ranks of all its machines find each other.

[Note: a store for each round]
Machines meet anew whenever ranks are started again: that is a round. Ranks then meet in a store that the launcher of
the first machine hosts. torch's launchers host one when they first meet, and remember where it is for as long as they
live. Two things go wrong with that:

- A launcher that joins later, in place of a machine that was lost, waits until somebody writes the address into the
  store of its round, and those who know it do not write it again. Or it is the first by name, hosts another one, and
  the others never ask there. Either way the ranks wait for each other in vain.
- What ranks wrote before they were started again is still there. Scripts that call torch's own init_process_group find
  the addresses of ranks that are gone: "Connection refused".

So here the first machine of each round hosts a new store, and says so in that round. Ranks of one round also share one
number of restarts, which torch's launchers count each for itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from lockstep.comm.hosting import host_store

_NO_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's own variable: no store of a launcher is used by ranks, and so none is remembered."""

_PORT = "lockstep/port"
_RESTARTS = "lockstep/restarts"
_TIMEOUT_S = 600.0


class Rounds(RendezvousHandler):
    """Stands before a handler of torch's.

    Args:
        inner: What brings the machines together.
        is_ending: Tells whether the ranks have been asked to end, so that no machine can join any more.
    """

    def __init__(self, inner: RendezvousHandler, is_ending: Callable[[], bool]) -> None:
        self._inner, self._is_ending = inner, is_ending
        self._round: RendezvousInfo | None = None
        self._hosted: object = None

    def get_backend(self) -> str:
        """Return the name of the kind of rendezvous."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """The ranks meet in a launcher's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines in the next round, and agree on a new store for the ranks. Blocks until they came."""
        with _without_sharing():
            found = self._inner.next_rendezvous()
        assert found.bootstrap_store_info is not None
        host = found.bootstrap_store_info.master_addr
        self._hosted = None  # that of the round before: its ranks have ended
        if found.rank == 0:
            self._hosted, port = host_store(host, _TIMEOUT_S)
            found.store.set(_PORT, str(port))
        else:
            port = int(found.store.get(_PORT))
        self._round = RendezvousInfo(found.store, found.rank, found.world_size, RendezvousStoreInfo(host, port))
        return self._round

    def agree_on_restarts(self, number: int) -> int:
        """Return the largest ``number`` that a machine of this round knows. Blocks until all have told theirs."""
        assert self._round is not None
        store = self._round.store
        store.set(f"{_RESTARTS}/{self._round.rank}", str(number))
        return max(int(store.get(f"{_RESTARTS}/{rank}")) for rank in range(self._round.world_size))

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait to join; this one counts if the others have gone on without it."""
        if self._is_ending():
            return 0
        return self._inner.num_nodes_waiting() or int(self._is_forgotten())

    def _is_forgotten(self) -> bool:
        """Tell whether the others took this machine for dead, as its signs of life came late, and began a new round."""
        with contextlib.suppress(AttributeError):  # torch's own affairs, which may look different in another version
            state = cast(Any, self._inner)._state_holder.state
            return state.complete and cast(Any, self._inner)._this_node not in state.participants
        return False

    def is_closed(self) -> bool:
        """Tell whether the job is over."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Say that the job is over."""
        self._inner.set_closed()

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Leave for good, and end the job, unless it is only this machine that was told to end."""
        return self._is_ending() or self._inner.shutdown()


def in_rounds(handler: RendezvousHandler, is_ending: Callable[[], bool]) -> RendezvousHandler:
    """Return ``handler`` with `Rounds` before it, if machines may come and go with it and the user does not object."""
    if isinstance(handler, DynamicRendezvousHandler) and os.environ.get(_NO_SHARING, "0") != "1":
        return Rounds(handler, is_ending)
    return handler


@contextmanager
def _without_sharing() -> Iterator[None]:
    before = os.environ.get(_NO_SHARING)
    os.environ[_NO_SHARING] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_SHARING]
        else:
            os.environ[_NO_SHARING] = before
