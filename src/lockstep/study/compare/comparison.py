"""What ``compare`` measured, as frozen figures, as JSON, tables and an HTML page; and in words what they mean."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import InitVar, asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lockstep.study import drawing
from lockstep.study.common import FEWEST_ROUNDS, MIB, Shown, Spread, Table, grid, paired_ratio
from lockstep.telemetry.cost import Price, format_energy, more_than_alone
from lockstep.telemetry.provenance import Provenance
from lockstep.telemetry.step_times import StepTimes, combine

# The candidate that all others are compared with.
SINGLE = "single"

LOCAL_BN = "ddp-local-bn"


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
        strategy: The name that ``lockstep train --strategy`` knows it by; or `LOCAL_BN`.
        num_threads: Threads that one process, or one replica of a process, computes with on CPU.
        turns: One a round.
        losses: Loss of every optimizer step, the warm-up's included.
        peak_bytes: Peak memory in processes of its own, by device; on CPU by process, which for DataParallel holds all
            replicas. None if it was not measured.
        single: The candidate on one device; None for itself.
        num_devices: Of the comparison.
        samples_per_s: The median of the rounds, and its range.
        speed_up: The median of ``samples_per_s`` over that of single, with the range of `speed_over`.
        efficiency: The speed-up over the number of devices.
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

    def speed_over(self, other: Candidate) -> Spread:
        """Return the samples/s of this one over those of ``other``, as shown, with the range of the rounds' own ratios.

        The two turns of a round have the same load of the machine. The ratio of the medians need not lie within that
        range, which then reaches as far.
        """
        ratio = round(self.samples_per_s.median / other.samples_per_s.median, 2)
        rounds = paired_ratio(_rates(self), _rates(other)).shown
        return Spread(ratio, min(ratio, rounds.low), max(ratio, rounds.high))


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
        norms_apart: Strategies on several devices whose batch norms normalise over the samples of each device apart.
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
    norms_apart: tuple[str, ...] = ()

    @property
    def num_steps_in_all(self) -> int:
        """Optimizer steps of each candidate, the warm-up's included."""
        return self.num_warmup + self.num_rounds * self.num_steps


@dataclass(frozen=True)
class Verdict:
    """Which strategy to use here, empty if the rounds do not tell, and why: one or two sentences per entry."""

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


_TIMED = ("data_wait", "forward", "backward", "exposed", "optimizer", "core_wait", "other")


def tables(comparison: Comparison) -> tuple[Table, Table]:
    """Return the figures and the parts of a step; a dash stands where a figure has no meaning."""
    setup = comparison.setup
    title = (
        f"{setup.task}: {setup.num_devices} x {setup.device}, global batch {setup.global_batch_size}, "
        f"{setup.num_rounds} rounds of {setup.num_steps} steps"
    )
    speed_columns = ("samples/s", "speed-up", "low - high", "peak MiB", "loss", "vs single")
    step_columns = ("step", "data\nwait", "forward", "backward", "exposed", "optimizer", "core\nwait", "other")
    speeds, steps = [], []
    for candidate in comparison.contenders:
        rate, loss = number(candidate.samples_per_s.median), f"{candidate.last_loss:.4f}"
        gain, difference = candidate.speed_up, candidate.loss_difference
        peak = f"{max(candidate.peak_bytes) / MIB:,.0f}" if candidate.peak_bytes else "-"
        span, against = f"{gain.low:.2f} - {gain.high:.2f}", f"{difference:+.1e}" if difference else "0"
        if candidate is comparison.single:
            span = against = "-"
        speeds.append((candidate.strategy, rate, f"{gain.median:.2f}x", span, peak, loss, against))
        parts = ("-" if (taken_s := getattr(candidate.step, f"{name}_s")) is None else _ms(taken_s) for name in _TIMED)
        steps.append((candidate.strategy, _ms(candidate.step.total_s), *parts))
    return (
        Table(title, ("strategy", *speed_columns), speeds, numbers=speed_columns),
        Table("Time per step (ms)", ("strategy", *step_columns), steps, numbers=step_columns),
    )


_PEAKS = "Peak memory: most bytes that tensors held on the fullest device, in fresh processes."
_PEAKS_ON_CPU = "Peak memory: growth of a fresh process's resident memory, of the fullest; dp has one for all replicas."


