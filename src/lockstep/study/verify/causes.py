"""Why two runs differ: experiments on determinism, on how a batch is divided, on what ranks hold; what they prove."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from lockstep.comm.world import World
from lockstep.study.verify.fingerprint import DOUBLE, EXACT, SINGLE, Kind, Tolerance, Trace, TraceComparison, compare
from lockstep.study.verify.interventions import Experiment, Given, Off, Subject, Switch
from lockstep.study.verify.reference_loop import StepWeights, measure_weights, perform


class Cause(Enum):
    """Why a run on N ranks is another one than in one process."""

    DATA = "data order"
    WEIGHTING = "sample weighting"
    RANDOM = "random state"
    BATCHNORM = "BatchNorm statistics"
    RATES = "learning-rate rule"
    BUFFERS = "buffers changed on one rank"
    OPERATOR = "non-deterministic operator"
    SUM = "a loss that sums instead of averages"
    COUPLED = "samples that depend on each other"
    RANK = "a forward pass that depends on the rank"
    MODEL = "a model that depends on the rank"


FIXES = {
    Cause.DATA: (
        "Make the data set the same on every rank, and in the same order: fit divides it among the ranks. Take rank, "
        "world size, set order and private generators out of it."
    ),
    Cause.WEIGHTING: "Return lockstep.Loss(total, count) from the loss: the sum of its parts and their number.",
    Cause.RANDOM: "Train with --reproducible {num}: each part of the batch then has random numbers of its own.",
    Cause.BATCHNORM: (
        "Use lockstep.SyncBatchNorm.convert_sync_batchnorm(model) in Task.model, or train with --reproducible {num}, "
        "or use a norm that keeps to each sample, such as GroupNorm."
    ),
    Cause.RATES: (
        "Let the learning rate depend on the global batch only (--lr-scaling linear follows it): take rank and world "
        "size out of Task.optimizer and Task.schedule."
    ),
    Cause.BUFFERS: "Change buffers and parameters in the same way on every rank: from what all ranks know.",
    Cause.OPERATOR: (
        "Take everything from the seed: no clock, no system randomness, no order of threads. Where an operator is at "
        "fault, torch.use_deterministic_algorithms(True) replaces it or names it."
    ),
    Cause.SUM: "Return the mean over the batch, or lockstep.Loss(total, count) with the number that the sum is over.",
    Cause.COUPLED: (
        "Train with --reproducible {num}: then each part is computed alike on any number of ranks, though not as in "
        "one undivided batch. Or gather what the samples need of each other from all ranks inside the loss."
    ),
    Cause.RANK: "Take rank and world size out of collate, loss and model: the engine averages over the ranks already.",
    Cause.MODEL: "Build the same model on every rank: do not seed in Task.model, and leave rank and world size out.",
}
OWN_PART = (
    "Train with --reproducible {num}, which combines what all parts of the batch write, or all-reduce it yourself."
)
OWN_GENERATOR = (
    "Draw from the default generators of torch, Python and numpy, and do not seed them in the task: --reproducible "
    "{num} sets these for each part of the batch, but no others."
)


@dataclass(frozen=True)
class Diagnosis:
    """One cause that was found.

    Attributes:
        evidence: What was measured, in a sentence or two.
        fix: What to do, in a sentence.
        tried: What came of the fix, where it could be tried; empty otherwise.
    """

    cause: Cause
    evidence: str
    fix: str
    tried: str = ""


@dataclass(frozen=True)
class Row:
    """One experiment, for the table.

    Attributes:
        turned_off: What was turned off or done instead.
        compared: Which two runs.
        outcome: In a few words.
        same: Whether the two were the same run.
    """

    turned_off: str
    compared: str
    outcome: str
    same: bool


# Always turned off in the process that stands for the ranks: it has no samples and learning rates of its own.
GIVEN: Off = frozenset({"data", "rates"})

T = TypeVar("T")
# What a run gave, or why it failed.
Outcome = list[Trace] | str


def attempt(run: Callable[..., T], *args: Any) -> T | str:
    """Run an experiment; a task that cannot stand what is turned off gives the reason."""
    try:
        return run(*args)
    except Exception as error:  # whatever the task's code makes of it: that the runs differ is known already
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def tolerance_of(subject: Subject) -> Tolerance:
    """Return how far apart numbers may be."""
    return DOUBLE if subject.double else SINGLE


@dataclass
class Findings:
    """What the experiments have found so far.

    Attributes:
        explained: Whether the runs are the same with all that was found turned off.
    """

    subject: Subject
    diagnoses: list[Diagnosis] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    explained: bool = True

    def add(self, cause: Cause, evidence: str, advice: str = "") -> None:
        """Add a cause that was found, with other advice than the usual where it is given."""
        text = (advice or FIXES[cause]).format(num=self.subject.num_devices)
        self.diagnoses.append(Diagnosis(cause, evidence, text))

    def compare(
        self, trial: str, pair: str, expected: Outcome, found: Outcome, tolerance: Tolerance, skip: Sequence[Kind] = ()
    ) -> TraceComparison | None:
        """Compare two runs and record what came of it, under what was turned off; None if either failed."""
        if isinstance(expected, str) or isinstance(found, str):
            reason = found if isinstance(found, str) else expected
            self.rows.append(Row(trial, pair, f"failed: {reason}", False))
            return None
        comparison = compare(expected, found, tolerance, skip=skip)
        self.rows.append(Row(trial, pair, str(comparison), comparison.same))
        return comparison


# Is one process by itself the same run twice? If not: what makes it one?

TWICE = "one process, twice"


def study_repetition(findings: Findings, given: Given, world: World, plain: TraceComparison) -> Off | None:
    """Find what must be turned off so that one process is the same run twice; None if it is another one all the same.

    Args:
        findings: Gets what is found.
        given: What one process had.
        world: Of this process alone.
        plain: Two runs with nothing turned off.
    """
    base: Off = frozenset()
    if plain.first is None:
        return base
    findings.rows.append(Row("nothing", TWICE, str(plain), plain.same))
    if plain.of_kind("sample", "size"):
        base |= {"data"}
        evidence = f"One process loads other samples the second time ({plain.first}): they do not follow the seed."
        findings.add(Cause.DATA, evidence)
    if plain.of_kind("initial parameter", "initial buffer"):
        base |= {"initial"}
        evidence = "One process starts from other weights the second time: they do not follow the seed."
        findings.add(Cause.RANDOM, evidence, FIXES[Cause.MODEL])
    again = plain
    if base:
        one, two = (attempt(perform, findings.subject, Experiment("one", base), given, world) for _ in range(2))
        turned_off = " and ".join(found.cause.value for found in findings.diagnoses)
        again = findings.compare(turned_off, TWICE, one, two, EXACT) or plain
    if again.first is None:
        return base
    evidence = f"The same process, run twice from the same seed, gives another {again.first}."
    findings.add(Cause.OPERATOR, evidence)
    # Where it is rounding alone, it hides nothing of what the ranks do differently.
    if max(again.worst.values()) <= tolerance_of(findings.subject).relative:
        return base
    findings.explained = False
    return None


# Does it matter that the batch is divided? One process against the same process, share after share.

PAIR = "whole batch, in shares"
_OF_DIVISION: dict[Switch, str] = {
    "random": "random state",
    "batchnorm": "BatchNorm statistics",
    "state": "changes of buffers in forward",
    "weights": "sample weighting",
}


def study_division(findings: Findings, given: Given, world: World, base: Off) -> tuple[Given, Off]:
    """Find what makes the result depend on how the batch is divided.

    Args:
        findings: Gets what is found.
        given: What one process had.
        world: Of this process alone.
        base: What is turned off in all runs.

    Returns:
        ``given`` with the factors that the shares' losses need, and the switches that turn off what was found.
    """
    subject, norms = findings.subject, list(given.norms)
    draws: list[str] = []

    def divide(off: Off, turned_off: str) -> TraceComparison | None:
        # The whole batch has no weights; shares have no data and rates but the given ones.
        one = attempt(perform, subject, Experiment("one", (base | off) - {"weights"}), given, world)
        shares = attempt(perform, subject, Experiment("shares", (base | off).union(GIVEN)), given, world)
        draws.extend(() if isinstance(one, str) else one[0].draws)
        return findings.compare(turned_off, PAIR, one, shares, tolerance_of(subject), skip=["sample"])

    plain = divide(frozenset(), "nothing")
    if plain is not None and plain.same:
        return given, frozenset()
    weights = attempt(measure_weights, subject, given, base, world.device)
    if plain is None or isinstance(weights, str):
        findings.explained = False
        return given, frozenset()
    # All causes may act at once. So everything is off, and one thing at a time is left on.
    given = replace(given, factors={step.step: step.factors for step in weights})
    everything: Off = frozenset(_OF_DIVISION)
    nothing = divide(everything, "all of the below")
    is_same = nothing is not None and nothing.same
    causes: set[Switch] = set()
    for switch, name in _OF_DIVISION.items():
        found = divide(everything - {switch}, f"all but {name}")
        # Where something else keeps the two apart, only a change for the worse would mean anything, and it might not.
        if is_same and found is not None and not found.same:
            causes.add(switch)
    wrong = [step for step in weights if step.kind != "right"] or weights
    if "random" in causes:
        drawn = ", ".join(dict.fromkeys(draws)) or "random numbers"
        evidence = f"Forward draws random numbers ({drawn}), and each part of the batch gets others than the whole."
        findings.add(Cause.RANDOM, evidence)
    if "batchnorm" in causes:
        where = f" ({', '.join(norms[:3])}{' ...' if len(norms) > 3 else ''})" if norms else ""
        evidence = f"Each rank normalises with mean and variance of its own part of the batch{where}."
        findings.add(Cause.BATCHNORM, evidence)
    if "state" in causes:
        buffer = plain.of_kind("buffer")
        what = "a buffer or parameter" if buffer is None else f"the buffer {buffer.name}"
        evidence = f"Forward changes {what} by the part of the batch that a rank has, so each has another."
        findings.add(Cause.BUFFERS, evidence, OWN_PART)
    if "weights" in causes:
        _add_weighting(findings, wrong[0])
    coupled = next((step for step in weights if step.kind == "none"), None)
    if not is_same and coupled is not None:
        _add_weighting(findings, coupled)
    findings.explained &= bool(causes) or coupled is not None
    return given, frozenset(causes)


def _add_weighting(findings: Findings, step: StepWeights) -> None:
    at = f"At step {step.step}"
    if step.kind == "none":
        evidence = (
            f"{at}, with random state and batch norm turned off, the gradient of the whole batch does not add up from "
            "those of its parts: a sample's loss depends on which others are with it."
        )
        findings.add(Cause.COUPLED, evidence)
    elif step.kind == "sum":
        evidence = (
            f"{at} the loss of the whole batch is the sum of the losses of its {len(step.sizes)} parts, not their "
            "mean: it grows with the number of samples."
        )
        findings.add(Cause.SUM, evidence)
    else:
        sizes = " + ".join(map(str, step.sizes))
        counted, wanted = (" : ".join(f"{w:.3g}" for w in ws) for ws in (step.counted, step.wanted))
        evidence = f"{at} the parts of the batch ({sizes} samples) count {counted}; the whole needs {wanted}."
        findings.add(Cause.WEIGHTING, evidence)


# Does it matter which rank computes a share? The ranks against one process that stands for them.

RANKS_PAIR = "shares in one process, ranks"
EVERYTHING: Off = frozenset({"random", "state", "data", "initial", "rates"})
HIDDEN: Off = EVERYTHING | {"place"}

# By what was turned off, or by the name of the fix that is tried: the traces of all ranks (or shares).
Runs = Mapping[Off | str, Outcome]


def variants(base: Off) -> list[Off]:
    """Return what is turned off in each run, on the ranks and in the process that stands for them."""
    all_but = [EVERYTHING - {switch} for switch in ("random", "state", "rates")]
    return [base | off for off in (frozenset[Switch](), EVERYTHING, *all_but, HIDDEN)]


def study_ranks(findings: Findings, base: Off, shares: Runs, ranks: Runs, reference: Sequence[Trace]) -> None:
    """Find what makes the ranks do something else than one process that stands for them.

    Args:
        findings: Gets what is found.
        base: What is turned off in all runs.
        shares: The runs of one process, by what was turned off: all `variants`.
        ranks: The same runs on the ranks.
        reference: The run of one process on whole batches.
    """
    tolerance = tolerance_of(findings.subject)
    num_before = len(findings.diagnoses)

    def compare_with(off: Off, turned_off: str) -> TraceComparison | None:
        pair = shares[base | off], ranks[base | off]
        return findings.compare(turned_off, RANKS_PAIR, *pair, tolerance, skip=["sample", "size"])

    # From what can be read off the traces to what takes experiments.
    plain = compare_with(frozenset(), "nothing")
    _add_values(findings, base, ranks, reference)
    if plain is not None and plain.same:
        return
    nothing = compare_with(EVERYTHING, "all of the below")
    if nothing is not None and nothing.first is None:
        found = compare_with(EVERYTHING - {"random"}, "all but random state")
        if found is not None and found.first is not None:
            evidence = (
                f"Forward draws other random numbers on a rank than one process does for the same part: {found.first} "
                "is as it should be only without them. They come from a generator that is seeded by rank or shared by "
                "parts."
            )
            findings.add(Cause.RANDOM, evidence, OWN_GENERATOR)
        found = compare_with(EVERYTHING - {"state"}, "all but changes of buffers in forward")
        if found is not None and found.first is not None:
            written = found.of_kind("buffer") or found.first
            evidence = f"Forward writes something else on each rank: {written}. Undoing what it writes makes it right."
            findings.add(Cause.BUFFERS, evidence)
    elif nothing is not None and nothing.first is not None:
        # Data, weights, rates and draws are the same, and still the ranks do something else: the task's own code.
        hidden = compare_with(HIDDEN, "all of that, and rank and world size hidden from the task")
        if nothing.first.kind == "parameter":
            evidence = (
                f"Gradients and learning rates are as in one process, and yet the update is not: {nothing.first}."
            )
            findings.add(Cause.RATES, evidence)
        elif hidden is not None and hidden.same:
            evidence = f"The {nothing.first} is as in one process once rank and world size are hidden from the task."
            findings.add(Cause.RANK, evidence)
        else:
            findings.explained = False
    findings.explained &= len(findings.diagnoses) > num_before


def _add_values(findings: Findings, base: Off, ranks: Runs, reference: Sequence[Trace]) -> None:
    """Add what the runs show at once: other samples, other initial weights, other rates."""

    def compare_values(off: Off) -> TraceComparison | None:
        if isinstance(found := ranks[base | off], str):
            return None
        of_training: tuple[Kind, ...] = ("loss", "gradient", "parameter", "buffer")
        return compare(reference, found, tolerance_of(findings.subject), skip=of_training)

    found = compare_values(frozenset())
    if found is None:
        return
    data = found.of_kind("size", "sample")
    if data is not None and "data" not in base:
        findings.add(Cause.DATA, f"The ranks do not train on what one process trains on: {data}.")
    start = found.of_kind("initial parameter", "initial buffer")
    if start is not None and "initial" not in base:
        findings.add(Cause.MODEL, f"The ranks start from another model than one process: {start}.")
    # An epoch of another length changes the schedule too, so with other data the rates are compared without that.
    alone = found if data is None else compare_values(EVERYTHING - {"rates"})
    rate = found.of_kind("learning rate") and alone and alone.of_kind("learning rate")
    if rate:
        findings.add(Cause.RATES, f"The ranks train with another {rate}.")
