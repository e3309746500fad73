"""`verify` of ``local-sgd`` and ``diloco``: these runs differ by design, but three rules must hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import cloudpickle
from rich.console import Group, RenderableType
from rich.text import Text

from lockstep.accelerator import check_count
from lockstep.comm.world import World
from lockstep.errors import ReplicasDiffer
from lockstep.study import common
from lockstep.study.common import Table, load, run_ranks
from lockstep.study.verify.fingerprint import EXACT, Tolerance, Trace, compare
from lockstep.study.verify.interventions import Experiment, Given, Subject
from lockstep.study.verify.reference_loop import perform
from lockstep.train.plan import check_batch
from lockstep.train.settings import Settings, StrategyName, check_engine
from lockstep.train.task import Task

_TIMEOUT_S = 3600.0
# By how much parameters may differ in rounding, relative to their norm.
_DOUBLE, _SINGLE = 1e-12, 1e-5


@dataclass(frozen=True)
class Rule:
    """A rule, whether it holds, and what was found."""

    text: str
    holds: bool
    found: str


def verify_exchanges(
    task: Task | str,
    strategy: StrategyName,
    *,
    devices: int = 2,
    steps: int = 4,
    settings: Settings,
    processes: Callable[..., list[Any]] | None = None,
) -> list[Rule]:
    """Train some steps of ``task`` on ranks that exchange parameters now and then, and check the rules.

    Starts its own processes and blocks until they end. If these steps contained fewer than two exchanges, ranks
    exchange more often.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        strategy: ``local-sgd`` or ``diloco``.
        devices: Ranks.
        steps: Steps to train.
        settings: How to train.
        processes: Starts one process, or as many as there are ranks; see `run_ranks`.

    Raises:
        ConfigurationError: The task, the settings or the devices cannot be used.
    """
    check_count(devices)
    check_engine(strategy, settings)
    check_batch(load(task), settings, devices)
    start = processes or partial(run_ranks, timeout_s=_TIMEOUT_S)
    every = min(settings.sync_every or 50, max(1, steps // 2))
    settings = replace(settings, steps=steps, epochs=None, check_replicas=1)
    often = replace(settings, sync_every=every, sync_delay=min(settings.sync_delay or 0, every - 1))
    none: dict[str, Any] = dict.fromkeys(("sync_every", "fragments", "sync_delay", "outer_lr", "outer_momentum"))
    plain = replace(settings, **none)
    pickled = task if isinstance(task, str) else cloudpickle.dumps(task)
    subject = Subject(pickled, plain, devices, steps, steps=tuple(range(steps)))
    alone = Experiment("one", watched=False)
    try:
        expected: list[Trace] = start(train, subject, alone, devices=1)[0]
    except Exception:  # such as a task that uses float32 explicitly
        subject = replace(subject, double=False)
        expected = start(train, subject, alone, devices=1)[0]
    on_ranks = replace(alone, division="ranks", strategy=strategy)
    runs: list[list[Trace] | str] = start(train, replace(subject, settings=often), on_ranks, devices=devices)
    ddp = start(perform, subject, replace(on_ranks, strategy="ddp", is_sgd=True), Given(), devices=devices)
    in_each_step = replace(subject, settings=replace(plain, sync_every=1))
    as_ddp = replace(on_ranks, strategy="local-sgd", is_sgd=True)
    equal = start(perform, in_each_step, as_ddp, Given(), devices=devices)
    engines = _compare_engines([one for (one,) in ddp], [one for (one,) in equal], subject.double)
    problem = next((run for run in runs if isinstance(run, str)), None)
    if problem is not None:
        return [engines, Rule(_SAME_BITS, False, problem)]
    traces = [trace for run in runs for trace in run if isinstance(trace, Trace)]
    return [engines, _compare_ranks(traces, every), _compare_samples(expected, traces)]


def train(subject: Subject, experiment: Experiment, world: World) -> list[Trace] | str:
    """Train the steps; return the reason if replicas differ. Collective: every rank of ``world``."""
    try:
        return perform(subject, experiment, Given(), world)
    except ReplicasDiffer as error:  # on every rank
        return str(error).partition("\n")[0]


_SAME_BITS = "After each exchange all ranks hold the same bits."


def _compare_engines(ddp: Sequence[Trace], found: Sequence[Trace], is_double: bool) -> Rule:
    limit, kind = (_DOUBLE, "float64") if is_double else (_SINGLE, "float32")
    worst = compare(ddp, found, Tolerance(limit, 0.0)).worst["parameter"]
    text = "With SGD, an exchange in every step and an outer rate of 1, the run is the same as with ddp."
    return Rule(text, worst <= limit, f"parameters differ by {worst:.1e} of their norm in {kind}; allowed: {limit:.0e}")


def _compare_ranks(runs: Sequence[Trace], every: int) -> Rule:
    ends = [{name: each.digest for name, each in run.steps[-1].tensors["parameter"].items()} for run in runs]
    others = [rank for rank, end in enumerate(ends) if end != ends[0]]
    found = (
        f"not on rank {others[0]} and rank 0 at the end" if others else f"checked with an exchange every {every} steps"
    )
    return Rule(_SAME_BITS, not others, found)


def _compare_samples(expected: Sequence[Trace], runs: Sequence[Trace]) -> Rule:
    text = "Each sample of a global batch is trained on once, on one rank."
    if wrong := compare(expected, runs, EXACT).of_kind("sample"):
        return Rule(text, False, f"step {wrong.step}: {wrong.words} of one process")
    return Rule(text, True, f"those of one process in {len(expected[0].steps)} steps")


def render(rules: Sequence[Rule], name: str, strategy: str) -> RenderableType:
    """Lay the rules out for a terminal."""
    holds = all(rule.holds for rule in rules)
    verdict = f"The run differs by design: with {strategy}, ranks train independently between exchanges. "
    verdict += "All rules hold." if holds else "Not all rules hold."
    rows: list[list[str | Text]] = [
        [rule.text, Text("holds" if rule.holds else "does not hold", style="" if rule.holds else "bold"), rule.found]
        for rule in rules
    ]
    table = Table("Rules", ["", "outcome", "found"], rows).rich()
    return Group(Text(name, style="bold"), Text(), Text(verdict), Text(), table)


def to_json(rules: Sequence[Rule], name: str, strategy: str) -> str:
    """Return the same for other programs; docs/verify.md describes the names."""
    holds = all(rule.holds for rule in rules)
    record = {"version": 1, "task": name, "strategy": strategy, "by_design": True, "holds": holds}
    return common.to_json({**record, "rules": [asdict(rule) for rule in rules]})