def footnotes(comparison: Comparison) -> list[str]:
    """Return how to read the figures, and which strategies were left out."""
    setup = comparison.setup
    notes = [
        "Samples/s and times: medians of the rounds. Speed-up: samples/s over single's. Low - high: the range of the "
        "speed-up within a round, in which all take turns, with 90% certainty (sign test; from 5 rounds on). "
        "Exposed: communication that backward does not hide (backward with synchronisation less backward without; for "
        "dp, copying weights and gradients). Core wait: other programs or threads had the core. Other: Python between "
        "the parts, and what the medians of the parts do not add up to.",
        f"The loss is that of step {setup.num_steps_in_all}, on the same samples for all.",
    ]
    if setup.device == "cpu":
        single, *others = (f"{candidate.strategy} {candidate.num_threads}" for candidate in comparison.contenders)
        single_threads = f"{single} (the faster of 1 and {setup.num_cores})" if setup.num_cores > 1 else single
        notes.append(f"Threads of each process or replica: {', '.join([single_threads, *others])}.")
    if comparison.find(LOCAL_BN):
        notes.append(f"{LOCAL_BN} is ddp with --no-sync-batchnorm.")
    if comparison.single.peak_bytes:
        notes.append(_PEAKS_ON_CPU if setup.device == "cpu" else _PEAKS)
    return notes + ["{strategy} was left out: {reason}".format(**omission) for omission in comparison.left_out]


def render_page(comparison: Comparison, provenance: Provenance) -> str:
    """Return verdict, plot and tables as one HTML file."""
    setup = comparison.setup
    rows = {candidate.strategy: candidate.step.parts() for candidate in comparison.contenders}
    plot = drawing.stacked_bars("Where the step goes", "milliseconds per step", rows)
    page_tables = tables(comparison)
    body = drawing.figures_body(plot, page_tables, footnotes(comparison), setup.command, provenance)
    heading = f"{setup.task} on one device{f' and on {setup.num_devices}' if setup.num_devices > 1 else ''}"
    tab = f"{setup.task} on {setup.num_devices} {setup.device}: lockstep compare"
    return drawing.html_page(tab, heading, page_tables[0].title, comparison.verdict.sentences, body)


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


# The verdict: what the figures mean, in words. Pure functions from a comparison to sentences. They compare figures as
# the tables show them (`Spread.shown`), so that no sentence contradicts a row.

# Speed-up over devices that a sound set-up reaches.
GOOD_EFFICIENCY = 0.8

# The speed-up from which more devices or machines, or a method that changes the training more, are worth their trouble.
WORTH = 1.05

# The share of single's step spent waiting for data from which loading, not computing, is the limit.
STARVED = 0.3

# The share of a step that is not the model's own work from which the work is too small to divide.
TOO_SMALL = 0.2

# The width of a candidate's spread, as a share of its median, from which more rounds are called for.
NOISY = 0.2

# The share of a step spent waiting for a core from which the figures are of a busy machine.
CROWDED = 0.1

# The same weights and samples: only the order of additions differs. As a share of single's first loss.
FIRST_LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}

# Rounding differences grow while training goes on. As a share of single's first loss.
LAST_LOSS_TOLERANCE = 1e-2

# Which of several that tie: fewest devices first, then what also scales beyond one machine.
PREFERENCE = (SINGLE, "ddp", "ddp-zero1", LOCAL_BN, "dp", "torch-ddp", "torch-dp")


def to_record(comparison: Comparison, provenance: Provenance) -> dict[str, Any]:
    """Return what ``--json`` writes: all figures, raw and summarized."""
    # The version grows when a key or a meaning changes; new keys leave it as it is.
    record = {"version": 2, **asdict(comparison), "provenance": asdict(provenance)}
    for entry, candidate in zip(record["contenders"], comparison.contenders, strict=True):
        entry["step"] |= {"exposed_s": candidate.step.part("exposed"), "other_s": candidate.step.other_s}
        for turn in entry["turns"]:
            turn |= turn.pop("times")
            turn["step_s"] = turn.pop("total_s")
            turn["backward_s"] += turn["exposed_s"] or 0.0  # with synchronisation
    return record


