"""Why two runs differ: experiments on determinism, on how a batch is split, on what ranks hold; and what they found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from lockstep.comm.world import World
from lockstep.errors import LockstepError
from lockstep.study.verify.fingerprint import (
    DOUBLE,
    EXACT,
    SINGLE,
    Difference,
    Kind,
    Tolerance,
    Trace,
    TraceComparison,
    compare,
)
from lockstep.study.verify.interventions import Experiment, Given, Off, Subject, Switch
from lockstep.study.verify.reference_loop import StepWeights, measure_weights, perform

# The causes that verify knows, and what it says about each.


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


FIXES = {
    Cause.DATA: (
        "Make the data set the same on every rank, and in the same order: fit divides it among the ranks. Take rank, "
        "world size, set order and private generators out of it."
    ),
    Cause.WEIGHTING: (
        "Return lockstep.Loss(total, count) from the loss: the sum of its parts and how many there are, not their mean."
    ),
    Cause.RANDOM: (
        "Train with {reproducible}, which gives each part of the batch random numbers of its own on any rank."
    ),
    Cause.BATCHNORM: (
        "Use lockstep.SyncBatchNorm.convert_sync_batchnorm(model) in Task.model, or train with {reproducible}, or "
        "use a norm that does not look at other samples, such as GroupNorm."
    ),
    Cause.RATES: (
        "Let the learning rate depend on the global batch only: take the rank and the world size out of Task.optimizer "
        "and Task.schedule (--lr-scaling linear follows the global batch)."
    ),
    Cause.BUFFERS: (
        "Change buffers and parameters in the same way on every rank: from what all ranks know, without asking for the "
        "rank."
    ),
    Cause.OPERATOR: (
        "Take everything from the seed: no clock, no system randomness, no order of threads. Where an operator is at "
        "fault, torch.use_deterministic_algorithms(True) replaces it or names it."
    ),
    Cause.SUM: "Return the mean over the batch, or lockstep.Loss(total, count) with the number that the sum is over.",
    Cause.COUPLED: (
        "Train with {reproducible}: then each part is computed alike on any number of ranks, though not as in one "
        "undivided batch. Or gather what the samples need of each other from all ranks inside the loss."
    ),
    Cause.RANK: (
        "Take rank and world size out of loss and model: the engine averages over the ranks already, so dividing or "
        "multiplying by their number is once too often."
    ),
    Cause.MODEL: (
        "Build the same model on every rank: Task.model is called with the seed set, so do not seed anew in it, and "
        "leave rank and world size out."
    ),
}


OWN_PART = (
    "Train with {reproducible}, which combines what all parts of the batch write, or all-reduce over the ranks what "
    "the buffer is computed from."
)
OWN_GENERATOR = (
    "Draw from the default generators of torch, Python and numpy, and do not seed them in the task: {reproducible} "
    "sets these for each part of the batch, but no others."
)


def reproducible(subject: Subject) -> str:
    """Return how reproducible mode is asked for."""
    num = subject.num_devices
    return f"lockstep.fit(task, reproducible={num})" if subject.torch_ddp else f"--reproducible {num}"


def fix(cause: Cause, subject: Subject) -> str:
    """Return what to do about ``cause``."""
    return FIXES[cause].format(reproducible=reproducible(subject))


def own_part(subject: Subject) -> str:
    """Return what to do about buffers that follow a rank's part of the batch."""
    return OWN_PART.format(reproducible=reproducible(subject))


def own_generator(subject: Subject) -> str:
    """Return what to do about random numbers that reproducible mode does not reach."""
    return OWN_GENERATOR.format(reproducible=reproducible(subject))


# Is one process by itself the same run twice? If not: what makes it one?

TWICE = "one process, twice"

_TRIALS: tuple[tuple[Switch, str, str], ...] = (
    ("random", "random numbers in forward", "it draws random numbers that do not follow the seed of the run"),
    ("outside", "clock and system randomness", "it asks the clock or the system's random numbers"),
    ("operators", "operators that are not deterministic", "an operator of torch adds up in an order that varies"),
    ("threads", "all threads but one", "threads add up in an order that varies"),
)


