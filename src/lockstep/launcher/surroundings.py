"""What torch elastic's agent does to the process that it runs in, undone or kept away."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.launcher.guard import Guard

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def signals_restored() -> Iterator[None]:
    """Undo the handlers that the agent installs and never removes."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may, and so the agent does not.
        return
    before = {number: signal.getsignal(number) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def second_signal_kills(guard: Guard) -> Iterator[None]:
    """Kill the ranks at the second signal: after the first, the agent waits long for them to end by themselves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    def watch() -> None:
        count = 0
        while number := theirs.recv(1):
            count += number[0] in _STOPPING
            if count > 1:
                guard.kill_ranks()

    with ours, theirs:
        # The interpreter writes the number of each signal there, beside calling its handler.
        before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=watch, name="lockstep-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            ours.shutdown(socket.SHUT_WR)
            thread.join()


@contextmanager
def environment_restored() -> Iterator[None]:
    """Undo all changes to ``os.environ`` made inside."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def elastic_quiet() -> Iterator[None]:
    """Keep the agent's warnings to itself unless the user asked for its log: our report replaces them."""
    if "LOGLEVEL" in os.environ or "TORCH_LOGS" in os.environ:
        yield
        return
    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")
    names = [name for name in list(logging.Logger.manager.loggerDict) if name.startswith(prefixes)]
    # This one is made later, with a level of its own; so loggers are disabled here, not lowered.
    loggers = [logging.getLogger(name) for name in (*names, "torchelastic-events-null")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