def judge(comparison: Comparison) -> Verdict:
    """Return in words what the figures mean."""
    use, sentences = SINGLE, ["Only single took part, so there is nothing to compare."]
    if comparison.others:
        chosen, recommendation = _recommend(comparison)
        use, sentences = chosen.strategy if chosen else "", [recommendation]
        if comparison.setup.num_rounds >= FEWEST_ROUNDS:
            sentences += [_explain(comparison, chosen), *_efficiency(comparison), *_against_torch(comparison)]
    sentences += [*_batch_norms(comparison), *_loss(comparison), *_noise(comparison)]
    sentences += _costs(comparison) if comparison.others else []
    return Verdict(use, (*_core_wait(comparison), *sentences))


def _recommend(comparison: Comparison) -> tuple[Candidate | None, str]:
    """Return what to use and the sentence that says so; None if the rounds do not tell."""
    single, others, num_rounds = comparison.single, comparison.others, comparison.setup.num_rounds
    faster = [each for each in others if each.speed_up.low > 1.0]
    ties = [each for each in others if each.speed_up.holds(1.0)]
    unclear = [each for each in ties if each.speed_up.high >= WORTH]
    is_enough = num_rounds >= FEWEST_ROUNDS
    if is_enough and (worth := [each for each in faster if each.speed_up.median >= WORTH]):
        return _choose(worth, unclear)
    nearest = _nearest((unclear or (not faster and ties) or others) if is_enough else others)
    gain, name = nearest.speed_up, nearest.strategy
    measured = f"{gain.median:.2f}x single's speed {_range(gain)}"
    command, rounds = re.sub(r" --rounds[ =]\d+", "", comparison.setup.command), max(10, 2 * num_rounds)
    advice = f"For more rounds: {command} --rounds {rounds}" if command else f"For more rounds: rounds={rounds}"
    if not is_enough:
        return None, f"Too few rounds to decide, {num_rounds} of {FEWEST_ROUNDS}: {name} comes to {measured}. {advice}"
    if unclear:
        return None, f"These rounds do not tell whether {name} is any faster: {measured}. {advice}"
    if faster:
        return single, f"Use single: {name} gains too little to be worth the trouble, {measured}."
    if ties:
        return single, f"More devices gain nothing: {name} ties with single at {measured}."
    return single, f"Use single: nothing else is as fast; {name} comes nearest at {measured}."


def _nearest(candidates: Sequence[Candidate]) -> Candidate:
    return max(candidates, key=lambda candidate: candidate.speed_up.median)


def _choose(worth: Sequence[Candidate], unclear: Sequence[Candidate]) -> tuple[Candidate, str]:
    """Return which of several that are worth their devices to use, and the sentence that says so."""
    # Compared with the nearest round by round: two whose ranges over single overlap may still differ clearly.
    nearest = _nearest(worth)
    tied = [each for each in worth if each is nearest or each.speed_over(nearest).holds(1.0)]
    # One that ties because its rounds are uneven, but has a lower median than one that does not tie, is not the choice.
    least = max((each.speed_up.median for each in worth if each not in tied), default=0.0)
    tied = [each for each in tied if each.speed_up.median >= least]
    chosen = min(tied, key=lambda candidate: PREFERENCE.index(candidate.strategy))
    gain = chosen.speed_up
    text = f"Use {chosen.strategy}: {gain.median:.2f}x single's speed {_range(gain)}."
    if tied_names := [candidate.strategy for candidate in tied if candidate is not chosen]:
        text += f" {_and(tied_names)} {'ties' if len(tied_names) == 1 else 'tie'} with it."
    if maybe := [f"{each.strategy} {_range(each.speed_up)}" for each in unclear if each.speed_up.median > gain.median]:
        text += f" These rounds do not tell whether {_and(maybe)} is any faster than single."
    return chosen, text


def _explain(comparison: Comparison, chosen: Candidate | None) -> str:
    """Return what the chosen strategy's step is spent on or, for single, why dividing the work gains nothing."""
    setup, single = comparison.setup, comparison.single
    if chosen and chosen is not single:
        return _shares(chosen)
    divided = comparison.find("ddp") or comparison.others[-1]
    if chosen is None:
        return _shares(divided)
    if (starved := single.step.share("data_wait")) >= STARVED:
        return f"Single waits for data during {starved:.0%} of its step: faster loading gains more than devices do."
    # What a divided step takes beyond its ideal is communication or overhead. The ideal is single's step divided by the
    # devices or, on CPU, where single already uses all cores, single's step itself.
    ideal_s = single.step.total_s / (1 if setup.device == "cpu" else setup.num_devices)
    total_s = divided.step.total_s
    lost = max(0.0, total_s - ideal_s) / total_s
    communication = min(divided.step.part("exposed") / total_s, lost)
    if lost < TOO_SMALL:
        return _shares(divided)
    return (
        f"The step is too short to gain from {_devices(setup)} at {setup.global_batch_size / setup.num_devices:g} "
        f"samples each: communication takes {communication:.0%} and other overhead {lost - communication:.0%} of "
        f"{divided.strategy}'s step of {total_s * 1e3:.1f} ms. A larger batch or model gives the devices more to do."
    )


