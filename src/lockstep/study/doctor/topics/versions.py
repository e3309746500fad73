"""Versions, on one rank and across the ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import listed

_MATTERS = {
    "torch": Severity.HANG,
    "nccl": Severity.HANG,
    "lockstep": Severity.HANG,
    "cuda": Severity.WRONG,
    "python": Severity.NOTE,
    "driver": Severity.NOTE,
}
"""How bad it is if ranks differ in it."""

_COSTS = {
    "torch": "Ranks may not understand each other: the start fails or waits, or kernels give other results.",
    "nccl": "NCCL refuses ranks of another version, or waits for them.",
    "lockstep": "Ranks may not make the same collectives in the same order, and then all wait.",
    "cuda": "Kernels differ, so ranks compute other roundings from the same numbers.",
    "python": "Pickled objects and the order of sets may differ.",
    "driver": "Speed may differ; all wait for the slowest.",
}

_INSTALL = {
    "torch": "torch=={}",
    "lockstep": "lockstep-torch=={}",
    "nccl": "torch  # NCCL comes with it",
    "cuda": "torch",
}


@dataclass(frozen=True)
class VersionFacts:
    """The versions of one rank, and what it computes on.

    Attributes:
        rank: Whose they are.
        host: Its machine.
        nccl: Empty in a torch without it, like ``cuda`` and ``driver``.
        processor: The CPU's model, or the GPU's.
    """

    rank: int
    host: str
    python: str
    torch: str
    lockstep: str
    cuda: str = ""
    nccl: str = ""
    driver: str = ""
    processor: str = ""


NAMES = tuple(field.name for field in fields(VersionFacts) if field.name in _MATTERS)


def look(ranks: Sequence[VersionFacts]) -> list[Finding]:
    """Return in what the ranks differ."""
    found = []
    for name in NAMES:
        values = _by_value(ranks, name)
        if len(values) > 1:
            newest = max(values, key=lambda value: len(values[value]))
            install = _INSTALL.get(name)
            found.append(
                Finding(
                    Kind.VERSIONS_DIFFER,
                    _MATTERS[name],
                    f"The ranks have different versions of {name}: {_say(values)}.",
                    _COSTS[name],
                    "Install the same everywhere.",
                    f"python -m pip install {install.format(newest)}"
                    if install
                    else f"{'python --version' if name == 'python' else 'nvidia-smi'}  # on each machine",
                )
            )
    processors = _by_value(ranks, "processor")
    if len(processors) > 1:
        found.append(
            Finding(
                Kind.MACHINES_DIFFER,
                Severity.SLOW,
                f"The ranks compute on different processors: {_say(processors)}.",
                "Every step takes as long as on the slowest, and roundings may differ between them.",
                "Use machines that are alike, or give the faster ranks larger parts of each batch.",
                "lockstep train TASK.py --shares 2,1",
            )
        )
    return found


def seen(facts: VersionFacts) -> str:
    """Say the versions of one rank in a line."""
    known = [f"{name} {getattr(facts, name)}" for name in NAMES if getattr(facts, name)]
    return ", ".join(known)


def _by_value(ranks: Sequence[VersionFacts], name: str) -> dict[str, list[int]]:
    values: dict[str, list[int]] = {}
    for facts in ranks:
        values.setdefault(getattr(facts, name), []).append(facts.rank)
    return values


def _say(values: dict[str, list[int]]) -> str:
    parts = []
    for value, ranks in values.items():
        who = f"rank{'s' * (len(ranks) > 1)} {listed([str(rank) for rank in ranks])}"
        parts.append(f"{value or 'none'} on {who}")
    return "; ".join(parts)
