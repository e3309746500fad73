"""`verify` of ``local-sgd`` and ``diloco``: another run by design, of which some things must hold all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import cloudpickle
import torch
from rich.console import Group, RenderableType
from rich.text import Text

from lockstep.accelerator import check_count
from lockstep.comm.world import World
from lockstep.errors import ReplicasDiffer
from lockstep.study import common
from lockstep.study.common import Table, load, run_ranks
from lockstep.study.verify.fingerprint import Fingerprint, distance, fingerprint
from lockstep.study.verify.interventions import Experiment, Given, Subject
from lockstep.study.verify.sandbox import open_sandbox
from lockstep.train.plan import check_batch
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.strategies.reproducible import refuse_reproducible
from lockstep.train.strategies.strategy import check_engine
from lockstep.train.task import Task
from lockstep.train.trainer import Trainer

_TIMEOUT_S = 3600.0
# How far parameters may be apart, relative to their norm, that differ in rounding only.
_DOUBLE, _SINGLE = 1e-12, 1e-5


@dataclass(frozen=True)
class Run:
    """A run as one rank saw it.

    Attributes:
        samples: A digest of each sample that it loaded, by step.
        parameters: After each step.
        is_stream: Whether every rank reads all samples.
        problem: Why it ended early, if it did.
    """

    samples: tuple[tuple[bytes, ...], ...]
    parameters: tuple[tuple[Fingerprint, ...], ...]
    is_stream: bool
    problem: str | None = None


@dataclass(frozen=True)
class Rule:
    """What must hold, whether it does, and what was found."""

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
    """Train some steps of ``task`` on ranks that exchange parameters now and then, and check what must hold.

    Starts processes of its own and blocks until they are done. If there would be less than two exchanges in these
    steps, ranks exchange more often.

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
    if settings.reproducible is not None:
        refuse_reproducible(strategy)
    check_batch(load(task), settings, devices)
    start = processes or partial(run_ranks, timeout_s=_TIMEOUT_S)
    every = min(settings.sync_every or 50, max(1, steps // 2))
    settings = replace(settings, steps=steps, epochs=None, check_replicas=1)
    often = replace(settings, sync_every=every, sync_delay=min(settings.sync_delay or 0, every - 1))
    none: dict[str, Any] = dict.fromkeys(("sync_every", "fragments", "sync_delay", "outer_lr", "outer_momentum"))
    plain = replace(settings, **none)
    subject = Subject(task if isinstance(task, str) else cloudpickle.dumps(task), plain, devices, steps)
    try:
        alone: Run = start(train, subject, "single", False, devices=1)[0]
    except Exception:  # such as a task that is made of float32
        subject = replace(subject, double=False)
        alone = start(train, subject, "single", False, devices=1)[0]
    runs: list[Run] = start(train, replace(subject, settings=often), strategy, False, devices=devices)
    ddp: Run = start(train, subject, "ddp", True, devices=devices)[0]
    in_each_step = replace(subject, settings=replace(plain, sync_every=1))
    equal: list[Run] = start(train, in_each_step, "local-sgd", True, devices=devices)
    return [_compare_engines(ddp, equal, subject.double), _compare_ranks(runs, every), _compare_samples(alone, runs)]


def train(subject: Subject, strategy: StrategyName, is_plain: bool, world: World) -> Run:
    """Train the steps; ``is_plain``: by SGD instead of the task's optimizer. Collective: every rank of ``world``."""
    with open_sandbox(subject, Experiment("ranks", watched=False), Given()) as sandbox:
        sandboxed = sandbox.load_task(world.rank)
        task = sandboxed.task
        if is_plain:
            task = replace(task, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        trainer = Trainer(task, subject.settings, world, strategy=strategy, devices=[world.device])
        trained = [each for group in trainer.optimizer.param_groups for each in group["params"]]
        samples, parameters, problem = [], [], None
        try:
            for step in range(subject.num_steps):
                with sandbox.step(step):
                    trainer.step()
                loaded = sandboxed.recorder.end_step(ahead=world.device.type != "cpu")
                samples.append(tuple(digest for _, _, digest in loaded))
                parameters.append(tuple(map(fingerprint, trained)))
        except ReplicasDiffer as error:  # on every rank
            problem = str(error).partition("\n")[0]
        trainer.close()
        return Run(tuple(samples), tuple(parameters), sandboxed.is_stream, problem)


def _compare_engines(ddp: Run, found: Sequence[Run], is_double: bool) -> Rule:
    pairs = [
        (mine, theirs)
        for run in found
        for ours, others in zip(run.parameters, ddp.parameters, strict=True)
        for mine, theirs in zip(ours, others, strict=True)
    ]
    worst = max((distance(mine, theirs) / max(theirs.norm, 1e-300) for mine, theirs in pairs), default=0.0)
    limit = _DOUBLE if is_double else _SINGLE
    text = "With an exchange in every step, SGD and an outer rate of 1 it is the run of ddp."
    kind = "float64" if is_double else "float32"
    return Rule(text, worst <= limit, f"parameters differ by {worst:.1e} of their norm in {kind}; allowed: {limit:.0e}")


def _compare_ranks(runs: Sequence[Run], every: int) -> Rule:
    text = "After each exchange all ranks hold the same bits."
    if problem := next((run.problem for run in runs if run.problem), None):
        return Rule(text, False, problem)
    ends = [[each.digest for each in run.parameters[-1]] for run in runs]
    others = [rank for rank, end in enumerate(ends) if end != ends[0]]
    found = (
        f"not on rank {others[0]} and rank 0 at the end" if others else f"checked with an exchange every {every} steps"
    )
    return Rule(text, not others, found)


def _compare_samples(alone: Run, runs: Sequence[Run]) -> Rule:
    text = "Each sample of a global batch is trained on once, on one rank."
    for step, expected in enumerate(alone.samples):
        parts = [run.samples[step] for run in runs if step < len(run.samples)]
        ours = parts[0] if alone.is_stream and parts else tuple(digest for part in parts for digest in part)
        if ours != expected:
            return Rule(text, False, f"step {step}: {len(ours)} samples, not the {len(expected)} of one process")
    return Rule(text, True, f"those of one process in {len(alone.samples)} steps")


def render(rules: Sequence[Rule], name: str, strategy: str) -> RenderableType:
    """Lay the rules out for a terminal."""
    holds = all(rule.holds for rule in rules)
    verdict = f"Another run by design: with {strategy} ranks train by themselves between exchanges. "
    verdict += "What must hold all the same does." if holds else "But not all holds that must."
    rows: list[list[str | Text]] = [
        [rule.text, Text("holds" if rule.holds else "does not hold", style="" if rule.holds else "bold"), rule.found]
        for rule in rules
    ]
    table = Table("What must hold", ["", "outcome", "found"], rows).rich()
    return Group(Text(name, style="bold"), Text(), Text(verdict), Text(), table)


def to_json(rules: Sequence[Rule], name: str, strategy: str) -> str:
    """Return the same for other programs; docs/verify.md describes the names."""
    holds = all(rule.holds for rule in rules)
    record = {"version": 1, "task": name, "strategy": strategy, "by_design": True, "holds": holds}
    return common.to_json({**record, "rules": [asdict(rule) for rule in rules]})
