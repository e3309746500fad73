"""Does it matter that the batch is divided? One process against the same process, share after share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.comm.world import World
from lockstep.study.verify.determinism import outcome
from lockstep.study.verify.differences import DOUBLE, SINGLE, Comparison, Tolerance, compare
from lockstep.study.verify.experiment import Experiment, Given, Off, Subject, Switch
from lockstep.study.verify.findings import Cause, Finding, Row, fix, own_part
from lockstep.study.verify.perform import perform
from lockstep.study.verify.trace import Trace
from lockstep.study.verify.weights import StepWeights, measure_weights

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

    findings: tuple[Finding, ...]
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

    def compare(self, off: Off) -> Comparison:
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
    switch: Switch, divider: Divider, plain: Comparison, weights: Sequence[StepWeights], layers: Sequence[str]
) -> Finding:
    subject, num = divider.subject, divider.subject.num_devices
    if switch == "random":
        drawn = ", ".join(divider.draws) or "random numbers"
        evidence = f"Forward draws random numbers ({drawn}), and each part of the batch gets others than the whole."
        return Finding(Cause.RANDOM, evidence, fix(Cause.RANDOM, subject))
    if switch == "batchnorm":
        where = f" ({', '.join(layers[:3])}{' ...' if len(layers) > 3 else ''})" if layers else ""
        evidence = f"Each rank normalises with mean and variance of its own part of the batch{where}."
        return Finding(Cause.BATCHNORM, evidence, fix(Cause.BATCHNORM, subject))
    if switch == "state":
        evidence = f"Forward changes {_buffer(plain)} by the part of the batch that a rank has, so each has another."
        return Finding(Cause.BUFFERS, evidence, own_part(subject))
    if switch == "data":
        evidence = "torch's DistributedSampler repeats samples to give all ranks equally many, so these count twice."
        advice = (
            "Use lockstep.DistributedSampler(pad=False) and weigh each rank's loss by its samples, or lockstep.fit."
        )
        return Finding(Cause.WEIGHTING, evidence, advice)
    wrong = weights[0]
    if wrong.kind == "one":
        return _coupled(wrong, subject)
    if wrong.kind == "sum":
        evidence = (
            f"At step {wrong.step} the loss of the whole batch is the sum of the losses of its {num} parts, not their "
            "mean: it grows with the number of samples."
        )
        return Finding(Cause.SUM, evidence, fix(Cause.SUM, subject))
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
    return Finding(Cause.WEIGHTING, evidence, advice)


def _coupled(step: StepWeights, subject: Subject) -> Finding:
    if step.kind == "one":
        what = "is that of one of its parts alone, as with a maximum over the batch"
    else:
        what = f"is no combination of those of its parts: {step.residual:.1%} of it is left over"
    evidence = (
        f"At step {step.step}, with random state and batch norm turned off, the gradient of the whole batch {what}. "
        "So a sample's loss depends on which others are with it."
    )
    return Finding(Cause.COUPLED, evidence, fix(Cause.COUPLED, subject))


def _buffer(plain: Comparison) -> str:
    names = [difference.name for difference in plain.differences if difference.kind == "buffer"]
    return f"the buffer {names[0]}" if names else "a buffer or parameter"
