"""Which rank is persistently slow, in which phase, and by how much.

[Note: own work, waiting, wire]
All ranks leave a reduction at the same time, so between two of them each has the same time; what differs is how it
is divided. A rank's *own work* of a step ends when its last bucket is ready, which is stamped before that bucket's
collective starts; what follows until the gradients are there is no work of its own. The rank that comes last waits
for the wire only, so the shortest such wait of all ranks is the *wire* time, and what a rank waits longer it waits
for its *peers*. No clocks are compared, so none need to agree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low, quantiles
from typing import Any

PHASES = ("loader", "forward", "backward", "optimizer")

# A rank is called slow if it loses at least this part of a step ...
_MIN_SHARE = 0.1
# ... and at least this long.
_MIN_LOST_S = 0.001


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one rank's step: what it worked on by phase, and what it waited for others and the wire."""

    loader: float
    forward: float
    backward: float
    optimizer: float
    waits: float

    @property
    def own_s(self) -> float:
        """Seconds of its own work."""
        return self.loader + self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class Pace:
    """The steps of one rank in a window: medians by phase, and the quartiles of its own work; in seconds."""

    phases: Mapping[str, float]
    waits_s: float
    low_s: float
    high_s: float

    @property
    def own_s(self) -> float:
        """Seconds of own work in a step."""
        return sum(self.phases.values())


@dataclass(frozen=True)
class Straggler:
    """A rank that keeps the others waiting in every step; times in seconds a step."""

    rank: int
    phase: str
    lost_s: float
    took_s: float
    usual_s: float
    step_s: float


def pace_of(steps: Sequence[StepTimes]) -> Pace:
    """Return the pace of at least two steps."""
    # Medians and quartiles: single steps that a checkpoint or a page fault held up are no pace.
    low_s, _, high_s = quantiles((step.own_s for step in steps), n=4, method="inclusive")
    phases = {phase: median(getattr(step, phase) for step in steps) for phase in PHASES}
    return Pace(phases, median(step.waits for step in steps), low_s, high_s)


def find_stragglers(paces: Mapping[int, Pace]) -> list[Straggler]:
    """Return the ranks that are persistently slower than most, the slowest first."""
    if len(paces) < 2:
        return []
    # The lower median: of two ranks the quicker one is the usual one.
    usual = {phase: median_low(pace.phases[phase] for pace in paces.values()) for phase in PHASES}
    usual_own_s = median_low(pace.own_s for pace in paces.values())
    usual_high_s = median_low(pace.high_s for pace in paces.values())
    step_s = max(pace.own_s + pace.waits_s for pace in paces.values())
    found = []
    for rank, pace in paces.items():
        lost_s = pace.own_s - usual_own_s
        # Persistently slower: a good step of its takes longer than a bad one of the others.
        if lost_s >= max(_MIN_LOST_S, _MIN_SHARE * step_s) and pace.low_s > usual_high_s:
            phase = max(PHASES, key=lambda phase: pace.phases[phase] - usual[phase])
            found.append(Straggler(rank, phase, lost_s, pace.phases[phase], usual[phase], step_s))
    return sorted(found, key=lambda straggler: -straggler.lost_s)


def describe(straggler: Straggler) -> str:
    """Return it as one line."""
    return (
        f"rank {straggler.rank} is slow: it loses {_ms(straggler.lost_s)} in each step of {_ms(straggler.step_s)}, "
        f"in {straggler.phase} ({_ms(straggler.took_s)}, usual is {_ms(straggler.usual_s)}); the others wait for it"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"


# --- which steps are measured, and who reports that a rank is slow ----------------------------------------------------

# How many steps are taken together.
WINDOW = 10

# The first steps allocate, compile and find out in which order gradients come.
_WARM_UP = 2
_PERIOD = 50


def is_looked_at(step: int) -> bool:
    """Return whether a step, counted from 0, is one of a window."""
    return step in _window(step)


def ends_window(step: int) -> bool:
    """Return whether a step, counted from 0, is the last of a window."""
    return step == _window(step)[-1]


def _window(step: int) -> range:
    """Return the first window that ends with ``step`` or later: two at first, then one in fifty steps."""
    soon = (_WARM_UP + WINDOW - 1, _WARM_UP + 2 * WINDOW - 1)
    end = next((end for end in soon if step <= end), step // _PERIOD * _PERIOD + _PERIOD - 1)
    return range(end - WINDOW + 1, end + 1)


class StragglerReporter:
    """Reports which ranks are slow, and again only if that gets worse or comes to lie elsewhere."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reported: dict[int, tuple[str, float]] = {}

    def judge(self, paces: dict[int, Pace]) -> None:
        """Compare the paces of all ranks in one window."""
        for straggler in find_stragglers(paces):
            phase, lost_s = self._reported.get(straggler.rank, ("", 0.0))
            if straggler.phase != phase or straggler.lost_s > 2 * lost_s:
                self._reported[straggler.rank] = straggler.phase, straggler.lost_s
                self._report(describe(straggler))


class PaceKeeper:
    """In the launcher: compares the paces that are in the heartbeats of the ranks."""

    def __init__(self, on_slow: Callable[[str], None]) -> None:
        self._reporter = StragglerReporter(on_slow)
        self._windows: dict[int, dict[int, Pace]] = {}
        self._judged = -1

    def take(self, rank: int, note: dict[str, Any] | None) -> None:
        """Take the pace of a rank, if there is one in its heartbeat; see `note_of`."""
        if note is not None and note["window"] > self._judged:
            self._windows.setdefault(note["window"], {})[rank] = Pace(**note["pace"])

    def judge(self, num_ranks: int) -> None:
        """Report which ranks are slow if the paces of all ``num_ranks`` in one window are there."""
        for window in sorted(self._windows):
            if len(self._windows[window]) >= num_ranks > 1:
                self._reporter.judge(self._windows[window])
                self._judged = window
        self._windows = {window: paces for window, paces in self._windows.items() if window > self._judged}


def note_of(window: int, pace: Pace) -> dict[str, Any]:
    """Return a pace as what a heartbeat can hold; ``window`` is the number of its last step."""
    return {"window": window, "pace": asdict(pace)}
