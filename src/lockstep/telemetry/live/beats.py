"""A thread beside training that does something about once a second, and never harms what it watches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

PERIOD_S = 1.0
_FIRST_S = 0.3
"""Until the first beat: a run may be short."""
_JOIN_S = 8.0


class Beats:
    """Calls ``beat`` from a thread of its own until it is stopped.

    Args:
        beat: What is done. If it raises, it is not called again.
        period_s: Between two calls.
    """

    def __init__(self, beat: Callable[[], None], period_s: float = PERIOD_S) -> None:
        self._beat, self._period_s = beat, period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-live", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Have it end; return whether it has. Blocks some seconds at most."""
        self._over.set()
        self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s = _FIRST_S
        while not self._over.wait(wait_s):
            wait_s = self._period_s
            if not guarded(self._beat):
                return


def guarded(act: Callable[[], None]) -> bool:
    """Do what is not worth the end of a run; say so and return False if it raises."""
    try:
        act()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        what = f"lockstep: this run is not watched any more: {type(error).__name__}: {first}"
        print(what, file=sys.stderr, flush=True)
        return False
    return True
