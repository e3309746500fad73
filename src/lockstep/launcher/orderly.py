"""The launcher's first answer to a signal: it asks the ranks to stop in order, if all of them can."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher.api import LaunchConfig

from lockstep.errors import RESUME_EXIT_CODE, Stopped
from lockstep.launcher import requests
from lockstep.telemetry.live.region import say_at_once

LIMIT = "LOCKSTEP_STOP_TIMEOUT_S"
"""The environment variable that says how many seconds ranks may take to stop in order."""
DEFAULT_LIMIT_S = 120.0

_ELASTICS_OWN = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_LEFT_TO_ELASTIC = "SIGHUP,SIGQUIT"


def stop_limit_s() -> float:
    """Return how long ranks may take to stop in order."""
    return float(os.environ.get(LIMIT, DEFAULT_LIMIT_S))


class OrderlyStop:
    """Asks the ranks at the first signal; ends them, as torch elastic does, at the second or when the time is up.

    Args:
        folder: Of the run.
        num_ranks: On this machine, to begin with.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._folder = folder
        self._num_signals = 0
        self._asked_for: signal.Signals | None = None
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def handling(self, config: LaunchConfig) -> Iterator[LaunchConfig]:
        """Take the signals over, and give what makes torch elastic leave them alone. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread() or config.signals_to_handle != _ELASTICS_OWN:
            yield config
            return
        before = {number: signal.signal(number, self._on_signal) for number in requests.SIGNALS}
        try:
            yield dataclasses.replace(config, signals_to_handle=_LEFT_TO_ELASTIC)
        finally:
            if self._timer is not None:
                self._timer.cancel()  # or it would signal this process, which may live on
                self._timer.join(1.0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def outcome(self, exit_codes: set[int]) -> Stopped | None:
        """Return what to raise after the ranks have ended with ``exit_codes``; None if they did not stop in order."""
        said = requests.reports(self._folder)
        if self._asked_for is None and exit_codes != {RESUME_EXIT_CODE}:
            return None  # ranks of other machines may have been asked
        if not said or not exit_codes <= {0, RESUME_EXIT_CODE}:
            return None
        return Stopped(said[0], signal=self._asked_for or signal.SIGTERM, saved=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        sigval = signal.Signals(number)
        self._num_signals += sigval != signal.SIGUSR1  # which comes ahead of SIGTERM
        if self._asked_for is None and self._can_stop():
            self._asked_for = sigval
            if sigval is signal.SIGINT:
                say_at_once(requests.FIRST_CTRL_C)
            requests.ask(self._folder, sigval.name)
            self._timer = threading.Timer(stop_limit_s(), self._give_up, [sigval])
            self._timer.daemon = True
            self._timer.start()
        elif self._asked_for is None or self._num_signals > 1:
            raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)

    def _can_stop(self) -> bool:
        """Tell whether all ranks of this machine stop in order if they are asked to, or have done so already."""
        told = requests.num_announced(self._folder), len(requests.reports(self._folder))
        return self.num_ranks in told

    def _give_up(self, sigval: signal.Signals) -> None:
        self._num_signals += 2
        os.kill(os.getpid(), sigval)
