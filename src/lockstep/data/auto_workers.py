"""How many loader processes pay, found by trying in the training itself.

[Note: workers auto]
The first steps of a run load in the training process. If they hardly wait for data, that is the answer. Otherwise one
loader process is tried, then 2, 4, 8 and so on, each for about half a second of steps once its buffer has settled, for
as long as that helps; then twice the number of batches ahead. What was shortest per step wins; of what comes within a
few percent of it, the smallest. Every step trains as it would in any case: which samples it has, and their random
numbers, depend on its position only, and a loader can begin at any step. What a number costs in cores that the model
would use is in the figures too, which it would not be if loading were measured by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockstep.env import usable_cores

_HARDLY = 0.03
"""Loading is fast enough if a step waits for data no longer than this part of it."""

_ALIKE = 1.05
"""Times that differ by no more than this factor are the same."""

_WINDOW_S = 0.5
_FIRST_LOOK = 4
_NUM_UNTIMED = 2
"""Steps in which memory is allocated and loader processes start; then come those whose data was loaded meanwhile."""

Agree = Callable[[list[float]], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Loaders:
    """So many loader processes, each so many batches ahead."""

    workers: int
    ahead: int = 2


@dataclass(frozen=True)
class Trial:
    """What steps took with some loader processes.

    Args:
        loaders: Which.
        step_s: Mean duration of a step.
        wait_s: How much of it was waiting for data.
    """

    loaders: Loaders
    step_s: float
    wait_s: float

    @property
    def hardly_waits(self) -> bool:
        """Whether more of them could not help."""
        return self.wait_s < _HARDLY * self.step_s


@dataclass
class WorkerSearch:
    """Says what to try next, until it is found; knows of no clock.

    Args:
        most: At most so many loader processes.
    """

    most: int
    current: Loaders = field(default_factory=lambda: Loaders(0))
    is_done: bool = False
    trials: list[Trial] = field(default_factory=list)

    def record(self, step_s: float, wait_s: float) -> None:
        """Take what steps took with the current loaders; set those to go on with."""
        self.trials.append(Trial(self.current, step_s, wait_s))
        candidate = None if self.trials[-1].hardly_waits else self._next()
        if candidate is None:
            shortest = min(trial.step_s for trial in self.trials)
            good = [trial.loaders for trial in self.trials if trial.step_s <= _ALIKE * shortest]
            candidate = min(good, key=lambda loaders: (loaders.workers, loaders.ahead))
            self.is_done = True
        self.current = candidate

    def _next(self) -> Loaders | None:
        workers, ahead = self.current.workers, self.current.ahead
        if ahead > Loaders(0).ahead:
            return None
        times = [trial.step_s for trial in self.trials]
        helped = len(times) < 3 or min(times[-2:]) * _ALIKE < min(times[:-2])  # one process may help only if two do
        if helped and workers < self.most:
            return Loaders(min(max(1, 2 * workers), self.most))
        best = min(self.trials, key=lambda trial: trial.step_s)
        return Loaders(best.loaders.workers, 2 * ahead) if best.loaders.workers else None

    def describe(self) -> str:
        """Return in one line what was found."""
        chosen = next(trial for trial in self.trials if trial.loaders == self.current)
        workers, ahead = self.current.workers, self.current.ahead
        what = f"{workers} loader process{'es' * (workers != 1)}" + f" with {ahead} batches ahead each" * (workers > 0)
        took = f"{1e3 * chosen.step_s:.3g} ms a step, {chosen.wait_s / chosen.step_s:.0%} of it waiting for data"
        others = [
            f"{trial.loaders.workers}{f' with {trial.loaders.ahead} ahead' * (trial.loaders.ahead > 2)}: "
            f"{1e3 * trial.step_s:.3g} ms"
            for trial in self.trials
            if trial is not chosen
        ]
        return f"workers auto: {what}, {took}" + f"; tried {', '.join(others)}" * bool(others)


class WorkerTuner:
    """Times the steps for a `WorkerSearch`.

    Args:
        search: Decides.
        now: The time in seconds, once the devices have come to the end of what they were given.
        agree: Given this rank's figures, returns those of all ranks, collectively; None if there are no others.
    """

    def __init__(self, search: WorkerSearch, now: Callable[[], float], agree: Agree | None) -> None:
        self.search, self._now, self._agree = search, now, agree
        self._num_steps = 0
        self._began_at = self._elapsed_s = self._waited_s = 0.0

    def begin_step(self) -> None:
        """Start the clock. Blocks until the devices have nothing left to do."""
        self._began_at = self._now()

    def waited(self, seconds: float) -> None:
        """Take how long data was waited for."""
        self._waited_s += seconds

    def end_step(self) -> bool:
        """Note that the step is over; return whether the loaders are to be changed before the next.

        Collective after some of the steps if there are other ranks. Blocks until the devices have nothing left to do.
        """
        elapsed_s = self._now() - self._began_at
        self._num_steps += 1
        loaders = self.search.current
        num_measured = self._num_steps - _NUM_UNTIMED - loaders.workers * loaders.ahead
        if num_measured <= 0:
            self._elapsed_s = self._waited_s = 0.0
            return False
        self._elapsed_s += elapsed_s
        if num_measured < _FIRST_LOOK or num_measured & (num_measured - 1):  # looks after 4, 8, 16, ... steps
            return False
        figures = [self._elapsed_s, self._waited_s]
        ranks = [figures] if self._agree is None else self._agree(figures)
        elapsed_s, waited_s = (max(column) for column in zip(*ranks, strict=True))
        if elapsed_s < _WINDOW_S:
            return False
        self.search.record(elapsed_s / num_measured, waited_s / num_measured)
        self._num_steps = 0
        return self.search.current != loaders


def search_for(workers: int | Literal["auto"], num_processes: int) -> WorkerSearch | None:
    """Return what looks for the number of loader processes, unless it is given; ``num_processes`` share the cores."""
    return WorkerSearch(num_cores(num_processes)) if workers == "auto" else None


def num_cores(num_processes: int) -> int:
    """Return this process's share of the cores that it may use, if ``num_processes`` share them; at least 1."""
    return max(1, usable_cores() // num_processes)
