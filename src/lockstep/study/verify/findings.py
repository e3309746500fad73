"""The causes that verify knows, and what it says about each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lockstep.study.verify.experiment import Subject


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
class Finding:
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
