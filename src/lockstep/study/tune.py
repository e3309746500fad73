"""`tune`: find settings that train a task faster on this machine, by a sweep that does not change the training."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from lockstep.base.accelerator import default_device
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.study.common import FEWEST_ROUNDS, Shown, Spread, Table, check_numbers, load, log, paired_ratio, run_ranks
from lockstep.study.compare import benchmark
from lockstep.study.compare.benchmark import Benchmark, Entrant
from lockstep.study.compare.comparison import Setup
from lockstep.train.plan import PER_PROCESS, check_batch
from lockstep.train.settings import FitSettings, check_engine, toml_line
from lockstep.train.task import Task

# The strategies that are tried by default.
STRATEGIES = ("single", "dp", "ddp", "ddp-zero1")
POSSIBLE = (*STRATEGIES, "fsdp")

FIRST_LINE = "# Written by lockstep tune"

# The name of the reference settings in each round; and the stage that checks the combined changes.
NOW, TOGETHER = "now", "all together"

# In this order: a slow loader hides all other effects, and later stages depend on the strategy.
STAGES = ("loading", "strategy", "micro-batch", "threads", "precision")

# The smallest speed-up for which a change is kept.
WORTH = 1.02

MOST_ROUNDS = 9

# Steps: buckets are rebuilt after the first step, in which the optimizer also creates its state.
_NUM_WARMUP, _NUM_PROBED = 4, 2

# How long ranks may exceed their share of the time: on a busy machine they need tens of seconds to start.
_PATIENCE_S = 120.0

Changes = dict[str, Any]


def differences(before: FitSettings, after: FitSettings) -> Changes:
    """Return the settings of ``after`` that differ from ``before``, by name."""
    return {name: value for name, value in vars(after).items() if value != getattr(before, name)}


def in_words(changes: Mapping[str, Any]) -> str:
    """Return changes as flags without dashes: ``workers 2, prefetch 4``."""
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in changes.items())


def num_shares(strategy: str, num_devices: int) -> int:
    """Return the number of parts into which a global batch is divided."""
    return 1 if strategy == "single" else num_devices


class Effect(Enum):
    """The effect of a change of settings on the training, from smallest to largest: as a short name and a sentence."""

    BITS = "same bits", "The training is the same, bit for bit."
    ROUNDING = "rounding", "The training is the same except for rounding: same global batches, order and loss."
    DIVISION = "division", "Same global batches, divided in another way, which layers depend on: another training."
    ARITHMETIC = "arithmetic", "Same global batches and order, but other arithmetic: another training."

    def __init__(self, words: str, sentence: str) -> None:
        self.words, self.sentence = words, sentence


def candidates(stage: str, sweep: Sweep) -> list[Changes]:
    """Return the changes that are worth trying in a stage, given the best settings so far."""
    base, strategy, num_cores = sweep.found, sweep.found.strategy, sweep.num_cores
    proposals: list[Changes] = []
    if stage == "loading" and (base.workers or sweep.wait_share >= 0.02):
        # Twice and half of the current number; without workers, one, two, and the cores per rank.
        current = base.workers
        counts = {current // 2, 2 * current} if current else {1, 2, max(4, num_cores // sweep.num_devices)}
        proposals = [{"workers": min(count, 16)} for count in sorted(counts)]
    elif stage == "strategy" and sweep.num_devices > 1:
        # As in `compare`: with the same number of micro-batches.
        names = [name for name in sweep.strategies if base.reproducible is None or name in ("single", "dp", "ddp")]
        for name in names:
            proposals += [{"strategy": name}] if name != strategy else []
            if name == "single" and base.threads is None and default_device().type == "cpu":
                proposals.append({"strategy": name, "threads": 1})  # a small model is often faster with one thread
    elif stage == "micro-batch" and base.reproducible is None and base.shares is None:  # which set their sizes
        current, share = base.accumulate, math.ceil(sweep.global_batch_size / num_shares(strategy, sweep.num_devices))
        pieces = [count for count in (current // 2, 2 * current, 4 * current) if count and share % count == 0]
        proposals = [{"accumulate": count} for count in pieces if share // count > 1]  # batch norm refuses one sample
    elif stage == "threads" and default_device().type == "cpu" and base.reproducible is None:
        current = base.threads or benchmark.threads_of(strategy, num_cores, sweep.num_devices)
        counts = {1, current // 2, 2 * current, num_cores} - {0, current}
        proposals = [{"threads": count} for count in sorted(counts) if count <= num_cores]
    elif stage == "precision":
        proposals = [{"precision": "bf16"}] if base.precision == "fp32" else []
        if sweep.num_devices > 1 and base.compression is None:
            proposals.append({"compression": "bf16"})
    possible = []
    for changes in proposals:
        with contextlib.suppress(ConfigurationError):  # a setting that the strategy does not have
            check_engine(changes.get("strategy", strategy), replace(base, **changes))
            possible.append(changes)
    return possible


# The work of the ranks.


def probe(trial: Benchmark, world: World) -> tuple[Sequence[str], float]:
    """Train some steps with the initial settings; return `Sweep.layers` and `Sweep.wait_share`.

    Collective: every rank.
    """
    strategy, _ = trial.arms[NOW]
    torch.set_num_threads(trial.threads(strategy))
    with contextlib.closing(Entrant(trial, NOW, world)) as entrant:
        assert entrant.trainer is not None
        seconds, records = benchmark.time_steps(entrant.trainer, _NUM_PROBED)
        layers = benchmark.split_layers(entrant.trainer.model)
    return layers, sum(record.times.part("data_wait") for record in records) / seconds


def rounds_of(trial: Benchmark, world: World) -> dict[str, list[float]]:
    """Run all settings in turn; return the seconds per sample of this rank's turns, by name.

    Collective: every rank. Ranks that do not take part in a turn sleep.
    """
    with warnings.catch_warnings():
        # There may be more processes than cores: this measures whether they help.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        _, measured, _ = benchmark.run_benchmark(trial, world)
    return {name: [turn.seconds / turn.num_samples for turn in turns] for name, turns in measured.items()}


@dataclass
class Result:
    """The result of a change.

    Attributes:
        stage: The stage in which it was tried.
        changes: Settings by name.
        effect: Its effect on the training.
        ratio: The speed-up; None if it did not run.
        num_rounds: The number of rounds in which it ran.
        why: Why it was not kept; empty if it was.
    """

    stage: str
    changes: Changes
    effect: Effect
    ratio: Spread | None
    num_rounds: int
    why: str = ""

    @property
    def why_no_gain(self) -> str:
        """Why it is not faster beyond the noise, or not by enough; empty if it is."""
        if self.ratio is None:
            return "time was up before it ran"
        if self.ratio.high < 1:
            return "slower"
        if self.num_rounds < FEWEST_ROUNDS:
            return f"time was up after {self.num_rounds} round{'s' * (self.num_rounds > 1)}"
        if self.ratio.low <= 1:
            return "within the noise"
        return "" if self.ratio.median >= WORTH else "too little to matter"

    @property
    def seemed(self) -> str:
        """The change and its speed-up, if it seemed faster when its time was up; else empty."""
        early = self.ratio if self.stage != TOGETHER and self.num_rounds < FEWEST_ROUNDS else None
        return f"{in_words(self.changes)} {early.median:.2f} times as fast" if early and early.median >= WORTH else ""


def tune(
    task: Task | str,
    *,
    devices: int = 2,
    minutes: float = 5.0,
    start: Mapping[str, Any] | None = None,
    strategies: Sequence[str] = STRATEGIES,
    allow_precision: bool = False,
    allow_division: bool = False,
) -> Sweep:
    """Try settings on ``task`` for some minutes, and return the fastest, with the gain of each change.

    The global batch, the order of the samples and the loss do not change. Starts processes, and blocks until they are
    done; Ctrl-C ends it with the settings found so far.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        devices: Devices for all strategies except ``single``.
        minutes: How long it may take; it takes longer only if the ranks need longer than that to start.
        start: The initial settings, by name, as in `FitSettings`.
        strategies: The strategies to try.
        allow_precision: Whether lower precision may be used: bf16 in computation or communication.
        allow_division: Whether a batch may be divided differently if that affects layers such as batch norm.

    Raises:
        ConfigurationError: Task, settings and devices do not fit together; says what to change.
        LockstepError: The task cannot be trained with the initial settings.
    """
    if not 0 < minutes < 10_000:
        raise ConfigurationError(f"minutes={minutes:g} is not allowed.\nGive a number above 0.")
    settings = FitSettings(**{**(start or {}), "devices": None})
    for name in {*strategies, settings.strategy} - {*POSSIBLE}:
        raise ConfigurationError(f"There is no strategy {name!r} to tune.\nChoose from: {', '.join(POSSIBLE)}.")
    check_numbers(devices)
    loaded = load(task, prepares=True)
    check_batch(loaded, settings, num_shares(settings.strategy, devices))
    name = Path(task).name if isinstance(task, str) else loaded.name
    sweep = Sweep(
        name=f"{name} on {devices} x {default_device().type}",
        task=task,
        num_devices=devices,
        num_cores=torch.get_num_threads(),
        global_batch_size=settings.global_batch_size or loaded.global_batch_size,
        strategies=tuple(strategies),
        seconds=60 * minutes,
        until=time.time() + 60 * minutes,
        start=settings,
        found=settings,
    )
    sweep.allowed += (Effect.DIVISION,) * allow_division + (Effect.ARITHMETIC,) * allow_precision
    try:
        sweep.run()
    except KeyboardInterrupt:
        sweep.interrupted = True
        sweep.notes.append("Stopped by Ctrl-C: this was found until then.")
    return sweep


@dataclass(repr=False)
class Sweep(Shown):
    """Runs the stages; its attributes always hold the results so far.

    It tries one kind of setting after the other: the current settings and each change to them take turns in rounds, as
    in `compare`, and the best change that is faster beyond the noise is kept.

    Attributes:
        name: Of the task, and on which devices.
        task: The task, or where to find it, as on the command line.
        num_devices: Devices for all strategies except ``single``.
        num_cores: Cores that a plain process would use.
        global_batch_size: Samples of a step.
        strategies: The strategies to try.
        seconds: How long it may take.
        until: When it ends, in Unix time.
        start: The initial settings.
        found: The best settings so far.
        allowed: The effects on the training that are allowed.
        layers: Kinds of layer whose result depends on how a batch is divided.
        wait_share: The fraction of a step that waits for data, with the initial settings.
        results: The results of all changes, in the order in which they were tried.
        total: The speed-up of all kept changes together; None if that was not measured.
        notes: Further remarks.
        interrupted: Whether it was stopped by Ctrl-C.
    """

    name: str
    task: Task | str
    num_devices: int
    num_cores: int
    global_batch_size: int
    strategies: tuple[str, ...]
    seconds: float
    until: float
    start: FitSettings
    found: FitSettings
    allowed: tuple[Effect, ...] = (Effect.BITS, Effect.ROUNDING)
    layers: Sequence[str] = ()
    wait_share: float = 0.0
    results: list[Result] = field(default_factory=list)
    total: Spread | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def __rich__(self) -> RenderableType:
        """Lay out the table, the remarks and the conclusion: at most 100 columns."""
        initial = in_words({"strategy": self.start.strategy, **differences(FitSettings(), self.start)})
        title = f"{self.name}, global batch {self.global_batch_size}, from {initial}"
        rows = []
        for result in self.results:
            change, ratio = (result.stage, in_words(result.changes)), result.ratio
            gain = (f"{ratio.median:.2f}x", f"{ratio.low:.2f} - {ratio.high:.2f}") if ratio else ("-", "-")
            rows.append((*change, *gain, str(result.num_rounds), result.effect.words, result.why or "kept"))
        columns = ("stage", "change", "times", "low - high", "rounds", "training", "")
        table = Table(title, columns, rows, numbers=("times", "low - high", "rounds"))
        lines = [Text(_HOW_TO_READ, style="dim"), Text(), *map(Text, self.notes), Text(self.verdict, style="bold")]
        return Group(table.rich(), *lines, Text(self.effect_of(self.start, self.found).sentence))

    @property
    def verdict(self) -> str:
        """The result, and the changes that seemed faster when their time was up."""
        text = "No allowed change is clearly faster than the settings at the start."
        if any(result.stage == TOGETHER and result.why for result in self.results):
            text = "No change is kept: together, those marked as kept are no faster than the settings at the start."
        if self.found != self.start:
            text = "The total gain was not measured: time was up."
            if self.total is not None:
                text = f"All changes together: {_times(self.total)} of the settings at the start."
        if seemed := "; ".join(filter(None, (result.seemed for result in self.results))):
            text += f" When time was up, these seemed faster: {seemed}: run again with --minutes "
            text += f"{math.ceil(self.seconds / 30)}."
        return text

    def trial(self, tried: Mapping[str, FitSettings], until: float = math.inf) -> Benchmark:
        """Return rounds of settings in turn, by name, of which none begins after ``until``."""
        endless = {name: replace(settings, epochs=None, steps=benchmark.MANY_STEPS) for name, settings in tried.items()}
        arms = {name: (settings.strategy, settings) for name, settings in endless.items()}
        machine = (default_device().type, self.num_devices, self.num_cores, 0.0)
        batch, seed, precision = self.global_batch_size, self.start.seed, self.start.precision
        setup = Setup(self.name, "", *machine, batch, 0, MOST_ROUNDS, _NUM_WARMUP, seed, precision)
        # Half a second, if there are five minutes.
        turn_s = min(0.5, max(0.03, self.seconds / 600))
        return Benchmark(self.task, arms, setup, quiet=True, turn_s=turn_s, fewest=2, until=until, speed_only=True)

    def effect_of(self, before: FitSettings, after: FitSettings) -> Effect:
        """Return the effect of a change of settings on the training."""

        def division(settings: FitSettings) -> tuple[int, int, bool]:
            # The replicas of dp draw dropout from one generator on CPUs, so the same division is not enough there.
            is_threaded = "dropout" in self.layers and settings.strategy == "dp"
            return num_shares(settings.strategy, self.num_devices), settings.accumulate, is_threaded

        names = differences(before, after).keys()
        if names & {"precision", "compression"}:
            return Effect.ARITHMETIC
        if self.layers and division(before) != division(after):
            return Effect.DIVISION
        # Samples and random numbers depend only on the position, not on the process that loads them.
        return Effect.ROUNDING if names - {"workers", "prefetch"} else Effect.BITS

    def run(self) -> None:
        """Try all stages, or as many as there is time for.

        Raises:
            LockstepError: The task cannot be trained with the initial settings.
        """
        log("training some steps with the settings at the start")
        devices = self.num_devices if self.start.strategy in PER_PROCESS else 1
        limit_s = max(_PATIENCE_S, 0.4 * (self.until - time.time()))
        self.layers, self.wait_share = run_ranks(
            probe, self.trial({NOW: self.start}), devices=devices, timeout_s=limit_s
        )[0]
        # For the last stage, which measures all changes together.
        reserve_s = min(20.0, 0.2 * self.seconds)
        for index, stage in enumerate(STAGES):
            if changes := candidates(stage, self):
                if (left_s := self.until - time.time() - reserve_s) <= 0:
                    self.notes.append("Time was up: more time (--minutes M) may find more.")
                    break
                # Twice an equal share: it is better to complete fewer stages than to complete none.
                self._try(stage, changes, self.found, min(left_s, 2 * left_s / (len(STAGES) - index)))
        if self.found != self.start:
            # Gains measured separately may not add up; if there is no gain in total, no change is kept.
            result = self._try(TOGETHER, [differences(self.start, self.found)], self.start, self.until - time.time())
            if result.num_rounds >= FEWEST_ROUNDS:
                self.total, self.found = result.ratio, self.start if result.why else self.found

    def _try(self, stage: str, proposals: list[Changes], base: FitSettings, seconds: float) -> Result:
        """Measure changes against ``base``, and keep the best allowed one; return its result."""
        log(f"{stage}: {'; '.join(map(in_words, proposals))}; at most {seconds:.0f} s")
        results = self._measure(stage, proposals, base, seconds)
        best = min(results, key=lambda result: (bool(result.why), -result.ratio.median if result.ratio else 0.0))
        for result in results:
            result.why = result.why or ("" if result is best else "another was better")
        if not best.why:
            self.found = replace(base, **best.changes)
        self.results += results
        return best

    def _measure(self, stage: str, proposals: list[Changes], base: FitSettings, seconds: float) -> list[Result]:
        """Run rounds of ``base`` and of each change to it."""
        tried = {NOW: base} | {in_words(changes): replace(base, **changes) for changes in proposals}
        rounds: dict[str, list[float]] = {name: [] for name in tried}
        limit_s, failure = seconds + max(_PATIENCE_S, 0.25 * self.seconds), ""
        try:
            if seconds > 0:
                trial = self.trial(tried, time.time() + seconds)
                rounds = run_ranks(rounds_of, trial, devices=self.num_devices, timeout_s=limit_s)[0]
        except LockstepError as error:
            # A change has ended the ranks, or they do not fit into memory together: now each change alone.
            if len(proposals) > 1:
                return [self._measure(stage, [changes], base, seconds / len(proposals))[0] for changes in proposals]
            cause = error.__cause__ or error
            failure = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        results = []
        for changes, name in zip(proposals, list(tried)[1:], strict=True):
            effect = self.effect_of(base, tried[name])
            ratio = paired_ratio(rounds[NOW], rounds[name]).shown if rounds[NOW] else None
            result = Result(stage, changes, effect, ratio, len(rounds[NOW]))
            offer = "" if effect in self.allowed else _OFFERS[effect].format(" and ".join(self.layers))
            result.why = failure or result.why_no_gain or offer
            results.append(result)
        return results


_OFFERS = {
    Effect.ARITHMETIC: "offered: use --allow-precision",
    Effect.DIVISION: "offered: divides batches in another way for {}; use --allow-division",
}

_HOW_TO_READ = "Times: the samples/s over those of the settings so far, a median with its 90% confidence interval."


def as_file(outcome: Sweep, *, task_file: str, file: str, facts: Mapping[str, str]) -> str:
    """Return the text of the file for ``lockstep train --settings``: each setting with its gain.

    Args:
        outcome: The result.
        task_file: The task, as on the command line.
        file: The file's own name.
        facts: Of machine and versions.
    """
    settings = outcome.found
    lines = [
        f"{FIRST_LINE}: {outcome.name}, global batch {outcome.global_batch_size}.",
        *(f"# {name}: {value}" for name, value in facts.items()),
        f"# lockstep train {task_file} --settings {file}",
        f"#\n# {outcome.verdict}",
        f"# {outcome.effect_of(outcome.start, settings).sentence}",
    ]
    gains = [result for result in outcome.results if not result.why and result.stage != TOGETHER]
    results = {name: result for result in gains for name in result.changes}
    changes = {"strategy": settings.strategy, **differences(FitSettings(), settings)}
    for name, value in {"devices": num_shares(settings.strategy, outcome.num_devices), **changes}.items():
        lines.append("")
        if name in results and settings != outcome.start and (result := results[name]).ratio:
            lines.append(f"# {in_words(result.changes)}: {_times(result.ratio)}; training: {result.effect.words}")
        lines.append(toml_line(name, value))
    return "\n".join(lines) + "\n"


def _times(ratio: Spread) -> str:
    """Return a gain with its spread."""
    return f"{ratio.median:.2f} times the samples/s ({ratio.low:.2f} to {ratio.high:.2f})"
