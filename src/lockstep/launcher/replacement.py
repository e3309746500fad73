"""A lost rank is replaced while the others go on; see [Note: generations] in comm/generations.py.

What the launcher decides, each time that it polls its ranks:

1. Which of them are lost: ended by a signal, by the watchdog, or by the death of a loader process. Another exception
   is an error of the program, which every rank would make again, so it ends the job unless ``--recover exceptions``. A
   rank that is killed when the training is complete is not lost; rank zero, which may still write files, when its
   program has ended.
2. Whether the others can go on: each must have said that it can, and one of them must hold the state of the run. Else
   all ranks are restarted from the checkpoint, as for any other failure.
3. Who takes the place: a spare that is ready; nobody, if ``--min-devices`` allows one rank fewer: then the last rank
   gets the number; or a new rank.
4. The next generation, which it posts.

Ranks that train alone between exchanges are not to wait for a new one: the next generation is without it, and it is in
a later one when it is ready. So is a rank that the others have waited for longer than they were told to.

Spares are started when all ranks have said that they can go on: of a program that cannot, a spare would be of no use,
and would run it alone.
"""

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from enum import Enum
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from lockstep.base import rank_files
from lockstep.base.accelerator import VISIBLE_DEVICES
from lockstep.base.activity import format_ranks, log
from lockstep.base.rank_files import Arrival, FailureRecord, Generation, RecoveryReport
from lockstep.errors import RESUME_EXIT_CODE
from lockstep.launcher.failure_report import RankExit, how_it_ended, why_lost
from lockstep.launcher.fork_server import OPTIMIZER, ForkServer
from lockstep.launcher.quorum import Machines
from lockstep.launcher.reaper import kill_sessions

# How the errors of a rank begin, ours and torch's, that lost a loader process.
_OF_LOADERS = "LoaderDied: A loader process of rank", "RuntimeError: DataLoader worker (pid"
# A spare's name in the names of its files.
NAME_OF_SPARE = "spare-{}"
# After so many losses in the same step, the same sample or code is to blame.
_MOST_IN_A_STEP = 3


class Part(Enum):
    """What a process of this machine does in the job. Spares are not in it yet."""

    JOINING = "takes a place, and has no state yet"
    WHOLE = "holds the state of the run"
    AWAY = "is in no generation, but will be in a later one"
    COMPLETE = "has completed the training"


@dataclass
class Process:
    """A rank of this machine.

    Attributes:
        rank: Its number.
        part: What it does.
        since_ns: Since when it is away.
    """

    rank: int
    part: Part
    since_ns: int = 0


