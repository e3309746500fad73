"""`tune`: settings that train a task faster on this machine, found by a sweep that leaves the training as it is.

First the largest micro-batch that fits is looked for, in processes of its own. Then one kind of setting after the other
is tried: the settings so far and each change to them take turns in rounds, as in `compare`, and the best change that is
faster beyond the noise is kept.
"""

from __future__ import annotations

import json
import math
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch.utils.data import IterableDataset

from lockstep.comm.collectives import broadcast_object
from lockstep.comm.world import World, init
from lockstep.data.loader import LoadOptions
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.launcher.api import launch_with
from lockstep.study.common import Spread, Table, load, log, paired_ratio, peak_bytes, reset_peak
from lockstep.study.compare.benchmark import (
    choose_steps,
    devices_for,
    order_of_round,
    split_layers,
    start_together,
    takes_part,
    threads_of,
    time_steps,
)
from lockstep.telemetry.resources import free_and_total_bytes
from lockstep.train.plan import PER_PROCESS, check_batch, check_gpus
from lockstep.train.settings import FitSettings, Settings, toml_line
from lockstep.train.step import is_out_of_memory
from lockstep.train.strategies.strategy import check_engine
from lockstep.train.task import Task
from lockstep.train.trainer import Trainer

STRATEGIES = ("single", "dp", "ddp", "ddp-zero1")
"""Those that are tried if none are named."""

POSSIBLE = (*STRATEGIES, "fsdp")
FIRST_LINE = "# Written by lockstep tune"
NOW, TOGETHER = "now", "all together"
"""The name in each round of the settings that changes are compared with; and the stage that checks their sum."""

WORTH = 1.02
"""A change has to make a run so many times as fast to be taken."""

FEWEST_ROUNDS, MOST_ROUNDS = 5, 9
"""Five rounds are the fewest in which a median can be known with 90% certainty."""

_NUM_WARMUP, _NUM_PROBED = 4, 2
"""Steps: buckets are built anew after the first, in which the optimizer makes its state."""

_USABLE = 0.8
"""Of the memory that is free before anything starts: the rest is for what else goes on."""

_STACKS_BYTES = 2**29
"""Room for the stacks of threads that torch starts later: they count as data, though little of them is ever used."""

_MANY_STEPS = 1_000_000
"""More than anybody waits for: a stream needs a number, and a schedule falls over it."""

_MIB = 2**20

Values = dict[str, Any]

_DEFAULTS = {one.name: one.default for one in fields(FitSettings)}
_OF_LOOP = {one.name for one in fields(Settings)}


# Settings as plain values: those that differ from the defaults, by name, as a file of settings has them.


