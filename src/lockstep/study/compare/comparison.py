"""What ``compare`` measured, as frozen figures; JSON, tables and the HTML page show them as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from statistics import fmean, median

from rich.console import Group, RenderableType
from rich.text import Text
from typing_extensions import override

from lockstep.study import drawing
from lockstep.study.common import MIB, Shown, Spread, Table, grid, paired_ratio
from lockstep.telemetry.cost import Price
from lockstep.telemetry.provenance import Provenance
from lockstep.telemetry.step_times import StepTimes, combine

# The candidate that all others are compared with.
SINGLE = "single"


@dataclass(frozen=True)
class Measurement:
    """One candidate's steps in one round.

    Attributes:
        round: Counts from 0.
        place: Which turn of its round this was, from 0; the order rotates.
        num_samples: Samples of all ranks in all steps.
        seconds: Wall time of all steps on the slowest rank.
        times: Of a step, means over its ranks and steps; the total is that of the slowest rank. ``exposed_s`` is how
            much longer backward takes with synchronisation than without, medians over the turn's steps; measured
            directly where an engine reports it; None where there is nothing to synchronise. Noise may make it negative.
        energy_j: Of all ranks and steps; NaN where a counter cannot be read.
    """

    round: int
    place: int
    num_samples: int
    seconds: float
    times: StepTimes
    energy_j: float = math.nan


def typical_step(turns: Sequence[Measurement]) -> StepTimes:
    """Return the medians over the rounds, each its own: so the parts need not add up to the total."""
    step = combine([turn.times for turn in turns], median)
    if step.exposed_s is None:
        return step
    # A difference of two measurements: noise may make it negative, or more than backward itself.
    synchronised_s = step.part("backward") + step.exposed_s
    exposed_s = min(max(0.0, step.exposed_s), synchronised_s)
    return replace(step, backward_s=synchronised_s - exposed_s, exposed_s=exposed_s)


# The fields of the classes below are the keys of the JSON that `lockstep compare --json` writes: they stay.


@dataclass
class Candidate:
    """One strategy's figures.

    Attributes:
        strategy: The name that ``lockstep train --strategy`` knows it by.
        num_threads: Threads that one process, or one replica of a process, computes with on CPU.
        turns: One a round.
        losses: Loss of every optimizer step, the warm-up's included.
        peak_bytes: Peak memory in processes of its own, by device; on CPU by process, which for DataParallel holds all
            replicas. None if it was not measured.
        single: The candidate on one device; None for itself.
        num_devices: Of the comparison.
        samples_per_s: Over the rounds.
        speed_up: How many times as fast as single, from the rounds' ratios.
        efficiency: Its median over the number of devices.
        step: Where a step goes.
        imbalance: The highest peak over the mean, 1.0 when all devices hold the same; None for a single figure.
        last_loss: Of the last step.
        loss_difference: From single's.
    """

    strategy: str
    num_threads: int
    turns: tuple[Measurement, ...]
    losses: tuple[float, ...]
    peak_bytes: tuple[int, ...] | None
    single: InitVar[Candidate | None]
    num_devices: InitVar[int]
    samples_per_s: Spread = field(init=False)
    speed_up: Spread = field(init=False)
    efficiency: float = field(init=False)
    step: StepTimes = field(init=False)
    imbalance: float | None = field(init=False, default=None)
    last_loss: float = field(init=False)
    loss_difference: float = field(init=False)

    def __post_init__(self, single: Candidate | None, num_devices: int) -> None:
        self.samples_per_s = Spread.of(_rates(self))
        self.speed_up = self.speed_over(single or self)
        self.efficiency = self.speed_up.median / num_devices
        self.step = typical_step(self.turns)
        # A single figure has nothing to be out of balance with.
        if self.peak_bytes and len(self.peak_bytes) > 1 and sum(self.peak_bytes):
            self.imbalance = max(self.peak_bytes) / fmean(self.peak_bytes)
        self.last_loss = self.losses[-1]
        self.loss_difference = self.last_loss - (single or self).losses[-1]

    @property
    def core_wait_share(self) -> float:
        """The part of a step in which it waited for a core."""
        return median(turn.times.part("core_wait") / turn.times.total_s for turn in self.turns)

    def speed_over(self, other: Candidate) -> Spread:
        """Return how many times as fast as ``other`` this is, from the rounds' ratios."""
        return paired_ratio(_rates(self), _rates(other))


def _rates(candidate: Candidate) -> list[float]:
    return [turn.num_samples / turn.seconds for turn in candidate.turns]


@dataclass(frozen=True)
class Setup:
    """What was compared, and on what.

    Attributes:
        num_cores: What a plain process would use of this machine: torch's own default number of threads.
        busy_cores: How many cores other programs kept busy just before the start.
        num_steps: Steps of each candidate in each round.
        num_warmup: Steps of each candidate before the first round.
        single_threads: Of single, the number that was fastest in the warm-up; 0 before.
        split_layers: Kinds of layer whose result depends on how a batch is split (batch norm, dropout ...).
        price: Of a device for an hour, if it is known.
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
    num_parameters: int = 0
    single_threads: int = 0
    split_layers: tuple[str, ...] = ()
    price: Price | None = None

    @property
    def num_steps_in_all(self) -> int:
        """Optimizer steps of each candidate, the warm-up's included."""
        return self.num_warmup + self.num_rounds * self.num_steps