@dataclass
class RankReplacement:
    """Replaces the lost ranks of this machine.

    Args:
        folder: The launcher's.
        numbers: By process, the ranks of this machine, which begin together.
        most: How many ranks may be replaced.
        start: Starts a process for the place of a rank on this machine, as a part of a running job; with its index
            there, and how many ranks the machine then has.
        start_spare: Starts the spare with this number.
        num_spares: How many spares there are to be.
        exceptions: Whether a rank that raised an exception is replaced.
        min_ranks: The job may go on with fewer ranks, but no fewer than this.
        machines: Of a job with several.
        server: Forks the ranks.

    Attributes:
        number: The generation.
        processes: By PID, the ranks of this machine.
        spares: The spares that run, by number.
    """

    folder: Path
    numbers: InitVar[Mapping[int, int]]
    most: int
    start: Callable[[int, int, int], SubprocessHandler]
    start_spare: Callable[[int], SubprocessHandler]
    num_spares: int = 0
    exceptions: bool = False
    min_ranks: int | None = None
    machines: Machines | None = None
    server: ForkServer | None = None
    number: int = 0
    num_lost: int = 0
    spares: dict[int, SubprocessHandler] = field(default_factory=dict)
    _losses: Counter[int] = field(default_factory=Counter)

    def __post_init__(self, numbers: Mapping[int, int]) -> None:
        self.processes = {pid: Process(rank, Part.WHOLE) for pid, rank in numbers.items()}
        self._reported, self._is_prepared = 0, False
        # When and how ranks were lost since the newest generation that is complete, and the cause.
        self._open: list[tuple[int, str, str]] = []

    @property
    def ranks(self) -> dict[int, int]:
        """By PID, the numbers of the ranks of this machine."""
        return {pid: process.rank for pid, process in self.processes.items()}

    def _in(self, *parts: Part) -> set[int]:
        """Return the processes that have one of these parts."""
        # Not for good: the process may begin another training.
        complete = rank_files.complete_processes(self.folder)
        parts_now = {pid: Part.COMPLETE if pid in complete else process.part for pid, process in self.processes.items()}
        return {pid for pid, part in parts_now.items() if part in parts}

    def why_not(self, lost: list[RankExit], lost_pids: set[int]) -> str | None:
        """Return why the others cannot go on without a restart; an empty text if that need not be said."""
        left, can = self.processes.keys() - lost_pids, rank_files.recovering_processes(self.folder)
        if rank_files.stop_reason(self.folder) is not None or not all(map(self._is_lost, lost)):
            return ""
        # The ranks of another machine hold the state and go on, whatever is left of this one.
        has_others = self.machines is not None and self.machines.have_met()
        if not (self.processes.keys() & can or has_others):
            return ""
        if self.machines is not None and not has_others:
            return "the machines have not come together at a lighthouse"
        if not (left & can or has_others):
            return ""
        if self.num_lost + len(lost) > self.most:
            return "" if self.most == 0 else "no restart is left"
        if not (left & can & self._in(Part.WHOLE) or has_others):
            return "no rank that holds the state of the run is left"
        if missing := {self.processes[pid].rank for pid in left & self._in(Part.WHOLE, Part.COMPLETE) - can}:
            return f"{format_ranks(sorted(missing))} cannot go on in this step"
        if often := [step for step in _steps_of(lost) if self._losses[step] + 1 >= _MOST_IN_A_STEP]:
            return (
                f"{_MOST_IN_A_STEP} times ranks were lost in step {often[0]}: its samples or its code may be to blame"
            )
        return None

    def _is_lost(self, exit: RankExit) -> bool:
        is_repaired = self.exceptions or exit.record.message.startswith(_OF_LOADERS)
        return exit.exit_code < 0 or (exit.exit_code != RESUME_EXIT_CODE and is_repaired)

    def can_replace(self, pids: dict[int, int]) -> bool:
        """Return whether ranks will be replaced if they are killed now; ``pids``: their processes, by rank."""
        exits = [RankExit(rank, -signal.SIGKILL, FailureRecord()) for rank in pids]
        return self.why_not(exits, set(pids.values())) is None

    def is_harmless(self, exit: RankExit, pid: int) -> bool:
        """Return whether a rank was killed when the training was complete.

        Args:
            exit: How it ended.
            pid: Its process.
        """
        complete = self._in(Part.COMPLETE)
        # An exit status of zero would not do: what ranks do that do not train together may be of use to the user.
        is_complete = pid in complete or self.processes.keys() - self._in(Part.AWAY) - {pid} <= complete
        ended = FailureRecord.read_all(self.folder, rank_files.ENDED).get(exit.rank)
        # Of rank zero, the whole program counts: it may write files when the training is complete.
        has_lead = exit.rank == 0 and pid not in self._in(Part.AWAY) and (ended is None or ended.pid != pid)
        return not has_lead and exit.exit_code < 0 and is_complete and len(self.processes) > 1

    @property
    def settled_ranks(self) -> set[int]:
        """The ranks of this machine that hold the state of the run."""
        return {self.processes[pid].rank for pid in self._in(Part.WHOLE, Part.COMPLETE)}

    def replace(self, lost: list[RankExit], pids: dict[int, int]) -> dict[int, SubprocessHandler]:
        """Give the places of lost ranks to others, and post the next generation; return the new processes by rank.

        Args:
            lost: How they ended.
            pids: Their processes, by rank.
        """
        self._open += [(exit.record.time_ns, how_it_ended(exit), why_lost(exit)) for exit in lost]
        times, hows, causes = zip(*self._open, strict=True)
        at_ns, why = min(times), "\n".join(["; ".join(hows), *filter(None, causes)])
        self._losses.update(_steps_of(lost))
        self.num_lost += len(lost)
        kill_sessions(pids.values())  # their loader processes would go on for some seconds
        # By rank, who has that number next; None: still to be found.
        places: dict[int, int | None] = {rank: pid for pid, rank in self.ranks.items() if rank not in pids}
        survivors = format_ranks([*places]) if places else "the other machines"
        go_on = f"{survivors} {'goes' if len(places) == 1 else 'go'} on"
        places |= dict.fromkeys(pids)
        for exit in lost:
            log("\n".join(filter(None, [f"{how_it_ended(exit)}; {go_on}", why_lost(exit)])))
            rank_files.forget_rank(self.folder, exit.rank, pids[exit.rank])
        can = rank_files.recovering_processes(self.folder)
        ready = [number for number, spare in self.spares.items() if spare.proc.pid in can and spare.proc.poll() is None]
        # Ranks in excess of the spares, the last ones first, so that the numbers of few change.
        for exit in sorted(lost, key=lambda exit: -exit.rank)[len(ready) :]:
            if exit.exit_code < 0 and len(places) > (self.min_ranks or math.inf):
                hide_device(exit.rank, len(places))
                places[exit.rank] = places[max(places)]
                del places[max(places)]
        moved = {pid: rank for rank, pid in places.items() if pid is not None and self.processes[pid].rank != rank}
        for pid, rank in moved.items():
            log(f"rank {self.processes[pid].rank} is rank {rank} of {len(places)} from now on")
            self.processes[pid].rank = rank
        for pid in pids.values():
            del self.processes[pid]
        part = Part.AWAY if self.machines is None and Arrival.read_all(self.folder) else Part.JOINING
        new = {}
        for rank in [rank for rank, pid in places.items() if pid is None]:
            is_ready = bool(ready)
            new[rank] = self.spares.pop(ready.pop(0)) if ready else self.start(rank, rank - min(places), len(places))
            self.processes[new[rank].proc.pid] = Process(rank, Part.JOINING if is_ready else part, at_ns)
        if self.machines is not None:
            self.machines.replaced(sorted(self.processes, key=self.ranks.__getitem__), at_ns, why)
        else:
            self._post(at_ns, why)
        return new

    def _post(self, at_ns: int, why: str) -> None:
        """Post the next generation, of the processes that are not away."""
        self.number += 1
        away = self._in(Part.AWAY)
        members = {pid: rank for pid, rank in self.ranks.items() if pid not in away}
        Generation(self.number, members, len(self.ranks), waiting=[*away], lost_at_ns=at_ns, why=why).post(self.folder)

    def _update_members(self) -> None:
        """Take in the processes that are ready, and leave out the ranks that others have waited for in an exchange."""
        arrivals = Arrival.read_all(self.folder)
        came = self._in(Part.AWAY) & arrivals.keys()
        slow, why = set[int](), ""
        ready = {pid: arrivals[pid] for pid in self._in(Part.WHOLE) & arrivals.keys()}
        # The first that has come to the newest exchange. Others that meet in this generation have come, too.
        first = min(ready.values(), key=lambda arrival: (-arrival.number, arrival.time_ns), default=Arrival(0))
        if first.patience_s is not None and time.time_ns() - first.time_ns > first.patience_s * 1e9:
            slow = {pid for pid, item in ready.items() if item.number < first.number and item.generation < self.number}
        if slow:
            names = format_ranks(sorted(self.processes[pid].rank for pid in slow))
            why = f"{names} did not come to an exchange within {first.patience_s:g} s"
            log(f"{why}; the others go on without")
        at_ns = min((self.processes[pid].since_ns for pid in came), default=time.time_ns())
        for pid in came:
            self.processes[pid].part = Part.JOINING
        for pid in slow:
            rank_files.withdraw_recovery(self.folder, pid)  # until it comes
            self.processes[pid] = Process(self.processes[pid].rank, Part.AWAY, time.time_ns())
        if came or slow:
            self._post(at_ns, why)
        away = self._in(Part.AWAY)
        if away and self.processes.keys() - away <= self._in(Part.COMPLETE):
            kill_sessions(away)  # nobody waits for them

    def poll(self) -> None:
        """Print the ranks' report of a generation that is complete; start spares, and notice when one is lost."""
        if self.machines is not None:
            self.number = self.machines.number
            if (newest := Generation.read(self.folder)) is not None and newest.ranks.keys() == self.processes.keys():
                for pid, rank in newest.ranks.items():
                    self.processes[pid].rank = rank  # there may be more or fewer machines
        if (report := RecoveryReport.read(self.folder)) is not None and report.number > self._reported:
            self._reported = report.number
            if report.number == self.number:
                self._open.clear()
                for pid in self._in(Part.JOINING):
                    self.processes[pid].part = Part.WHOLE
            log(report.text)
        if self.machines is None:
            self._update_members()
        if self.server is not None:
            self.server.restart_if_ended()
        for number, spare in list(self.spares.items()):
            if (code := spare.proc.poll()) is not None:
                del self.spares[number]
                name = NAME_OF_SPARE.format(number)
                record = rank_files.read_object(rank_files.rank_file(self.folder, rank_files.FAILURE, name))
                ended = how_it_ended(RankExit(number, code, FailureRecord(**record)))
                log(f"{ended.replace('rank', 'spare', 1)}; it is not replaced")
        if not self._is_prepared and self.processes.keys() <= rank_files.recovering_processes(self.folder):
            self._is_prepared = True
            # The others wait for a new rank, so that it must not import this itself, which takes two seconds.
            if self.server is not None:
                self.server.preload(["torch.distributed", OPTIMIZER])
            self.spares |= {number: self.start_spare(number) for number in range(1, self.num_spares + 1)}


