"""A recorded run: its figures, advice with predicted gains, a comparison, the summary, and a Chrome trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.study.common import MIB
from lockstep.study.links import Cost, Method, format_megabytes, predict_step
from lockstep.study.report.figures import (
    Cores,
    Network,
    bars_of,
    find_cores,
    find_network,
    num_machines,
    timelines_by_step,
)
from lockstep.telemetry.figures import Figures, find_figures
from lockstep.telemetry.live_view import rate
from lockstep.telemetry.record import Recorded, kind_of, read_run
from lockstep.telemetry.step_times import PARTS, milliseconds

# A gain below this is not worth a sentence.
WORTH = 1.03
# From this share of a step that waits for a core, speeds are those of a busy machine.
_BUSY = 0.1
# Speeds of runs are compared if their numbers of samples differ by no more than this share.
_SAME_LENGTH = 0.1
_WORTH_WORKERS_ON_CPU = 1.3


@dataclass(frozen=True)
class View:
    """A recorded run, and what follows from its record.

    Attributes:
        figures: Of its steps.
        network: The traffic between machines; None for one machine, or if it was not recorded.
        cores: The use of the cores; None if unknown.
        task: The name of the task.
        device: The type of the devices, such as ``cpu`` or ``cuda``.
        num_devices: The number of devices on which it trained.
    """

    run: Recorded
    figures: Figures
    network: Network | None
    cores: Cores | None
    task: str
    device: str
    num_devices: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks that trained."""
        return len(self.figures.by_rank)

    @property
    def is_starved(self) -> bool:
        """Whether the largest part of a step is waiting for a core."""
        return self.part("core_wait") == max(self.figures.critical.parts().values(), default=0.0) > 0

    @property
    def advice(self) -> list[Advice]:
        """Changes that are worthwhile, largest gain first. Changes that alter the results of training come last.

        The gain is the ratio of the present time of a step to the predicted one. Without a prediction there is none.
        """
        if self.part("total") <= 0:
            return []
        # The other times of a run that mostly waits for cores do not show what could be gained.
        rules = [_cores] if self.is_starved else _RULES
        changes = [advice for rule in rules for advice in rule(self) if advice.gain >= WORTH]
        return sorted(changes, key=lambda advice: (not advice.keeps_run, -advice.gain))

    def part(self, *names: str) -> float:
        """Return the seconds of parts of a step on the critical path; see `StepTimes.part`."""
        return self.figures.critical.part(*names)

    def number(self, name: str) -> int | None:
        """Return a whole number of the session or its settings, such as the global batch size; None if unknown."""
        value = self.run.config.get(name)
        return value if type(value) is int else None

    def how(self, name: str, *values: object) -> str:
        """Return what to write for a change in `_HOW`: flags of a command, or the code of a script."""
        is_script = self.run.config.get("recorded_by") == "monitor"
        return _HOW[name][is_script].format(*values)

    def gain(self, saved_s: float) -> float:
        """Return the ratio of the throughput if a step were so much shorter to the present one."""
        return self.part("total") / (self.part("total") - min(saved_s, 0.95 * self.part("total")))

    def share(self, *parts: str) -> str:
        """Return the share of parts of a step in words."""
        return f"{self.figures.critical.share(*parts):.0%}"

    @property
    def waits(self) -> bool | None:
        """Whether steps waited for a core, so that speeds are those of a busy machine; None if unknown."""
        times = self.figures.critical
        return None if times.core_wait_s is None else times.share("core_wait") >= _BUSY


@dataclass(frozen=True)
class Advice:
    """One change.

    Args:
        cause: What was measured.
        change: What to do.
        gain: Predicted ratio of the new throughput to the present one.
        keeps_run: Whether the change keeps the results of training; a larger batch does not.
        bound: ``about``, or ``at most`` or ``at least`` if only a bound of the gain is known.
    """

    cause: str
    change: str
    gain: float
    keeps_run: bool = True
    bound: str = "about"

    @property
    def text(self) -> str:
        """The advice as a sentence."""
        return f"{self.cause}: {self.change} would give {self.bound} {self.gain:.2f} times the throughput."