def value_of(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a setting, given or not."""
    return values.get(name, _DEFAULTS[name])


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> Values:
    """Return ``values`` with ``changes``; what is the default is left out."""
    return {name: value for name, value in {**values, **changes}.items() if value != _DEFAULTS[name]}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Values:
    """Return what ``after`` changes, with the defaults spelled out."""
    names = [name for name in _DEFAULTS if name in before or name in after]
    return {name: value_of(after, name) for name in names if value_of(after, name) != value_of(before, name)}


def in_words(changes: Mapping[str, Any]) -> str:
    """Return changes as flags are spelled, without dashes before them: ``workers 2, prefetch 4``."""

    def word(value: Any) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return "as usual" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name.replace('_', '-')} {word(value)}" for name, value in changes.items())


def num_shares(values: Mapping[str, Any], num_devices: int) -> int:
    """Return into how many devices' parts a global batch is divided."""
    return 1 if value_of(values, "strategy") == "single" else num_devices


class Effect(IntEnum):
    """What a change of settings does to the training, from least to most."""

    BITS = 0
    ROUNDING = 1
    DIVISION = 2
    ARITHMETIC = 3

    @property
    def words(self) -> str:
        """In a word or two."""
        return ("same bits", "rounding", "division", "arithmetic")[self]

    @property
    def sentence(self) -> str:
        """What becomes of the training, in one sentence."""
        return (
            "The training is the same, bit for bit.",
            "The training is the same but for the rounding of sums: same global batches, order and loss.",
            "Same global batches and order, but layers see them divided otherwise: another training.",
            "Same global batches and order, but another arithmetic: another training.",
        )[self]


def effect_of(
    before: Mapping[str, Any], after: Mapping[str, Any], *, num_devices: int, layers: Sequence[str]
) -> Effect:
    """Return what becomes of a training if its settings change.

    Args:
        before: Settings by name.
        after: Likewise.
        num_devices: That take part.
        layers: Kinds of layer whose result depends on how a batch is divided, see `split_layers`.
    """

    def division(values: Mapping[str, Any]) -> tuple[int, int, bool]:
        # The replicas of dp draw dropout from one generator on CPUs, so the same division is not enough there.
        is_threaded = "dropout" in layers and value_of(values, "strategy") == "dp"
        return num_shares(values, num_devices), value_of(values, "accumulate"), is_threaded

    names = differences(before, after).keys()
    if names & {"precision", "wire"}:
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
        on_cuda: Whether they are GPUs.
        num_cores: That a plain process would use.
        global_batch_size: Samples of a step.
        strategies: That may be tried.
        seconds: How long all of it may take.
        began_at: When it began, in Unix time.
        limit_bytes: What all processes of this machine, or one GPU, may use.
    """

    task: Task | str
    num_devices: int
    on_cuda: bool
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

    @property
    def patience_s(self) -> float:
        """How long one change may keep everybody waiting."""
        return max(20.0, 0.25 * self.seconds)

    def threads(self, values: Values) -> int:
        """Return the threads of one process, as a run with these settings has them."""
        return threads_of(value_of(values, "strategy"), self.num_cores, self.num_devices)

    def trainer(self, values: Values, world: World) -> Trainer:
        """Return what trains the task with ``values`` for as long as it is asked to. Collective per strategy."""
        task = replace(load(self.task), eval_dataset=None, metrics=None, after=None)
        own = {name: value for name, value in values.items() if name in _OF_LOOP}
        settings = Settings(**{**own, "epochs": None, "steps": _MANY_STEPS})
        strategy = value_of(values, "strategy")
        devices = devices_for(strategy, world, self.num_devices)
        return Trainer(task, settings, world, strategy=strategy, devices=devices)


@dataclass(frozen=True)
class Known:
    """What the first processes found out about the task.

    Attributes:
        peaks: Bytes that a micro-batch of so many samples needs, by size; those that fit.
        is_whole: Whether the larger ones were tried, too.
        layers: Kinds of layer whose result depends on how a batch is divided.
        gradient_bytes: Of all gradients.
        wait_share: The part of a step that waits for data.
    """

    peaks: dict[int, int]
    is_whole: bool = True
    layers: tuple[str, ...] = ()
    gradient_bytes: int = 0
    wait_share: float = 0.0

    @property
    def largest(self) -> int | None:
        """Samples of the largest micro-batch that fits; ``None`` if it was not looked for."""
        return max(self.peaks, default=None)


def candidates(stage: str, base: Values, request: Request, known: Known) -> list[Values]:
    """Return the changes that are worth trying on top of ``base``."""
    return [changes for changes in _STAGES[stage](base, request, known) if _is_possible(changed(base, changes))]


def _is_possible(values: Values) -> bool:
    try:
        own = {name: value for name, value in values.items() if name in _OF_LOOP}
        check_engine(value_of(values, "strategy"), Settings(**own))
    except ConfigurationError:
        return False
    return value_of(values, "reproducible") is None or value_of(values, "strategy") in ("single", "dp", "ddp")


def _loading(base: Values, request: Request, known: Known) -> list[Values]:
    now = value_of(base, "workers")
    per_rank = max(1, request.num_cores // request.num_devices)
    counts = {now // 2, 2 * now} - {now} if now else {1, 2, max(4, per_rank)}
    waits = now or known.wait_share >= 0.02  # else nothing is to be gained
    return [{"workers": min(count, 16)} for count in sorted(counts)] if waits else []


def _strategy(base: Values, request: Request, known: Known) -> list[Values]:
    names = [name for name in request.strategies if name != value_of(base, "strategy")]
    return [_to_strategy(base, name, request, known) for name in names] if request.num_devices > 1 else []


def _to_strategy(base: Values, name: str, request: Request, known: Known) -> Values:
    """Return the changes that make ``name`` compute: without what only ddp can do, and in pieces that fit."""
    changes: Values = {"strategy": name}
    if name != "ddp":
        usual = {"bucket_cap_mb": None, "wire": None, "overlap_optimizer": False}
        changes |= {key: value for key, value in usual.items() if value_of(base, key) != value}
    pieces = now = value_of(base, "accumulate")
    shares, shares_now = (num_shares(values, request.num_devices) for values in (changed(base, changes), base))
    if shares < shares_now and known.largest is not None:
        pieces = max(now, math.ceil(request.global_batch_size / shares / known.largest))
    elif shares > shares_now:
        pieces = max(1, now // shares)
    return changes if pieces == now else {**changes, "accumulate": pieces}


def _micro_batch(base: Values, request: Request, known: Known) -> list[Values]:
    if value_of(base, "reproducible") is not None or value_of(base, "shares") is not None:
        return []  # these set the sizes
    now = value_of(base, "accumulate")
    share = request.global_batch_size // num_shares(base, request.num_devices)
    fewest = 1 if known.largest is None else math.ceil(share / known.largest)
    counts = sorted({fewest, now // 2, 2 * now, 4 * now} - {0, now})
    fitting = [count for count in counts if count >= fewest and share % count == 0 and share // count > 1]
    return [{"accumulate": count} for count in fitting]


def _threads(base: Values, request: Request, known: Known) -> list[Values]:
    if request.on_cuda or value_of(base, "reproducible") is not None:
        return []
    now = value_of(base, "threads") or request.threads(base)
    counts = sorted({1, now // 2, 2 * now, request.num_cores} - {0, now})
    return [{"threads": count} for count in counts if count <= request.num_cores]


def _buckets(base: Values, request: Request, known: Known) -> list[Values]:
    if value_of(base, "strategy") != "ddp" or request.num_devices == 1:
        return []
    now, mib = value_of(base, "bucket_cap_mb"), known.gradient_bytes / _MIB
    caps = [cap for cap in (None, 5.0, 100.0) if cap != now and (cap is None or mib > cap)]
    overlaps = value_of(base, "clip") is None and not value_of(base, "overlap_optimizer")
    return [*({"bucket_cap_mb": cap} for cap in caps), *([{"overlap_optimizer": True}] if overlaps else [])]


def _precision(base: Values, request: Request, known: Known) -> list[Values]:
    found: list[Values] = [{"precision": "bf16"}] if value_of(base, "precision") == "fp32" else []
    has_wire = value_of(base, "strategy") == "ddp" and request.num_devices > 1
    if has_wire and known.gradient_bytes > _MIB and value_of(base, "wire") is None:
        found.append({"wire": "bf16"})
    return found


_STAGES: dict[str, Callable[[Values, Request, Known], list[Values]]] = {
    "loading": _loading,
    "strategy": _strategy,
    "micro-batch": _micro_batch,
    "threads": _threads,
    "buckets": _buckets,
    "precision": _precision,
}
"""In this order: behind a slow loader nothing else can be seen, and what comes later depends on the strategy."""


# What the ranks do.


def probe(request: Request, base: Values, sizes: Sequence[int], file: str) -> None:
    """Train with each size of micro-batch, and note in ``file`` what it needed. Collective: every rank.

    These processes end with the first size that does not fit, so the file is written anew after each.
    """
    with init() as world:
        if not request.on_cuda:
            # The host gives more memory than it has, and then kills whom it likes. With a limit on its data this
            # process gets an error instead, as it would of a GPU.
            limit = request.limit_bytes // world.world_size + psutil.Process().memory_info().data + _STACKS_BYTES
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        torch.set_num_threads(request.threads(base))
        before_bytes = psutil.Process().memory_info().rss
        peaks: dict[int, int] = {}
        for size in sizes or [0]:
            values = dict(base)
            if size:
                batch = size * num_shares(base, request.num_devices)
                values = changed(base, {"accumulate": 1, "workers": 0, "prefetch": None, "global_batch_size": batch})
            reset_peak()
            trainer = request.trainer(values, world)
            try:
                seconds, records = time_steps(trainer, _NUM_PROBED)
                waits = records[-1].times.data_wait_s * _NUM_PROBED / seconds
                model = trainer.model
            finally:
                trainer.close()
            peak = torch.cuda.max_memory_allocated(world.device) if request.on_cuda else peak_bytes() - before_bytes
            peaks |= {size: max(0, peak)} if size else {}
            trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
            if world.is_rank_zero:
                facts = {"peaks": peaks, "layers": split_layers(model), "bytes": trained, "wait": waits}
                _write_whole(file, facts)


def _write_whole(file: str, facts: Mapping[str, Any]) -> None:
    """Replace a file at once: its writer may be killed at any time."""
    Path(f"{file}.new").write_text(json.dumps(facts), encoding="utf-8")
    os.replace(f"{file}.new", file)


def run_rounds(request: Request, contenders: dict[str, Values], until: float, mark: str) -> list[dict[str, float]]:
    """Let all contenders take turns; return the seconds of this rank's turns, by round, for each sample.

    Collective: every rank. Ranks that have no part in a turn sleep meanwhile.

    Args:
        request: What to do.
        contenders: Settings by name.
        until: When no other round begins, in Unix time.
        mark: File in which rank zero notes whose turn it is, for when the ranks die of it.
    """
    # More processes than cores: whether that pays is for us to find.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    with init() as world:
        entrants: dict[str, _Entrant] = {}
        try:
            for name, values in contenders.items():
                _note_turn(world, mark, name)
                entrants[name] = _Entrant(request, values, world)
            rounds: list[dict[str, float]] = []
            running = list(contenders)
            while running:
                rounds.append({})
                for name in order_of_round(running, len(rounds) - 1):
                    _note_turn(world, mark, name)
                    seconds = entrants[name].run_turn()
                    if seconds is not None:
                        rounds[-1][name] = seconds
                # Rank zero takes part in every turn, and waits for the slowest rank in each step: it alone can judge.
                undecided = [name for name in running if name != NOW and not is_decided(name, rounds)]
                is_over = len(rounds) >= MOST_ROUNDS or time.time() > until
                left = [NOW, *undecided] if undecided and not is_over else []
                running = broadcast_object(left, group=world.group, device=world.device)
            return rounds
        finally:
            for entrant in entrants.values():
                entrant.close()


def _note_turn(world: World, mark: str, name: str) -> None:
    if world.is_rank_zero:
        _write_whole(mark, {"name": name})


class _Entrant:
    """A contender on this rank, warmed up, and at rest between its turns. Collective: every rank makes all of them."""

    def __init__(self, request: Request, values: Values, world: World) -> None:
        self._values, self._world = values, world
        self._strategy, self._threads = value_of(values, "strategy"), request.threads(values)
        self._trainer: Trainer | None = None
        step_s = 0.0
        if start_together(self._strategy, self._threads, world):
            self._trainer = request.trainer(values, world)
            seconds = [time_steps(self._trainer, 1)[0] for _ in range(_NUM_WARMUP)]
            step_s = median(seconds[1:])
            self._rest()
        turn_s = min(0.5, max(0.03, request.seconds / 600))  # half a second, if there are five minutes
        chosen = choose_steps([step_s or 1.0], turn_s=turn_s, longest_s=10 * turn_s, fewest=2)
        self._num_steps = int(broadcast_object(chosen, group=world.group, device=world.device))

    def run_turn(self) -> float | None:
        """Train some steps; return the seconds for each sample, nothing if this rank takes no part."""
        assert takes_part(self._strategy, self._world) == (self._trainer is not None)
        if start_together(self._strategy, self._threads, self._world):
            self._use_up()
        if not start_together(self._strategy, self._threads, self._world) or self._trainer is None:
            return None
        seconds, records = time_steps(self._trainer, self._num_steps)
        self._rest()
        return seconds / sum(record.num_samples for record in records)

    def _use_up(self) -> None:
        """Use up what loader processes have loaded ahead while they had time: nobody measures that."""
        assert self._trainer is not None
        if self._trainer.settings.workers:
            ahead = self._trainer.settings.workers * (value_of(self._values, "prefetch") or LoadOptions.ahead)
            time_steps(self._trainer, math.ceil(ahead / value_of(self._values, "accumulate")) + 1)

    def _rest(self) -> None:
        """End the loader processes, which would go on to load in the turn of another."""
        assert self._trainer is not None
        if not self._trainer.settings.workers:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a stream that does not say where it stands: that is no news here
            state = self._trainer.batches.state()
        if state is not None or not isinstance(self._trainer.samples, IterableDataset):
            self._trainer.batches.seek(self._trainer.num_steps_done, state)

    def close(self) -> None:
        """End all that it has."""
        if self._trainer is not None:
            self._trainer.close()


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
    return (count >= 3 and ratio.high < 0.97) or (count >= FEWEST_ROUNDS and ratio.low > 1.05)


@dataclass(frozen=True)
class Result:
    """What came of a change.

    Attributes:
        stage: In which it was tried.
        changes: Settings by name, defaults spelled out.
        effect: What becomes of the training.
        ratio: How many times as fast it was; None if it did not run.
        num_rounds: In which it ran.
        kept: Whether it is part of what was found.
        why: Why it was not kept.
    """

    stage: str
    changes: Values
    effect: Effect
    ratio: Spread | None
    num_rounds: int
    kept: bool = False
    why: str = ""

    @property
    def is_gain(self) -> bool:
        """Whether it is faster beyond the noise, and by enough to matter."""
        ratio = self.ratio
        return ratio is not None and self.num_rounds >= FEWEST_ROUNDS and ratio.low > 1 and ratio.median >= WORTH

    @property
    def why_not(self) -> str:
        """Why it is no gain."""
        if self.ratio is None:
            return "time was up before it ran"
        if self.ratio.high < 1:
            return "slower"
        if self.num_rounds < FEWEST_ROUNDS:
            return f"time was up after {self.num_rounds} round{'s' * (self.num_rounds > 1)}"
        return "within the noise" if self.ratio.low <= 1 else "too little to matter"


def tune(
    task: Task | str,
    *,
    devices: int = 2,
    minutes: float = 5.0,
    start: Mapping[str, Any] | None = None,
    strategies: Sequence[str] = STRATEGIES,
    allow_precision: bool = False,
    allow_division: bool = False,
    limit_bytes: int | None = None,
    quiet: bool = False,
    began_at: float | None = None,
) -> Sweep:
    """Try settings on ``task`` for some minutes, and return those that train it fastest, with what each gave.

    The global batch, the order of the samples and the loss stay as they are. Starts processes of its own, and blocks
    until they are done; Ctrl-C ends it with what was found by then.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        devices: Devices for all strategies but ``single``.
        minutes: How long it may take.
        start: Settings to begin with, by name, as `FitSettings` takes them.
        strategies: That may be tried.
        allow_precision: Whether another arithmetic may be taken: bf16 in computing, or on the way of gradients.
        allow_division: Whether a batch may be divided otherwise though layers see that, as batch norm does.
        limit_bytes: What all processes, or one GPU, may use of the memory; a part of what is free now, if None.
        quiet: Whether to show no progress.
        began_at: From when on the time counts, in Unix time; now if None.

    Raises:
        ConfigurationError: Task, settings and devices do not go together; says what to change.
        LockstepError: The task cannot be trained with the settings to begin with.
    """
    if devices < 1:
        raise ConfigurationError(f"devices={devices} is not allowed.\nGive a whole number of at least 1.")
    if not 0 < minutes < 10_000:
        raise ConfigurationError(f"minutes={minutes:g} is not allowed.\nGive a number above 0.")
    values = changed(start or {}, {"strategy": (start or {}).get("strategy", "ddp"), "devices": None})
    for name in (*strategies, value_of(values, "strategy")):
        if name not in POSSIBLE:
            raise ConfigurationError(f"There is no strategy {name!r} to tune.\nChoose from: {', '.join(POSSIBLE)}.")
    check_gpus(devices)
    found = load(task)
    check_batch(found, FitSettings(**values), num_shares(values, devices))
    on_cuda = torch.cuda.is_available()
    request = Request(
        task=task,
        num_devices=devices,
        on_cuda=on_cuda,
        num_cores=torch.get_num_threads(),
        global_batch_size=value_of(values, "global_batch_size") or found.global_batch_size,
        strategies=tuple(strategies),
        seconds=60 * minutes,
        began_at=began_at or time.time(),
        limit_bytes=limit_bytes or _usable_bytes(devices, on_cuda=on_cuda),
    )
    name = Path(task).name if isinstance(task, str) else found.name
    sweep = Sweep(name, request, values, values, log=(lambda _: None) if quiet else log)
    sweep.allowed += (Effect.DIVISION,) * allow_division + (Effect.ARITHMETIC,) * allow_precision
    with tempfile.TemporaryDirectory(prefix="lockstep-tune-") as sweep.folder:
        try:
            sweep.run()
        except KeyboardInterrupt:
            sweep.interrupted = True
            sweep.notes.append("Stopped by Ctrl-C: this is what was found by then.")
    return sweep


def _usable_bytes(num_devices: int, *, on_cuda: bool) -> int:
    """Return how much memory all processes may use together, or one GPU."""
    if on_cuda:
        return int(_USABLE * min(torch.cuda.get_device_properties(one).total_memory for one in range(num_devices)))
    free, total = free_and_total_bytes()
    return int(_USABLE * (free if total else psutil.virtual_memory().available))


@dataclass
class Sweep:
    """Goes through the stages; what it has found so far stands in its attributes at any time.

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
        interrupted: Whether somebody did not want to wait for the end.
    """

    task: str
    request: Request
    start: Values
    found: Values
    allowed: tuple[Effect, ...] = (Effect.BITS, Effect.ROUNDING)
    known: Known = field(default_factory=lambda: Known({}))
    results: list[Result] = field(default_factory=list)
    total: Spread | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    log: Callable[[str], None] = log
    folder: str = ""

    @property
    def device(self) -> str:
        """How many of what."""
        return f"{self.request.num_devices} x {'cuda' if self.request.on_cuda else 'cpu'}"

    @property
    def effect(self) -> Effect:
        """What becomes of the training."""
        num_devices, layers = self.request.num_devices, self.known.layers
        return effect_of(self.start, self.found, num_devices=num_devices, layers=layers)

    @property
    def verdict(self) -> str:
        """What came of it, in one sentence."""
        if self.found == self.start:
            return "Nothing that was tried is faster than the settings that tuning began with."
        if self.total is None:
            return "How much all of it gives together was not measured: time was up."
        return f"All of it together: {_times(self.total)} of the settings that tuning began with."

    def run(self) -> None:
        """Try all stages, or as many as there is time for.

        Raises:
            LockstepError: The task cannot be trained with the settings to begin with.
        """
        self.log("memory: looking for the largest micro-batch that fits")
        self._probe()
        reserve_s = min(20.0, 0.2 * self.request.seconds)
        for index, stage in enumerate(_STAGES):
            found = candidates(stage, self.found, self.request, self.known)
            if not found:
                continue
            left_s = self.request.left_s - reserve_s
            if left_s <= 0:
                self.notes.append("Time was up before all was tried: more of it (--minutes M) may find more.")
                break
            # Twice an equal part: fewer stages to their end are worth more than all without one.
            self._try(stage, found, self.found, min(left_s, 2 * left_s / (len(_STAGES) - index)))
        if self.found != self.start:
            result = self._try(TOGETHER, [differences(self.start, self.found)], self.start, self.request.left_s)
            if result is not None and result.num_rounds >= FEWEST_ROUNDS:
                self.total = result.ratio
                if not result.is_gain:
                    self.found = self.start

    def _probe(self) -> None:
        """Find the largest micro-batch that fits, in processes that may die of it, and what else is to be known."""
        base, request, file = self.found, self.request, str(Path(self.folder) / "probe.json")
        share = math.ceil(request.global_batch_size / num_shares(base, request.num_devices))
        # Batch norm takes no single sample.
        sizes = sorted({max(min(2, share), math.ceil(share / 2**power)) for power in range(share.bit_length())})
        if value_of(base, "reproducible") is not None or value_of(base, "shares") is not None:
            sizes = []  # these set the sizes of micro-batches
        error: Exception | None = None
        devices = request.num_devices if value_of(base, "strategy") in PER_PROCESS else 1
        try:
            launch_with(probe, (request, base, sizes, file), devices=devices, timeout_s=0.4 * request.left_s)
        except LockstepError as caught:
            error = caught
        if not Path(file).exists():
            cause = error.__cause__ if error is not None else None
            raise cause if isinstance(cause, LockstepError) else error or LockstepError("No rank has trained.")
        facts = json.loads(Path(file).read_text(encoding="utf-8"))
        peaks = {int(size): peak for size, peak in facts["peaks"].items()}
        self.known = Known(peaks, error is None, tuple(facts["layers"]), facts["bytes"], facts["wait"])
        largest = self.known.largest
        if largest is not None and math.ceil(share / value_of(base, "accumulate")) > largest:
            self.start = self.found = changed(base, {"accumulate": math.ceil(share / largest)})
        if largest is not None:
            whole = "a device's whole part of the global batch" if largest >= share else f"of {share} for each device"
            needed = f"{peaks[largest] / _MIB:,.0f} MiB"
            self.notes.append(f"The largest micro-batch that fits has {largest} samples ({whole}): {needed}.")

    def _try(self, stage: str, found: list[Values], base: Values, seconds: float) -> Result | None:
        """Measure changes beside ``base``, keep the best that is allowed; return the last one's result."""
        self.log(f"{stage}: {'; '.join(map(in_words, found))}; at most {seconds:.0f} s")
        rounds, lost = self._measure({in_words(each): each for each in found}, base, time.time() + seconds)
        results = []
        for changes in found:
            name, after = in_words(changes), changed(base, changes)
            effect = effect_of(base, after, num_devices=self.request.num_devices, layers=self.known.layers)
            count = sum(name in each for each in rounds)
            result = Result(stage, changes, effect, ratio_of(name, rounds), count)
            results.append(replace(result, why=lost.get(name) or self._forbidden(result) or result.why_not))
        gains = [each for each in results if each.is_gain and not self._forbidden(each)]
        best = max(gains, key=lambda each: each.ratio.median if each.ratio else 0.0, default=None)
        for each in results:
            beaten = "another was better" if each in gains else each.why
            self.results.append(replace(each, kept=True, why="") if each is best else replace(each, why=beaten))
        if best is not None and stage != TOGETHER:
            self.found = changed(base, best.changes)
        return self.results[-1] if results else None

    def _measure(
        self, changes: dict[str, Values], base: Values, until: float
    ) -> tuple[list[dict[str, float]], dict[str, str]]:
        """Run rounds until they succeed without those that break them; return them, and why some were lost."""
        request, mark = self.request, str(Path(self.folder) / "mark.json")
        lost: dict[str, str] = {}
        while changes and time.time() < until:
            contenders = {NOW: base} | {name: changed(base, each) for name, each in changes.items()}
            limit_s = until - time.time() + request.patience_s
            try:
                args = (request, contenders, until, mark)
                rounds = launch_with(run_rounds, args, devices=request.num_devices, timeout_s=limit_s)[0]
                return rounds, lost
            except LockstepError as error:
                culprit = json.loads(Path(mark).read_text())["name"] if Path(mark).exists() else NOW
                cause = error.__cause__ or error
                if culprit not in changes and not is_out_of_memory(cause) and "SIGKILL" not in str(error):
                    self.notes.append(f"{NOW.capitalize()} failed in a stage: {_reason(cause)}.")
                    break
                # What does not fit beside the others goes, or else the last of them.
                culprit = culprit if culprit in changes else list(changes)[-1]
                lost[culprit] = _reason(cause)
                changes = {name: each for name, each in changes.items() if name != culprit}
        return [], lost

    def _forbidden(self, result: Result) -> str:
        """Return why a change that is faster is not taken; nothing if it is taken, or is no faster."""
        if not result.is_gain or result.effect in self.allowed:
            return ""
        if result.effect is Effect.ARITHMETIC:
            return "offered: taken with --allow-precision"
        return f"offered: {' and '.join(self.known.layers)} would see another division; --allow-division takes it"


def _reason(error: BaseException) -> str:
    """Return in one line what was wrong."""
    lines = str(error).splitlines() or [type(error).__name__]
    first = (lines[-1] if lines[0].startswith("Caught ") else lines[0]).rstrip(".")  # what a thread has raised
    return first if isinstance(error, LockstepError) else f"{type(error).__name__}: {first}"


# What was found, for a terminal and as a file that ``lockstep train --settings`` reads.

_HOW_TO_READ = (
    "Times: samples/s over those of the settings at that time, side by side in short rounds; the median, and the range "
    "that holds the true one with 90% certainty. Kept is what is outside of the noise and gives 2% or more. Training: "
    "what a change does to it; 'rounding' is the same but for the order in which sums are added."
)


def render(outcome: Sweep) -> RenderableType:
    """Lay out the table, what there is to say, and the conclusion: at most 100 columns."""
    began = in_words({"strategy": outcome.start.get("strategy", "ddp"), **outcome.start})
    batch = outcome.request.global_batch_size
    title = f"{outcome.task}: {outcome.device}, global batch {batch}, from {began}"
    rows = []
    for each in outcome.results:
        times = f"{each.ratio.median:.2f}x" if each.ratio else "-"
        span = f"{each.ratio.low:.2f} - {each.ratio.high:.2f}" if each.ratio else "-"
        verdict = "kept" if each.kept else each.why
        rows.append((each.stage, in_words(each.changes), times, span, str(each.num_rounds), each.effect.words, verdict))
    columns = ("stage", "change", "times", "low - high", "rounds", "training", "")
    table = Table(title, columns, rows, numbers=("times", "low - high", "rounds"))
    lines = [Text(_HOW_TO_READ, style="dim"), Text(), *(Text(note) for note in outcome.notes)]
    lines.append(Text(outcome.verdict, style="bold"))
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
    batch = outcome.request.global_batch_size
    lines = [
        f"{FIRST_LINE}: {outcome.task} on {outcome.device}, global batch {batch}.",
        *(f"# {name}: {value}" for name, value in facts.items()),
        f"# lockstep train {task_file} --settings {file}",
        "#",
        f"# {outcome.verdict}",
        f"# {outcome.effect.sentence}",
        "",
    ]
    strategy = value_of(outcome.found, "strategy")
    values = {"devices": num_shares(outcome.found, outcome.request.num_devices), "strategy": strategy, **outcome.found}
    gave = {name: each for each in outcome.results if each.kept and each.stage != TOGETHER for name in each.changes}
    for name, value in values.items():
        if name in gave and outcome.found != outcome.start:
            each = gave[name]
            lines.append(f"# {in_words(each.changes)}: {_times(each.ratio)}; training: {each.effect.words}")
        elif name in outcome.start:
            lines.append("# as tuning began")
        lines += [toml_line(name, value), ""]
    offered = [each for each in outcome.results if each.why.startswith("offered")]
    lines += ["# Faster, but not the same training:"] if offered else []
    for each in offered:
        lines.append(f"# {in_words(each.changes)}: {_times(each.ratio)}; {each.why}")
        lines += [f"# {toml_line(name, value)}" for name, value in each.changes.items() if value is not None]
    return "\n".join(lines).rstrip() + "\n"


def _times(ratio: Spread | None) -> str:
    """Return a gain with its spread."""
    if ratio is None:
        return "not measured"
    return f"{ratio.median:.2f} times the samples/s ({ratio.low:.2f} to {ratio.high:.2f})"
