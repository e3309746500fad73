"""What the figures of ``compare`` mean, in words: a pure function from a comparison to sentences."""

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from lockstep.study.common import Spread
from lockstep.study.compare.comparison import SINGLE, Candidate, Comparison, Setup, Verdict
from lockstep.telemetry.cost import format_energy, more_than_alone
from lockstep.telemetry.provenance import Provenance
from lockstep.telemetry.step_times import StepTimes

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

# The share of a step spent waiting for a core from which the figures are of a busy machine.
CROWDED = 0.1

# The same weights and samples: only the order of additions differs. As a share of single's first loss.
FIRST_LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}

# Rounding differences grow while training goes on. As a share of single's first loss.
LAST_LOSS_TOLERANCE = 1e-2

# Which of several that tie: fewest devices first, then what also scales beyond one machine.
PREFERENCE = (SINGLE, "ddp", "ddp-zero1", "dp", "torch-ddp", "torch-dp")


def to_record(comparison: Comparison, provenance: Provenance) -> dict[str, Any]:
    """Return what ``--json`` writes: all figures, raw and summarized."""
    # The version grows when a key or a meaning changes; new keys leave it as it is.
    record = {"version": 1, **asdict(comparison), "provenance": asdict(provenance)}
    for shown, candidate in zip(record["contenders"], comparison.contenders, strict=True):
        shown["step"] |= {"exposed_s": candidate.step.part("exposed"), "other_s": candidate.step.other_s}
        for turn in shown["turns"]:
            turn |= turn.pop("times")
            turn["step_s"] = turn.pop("total_s")
            turn["backward_s"] += turn["exposed_s"] or 0.0  # with synchronisation
    return record


def judge(comparison: Comparison) -> Verdict:
    """Return in words what the figures mean."""
    chosen, sentences = comparison.single, ["Only single took part, so there is nothing to compare."]
    if comparison.others:
        chosen, recommendation = _recommend(comparison)
        sentences = [
            recommendation,
            _explain(comparison, chosen),
            *_efficiency(comparison),
            *_against_torch(comparison),
        ]
    sentences += [*_loss(comparison), *_noise(comparison), *_costs(comparison)]
    return Verdict(chosen.strategy, (*_core_wait(comparison), *sentences))


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
    starved = _share(single.step, "data_wait")
    if starved >= STARVED:
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


def _share(step: StepTimes, *parts: str) -> float:
    return sum(map(step.part, parts)) / sum(step.parts().values())


def _shares(candidate: Candidate) -> str:
    name, step = candidate.strategy, candidate.step
    computing, waiting = _share(step, "forward", "backward", "optimizer"), _share(step, "data_wait")
    work = f"takes {computing:.0%}, communication that is not hidden {_share(step, 'wire'):.0%}"
    if step.exposed_s is None:
        work = f"and communication, which cannot be told apart, take {computing:.0%}"
    return f"Of a step of {name} ({step.total_s * 1e3:.1f} ms), computing {work}, waiting for data {waiting:.0%}."


def _efficiency(comparison: Comparison) -> list[str]:
    setup = comparison.setup
    named = [(each.efficiency, f"{each.strategy} ({each.efficiency:.0%})") for each in comparison.others]
    good = [text for value, text in named if value >= GOOD_EFFICIENCY]
    poor = [text for value, text in named if value < GOOD_EFFICIENCY]
    reached = f"reached by {_and(good)}" if good else f"not reached: {_and(poor)}"
    rest = f", not by {_and(poor)}" if good and poor else ""
    text = f"{GOOD_EFFICIENCY:.0%} efficiency on {_devices(setup)} is {reached}{rest}."
    # Single computes with all the cores that the others have together; not if one thread is faster.
    if setup.device == "cpu" and 1 < setup.num_devices <= comparison.single.num_threads:
        text += f" All share {setup.num_cores} cores, so {1 / setup.num_devices:.0%} is single's own speed."
    if max(each.efficiency for each in comparison.others) >= 1.005:
        text += " More than 100% means that single is held back, as by caches: try another --global-batch-size."
    return [text]


def _core_wait(comparison: Comparison) -> list[str]:
    waits = {each.strategy: each.core_wait_share for each in comparison.contenders}
    if max(waits.values()) < CROWDED:
        return []
    during = _and([f"{name} {share:.0%}" for name, share in waits.items()])
    return [
        "The machine is not quiet: other programs use the cores, or the ranks are more than the cores. Steps waited "
        f"for a core: {during} of their time. Compare again when the machine is quiet."
    ]


def _costs(comparison: Comparison) -> list[str]:
    setup, single = comparison.setup, comparison.single
    shares_cores = setup.device == "cpu" and single.num_threads > 1
    bought = []
    for each in comparison.others:
        more = more_than_alone(
            1 / each.speed_up.median, setup.num_devices, setup.num_devices if shares_cores else 1, setup.price
        )
        per_sample_j = _joules_per_sample(each) - _joules_per_sample(single)
        energy = format_energy(3600 * single.samples_per_s.median * per_sample_j, "+")
        bought.append(f"{each.strategy} {more}, {energy}")
    if not bought:
        return []
    text = f"Compared with an hour of single, for the same samples: {'; '.join(bought)}."
    return [text + f" Single has the cores of all {_devices(setup)}, and counts as so many." * shares_cores]


def _joules_per_sample(candidate: Candidate) -> float:
    return sum(turn.energy_j for turn in candidate.turns) / sum(turn.num_samples for turn in candidate.turns)


def _against_torch(comparison: Comparison) -> list[str]:
    sentences = []
    for name in ("dp", "ddp"):
        if (ours := comparison.find(name)) and (torchs := comparison.find(f"torch-{name}")):
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
    noisiest = max(comparison.contenders, key=lambda each: each.samples_per_s.relative_width)
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
