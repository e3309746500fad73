"""The report as one JSON object, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.report import Report, verdict


def to_json(report: Report) -> str:
    """Write everything; the names of the fields stay as they are."""
    plan = {name: str(value) if name == "checkpoint" else value for name, value in asdict(report.plan).items()}
    record: dict[str, Any] = {
        "verdict": verdict(report),
        "exit_code": report.exit_code,
        "counts": {severity.value: report.count(severity) for severity in Severity},
        "host": report.host,
        "plan": plan,
        "seen": dict(report.seen),
        "findings": [_finding(finding) for finding in report.findings],
        "not_checked": [asdict(missed) for missed in report.not_checked],
        "seconds": round(report.seconds, 2),
    }
    return json.dumps(record, indent=2)


def _finding(finding: Finding) -> dict[str, str]:
    return {
        "kind": finding.kind.value,
        "severity": finding.severity.value,
        "where": finding.where,
        "found": finding.found,
        "cost": finding.cost,
        "fix": finding.fix,
        "paste": finding.paste,
        "link": finding.link,
    }
