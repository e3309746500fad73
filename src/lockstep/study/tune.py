"""`tune`: settings that train a task faster on this machine, found by a sweep that leaves the training as it is."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Group, RenderableType
from rich.text import Text
from typing_extensions import override

from lockstep.accelerator import check_count, default_device
from lockstep.comm.collectives import broadcast_object
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError, LaunchTimeout, LockstepError, RankFailed
from lockstep.study.common import MIB, Shown, Spread, Table, load, log, paired_ratio, peak_bytes, reset_peak, run_ranks
from lockstep.study.compare import benchmark
from lockstep.study.compare.benchmark import Entrant
from lockstep.telemetry.resources import free_and_total_bytes
from lockstep.train.plan import PER_PROCESS, check_batch
from lockstep.train.settings import FitSettings, toml_line
from lockstep.train.strategies.strategy import check_engine
from lockstep.train.task import Task

# Those that are tried if none are named.
STRATEGIES = ("single", "dp", "ddp", "ddp-zero1")

# The name in each round of the settings that changes are compared with; and the stage that checks their sum.
POSSIBLE = (*STRATEGIES, "fsdp")
FIRST_LINE = "# Written by lockstep tune"
NOW, TOGETHER = "now", "all together"

# A change has to make a run so many times as fast to be taken.
WORTH = 1.02

# Five rounds are the fewest in which a median can be known with 90% certainty.
FEWEST_ROUNDS, MOST_ROUNDS = 5, 9

# Steps: buckets are built anew after the first, in which the optimizer makes its state.
_NUM_WARMUP, _NUM_PROBED = 4, 2

# Of the memory that is free before anything starts: the rest is for what else goes on.
_USABLE = 0.8

# Room for the stacks of threads that torch starts later: they count as data, though little of them is ever used.
_STACKS_BYTES = 2**29

# More than anybody waits for: a stream needs a number, and a schedule falls over it.
_MANY_STEPS = 1_000_000

# How long ranks may take beyond their share of the time: they only start in tens of seconds on a busy machine.
_PATIENCE_S = 120.0

Changes = dict[str, Any]


def differences(before: FitSettings, after: FitSettings) -> Changes:
    """Return the settings by name that ``after`` has otherwise."""
    names = [one.name for one in fields(FitSettings)]
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


def in_words(changes: Mapping[str, Any]) -> str:
    """Return changes as flags are spelled, without dashes before them: ``workers 2, prefetch 4``."""

    def word(value: Any) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return "as usual" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name.replace('_', '-')} {word(value)}" for name, value in changes.items())


def num_shares(strategy: str, num_devices: int) -> int:
    """Return into how many devices' parts a global batch is divided."""
    return 1 if strategy == "single" else num_devices


class Effect(Enum):
    """What a change of settings does to the training, from least to most: in a word or two, and in a sentence."""

    BITS = "same bits", "The training is the same, bit for bit."
    ROUNDING = (
        "rounding",
        "The training is the same except for the rounding of sums: same global batches, order and loss.",
    )
    DIVISION = (
        "division",
        "Same global batches and order, but divided in another way, which layers depend on: another training.",
    )
    ARITHMETIC = "arithmetic", "Same global batches and order, but other arithmetic: another training."

    def __init__(self, words: str, sentence: str) -> None:
        self.words, self.sentence = words, sentence


def effect_of(before: FitSettings, after: FitSettings, *, num_devices: int, layers: Sequence[str]) -> Effect:
    """Return what becomes of a training if its settings change.

    Args:
        before: The settings until now.
        after: Those that are tried.
        num_devices: That take part.
        layers: Kinds of layer whose result depends on how a batch is divided, see `split_layers`.
    """

    def division(settings: FitSettings) -> tuple[int, int, bool]:
        # The replicas of dp draw dropout from one generator on CPUs, so the same division is not enough there.
        is_threaded = "dropout" in layers and settings.strategy == "dp"
        return num_shares(settings.strategy, num_devices), settings.accumulate, is_threaded

    names = differences(before, after).keys()
    if names & {"precision", "compression"}:
        return Effect.ARITHMETIC
    if layers and division(before) != division(after):
        return Effect.DIVISION
    # Samples and random numbers depend on the position only, whoever loads them.
    return Effect.ROUNDING if names - {"workers", "prefetch"} else Effect.BITS


