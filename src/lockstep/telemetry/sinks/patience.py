"""Opening a sink whose service may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from lockstep.errors import ConfigurationError
from lockstep.telemetry.sinks.facts import MetricsSink

PATIENCE_S = 40.0
"""How long all services together may take to begin with a run; less than ranks wait for each other."""


def opened_within(seconds: float, make: Callable[[], MetricsSink], target: str, advice: str) -> MetricsSink:
    """Return what ``make`` returns. Blocks for ``seconds`` at most; a sink that is made later is closed at once.

    Args:
        seconds: How long it may take.
        make: Called in a thread of its own.
        target: What is opened, for the error.
        advice: What to do if it is not, likewise.

    Raises:
        ConfigurationError: It takes longer.
        Exception: What ``make`` raises.
    """
    made: list[MetricsSink] = []
    errors: list[Exception] = []
    lock, is_done, is_late = threading.Lock(), threading.Event(), threading.Event()

    def work() -> None:
        try:
            sink = make()
        except Exception as error:
            errors.append(error)
        else:
            with lock:
                made.append(sink)
            if is_late.is_set():
                with suppress(Exception):
                    sink.close()
        is_done.set()

    threading.Thread(target=work, name="lockstep-opening", daemon=True).start()
    is_done.wait(seconds)
    with lock:
        if not made and not errors:
            is_late.set()
            raise ConfigurationError(f"{target} has not answered for {seconds:.3g} s.\n{advice}")
    if errors:
        raise errors[0]
    return made[0]
