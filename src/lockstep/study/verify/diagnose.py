"""`verify`: train as one process and as ranks, compare the traces, and run the experiments that find the cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import cloudpickle

from lockstep.accelerator import check_count
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError, LaunchTimeout, ModelMismatch
from lockstep.study.common import load, log, run_ranks
from lockstep.study.verify import causes
from lockstep.study.verify.causes import FIXES, Cause, Diagnosis, Findings, Outcome, Runs, attempt, tolerance_of
from lockstep.study.verify.fingerprint import EXACT, Trace, TraceComparison, compare
from lockstep.study.verify.interventions import Division, Experiment, Given, Off, Subject
from lockstep.study.verify.reference_loop import perform, perform_and_keep
from lockstep.study.verify.verify_table import Verification
from lockstep.train.plan import check_batch, plural
from lockstep.train.settings import Settings
from lockstep.train.task import Task

# How long the processes may take for each part. Ranks that wait for each other are reported much earlier.
TIMEOUT_S = 3600.0

# Called with a function, its arguments and a number of devices; see `run_ranks`.
Processes = Callable[..., list[Any]]


def verify(
    task: Task | str, *, devices: int = 2, steps: int = 4, settings: Settings | None = None, quiet: bool = False
) -> Verification:
    """Train some steps of ``task`` as one process and as N ranks, and find out whether it is the same run.

    Starts processes and blocks until they are done. If the runs differ, it finds the cause by turning off one feature
    at a time.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        devices: Ranks.
        steps: Steps to train; the last one is the last of the epoch if its batch is not full.
        settings: How to train; ``steps``, ``epochs`` and ``workers`` have no meaning here.
        quiet: Whether to show no progress.

    Raises:
        ConfigurationError: The task or the devices cannot be used; names what to change.
        RankFailed: A rank failed.
        LaunchTimeout: The processes did not finish in time.
    """
    settings = settings or Settings()
    for name, value in (("devices", devices), ("steps", steps)):
        if value < 1:
            raise ConfigurationError(f"{name}={value} is not allowed.\nGive a whole number of at least 1.")
    check_count(devices)
    try:
        check_batch(load(task, prepares=True), settings, devices)
    except ConfigurationError as error:
        # A file that raises in this process, which is not a rank, may still run in a rank. The other errors: no such
        # file, no task in it, or a batch that cannot be divided.
        if error.__cause__ is None:
            raise
    # A form of the task from which every run can create a new copy.
    form = task if isinstance(task, str) else cloudpickle.dumps(task)
    subject = Subject(form, settings, devices, steps)
    processes = partial(run_ranks, timeout_s=TIMEOUT_S)
    return diagnose(subject, processes, (lambda _: None) if quiet else log)


def diagnose(subject: Subject, processes: Processes, report: Callable[[str], None]) -> Verification:
    """Compare one process with the ranks, and find what makes them differ.

    Args:
        subject: The task to examine.
        processes: Starts one process, or as many as there are ranks.
        report: Called with a text about progress.
    """
    # Replicas that differ are a finding here, not an error.
    subject = replace(subject, settings=replace(subject.settings, check_replicas=0))
    alone, on_ranks, remark = _train(subject, processes, report)
    subject = alone.subject
    result = Verification(subject, False, None, alone.again.same, why_single=alone.why_single, remark=remark)
    if isinstance(on_ranks, Diagnosis):
        return replace(result, findings=(on_ranks,))
    comparison = compare(alone.traces, on_ranks, EXACT if subject.settings.reproducible else tolerance_of(subject))
    if comparison.same and alone.again.same:
        return replace(result, same=True, comparison=comparison)
    if outside := _outside(alone):
        # Parameters that each rank trains separately make everything else differ.
        return replace(result, comparison=comparison, findings=(outside,), explained=False)
    report("not the same; experiments in one process")
    study: AloneStudy = processes(study_alone, alone, devices=1)[0]
    findings = study.repetition
    # If one process never gives the same run twice, a comparison with ranks proves nothing.
    if study.base is not None and not comparison.same:
        findings.rows += study.division.rows
        report(f"experiments on {plural(subject.num_devices, 'rank')}")
        light = replace(study, runs=dict.fromkeys(study.runs, ""))  # traces are large, and every rank gets a copy
        found = processes(run_on_ranks, light, devices=subject.num_devices)
        ranks = {name: _gather([one[name] for one in found]) for name in study.runs}
        causes.study_ranks(findings, study.base, study.runs, ranks, alone.traces)
        fixed = study.runs["reproducible"], ranks["reproducible"]
        findings.diagnoses += [_with_fix(one, *fixed, findings) for one in study.division.diagnoses]
        findings.explained &= study.division.explained
    # Of each cause the first.
    diagnoses = tuple({one.cause: one for one in reversed(findings.diagnoses)}.values())[::-1]
    explained = findings.explained and bool(diagnoses)
    return replace(result, comparison=comparison, findings=diagnoses, rows=tuple(findings.rows), explained=explained)


def _gather(outcomes: list[Outcome]) -> Outcome:
    """Return the traces of all ranks, or why one of them failed."""
    failed = [found for found in outcomes if isinstance(found, str)]
    return failed[0] if failed else [trace for found in outcomes for trace in found if isinstance(trace, Trace)]


def _train(
    subject: Subject, processes: Processes, report: Callable[[str], None], remark: str = ""
) -> tuple[Alone, list[Trace] | Diagnosis, str]:
    """Train in one process and on the ranks; without the epoch's last batch if the ranks cannot train on that.

    Returns:
        One process; the traces of the ranks, or why they cannot train together; a remark.
    """
    num = subject.num_devices
    report("one process, twice")
    alone: Alone = processes(run_alone, subject, devices=1)[0]
    subject, findings = alone.subject, Findings(alone.subject)
    report(plural(num, "rank"))
    try:
        found = processes(perform, subject, _plain(subject, "ranks"), Given(), devices=num)
        return alone, [trace for traces in found for trace in traces], remark
    except Exception as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, ModelMismatch):
            findings.add(Cause.MODEL, f"The ranks do not build the same model: {reason}")
        elif alone.traces[0].is_stream and isinstance(error, ConfigurationError):
            # If one process can train on the data and the ranks cannot, the ranks read different streams.
            findings.add(Cause.DATA, reason)
        elif outside := _outside(alone):
            findings.diagnoses.append(outside)
        if findings.diagnoses:
            return alone, findings.diagnoses[0], remark
        # The last batch of an epoch may leave a rank with one sample, or none, which batch norm does not accept.
        first = tuple(range(len(subject.steps)))
        if subject.steps == first or isinstance(error, LaunchTimeout):
            raise
    report("the ranks cannot train on the epoch's last batch; without it")
    remark = f"Without the epoch's last batch, on which the ranks fail ({reason}): consider Task.drop_last."
    return _train(replace(subject, steps=first), processes, report, remark)


def _outside(alone: Alone) -> Diagnosis | None:
    """Return the diagnosis of parameters that were trained, but that no module registers; None if there are none."""
    if not (shapes := alone.given.outside):
        return None
    evidence = (
        f"Training changes parameters that no module of the model registers, of shape {', '.join(shapes[:5])}: each "
        "rank trains its own."
    )
    return Diagnosis(Cause.OUTSIDE, evidence, FIXES[Cause.OUTSIDE])


# The causes that have to be fixed in the code; the fix of the others, or one of them, is --reproducible.
_BY_HAND = (Cause.WEIGHTING, Cause.SUM, Cause.TERM, Cause.STATE, Cause.PARAMETERS)


def _with_fix(diagnosis: Diagnosis, alone: Outcome, ranks: Outcome, findings: Findings) -> Diagnosis:
    """Return ``diagnosis`` with the result of its fix: of both runs in reproducible mode."""
    if diagnosis.cause in _BY_HAND:
        return diagnosis
    flag = f"--reproducible {findings.subject.num_devices}"
    found = findings.compare(f"{flag} instead", "one process, ranks", alone, ranks, EXACT)
    if found is None:
        return diagnosis
    if found.same:
        return replace(diagnosis, tried=f"Tried: with {flag}, one process and the ranks are the same run, to the bit.")
    fix = causes.OWN_GENERATOR if diagnosis.cause is Cause.RANDOM else diagnosis.fix
    return replace(diagnosis, fix=fix, tried=f"Tried: {flag} alone does not help.")


# The work of the processes: a single process, and all ranks; first to compare, then to find causes.


@dataclass(frozen=True)
class Alone:
    """The result of the single process.

    Attributes:
        subject: With the steps, and the precision in which the task can be trained.
        given: Its data, which other runs can be given.
        traces: Of the run.
        again: The comparison of that run with a second one, bit by bit.
        why_single: Why it is not trained in float64; empty if it is.
    """

    subject: Subject
    given: Given
    traces: list[Trace]
    again: TraceComparison
    why_single: str


def _plain(subject: Subject, division: Division) -> Experiment:
    """Return the experiment with nothing turned off."""
    return Experiment(division, reproducible=subject.settings.reproducible, watched=False)


def run_alone(subject: Subject, world: World) -> Alone:
    """Train in one process, twice, in float64 if that is possible."""
    experiment, why_single = _plain(subject, "one"), ""
    train = partial(perform_and_keep, experiment=experiment, world=world)
    found = attempt(lambda: train(subject, given=Given()))
    if isinstance(found, str):  # if float64 is not the reason, it fails again, and this is the error
        why_single, subject = found, replace(subject, double=False)
        found = train(subject, given=Given())
    traces, given = found
    subject = replace(subject, steps=tuple(given.samples))
    again = compare(traces, train(subject, given=given)[0], EXACT)
    return Alone(subject, given, traces, again, why_single)


@dataclass(frozen=True)
class AloneStudy:
    """The findings of a single process.

    Attributes:
        repetition: The causes why a second run differs.
        given: With the factors of the shares.
        base: The features turned off from here on; None if nothing makes two runs the same.
        division: The causes why the result depends on the division of the batch.
        runs: By features turned off, the runs that simulate the ranks; and ``reproducible``, on the whole batch.
    """

    repetition: Findings
    given: Given
    base: Off | None
    division: Findings
    runs: Runs = field(default_factory=dict)

    def experiment(self, name: Off | str, division: Division) -> Experiment:
        """Return the run in which the ranks should equal one process: with features turned off, or reproducible."""
        assert self.base is not None
        if isinstance(name, str):
            base, num = self.base.union(causes.GIVEN, ("initial",)), self.division.subject.num_devices
            return Experiment("ranks" if division == "ranks" else "one", base, reproducible=num, watched=False)
        if division == "ranks":
            return Experiment("ranks", self.base | name)
        # Data, rates and the rank number are always those of the single process.
        return Experiment("shares", self.base.union(causes.GIVEN, name & {"random", "state"}))


def study_alone(alone: Alone, world: World) -> AloneStudy:
    """Find the causes that a single process can find, and run the experiments that the ranks are compared with."""
    subject = alone.subject
    repetition, division = Findings(subject), Findings(subject)
    base = causes.study_repetition(repetition, alone.given, world, alone.again)
    if base is None:
        return AloneStudy(repetition, alone.given, None, division)
    # Such layers need the other ranks in forward, so one process cannot simulate them.
    if any("Sync" in kind for kind in alone.given.norms.values()):
        base |= {"batchnorm"}
    given = causes.study_division(division, alone.given, world, base)
    if subject.settings.reproducible:
        # Then one process divides the batch as the ranks do, so only these effects of a division matter.
        division.diagnoses = [one for one in division.diagnoses if one.cause in (Cause.RANDOM, Cause.BUFFERS)]
    study = AloneStudy(repetition, given, base, division)
    names: tuple[Off | str, ...] = (*causes.VARIANTS, "reproducible")
    runs = {name: attempt(perform, subject, study.experiment(name, "shares"), given, world) for name in names}
    return replace(study, runs=runs)


def run_on_ranks(study: AloneStudy, world: World) -> Runs:
    """Run the same experiments on the ranks. Collective: every rank of ``world``."""
    subject, given = study.division.subject, study.given
    return {name: attempt(perform, subject, study.experiment(name, "ranks"), given, world) for name in study.runs}