@dataclass(frozen=True)
class Repetition:
    """What came of running the same thing twice.

    Attributes:
        base: What has to be turned off so that one process is the same run twice.
        restored: Whether it is then.
    """

    base: Off
    restored: bool
    findings: tuple[Diagnosis, ...]
    rows: tuple[Row, ...]


def study_repetition(subject: Subject, given: Given, world: World, plain: TraceComparison) -> Repetition:
    """Find what makes two runs of one process differ, which ``plain`` says of them."""
    base: Off = frozenset()
    findings, rows = [], [Row("nothing", TWICE, outcome(plain), plain.same)]
    first = plain.first
    if first is None:
        return Repetition(base, True, (), ())
    if plain.has("sample", "size"):
        base |= {"data"}
        evidence = f"One process loads other samples the second time ({tell(first)}): they do not follow the seed."
        findings.append(Diagnosis(Cause.DATA, evidence, fix(Cause.DATA, subject)))
    if plain.has("initial parameter", "initial buffer"):
        base |= {"initial"}
        evidence = "One process starts from other weights the second time: they do not follow the seed."
        findings.append(Diagnosis(Cause.RANDOM, evidence, fix(Cause.MODEL, subject)))
    if findings:
        again = _twice(subject, given, world, base)
        rows.append(Row(" and ".join(finding.cause.value for finding in findings), TWICE, outcome(again), again.same))
        if again.same:
            return Repetition(base, True, tuple(findings), tuple(rows))
        first = again.first
        assert first is not None
    text = f"The same process, run twice from the same seed, gives another {tell(first)}"
    for switch, words, reason in _TRIALS:
        try:
            again = _twice(subject, given, world, base | {switch})
        except LockstepError:
            raise
        except RuntimeError as error:
            rows.append(Row(words, TWICE, f"failed: {str(error).splitlines()[0]}", False))
            continue
        rows.append(Row(words, TWICE, outcome(again), again.same))
        if again.same:
            evidence = f"{text}; with {words} turned off it does not: {reason}."
            findings.append(Diagnosis(Cause.OPERATOR, evidence, fix(Cause.OPERATOR, subject)))
            return Repetition(base | {switch}, True, tuple(findings), tuple(rows))
    evidence = f"{text}, and turning off {', '.join(words for _, words, _ in _TRIALS)} does not change that."
    findings.append(Diagnosis(Cause.OPERATOR, evidence, fix(Cause.OPERATOR, subject)))
    return Repetition(base, False, tuple(findings), tuple(rows))


def _twice(subject: Subject, given: Given, world: World, off: Off) -> TraceComparison:
    experiment = Experiment("one", off)
    one, two = (perform(subject, experiment, given, world) for _ in range(2))
    return compare(one, two, EXACT)


def tell(difference: Difference) -> str:
    """Name a difference in running text."""
    name = "" if difference.name in (difference.kind, "batch") else f" {difference.name}"
    ranks = f" on rank{'s' * (len(difference.ranks) > 1)} {_list(difference.ranks)}" if difference.ranks else ""
    step = "" if difference.step is None else f" at step {difference.step}"
    kind = {"size": "size:", "sample": "samples"}.get(difference.kind, difference.kind)
    return f"{kind}{name}{step}{ranks} ({difference.words})"


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def outcome(comparison: TraceComparison) -> str:
    """Say in a few words what came of a comparison."""
    return "the same" if comparison.first is None else f"differ: {tell(comparison.first)}"


# Does it matter that the batch is divided? One process against the same process, share after share.

PAIR = "whole batch, in shares"
NAMES: dict[Switch, str] = {
    "random": "random state",
    "batchnorm": "BatchNorm statistics",
    "state": "changes of buffers in forward",
    "weights": "sample weighting",
    "data": "repeated samples",
}


