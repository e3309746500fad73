"""Status notes in the store beside the collectives: each rank's for rank zero, each machine's for the others."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lockstep.comm.world import World

# A board on which each rank leaves one note, for rank zero to read: beside the collectives, and nobody waits.
#
# The notes lie in the store in which the ranks have met, each under one key that is written over again and again. The
# store is reached over a connection of the board's own, as the engine's is locked while it waits for somebody. Nothing
# new listens.

STORE_TIMEOUT_S = 3.0
"""How long the store may take to answer; then a note is left out."""

_MOST_FAILURES = 3
"""After so many in a row the board is given up: whoever hosts the store has ended."""


class StatusKeys:
    """Notes by rank. Made on every rank of a world, in the same order; used by one thread of each.

    Args:
        world: In which they are.
        num_ranks: How many take part: all, or only this one.
    """

    def __init__(self, world: World, num_ranks: int) -> None:
        self._rank = world.rank
        self._others = [rank for rank in range(num_ranks) if rank != world.rank] if num_ranks > 1 else []
        self._prefix = "lockstep/board"
        if self._others:  # the n-th board of each rank is the same one
            number = PrefixStore(self._prefix, dist.distributed_c10d._get_default_store()).add(f"of/{world.rank}", 1)
            self._prefix = f"{self._prefix}/{number}"
        self._store: Store | None = None
        self._known: list[int] = []
        self._num_failures = 0

    @property
    def is_given_up(self) -> bool:
        """Whether the store does not answer any more."""
        return self._num_failures >= _MOST_FAILURES

    def post(self, note: Any) -> None:
        """Replace this rank's note, which JSON can hold. Blocks some seconds at most."""
        if not self._others or self.is_given_up:
            return
        try:
            self._open().set(str(self._rank), json.dumps(note))
            self._num_failures = 0
        except (RuntimeError, OSError):  # c10d's errors are RuntimeErrors
            self._store, self._num_failures = None, self._num_failures + 1

    def read(self) -> dict[int, Any]:
        """Return the notes of the other ranks, as far as they have left one. Blocks some seconds at most."""
        if not self._others or self.is_given_up:
            return {}
        try:
            store = self._open()
            missing = set(self._others).difference(self._known)
            self._known += [rank for rank in sorted(missing) if store.check([str(rank)])]
            notes = store.multi_get(_keys(self._known)) if self._known else []
            self._num_failures = 0
            return {rank: json.loads(note) for rank, note in zip(self._known, notes, strict=True)}
        except (RuntimeError, OSError, ValueError):
            self._store, self._num_failures = None, self._num_failures + 1
            return {}

    def _open(self) -> Store:
        if self._store is None:
            clone: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            clone.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
            self._store = PrefixStore(self._prefix, clone)
        return self._store


def _keys(ranks: Iterable[int]) -> list[str]:
    return [str(rank) for rank in ranks]


# What the launchers of a job's machines tell each other, in the store in which the machines have met.

_DEFAULT_PORT = 29400  # torch elastic's
_CONNECT_S = 5.0
_ANSWER_S = 2.0


class InterNodeStore:
    """Notes by topic, one of each machine; a machine that cannot be reached any more is left out.

    Args:
        endpoint: ``host:port`` of the store.
        run_id: Of the job, as several may share a store.
    """

    def __init__(self, endpoint: str, run_id: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._place = host.strip("[]") or "localhost", int(port) if port.isdigit() else _DEFAULT_PORT
        self._prefix = f"lockstep/bulletin/{run_id}"
        self._store: Store | None = None
        self._places: dict[str, int] = {}

    def is_host(self) -> bool:
        """Tell whether the store is in this process, and ends with it."""
        with suppress(psutil.Error):
            return any(
                each.status == psutil.CONN_LISTEN and each.laddr.port == self._place[1]
                for each in psutil.Process().net_connections(kind="tcp")
            )
        return False

    def post(self, topic: str, note: Any) -> None:
        """Replace this machine's note on ``topic`` by ``note``, which JSON can hold. Blocks some seconds at most."""

        def write(store: Store) -> None:
            if topic not in self._places:
                self._places[topic] = store.add(f"{topic}/count", 1)
            store.set(f"{topic}/{self._places[topic]}", json.dumps(note))

        self._with_store(write)

    def others(self, topic: str) -> list[Any]:
        """Return the notes of the other machines on ``topic``. Blocks some seconds at most."""
        notes: list[Any] = []

        def read(store: Store) -> None:
            for place in range(1, store.add(f"{topic}/count", 0) + 1):
                key = f"{topic}/{place}"
                if place != self._places.get(topic) and store.check([key]):
                    notes.append(json.loads(store.get(key)))

        self._with_store(read)
        return notes

    def _with_store(self, act: Callable[[Store], None]) -> None:
        """Let ``act`` use the store; if that cannot be reached, it is tried anew the next time."""
        try:
            # torch's client would write pages into the log if nobody listened.
            socket.create_connection(self._place, timeout=_ANSWER_S).close()
            if self._store is None:
                limit = timedelta(seconds=_CONNECT_S)
                opened = TCPStore(*self._place, None, False, timeout=limit, wait_for_workers=False)
                opened.set_timeout(timedelta(seconds=_ANSWER_S))
                self._store = PrefixStore(self._prefix, opened)
            act(self._store)
        except (OSError, RuntimeError):  # c10d's errors are RuntimeErrors
            self._store = None
