"""How the launcher of a single machine meets: with nobody, at a port of the loopback interface."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from lockstep.comm.hosting import LOOPBACK, host_store, part_of

BACKEND = "lockstep-local"
"""The name under which torch elastic knows it."""

_TIMEOUT_S = 600.0


class LocalRendezvous(RendezvousHandler):
    """Stands in for elastic's ``c10d`` rendezvous, whose store listens at every address of the machine."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks meet in the launcher's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin the next round, in a store of its own: see [Note: a store for each round] in rounds.py."""
        self._store, port = host_store(LOOPBACK, _TIMEOUT_S)
        return RendezvousInfo(part_of(self._store, "launcher"), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        """Nobody else can close it."""
        return False

    def set_closed(self) -> None:
        """Nobody else needs to know."""

    def num_nodes_waiting(self) -> int:
        """Nobody else can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing: the port closes with this object."""
        return True


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _make)