# What is worth trying, stage by stage.


@dataclass(frozen=True)
class Request:
    """What to do; the same on every rank.

    Attributes:
        task: The task, or where to find it, as on the command line.
        num_devices: Devices for all strategies but ``single``.
        num_cores: That a plain process would use.
        global_batch_size: Samples of a step.
        strategies: That may be tried.
        seconds: How long all of it may take.
        began_at: When it began, in Unix time.
        limit_bytes: What all processes of this machine, or one GPU, may use.
    """

    task: Task | str
    num_devices: int
    num_cores: int
    global_batch_size: int
    strategies: tuple[str, ...]
    seconds: float
    began_at: float
    limit_bytes: int

    @property
    def left_s(self) -> float:
        """How long it may still take."""
        return self.seconds - (time.time() - self.began_at)

    def threads(self, settings: FitSettings) -> int:
        """Return the threads of one process, as a run with these settings has them."""
        return benchmark.threads_of(settings.strategy, self.num_cores, self.num_devices)

    def entrant(self, settings: FitSettings, world: World) -> Entrant:
        """Return what trains the task for as long as needed. Collective: every rank."""
        endless = replace(settings, epochs=None, steps=_MANY_STEPS)
        threads = self.threads(settings)
        return Entrant(load(self.task), endless, settings.strategy, world, self.num_devices, threads)


@dataclass(frozen=True)
class Known:
    """What the first processes found out about the task.

    Attributes:
        largest: Samples of the largest micro-batch that fits; None if it was not looked for.
        largest_bytes: What it needs.
        layers: Kinds of layer whose result depends on how a batch is divided.
        gradient_bytes: Of all gradients.
        wait_share: The part of a step that waits for data.
    """

    largest: int | None = None
    largest_bytes: int = 0
    layers: Sequence[str] = ()
    gradient_bytes: int = 0
    wait_share: float = 0.0


def candidates(stage: str, base: FitSettings, request: Request, known: Known) -> list[Changes]:
    """Return the changes that are worth trying on top of ``base``."""
    return [changes for changes in _STAGES[stage](base, request, known) if _is_possible(base, changes)]


def _is_possible(base: FitSettings, changes: Changes) -> bool:
    try:
        settings = replace(base, **changes)
        check_engine(settings.strategy, settings)
    except ConfigurationError:
        return False
    return settings.reproducible is None or settings.strategy in ("single", "dp", "ddp")