@dataclass(frozen=True)
class DivisionStudy:
    """What came of dividing the batch.

    Attributes:
        findings: What makes the result depend on the division.
        explained: Whether the two are the same run with all of that turned off.
        given: With the factors that the shares' losses would need.
        causes: The switches that turn off what was found.
    """

    findings: tuple[Diagnosis, ...]
    rows: tuple[Row, ...]
    explained: bool
    given: Given
    causes: Off


class Divider:
    """Runs one process both ways, with things turned off."""

    def __init__(self, subject: Subject, given: Given, world: World, base: Off) -> None:
        self.subject, self.world, self.base = subject, world, base
        self.given = given
        self.draws: tuple[str, ...] = ()

    def one(self, off: Off) -> list[Trace]:
        """Return the run on the whole batch; weights and padding have no meaning there."""
        found = perform(self.subject, Experiment("one", (self.base | off) - {"weights"}), self.given, self.world)
        self.draws = self.draws or found[0].draws
        return found

    def shares(self, off: Off) -> list[Trace]:
        """Return the run share after share."""
        own: Off = frozenset() if self.subject.torch_ddp else frozenset({"data", "rates"})
        return perform(self.subject, Experiment("shares", self.base | off | own), self.given, self.world)

    def compare(self, off: Off) -> TraceComparison:
        """Compare the two."""
        return compare(self.one(off), self.shares(off), tolerance_of(self.subject), skip=["sample"])


def tolerance_of(subject: Subject) -> Tolerance:
    """Return how far apart numbers may be."""
    return DOUBLE if subject.double else SINGLE


def study_division(divider: Divider, layers: Sequence[str]) -> DivisionStudy:
    """Find what makes the result depend on how the batch is divided.

    Args:
        divider: Runs the experiments.
        layers: Names of the batch norm layers.
    """
    subject = divider.subject
    plain = divider.compare(frozenset())
    rows = [Row("nothing", PAIR, outcome(plain), plain.same)]
    if plain.same:
        return DivisionStudy((), tuple(rows), True, divider.given, frozenset())
    weights = measure_weights(subject, divider.given, divider.base, divider.world.device)
    divider.given = replace(divider.given, factors={step.step: list(step.factors) for step in weights})
    everything: Off = frozenset({"random", "batchnorm", "state", "weights"})
    everything |= {"data"} if subject.torch_ddp else set()
    nothing = divider.compare(everything)
    rows.append(Row("all of the below", PAIR, outcome(nothing), nothing.same))
    findings, causes = [], set()
    for switch in sorted(everything, key=list(NAMES).index):
        found = divider.compare(everything - {switch})
        rows.append(Row(f"all but {NAMES[switch]}", PAIR, outcome(found), found.same))
        # Where something else keeps the two apart, only a change for the worse would say anything, and it might not be.
        if nothing.same and not found.same:
            causes.add(switch)
    weights = [step for step in weights if step.kind != "right"]
    if "data" in causes:  # without the repeated samples shares are uneven, and only therefore have to be weighed
        weights = [step for step in weights if not step.by_samples]
        causes -= set() if weights else {"weights"}
    for switch in sorted(causes, key=list(NAMES).index):
        findings.append(_finding(switch, divider, plain, weights, layers))
    coupled = next((step for step in weights if step.kind == "none"), None)
    if not nothing.same and coupled is not None:
        findings.append(_coupled(coupled, subject))
    return DivisionStudy(tuple(findings), tuple(rows), bool(findings), divider.given, frozenset(causes))


