"""Does it matter which rank computes a share? The ranks against one process that stands for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.study.verify.determinism import outcome, tell
from lockstep.study.verify.differences import Comparison, Difference, Kind, Tolerance, compare
from lockstep.study.verify.experiment import Experiment, Off, Subject, Switch
from lockstep.study.verify.findings import Cause, Finding, Row, fix, own_generator
from lockstep.study.verify.trace import Trace

PAIR = "shares in one process, ranks"
NAMES: dict[Switch, str] = {
    "random": "random state",
    "state": "changes of buffers in forward",
    "data": "data order",
    "initial": "initial weights",
    "rates": "learning-rate rule",
}
EVERYTHING: Off = frozenset(NAMES)
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

    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]
    explained: bool


class _Judge:
    def __init__(
        self, subject: Subject, base: Off, shares: Runs, ranks: Runs, reference: Sequence[Trace], tolerance: Tolerance
    ) -> None:
        self.subject, self.base, self.shares, self.ranks = subject, base, shares, ranks
        self.reference, self.tolerance = reference, tolerance
        self.rows: list[Row] = []

    def compare(self, off: Off, words: str) -> Comparison | None:
        """Compare the two with ``off`` turned off; None if either failed."""
        ranks, shares = self.ranks[self.base | off], self.shares[self.base | off]
        for found in (ranks, shares):
            if isinstance(found, str):
                self.rows.append(Row(words, PAIR, f"failed: {found}", False))
                return None
        assert not isinstance(ranks, str) and not isinstance(shares, str)
        comparison = compare(shares, ranks, self.tolerance, skip=["sample", "size"])
        self.rows.append(Row(words, PAIR, outcome(comparison), comparison.same))
        return comparison

    def values(self, off: Off) -> Comparison | None:
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
            found = judge.compare(EVERYTHING - {switch}, f"all but {NAMES[switch]}")
            if found is not None and found.first is not None:
                findings.append(_draws_or_writes(switch, found, subject))
        return RankStudy(tuple(findings), tuple(judge.rows), bool(findings))
    hidden = judge.compare(EVERYTHING | {HIDDEN}, "all of that, and rank and world size hidden from the task")
    first = nothing.first
    assert first is not None
    factor, collated = _factor(judge), _collated(judge)
    if collated is not None:
        evidence = f"From the same samples, a rank makes other batches than one process, from step {collated} on."
        findings.append(Finding(Cause.DATA, evidence, fix(Cause.DATA, subject)))
    elif factor is not None:
        evidence = (
            f"With data, learning rates, weights and random numbers as in one process, the gradient on {num} ranks is "
            f"{factor:.4g} times what it should be."
        )
        findings.append(Finding(Cause.WEIGHTING, evidence, fix(Cause.RANK, subject)))
    elif first.kind == "parameter":
        evidence = f"Gradients and learning rates are as in one process, and yet the update is not: {tell(first)}."
        findings.append(Finding(Cause.RATES, evidence, fix(Cause.RATES, subject)))
    elif hidden is not None and hidden.same:
        evidence = f"The {tell(first)} is as in one process once rank and world size are hidden from the task."
        findings.append(Finding(Cause.RANK, evidence, fix(Cause.RANK, subject)))
    else:
        return RankStudy(tuple(findings), tuple(judge.rows), False)
    return RankStudy(tuple(findings), tuple(judge.rows), True)


def _values(judge: _Judge) -> list[Finding]:
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
        findings.append(Finding(Cause.DATA, evidence, fix(Cause.DATA, subject)))
    start = firsts.get("initial parameter") or firsts.get("initial buffer")
    if start is not None and "initial" not in judge.base:
        evidence = f"The ranks start from another model than one process: {tell(start)}."
        findings.append(Finding(Cause.MODEL, evidence, fix(Cause.MODEL, subject)))
    rate = firsts.get("learning rate")
    if rate is not None and data is not None:  # an epoch of another length changes the schedule too
        alone = judge.values(EVERYTHING - {"rates"})
        rate = None if alone is None else _firsts(alone).get("learning rate")
    if rate is not None:
        evidence = f"The ranks train with another {tell(rate)}."
        findings.append(Finding(Cause.RATES, evidence, fix(Cause.RATES, subject)))
    return findings


def _firsts(found: Comparison) -> dict[str, Difference]:
    """Return the first difference of each kind."""
    firsts: dict[str, Difference] = {}
    for difference in found.differences:
        firsts.setdefault(difference.kind, difference)
    return firsts


def _is_padding(difference: Difference) -> bool:
    return "more than there are" in difference.words


def _draws_or_writes(switch: str, found: Comparison, subject: Subject) -> Finding:
    first = found.first
    assert first is not None
    if switch == "random":
        evidence = (
            f"Forward draws other random numbers on a rank than one process does for the same part: {tell(first)} is "
            "as it should be only without them. They come from a generator that is seeded by rank or shared by parts."
        )
        return Finding(Cause.RANDOM, evidence, own_generator(subject))
    written = next((d for d in found.differences if d.kind == "buffer"), first)
    evidence = f"Forward writes something else on each rank: {tell(written)}. Undoing what it writes makes it right."
    return Finding(Cause.BUFFERS, evidence, fix(Cause.BUFFERS, subject))


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
