"""The verdict of `verify`, on a task or a script: causes and what to do about them, as sentences, tables and JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import isfinite

from rich.console import Group, RenderableType
from rich.text import Text

from lockstep.base.activity import plural
from lockstep.study.common import Shown, Table, to_json
from lockstep.study.verify.fingerprint import EXACT, Tolerance, TraceComparison


class Cause(StrEnum):
    """Why a run on N ranks differs from the run in one process; what to do about it is below."""

    DATA = "data order"
    WEIGHTING = "sample weighting"
    RANDOM = "random state"
    BATCHNORM = "BatchNorm statistics"
    RATES = "learning-rate rule"
    BUFFERS = "buffers changed on one rank"
    PARAMETERS = "parameters changed in forward"
    OPERATOR = "non-deterministic operator"
    SUM = "a loss that sums instead of averages"
    COUPLED = "samples that depend on each other"
    CLIPPED = "parts clipped before they are summed"
    CLAMPED = "a loss clamped after its mean is taken"
    TERM = "a regulariser scaled by the local batch"
    STATE = "state in a plain attribute"
    OUTSIDE = "parameters that no module registers"
    RANK = "a forward pass that depends on the rank"
    BACKWARD = "a backward pass that depends on the rank"
    MODEL = "a model that depends on the rank"
    # Of scripts.
    BATCH = "a batch that is not divided"
    SAMPLER = "samples that are not divided"
    PADDED = "samples that count twice"
    EPOCH = "the same order in every epoch"
    MASKS = "the same random numbers on all ranks"
    STEPS = "another number of updates"
    SCALED = "a loss or gradients of another size"
    BESIDE = "parameters outside of the wrapper"
    UNREDUCED = "gradients that were not averaged"
    UPDATE = "an update that depends on the rank"
    EVALUATION = "an evaluation of a part"
    FAILED = "an error on several ranks"


# What to do about a cause, in a task and in a script. ``{num}`` stands for the number of ranks.
FIXES_OF_TASK = {
    Cause.DATA: "Make the data set the same on every rank, in the same order: seed it without the rank, sort listings.",
    Cause.WEIGHTING: "Return lockstep.Loss(total, count) from the loss: the sum of its parts and their number.",
    Cause.RANDOM: "Train with --reproducible {num}: each part of the batch then has random numbers of its own.",
    Cause.BATCHNORM: (
        "Use lockstep.SyncBatchNorm.convert_sync_batchnorm(model) in Task.model, or train with --reproducible {num}, "
        "or use a norm that treats each sample separately, such as GroupNorm."
    ),
    Cause.RATES: "Let the learning rate depend on the global batch and the number of updates only, also in a schedule.",
    Cause.BUFFERS: "Change buffers and parameters in the same way on every rank: from values that all ranks have.",
    Cause.PARAMETERS: "Keep what forward computes in a buffer, which --reproducible {num} combines, or all-reduce it.",
    Cause.OPERATOR: "Derive all from the seed; torch.use_deterministic_algorithms(True) replaces or names operators.",
    Cause.SUM: "Return the mean over the batch, or lockstep.Loss(total, count) with the number of summands.",
    Cause.COUPLED: "Train with --reproducible {num}, or gather what samples need of each other from all ranks.",
    Cause.CLIPPED: "Clip the gradient of the whole batch with --clip NORM, or train with --reproducible {num}.",
    Cause.CLAMPED: "Clamp the loss of each sample before taking the mean, or train with --reproducible {num}.",
    Cause.TERM: "Scale such a term by a constant, not by the number of samples that the loss is given.",
    Cause.STATE: "Keep what forward remembers in a buffer (register_buffer), which --reproducible {num} combines.",
    Cause.OUTSIDE: "Make them part of the model: nn.ModuleList for a list of modules, nn.ParameterList for parameters.",
    Cause.RANK: "Remove rank and world size from collate, loss and model: the engine already averages over ranks.",
    Cause.BACKWARD: "Remove rank and world size from hooks and autograd functions: the engine averages over ranks.",
    Cause.MODEL: "Build the same model on every rank: do not seed in Task.model, nor use rank and world size there.",
}
FIXES_OF_SCRIPT = {
    **{cause: FIXES_OF_TASK[cause] for cause in (Cause.DATA, Cause.RATES, Cause.BUFFERS, Cause.OPERATOR)},
    Cause.WEIGHTING: "Weight each rank by what its loss counts: lockstep.backward(loss, mean_over=count).",
    Cause.RANDOM: "Nothing: it is so by design. lockstep train --reproducible draws the same numbers on any devices.",
    Cause.BATCHNORM: "Convert the model: lockstep.SyncBatchNorm.convert_sync_batchnorm(model).",
    Cause.COUPLED: "Gather what samples need of each other from all ranks, and make each term a mean over samples.",
    Cause.CLIPPED: "Clip after the gradients were averaged: after backward, and before optimizer.step().",
    Cause.TERM: "Add the penalty once: to the loss of every rank if gradients are averaged, or use weight_decay.",
    Cause.STATE: "Change attributes in the same way on every rank, not on rank 0 only.",
    Cause.MODEL: "Load or make the weights before the model is wrapped, or on every rank.",
    Cause.BATCH: "Divide it: batch_size=BATCH // world_size, or give the loader to lockstep.prepare.",
    Cause.SAMPLER: "Give the loader a DistributedSampler (lockstep.DistributedSampler, or lockstep.prepare).",
    Cause.PADDED: "Use lockstep.DistributedSampler(..., pad=False) and lockstep.backward(loss, mean_over=len(batch)).",
    Cause.EPOCH: "Call sampler.set_epoch(epoch) in each epoch, or use lockstep.DistributedSampler, which needs none.",
    Cause.MASKS: "Seed each rank differently after the model is made: lockstep.seed(world, 0).",
    Cause.STEPS: "Make the same number of updates on every rank: decide from values that were reduced.",
    Cause.SCALED: "Average once: take the mean loss of a rank's samples, and let the wrapper average over ranks.",
    Cause.BESIDE: "Put them into the module that is wrapped, or wrap their module as well.",
    Cause.UNREDUCED: "Call the wrapper, not its module, and run the last backward of an update outside of no_sync.",
    Cause.UPDATE: "Look for code between backward and step, or in the optimizer, that depends on the rank.",
    Cause.EVALUATION: "Sum counts and totals over all ranks (all_reduce), or evaluate everything on rank 0.",
}


@dataclass(frozen=True)
class Diagnosis:
    """One cause that was found.

    Attributes:
        evidence: What was measured, in a sentence or two.
        fix: What to do, in a sentence.
        tried: Whether the fix helped, if it was tried; empty otherwise.
    """

    cause: Cause
    evidence: str
    fix: str
    tried: str = ""


def by_design(draws: Sequence[str], norms: Sequence[str]) -> Iterator[tuple[str, Cause, str]]:
    """Yield what makes ranks differ from one process by design: in words, its cause, and the evidence.

    Args:
        draws: Names of the random operations of forward.
        norms: Layers that normalise with the statistics of a part.
    """
    if draws:
        words = "dropout masks" if all("dropout" in draw for draw in draws) else "random numbers in forward"
        drawn = f"random numbers ({', '.join(draws)})"
        yield words, Cause.RANDOM, f"Forward draws {drawn}, and each part of the batch gets others than the whole."
    if norms:
        where = f"{', '.join(norms[:3])}{' ...' if len(norms) > 3 else ''}"
        evidence = f"Each rank normalises with the mean and variance of its own part of the batch ({where})."
        yield "batch norm statistics", Cause.BATCHNORM, evidence


@dataclass(frozen=True)
class Row:
    """One experiment, for the table.

    Attributes:
        turned_off: What was turned off or done instead.
        compared: Which two runs.
        outcome: In a few words.
        same: Whether the two were the same run.
        error: Why it failed, so that it excludes nothing; empty if it did not.
    """

    turned_off: str
    compared: str
    outcome: str
    same: bool
    error: str = ""

    @classmethod
    def failed(cls, turned_off: str, compared: str, reason: str) -> "Row":
        """Return an experiment that failed, with the first line of the reason."""
        reason = reason.partition("\n")[0]
        return cls(turned_off, compared, f"failed: {reason}", False, reason)


@dataclass(frozen=True)
class Setup:
    """What was compared, and how.

    Attributes:
        name: Of the file of the task, or of the script.
        num_devices: Ranks.
        steps: The steps that were compared.
        precision: In which it is computed, such as ``float64`` or ``bf16 autocast``.
        tolerance: How far apart numbers may be.
        engine: What averages gradients: ``ddp``, torch's or ours, or ``none`` if a script has no wrapper.
        seed: None for a script, which seeds by itself.
        reproducible: As in the settings of a task.
    """

    name: str
    num_devices: int
    steps: tuple[int, ...]
    precision: str
    tolerance: Tolerance
    engine: str = "ddp"
    seed: int | None = None
    reproducible: int | None = None

    @property
    def exactness(self) -> str:
        """In what precision the runs were compared, and how closely."""
        closely = f"{self.tolerance.relative:.0e} of each tensor's size"
        return f"{self.precision}, to {'the bit' if self.tolerance == EXACT else closely}"


PLURALS = {"size": "sizes of data set and batch", "sample": "samples", "loss": "losses"}


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """What `verify` found.

    Attributes:
        setup: What was compared, and how.
        same: Whether it is the same run.
        apart_from: If it is the same run once this is turned off, what makes it differ, in words; else empty.
        comparison: One process against the ranks; None where the ranks could not start.
        repeatable: Whether one process is the same run twice, to the bit.
        findings: The causes, if it is not the same run.
        rows: The experiments that led to them.
        explained: Whether the runs are the same with all causes turned off.
        why_single: Why fp32 and not float64; empty for float64.
        remark: Anything else to report; may be empty.
    """

    setup: Setup
    same: bool
    comparison: TraceComparison | None
    repeatable: bool
    findings: tuple[Diagnosis, ...] = ()
    rows: tuple[Row, ...] = ()
    explained: bool = True
    why_single: str = ""
    remark: str = ""
    apart_from: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        setup, comparison = self.setup, self.comparison
        who = plural(setup.num_devices, "rank")
        verb = "train" if setup.num_devices > 1 else "trains"
        as_one = f"{who} {verb} as one process does, over {_steps(setup.steps)} ({setup.exactness})"
        if self.same:
            return f"The same training run: {as_one}."
        if self.apart_from:
            return f"The same training run, apart from {' and '.join(self.apart_from)}: without them, {as_one}."
        if comparison is None:
            return f"Not the same training run: the {who} cannot train together."
        if comparison.first is None and self.repeatable:
            return f"Not the same training run, although {who} and one process make the same updates."
        if comparison.first is None:
            return f"Not reproducible: one process and {who} agree, but no two runs are equal to the bit."
        differ = f"{who} differ{'s' * (setup.num_devices == 1)} from one process, first in the {comparison.first}"
        if self.rows and not self.findings and all(row.error for row in self.rows):
            return f"It is not known whether it is the same training run: {differ}, and no experiment could be done."
        return f"Not the same training run: {differ}."

    def __rich__(self) -> RenderableType:
        """Lay out verdict, what was compared, and each experiment; the verdict comes first."""
        setup, comparison = self.setup, self.comparison
        heading = f"{setup.name}: one process and {plural(setup.num_devices, 'rank')}, {_steps(setup.steps)}"
        parts: list[RenderableType] = [Text(sentence) for sentence in sentences(self)]
        parts += [Text(), Text(heading, style="bold")]
        if comparison is not None:
            rows: list[list[str | Text]] = []
            for kind, worst in comparison.worst.items():
                first = next((difference for difference in comparison.differences if difference.kind == kind), "")
                largest = "none" if worst == 0 else f"{worst:.1e}" if isfinite(worst) else "-"
                rows.append([PLURALS.get(kind, f"{kind}s"), largest, str(first)])
            parts += [Text(), Table("What was compared", ["", "largest difference", "first difference"], rows).rich()]
        if self.rows:
            experiments: list[list[str | Text]] = [
                [row.turned_off, row.compared, Text(row.outcome, style="" if row.same else "bold")] for row in self.rows
            ]
            parts.append(Table("Experiments", ["turned off", "runs", "outcome"], experiments).rich())
        notes = (
            f"Computed in {setup.exactness}.",
            self.why_single and f"Not computed in float64, because the task fails there: {self.why_single}",
            self.remark,
            "" if self.repeatable else "Two runs of one process differ.",
        )
        parts += [Text(note, style="dim") for note in notes if note]
        return Group(*parts)

    def to_json(self) -> str:
        """Return everything for other programs; docs/verify.md describes the names, which stay."""
        setup, comparison = self.setup, self.comparison
        first = comparison.first if comparison else None
        record = {
            "version": 1,  # grows when a name or a meaning changes; new names leave it as it is
            "task": setup.name,
            "same": self.same,
            "apart_from": list(self.apart_from),
            "setup": {
                "num_devices": setup.num_devices,
                "engine": setup.engine,
                "steps": list(setup.steps),
                "seed": setup.seed,
                "reproducible": setup.reproducible,
                "precision": setup.precision,
                "exactness": setup.exactness,
                "why_not_float64": self.why_single or None,
            },
            "repeatable": self.repeatable,
            "first_difference": asdict(first) if first else None,
            "largest_differences": comparison.worst if comparison else None,
            "causes": [asdict(finding) for finding in self.findings],
            "remark": self.remark or None,
            "explained": self.explained,
            "experiments": [asdict(row) for row in self.rows],
            "verdict": sentences(self),
        }
        return to_json(record)


def sentences(verification: Verification) -> list[str]:
    """Return the verdict, a paragraph each: what is, then cause and fix for each cause."""
    paragraphs = [verification.verdict]
    num = len(verification.findings)
    for number, finding in enumerate(verification.findings, 1):
        which = f"Cause {number} of {num}" if num > 1 else "Cause"
        paragraphs.append(f"{which}: {finding.cause}. {finding.evidence}")
        paragraphs.append(f"Fix: {finding.fix} {finding.tried}".rstrip())
    failed = [row for row in verification.rows if row.error]
    if not verification.same and not verification.findings:
        paragraphs.append(_without_cause(verification))
    elif not verification.same and not verification.explained:
        paragraphs.append("There may be more causes: run verify again after fixing these.")
    if failed and not verification.explained:
        paragraphs.append(
            f"{len(failed)} of {len(verification.rows)} experiments failed, and exclude no cause: {failed[0].error}"
        )
    return paragraphs


def _without_cause(verification: Verification) -> str:
    """Return what was tried in vain if no cause was found, and what to do."""
    setup = verification.setup
    check = "Check how the first tensor that differs is computed, and whether that can depend on the rank."
    if verification.comparison is None:
        job = f"lockstep run --devices {setup.num_devices} {setup.name}"
        return f"Nothing was compared, as not all ranks have made an update. Make it train with: {job}"
    # An experiment that failed excludes nothing.
    tried = [row for row in verification.rows if not row.error and row.turned_off not in ("nothing", "nothing else")]
    if not tried:
        who = plural(setup.num_devices, "rank")
        return f"No cause was found: one process and {who} were compared with no feature turned off. {check}"
    if any(row.same for row in tried):
        return f"No cause was found, although some of the experiments below give the same run. {check}"
    return f"No cause was found: turning off each of the features below did not make the runs the same. {check}"


def _steps(numbers: tuple[int, ...]) -> str:
    """Return which steps were trained, such as ``steps 0 to 2 and 5``."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] == numbers[-2] + 1:
        return f"steps {numbers[0]} to {numbers[-1]}"
    first = f"steps {numbers[0]} to {numbers[-2]}" if len(numbers) > 2 else f"steps {numbers[0]}"
    return f"{first} and {numbers[-1]}, the epoch's last"