def _finding(
    switch: Switch, divider: Divider, plain: TraceComparison, weights: Sequence[StepWeights], layers: Sequence[str]
) -> Diagnosis:
    subject, num = divider.subject, divider.subject.num_devices
    if switch == "random":
        drawn = ", ".join(divider.draws) or "random numbers"
        evidence = f"Forward draws random numbers ({drawn}), and each part of the batch gets others than the whole."
        return Diagnosis(Cause.RANDOM, evidence, fix(Cause.RANDOM, subject))
    if switch == "batchnorm":
        where = f" ({', '.join(layers[:3])}{' ...' if len(layers) > 3 else ''})" if layers else ""
        evidence = f"Each rank normalises with mean and variance of its own part of the batch{where}."
        return Diagnosis(Cause.BATCHNORM, evidence, fix(Cause.BATCHNORM, subject))
    if switch == "state":
        evidence = f"Forward changes {_buffer(plain)} by the part of the batch that a rank has, so each has another."
        return Diagnosis(Cause.BUFFERS, evidence, own_part(subject))
    if switch == "data":
        evidence = "torch's DistributedSampler repeats samples to give all ranks equally many, so these count twice."
        advice = (
            "Use lockstep.DistributedSampler(pad=False) and weigh each rank's loss by its samples, or lockstep.fit."
        )
        return Diagnosis(Cause.WEIGHTING, evidence, advice)
    wrong = weights[0]
    if wrong.kind == "one":
        return _coupled(wrong, subject)
    if wrong.kind == "sum":
        evidence = (
            f"At step {wrong.step} the loss of the whole batch is the sum of the losses of its {num} parts, not their "
            "mean: it grows with the number of samples."
        )
        return Diagnosis(Cause.SUM, evidence, fix(Cause.SUM, subject))
    counted, wanted = (" : ".join(f"{w:.3g}" for w in ws) for ws in (wrong.counted, wrong.wanted))
    sizes = " + ".join(map(str, wrong.sizes))
    evidence = (
        f"At step {wrong.step} the parts of the batch ({sizes} samples) count {counted}; the whole needs {wanted}."
    )
    advice = fix(Cause.WEIGHTING, subject)
    if subject.torch_ddp:
        advice = (
            "Weigh each rank's loss by what it stands for: lockstep.DistributedDataParallel with "
            "lockstep.backward(loss, count=n), or lockstep.fit with a task whose loss is Loss(total, count)."
        )
    return Diagnosis(Cause.WEIGHTING, evidence, advice)


def _coupled(step: StepWeights, subject: Subject) -> Diagnosis:
    if step.kind == "one":
        what = "is that of one of its parts alone, as with a maximum over the batch"
    else:
        what = f"is no combination of those of its parts: {step.residual:.1%} of it is left over"
    evidence = (
        f"At step {step.step}, with random state and batch norm turned off, the gradient of the whole batch {what}. "
        "So a sample's loss depends on which others are with it."
    )
    return Diagnosis(Cause.COUPLED, evidence, fix(Cause.COUPLED, subject))


def _buffer(plain: TraceComparison) -> str:
    names = [difference.name for difference in plain.differences if difference.kind == "buffer"]
    return f"the buffer {names[0]}" if names else "a buffer or parameter"


# Does it matter which rank computes a share? The ranks against one process that stands for them.

RANKS_PAIR = "shares in one process, ranks"
SWITCH_NAMES: dict[Switch, str] = {
    "random": "random state",
    "state": "changes of buffers in forward",
    "data": "data order",
    "initial": "initial weights",
    "rates": "learning-rate rule",
}
EVERYTHING: Off = frozenset(SWITCH_NAMES)
HIDDEN: Switch = "place"

Runs = Mapping[Off, Sequence[Trace] | str]
"""By what was turned off, the traces of all ranks (or shares), or why there are none."""


def variants(base: Off) -> list[Off]:
    """Return what is turned off in each run, on the ranks and in the process that stands for them."""
    all_but = [EVERYTHING - {switch} for switch in ("random", "state", "rates")]
    return [base | off for off in (frozenset(), EVERYTHING, *all_but, EVERYTHING | {HIDDEN})]


def shares_experiment(subject: Subject, off: Off) -> Experiment:
    """Return the experiment that stands for the ranks: what is theirs alone can only be as in one process."""
    own: Off = frozenset() if subject.torch_ddp else frozenset({"data", "rates"})
    return Experiment("shares", (off | own) - {HIDDEN})


@dataclass(frozen=True)
class RankStudy:
    """What came of it; ``explained``: with all that was found turned off, the ranks do what one process does."""

    findings: tuple[Diagnosis, ...]
    rows: tuple[Row, ...]
    explained: bool