def _loading(base: FitSettings, request: Request, known: Known) -> list[Changes]:
    now = base.workers
    # Twice and half of what there is; without any, one, two, and what would give each rank its cores.
    per_rank = max(1, request.num_cores // request.num_devices)
    counts = {now // 2, 2 * now} - {now} if now else {1, 2, max(4, per_rank)}
    waits = now or known.wait_share >= 0.02  # else nothing is to be gained
    return [{"workers": min(count, 16)} for count in sorted(counts)] if waits else []


def _strategy(base: FitSettings, request: Request, known: Known) -> list[Changes]:
    """Return the changes of strategy, as `compare` measures them: with as many micro-batches, if these fit."""
    found: list[Changes] = []
    usual = {"bucket_cap_mb": None, "compression": None, "overlap_optimizer": False}
    for name in request.strategies if request.num_devices > 1 else ():
        changes: Changes = {"strategy": name}
        if name != "ddp":  # settings that only ddp has
            changes |= {key: value for key, value in usual.items() if getattr(base, key) != value}
        pieces = max(base.accumulate, _fewest_pieces(name, request, known))
        if pieces != base.accumulate:
            changes["accumulate"] = pieces
        if name != base.strategy:
            found.append(changes)
        if name == "single" and base.threads is None and _threads(base, request, known):
            found.append({**changes, "threads": 1})  # a small model is often faster so
    return found


def _fewest_pieces(strategy: str, request: Request, known: Known) -> int:
    """Return into how many micro-batches a device's part must be divided to fit into memory."""
    share = request.global_batch_size // num_shares(strategy, request.num_devices)
    return 1 if known.largest is None else max(1, math.ceil(share / known.largest))


def _micro_batch(base: FitSettings, request: Request, known: Known) -> list[Changes]:
    if _sets_sizes(base):
        return []
    now, share = base.accumulate, request.global_batch_size // num_shares(base.strategy, request.num_devices)
    fewest = _fewest_pieces(base.strategy, request, known)
    # Fewer pieces than the fewest do not fit, and batch norm takes no single sample.
    counts = sorted({fewest, now // 2, 2 * now, 4 * now} - {0, now})
    fitting = [count for count in counts if count >= fewest and share % count == 0 and share // count > 1]
    return [{"accumulate": count} for count in fitting]


def _sets_sizes(settings: FitSettings) -> bool:
    """Return whether the sizes of micro-batches follow from other settings."""
    return settings.reproducible is not None or settings.shares is not None


def _threads(base: FitSettings, request: Request, known: Known) -> list[Changes]:
    if default_device().type != "cpu" or base.reproducible is not None:
        return []
    now = base.threads or request.threads(base)
    counts = sorted({1, now // 2, 2 * now, request.num_cores} - {0, now})
    return [{"threads": count} for count in counts if count <= request.num_cores]


def _precision(base: FitSettings, request: Request, known: Known) -> list[Changes]:
    found: list[Changes] = [{"precision": "bf16"}] if base.precision == "fp32" else []
    exchanges = base.strategy == "ddp" and request.num_devices > 1
    if exchanges and known.gradient_bytes > MIB and base.compression is None:
        found.append({"compression": "bf16"})
    return found


# In this order: behind a slow loader nothing else can be seen, and what comes later depends on the strategy.
_STAGES: dict[str, Callable[[FitSettings, Request, Known], list[Changes]]] = {
    "loading": _loading,
    "strategy": _strategy,
    "micro-batch": _micro_batch,
    "threads": _threads,
    "precision": _precision,
}


# What the ranks do.


def probe(request: Request, base: FitSettings, sizes: Sequence[int], file: str, world: World) -> None:
    """Train with each size of micro-batch, and write to ``file`` what is `Known` by then. Collective: every rank.

    These processes end with the first size that does not fit, so the file is written anew after each.
    """
    if world.device.type == "cpu":
        # The host gives more memory than it has, and then kills whom it likes. With a limit on its data this
        # process gets an error instead, as it would of a GPU.
        limit = request.limit_bytes // world.world_size + psutil.Process().memory_info().data + _STACKS_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(request.threads(base))
    before_bytes = psutil.Process().memory_info().rss
    for size in sizes or [0]:
        settings = base
        if size:
            batch = size * num_shares(base.strategy, request.num_devices)
            settings = replace(base, accumulate=1, workers=0, prefetch=None, global_batch_size=batch)
        reset_peak()
        with contextlib.closing(request.entrant(settings, world)) as entrant:
            assert entrant.trainer is not None
            seconds, records = benchmark.time_steps(entrant.trainer, _NUM_PROBED)
            model = entrant.trainer.model
        peak = peak_bytes() - before_bytes
        if world.device.type != "cpu":
            peak = torch.accelerator.max_memory_allocated(world.device)
        known = Known(
            largest=size or None,
            largest_bytes=max(0, peak),
            layers=benchmark.split_layers(model),
            gradient_bytes=sum(weight.nbytes for weight in model.parameters() if weight.requires_grad),
            wait_share=sum(record.times.data_wait_s for record in records) / seconds,
        )
        if world.is_rank_zero:
            # Replaced at once: this process may be killed at any time.
            Path(f"{file}.new").write_text(json.dumps(asdict(known)), encoding="utf-8")
            os.replace(f"{file}.new", file)


def rounds_of(request: Request, tried: dict[str, FitSettings], until: float, world: World) -> list[dict[str, float]]:
    """Let all settings take turns; return the seconds of this rank's turns, by round, for each sample.

    Collective: every rank. Ranks that have no part in a turn sleep meanwhile.

    Args:
        request: What to do.
        tried: Settings by name.
        until: When no other round begins, in Unix time.
        world: All ranks.
    """
    # Half a second, if there are five minutes.
    turn_s = min(0.5, max(0.03, request.seconds / 600))
    with contextlib.ExitStack() as at_exit:
        at_exit.enter_context(warnings.catch_warnings())
        # More processes than cores: whether they help is what is measured here.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        entrants, num_steps = {}, {}
        for name, settings in tried.items():
            entrants[name] = at_exit.enter_context(contextlib.closing(request.entrant(settings, world)))
            warm = entrants[name].turn(
                partial(benchmark.warm_up, num_steps=_NUM_WARMUP, threads=[request.threads(settings)])
            )
            chosen = benchmark.choose_steps(list(warm[0].values()), turn_s=turn_s, fewest=2) if warm else 0
            num_steps[name] = int(broadcast_object(chosen, group=world.group, device=world.device))
        rounds: list[dict[str, float]] = []
        running = list(tried)
        while running:
            rounds.append({})
            for name in benchmark.order_of_round(running, len(rounds) - 1):
                if turn := entrants[name].turn(partial(benchmark.time_steps, num_steps=num_steps[name])):
                    rounds[-1][name] = turn[0] / sum(record.num_samples for record in turn[1])
            # Rank zero takes part in every turn, and waits for the slowest rank in each step: it alone can judge.
            undecided = [name for name in running if name != NOW and not is_decided(name, rounds)]
            is_over = len(rounds) >= MOST_ROUNDS or time.time() > until
            left = [NOW, *undecided] if undecided and not is_over else []
            running = broadcast_object(left, group=world.group, device=world.device)
        return rounds


# The judgement.


def ratio_of(name: str, rounds: Sequence[Mapping[str, float]]) -> Spread | None:
    """Return how many times as fast ``name`` was, from the rounds in which it ran; None if there are none."""
    both = [each for each in rounds if name in each and NOW in each]
    return paired_ratio([each[NOW] for each in both], [each[name] for each in both]) if both else None


def is_decided(name: str, rounds: Sequence[Mapping[str, float]]) -> bool:
    """Return whether more rounds would change nothing: it is clearly slower or faster."""
    ratio, count = ratio_of(name, rounds), sum(name in each for each in rounds)
    if ratio is None:
        return False
    # Three rounds are enough to give a change up; to take it, as many as a spread with 90% certainty needs.
    return (count >= 3 and ratio.high < 0.97) or (count >= FEWEST_ROUNDS and ratio.low > 1.05)


@dataclass(frozen=True)
class Result:
    """What came of a change.

    Attributes:
        stage: In which it was tried.
        changes: Settings by name.
        effect: What becomes of the training.
        ratio: How many times as fast it was; None if it did not run.
        num_rounds: In which it ran.
        why: Why it was not kept; empty if it is part of what was found.
    """

    stage: str
    changes: Changes
    effect: Effect
    ratio: Spread | None
    num_rounds: int
    why: str = ""

    @property
    def why_no_gain(self) -> str:
        """Why it is not faster beyond the noise, and by enough to matter; empty if it is."""
        if self.ratio is None:
            return "time was up before it ran"
        if self.ratio.high < 1:
            return "slower"
        if self.num_rounds < FEWEST_ROUNDS:
            return f"time was up after {self.num_rounds} round{'s' * (self.num_rounds > 1)}"
        if self.ratio.low <= 1:
            return "within the noise"
        return "" if self.ratio.median >= WORTH else "too little to matter"


def tune(
    task: Task | str,
    *,
    devices: int = 2,
    minutes: float = 5.0,
    start: Mapping[str, Any] | None = None,
    strategies: Sequence[str] = STRATEGIES,
    allow_precision: bool = False,
    allow_division: bool = False,
    began_at: float | None = None,
) -> Sweep:
    """Try settings on ``task`` for some minutes, and return those that train it fastest, with what each gave.

    The global batch, the order of the samples and the loss stay as they are. Starts processes of its own, and blocks
    until they are done; Ctrl-C ends it with what was found by then.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        devices: Devices for all strategies but ``single``.
        minutes: How long it may take; longer only where the ranks take longer than that to start.
        start: Settings to begin with, by name, as `FitSettings` takes them.
        strategies: That may be tried.
        allow_precision: Whether another arithmetic may be taken: bf16 in computing, or on the way of gradients.
        allow_division: Whether a batch may be divided otherwise though layers see that, as batch norm does.
        began_at: From when on the time counts, in Unix time; now if None.

    Raises:
        ConfigurationError: Task, settings and devices do not go together; says what to change.
        LockstepError: The task cannot be trained with the settings to begin with.
    """
    if devices < 1:
        raise ConfigurationError(f"devices={devices} is not allowed.\nGive a whole number of at least 1.")
    if not 0 < minutes < 10_000:
        raise ConfigurationError(f"minutes={minutes:g} is not allowed.\nGive a number above 0.")
    settings = FitSettings(**{**(start or {}), "devices": None})
    for name in (*strategies, settings.strategy):
        if name not in POSSIBLE:
            raise ConfigurationError(f"There is no strategy {name!r} to tune.\nChoose from: {', '.join(POSSIBLE)}.")
    check_count(devices)
    found = load(task)
    check_batch(found, settings, num_shares(settings.strategy, devices))
    request = Request(
        task=task,
        num_devices=devices,
        num_cores=torch.get_num_threads(),
        global_batch_size=settings.global_batch_size or found.global_batch_size,
        strategies=tuple(strategies),
        seconds=60 * minutes,
        began_at=began_at or time.time(),
        limit_bytes=_usable_bytes(devices, default_device()),
    )
    name = Path(task).name if isinstance(task, str) else found.name
    sweep = Sweep(name, request, settings, settings)
    sweep.allowed += (Effect.DIVISION,) * allow_division + (Effect.ARITHMETIC,) * allow_precision
    try:
        sweep.run()
    except KeyboardInterrupt:
        sweep.interrupted = True
        sweep.notes.append("Stopped by Ctrl-C: this was found until then.")
    return sweep


def _usable_bytes(num_devices: int, device: torch.device) -> int:
    """Return how much memory all processes may use together, or one GPU."""
    if device.type != "cpu":
        # Not `get_memory_info`: that would need a context of this process on each.
        properties = map(torch.get_device_module(device).get_device_properties, range(num_devices))
        return int(_USABLE * min(each.total_memory for each in properties))
    return int(_USABLE * free_and_total_bytes()[0])


@dataclass(repr=False)
class Sweep(Shown):
    """Goes through the stages; what it has found so far is in its attributes at any time.

    First the largest micro-batch that fits is looked for, in processes of its own. Then one kind of setting after the
    other is tried: the settings so far and each change to them take turns in rounds, as in `compare`, and the best
    change that is faster beyond the noise is kept.

    Attributes:
        task: Its name.
        request: What to do.
        start: The settings that it began with.
        found: Those that it has ended with.
        allowed: Effects on the training that may be taken.
        known: What the first processes found out.
        results: Of all changes, in the order in which they were tried.
        total: How many times as fast all of it is together; None if that was not measured.
        notes: What else there is to say.
        interrupted: Whether it was stopped by Ctrl-C.
    """

    task: str
    request: Request
    start: FitSettings
    found: FitSettings
    allowed: tuple[Effect, ...] = (Effect.BITS, Effect.ROUNDING)
    known: Known = field(default_factory=Known)
    results: list[Result] = field(default_factory=list)
    total: Spread | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    @override
    def __rich__(self) -> RenderableType:
        return render(self)

    @property
    def device(self) -> str:
        """How many of what."""
        return f"{self.request.num_devices} x {default_device().type}"

    @property
    def effect(self) -> Effect:
        """What becomes of the training."""
        return self._effect(self.start, self.found)

    @property
    def verdict(self) -> str:
        """What came of it, in one sentence."""
        if self.found == self.start:
            return "No change is faster than the settings at the start."
        if self.total is None:
            return "The total gain was not measured: time was up."
        return f"All changes together: {_times(self.total)} of the settings at the start."

    def _effect(self, before: FitSettings, after: FitSettings) -> Effect:
        return effect_of(before, after, num_devices=self.request.num_devices, layers=self.known.layers)

    def run(self) -> None:
        """Try all stages, or as many as there is time for.

        Raises:
            LockstepError: The task cannot be trained with the settings to begin with.
        """
        log("memory: looking for the largest micro-batch that fits")
        self._probe()
        # For the last stage, which measures what all of it gives together.
        reserve_s = min(20.0, 0.2 * self.request.seconds)
        for index, stage in enumerate(_STAGES):
            changes = candidates(stage, self.found, self.request, self.known)
            left_s = self.request.left_s - reserve_s
            if changes and left_s <= 0:
                self.notes.append("Time was up before all changes were tried. More time (--minutes M) may find more.")
                break
            if changes:
                # Twice an equal part: fewer stages to their end are worth more than all without one.
                best = self._try(stage, changes, self.found, min(left_s, 2 * left_s / (len(_STAGES) - index)))
                self.found = self.found if best is None else replace(self.found, **best.changes)
        if self.found != self.start:
            # Gains measured one after the other need not add up; if the sum is none, nothing is taken.
            self._try(TOGETHER, [differences(self.start, self.found)], self.start, self.request.left_s)
            result = self.results[-1]
            if result.num_rounds >= FEWEST_ROUNDS:
                self.total = result.ratio
                self.found = self.start if result.why_no_gain else self.found

    def _probe(self) -> None:
        """Find the largest micro-batch that fits, in processes that may die of it, and what else is to be known."""
        base, request = self.start, self.request
        share = math.ceil(request.global_batch_size / num_shares(base.strategy, request.num_devices))
        # Halves of a share; but batch norm takes no single sample.
        sizes = sorted({max(min(2, share), math.ceil(share / 2**power)) for power in range(share.bit_length())})
        devices = request.num_devices if base.strategy in PER_PROCESS else 1
        limit_s = max(_PATIENCE_S, 0.4 * request.left_s)
        with tempfile.TemporaryDirectory(prefix="lockstep-tune-") as folder:
            file = Path(folder) / "probe.json"
            try:
                tried = [] if _sets_sizes(base) else sizes
                run_ranks(probe, request, base, tried, str(file), devices=devices, timeout_s=limit_s)
            except LockstepError as error:
                if not file.exists() and isinstance(error, LaunchTimeout):
                    raise LockstepError(
                        f"The task's first steps were not done within {limit_s:.0f} s.\n"
                        "Check which other programs use this machine, or give more time (--minutes M)."
                    ) from error
                if not file.exists():
                    raise
            self.known = Known(**json.loads(file.read_text(encoding="utf-8")))
        largest = self.known.largest
        if largest is None:
            return
        if math.ceil(share / base.accumulate) > largest:
            # Settings that do not fit cannot be measured: begin with the fewest micro-batches that fit.
            self.start = self.found = replace(base, accumulate=math.ceil(share / largest))
        whole = "a device's whole part of the global batch" if largest >= share else f"of {share} for each device"
        if largest >= share:  # no limit was found: activations grow with the number of samples
            most = largest * request.limit_bytes / request.num_devices / max(1, self.known.largest_bytes)
            self.known = replace(self.known, largest=max(largest, int(most)))
        needed = f"{self.known.largest_bytes / MIB:,.0f} MiB"
        self.notes.append(f"The largest micro-batch that fits has {largest} samples ({whole}): {needed}.")

    def _try(self, stage: str, tried: list[Changes], base: FitSettings, seconds: float) -> Result | None:
        """Measure changes beside ``base``; return the best that is allowed."""
        log(f"{stage}: {'; '.join(map(in_words, tried))}; at most {seconds:.0f} s")
        rounds, lost = self._measure({in_words(each): each for each in tried}, base, time.time() + seconds)
        results = []
        for changes in tried:
            name, effect = in_words(changes), self._effect(base, replace(base, **changes))
            result = Result(stage, changes, effect, ratio_of(name, rounds), sum(name in each for each in rounds))
            results.append(replace(result, why=lost.get(name) or result.why_no_gain or self._why_forbidden(effect)))
        gains = [each for each in results if not each.why]
        best = max(gains, key=lambda each: each.ratio.median if each.ratio else 0.0, default=None)
        self.results += [
            replace(each, why="another was better") if each in gains and each is not best else each for each in results
        ]
        return best

    def _measure(
        self, changes: dict[str, Changes], base: FitSettings, until: float
    ) -> tuple[list[dict[str, float]], dict[str, str]]:
        """Run rounds; return them, and why some changes have none."""
        if time.time() >= until:
            return [], {}
        entrants = {NOW: base} | {name: replace(base, **each) for name, each in changes.items()}
        limit_s = until - time.time() + max(_PATIENCE_S, 0.25 * self.request.seconds)
        try:
            devices = self.request.num_devices
            return run_ranks(rounds_of, self.request, entrants, until, devices=devices, timeout_s=limit_s)[0], {}
        except LockstepError as error:
            if len(changes) == 1:
                cause = error.__cause__ if isinstance(error, RankFailed) else None
                return [], dict.fromkeys(changes, _reason(cause or error))
        # One of them has ended the ranks, or they do not fit into memory beside each other: now each on its own.
        rounds: list[dict[str, float]] = []
        lost: dict[str, str] = {}
        for place, (name, each) in enumerate(changes.items()):
            own_until = time.time() + (until - time.time()) / (len(changes) - place)
            own_rounds, own_lost = self._measure({name: each}, base, own_until)
            rounds += own_rounds
            lost |= own_lost
        return rounds, lost

    def _why_forbidden(self, effect: Effect) -> str:
        """Return why a change that is faster is not taken; nothing if it is."""
        if effect in self.allowed:
            return ""
        if effect is Effect.ARITHMETIC:
            return "offered: use --allow-precision"
        return f"offered: divides batches in another way for {' and '.join(self.known.layers)}; use --allow-division"


def _reason(error: BaseException) -> str:
    """Return in one line what was wrong."""
    lines = str(error).splitlines() or [type(error).__name__]
    first = (lines[-1] if lines[0].startswith("Caught ") else lines[0]).rstrip(".")  # what a thread has raised
    return first if isinstance(error, LockstepError) else f"{type(error).__name__}: {first}"


# What was found, for a terminal and as a file that ``lockstep train --settings`` reads.

_HOW_TO_READ = (
    "Times: the samples/s of the change divided by those of the settings so far, measured in interleaved rounds: the "
    "median, and its 90% confidence interval. A change is kept if the interval is above 1 and the gain is at least 2%. "
    "Training: the effect of the change on it; 'rounding' means that only the order of additions differs."
)


def render(outcome: Sweep) -> RenderableType:
    """Lay out the table, what else there is to say, and the conclusion: at most 100 columns."""
    began = in_words({"strategy": outcome.start.strategy, **differences(FitSettings(), outcome.start)})
    title = f"{outcome.task}: {outcome.device}, global batch {outcome.request.global_batch_size}, from {began}"
    rows = []
    for each in outcome.results:
        times = f"{each.ratio.median:.2f}x" if each.ratio else "-"
        span = f"{each.ratio.low:.2f} - {each.ratio.high:.2f}" if each.ratio else "-"
        came = each.why or "kept"
        rows.append((each.stage, in_words(each.changes), times, span, str(each.num_rounds), each.effect.words, came))
    columns = ("stage", "change", "times", "low - high", "rounds", "training", "")
    table = Table(title, columns, rows, numbers=("times", "low - high", "rounds"))
    lines = [Text(_HOW_TO_READ, style="dim"), Text(), *map(Text, outcome.notes), Text(outcome.verdict, style="bold")]
    if outcome.found != outcome.start:
        lines.append(Text(outcome.effect.sentence))
    return Group(table.rich(), *lines)


def as_file(outcome: Sweep, *, task_file: str, file: str, facts: Mapping[str, str]) -> str:
    """Return the text of the file: each setting with what it gave, and what was left out as comments.

    Args:
        outcome: What was found.
        task_file: The task, as on the command line.
        file: The file's own name.
        facts: Of machine and versions.
    """
    batch, found = outcome.request.global_batch_size, outcome.found
    lines = [
        f"{FIRST_LINE}: {outcome.task} on {outcome.device}, global batch {batch}.",
        *(f"# {name}: {value}" for name, value in facts.items()),
        f"# lockstep train {task_file} --settings {file}",
        "#",
        f"# {outcome.verdict}",
        f"# {outcome.effect.sentence}",
        "",
    ]
    num_devices = num_shares(found.strategy, outcome.request.num_devices)
    values = {"devices": num_devices, "strategy": found.strategy, **differences(FitSettings(), found)}
    gave = {name: each for each in outcome.results if not each.why and each.stage != TOGETHER for name in each.changes}
    for name, value in values.items():
        if name in gave and found != outcome.start:
            each = gave[name]
            lines.append(f"# {in_words(each.changes)}: {_times(each.ratio)}; training: {each.effect.words}")
        elif name in differences(FitSettings(), outcome.start):
            lines.append("# as at the start")
        lines += [toml_line(name, value), ""]
    return "\n".join(lines).rstrip() + "\n"


def _times(ratio: Spread | None) -> str:
    """Return a gain with its spread."""
    if ratio is None:
        return "not measured"
    return f"{ratio.median:.2f} times the samples/s ({ratio.low:.2f} to {ratio.high:.2f})"