# By change, the flags of `lockstep train`, and what a script does instead, which has no such flags.
_HOW = {
    "threads": ("--threads {}", "torch.set_num_threads({0}), or OMP_NUM_THREADS={0}"),
    "workers": ("--workers {}", "DataLoader(num_workers={})"),
    "one thread": ("--devices 1 --threads 1", "--devices 1, and torch.set_num_threads(1)"),
    "zero": ("--strategy ddp-zero1", "lockstep.ZeroRedundancyOptimizer"),
    "batch": ("--global-batch-size{}", "batch_size of the DataLoader"),
    "accumulate": ("--accumulate {} with a global batch {} times as large", "no_sync() around all but the last"),
    "evaluation": ("--eval-every STEPS", "in the loop of the script"),
    "checkpoint": ("--checkpoint-every STEPS", "in the loop of the script"),
    "bf16": ("--compression bf16", 'lockstep.DistributedDataParallel(compression="bf16")'),
    "int8": ("--compression int8", 'lockstep.DistributedDataParallel(compression="int8")'),
    "local-sgd": ("--strategy local-sgd", "lockstep.LocalSGD(sync_every=8)"),
}

# Rules about what devices do: load, compute, update, stand still; and how many of them there should be.

# From so many bytes on it is they that take long, not each message's own delay.
LARGE_BYTES = 4 * MIB

# How many times as large a batch is advised, and how much more rarely gradients are exchanged.
_MOST_WORKERS = 16
_TIMES = 4

# From this part of a step on that does not grow with the batch, a larger one is worth a sentence.
_OVERHEAD = 0.25

# ZeRO-1 must save this share of a step. What it saves below that, its second exchange takes (bench/results/advice.txt).
_DIVIDED_SHARE = 0.2

# What a process waits for a micro-batch of a loader process at least: it comes through a pipe and shared memory.
_HANDOVER_S = 0.0003


def who_has_the_cores(view: View) -> tuple[str, str]:
    """Return why ranks waited for cores, and what to do about it; empty if there is nothing to do."""
    cores = view.cores
    if cores is None or not cores.total:
        return "other programs use the cores", "stopping other programs, or a higher quota,"
    most, least = max(cores.others, cores.stolen, cores.throttled), 0.1 * cores.total
    if most < least:
        return _crowded(view, cores)
    # Other programs keep nobody from cores that are idle.
    idle = cores.total - cores.ranks - cores.others - cores.stolen
    if cores.throttled == most or min(cores.throttled, idle) > least:
        return "the quota of the control group stops the ranks", "a higher quota (cpu.max)"
    if cores.others == most:
        who, change = "other programs use", "stopping them, or reserving cores for the run (taskset),"
    else:
        who, change = "the hypervisor keeps", "a machine that nobody else uses"
    return f"{who} {most:.1f} of {cores.total:g} cores", change


