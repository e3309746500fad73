"""A run as the page shows it, its baseline comparison, its verdict in sentences, and its Chrome trace."""

from __future__ import annotations

import json
import math
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from lockstep.study.drawing import PARTS
from lockstep.study.links import format_megabytes
from lockstep.study.report.advice import Advice, advise, find_facts, in_ms
from lockstep.study.report.figures import (
    Figures,
    Network,
    Parts,
    Traffic,
    bars_of,
    find_figures,
    find_network,
    find_traffic,
    find_window,
)
from lockstep.study.report.run_reader import Recorded, Timeline, read_run
from lockstep.telemetry.live_view import rate
from lockstep.telemetry.run_record import kind_of


@dataclass(frozen=True)
class View:
    """A run, and what is known of it."""

    run: Recorded
    figures: Figures | None
    traffic: Traffic | None
    window: dict[int, list[Timeline]]
    advice: list[Advice]
    network: Network | None = None

    @property
    def task(self) -> str:
        """What was trained."""
        return str(self.run.last.get("task") or "a run")

    @property
    def num_devices(self) -> int:
        """How many devices trained, as far as known."""
        return sum(len(record.device.split(", ")) for record in self.run.ranks.values())

    @property
    def device(self) -> str:
        """What type they are, such as ``cuda``."""
        return self.run.zero.device.partition(":")[0] or "cpu"


def view_run(folder: Path) -> View:
    """Read a run, and find what is worth saying of it.

    Raises:
        ConfigurationError: Nothing was recorded in ``folder``.
    """
    run = read_run(folder)
    figures, traffic = find_figures(run), find_traffic(run)
    network = None if figures is None else find_network(run, figures)
    view = View(run, figures, traffic, find_window(run), [], network)
    if figures is not None:
        view.advice.extend(advise(find_facts(run, view.device, figures, traffic, network)))
    return view


# Another run beside it: is it the same training, and how much faster is it on more devices.

# Settings that make it another training run.
_ALIKE = (
    *("seed", "global_batch_size", "precision", "clip", "schedule", "warmup", "lr_scaling", "shares"),
    *("compression", "wire"),
)

# Of what twice as many devices could give at best, who gets this much is well served.
GOOD_SHARE = 0.8

# In a first step nothing but roundings can differ; those of bf16 are the largest.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class BaselineComparison:
    """What a run is compared with.

    Args:
        name: What it is called in a drawing.
        view: The other run.
        loss_note: How the losses compare, in a sentence.
        scaling: How much more devices gave, in words; empty if that is not known.
    """

    name: str
    view: View
    loss_note: str
    scaling: str


def compare_with_baseline(view: View, other: View) -> BaselineComparison:
    """Return what there is to be said of ``view`` beside ``other``."""
    name = "one device" if other.num_devices == 1 else f"{other.num_devices} devices"
    scaling = ""
    if view.figures is not None and other.figures is not None and other.figures.samples_per_s:
        speed_up = view.figures.samples_per_s / other.figures.samples_per_s
        scaling = f"{speed_up:.2f} times as fast as {name}"
        num_times = view.num_devices / max(1, other.num_devices)
        if num_times > 1:
            is_good = speed_up >= GOOD_SHARE * num_times
            scaling += f", {speed_up / num_times:.0%} of linear{'' if is_good else f' ({GOOD_SHARE:.0%} is good)'}"
    return BaselineComparison(name, other, _compare_losses(view, other, name), scaling)


def _compare_losses(view: View, other: View, name: str) -> str:
    here, there = _losses(view), _losses(other)
    apart = {
        step: abs(here[step] - there[step]) / (max(abs(here[step]), abs(there[step])) or 1.0)
        for step in here
        if step in there
    }
    if not apart:
        return f"No step is in both this run and that on {name}."
    differs = [] if view.task == other.task else [f"task {view.task} here, {other.task} there"]
    # The size of the batch may be the task's, and stands with the session.
    here_set, there_set = ({**each.run.settings, **each.run.last} for each in (view, other))
    for setting in _ALIKE:
        if here_set.get(setting) != there_set.get(setting):
            differs.append(f"{setting} {here_set.get(setting)} here, {there_set.get(setting)} there")
    # The first common step shows a wrong gradient or another batch; what comes later grows out of roundings, too.
    first, far = min(apart), max(apart, key=lambda step: apart[step])
    how = "begin alike and differ"
    if apart[first] > 0:
        why = " already (lockstep verify says why)" if apart[first] > _ROUNDING else ""
        how = f"differ by {_share(apart[first])} in step {first + 1}{why},"
    at_most = f"by {_share(apart[far])} at most, in step {far + 1}"
    how = f"{how} {at_most}" if apart[far] > 0 else "are the same to the bit"
    text = f"Over {len(apart)} steps, the loss and that on {name} {how}"
    return f"{text}; it is another training run: {', '.join(differs)}." if differs else f"{text}."


def _share(difference: float) -> str:
    return f"{difference:.2%}" if difference >= 1e-4 else f"{difference:.1g} of it"