class _Judge:
    def __init__(
        self, subject: Subject, base: Off, shares: Runs, ranks: Runs, reference: Sequence[Trace], tolerance: Tolerance
    ) -> None:
        self.subject, self.base, self.shares, self.ranks = subject, base, shares, ranks
        self.reference, self.tolerance = reference, tolerance
        self.rows: list[Row] = []

    def compare(self, off: Off, words: str) -> TraceComparison | None:
        """Compare the two with ``off`` turned off; None if either failed."""
        ranks, shares = self.ranks[self.base | off], self.shares[self.base | off]
        for found in (ranks, shares):
            if isinstance(found, str):
                self.rows.append(Row(words, RANKS_PAIR, f"failed: {found}", False))
                return None
        assert not isinstance(ranks, str) and not isinstance(shares, str)
        comparison = compare(shares, ranks, self.tolerance, skip=["sample", "size"])
        self.rows.append(Row(words, RANKS_PAIR, outcome(comparison), comparison.same))
        return comparison

    def values(self, off: Off) -> TraceComparison | None:
        """Compare samples, sizes, initial weights and rates with those of one process itself."""
        ranks = self.ranks[self.base | off]
        if isinstance(ranks, str):
            return None
        skip: list[Kind] = ["loss", "gradient", "parameter", "buffer"]
        return compare(self.reference, ranks, self.tolerance, skip=skip, strided=self.subject.torch_ddp)


def study_ranks(
    subject: Subject, base: Off, shares: Runs, ranks: Runs, reference: Sequence[Trace], tolerance: Tolerance
) -> RankStudy:
    """Find what makes the ranks do something else than one process that stands for them.

    Args:
        subject: What is examined.
        base: What is turned off in all runs.
        shares: The runs of one process, by what was turned off: all `variants`.
        ranks: The same runs on the ranks.
        reference: The run of one process on whole batches.
        tolerance: What counts as equal.
    """
    judge = _Judge(subject, base, shares, ranks, reference, tolerance)
    num = subject.num_devices
    plain = judge.compare(frozenset(), "nothing")
    findings = _values(judge)
    if plain is not None and plain.same:
        return RankStudy(tuple(findings), tuple(judge.rows), True)
    nothing = judge.compare(EVERYTHING, "all of the below")
    if nothing is None:  # as when the model has other shapes
        return RankStudy(tuple(findings), tuple(judge.rows), bool(findings))
    if nothing.same:
        for switch in ("random", "state"):
            found = judge.compare(EVERYTHING - {switch}, f"all but {SWITCH_NAMES[switch]}")
            if found is not None and found.first is not None:
                findings.append(_draws_or_writes(switch, found, subject))
        return RankStudy(tuple(findings), tuple(judge.rows), bool(findings))
    hidden = judge.compare(EVERYTHING | {HIDDEN}, "all of that, and rank and world size hidden from the task")
    first = nothing.first
    assert first is not None
    factor, collated = _factor(judge), _collated(judge)
    if collated is not None:
        evidence = f"From the same samples, a rank makes other batches than one process, from step {collated} on."
        findings.append(Diagnosis(Cause.DATA, evidence, fix(Cause.DATA, subject)))
    elif factor is not None:
        evidence = (
            f"With data, learning rates, weights and random numbers as in one process, the gradient on {num} ranks is "
            f"{factor:.4g} times what it should be."
        )
        findings.append(Diagnosis(Cause.WEIGHTING, evidence, fix(Cause.RANK, subject)))
    elif first.kind == "parameter":
        evidence = f"Gradients and learning rates are as in one process, and yet the update is not: {tell(first)}."
        findings.append(Diagnosis(Cause.RATES, evidence, fix(Cause.RATES, subject)))
    elif hidden is not None and hidden.same:
        evidence = f"The {tell(first)} is as in one process once rank and world size are hidden from the task."
        findings.append(Diagnosis(Cause.RANK, evidence, fix(Cause.RANK, subject)))
    else:
        return RankStudy(tuple(findings), tuple(judge.rows), False)
    return RankStudy(tuple(findings), tuple(judge.rows), True)


