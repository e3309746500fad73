"""What the figures of ``compare`` say, in words: a pure function from a comparison to sentences."""

from dataclasses import dataclass
from math import isfinite

from lockstep.study.common import Spread
from lockstep.study.compare.comparison import SINGLE, Candidate, Comparison, Setup

GOOD_EFFICIENCY = 0.8
"""Speed-up over devices that a sound set-up reaches."""

WORTH = 1.05
"""The speed-up from which more devices are worth their trouble."""

STARVED = 0.3
"""The share of single's step spent waiting for data from which loading, not computing, is the limit."""

TOO_SMALL = 0.2
"""The share of a step that is not the model's own work from which the work is too small to divide."""

NOISY = 0.2
"""The width of a contender's spread, as a share of its median, from which more rounds are called for."""

BUSY = 0.25
"""The share of the cores that others keep busy from which they disturb the measurement."""

TOO_GOOD = 1.1
"""The gain over what devices can give from which it says more about what holds single back."""

LARGE_GRADIENTS_BYTES = 4 * 2**20
"""Where exchanging so much takes long, it is the bytes that do, not each message's own delay."""

UNEVEN = 1.1
"""The highest device's memory over the mean from which memory is called uneven."""

FIRST_LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""The same weights and samples: only the order of additions differs. As a share of single's first loss."""

LAST_LOSS_TOLERANCE = 1e-2
"""Rounding differences grow while training goes on. As a share of single's first loss."""

PREFERENCE = (SINGLE, "ddp", "ddp-zero1", "dp", "torch-ddp", "torch-dp")
"""Which of several that tie: fewest devices first, then what also scales beyond one machine."""

OURS_AND_TORCHS = (("dp", "torch-dp"), ("ddp", "torch-ddp"))


@dataclass(frozen=True)
class Verdict:
    """Which strategy to use here, and everything worth saying about it, one sentence or two an entry."""

    use: str
    sentences: tuple[str, ...]


def judge(comparison: Comparison) -> Verdict:
    """Say in words what the figures mean."""
    chosen, recommendation = _recommend(comparison)
    sentences = [recommendation]
    sentences += _explain(comparison, chosen)
    sentences += _efficiency(comparison)
    sentences += _against_torch(comparison)
    sentences += _loss(comparison)
    sentences += _memory(comparison)
    sentences += _noise(comparison)
    return Verdict(chosen.strategy, tuple(sentences))


def _recommend(comparison: Comparison) -> tuple[Candidate, str]:
    single = comparison.single
    others = [c for c in comparison.contenders if c is not single]
    if not others:
        return single, "Only single took part, so there is nothing to choose from."
    nearest = max(others, key=lambda c: c.speed_over(single).median)
    gain = nearest.speed_over(single)
    measured = f"{gain.median:.2f}x single's speed {_range(gain)}"
    if gain.holds(1.0) and gain.relative_width > NOISY:
        return single, f"Use single: these rounds do not tell whether {nearest.strategy} is any faster, {measured}."
    if gain.holds(1.0):
        return single, f"Use single: {nearest.strategy} ties with it at {measured}, so more devices gain nothing."
    if gain.median < 1.0:
        return single, f"Use single: nothing else is as fast; {nearest.strategy} comes nearest at {measured}."
    if gain.median < WORTH:
        return single, f"Use single: {nearest.strategy} gains too little to be worth the trouble, {measured}."
    tied = [c for c in others if c is nearest or c.speed_over(nearest).holds(1.0)]
    chosen = min(tied, key=lambda c: PREFERENCE.index(c.strategy))
    gain = chosen.speed_over(single)
    text = f"Use {chosen.strategy}: {gain.median:.2f}x single's speed {_range(gain)}."
    rest = [c.strategy for c in tied if c is not chosen]
    if rest:
        text += f" {_and(rest)} {'ties' if len(rest) == 1 else 'tie'} with it."
    return chosen, text


