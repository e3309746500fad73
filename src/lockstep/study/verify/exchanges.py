"""`verify` of ``local-sgd`` and ``diloco``: these runs differ by design, but three rules must hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
from rich.console import Group, RenderableType
from rich.text import Text
from typing_extensions import override

from lockstep.accelerator import check_count
from lockstep.comm.world import World
from lockstep.errors import ReplicasDiffer
from lockstep.study.common import Shown, Table, load, run_ranks, to_json
from lockstep.study.verify.diagnose import TIMEOUT_S, Alone, run_alone
from lockstep.study.verify.fingerprint import EXACT, Tolerance, Trace, compare
from lockstep.study.verify.interventions import Experiment, Given, Subject
from lockstep.study.verify.reference_loop import perform
from lockstep.train.plan import check_batch
from lockstep.train.settings import Settings, StrategyName, check_engine
from lockstep.train.task import Task

_SAME_RUN = "With SGD, an exchange in every step and an outer rate of 1, the run is the same as with ddp."
_SAME_BITS = "After each exchange all ranks hold the same bits."
_EACH_SAMPLE = "Each sample of a global batch is trained on once, on one rank."

# By how much parameters may differ in rounding, relative to their norm.
_DOUBLE, _SINGLE = 1e-12, 1e-5


@dataclass(frozen=True)
class Rule:
    """A rule, whether it holds, and what was found."""

    text: str
    holds: bool
    found: str


@dataclass(frozen=True, repr=False)
class Rules(Shown):
    """The rules for a task that is trained with a strategy."""

    task: str
    strategy: str
    rules: tuple[Rule, ...]

    @property
    def same(self) -> bool:
        """Whether all rules hold: the run is as it should be."""
        return all(rule.holds for rule in self.rules)

    @override
    def __rich__(self) -> RenderableType:
        verdict = f"The run differs by design: with {self.strategy}, ranks train independently between exchanges. "
        verdict += "All rules hold." if self.same else "Not all rules hold."
        rows: list[list[str | Text]] = [
            [rule.text, Text("holds") if rule.holds else Text("does not hold", style="bold"), rule.found]
            for rule in self.rules
        ]
        table = Table("Rules", ["", "outcome", "found"], rows).rich()
        return Group(Text(self.task, style="bold"), Text(), Text(verdict), Text(), table)

    def to_json(self) -> str:
        """Return the same for other programs; docs/verify.md describes the names."""
        return to_json({"version": 1, **asdict(self), "by_design": True, "holds": self.same})


def verify_exchanges(
    task: Task | str,
    strategy: StrategyName,
    *,
    devices: int = 2,
    steps: int = 4,
    settings: Settings,
) -> Rules:
    """Train some steps of ``task`` on ranks that exchange parameters now and then, and check the rules.

    Starts its own processes and blocks until they end. If these steps contained fewer than two exchanges, ranks
    exchange more often.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        strategy: ``local-sgd`` or ``diloco``.
        devices: Ranks.
        steps: Steps to train.
        settings: How to train.

    Raises:
        ConfigurationError: The task, the settings or the devices cannot be used.
    """
    check_count(devices)
    check_engine(strategy, settings)
    loaded = load(task, prepares=True)
    check_batch(loaded, settings, devices)
    name = Path(task).name if isinstance(task, str) else loaded.name
    start = partial(run_ranks, timeout_s=TIMEOUT_S)
    every = min(settings.sync_every or 50, max(1, steps // 2))
    settings = replace(settings, steps=steps, epochs=None, check_replicas=1)
    often = replace(settings, sync_every=every, sync_delay=min(settings.sync_delay or 0, every - 1))
    none: dict[str, Any] = dict.fromkeys(("sync_every", "fragments", "sync_delay", "outer_lr", "outer_momentum"))
    plain = replace(settings, **none)
    pickled = task if isinstance(task, str) else cloudpickle.dumps(task)
    subject = Subject(pickled, plain, devices, steps, steps=tuple(range(steps)))
    alone: Alone = start(run_alone, subject, devices=1)[0]
    subject, on_ranks = alone.subject, Experiment("ranks", watched=False, strategy=strategy)
    runs: list[list[Trace] | str] = start(train, replace(subject, settings=often), on_ranks, devices=devices)
    ddp = start(perform, subject, replace(on_ranks, strategy="ddp", is_sgd=True), Given(), devices=devices)
    in_each_step = replace(subject, settings=replace(plain, sync_every=1))
    as_ddp = replace(on_ranks, strategy="local-sgd", is_sgd=True)
    equal = start(perform, in_each_step, as_ddp, Given(), devices=devices)

    limit, kind = (_DOUBLE, "float64") if subject.double else (_SINGLE, "float32")
    worst = compare([one for (one,) in ddp], [one for (one,) in equal], Tolerance(limit, 0.0)).worst["parameter"]
    words = f"parameters differ by {worst:.1e} of their norm in {kind}; allowed: {limit:.0e}"
    rules = [Rule(_SAME_RUN, worst <= limit, words)]
    if problems := [run for run in runs if isinstance(run, str)]:
        return Rules(name, strategy, (*rules, Rule(_SAME_BITS, False, problems[0])))
    traces = [trace for run in runs for trace in run if isinstance(trace, Trace)]
    ends = [{name: each.digest for name, each in run.steps[-1].tensors["parameter"].items()} for run in traces]
    others = [rank for rank, end in enumerate(ends) if end != ends[0]]
    words = f"checked with an exchange every {every} steps"
    rules.append(Rule(_SAME_BITS, not others, f"not on rank {others[0]} and rank 0 at the end" if others else words))
    wrong, words = compare(alone.traces, traces, EXACT).of_kind("sample"), f"those of one process in {steps} steps"
    rules.append(Rule(_EACH_SAMPLE, not wrong, f"step {wrong.step}: {wrong.words} of one process" if wrong else words))
    return Rules(name, strategy, tuple(rules))


def train(subject: Subject, experiment: Experiment, world: World) -> list[Trace] | str:
    """Train the steps; return the reason if replicas differ. Collective: every rank of ``world``."""
    try:
        return perform(subject, experiment, Given(), world)
    except ReplicasDiffer as error:  # on every rank
        return str(error).partition("\n")[0]
