"""The same as JSON; its shape is described in docs/design/verify.md."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from typing import Any

from lockstep.study.verify.diagnose import Verification
from lockstep.study.verify.differences import Difference
from lockstep.study.verify.verdict import exactness, sentences

VERSION = 1
"""Grows when a name or a meaning changes; new names leave it as it is."""


def to_json(verification: Verification, name: str) -> str:
    """Return everything."""
    subject, comparison = verification.subject, verification.comparison
    record = {
        "version": VERSION,
        "task": name,
        "same": verification.same,
        "setup": {
            "num_devices": subject.num_devices,
            "engine": "torch-ddp" if subject.torch_ddp else "ddp",
            "steps": list(subject.steps),
            "seed": subject.settings.seed,
            "reproducible": subject.settings.reproducible,
            "precision": "float64" if subject.double else "fp32",
            "exactness": exactness(verification),
            "why_not_float64": verification.why_single or None,
        },
        "repeatable": verification.repeatable,
        "first_difference": _difference(comparison.first) if comparison and comparison.first else None,
        "largest_differences": {kind: _finite(size) for kind, size in comparison.worst.items()} if comparison else None,
        "causes": [{**asdict(finding), "cause": finding.cause.value} for finding in verification.findings],
        "remark": verification.remark or None,
        "explained": verification.explained,
        "experiments": [asdict(row) for row in verification.rows],
        "verdict": sentences(verification),
    }
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def _difference(difference: Difference) -> dict[str, Any]:
    return {**asdict(difference), "size": _finite(difference.size), "ranks": list(difference.ranks)}


def _finite(size: float) -> float | None:
    return size if isfinite(size) else None
