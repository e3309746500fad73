"""A lost rank is replaced while the others go on; see [Note: generations] in comm/generations.py.

What the launcher decides, each time that it polls its ranks:

1. Which of them are lost: ended by a signal, or ended by the watchdog. An exception is an error of the program, which
   every rank would make again, so it ends the job unless ``--recover exceptions``.
2. Whether the others can go on: each must have said that it can, and one of them must hold the state of the run. Else
   all ranks are restarted from the checkpoint, as for any other failure.
3. Who takes the place: a spare, a new rank, or nobody (``--min-devices``).
4. The next generation, which it posts.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from lockstep import run_folder
from lockstep.activity import format_ranks
from lockstep.launcher.failure_report import RankExit, how_it_ended
from lockstep.launcher.quorum import Machines
from lockstep.launcher.reaper import kill_sessions
from lockstep.run_folder import Generation, RecoveryReport

# After so many losses in the same step, the same sample or code is to blame.
_MOST_IN_A_STEP = 3


@dataclass
class Recovery:
    """Replaces the lost ranks of this machine.

    Args:
        folder: Of the run.
        start: Starts a process for the place of a rank on this machine, as a part of a running job.
        exits_of: Returns how processes ended, by rank.
        most: How many ranks may be replaced.
        exceptions: Whether a rank that raised an exception is replaced.
        min_ranks: The job may go on with fewer ranks, but no fewer than this.
        machines: Of a job with several.

    Attributes:
        number: The generation.
        ranks: By process, the ranks of this machine.
    """

    folder: Path
    ranks: dict[int, int]
    start: Callable[[int], SubprocessHandler]
    most: int
    exceptions: bool = False
    min_ranks: int | None = None
    machines: Machines | None = None
    number: int = 0
    num_lost: int = 0
    _whole: set[int] = field(default_factory=set)
    _losses: Counter[int | None] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._whole = set(self.ranks)
        self._reported = 0

    def why_not(self, lost: list[RankExit], lost_pids: set[int]) -> str | None:
        """Return why the others cannot go on without a restart; an empty text if that need not be said."""
        left = set(self.ranks) - lost_pids
        can = run_folder.recovering_processes(self.folder)
        if run_folder.stop_reason(self.folder) is not None or not set(self.ranks) & can:
            return ""
        if any(exit.exit_code > 0 for exit in lost) and not self.exceptions:
            return ""
        has_others = self.machines is not None and self.machines.have_met()
        if self.machines is not None and not has_others:
            return "the machines have not come together at a lighthouse"
        if not (left & can or has_others):
            return ""
        if self.num_lost + len(lost) > self.most:
            return "" if self.most == 0 else "no restart is left"
        if not (left & can & self._whole or has_others):
            return "no rank that holds the state of the run is left"
        if missing := {self.ranks[pid] for pid in left & self._whole - can}:
            return f"{format_ranks(sorted(missing))} cannot go on in this step"
        for exit in lost:
            if self._losses[exit.record.step] + 1 >= _MOST_IN_A_STEP and exit.record.step is not None:
                step = exit.record.step + 1
                return f"{_MOST_IN_A_STEP} ranks were lost in step {step}: its samples or its code may be to blame"
        return None

    def replace(self, lost: list[RankExit], pids: dict[int, int]) -> dict[int, SubprocessHandler]:
        """Give the places of lost ranks to others, and post the next generation; return the new processes by rank.

        Args:
            lost: How they ended.
            pids: Their processes, by rank.
        """
        at_ns, why = min(exit.record.time_ns for exit in lost), "; ".join(map(how_it_ended, lost))
        for exit in lost:
            self._losses[exit.record.step] += 1
        self.num_lost += len(lost)
        kill_sessions(pids.values())  # their loader processes would go on for some seconds
        left = [rank for pid, rank in self.ranks.items() if pid not in pids.values()]
        go_on = f"{format_ranks(left)} {'goes' if len(left) == 1 else 'go'} on" if left else "the other machines go on"
        for exit in lost:
            print(f"lockstep: {how_it_ended(exit)}; {go_on}", file=sys.stderr, flush=True)
            run_folder.forget_rank(self.folder, exit.rank, pids[exit.rank])
        new = {exit.rank: self.start(exit.rank) for exit in lost}
        self.ranks = {pid: rank for pid, rank in self.ranks.items() if rank not in new}
        self.ranks |= {process.proc.pid: rank for rank, process in new.items()}
        self._whole -= set(pids.values())
        if self.machines is not None:
            self.machines.replaced(sorted(self.ranks, key=self.ranks.__getitem__), at_ns, why)
            return new
        self.number += 1
        Generation(self.number, self.ranks, len(self.ranks), lost_at_ns=at_ns, why=why).post(self.folder)
        return new

    def poll(self) -> None:
        """Print the ranks' report of a generation that is complete."""
        if self.machines is not None:
            self.number = self.machines.number
        report = RecoveryReport.read(self.folder)
        if report is not None and report.number > self._reported:
            self._reported = report.number
            self._whole |= set(self.ranks) if report.number == self.number else set()
            print(f"lockstep: {report.text}", file=sys.stderr, flush=True)
