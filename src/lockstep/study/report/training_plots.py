"""How training went: the loss, the learning rate and the norm of the gradient over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lockstep.study.drawing import Plot, finish_plot, make_axes
from lockstep.study.report.beside import Beside
from lockstep.study.report.lines import Step
from lockstep.study.report.plotting import STYLES, binned, steps_of
from lockstep.study.report.view import View

Points = list[tuple[float, float]]


def draw_loss(views: Sequence[View], beside: Beside | None) -> Plot | None:
    """Return the loss over the steps, and that of the run on one device if it is known."""
    curves = [(view.label or "this run", points) for view in views if (points := _points(view, lambda s: s.loss))]
    if beside is not None and (points := _points(beside.view, lambda s: s.loss)):
        curves.append((beside.name, points))
    curves = [(name, points) for name, points in curves if any(math.isfinite(loss) for _, loss in points)]
    if not curves:
        return None
    words = []
    for name, points in curves:
        known = [loss for _, loss in points if math.isfinite(loss)]
        text = f"from {points[0][1]:.4g} to {points[-1][1]:.4g}, lowest {min(known):.4g}"
        words.append(f"{name}: {text}" if len(curves) > 1 else text)
        if len(known) < len(points):
            words.append(f"not finite in {len(points) - len(known)} steps")
    alt = f"Curve of the loss over the steps: {'; '.join(words)}."
    note = beside.loss_note if beside is not None else ""
    return _curves("Loss", "loss of the global batch", curves, alt, note, inches_high=2.8)


def draw_learning_rate(views: Sequence[View]) -> Plot | None:
    """Return the learning rate over the steps; None if it never changed, which the settings say."""
    curves = [(view.label, _points(view, lambda s: s.learning_rate)) for view in views]
    curves = [(name, points) for name, points in curves if len({rate for _, rate in points}) > 1]
    words = [f"from {points[0][1]:.3g} to {points[-1][1]:.3g}" for _, points in curves]
    alt = f"Curve of the learning rate over the steps: {'; '.join(words)}."
    return _curves("Learning rate", "learning rate", curves, alt) if curves else None


def draw_grad_norm(views: Sequence[View]) -> Plot | None:
    """Return the norm of the gradient before clipping; None if nothing needed it."""
    curves = [(view.label, _points(view, lambda s: s.grad_norm)) for view in views]
    curves = [(name, points) for name, points in curves if any(math.isfinite(norm) for _, norm in points)]
    words = []
    for _, points in curves:
        known = [(norm, step) for step, norm in points if math.isfinite(norm)]
        words.append(f"last {known[-1][0]:.3g}, largest {max(known)[0]:.3g} in step {max(known)[1]:.0f}")
    alt = f"Curve of the norm of the gradient over the steps: {'; '.join(words)}."
    return _curves("Gradient norm", "before clipping", curves, alt) if curves else None


def _points(view: View, read: Callable[[Step], float | None]) -> Points:
    return [(step.step + 1.0, value) for step in steps_of(view) if (value := read(step)) is not None]


def _curves(
    heading: str, label: str, curves: Sequence[tuple[str, Points]], alt: str, note: str = "", inches_high: float = 2.0
) -> Plot:
    figure, axes = make_axes(inches_high)
    for (name, points), (colour, dash) in zip(curves, STYLES, strict=False):
        axes.plot(*zip(*binned(points), strict=True), color=colour, linestyle=dash, linewidth=1.8, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(axis="y", linewidth=0.6)
    if len(curves) > 1 or curves[0][0] not in ("", "this run"):
        axes.legend(frameon=False)
    return finish_plot(heading, alt, figure, note)
