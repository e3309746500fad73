"""What ``compare`` measured, as frozen figures: the table, the verdict, the page and the JSON read only these."""

from dataclasses import dataclass
from statistics import fmean, median

from lockstep.study.common import Spread, paired_ratio

SINGLE = "single"
"""The contender that all others are compared with."""


@dataclass(frozen=True)
class Measurement:
    """One contender's steps in one round. Times are per step, in seconds, and means over its ranks and steps.

    Attributes:
        round: Counts from 0.
        place: Which turn of its round this was, from 0; the order rotates.
        num_samples: Samples of all ranks in all steps.
        seconds: Wall time of all steps on the slowest rank.
        step_s: Wall time of a step.
        backward_s: With synchronisation, so what communication cannot hide is within.
        exposed_s: How much longer backward takes with synchronisation than without, medians over the turn's steps;
            measured directly where an engine says so; None where there is nothing to synchronise. Noise may make
            it negative.
        other_s: What is left of the step.
    """

    round: int
    place: int
    num_samples: int
    seconds: float
    step_s: float
    data_wait_s: float
    forward_s: float
    backward_s: float
    exposed_s: float | None
    optimizer_s: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.num_samples / self.seconds

    @property
    def other_s(self) -> float:
        """Seconds of a step that no phase accounts for."""
        return max(0.0, self.step_s - self.data_wait_s - self.forward_s - self.backward_s - self.optimizer_s)


@dataclass(frozen=True)
class StepTime:
    """Where a step goes: seconds, medians over the rounds, each its own: so the parts need not add up to the total."""

    total_s: float
    data_wait_s: float
    forward_s: float
    backward_s: float
    exposed_s: float
    optimizer_s: float
    other_s: float

    @classmethod
    def of(cls, turns: tuple[Measurement, ...]) -> "StepTime":
        """Summarize ``turns``."""
        backward_s = median(turn.backward_s for turn in turns)
        exposed_s = min(max(0.0, median(turn.exposed_s or 0.0 for turn in turns)), backward_s)
        return cls(
            total_s=median(turn.step_s for turn in turns),
            data_wait_s=median(turn.data_wait_s for turn in turns),
            forward_s=median(turn.forward_s for turn in turns),
            backward_s=backward_s - exposed_s,
            exposed_s=exposed_s,
            optimizer_s=median(turn.optimizer_s for turn in turns),
            other_s=median(turn.other_s for turn in turns),
        )

    @property
    def computing_s(self) -> float:
        """Forward, backward and optimizer."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def parts_s(self) -> float:
        """The sum of all parts: what shares are shares of."""
        return self.data_wait_s + self.computing_s + self.exposed_s + self.other_s


@dataclass(frozen=True)
class Memory:
    """Peak memory of one contender, in bytes, measured in processes of its own.

    Attributes:
        peak_bytes: One figure a device; on CPU one a process, which for DataParallel holds all replicas.
    """

    peak_bytes: tuple[int, ...]

    @property
    def highest_bytes(self) -> int:
        """The fullest device's peak."""
        return max(self.peak_bytes)

    @property
    def imbalance(self) -> float | None:
        """The highest over the mean, 1.0 when all devices hold the same; None for a single figure."""
        mean = fmean(self.peak_bytes)
        return self.highest_bytes / mean if len(self.peak_bytes) > 1 and mean else None


@dataclass(frozen=True)
class Candidate:
    """One strategy's figures.

    Attributes:
        strategy: The name that ``lockstep train --strategy`` knows it by.
        num_threads: Threads that one process, or one replica of a process, computes with on CPU.
        turns: One a round.
        losses: Loss of every optimizer step, the warm-up's included.
    """

    strategy: str
    num_threads: int
    turns: tuple[Measurement, ...]
    losses: tuple[float, ...]
    memory: Memory | None

    @property
    def rates(self) -> tuple[float, ...]:
        """Samples per second, one a round."""
        return tuple(turn.rate for turn in self.turns)

    @property
    def rate(self) -> Spread:
        """Samples per second over the rounds."""
        return Spread.of(self.rates)

    @property
    def step(self) -> StepTime:
        """Where a step goes."""
        return StepTime.of(self.turns)

    def speed_over(self, other: "Candidate") -> Spread:
        """Return how many times as fast as ``other`` this is, from the rounds' ratios."""
        return paired_ratio(self.rates, other.rates)


@dataclass(frozen=True)
class LeftOut:
    """A strategy that could not take part, and why."""

    strategy: str
    reason: str


@dataclass(frozen=True)
class Setup:
    """What was compared, and on what.

    Attributes:
        num_cores: What a plain process would use of this machine: torch's own default number of threads.
        busy_cores: How many cores other programs kept busy just before the start.
        num_steps: Steps of each contender in each round.
        num_warmup: Steps of each contender before the first round.
        split_layers: Kinds of layer whose result depends on how a batch is split (batch norm, dropout ...).
    """

    task: str
    command: str
    device: str
    num_devices: int
    num_cores: int
    busy_cores: float
    global_batch_size: int
    num_steps: int
    num_rounds: int
    num_warmup: int
    seed: int
    precision: str
    num_parameters: int
    split_layers: tuple[str, ...]

    @property
    def num_steps_in_all(self) -> int:
        """Optimizer steps of each contender, the warm-up's included."""
        return self.num_warmup + self.num_rounds * self.num_steps


@dataclass(frozen=True)
class Comparison:
    """All figures of one `compare`."""

    setup: Setup
    contenders: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...]

    def find(self, strategy: str) -> Candidate | None:
        """Return the contender named ``strategy``, or None when it took no part."""
        return next((c for c in self.contenders if c.strategy == strategy), None)

    @property
    def single(self) -> Candidate:
        """The contender on one device, which every comparison has."""
        single = self.find(SINGLE)
        assert single is not None
        return single
