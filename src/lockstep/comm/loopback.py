"""A key-value store for the ranks of one machine, at a port that no other machine can reach."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

ADDRESS = "127.0.0.1"


def host_on_loopback(timeout_s: float) -> tuple[Store, int]:
    """Start a store in this process; return it and its port. It ends when the last reference to it goes.

    torch's own store would listen at every address of the machine, to anybody who can reach it.
    """
    listener = socket.create_server((ADDRESS, 0), backlog=1024)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        ADDRESS,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def part_of(store: Store, prefix: str) -> Store:
    """Return a view of ``store`` with keys of its own."""
    return PrefixStore(prefix, store)
