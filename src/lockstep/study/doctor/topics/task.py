"""A task: does its batch divide, is there enough data, and does a layer look at the whole batch?"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import listed, plural, size

_FEW_FOR_STATISTICS = 16
"""Mean and variance of fewer samples are so noisy that accuracy suffers, as papers on batch norm found."""


@dataclass(frozen=True)
class TaskFacts:
    """What a task says without being trained.

    Attributes:
        name: Its own.
        global_batch_size: Samples in a step over all devices.
        world_size: Devices.
        num_samples: In the data set; ``None`` for a stream, or if it was not built.
        drop_last: Whether a last batch that is not full is left out.
        batchnorms: Names of the BatchNorm layers that are not synchronised; ``None`` if the model was not built.
        weight_bytes: Of parameters and buffers.
        trained_bytes: Of the parameters that are trained.
        sample_bytes: Of the first sample's tensors and arrays; ``None`` if it was not loaded.
        sample_s: How long it took to load it, the second time.
    """

    name: str
    global_batch_size: int
    world_size: int
    num_samples: int | None = None
    drop_last: bool = False
    batchnorms: tuple[str, ...] | None = None
    weight_bytes: int | None = None
    trained_bytes: int = 0
    sample_bytes: int | None = None
    sample_s: float | None = None

    @property
    def share(self) -> int:
        """Samples of each device in a step; of the largest part if they differ."""
        return -(-self.global_batch_size // self.world_size)

    @property
    def checkpoint_bytes(self) -> int | None:
        """Weights, and twice those that are trained for an optimizer such as Adam."""
        return None if self.weight_bytes is None else self.weight_bytes + 2 * self.trained_bytes

    @property
    def batch_bytes(self) -> int | None:
        """Of one device's batch."""
        return None if self.sample_bytes is None else self.sample_bytes * self.share


def look(facts: TaskFacts) -> list[Finding]:
    """Return what is wrong with a task on so many devices."""
    return [*_divides(facts), *_data(facts), *_batchnorm(facts)]


def fails(target: str, message: str) -> Finding:
    """Return the finding of a task whose file or function fails with ``message``."""
    cause, *rest = message.splitlines()
    advice = [line for line in rest if not line.startswith(" ")]  # indented is the line of the file
    return Finding(
        Kind.TASK_FAILS,
        Severity.HANG,
        f"The task cannot be made: {cause}",
        "The run fails in the same way, on every rank.",
        " ".join(advice) or "Correct what it says.",
        f"lockstep train {target} --steps 1",
    )


def seen(facts: TaskFacts) -> str:
    """Say in a line what the task is."""
    parts = [f"{facts.name}: global batch {facts.global_batch_size}, {facts.share} on each of {facts.world_size}"]
    if facts.num_samples is not None:
        parts.append(f"{facts.num_samples:,} samples")
    if facts.weight_bytes is not None:
        parts.append(f"{size(facts.weight_bytes)} of weights")
    if facts.sample_s is not None:
        parts.append(f"a sample loads in {1e3 * facts.sample_s:.2g} ms")
    return ", ".join(parts)


def _divides(facts: TaskFacts) -> list[Finding]:
    batch, world = facts.global_batch_size, facts.world_size
    if batch % world == 0:
        return []
    below = batch // world * world
    nearest = below or world
    sizes = f"{below} or {below + world}" if below else f"{world}"
    return [
        Finding(
            Kind.BATCH_NOT_DIVISIBLE,
            Severity.HANG,
            f"The global batch of {batch} samples does not divide by {plural(world, 'device')}.",
            "The run is refused at the start.",
            f"Set it to {sizes}, or take another number of devices.",
            f"lockstep train TASK.py --devices {world} --global-batch-size {nearest}",
        )
    ]


def _data(facts: TaskFacts) -> list[Finding]:
    if facts.num_samples is None or facts.num_samples >= facts.global_batch_size:
        return []
    return [
        Finding(
            Kind.DATASET_TOO_SMALL,
            Severity.HANG if facts.drop_last else Severity.SLOW,
            f"The data set has {plural(facts.num_samples, 'sample')}, fewer than a global batch of "
            f"{facts.global_batch_size}.",
            "The run is refused at the start."
            if facts.drop_last
            else "Each epoch is one step, in which devices have little to do or nothing.",
            "Make the global batch smaller.",
            f"lockstep train TASK.py --global-batch-size {max(facts.world_size, _below(facts))}",
        )
    ]


def _below(facts: TaskFacts) -> int:
    assert facts.num_samples is not None
    return facts.num_samples // facts.world_size * facts.world_size


def _batchnorm(facts: TaskFacts) -> list[Finding]:
    if not facts.batchnorms or facts.world_size == 1:
        return []
    found = [
        Finding(
            Kind.BATCHNORM_NOT_SYNCHRONISED,
            Severity.WRONG if facts.share < _FEW_FOR_STATISTICS else Severity.NOTE,
            f"{plural(len(facts.batchnorms), 'BatchNorm layer')} ({listed(list(facts.batchnorms), 2)}) will normalise "
            f"with the {plural(facts.share, 'sample')} of their own device, of {facts.global_batch_size}.",
            "It is another run than on one device"
            + (", and statistics of so few samples cost accuracy." if facts.share < _FEW_FOR_STATISTICS else "."),
            "Synchronise them, or train in reproducible mode, or use a norm that looks at one sample.",
            "model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model)  # in the function of Task.model\n"
            f"lockstep train TASK.py --reproducible {facts.world_size}  # or this",
        )
    ]
    rest = (facts.num_samples or 0) % facts.global_batch_size
    if 0 < rest < 2 * facts.world_size and not facts.drop_last:
        found.append(
            Finding(
                Kind.LAST_BATCH_TINY,
                Severity.WRONG,
                f"The last batch of an epoch has {plural(rest, 'sample')} for {plural(facts.world_size, 'device')}.",
                "BatchNorm on a single sample is an error, or statistics that mean nothing.",
                "Leave that batch out.",
                "drop_last=True,  # in lockstep.Task(...)",
            )
        )
    return found