def _losses(view: View) -> dict[int, float]:
    """Return the losses by step, in their order, without those that are no numbers or means over several steps."""
    # Lines that stand for several steps have means, which agree with no step of another run.
    steps = [step for step in view.run.zero.steps if step.num_steps == 1]
    return {step.step: step.loss for step in steps if step.loss is not None and math.isfinite(step.loss)}


# The report in three sentences: how fast, where the time goes, what to change first.

# Devices that compute for this share of a step are kept well.
GOOD_BUSY = 0.9


def sentences(view: View, baseline: BaselineComparison | None = None) -> tuple[str, str, str]:
    """Return the three sentences; with a ``baseline``, the first says how much more devices gave."""
    figures = view.figures
    if figures is None:
        return (
            f"{view.task} has recorded no step that all ranks have done.",
            "So nothing is known of where the time goes.",
            "Record a run of some more steps, and look again.",
        )
    first = "Nothing that was measured promises more than 3%: leave it as it is."
    if view.advice:
        first = f"Change first: {view.advice[0].text}"
    return _how_fast(view, figures, baseline), _where(figures, view.network), first


def _how_fast(view: View, figures: Figures, baseline: BaselineComparison | None) -> str:
    kind = kind_of(view.device)
    one, more = ("CPU process", "CPU processes") if kind == "CPU" else (kind, f"{kind}s")
    rates = f"{rate(figures.samples_per_s)} samples/s"
    if figures.tokens_per_s is not None:
        rates += f" ({rate(figures.tokens_per_s)} {view.run.last.get('counts') or 'tokens'}/s)"
    text = f"{view.task} trains {rates} on {view.num_devices} {one if view.num_devices == 1 else more}"
    text += f", {in_ms(figures.step_s)} a step"
    if baseline is not None and baseline.scaling:
        text += f"; {baseline.scaling}"
    if figures.slow_step_s > 1.1 * figures.step_s:
        text += f"; one step in twenty takes more than {in_ms(figures.slow_step_s)}"
    return f"{text}."


def by_words(parts: Parts) -> dict[str, float]:
    """Return the seconds of a step by part in words."""
    return dict(zip(PARTS, astuple(parts), strict=True))


def _where(figures: Figures, network: Network | None) -> str:
    critical, total_s = figures.critical, figures.critical.total_s or 1.0
    busy = (critical.computing_s + critical.optimizer_s) / total_s
    shares = {name: seconds / total_s for name, seconds in by_words(critical).items() if seconds >= 0.005 * total_s}
    # Four parts are what a reader keeps in mind, and what is below half a percent is noise.
    largest = sorted(shares, key=lambda name: -shares[name])[:4]
    listed = ", ".join(f"{shares[name]:.0%} {name}" for name in largest)
    well = "well used" if busy >= GOOD_BUSY else "the rest is what can be gained"
    text = f"Of a step, {busy:.0%} is computing ({well}): {listed}"
    slow = figures.straggler
    if slow is not None:
        phase = {"loader": "loading data"}.get(slow.phase, slow.phase)
        text += f"; rank {slow.rank} keeps the others waiting {in_ms(slow.lost_s)} in each step, with {phase}"
    elif not figures.knows_waits and len(figures.by_rank) > 1:
        text += "; what of backward is waiting for other ranks, this engine does not tell"
    if network is not None and network.link is not None:
        sent = format_megabytes(network.sent_bytes)
        text += f"; gradients without compression are {sent} a step from each of {network.num_machines} machines"
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
    threads = {"step": 0, "buckets": 1, "events": 2}  # of each rank's process
    entries: list[dict[str, Any]] = []

    def add(kind: str, rank: int, thread: str, name: str, args: dict[str, Any], **more: Any) -> None:
        entries.append({"ph": kind, "pid": rank, "tid": threads[thread], "name": name, "args": args, **more})

    def span(rank: int, thread: str, name: str, begin_s: float, end_s: float, **args: int) -> None:
        add("X", rank, thread, name, args, ts=begin_s * 1e6, dur=max(0.0, end_s - begin_s) * 1e6)

    for rank, record in sorted(run.ranks.items()):
        add("M", rank, "step", "process_name", {"name": f"rank {rank} ({record.device} on {record.host})"})
        for thread in threads:
            add("M", rank, thread, "thread_name", {"name": thread})
        for timeline in record.timelines:
            number, shift_s = timeline.step + 1, timeline.time - zero
            for phase, begin_s, end_s in bars_of(timeline, zero):
                span(rank, "step", phase.replace("_", " "), begin_s, end_s, step=number)
            for bucket in timeline.buckets:
                sent_s, done_s = shift_s + bucket.sent_s, shift_s + bucket.done_s
                span(rank, "buckets", f"bucket {bucket.number}", sent_s, done_s, step=number, bytes=bucket.size_bytes)
        for event in record.events:
            args = {"text": event.text, "step": event.step}
            add("i", rank, "events", event.event, args, ts=(event.time - zero) * 1e6, s="p")
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": entries})