def _shares(candidate: Candidate) -> str:
    name, step = candidate.strategy, candidate.step
    computing, waiting = step.share("forward", "backward", "optimizer"), step.share("data_wait")
    work = f"takes {computing:.0%}, communication that is not hidden {step.share('wire'):.0%}"
    if step.exposed_s is None:
        work = f"and communication, which cannot be told apart, take {computing:.0%}"
    return f"Of a step of {name} ({step.total_s * 1e3:.1f} ms), computing {work}, waiting for data {waiting:.0%}."


def _efficiency(comparison: Comparison) -> list[str]:
    """Return which strategies reach a good efficiency, and what may explain an unexpected one."""
    setup = comparison.setup
    # Rounded before they are compared: what is shown as 80% has reached 80%.
    efficiencies = [(round(candidate.efficiency, 2), candidate.strategy) for candidate in comparison.others]
    good = [f"{name} ({value:.0%})" for value, name in efficiencies if value >= GOOD_EFFICIENCY]
    poor = [f"{name} ({value:.0%})" for value, name in efficiencies if value < GOOD_EFFICIENCY]
    reached = f"reached by {_and(good)}" if good else f"not reached: {_and(poor)}"
    misses = f", not by {_and(poor)}" if good and poor else ""
    text = f"{GOOD_EFFICIENCY:.0%} efficiency on {_devices(setup)} is {reached}{misses}."
    # Single computes with all the cores that the others have together; not if one thread is faster.
    if setup.device == "cpu" and 1 < setup.num_devices <= comparison.single.num_threads:
        text += f" All share {setup.num_cores} cores, so {1 / setup.num_devices:.0%} is single's own speed."
    if max(efficiencies)[0] > 1.0:
        text += " More than 100% means that single is held back, as by caches: try another --global-batch-size."
    return [text]


def _core_wait(comparison: Comparison) -> list[str]:
    """Return a warning if steps waited for cores, as the figures then depend on what else the machine does."""
    waits = {candidate.strategy: candidate.step.share("core_wait") for candidate in comparison.contenders}
    if max(waits.values()) < CROWDED:
        return []
    shares = _and([f"{name} {share:.0%}" for name, share in waits.items()])
    return [
        "The machine is not quiet: other programs use the cores, or the ranks are more than the cores. Steps waited "
        f"for a core: {shares} of their time. Compare again when the machine is quiet."
    ]


def _costs(comparison: Comparison) -> list[str]:
    """Return the time, the money and the energy that the others take in addition to single, for the same samples."""
    setup, single = comparison.setup, comparison.single
    # On CPUs the devices are parts of one machine. With several threads, single uses the cores of all of them, so an
    # hour of it costs as much as an hour of all; with one thread, or on a GPU, it uses one device, and the others idle.
    uses_all_cores = setup.device == "cpu" and single.num_threads > 1
    num_single_devices = setup.num_devices if uses_all_cores else 1
    texts = []
    for candidate in comparison.others:
        # The unit is what single processes in an hour, which a strategy with twice its speed does in half an hour.
        hours = single.samples_per_s.median / candidate.samples_per_s.median
        cost = more_than_alone(hours, setup.num_devices, num_single_devices, setup.price)
        extra_joules = _joules_per_sample(candidate) - _joules_per_sample(single)
        energy = format_energy(3600 * single.samples_per_s.median * extra_joules, "+")
        texts.append(f"{candidate.strategy} {cost}{energy}")
    text = f"Compared with an hour of single, for the same samples: {'; '.join(texts)}."
    return [text + f" Single has the cores of all {_devices(setup)}, and counts as so many." * uses_all_cores]


def _joules_per_sample(candidate: Candidate) -> float:
    return sum(turn.energy_j for turn in candidate.turns) / sum(turn.num_samples for turn in candidate.turns)


