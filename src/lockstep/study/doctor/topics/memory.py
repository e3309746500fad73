"""Memory: what loader workers and NCCL share in /dev/shm, and what the ranks need at least."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import MIB, plural, size

RANK_BYTES = 250 * MIB
"""Of a process that has imported torch, before it has a model."""

_AHEAD = 2
"""Batches that each loader process loads before they are asked for; torch's own number."""

NCCL_BYTES = 64 * MIB
"""What NCCL shares in /dev/shm for each rank of a machine, about: buffers of every channel between processes."""

_DOCKER_DEFAULT = 64 * MIB


@dataclass(frozen=True)
class MemoryFacts:
    """Memory, and what is known of the need for it.

    Attributes:
        shm_bytes: Size of /dev/shm; ``None`` if there is none.
        shm_free_bytes: Of it.
        available_bytes: Memory that processes can get without swapping, within the limit of the container.
        limit_bytes: That of the container, if it has one.
        ranks: Of this machine.
        workers: Loader processes of each rank; ``None`` if nobody said.
        on_gpus: Whether NCCL serves the ranks, and weights lie on GPUs.
        batch_bytes: Of one rank's batch, where a task tells.
        weight_bytes: Of the model's parameters and buffers, where a task tells.
        trained_bytes: Of the parameters that are trained.
    """

    shm_bytes: int | None
    shm_free_bytes: int
    available_bytes: int
    limit_bytes: int | None = None
    ranks: int = 1
    workers: int | None = None
    on_gpus: bool = False
    batch_bytes: int | None = None
    weight_bytes: int | None = None
    trained_bytes: int = 0

    @property
    def shm_need_bytes(self) -> int:
        """What loaders and NCCL will have in /dev/shm at a time, as far as it can be told."""
        batches = self.ranks * (self.workers or 0) * (_AHEAD + 1)
        return batches * (self.batch_bytes or 0) + (self.ranks * NCCL_BYTES if self.on_gpus and self.ranks > 1 else 0)

    @property
    def rank_need_bytes(self) -> int:
        """What a CPU rank needs at least: the interpreter, weights, gradients, Adam's state."""
        return RANK_BYTES + (self.weight_bytes or 0) + 3 * self.trained_bytes


def look(facts: MemoryFacts) -> list[Finding]:
    """Return where memory will not do."""
    return [*_shared(facts), *_plain(facts)]


def seen(facts: MemoryFacts) -> str:
    """Say in a line how much there is of both kinds."""
    shm = "no /dev/shm" if facts.shm_bytes is None else f"{size(facts.shm_free_bytes)} free of {size(facts.shm_bytes)}"
    limit = f", the container's limit is {size(facts.limit_bytes)}" if facts.limit_bytes is not None else ""
    return f"{size(facts.available_bytes)} available{limit}; /dev/shm has {shm}"


def _shared(facts: MemoryFacts) -> list[Finding]:
    total, need = facts.shm_bytes or 0, facts.shm_need_bytes
    is_needed = need > 0 or bool(facts.workers)
    if need > facts.shm_free_bytes:
        what = [f"{facts.ranks} x {plural(facts.workers, 'loader worker')}"] if facts.workers else []
        what += ["NCCL"] if facts.on_gpus and facts.ranks > 1 else []
        free = f"/dev/shm has {size(facts.shm_free_bytes)} free of {size(total)}"
        found = f"{free}; {size(need)} is needed for {' and '.join(what)}."
        severity = Severity.HANG
    elif total <= _DOCKER_DEFAULT:
        found = f"/dev/shm has {size(total)}, as containers have by default." if total else "There is no /dev/shm."
        severity = Severity.HANG if is_needed else Severity.NOTE
    else:
        return []
    gib = max(1, -(-2 * need // 2**30))
    return [
        Finding(
            Kind.SHARED_MEMORY_SMALL,
            severity,
            found,
            "Loader workers die of a bus error when it is full, and NCCL fails to start with processes on one machine."
            + ("" if is_needed else " This run uses neither; lockstep's shm backend does not need /dev/shm."),
            "Start the container with more, or make it larger.",
            f"docker run --shm-size={gib}g ...  # or: sudo mount -o remount,size={gib}g /dev/shm",
        )
    ]


def _plain(facts: MemoryFacts) -> list[Finding]:
    if facts.on_gpus:
        return []
    need = facts.ranks * facts.rank_need_bytes
    if need <= facts.available_bytes:
        return []
    weights = f" with {size(facts.weight_bytes)} of weights" if facts.weight_bytes else ""
    most = max(1, facts.available_bytes // facts.rank_need_bytes)
    return [
        Finding(
            Kind.MEMORY_SMALL,
            Severity.HANG,
            f"{plural(facts.ranks, 'rank')}{weights} need {size(need)} at least, before activations; "
            f"{size(facts.available_bytes)} are available.",
            "The kernel kills a rank when memory is gone, and the run ends.",
            "Start fewer ranks, or divide the optimizer's state among them.",
            f"lockstep train TASK.py --devices {most} --strategy ddp-zero1",
        )
    ]