def _values(judge: _Judge) -> list[Diagnosis]:
    """Return what can be seen at once: other samples, other initial weights, other rates."""
    found = judge.values(frozenset())
    if found is None:
        return []
    subject = judge.subject
    findings = []
    firsts = _firsts(found)
    data = firsts.get("size") or firsts.get("sample")
    if data is not None and "data" not in judge.base and not (subject.torch_ddp and _is_padding(data)):
        evidence = f"The ranks do not train on what one process trains on: {tell(data)}."
        findings.append(Diagnosis(Cause.DATA, evidence, fix(Cause.DATA, subject)))
    start = firsts.get("initial parameter") or firsts.get("initial buffer")
    if start is not None and "initial" not in judge.base:
        evidence = f"The ranks start from another model than one process: {tell(start)}."
        findings.append(Diagnosis(Cause.MODEL, evidence, fix(Cause.MODEL, subject)))
    rate = firsts.get("learning rate")
    if rate is not None and data is not None:  # an epoch of another length changes the schedule too
        alone = judge.values(EVERYTHING - {"rates"})
        rate = None if alone is None else _firsts(alone).get("learning rate")
    if rate is not None:
        evidence = f"The ranks train with another {tell(rate)}."
        findings.append(Diagnosis(Cause.RATES, evidence, fix(Cause.RATES, subject)))
    return findings


def _firsts(found: TraceComparison) -> dict[str, Difference]:
    """Return the first difference of each kind."""
    firsts: dict[str, Difference] = {}
    for difference in found.differences:
        firsts.setdefault(difference.kind, difference)
    return firsts


def _is_padding(difference: Difference) -> bool:
    return "more than there are" in difference.words


def _draws_or_writes(switch: str, found: TraceComparison, subject: Subject) -> Diagnosis:
    first = found.first
    assert first is not None
    if switch == "random":
        evidence = (
            f"Forward draws other random numbers on a rank than one process does for the same part: {tell(first)} is "
            "as it should be only without them. They come from a generator that is seeded by rank or shared by parts."
        )
        return Diagnosis(Cause.RANDOM, evidence, own_generator(subject))
    written = next((d for d in found.differences if d.kind == "buffer"), first)
    evidence = f"Forward writes something else on each rank: {tell(written)}. Undoing what it writes makes it right."
    return Diagnosis(Cause.BUFFERS, evidence, fix(Cause.BUFFERS, subject))


def _collated(judge: _Judge) -> int | None:
    """Return the first step in which the loss got another batch, though all samples were the same."""
    ranks, shares = judge.ranks[judge.base | EVERYTHING], judge.shares[judge.base | EVERYTHING]
    if isinstance(ranks, str) or isinstance(shares, str):
        return None
    for trace, expected in zip(ranks, shares, strict=True):
        for ours, theirs in zip(trace.steps, expected.steps, strict=True):
            if ours.batches != theirs.batches:
                return ours.step
    return None


def _factor(judge: _Judge) -> float | None:
    """Return the one number that all gradients of the first step are off by, if there is one."""
    ranks, shares = judge.ranks[judge.base | EVERYTHING], judge.shares[judge.base | EVERYTHING]
    if isinstance(ranks, str) or isinstance(shares, str):
        return None
    ours, theirs = ranks[0].steps[0].tensors.gradients, shares[0].steps[0].tensors.gradients
    if set(ours) != set(theirs) or not ours:
        return None
    dots = sum(float(ours[name].values @ theirs[name].values) for name in ours)
    squares = sum(float(theirs[name].values @ theirs[name].values) for name in theirs)
    if not squares or not dots:
        return None
    factor = dots / squares
    rest = sum(float((ours[name].values - factor * theirs[name].values).square().sum()) for name in ours)
    is_one = abs(factor - 1) <= judge.tolerance.relative
    return None if is_one or rest > (judge.tolerance.relative * factor) ** 2 * squares * 100 else factor