def _explain(comparison: Comparison, chosen: Candidate) -> list[str]:
    """Say what the chosen strategy's step is spent on or, where that is single, why dividing the work gains nothing."""
    setup, single = comparison.setup, comparison.single
    if chosen is not single:
        return [_shares(chosen)]
    divided = comparison.find("ddp") or next((c for c in reversed(comparison.contenders) if c is not single), None)
    if divided is None:
        return []
    starved = single.step.data_wait_s / single.step.parts_s
    if starved >= STARVED:
        return [f"Single waits for data during {starved:.0%} of its step: faster loading gains more than devices do."]
    communication, overhead = _lost(setup, single, divided)
    if communication + overhead < TOO_SMALL:
        return [_shares(divided)]
    samples = f"{setup.global_batch_size / setup.num_devices:g} samples"
    shares = (
        f"communication takes {communication:.0%} and other overhead {overhead:.0%} of {divided.strategy}'s step of "
        f"{_ms(divided.step.total_s)}"
    )
    gradients_bytes = 4 * setup.num_parameters
    if communication > overhead and gradients_bytes >= LARGE_GRADIENTS_BYTES:
        return [
            f"The batch is too small for {gradients_bytes / 2**20:.0f} MiB of gradients, at {samples} each of "
            f"{_devices(setup)}: {shares}. A larger batch gives more to compute for the same exchange."
        ]
    return [
        f"The model is too small to gain from {_devices(setup)} at {samples} each: {shares}. A larger batch or model "
        "gives the devices more to do."
    ]


def _lost(setup: Setup, single: Candidate, divided: Candidate) -> tuple[float, float]:
    """Return the shares of ``divided``'s step that are exposed communication and other overhead.

    Overhead is what the step takes beyond its ideal: single's step divided by the devices or, on CPU, where single
    already uses all cores, single's step itself.
    """
    ideal_s = single.step.total_s / (1 if setup.device == "cpu" else setup.num_devices)
    total_s = divided.step.total_s
    lost = max(0.0, total_s - ideal_s) / total_s
    communication = min(divided.step.exposed_s / total_s, lost)
    return communication, lost - communication


def _shares(contender: Candidate) -> str:
    step = contender.step
    computing, exposed, waiting = (part / step.parts_s for part in (step.computing_s, step.exposed_s, step.data_wait_s))
    told_apart = contender.turns[0].exposed_s is not None
    work = (
        f"takes {computing:.0%}, communication that is not hidden {exposed:.0%}"
        if told_apart
        else (f"and communication, which cannot be told apart, take {computing:.0%}")
    )
    return f"Of a step of {contender.strategy} ({_ms(step.total_s)}), computing {work}, waiting for data {waiting:.0%}."


def _efficiency(comparison: Comparison) -> list[str]:
    setup, single = comparison.setup, comparison.single
    others = [c for c in comparison.contenders if c is not single]
    if not others:
        return []
    efficiencies = {c.strategy: c.speed_over(single).median / setup.num_devices for c in others}
    good = [f"{name} ({value:.0%})" for name, value in efficiencies.items() if value >= GOOD_EFFICIENCY]
    poor = [f"{name} ({value:.0%})" for name, value in efficiencies.items() if value < GOOD_EFFICIENCY]
    if not poor:
        text = f"{GOOD_EFFICIENCY:.0%} efficiency on {_devices(setup)} is reached by {_and(good)}."
    elif not good:
        text = f"{GOOD_EFFICIENCY:.0%} efficiency on {_devices(setup)} is not reached: {_and(poor)}."
    else:
        text = f"{GOOD_EFFICIENCY:.0%} efficiency on {_devices(setup)} is reached by {_and(good)}, not by {_and(poor)}."
    if _shares_cores(setup):
        own_speed = f"an efficiency of {1 / setup.num_devices:.0%} is single's own speed"
        text += f" All contenders share the same {setup.num_cores} cores, so {own_speed}."
    return [text, *_held_back(setup, max(efficiencies.values()))]


def _shares_cores(setup: Setup) -> bool:
    """Say whether single computes with all the cores that the others have together; not if it was given one thread."""
    return setup.device == "cpu" and setup.num_devices > 1 and setup.num_cores >= setup.num_devices


