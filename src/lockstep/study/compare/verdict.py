"""What the figures of ``compare`` mean, in words: a pure function from a comparison to sentences."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from lockstep.study.common import MIB, Spread
from lockstep.study.compare.comparison import SINGLE, Candidate, Comparison, Setup
from lockstep.telemetry.provenance import Provenance

# Speed-up over devices that a sound set-up reaches.
GOOD_EFFICIENCY = 0.8

# The speed-up from which more devices are worth their trouble.
WORTH = 1.05

# The share of single's step spent waiting for data from which loading, not computing, is the limit.
STARVED = 0.3

# The share of a step that is not the model's own work from which the work is too small to divide.
TOO_SMALL = 0.2

# The width of a candidate's spread, as a share of its median, from which more rounds are called for.
NOISY = 0.2

# The share of the cores that others keep busy from which they disturb the measurement.
BUSY = 0.25

# The gain over what devices can give from which it says more about what holds single back.
TOO_GOOD = 1.1

# Where exchanging so much takes long, it is the bytes that do, not each message's own delay.
LARGE_GRADIENTS_BYTES = 4 * MIB

# The same weights and samples: only the order of additions differs. As a share of single's first loss.
FIRST_LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}

# Rounding differences grow while training goes on. As a share of single's first loss.
LAST_LOSS_TOLERANCE = 1e-2

# Which of several that tie: fewest devices first, then what also scales beyond one machine.
PREFERENCE = (SINGLE, "ddp", "ddp-zero1", "dp", "torch-ddp", "torch-dp")


@dataclass(frozen=True)
class Verdict:
    """Which strategy to use here, and everything worth saying about it, one sentence or two an entry."""

    use: str
    sentences: tuple[str, ...]


# Of the JSON; grows when a key or a meaning changes. New keys leave it as it is.
VERSION = 1


def to_record(comparison: Comparison, verdict: Verdict, provenance: Provenance) -> dict[str, Any]:
    """Return what ``--json`` writes: all figures, raw and summarized."""
    about = {"provenance": asdict(provenance), "verdict": asdict(verdict)}
    return {"version": VERSION, **asdict(comparison), **about}


def judge(comparison: Comparison) -> Verdict:
    """Return in words what the figures mean."""
    single = comparison.single
    if comparison.others:
        chosen, recommendation = _recommend(comparison)
        sentences = [
            recommendation,
            _explain(comparison, chosen),
            *_efficiency(comparison),
            *_against_torch(comparison),
        ]
    else:
        chosen, sentences = single, ["Only single took part, so there is nothing to choose from."]
    sentences += [*_loss(comparison), *_noise(comparison)]
    return Verdict(chosen.strategy, tuple(sentences))


def _recommend(comparison: Comparison) -> tuple[Candidate, str]:
    single = comparison.single
    nearest = max(comparison.others, key=lambda each: each.speed_up.median)
    gain, name = nearest.speed_up, nearest.strategy
    measured = f"{gain.median:.2f}x single's speed {_range(gain)}"
    if gain.holds(1.0) and gain.relative_width > NOISY:
        return single, f"Use single: these rounds do not tell whether {name} is any faster, {measured}."
    if gain.holds(1.0):
        return single, f"Use single: {name} ties with it at {measured}, so more devices gain nothing."
    if gain.median < 1.0:
        return single, f"Use single: nothing else is as fast; {name} comes nearest at {measured}."
    if gain.median < WORTH:
        return single, f"Use single: {name} gains too little to be worth the trouble, {measured}."
    # Compared with the nearest round by round: two whose ranges over single overlap may still differ clearly.
    tied = [each for each in comparison.others if each is nearest or each.speed_over(nearest).holds(1.0)]
    chosen = min(tied, key=lambda each: PREFERENCE.index(each.strategy))
    text = f"Use {chosen.strategy}: {chosen.speed_up.median:.2f}x single's speed {_range(chosen.speed_up)}."
    rest = [each.strategy for each in tied if each is not chosen]
    if rest:
        text += f" {_and(rest)} {'ties' if len(rest) == 1 else 'tie'} with it."
    return chosen, text


def _explain(comparison: Comparison, chosen: Candidate) -> str:
    """Return what the chosen strategy's step is spent on or, for single, why dividing the work gains nothing."""
    setup, single = comparison.setup, comparison.single
    if chosen is not single:
        return _shares(chosen)
    divided = comparison.find("ddp") or comparison.others[-1]
    starved = single.step.data_wait_s / single.step.parts_s
    if starved >= STARVED:
        return f"Single waits for data during {starved:.0%} of its step: faster loading gains more than devices do."
    # What a divided step takes beyond its ideal is communication or overhead. The ideal is single's step divided by the
    # devices or, on CPU, where single already uses all cores, single's step itself.
    ideal_s = single.step.total_s / (1 if setup.device == "cpu" else setup.num_devices)
    total_s = divided.step.total_s
    lost = max(0.0, total_s - ideal_s) / total_s
    communication = min(divided.step.exposed_s / total_s, lost)
    overhead = lost - communication
    if lost < TOO_SMALL:
        return _shares(divided)
    samples = f"{setup.global_batch_size / setup.num_devices:g} samples"
    shares = (
        f"communication takes {communication:.0%} and other overhead {overhead:.0%} of {divided.strategy}'s step of "
        f"{total_s * 1e3:.1f} ms"
    )
    gradients_bytes = 4 * setup.num_parameters
    if communication > overhead and gradients_bytes >= LARGE_GRADIENTS_BYTES:
        return (
            f"The batch is too small for {gradients_bytes / MIB:.0f} MiB of gradients, at {samples} each of "
            f"{_devices(setup)}: {shares}. A larger batch gives more to compute for the same exchange."
        )
    return (
        f"The model is too small to gain from {_devices(setup)} at {samples} each: {shares}. A larger batch or model "
        "gives the devices more to do."
    )


