"""The report in three sentences: how fast, where the time goes, what to change first."""

from __future__ import annotations

from lockstep.study.report.beside import Beside
from lockstep.study.report.figures import Figures
from lockstep.study.report.together import PARTS
from lockstep.study.report.view import View

NAMES = {
    "data_wait_s": "waiting for data",
    "forward_s": "forward",
    "backward_s": "backward",
    "wire_s": "exchanging gradients",
    "peers_s": "waiting for other ranks",
    "optimizer_s": "the optimizer",
    "other_s": "other things",
}

GOOD_BUSY = 0.9
"""Devices that compute for this share of a step are kept well."""


def sentences(view: View, beside: Beside | None = None) -> tuple[str, str, str]:
    """Return the three sentences; with a run ``beside`` it, the first says how much more devices gave."""
    figures = view.figures
    if figures is None:
        return (
            f"{view.task} has recorded no step that all ranks have done.",
            "So nothing is known of where the time goes.",
            "Record a run of some more steps, and look again.",
        )
    return _how_fast(view, figures, beside), _where(figures), _what_first(view)


def _how_fast(view: View, figures: Figures, beside: Beside | None) -> str:
    where = f"{view.num_devices} {'GPU' if view.device == 'cuda' else 'CPU process'}"
    plural = "" if view.num_devices == 1 else ("s" if view.device == "cuda" else "es")
    slow = f"; one step in twenty takes more than {ms(figures.slow_step_s)}"
    scaling = f"; {beside.scaling}" if beside is not None and beside.scaling else ""
    return (
        f"{view.task} trains {rates(view, figures)} on {where}{plural}, "
        f"{ms(figures.step_s)} a step{scaling}{slow if figures.slow_step_s > 1.1 * figures.step_s else ''}."
    )


def rates(view: View, figures: Figures) -> str:
    """Return how many samples a second, and of what the loss counts, if that is something else."""
    text = f"{rate(figures.samples_per_s)} samples/s"
    return text if figures.tokens_per_s is None else f"{text} ({rate(figures.tokens_per_s)} {view.counts}/s)"


def _where(figures: Figures) -> str:
    critical, total_s = figures.critical, figures.critical.total_s or 1.0
    busy = (critical.forward_s + critical.backward_s + critical.optimizer_s) / total_s
    shares = {name: getattr(critical, name) / total_s for name in PARTS}
    largest = sorted((name for name in PARTS if shares[name] >= 0.005), key=lambda name: -shares[name])[:4]
    listed = ", ".join(f"{shares[name]:.0%} {NAMES[name]}" for name in largest)
    well = "well used" if busy >= GOOD_BUSY else "the rest is what can be gained"
    text = f"Of a step, {busy:.0%} is computing ({well}): {listed}"
    slow = figures.straggler
    if slow is not None:
        phase = {"loader": "loading data"}.get(slow.phase, slow.phase)
        text += f"; rank {slow.rank} keeps the others waiting {ms(slow.lost_s)} in each step, with {phase}"
    elif not figures.knows_waits and len(figures.by_rank) > 1:
        text += "; what of backward is waiting for other ranks, this engine does not tell"
    return text + "."


def _what_first(view: View) -> str:
    if not view.advice:
        return "Nothing that was measured promises more than 3%: leave it as it is."
    return f"Change first: {view.advice[0].text}"


def against(first: View, second: View) -> str:
    """Return how two runs compare, in one sentence."""
    if first.figures is None or second.figures is None or not first.figures.samples_per_s:
        return "The two cannot be compared: one of them has no steps."
    ratio = second.figures.samples_per_s / first.figures.samples_per_s
    if 0.97 <= ratio <= 1.03:
        return f"{first.label} and {second.label} are as fast as each other, within 3%."
    faster, slower = (second, first) if ratio > 1 else (first, second)
    assert faster.figures is not None and slower.figures is not None
    parts = {name: getattr(slower.figures.critical, name) - getattr(faster.figures.critical, name) for name in NAMES}
    part = max(parts, key=lambda name: parts[name])
    why = f"; most of it is {NAMES[part]}, {ms(parts[part])} a step" if parts[part] > 0 else ""
    return f"{faster.label} is {max(ratio, 1 / ratio):.2f} times as fast as {slower.label}{why}."


def ms(seconds: float) -> str:
    """Return a duration in milliseconds, with as many digits as matter."""
    milliseconds = 1e3 * seconds
    if milliseconds >= 10_000:
        return f"{seconds:,.0f} s"
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def rate(per_s: float) -> str:
    """Return samples a second, with as many digits as matter."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
