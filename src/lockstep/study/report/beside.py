"""A run on one device beside another: is it the same training, and how much faster is it on more."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.study.report.view import View, setting_values

_ALIKE = ("seed", "global_batch_size", "precision", "clip", "schedule", "warmup", "lr_scaling", "shares", "wire")
"""Settings that make it another training run."""

GOOD_SHARE = 0.8
"""Of what twice as many devices could give at best, who gets this much is well served."""

_ROUNDING = 1e-3
"""In a first step nothing but roundings can differ; those of bf16 are the largest."""


@dataclass(frozen=True)
class Beside:
    """A run and the one that it is compared with.

    Args:
        name: What the other is called in a drawing.
        view: The other.
        loss_note: How the losses compare, in a sentence.
        speedup: How many times as fast the run is; None if that is not known.
        num_times: How many times as many devices it has.
    """

    name: str
    view: View
    loss_note: str
    speedup: float | None
    num_times: float

    @property
    def scaling(self) -> str:
        """How much more devices gave, in words; empty if that is not known."""
        if self.speedup is None:
            return ""
        text = f"{self.speedup:.2f} times as fast as {self.name}"
        if self.num_times > 1:
            share = self.speedup / self.num_times
            text += f", {share:.0%} of linear{'' if share >= GOOD_SHARE else f' ({GOOD_SHARE:.0%} is good)'}"
        return text


def put_beside(view: View, other: View) -> Beside:
    """Return what is to be said of ``view`` beside ``other``."""
    devices = other.num_devices
    name = "one device" if devices == 1 else f"{devices} devices"
    speedup = None
    if view.figures is not None and other.figures is not None and other.figures.samples_per_s:
        speedup = view.figures.samples_per_s / other.figures.samples_per_s
    return Beside(name, other, _compare_losses(view, other, name), speedup, view.num_devices / max(1, devices))


def _compare_losses(view: View, other: View, name: str) -> str:
    mine, others = (_losses(each) for each in (view, other))
    steps = sorted(set(mine) & set(others))
    known = [step for step in steps if math.isfinite(mine[step]) and math.isfinite(others[step])]
    if not known:
        return f"No step is in both this run and that on {name}."
    far = max(known, key=lambda step: _difference(mine[step], others[step]))
    differs = [text for text in (_differs(view, other, setting) for setting in _ALIKE) if text]
    if view.task != other.task:
        differs.insert(0, f"task {view.task} here, {other.task} there")
    how = _in_words(_difference(mine[far], others[far]), far, _difference(mine[known[0]], others[known[0]]), known[0])
    text = f"Over {len(known)} steps, the loss and that on {name} {how}"
    return f"{text}; it is another training run: {', '.join(differs)}." if differs else f"{text}."


def _in_words(largest: float, far: int, at_first: float, first: int) -> str:
    """Return how far losses are apart, relative to them: at most, and in the first step."""
    if largest == 0:
        return "are the same to the bit"
    at_most = f"by {_share(largest)} at most, in step {far + 1}"
    if at_first > _ROUNDING:
        return f"differ by {_share(at_first)} in step {first + 1} already (lockstep verify says why), {at_most}"
    begin = f"differ by {_share(at_first)} in step {first + 1}, as roundings do," if at_first else "begin alike"
    return f"{begin} and {'' if at_first else 'differ '}{at_most}"


def _share(difference: float) -> str:
    return f"{difference:.2%}" if difference >= 1e-4 else f"{difference:.1g} of it"


def _losses(view: View) -> dict[int, float]:
    first = min(view.run.ranks, default=None)
    steps = [] if first is None else view.run.ranks[first].steps
    return {step.step: step.loss for step in steps if step.loss is not None and step.num_steps == 1}


def _difference(one: float, other: float) -> float:
    """Return the difference relative to the larger one."""
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)


def _differs(view: View, other: View, setting: str) -> str:
    here, there = (_setting(each, setting) for each in (view, other))
    return "" if here == there else f"{setting} {here} here, {there} there"


def _setting(view: View, setting: str) -> object:
    if setting == "global_batch_size":
        return view.run.last.get(setting)
    return setting_values(view.run.last).get(setting)
