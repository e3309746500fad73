"""What the launchers of a job's machines tell each other, in the store in which the machines have met."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_DEFAULT_PORT = 29400  # torch elastic's
_CONNECT_S = 5.0
_ANSWER_S = 2.0


class Bulletin:
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
