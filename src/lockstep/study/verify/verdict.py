"""What verify says: whether it is the same run, why not, and what to do."""

from __future__ import annotations

from lockstep.study.verify.determinism import tell
from lockstep.study.verify.diagnose import Verification
from lockstep.study.verify.differences import DOUBLE, SINGLE
from lockstep.study.verify.findings import Cause

LISTED = (
    Cause.DATA,
    Cause.WEIGHTING,
    Cause.RANDOM,
    Cause.BATCHNORM,
    Cause.RATES,
    Cause.BUFFERS,
    Cause.OPERATOR,
    Cause.SUM,
)


def sentences(verification: Verification) -> list[str]:
    """Return the verdict, a paragraph each: what is, then cause and fix for each cause."""
    found = [_headline(verification)]
    num = len(verification.findings)
    for number, finding in enumerate(verification.findings, 1):
        which = f"Cause {number} of {num}" if num > 1 else "Cause"
        found.append(f"{which}: {finding.cause.value}. {finding.evidence}")
        found.append(" ".join(filter(None, [f"Fix: {finding.fix}", finding.tried])))
    if not verification.same and not verification.findings:
        names = ", ".join(cause.value for cause in LISTED)
        found.append(
            f"No cause was found. Turning off each of these did not make the runs the same: {names}. "
            "Look at what the first tensor that differs is computed from, and how that can know the rank."
        )
    elif not verification.same and not verification.explained:
        found.append("That may not be all: verify again once it is fixed.")
    return found


def exactness(verification: Verification) -> str:
    """Say in what precision the runs were compared, and how closely."""
    subject = verification.subject
    number = "float64" if subject.double else "fp32"
    if subject.settings.reproducible and not subject.torch_ddp:
        return f"{number}, to the bit"
    tolerance = DOUBLE if subject.double else SINGLE
    return f"{number}, to {tolerance.relative:.0e} of each tensor's size"


def steps(verification: Verification) -> str:
    """Say which steps were trained, such as ``steps 0 to 2 and 5``."""
    numbers = verification.subject.steps
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] == numbers[-2] + 1:
        return f"steps {numbers[0]} to {numbers[-1]}"
    first = f"steps {numbers[0]} to {numbers[-2]}" if len(numbers) > 2 else f"steps {numbers[0]}"
    return f"{first} and {numbers[-1]}, the epoch's last"


def _headline(verification: Verification) -> str:
    subject, comparison = verification.subject, verification.comparison
    num = subject.num_devices
    who = f"{num} rank{'s' * (num > 1)}" + (" with torch's DistributedDataParallel" if subject.torch_ddp else "")
    if verification.same:
        verb = "train" if num > 1 else "trains"
        return (
            f"The same training run: {who} {verb} as one process does, over {steps(verification)} "
            f"({exactness(verification)})."
        )
    if comparison is None:
        return f"Not the same training run: the {who} cannot train together."
    if comparison.first is None:
        return f"Not the same training run twice: one process and {who} agree, but no two runs do to the bit."
    return (
        f"Not the same training run: {who} part from one process in the {tell(comparison.first)}, the first of all "
        "that was compared."
    )
