"""Do something that may never end, and go on when its time is up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Outcome(Generic[T]):
    """What came of it: a value, an error, or neither if the time was up."""

    value: T | None = None
    error: BaseException | None = None
    is_over: bool = False


def in_time(seconds: float, action: Callable[[], T]) -> Outcome[T]:
    """Return what ``action`` does within ``seconds``.

    Blocks at most so long. What is not over then goes on in a thread that ends with the process: a name server or a
    user's function cannot be stopped from outside.
    """
    outcome: Outcome[T] = Outcome()

    def run() -> None:
        try:
            outcome.value = action()
        except BaseException as error:  # also SystemExit: a user's file may call exit()
            outcome.error = error
        outcome.is_over = True

    thread = threading.Thread(target=run, name="lockstep-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome if outcome.is_over else Outcome()