def _against_torch(comparison: Comparison) -> list[str]:
    """Return a sentence for each engine that took part together with torch's class of the same kind."""
    sentences = []
    for name in ("dp", "ddp"):
        if (candidate := comparison.find(name)) and (torch_candidate := comparison.find(f"torch-{name}")):
            ratio = candidate.speed_over(torch_candidate)
            verb = "ties with" if ratio.holds(1.0) else "is faster than" if ratio.median > 1.0 else "is slower than"
            sentences.append(f"Our {name} {verb} torch-{name}: {ratio.median:.2f}x its speed {_range(ratio)}.")
    return sentences


def _batch_norms(comparison: Comparison) -> list[str]:
    """Return which strategies normalise over other samples than single, and so train in another way."""
    names = [candidate.strategy for candidate in comparison.others]
    apart = [name for name in names if name in comparison.setup.norms_apart]
    if not apart:
        return []
    text = f"Batch norms of {_and(apart)} normalise over the samples of each device apart"
    if whole := [name for name in names if name not in apart]:
        local, ddp = comparison.find(LOCAL_BN), comparison.find("ddp")
        cost = f"What they take: --strategies ddp,{LOCAL_BN}."
        if local and ddp and "ddp" in whole:
            ratio = ddp.speed_over(local)
            cost = f"With them, ddp has {ratio.median:.2f}x the speed of {LOCAL_BN} {_range(ratio)}."
        return [
            f"{text}, those of {_and(whole)} over all devices, as on one, which takes exchanges: the times and losses "
            "are not of the same run. To compare alike: --no-sync-batchnorm, or Settings(sync_batchnorm=False). " + cost
        ]
    return [f"{text}, those of single over the whole batch: its losses are of another run."]


def _loss(comparison: Comparison) -> list[str]:
    """Return whether the losses agree: from the same weights and samples, only rounding may differ."""
    setup, single = comparison.setup, comparison.single
    if not (math.isfinite(single.losses[0]) and math.isfinite(single.last_loss)):
        return ["The loss of single is not finite, so losses cannot be compared: check the data and the learning rate."]
    if not comparison.others:
        return []
    # As shares of the first loss: the last one may be next to nothing, of which any rounding is much.
    scale = abs(single.losses[0]) or 1.0
    tolerance = FIRST_LOSS_TOLERANCE[setup.precision]
    tolerances = f"first step {tolerance:.0e}, last step {LAST_LOSS_TOLERANCE:.0e}, as shares of the first loss"
    # As shown, see above.
    firsts = [float(f"{abs(other.losses[0] - single.losses[0]) / scale:.1e}") for other in comparison.others]
    lasts = [float(f"{abs(other.loss_difference) / scale:.1e}") for other in comparison.others]
    differing = [
        f"{candidate.strategy} (first step {first:.1e}, last step {last:.1e})"
        for candidate, first, last in zip(comparison.others, firsts, lasts, strict=True)
        if not (first <= tolerance and last <= LAST_LOSS_TOLERANCE)  # a NaN differs, too
    ]
    if not differing:
        return [
            f"The losses agree with single's from the first step (within {max(firsts):.1e}) to step "
            f"{setup.num_steps_in_all} (within {max(lasts):.1e}); tolerances: {tolerances}."
        ]
    cause = "No layer of the model explains that: is the loss the mean over the batch's samples?"
    if setup.split_layers:
        cause = f"The model has {_and(setup.split_layers)}, whose result depends on how a batch is split."
    return [f"The loss differs from single's: {_and(differing)}; tolerances: {tolerances}. {cause}"]


def _noise(comparison: Comparison) -> list[str]:
    """Return a warning if the rounds of a candidate differ too much for precise figures."""
    noisiest = max(comparison.contenders, key=lambda candidate: candidate.samples_per_s.relative_width)
    if (width := noisiest.samples_per_s.relative_width) <= NOISY:
        return []
    return [
        f"The rounds of {noisiest.strategy} spread over {width:.0%} of their median. "
        "Use a quiet machine and more rounds (--rounds) for more precise figures."
    ]


def _range(ratio: Spread) -> str:
    return f"({ratio.low:.2f}x to {ratio.high:.2f}x)"


def _devices(setup: Setup) -> str:
    return f"{setup.num_devices} device{'s' * (setup.num_devices != 1)}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