def _crowded(view: View, cores: Cores) -> tuple[str, str]:
    """Return the same for ranks that have the cores to themselves."""
    num, threads = cores.num_ranks, cores.threads
    if num * threads <= cores.total:
        return f"loaders and other threads of the ranks use the {cores.total:g} cores, too", ""
    changes = [f"fewer ranks (--devices {fitting})"] if 0 < (fitting := int(cores.total // threads)) < num else []
    fewer = view.how("threads", max(1, int(cores.total // num)))
    changes += [f"fewer threads ({fewer})"] if threads != 1 else []
    return f"the ranks have more threads than the {cores.total:g} cores", ", or ".join(changes)


def _cores(view: View) -> Iterator[Advice]:
    # At most, as ranks that run at the same time compete for memory.
    why, change = who_has_the_cores(view)
    if change:
        cause = f"The ranks wait for a core during {view.share('core_wait')} of the step, as {why}"
        yield Advice(cause, change, view.gain(view.part("core_wait")), bound="at most")


def _loading(view: View) -> Iterator[Advice]:
    # If a single rank loads slowly, `_slow_rank` applies: more workers on all ranks would not help.
    slow, present = view.figures.straggler, view.number("workers")
    if present is None or (slow is not None and slow.part == "data_wait"):
        return
    total_s, wait_s = view.part("total"), view.part("data_wait")
    # Without workers, all loading is waiting. With workers, these are always busy, and still too slow.
    loading_s = wait_s if present == 0 else present * total_s
    # So many that they load the samples of a step during its other work.
    needed = math.ceil(loading_s / max(total_s - wait_s, 1e-9) - 1e-9)
    workers = min(_MOST_WORKERS, max(present + 1, needed))
    step_s = max(total_s - wait_s, loading_s / workers) + (view.number("accumulate") or 1) * _HANDOVER_S
    if view.cores is not None and view.cores.total and view.device == "cpu":
        # Loading is only moved to other cores: the total work of the cores stays the same.
        step_s = max(step_s, min(1.0, (view.cores.ranks + view.cores.others) / view.cores.total) * total_s)
    # On CPUs, loaders also take time from the ranks: in bench/advice.py, a run became slower where less was predicted.
    if view.device == "cpu" and total_s / step_s < _WORTH_WORKERS_ON_CPU:
        return
    cause = f"Data wait is {view.share('data_wait')} of the step"
    how = view.how("workers", workers)
    change = f"{workers} loader worker{'s' * (workers > 1)} per rank instead of {present} ({how})"
    yield Advice(cause, change, total_s / step_s, bound="at most" if view.device == "cpu" else "about")


def _slow_rank(view: View) -> Iterator[Advice]:
    if (slow := view.figures.straggler) is not None:
        # All others wait for it, so all lose this time.
        change = f"making rank {slow.rank} as fast as the others (check its machine, its data and other programs there)"
        yield Advice(str(slow).capitalize(), change, view.gain(slow.lost_s))


def _too_small(view: View) -> Iterator[Advice]:
    if view.num_ranks < 2 or view.figures.straggler is not None:  # which is why the others wait
        return
    # One device computes all shares one after the other, without an exchange. On CPUs the process could also use the
    # cores of the other ranks. As its use of them is unknown, the prediction does not include it, and is a lower bound.
    divided_s = view.part("data_wait", "forward", "backward")
    alone_s = view.num_ranks * divided_s + view.part("optimizer", "other", "core_wait")
    is_large = (view.number("gradient_bytes") or 0) >= LARGE_BYTES
    why = "Exchanging gradients costs more than it saves" if is_large else "The model is too small for several devices"
    cause = f"{why}: computing is {view.share('forward', 'backward')} of the step on {view.num_ranks} devices"
    # With several threads, those of small operations wait for each other.
    how, bound = (view.how("one thread"), "at least") if view.device == "cpu" else ("--devices 1", "about")
    yield Advice(cause, f"one device ({how})", view.part("total") / alone_s, bound=bound)


def _optimizer(view: View) -> Iterator[Advice]:
    # Over links between machines, ZeRO-1 exchanges in two halves that nothing hides: that takes longer than it saves.
    saved_s = view.part("optimizer") * (1 - 1 / view.num_ranks)
    is_plain = view.run.config.get("strategy") == "ddp" and num_machines(view.run) == 1
    if not is_plain or saved_s < _DIVIDED_SHARE * view.part("total"):
        return
    cause = f"The optimizer is {view.share('optimizer')} of the step, the same on every rank"
    yield Advice(cause, f"dividing it among the ranks ({view.how('zero')})", view.gain(saved_s))


def _larger_batch(view: View) -> Iterator[Advice]:
    # The time that does not depend on the number of samples is then spent less often.
    rarer, batch = 1 - 1 / _TIMES, view.number("global_batch_size")
    if view.num_ranks > 1 and all(advice.gain < WORTH for advice in _too_small(view)):
        # Accumulation needs no more memory. The update is less frequent, too.
        if view.gain(rarer * view.part("wire")) < WORTH:
            return
        fixed_s, pieces = view.part("wire", "optimizer"), _TIMES * (view.number("accumulate") or 1)
        cause = f"Exposed communication is {view.share('wire')} of the step"
        change = f"exchanging gradients once for {pieces} micro-batches ({view.how('accumulate', pieces, _TIMES)})"
    else:
        fixed_s = view.part("wire", "optimizer", "other")
        if fixed_s < _OVERHEAD * view.part("total"):
            return
        size = f" {_TIMES * batch}" if batch else ""
        cause = f"{view.share('wire', 'optimizer', 'other')} of the step does not depend on the number of samples"
        change = f"a global batch {_TIMES} times as large ({view.how('batch', size)})"
    yield Advice(cause, change, view.gain(rarer * fixed_s), keeps_run=False)


def _pauses(view: View) -> Iterator[Advice]:
    for kind in ("evaluation", "checkpoint"):
        paused_s = sum(event.seconds or 0.0 for event in view.run.events if event.event == kind)
        share = paused_s / (view.figures.total_s or math.inf)
        cause = f"Training pauses for {kind}s during {share:.0%} of the run"
        yield Advice(cause, f"half as many of them ({view.how(kind)})", 1 / (1 - min(share, 0.99) / 2))


# Ways to exchange gradients, with whether they keep the results of training. Ways that compress have a ratio.
_METHODS = {
    "rounding gradients for the exchange": (Method("bf16", cost=Cost(0.5)), True),
    "rounding gradients to 8 bits, with error feedback": (Method("int8", cost=Cost(0.25)), True),
    "exchanging parameters every 8 steps": (Method("local-sgd", sync_every=8), False),
}


def _exchange(view: View) -> Iterator[Advice]:
    network = view.network
    cause = f"Exposed communication is {view.share('wire')} of the step"
    if view.run.config.get("strategy") != "ddp":
        return
    for effect, (method, keeps_run) in _METHODS.items():
        change = f"{effect} ({view.how(method.name)})"
        is_rounding = method.name == "bf16"
        if keeps_run and view.run.config.get("compression") is not None:
            continue
        if is_rounding and (view.number("gradient_bytes") or 0) < LARGE_BYTES:
            continue
        if network is not None and network.link is not None:
            sent = f"{format_megabytes(network.sent_bytes)} from each of {network.num_machines} machines"
            where = f"{cause} ({sent} at {network.link.bytes_per_s / 1e6:.3g} MB/s)"
            present = predict_step(network.profile, Method("ddp"), network.link, network.num_machines)
            changed = predict_step(network.profile, method, network.link, network.num_machines)
            # At most, as the record does not contain the time of encoding, which `lockstep predict` measures.
            bound = "at most" if view.device == "cpu" else "about"
            yield Advice(where, change, present.seconds / changed.seconds, keeps_run, bound)
        elif is_rounding and (view.device != "cpu" or num_machines(view.run) > 1):
            # Half the bytes take half the time, unless most of it is latency. In shared memory, rounding takes as long
            # as adding.
            yield Advice(cause, change, view.gain(view.part("wire") / 2))


_RULES = (_cores, _loading, _slow_rank, _exchange, _optimizer, _too_small, _larger_batch, _pauses)


# Reading a run.


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
_RESULT_SETTINGS = ["seed", "global_batch_size", "precision", "clip", "schedule", "warmup", "lr_scaling", "shares"]
_RESULT_SETTINGS += ["compression"]

# In the first step, only rounding errors can differ; those of bf16 are the largest.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class BaselineComparison:
    """The comparison of a run with another.

    Args:
        name: The name of the other run in sentences and plots.
        view: The other run.
        loss_note: A sentence that compares the losses.
        scaling: The speed-up in words; empty if unknown.
    """

    name: str
    view: View
    loss_note: str
    scaling: str


def compare_with_baseline(view: View, other: View, *, is_only: bool = True) -> BaselineComparison:
    """Return the comparison of ``view`` with ``other``, whose name has its folder if it is not the only one."""
    name = "one device" if other.num_devices == 1 else f"{other.num_devices} devices"
    name += "" if is_only else f" ({other.run.folder})"
    scaling = ""
    if view.figures.samples_per_s and other.figures.samples_per_s:
        runs = ("this run", view), ("that one", other)
        obstacles = [f"{who} waited {run.share('core_wait')} of a step for a core" for who, run in runs if run.waits]
        lengths = [sum(line.samples * line.num_steps for line in run.run.zero.steps) for run in (view, other)]
        if min(lengths) < (1 - _SAME_LENGTH) * max(lengths):
            obstacles.append("this run has {:,.0f} samples, that one {:,.0f}".format(*lengths))
        speed_up = round(view.figures.samples_per_s / other.figures.samples_per_s, 2)
        scaling = f"{speed_up:.2f} times as fast as {name}"
        num_times = view.num_devices / max(1, other.num_devices)
        if num_times > 1:
            scaling += f", {speed_up / num_times:.0%} of linear"
        scaling += " (if both machines were quiet)" * (None in (view.waits, other.waits))
        if obstacles:
            scaling = f"its speed is not compared with that of {name}, as {', and '.join(obstacles)}"
    return BaselineComparison(name, other, _compare_losses(view, other, name), scaling)


def _compare_losses(view: View, other: View, name: str) -> str:
    losses, other_losses = _losses(view), _losses(other)
    # As shares of the first loss: of a later one, which may be next to nothing, any rounding is much.
    scale = abs(other_losses[min(other_losses)]) or 1.0 if other_losses else 1.0
    if not (gaps := {step: abs(losses[step] - other_losses[step]) / scale for step in losses if step in other_losses}):
        return f"This run and that on {name} have no step in common."
    # The batch size may be that of the task, which is not a setting, but a value of the session.
    rows = [(name, view.run.config.get(name), other.run.config.get(name)) for name in ("task", *_RESULT_SETTINGS)]
    notes = [f"{name} {value} here, {other_value} there" for name, value, other_value in rows if value != other_value]
    # A difference in the first common step is a wrong gradient or another batch; later ones may come from rounding.
    first, worst = min(gaps), max(gaps, key=lambda step: gaps[step])
    hint = " (lockstep verify finds the cause)" if gaps[first] > _ROUNDING else ""
    claim = f"differ by {_share(gaps[first])} in step {first + 1}{hint}," if gaps[first] > 0 else ""
    at_most = f"by at most {_share(gaps[worst])}, in step {worst + 1}"
    claim = f"{claim or 'begin with the same value and differ'} {at_most}" if gaps[worst] > 0 else "are bitwise equal"
    text = f"Over {len(gaps)} steps, the losses of this run and of that on {name} {claim}"
    return f"{text}; the settings differ: {', '.join(notes)}." if notes else f"{text}."


def _share(difference: float) -> str:
    return f"{f'{difference:.2%}' if difference >= 1e-4 else f'{difference:.1g}'} of the first loss"


def _losses(view: View) -> dict[int, float]:
    """Return the finite losses by step, in order, without lines that cover several steps."""
    steps = [step for step in view.run.zero.steps if step.num_steps == 1]
    return {step.step: step.loss for step in steps if step.loss is not None and math.isfinite(step.loss)}


# The summary in three sentences: how fast, where the time goes, what to change first.

# Devices that compute for so many percent of a step are well used.
GOOD_BUSY = 90


def sentences(view: View, baselines: Sequence[BaselineComparison] = ()) -> Sequence[str]:
    """Return the three sentences, fewer if there are no figures; with ``baselines``, the first compares the speed."""
    if not view.figures.by_rank:
        return f"The record of {view.task} has no step that all ranks have done.", "Record a run with more steps."
    change = f"Change first: {view.advice[0].text}" if view.advice else "No change is predicted to gain more than 3%."
    return _how_fast(view, baselines), _where(view), change


def _how_fast(view: View, baselines: Sequence[BaselineComparison]) -> str:
    figures, kind = view.figures, kind_of(view.device)
    singular, plural = ("CPU process", "CPU processes") if kind == "CPU" else (kind, f"{kind}s")
    # Without a DataLoader, the samples of a script are unknown.
    is_counted = figures.samples_per_s > 0
    rates = f"{rate(figures.samples_per_s)} samples/s" if is_counted else f"{rate(1 / figures.step_s)} steps/s"
    if figures.tokens_per_s is not None:
        rates += f" ({rate(figures.tokens_per_s)} {view.run.last.get('counts') or 'tokens'}/s)"
    text = f"{view.task} trains {rates} on {view.num_devices} {singular if view.num_devices == 1 else plural}"
    text += f", {milliseconds(figures.step_s)} a step"
    text += "".join(f"; {baseline.scaling}" for baseline in baselines if baseline.scaling)
    if figures.slow_step_s > 1.1 * figures.step_s:
        text += f"; one step in twenty takes more than {milliseconds(figures.slow_step_s)}"
    return f"{text}."


def _where(view: View) -> str:
    figures, network, critical = view.figures, view.network, view.figures.critical
    percents = {name: round(100 * critical.share(name)) for name in critical.parts()}
    named = ["core_wait"] if view.is_starved else ["forward", "backward", "optimizer"]
    # The sum of the rounded parts, so that what is printed adds up; less than half a percent is noise.
    share = sum(percents.get(name, 0) for name in named)

    def listed(*, is_named: bool) -> str:
        largest = sorted(filter(percents.get, percents), key=lambda name: -percents[name])
        return ", ".join(f"{percents[name]}% {PARTS[name].label}" for name in largest if (name in named) == is_named)

    if view.is_starved:
        text = f"Of a step, {share}% is waiting for a core, as {who_has_the_cores(view)[0]}"
    else:
        text = f"Of a step, {share}% is computing{' (well used)' * (share >= GOOD_BUSY)}: {listed(is_named=True)}"
    if rest := listed(is_named=False):
        is_lost = share < GOOD_BUSY and not view.is_starved
        text += f"; the rest {'can be gained:' if is_lost else 'is'} {rest}"
    if (slow := figures.straggler) is not None:
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
    bars = {step: bars_of(run, timelines, zero) for step, timelines in timelines_by_step(run).items()}

    def add(kind: str, thread: int, name: str, args: dict[str, Any], at_s: float = 0.0, **fields: Any) -> None:
        entries.append({"ph": kind, "pid": rank, "tid": thread, "name": name, "args": args, "ts": at_s * 1e6, **fields})

    for rank, record in sorted(run.ranks.items()):
        add("M", 0, "process_name", {"name": f"rank {rank} ({record.device} on {record.host})"})
        for thread, name in enumerate(("step", "buckets", "events")):
            add("M", thread, "thread_name", {"name": name})
        for timeline in record.timelines:
            step_args = {"step": timeline.step + 1}
            for part, begin_s, end_s in bars[timeline.step][rank]:
                add("X", 0, PARTS[part].label, step_args, begin_s, dur=(end_s - begin_s) * 1e6)
            for bucket in timeline.buckets:
                args, sent_s = {**step_args, "bytes": bucket.size_bytes}, timeline.time - zero + bucket.sent_s
                add("X", 1, f"bucket {bucket.number}", args, sent_s, dur=(bucket.done_s - bucket.sent_s) * 1e6)
        for event in record.events:
            add("i", 2, event.event, {"text": event.text, "step": event.step}, event.time - zero, s="p")
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": entries})
