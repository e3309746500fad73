"""Environment variables that help to find faults and cost time when they stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind


@dataclass(frozen=True)
class Switch:
    """A variable, the values that cost something, how bad that is, and what it is."""

    name: str
    values: tuple[str, ...]
    severity: Severity
    cost: str


SWITCHES = (
    Switch(
        "CUDA_LAUNCH_BLOCKING",
        ("1",),
        Severity.SLOW,
        "The CPU waits for every kernel, so nothing overlaps: neither kernels nor communication.",
    ),
    Switch(
        "TORCH_DISTRIBUTED_DEBUG",
        ("DETAIL",),
        Severity.SLOW,
        "Every collective is preceded by another that compares its shapes, and each wrapper logs at every step.",
    ),
    Switch(
        "NCCL_P2P_DISABLE", ("1",), Severity.SLOW, "GPUs no longer talk over NVLink or PCIe, only through the host."
    ),
    Switch("NCCL_SHM_DISABLE", ("1",), Severity.SLOW, "GPUs without peer access talk over the network stack."),
    Switch("NCCL_DEBUG", ("TRACE",), Severity.SLOW, "NCCL writes a line for nearly every call."),
    Switch("NCCL_ALGO", (), Severity.NOTE, "NCCL's own choice, which follows size and topology, is off."),
    Switch("NCCL_PROTO", (), Severity.NOTE, "NCCL's own choice is off; some protocols corrupt data on some machines."),
    Switch(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", ("1",), Severity.SLOW, "Every tensor is allocated by the driver, which waits."
    ),
    Switch("MALLOC_CHECK_", ("1", "2", "3"), Severity.SLOW, "The C library checks its heap at every call."),
    Switch("PYTHONMALLOC", ("debug", "malloc_debug"), Severity.SLOW, "Python checks its heap at every call."),
    Switch("PYTHONDEVMODE", ("1",), Severity.SLOW, "Python checks its heap at every call, and shows all warnings."),
)
"""No values: any counts."""


@dataclass(frozen=True)
class SwitchFacts:
    """The environment, as far as `SWITCHES` name it."""

    environ: Mapping[str, str]


def look(facts: SwitchFacts) -> list[Finding]:
    """Return the switches that are on."""
    return [
        Finding(
            Kind.DEBUG_SWITCH,
            switch.severity,
            f"{switch.name}={facts.environ[switch.name]} is set.",
            switch.cost,
            "Unset it, unless you are looking for a fault right now.",
            f"unset {switch.name}",
        )
        for switch in SWITCHES
        if switch.name in facts.environ and (not switch.values or facts.environ[switch.name] in switch.values)
    ]


def seen(facts: SwitchFacts) -> str:
    """Say in a line how many are on."""
    on = [finding.found.removesuffix(" is set.") for finding in look(facts)]
    return ", ".join(on) or "none that cost time"
