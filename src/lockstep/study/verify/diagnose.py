"""Train as one process and as ranks, compare the traces, and run the experiments that find the cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from lockstep.comm.world import World, init
from lockstep.errors import ConfigurationError, LaunchTimeout, LockstepError, ModelMismatch, RankFailed
from lockstep.launcher.api import launch
from lockstep.study.common import log
from lockstep.study.verify import causes
from lockstep.study.verify import causes as ranks_study
from lockstep.study.verify.causes import (
    PAIR,
    Cause,
    Diagnosis,
    Divider,
    DivisionStudy,
    Repetition,
    Row,
    fix,
    outcome,
    own_generator,
    reproducible,
    study_division,
    study_repetition,
    tolerance_of,
)
from lockstep.study.verify.fingerprint import EXACT, Trace, TraceComparison, compare
from lockstep.study.verify.interventions import Experiment, Given, Off, Subject, is_batch_norm, is_synchronised, of_task
from lockstep.study.verify.reference_loop import perform, perform_and_keep, require_some
from lockstep.study.verify.sandbox import open_sandbox
from lockstep.train.plan import check_batch, check_gpus
from lockstep.train.settings import Settings
from lockstep.train.task import Task, build_model, load_task

# What the processes do: one by itself, and all ranks; first to compare, then to find causes.
#
# Each function runs in every process of a launched job (or of one that has a process group already).

REPETITIONS, ENOUGH_S = 3, 1.0
"""How often one process repeats its run at most, and the seconds after which it begins no other."""

Outcome = list[Trace] | str
"""What a run gave, or why it failed."""


@dataclass(frozen=True)
class Alone:
    """One process by itself.

    Attributes:
        subject: With the steps, and the precision in which the task can be trained.
        given: What others may be given of it.
        traces: Of the run.
        again: That run against a second one, bit by bit.
        norms: Names of the batch norm layers.
        is_synchronised: Whether some of them talk to other ranks.
        seconds: Of one run.
        why_single: Why it is not trained in float64; empty if it is.
    """

    subject: Subject
    given: Given
    traces: list[Trace]
    again: TraceComparison
    norms: tuple[str, ...]
    is_synchronised: bool
    seconds: float
    why_single: str


def plain(subject: Subject, division: str) -> Experiment:
    """Return the experiment in which nothing is turned off."""
    return Experiment(division, reproducible=subject.settings.reproducible, watched=False)  # type: ignore[arg-type]


def run_alone(subject: Subject, world: World) -> Alone:
    """Train in one process, twice, in float64 if that is possible."""
    experiment, why_single = plain(subject, "one"), ""
    start = time.monotonic()
    try:
        traces, given, steps = perform_and_keep(subject, experiment, Given(), world)
    except Exception as error:
        why_single = _reason(error)
    if why_single:  # if it is not float64 that it cannot stand, it fails again, and says why
        subject, start = replace(subject, double=False), time.monotonic()
        traces, given, steps = perform_and_keep(subject, experiment, Given(), world)
    seconds = time.monotonic() - start
    subject = replace(subject, steps=steps)
    again = _again(subject, experiment, given, world, traces)
    with open_sandbox(subject, experiment, given) as bench:
        model = build_model(bench.place(0).task)
    norms = tuple(name for name, layer in model.named_modules() if is_batch_norm(layer))
    synchronised = any(is_synchronised(layer) for layer in model.modules())
    return Alone(subject, given, traces, again, norms, synchronised, seconds, why_single)


def _again(
    subject: Subject, experiment: Experiment, given: Given, world: World, traces: list[Trace]
) -> TraceComparison:
    """Compare a run with others like it: more than one where that takes no time, since chance may agree with itself."""
    deadline = time.monotonic() + ENOUGH_S
    for _ in range(REPETITIONS):
        found = compare(traces, perform(subject, experiment, given, world), EXACT)
        if not found.same or time.monotonic() > deadline:
            break
    return found


def run_rank(subject: Subject, world: World) -> list[Trace]:
    """Train on all ranks. Collective: every rank."""
    return perform(subject, plain(subject, "ranks"), Given(), world)


@dataclass(frozen=True)
class AloneStudy:
    """What one process finds out by itself.

    Attributes:
        base: What is turned off from here on.
        shares: The runs that stand for the ranks, by what was turned off.
        fixes: The runs that fixes are compared with, by name.
        given: With the factors of the shares.
    """

    repetition: Repetition
    division: DivisionStudy | None
    base: Off
    shares: dict[Off, Outcome]
    fixes: dict[str, Outcome]
    given: Given


def study_alone(alone: Alone, world: World) -> AloneStudy:
    """Find what one process can find by itself, and make the runs that the ranks are compared with."""
    subject, given = alone.subject, alone.given
    repetition = study_repetition(subject, given, world, alone.again)
    base: Off = repetition.base | ({"batchnorm"} if alone.is_synchronised else frozenset())
    if not repetition.restored:
        return AloneStudy(repetition, None, base, {}, {}, given)
    try:
        division = study_division(Divider(subject, given, world, base), alone.norms)
    except Exception as error:  # that the runs differ is known; why, only if the task can stand being divided
        row = Row("nothing", PAIR, f"failed: {_reason(error)}", False)
        division = DivisionStudy((), (row,), False, given, frozenset())
    given = division.given
    shares: dict[Off, Outcome] = {}
    for off in causes.variants(base):
        experiment = causes.shares_experiment(subject, off)
        known = next((o for o in shares if causes.shares_experiment(subject, o) == experiment), None)
        shares[off] = shares[known] if known is not None else _attempt(subject, experiment, given, world)
    fixes = {
        name: _attempt(subject, experiment, given, world)
        for name, (subject, experiment) in fix_experiments(subject, division, base, "one").items()
    }
    return AloneStudy(repetition, division, base, shares, fixes, given)


def fix_experiments(
    subject: Subject, division: DivisionStudy | None, base: Off, where: str
) -> dict[str, tuple[Subject, Experiment]]:
    """Return the runs that try a fix, by name: on one process or on the ranks, which should be the same then."""
    found: dict[str, tuple[Subject, Experiment]] = {}
    if division is None:
        return found
    off: Off = base | {"rates", "initial"}
    off |= frozenset() if subject.torch_ddp else {"data"}
    if "batchnorm" in division.causes:
        others = division.causes - ({"batchnorm", "weights"} if where == "one" else {"batchnorm"})
        experiment = Experiment(where, off | others, convert=where == "ranks")  # type: ignore[arg-type]
        found["convert"] = subject, experiment
    if division.findings:
        experiment = Experiment(where, off, reproducible=subject.num_devices, watched=False)  # type: ignore[arg-type]
        found["reproducible"] = replace(subject, torch_ddp=False), experiment
    return found


def study_rank(study: AloneStudy, subject: Subject, world: World) -> tuple[dict[Off, Outcome], dict[str, Outcome]]:
    """Make the runs on the ranks: what is turned off in turn, and the fixes. Collective: every rank."""
    runs = {off: _attempt(subject, Experiment("ranks", off), study.given, world) for off in causes.variants(study.base)}
    tries = fix_experiments(subject, study.division, study.base, "ranks")
    return runs, {name: _attempt(one, experiment, study.given, world) for name, (one, experiment) in tries.items()}


def _attempt(subject: Subject, experiment: Experiment, given: Given, world: World) -> Outcome:
    """Run an experiment; a task that cannot stand what is turned off says no more than that."""
    try:
        return perform(subject, experiment, given, world)
    except (torch.OutOfMemoryError, LockstepError, RuntimeError, ValueError, TypeError, LookupError) as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def gathered(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the traces of all ranks, or why one of them failed."""
    failed = [found for found in outcomes if isinstance(found, str)]
    return failed[0] if failed else [trace for found in outcomes if not isinstance(found, str) for trace in found]