def _steps_of(lost: list[RankExit]) -> set[int]:
    """Return the steps in which ranks were lost, counted from 1, as far as they are known."""
    # Our loops count a step from 0 while it runs; other loops count the steps that are done.
    steps = {exit.record.step if exit.record.step is not None else exit.record.num_steps or None for exit in lost}
    return {step + 1 for step in steps if step is not None}


# Devices of lost ranks.


def hide_device(index: int, num_ranks: int) -> None:
    """Hide the GPU of a lost rank from ranks that start later. The last rank, with its GPU, has that number then."""
    if (devices := visible_devices(num_ranks)) is not None:
        variable, visible = devices
        visible[index] = visible[num_ranks - 1]
        os.environ[variable] = ",".join(visible[: num_ranks - 1] + visible[num_ranks:])


def visible_devices(num_ranks: int) -> tuple[str, list[str]] | None:
    """Return the variable that hides devices from ranks that start later, and the devices that it does not hide."""
    accelerator, num_gpus = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    if accelerator is None or num_gpus < num_ranks or accelerator.type not in VISIBLE_DEVICES:
        return None  # the ranks are on the CPU, or a device cannot be hidden from them
    variable = VISIBLE_DEVICES[accelerator.type]
    return variable, os.environ.get(variable, ",".join(map(str, range(num_gpus)))).split(",")
