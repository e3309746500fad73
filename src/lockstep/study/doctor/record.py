"""The report as one JSON object, for programs and for other ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.study.doctor.finding import Finding, NotChecked, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.plan import Plan
from lockstep.study.doctor.report import Report, verdict


def to_json(report: Report) -> str:
    """Write everything; the names of the fields stay as they are."""
    return json.dumps(to_record(report), indent=2)


def to_record(report: Report) -> dict[str, Any]:
    """Return everything in numbers, texts, lists and dicts."""
    return {
        "verdict": verdict(report),
        "exit_code": report.exit_code,
        "counts": {severity.value: report.count(severity) for severity in Severity},
        "host": report.host,
        "plan": asdict(report.plan) | {"checkpoint": str(report.plan.checkpoint)},
        "seen": dict(report.seen),
        "findings": [_finding(finding) for finding in report.findings],
        "not_checked": [asdict(missed) for missed in report.not_checked],
        "seconds": round(report.seconds, 2),
    }


def from_record(record: dict[str, Any]) -> Report:
    """Return the report of which `to_record` made ``record``."""
    return Report(
        plan=Plan(**{**record["plan"], "checkpoint": Path(record["plan"]["checkpoint"])}),
        host=record["host"],
        seen=tuple(record["seen"].items()),
        findings=tuple(_read_finding(finding) for finding in record["findings"]),
        not_checked=tuple(NotChecked(**missed) for missed in record["not_checked"]),
        seconds=record["seconds"],
    )


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


def _read_finding(record: dict[str, str]) -> Finding:
    texts = {name: record[name] for name in ("found", "cost", "fix", "paste", "where")}
    return Finding(Kind(record["kind"]), Severity(record["severity"]), **texts)