def _shares(candidate: Candidate) -> str:
    step = candidate.step
    computing, exposed, waiting = (part / step.parts_s for part in (step.computing_s, step.exposed_s, step.data_wait_s))
    work = f"takes {computing:.0%}, communication that is not hidden {exposed:.0%}"
    if candidate.turns[0].exposed_s is None:
        work = f"and communication, which cannot be told apart, take {computing:.0%}"
    name, total_ms = candidate.strategy, step.total_s * 1e3
    return f"Of a step of {name} ({total_ms:.1f} ms), computing {work}, waiting for data {waiting:.0%}."


def _efficiency(comparison: Comparison) -> list[str]:
    setup = comparison.setup
    named = [(each.efficiency, f"{each.strategy} ({each.efficiency:.0%})") for each in comparison.others]
    good = [text for value, text in named if value >= GOOD_EFFICIENCY]
    poor = [text for value, text in named if value < GOOD_EFFICIENCY]
    reached = f"reached by {_and(good)}" if good else f"not reached: {_and(poor)}"
    rest = f", not by {_and(poor)}" if good and poor else ""
    text = f"{GOOD_EFFICIENCY:.0%} efficiency on {_devices(setup)} is {reached}{rest}."
    best = max(value for value, _ in named)
    # Single computes with all the cores that the others have together; not if it was given one thread.
    shares_cores = setup.device == "cpu" and 1 < setup.num_devices <= setup.num_cores
    if shares_cores:
        text += (
            f" All strategies share the same {setup.num_cores} cores, so an efficiency of {1 / setup.num_devices:.0%} "
            "is single's own speed."
        )
    # Others that are faster than their devices explain show that something holds single back.
    if best <= TOO_GOOD / (setup.num_devices if shares_cores else 1):
        return [text]
    why = f"its {setup.num_cores} threads wait for each other, as in small operations (try OMP_NUM_THREADS=1)"
    if not shares_cores:
        why = "its whole batch may not fit into the caches of one device (try another --global-batch-size)"
    return [text, f"An efficiency of {best:.0%} means that single is held back: {why}, or something else ran there."]


def _against_torch(comparison: Comparison) -> list[str]:
    sentences = []
    for name in ("dp", "ddp"):
        ours, torchs = comparison.find(name), comparison.find(f"torch-{name}")
        if ours and torchs:
            ratio = ours.speed_over(torchs)
            how = "ties with" if ratio.holds(1.0) else "is faster than" if ratio.median > 1.0 else "is slower than"
            sentences.append(f"Our {name} {how} torch-{name}: {ratio.median:.2f}x its speed {_range(ratio)}.")
    return sentences


def _loss(comparison: Comparison) -> list[str]:
    setup, single = comparison.setup, comparison.single
    if not (isfinite(single.losses[0]) and isfinite(single.last_loss)):
        return ["The loss of single is not finite, so losses cannot be compared: check the data and the learning rate."]
    if not comparison.others:
        return []
    # As shares of the first loss: the last one may be next to nothing, of which any rounding is much.
    scale = abs(single.losses[0]) or 1.0
    tolerance = FIRST_LOSS_TOLERANCE[setup.precision]
    tolerances = f"first step {tolerance:.0e}, last step {LAST_LOSS_TOLERANCE:.0e}, as shares of the first loss"
    firsts = [abs(each.losses[0] - single.losses[0]) / scale for each in comparison.others]
    lasts = [abs(each.loss_difference) / scale for each in comparison.others]
    apart = [
        f"{each.strategy} (first step {first:.1e}, last step {last:.1e})"
        for each, first, last in zip(comparison.others, firsts, lasts, strict=True)
        if not (first <= tolerance and last <= LAST_LOSS_TOLERANCE)  # a NaN is apart as well
    ]
    if not apart:
        return [
            f"The losses agree with single's from the first step (within {max(firsts):.1e}) to step "
            f"{setup.num_steps_in_all} (within {max(lasts):.1e}); tolerances: {tolerances}."
        ]
    why = "No layer of the model explains that: is the loss the mean over the batch's samples?"
    if setup.split_layers:
        why = f"The model has {_and(setup.split_layers)}, whose result depends on how a batch is split."
    return [f"The loss differs from single's: {_and(apart)}; tolerances: {tolerances}. {why}"]


def _noise(comparison: Comparison) -> list[str]:
    setup, sentences = comparison.setup, []
    if setup.busy_cores > BUSY * setup.num_cores:
        text = f"Other programs kept {setup.busy_cores:.1f} cores busy just before the start."
        if setup.device == "cpu":
            text += " That slows all, and most of all single, whose threads wait for the one that got no core."
        sentences.append(text)
    noisiest = max(comparison.contenders, key=lambda each: each.samples_per_s.relative_width)
    width = noisiest.samples_per_s.relative_width
    if width > NOISY:
        sentences.append(
            f"The rounds of {noisiest.strategy} spread over {width:.0%} of their median. "
            "A quiet machine and more rounds (--rounds) make the figures surer."
        )
    return sentences


def _range(ratio: Spread) -> str:
    return f"({ratio.low:.2f}x to {ratio.high:.2f}x)"


def _devices(setup: Setup) -> str:
    return f"{setup.num_devices} device{'s' * (setup.num_devices != 1)}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
