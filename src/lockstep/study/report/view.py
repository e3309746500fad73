"""A run as the page shows it, its baseline comparison, its verdict in sentences, and its Chrome trace."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.study.report.advice import Advice, advise, find_facts
from lockstep.study.report.figures import (
    PARTS,
    Figures,
    Traffic,
    Window,
    find_figures,
    find_traffic,
    find_window,
    make_window,
)
from lockstep.study.report.run_reader import Recorded, read_run

# A run as the report looks at it: the record, its figures, and what to change.


@dataclass(frozen=True)
class View:
    """A run, and what is known of it."""

    run: Recorded
    figures: Figures | None
    traffic: Traffic | None
    window: Window | None
    advice: list[Advice]

    @property
    def task(self) -> str:
        """What was trained."""
        return str(self.run.last.get("task") or "a run")

    @property
    def counts(self) -> str:
        """What the loss counts, in a word; only where that is not samples."""
        return str(self.run.last.get("counts") or "tokens")

    @property
    def num_devices(self) -> int:
        """How many devices trained, as far as known."""
        devices = [record.device for record in self.run.ranks.values()]
        return sum(len(device.split(", ")) for device in devices)

    @property
    def device(self) -> str:
        """What kind they are."""
        first = next(iter(self.run.ranks.values()), None)
        return "cuda" if first is not None and first.device.startswith("cuda") else "cpu"


def view_run(folder: Path) -> View:
    """Read a run, and find what there is to say of it.

    Raises:
        ConfigurationError: Nothing was recorded in ``folder``.
    """
    run = read_run(folder)
    figures, traffic = find_figures(run), find_traffic(run)
    view = View(run, figures, traffic, find_window(run), [])
    if figures is None:
        return view
    return View(run, figures, traffic, view.window, advise(find_facts(run, view.device, figures, traffic)))


def setting_values(session: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a session by name; nothing if it does not tell them."""
    settings = session.get("settings")
    return settings if isinstance(settings, dict) else {}


# A run on one device beside another: is it the same training, and how much faster is it on more.

_ALIKE = ("seed", "global_batch_size", "precision", "clip", "schedule", "warmup", "lr_scaling", "shares", "wire")
"""Settings that make it another training run."""

GOOD_SHARE = 0.8
"""Of what twice as many devices could give at best, who gets this much is well served."""

_ROUNDING = 1e-3
"""In a first step nothing but roundings can differ; those of bf16 are the largest."""


@dataclass(frozen=True)
class BaselineComparison:
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


def compare_with_baseline(view: View, other: View) -> BaselineComparison:
    """Return what is to be said of ``view`` beside ``other``."""
    devices = other.num_devices
    name = "one device" if devices == 1 else f"{devices} devices"
    speedup = None
    if view.figures is not None and other.figures is not None and other.figures.samples_per_s:
        speedup = view.figures.samples_per_s / other.figures.samples_per_s
    return BaselineComparison(
        name, other, _compare_losses(view, other, name), speedup, view.num_devices / max(1, devices)
    )


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


# The report in three sentences: how fast, where the time goes, what to change first.

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


def sentences(view: View, baseline: BaselineComparison | None = None) -> tuple[str, str, str]:
    """Return the three sentences; with a ``baseline``, the first says how much more devices gave."""
    figures = view.figures
    if figures is None:
        return (
            f"{view.task} has recorded no step that all ranks have done.",
            "So nothing is known of where the time goes.",
            "Record a run of some more steps, and look again.",
        )
    return _how_fast(view, figures, baseline), _where(figures), _what_first(view)


def _how_fast(view: View, figures: Figures, baseline: BaselineComparison | None) -> str:
    where = f"{view.num_devices} {'GPU' if view.device == 'cuda' else 'CPU process'}"
    plural = "" if view.num_devices == 1 else ("s" if view.device == "cuda" else "es")
    slow = f"; one step in twenty takes more than {ms(figures.slow_step_s)}"
    scaling = f"; {baseline.scaling}" if baseline is not None and baseline.scaling else ""
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


def ms(seconds: float) -> str:
    """Return a duration in milliseconds, with as many digits as matter."""
    milliseconds = 1e3 * seconds
    if milliseconds >= 10_000:
        return f"{seconds:,.0f} s"
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def rate(per_s: float) -> str:
    """Return samples a second, with as many digits as matter."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


# The timelines of all recorded steps as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.
#
# Source: the Trace Event Format, with complete events (``X``), instants (``i``), counters (``C``) and names (``M``).

_WORK, _BUCKETS, _EVENTS = 0, 1, 2
"""Threads of each rank's process."""


def to_trace(run: Recorded) -> str:
    """Return the trace as JSON. Times are microseconds after the first step; a process is a rank."""
    zero = min((step.time for record in run.ranks.values() for step in record.steps), default=0.0)
    entries: list[dict[str, Any]] = []
    for rank, record in sorted(run.ranks.items()):
        entries += _names(rank, f"rank {rank} ({record.device} on {record.host})")
        for timeline in record.timelines:
            window = make_window([{rank: timeline}])
            shift_us = (timeline.time - zero) * 1e6
            for bar in window.bars:
                arguments = {"step": bar.step + 1}
                entries.append(
                    _span(rank, _WORK, bar.phase.replace("_", " "), shift_us, bar.begin_s, bar.end_s, arguments)
                )
            for bucket in window.buckets:
                arguments = {"step": bucket.step + 1, "bytes": bucket.size_bytes}
                name = f"bucket {bucket.number}"
                entries.append(_span(rank, _BUCKETS, name, shift_us, bucket.sent_s, bucket.done_s, arguments))
        for event in record.events:
            entries.append(
                {
                    "ph": "i",
                    "s": "p",
                    "pid": rank,
                    "tid": _EVENTS,
                    "name": event.event,
                    "ts": (event.time - zero) * 1e6,
                    "args": {"text": event.text, "step": event.step},
                }
            )
        for line in record.machine:
            sizes = {name: value for name, value in line.figures.items() if name.endswith("_bytes")}
            counter = {"ph": "C", "pid": rank, "name": "memory", "ts": (line.time - zero) * 1e6, "args": sizes}
            entries.append(counter)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": entries})


def _span(
    rank: int, thread: int, name: str, shift_us: float, begin_s: float, end_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    begin_us, length_us = shift_us + begin_s * 1e6, max(0.0, end_s - begin_s) * 1e6
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": begin_us, "dur": length_us, "args": arguments}


def _names(rank: int, name: str) -> list[dict[str, Any]]:
    threads = {_WORK: "step", _BUCKETS: "buckets", _EVENTS: "events"}
    return [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
        *(
            {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": text}}
            for thread, text in threads.items()
        ),
    ]