# `verify` from beginning to end, whoever starts the processes.

RANKS_PAIR = "one process, ranks"


class Processes(Protocol):
    """Runs a function in each of some processes."""

    def __call__(self, num: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return ``function(*args, world)`` of each of ``num`` processes, by rank."""


@dataclass(frozen=True)
class Verification:
    """What came of it.

    Attributes:
        subject: What was examined.
        same: Whether it is the same run.
        comparison: One process against the ranks; None where the ranks could not start.
        repeatable: Whether one process is the same run twice, to the bit.
        findings: The causes, if it is not the same run.
        rows: The experiments that led to them.
        explained: Whether nothing is left with what was found turned off.
        why_single: Why fp32 and not float64; empty for float64.
        remark: What else there is to say; may be empty.
    """

    subject: Subject
    same: bool
    comparison: TraceComparison | None
    repeatable: bool
    findings: tuple[Diagnosis, ...]
    rows: tuple[Row, ...]
    explained: bool
    why_single: str
    remark: str = ""


def diagnose(subject: Subject, processes: Processes, say: Callable[[str], None]) -> Verification:
    """Compare one process with the ranks, and find what makes them differ.

    Args:
        subject: What is examined.
        processes: Starts one process, or as many as there are ranks.
        say: Told what is being done.
    """
    try:
        alone, traces, remark = _train(subject, processes, say)
    except _CannotTrain as stop:
        found_at_once = (stop.finding,)
        return Verification(stop.alone.subject, False, None, stop.alone.again.same, found_at_once, (), True, "")
    subject, num = alone.subject, subject.num_devices
    tolerance = EXACT if subject.settings.reproducible and not subject.torch_ddp else tolerance_of(subject)
    comparison = compare(alone.traces, traces, tolerance, strided=subject.torch_ddp)
    if comparison.same and alone.again.same:
        return Verification(subject, True, comparison, True, (), (), True, alone.why_single, remark)
    say("not the same; what one process can find out")
    study: AloneStudy = processes(1, study_alone, alone)[0]
    rows = [*study.repetition.rows]
    findings = list(study.repetition.findings)
    explained = study.repetition.restored
    if study.division is not None and not comparison.same:
        say(f"what {num} ranks can find out")
        found = processes(num, study_rank, replace(study, shares={}, fixes={}), subject)  # traces are large
        runs = {off: gathered([one[0][off] for one in found]) for off in found[0][0]}
        fixed = {name: gathered([one[1][name] for one in found]) for name in found[0][1]}
        on_ranks = ranks_study.study_ranks(subject, study.base, study.shares, runs, alone.traces, tolerance_of(subject))
        by_division = _of_interest(study.division.findings, subject)
        findings += on_ranks.findings
        rows += [*study.division.rows, *on_ranks.rows]
        findings += [_with_fix(one, study, fixed, subject, rows) for one in by_division]
        explained = explained and study.division.explained and on_ranks.explained
    return Verification(
        subject,
        False,
        comparison,
        alone.again.same,
        _unique(findings),
        tuple(rows),
        explained and bool(findings),
        alone.why_single,
        remark,
    )


class _CannotTrain(Exception):
    """The ranks could not train together, and why is known at once."""

    def __init__(self, alone: Alone, finding: Diagnosis) -> None:
        super().__init__(finding.evidence)
        self.alone, self.finding = alone, finding


def _train(
    subject: Subject, processes: Processes, say: Callable[[str], None], remark: str = ""
) -> tuple[Alone, list[Trace], str]:
    """Train in one process and on the ranks; without the epoch's last batch if the ranks cannot train on that."""
    num = subject.num_devices
    say("one process, twice")
    alone: Alone = processes(1, run_alone, subject)[0]
    subject = alone.subject
    say(f"{num} rank{'s' * (num > 1)}")
    try:
        return alone, [trace for found in processes(num, run_rank, subject) for trace in found], remark
    except ModelMismatch as error:
        evidence = f"The ranks do not build the same model: {str(error).splitlines()[0]}"
        raise _CannotTrain(alone, Diagnosis(Cause.MODEL, evidence, fix(Cause.MODEL, subject))) from error
    except Exception as error:
        if alone.traces[0].is_stream and isinstance(error, ConfigurationError):
            # What one process can train on and the ranks cannot is a stream that they do not read alike.
            evidence = str(error).splitlines()[0]
            raise _CannotTrain(alone, Diagnosis(Cause.DATA, evidence, fix(Cause.DATA, subject))) from error
        first = tuple(range(len(subject.steps)))
        if subject.steps == first or isinstance(error, LaunchTimeout):
            raise
        reason = str(error).splitlines()[0]
    say("the ranks cannot train on the epoch's last batch; without it")
    remark = f"Without the epoch's last batch, on which the ranks fail ({reason}): consider Task.drop_last."
    return _train(replace(subject, steps=first), processes, say, remark)


def _of_interest(findings: Sequence[Diagnosis], subject: Subject) -> list[Diagnosis]:
    """Return what matters: in reproducible mode one process divides the batch as the ranks do."""
    if subject.settings.reproducible is None or subject.torch_ddp:
        return list(findings)
    return [finding for finding in findings if finding.cause in (Cause.RANDOM, Cause.BUFFERS)]


def _unique(findings: Sequence[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the first finding of each cause."""
    return tuple({finding.cause: finding for finding in reversed(findings)}.values())[::-1]


def _with_fix(
    finding: Diagnosis, study: AloneStudy, fixed: dict[str, Outcome], subject: Subject, rows: list[Row]
) -> Diagnosis:
    """Return ``finding`` with what came of its fix, where that was tried."""
    name = "convert" if finding.cause is Cause.BATCHNORM else "reproducible"
    if finding.cause in (Cause.WEIGHTING, Cause.SUM) or name not in fixed:
        return finding
    words = {
        "convert": "lockstep.SyncBatchNorm instead",
        "reproducible": f"{reproducible(subject)} instead",
    }[name]
    one, ranks = study.fixes[name], fixed[name]
    if isinstance(one, str) or isinstance(ranks, str):
        reason = one if isinstance(one, str) else ranks
        rows.append(Row(words, RANKS_PAIR, f"failed: {reason}", False))
        return finding
    tolerance = EXACT if name == "reproducible" else tolerance_of(subject)
    found = compare(one, ranks, tolerance)
    rows.append(Row(words, RANKS_PAIR, outcome(found), found.same))
    if found.same:
        bits = ", to the bit" if name == "reproducible" else ""
        return replace(finding, tried=f"Tried: with it, one process and the ranks are the same run{bits}.")
    if finding.cause is Cause.RANDOM:
        return replace(
            finding, fix=own_generator(subject), tried=f"Tried: {reproducible(subject)} alone does not help."
        )
    return replace(finding, tried=f"Tried: by itself it does not help, the runs {outcome(found)}.")


# `verify`: check what is asked for, start the processes, and have them find out.

ALONE_TIMEOUT_S = 3600.0
"""How long one process may take to train its steps twice."""

RANKS_TIMEOUT_S, RUNS = 120.0, 50
"""How long the ranks may take: this, and so many times what one run took one process, for each rank."""


def verify(
    task: Task | str,
    *,
    devices: int = 2,
    steps: int = 4,
    torch_ddp: bool = False,
    settings: Settings | None = None,
    quiet: bool = False,
) -> Verification:
    """Train some steps of ``task`` as one process and as N ranks, and say whether it is the same run.

    Starts processes of its own and blocks until they are done. If the runs differ, finds out why by turning one thing
    off at a time.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        devices: Ranks.
        steps: Steps to train; the last one is the last of the epoch if its batch is not full.
        torch_ddp: Whether to examine torch's DistributedDataParallel, as a hand-written loop uses it.
        settings: How to train; ``steps``, ``epochs`` and ``workers`` have no meaning here.
        quiet: Whether to show no progress.

    Raises:
        ConfigurationError: The task or the devices cannot be used; says what to change.
        RankFailed: A rank failed.
        LaunchTimeout: The processes did not finish in time.
    """
    settings = settings or Settings()
    subject = Subject(of_task(task), settings, devices, torch_ddp, steps)
    require_some(subject)
    check_gpus(devices)
    found = _load(task)
    if found is not None:
        check_batch(found, settings, devices)
    return diagnose(subject, _Launched(), (lambda _: None) if quiet else log)


def _load(task: Task | str) -> Task | None:
    """Return the task itself; None if its file fails here, where it is no rank, as it may well run in one."""
    if isinstance(task, Task):
        return task
    try:
        return load_task(task)
    except ConfigurationError as error:
        if error.__cause__ is None:  # there is no such file, or no task in it
            raise
        return None


class _Launched:
    """Starts processes with `launch`; once one process has trained, it is known how long ranks may take."""

    def __init__(self) -> None:
        self._timeout_s = ALONE_TIMEOUT_S

    def __call__(self, num: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return ``function(*args, world)`` of each process."""
        try:
            results = launch(_in_world, function, args, devices=num, timeout_s=self._timeout_s)
        except RankFailed as error:
            if isinstance(error.__cause__, LockstepError):
                raise error.__cause__ from None
            raise
        if isinstance(results[0], Alone):
            self._timeout_s = RANKS_TIMEOUT_S + RUNS * results[0].seconds * max(2, results[0].subject.num_devices)
        return results


def _in_world(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with init() as world:
        return function(*args, world)
