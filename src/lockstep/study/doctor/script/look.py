"""Everything that a script's syntax tree is looked at for."""

from __future__ import annotations

from dataclasses import replace

from lockstep.study.doctor.finding import Finding, NotChecked, Severity
from lockstep.study.doctor.quantities import listed
from lockstep.study.doctor.script import data, devices, files, model, one_rank, seeds
from lockstep.study.doctor.script.traits import ScriptFacts

_PARTS = (data, seeds, devices, model, files, one_rank)


def look(facts: ScriptFacts) -> list[Finding]:
    """Return what is found in a script, in the order of its lines."""
    found = [finding for part in _PARTS for finding in part.look(facts)]
    return _notes_once(sorted(found, key=_line))


def _line(finding: Finding) -> int:
    return int(finding.where.rpartition(":")[2])


def _notes_once(findings: list[Finding]) -> list[Finding]:
    """Return the findings; of notes of one kind the first only, which names the lines of the others."""
    found: list[Finding] = []
    for finding in findings:
        is_note = finding.severity is Severity.NOTE
        alike = [other for other in findings if (other.kind, other.cost) == (finding.kind, finding.cost)]
        if not is_note or len(alike) == 1:
            found.append(finding)
        elif finding is alike[0]:
            lines = listed([str(_line(other)) for other in alike[1:]], 8)
            found.append(replace(finding, found=f"{finding.found} The same in line{'s' * (len(alike) > 2)} {lines}."))
    return found


def not_checked(facts: ScriptFacts) -> list[NotChecked]:
    """Return what of a script cannot be told from its text."""
    if facts.manager is not None:
        return [NotChecked("samplers and devices of the script", f"{facts.manager} takes care of them")]
    if not facts.is_distributed and not facts.uses_task:
        because = "it has no DistributedDataParallel and no init_process_group, here in this file"
        return [NotChecked("samplers, devices and collectives of the script", because)]
    if facts.is_distributed and facts.starts_elsewhere and not facts.starts_lockstep:
        return [NotChecked("whether each rank has its own GPU", "the ranks are set up in another file than this")]
    return []


def seen(facts: ScriptFacts) -> str:
    """Say in a line what kind of script it is."""
    if facts.uses_task:
        return f"{facts.script.path} has a lockstep.Task"
    engine = "lockstep's" if any(facts.is_ours(call) for call in facts.wrappings) else "torch's"
    if facts.wrappings:
        return f"{facts.script.path} uses {engine} DistributedDataParallel; it was read, not run"
    kind = (
        "starts ranks"
        if facts.is_distributed
        else f"leaves that to {facts.manager}"
        if facts.manager
        else "has one rank"
    )
    return f"{facts.script.path} {kind}; it was read, not run"
