"""In ``fit``: compares the ranks' steps now and then, and tells of a rank that keeps the others waiting in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch

from lockstep import progress
from lockstep.comm.collectives import Group, all_gather_object
from lockstep.telemetry.pace import Teller, ends_window, is_looked_at
from lockstep.telemetry.stragglers import Pace, StepTimes, Straggler, pace_of
from lockstep.train.log import Log
from lockstep.train.step_record import StepRecord
from lockstep.train.stopwatch import seconds_between


class SlowRanks:
    """Looks at some steps of this rank, and then exchanges with the others what they took.

    Args:
        group: The ranks that train together; None: only this process, and nothing is done.
        device: Of this rank.
        say: Called on every rank with a line about a slow one.
        log: Where it is written, too.
    """

    def __init__(self, group: Group | None, device: torch.device, say: Callable[[str], None], log: Log | None) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._device = device
        self._say, self._log = say, log
        self._step = 0
        self._teller = Teller(self._tell)
        self._number = 0
        self._records: list[tuple[StepRecord, list[tuple[object, object]]]] = []
        self._launcher_asked, progress.now.wants_pace = progress.now.wants_pace, False

    def close(self) -> None:
        """Leave the comparison to the launcher again, if it asked for it before."""
        progress.now.wants_pace, progress.now.waits = self._launcher_asked, None

    def before_step(self) -> None:
        """Have the engine say when this rank's own work is done, if the step is one that is looked at."""
        progress.now.waits = [] if self._group is not None and is_looked_at(self._number) else None

    def after_step(self, record: StepRecord) -> None:
        """Take what the step took. Collective after some steps, the same on every rank: every rank of the group.

        Blocks then until the device has come to the end of the step.
        """
        waits, progress.now.waits = progress.now.waits, None
        if waits:  # engines that do not say what they wait for cannot be compared
            self._records.append((record, waits))
        if self._group is not None and ends_window(self._number):
            self._step = record.step + 1
            self._compare(self._group)
        self._number += 1

    def _tell(self, text: str, straggler: Straggler) -> None:
        self._say(text)
        if self._log is not None:
            self._log.slow(self._step, straggler)

    def _compare(self, group: Group) -> None:
        records, self._records = self._records, []
        mine = asdict(pace_of([_times_of(*each) for each in records])) if len(records) > 1 else None
        paces = all_gather_object(mine, group=group, device=self._device)
        if all(paces):
            self._teller.judge({rank: Pace(**pace) for rank, pace in enumerate(paces)})


def _times_of(record: StepRecord, waits: list[tuple[object, object]]) -> StepTimes:
    times, waited = record.times, record.waited
    exposed_s = sum(seconds_between(start, end) for start, end in waits)
    backward_s = times.backward_s - waited.backward_s
    in_forward_s = max(0.0, exposed_s - backward_s)  # of an engine that exchanges in forward, too
    own = {
        "loader": times.data_wait_s - waited.data_wait_s,
        "forward": max(0.0, times.forward_s - waited.forward_s - in_forward_s),
        "backward": max(0.0, backward_s - exposed_s),
        "optimizer": times.optimizer_s - waited.optimizer_s,
    }
    return StepTimes(**own, waits=times.total_s - sum(own.values()))
