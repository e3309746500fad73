"""What the launcher does about ranks that wait for each other: tell, end the job, or start the ranks again."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from typing import Literal

from torch.distributed.launcher.api import LaunchConfig

from lockstep.comm.bulletin import Bulletin
from lockstep.launcher.ends import leave_failure
from lockstep.launcher.guard import Guard
from lockstep.telemetry.resources import Resources
from lockstep.telemetry.verdict import Verdict
from lockstep.telemetry.watchdog import Watchdog


@dataclass(frozen=True)
class Watch:
    """What is done about ranks that wait for each other.

    Attributes:
        patience_s: How long they may wait for one that does nothing; not watched if zero.
        action: ``end`` the job, also if a rank that computes keeps the others waiting five times as long; end it only
            if ``certain`` that nothing moves, and warn else; or ``warn`` only.
        tells_slow: Whether it is said if one rank is persistently slower than the others.
    """

    patience_s: float = 60.0
    action: Literal["end", "certain", "warn"] = "certain"
    tells_slow: bool = True


DEFAULT_WATCH = Watch()


def watch_of(patience_s: float | None, action: str | None) -> Watch:
    """Return what the user asked for; who sets a patience is taken to mean it for ranks that compute as well."""
    if patience_s is None and action is None:
        return DEFAULT_WATCH
    return Watch(DEFAULT_WATCH.patience_s if patience_s is None else patience_s, "warn" if action == "warn" else "end")


class Response:
    """Answers the watchdog's reports for one run.

    Attributes:
        hangs: The report for which the job was ended, if it was.
        bulletin: Where the launchers of several machines tell each other what they see.
    """

    def __init__(self, watch: Watch, config: LaunchConfig, guard: Guard) -> None:
        self.hangs: list[str] = []
        self._watch, self._config, self._guard = watch, config, guard
        self._num_restarts_left = 0
        # Other backends meet in something else than a store of torch's.
        has_store = config.max_nodes > 1 and config.rdzv_backend in ("static", "c10d")
        self.bulletin = Bulletin(config.rdzv_endpoint, config.run_id) if has_store else None

    def started(self, num_restarts_left: int) -> None:
        """Take note that ranks have been started, and how often that may be done again after a failure."""
        self._num_restarts_left = num_restarts_left

    def watchdog(self, resources: Resources) -> Watchdog:
        """Return what watches the ranks, to be entered while they run."""
        config, watch = self._config, self._watch
        return Watchdog(
            self._guard.run_dir,
            watch.patience_s,
            is_strict=watch.action == "end",
            num_nodes=config.max_nodes,
            bulletin=self.bulletin,
            resources=resources,
            on_report=self._answer,
            on_slow=_say if watch.tells_slow else _say_nothing,
        )

    def _answer(self, text: str, verdict: Verdict, awaited: dict[int, int]) -> bool:
        """Act on a report; return whether to go on watching."""
        if self._watch.action == "warn":
            _say(f"{text}\nThe job goes on, as --watchdog-action warn says.")
            return True
        if verdict is not Verdict.HANGS:
            _say(f"{text}\nThe job goes on for now; it ends if this lasts and nothing moves.")
            return True
        if self._num_restarts_left and awaited:
            _say(f"{text}\nThe ranks are started again.")
            for rank, pid in awaited.items():
                leave_failure(self._guard.run_dir, rank, "JobHangs: it kept the others waiting; the report is above")
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            return True
        self.hangs.append(text)
        self._guard.kill_ranks()
        return False


def _say_nothing(text: str) -> None:
    """Take ``text`` and keep it."""


def _say(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
