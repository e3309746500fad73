"""What the processes do: one by itself, and all ranks; first to compare, then to find causes.

Each function runs in every process of a launched job (or of one that has a process group already).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lockstep.comm.world import World
from lockstep.errors import LockstepError
from lockstep.study.verify import ranks
from lockstep.study.verify.bench import open_bench
from lockstep.study.verify.determinism import Repetition, study_repetition
from lockstep.study.verify.differences import EXACT, Comparison, compare
from lockstep.study.verify.division import PAIR, Divider, DivisionStudy, study_division
from lockstep.study.verify.experiment import Experiment, Given, Off, Subject
from lockstep.study.verify.findings import Row
from lockstep.study.verify.freezing import is_batch_norm, is_synchronised
from lockstep.study.verify.perform import perform, perform_and_keep
from lockstep.study.verify.trace import Trace
from lockstep.train.task import build_model

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
    again: Comparison
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
    with open_bench(subject, experiment, given) as bench:
        model = build_model(bench.place(0).task)
    norms = tuple(name for name, layer in model.named_modules() if is_batch_norm(layer))
    synchronised = any(is_synchronised(layer) for layer in model.modules())
    return Alone(subject, given, traces, again, norms, synchronised, seconds, why_single)


def _again(subject: Subject, experiment: Experiment, given: Given, world: World, traces: list[Trace]) -> Comparison:
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
    for off in ranks.variants(base):
        experiment = ranks.shares_experiment(subject, off)
        known = next((o for o in shares if ranks.shares_experiment(subject, o) == experiment), None)
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
    runs = {off: _attempt(subject, Experiment("ranks", off), study.given, world) for off in ranks.variants(study.base)}
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