def _held_back(setup: Setup, best_efficiency: float) -> list[str]:
    """Say why others are faster than their devices explain, if they are: then something holds single back."""
    if _shares_cores(setup):
        if best_efficiency * setup.num_devices <= TOO_GOOD:
            return []
        return [
            f"Nobody has more cores than single, so something holds it back: its {setup.num_cores} threads wait for "
            "each other, as in small operations or on a busy machine. OMP_NUM_THREADS=1 gives all a single thread per "
            "device."
        ]
    if best_efficiency <= TOO_GOOD:
        return []
    return [
        f"An efficiency of {best_efficiency:.0%} means that single is held back: its whole batch may not fit into the "
        "caches of one device, or something else ran there. Compare on idle devices, or with another "
        "--global-batch-size."
    ]


def _against_torch(comparison: Comparison) -> list[str]:
    sentences = []
    for our_name, torch_name in OURS_AND_TORCHS:
        ours, torchs = comparison.find(our_name), comparison.find(torch_name)
        if ours and torchs:
            ratio = ours.speed_over(torchs)
            how = "ties with" if ratio.holds(1.0) else "is faster than" if ratio.median > 1.0 else "is slower than"
            sentences.append(f"Our {our_name} {how} {torch_name}: {ratio.median:.2f}x its speed {_range(ratio)}.")
    return sentences


def _loss(comparison: Comparison) -> list[str]:
    setup, single = comparison.setup, comparison.single
    others = [c for c in comparison.contenders if c is not single]
    if not isfinite(single.losses[0]) or not isfinite(single.losses[-1]):
        return ["The loss of single is not finite, so losses cannot be compared: check the data and the learning rate."]
    if not others:
        return []
    scale = abs(single.losses[0]) or 1.0
    first_tolerance = FIRST_LOSS_TOLERANCE[setup.precision]
    apart = []
    first_differences, last_differences = [], []
    for contender in others:
        first = abs(contender.losses[0] - single.losses[0]) / scale
        last = abs(contender.losses[-1] - single.losses[-1]) / scale
        first_differences.append(first)
        last_differences.append(last)
        if not (first <= first_tolerance and last <= LAST_LOSS_TOLERANCE):  # a NaN is apart as well
            apart.append(f"{contender.strategy} (first step {first:.1e}, last step {last:.1e})")
    tolerances = f"first step {first_tolerance:.0e}, last step {LAST_LOSS_TOLERANCE:.0e}, as shares of the first loss"
    if not apart:
        return [
            f"The losses agree with single's from the first step (within {max(first_differences):.1e}) to step "
            f"{setup.num_steps_in_all} (within {max(last_differences):.1e}); tolerances: {tolerances}."
        ]
    text = f"The loss differs from single's: {_and(apart)}; tolerances: {tolerances}."
    if setup.split_layers:
        text += f" The model has {_and(list(setup.split_layers))}, whose result depends on how a batch is split."
    else:
        text += " No layer of the model explains that: is the loss the mean over the batch's samples?"
    return [text]


def _memory(comparison: Comparison) -> list[str]:
    return [
        f"Memory is uneven with {c.strategy}: its fullest device holds {c.memory.imbalance:.2f}x the mean."
        for c in comparison.contenders
        if c.memory and c.memory.imbalance and c.memory.imbalance > UNEVEN
    ]


def _noise(comparison: Comparison) -> list[str]:
    setup = comparison.setup
    sentences = []
    if setup.busy_cores > BUSY * setup.num_cores:
        text = f"Other programs kept {setup.busy_cores:.1f} cores busy just before the start."
        if setup.device == "cpu":
            text += " That slows all, and most of all single, whose threads wait for the one that got no core."
        sentences.append(text)
    noisiest = max(comparison.contenders, key=lambda c: c.rate.relative_width)
    if noisiest.rate.relative_width > NOISY:
        sentences.append(
            f"The rounds of {noisiest.strategy} spread over {noisiest.rate.relative_width:.0%} of their median. "
            "A quiet machine and more rounds (--rounds) make the figures surer."
        )
    return sentences


def _range(ratio: Spread) -> str:
    return f"({ratio.low:.2f}x to {ratio.high:.2f}x)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _devices(setup: Setup) -> str:
    return "1 device" if setup.num_devices == 1 else f"{setup.num_devices} devices"


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
