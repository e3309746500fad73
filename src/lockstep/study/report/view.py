"""A recorded run with its figures and advice, a comparison with another run, the summary, and a Chrome trace."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.study.links import format_megabytes
from lockstep.study.report.advice import View, who_has_the_cores
from lockstep.study.report.figures import bars_of, find_cores, find_network
from lockstep.telemetry.figures import find_figures
from lockstep.telemetry.live_view import rate
from lockstep.telemetry.record import Recorded, kind_of, read_run
from lockstep.telemetry.step_times import PARTS, milliseconds


def view_run(folder: Path) -> View:
    """Read a run, and evaluate it.

    Raises:
        ConfigurationError: Nothing was recorded in ``folder``.
    """
    run = read_run(folder)
    figures = find_figures(run)
    num_devices = sum(len(record.device.split(", ")) for record in run.ranks.values())
    task, device = str(run.last.get("task") or "a run"), run.zero.device.partition(":")[0] or "cpu"
    return View(run, figures, find_network(run, figures), find_cores(run), task, device, num_devices)


# Comparison with another run: are the losses the same, and how much faster is it?

# Settings that change the results of training.
_ALIKE = ["seed", "global_batch_size", "precision", "clip", "schedule", "warmup", "lr_scaling", "shares", "compression"]

# In the first step, only rounding errors can differ; those of bf16 are the largest.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class BaselineComparison:
    """The comparison of a run with another.

    Args:
        name: The name of the other run in plots.
        view: The other run.
        loss_note: A sentence that compares the losses.
        scaling: The speed-up in words; empty if unknown.
    """

    name: str
    view: View
    loss_note: str
    scaling: str


def compare_with_baseline(view: View, other: View) -> BaselineComparison:
    """Return the comparison of ``view`` with ``other``."""
    name = "one device" if other.num_devices == 1 else f"{other.num_devices} devices"
    scaling = ""
    if view.figures.samples_per_s and other.figures.samples_per_s:
        speed_up = view.figures.samples_per_s / other.figures.samples_per_s
        scaling = f"{speed_up:.2f} times as fast as {name}"
        num_times = view.num_devices / max(1, other.num_devices)
        if num_times > 1:
            scaling += f", {speed_up / num_times:.0%} of linear"
    return BaselineComparison(name, other, _compare_losses(view, other, name), scaling)


def _compare_losses(view: View, other: View, name: str) -> str:
    here, there = _losses(view), _losses(other)
    # As shares of the first loss: of a later one, which may be next to nothing, any rounding is much.
    scale = abs(there[min(there)]) or 1.0 if there else 1.0
    apart = {step: abs(here[step] - there[step]) / scale for step in here if step in there}
    if not apart:
        return f"This run and that on {name} have no step in common."
    # The batch size may be that of the task, which is not a setting, but a value of the session.
    sets = [each.run.config for each in (view, other)]
    settings = {name: [each.get(name) for each in sets] for name in ("task", *_ALIKE)}
    differs = [f"{name} {mine} here, {theirs} there" for name, (mine, theirs) in settings.items() if mine != theirs]
    # A difference in the first common step is a wrong gradient or another batch; later ones may come from rounding.
    first, far = min(apart), max(apart, key=lambda step: apart[step])
    why = " (lockstep verify finds the cause)" if apart[first] > _ROUNDING else ""
    how = f"differ by {_share(apart[first])} in step {first + 1}{why}," if apart[first] > 0 else ""
    at_most = f"by at most {_share(apart[far])}, in step {far + 1}"
    how = f"{how or 'begin with the same value and differ'} {at_most}" if apart[far] > 0 else "are bitwise equal"
    text = f"Over {len(apart)} steps, the losses of this run and of that on {name} {how}"
    return f"{text}; the settings differ: {', '.join(differs)}." if differs else f"{text}."


def _share(difference: float) -> str:
    return f"{f'{difference:.2%}' if difference >= 1e-4 else f'{difference:.1g}'} of the first loss"


def _losses(view: View) -> dict[int, float]:
    """Return the finite losses by step, in order, without lines that cover several steps."""
    steps = [step for step in view.run.zero.steps if step.num_steps == 1]
    return {step.step: step.loss for step in steps if step.loss is not None and math.isfinite(step.loss)}


# The summary in three sentences: how fast, where the time goes, what to change first.

# Devices that compute for so many percent of a step are well used.
GOOD_BUSY = 90


def sentences(view: View, baseline: BaselineComparison | None = None) -> Sequence[str]:
    """Return the three sentences, fewer if there are no figures; with a ``baseline``, the first compares the speed."""
    if not view.figures.by_rank:
        return f"The record of {view.task} has no step that all ranks have done.", "Record a run with more steps."
    change = f"Change first: {view.advice[0].text}" if view.advice else "No change is predicted to gain more than 3%."
    return _how_fast(view, baseline), _where(view), change


def _how_fast(view: View, baseline: BaselineComparison | None) -> str:
    figures, kind = view.figures, kind_of(view.device)
    one, more = ("CPU process", "CPU processes") if kind == "CPU" else (kind, f"{kind}s")
    # Without a DataLoader, the samples of a script are unknown.
    is_counted = figures.samples_per_s > 0
    rates = f"{rate(figures.samples_per_s)} samples/s" if is_counted else f"{rate(1 / figures.step_s)} steps/s"
    if figures.tokens_per_s is not None:
        rates += f" ({rate(figures.tokens_per_s)} {view.run.last.get('counts') or 'tokens'}/s)"
    text = f"{view.task} trains {rates} on {view.num_devices} {one if view.num_devices == 1 else more}"
    text += f", {milliseconds(figures.step_s)} a step"
    if baseline is not None and baseline.scaling:
        text += f"; {baseline.scaling}"
    if figures.slow_step_s > 1.1 * figures.step_s:
        text += f"; one step in twenty takes more than {milliseconds(figures.slow_step_s)}"
    return f"{text}."


def _where(view: View) -> str:
    figures, network, critical = view.figures, view.network, view.figures.critical
    total_s = critical.total_s or 1.0
    percents = {name: round(100 * seconds / total_s) for name, seconds in critical.parts().items()}
    named = ["core_wait"] if view.is_starved else ["forward", "backward", "optimizer"]
    # The sum of the rounded parts, so that what is printed adds up; less than half a percent is noise.
    share = sum(percents.get(name, 0) for name in named)

    def listed(*, is_named: bool) -> str:
        largest = sorted(filter(percents.get, percents), key=lambda name: -percents[name])
        return ", ".join(f"{percents[name]}% {PARTS[name].label}" for name in largest if (name in named) == is_named)

    if view.is_starved:
        text = f"Of a step, {share}% is waiting for a core, as {who_has_the_cores(view.cores)[0]}"
    else:
        text = f"Of a step, {share}% is computing{' (well used)' * (share >= GOOD_BUSY)}: {listed(is_named=True)}"
    if rest := listed(is_named=False):
        is_lost = share < GOOD_BUSY and not view.is_starved
        text += f"; the rest {'can be gained:' if is_lost else 'is'} {rest}"
    slow = figures.straggler
    if slow is not None:
        where = PARTS[slow.part].doing
        text += f"; the others wait {milliseconds(slow.lost_s)} in each step for rank {slow.rank} ({where})"
    elif critical.exposed_s is None and len(figures.by_rank) > 1:
        text += "; backward includes waiting for other ranks, which this engine does not measure"
    if network is not None and network.link is not None:
        sent = format_megabytes(network.sent_bytes)
        text += f"; without compression, each of {network.num_machines} machines sends {sent} of gradients per step"
        text += f", over links of {network.link.bytes_per_s / 1e6:.3g} MB/s"
        if network.slowest:
            text += f" (the slowest is {network.slowest})"
    return text + "."


def to_trace(run: Recorded) -> str:
    """Return all recorded timelines as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    Times are microseconds after the first step; a process is a rank.

    Source: the Trace Event Format, with complete events (``X``), instants (``i``) and names (``M``).
    """
    zero = min((step.time for record in run.ranks.values() for step in record.steps), default=0.0)
    entries: list[dict[str, Any]] = []

    def add(kind: str, thread: int, name: str, args: dict[str, Any], at_s: float = 0.0, **more: Any) -> None:
        entries.append({"ph": kind, "pid": rank, "tid": thread, "name": name, "args": args, "ts": at_s * 1e6, **more})

    for rank, record in sorted(run.ranks.items()):
        add("M", 0, "process_name", {"name": f"rank {rank} ({record.device} on {record.host})"})
        for thread, name in enumerate(("step", "buckets", "events")):
            add("M", thread, "thread_name", {"name": name})
        for timeline in record.timelines:
            of = {"step": timeline.step + 1}
            for phase, begin_s, end_s in bars_of(timeline, zero):
                add("X", 0, phase.replace("_", " "), of, begin_s, dur=(end_s - begin_s) * 1e6)
            for bucket in timeline.buckets:
                args, sent_s = {**of, "bytes": bucket.size_bytes}, timeline.time - zero + bucket.sent_s
                add("X", 1, f"bucket {bucket.number}", args, sent_s, dur=(bucket.done_s - bucket.sent_s) * 1e6)
        for event in record.events:
            add("i", 2, event.event, {"text": event.text, "step": event.step}, event.time - zero, s="p")
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": entries})