@dataclass(frozen=True)
class Verdict:
    """Which strategy to use here, and why: one or two sentences per entry."""

    use: str
    sentences: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """All figures of one `compare`, single's first, and what they mean.

    Attributes:
        left_out: The ``strategy`` that could not take part, and the ``reason``.
    """

    setup: Setup
    contenders: tuple[Candidate, ...]
    left_out: tuple[dict[str, str], ...]
    verdict: Verdict = Verdict("", ())

    @override
    def __rich__(self) -> RenderableType:
        """Lay out tables, footnotes and verdict for a terminal."""
        notes = (Text(note, style="dim") for note in footnotes(self))
        verdict = Text("\nVerdict", style="bold"), grid(("-", sentence) for sentence in self.verdict.sentences)
        return Group(*(table.rich() for table in tables(self)), *notes, *verdict)

    @property
    def single(self) -> Candidate:
        """The candidate on one device, which every comparison has."""
        return self.contenders[0]

    @property
    def others(self) -> tuple[Candidate, ...]:
        """All but single."""
        return self.contenders[1:]

    def find(self, strategy: str) -> Candidate | None:
        """Return the candidate named ``strategy``, or None when it took no part."""
        return next((candidate for candidate in self.contenders if candidate.strategy == strategy), None)


# The same as tables of at most 80 columns, for a terminal and for the page.


_TIMED = ("data_wait", "forward", "backward", "exposed", "optimizer")


def tables(comparison: Comparison) -> tuple[Table, Table]:
    """Return the figures and the parts of a step; a dash stands where a figure has no meaning."""
    setup = comparison.setup
    title = (
        f"{setup.task}: {setup.num_devices} x {setup.device}, global batch {setup.global_batch_size}, "
        f"{setup.num_rounds} rounds of {setup.num_steps} steps"
    )
    of_speed = ("samples/s", "low - high", "speed-up", "peak MiB", "loss", "vs single")
    of_step = ("step", "data wait", "forward", "backward", "exposed", "optimizer", "other")
    speeds, steps = [], []
    for candidate in comparison.contenders:
        rate, difference = candidate.samples_per_s, candidate.loss_difference
        span = f"{number(rate.low)} - {number(rate.high)}"
        peak = f"{max(candidate.peak_bytes) / MIB:,.0f}" if candidate.peak_bytes else "-"
        times, loss = f"{candidate.speed_up.median:.2f}x", f"{candidate.last_loss:.4f}"
        against = "-" if candidate is comparison.single else f"{difference:+.1e}" if difference else "0"
        speeds.append((candidate.strategy, number(rate.median), span, times, peak, loss, against))
        step = candidate.step
        *before, exposed, update = (_ms(step.part(name)) for name in _TIMED)
        exposed = "-" if step.exposed_s is None else exposed
        after = exposed, update, _ms(step.other_s + step.part("core_wait"))
        steps.append((candidate.strategy, _ms(step.total_s), *before, *after))
    return (
        Table(title, ("strategy", *of_speed), speeds, numbers=of_speed),
        Table("Time per step (ms)", ("strategy", *of_step), steps, numbers=of_step),
    )


_PEAKS = "Peak memory: most bytes that tensors held on the fullest device, in fresh processes."
_PEAKS_ON_CPU = "Peak memory: growth of a fresh process's resident memory, of the fullest; dp has one for all replicas."


def footnotes(comparison: Comparison) -> list[str]:
    """Return how to read the figures, and which strategies were left out."""
    setup = comparison.setup
    notes = [
        "Medians over the rounds; low - high holds the true median with 90% certainty (sign test; from 5 rounds on). "
        "Exposed: communication that backward does not hide (backward with synchronisation less backward without; for "
        "dp, copying weights and gradients).",
        f"The loss is that of step {setup.num_steps_in_all}, on the same samples for all.",
    ]
    if setup.device == "cpu":
        single, *others = (f"{each.strategy} {each.num_threads}" for each in comparison.contenders)
        tried = f"{single} (the faster of 1 and {setup.num_cores})" if setup.num_cores > 1 else single
        notes.append(f"Threads of each process or replica: {', '.join([tried, *others])}.")
    if comparison.single.peak_bytes:
        notes.append(_PEAKS_ON_CPU if setup.device == "cpu" else _PEAKS)
    return notes + ["{strategy} was left out: {reason}".format(**left) for left in comparison.left_out]


def render_page(comparison: Comparison, provenance: Provenance) -> str:
    """Return verdict, plot and tables as one HTML file.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    setup = comparison.setup
    rows = {each.strategy: each.step.parts() for each in comparison.contenders}
    with drawing.drawing_style():
        plot = drawing.stacked_bars("Where the step goes", "milliseconds per step", rows)
    shown = tables(comparison)
    body = drawing.figures_body(plot, shown, footnotes(comparison), setup.command, provenance)
    heading = f"{setup.task} on one device{f' and on {setup.num_devices}' if setup.num_devices > 1 else ''}"
    tab = f"{setup.task} on {setup.num_devices} {setup.device}: lockstep compare"
    return drawing.html_page(tab, heading, shown[0].title, comparison.verdict.sentences, body)


def number(value: float) -> str:
    """Write a rate in at most six characters, with three figures or four."""
    # Bounded, so that the table of speeds fits 80 columns whatever the task.
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= 9.9995 * unit:
            return f"{value / unit:,.{1 if value < 99.95 * unit else 0}f}{letter}"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:,.0f}"
