"""The figures of a machine for several that want them at about the same time: asked for once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

_FRESH_S = 1.5


class SharedSample:
    """Calls ``sample`` at most so often; between, returns what it said last. Safe to use from several threads.

    Args:
        sample: What takes its time.
        fresh_s: For so long.
    """

    def __init__(self, sample: Callable[[], dict[str, Any]], fresh_s: float = _FRESH_S) -> None:
        self._sample, self._fresh_s = sample, fresh_s
        self._lock = threading.Lock()
        self._last: dict[str, Any] = {}
        self._at_s = float("-inf")

    def __call__(self) -> dict[str, Any]:
        """Return the figures as a line."""
        with self._lock:
            if time.monotonic() - self._at_s >= self._fresh_s:
                self._last = self._sample()
                self._at_s = time.monotonic()
            return self._last
