"""`examine` on all ranks of a job that has begun: every machine looks at itself, and versions are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.comm.collectives import all_gather_object
from lockstep.comm.world import init
from lockstep.env import RankEnv
from lockstep.errors import EXIT_CODE, LockstepError
from lockstep.study.doctor.examine import examine
from lockstep.study.doctor.finding import Finding, NotChecked, Severity
from lockstep.study.doctor.gather.versions import version_facts
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.plan import Plan
from lockstep.study.doctor.record import from_record, to_record
from lockstep.study.doctor.report import Report, worst_first
from lockstep.study.doctor.topics import versions
from lockstep.study.doctor.topics.versions import VersionFacts

MEETING_S = 20.0
"""How long ranks wait for each other; a launcher starts them within seconds."""


_OF_MEETING = (Kind.MASTER_ADDRESS, Kind.HOSTNAME_LOOPBACK, Kind.HOSTNAME_UNRESOLVED)
_OF_GLOO = (Kind.INTERFACE_LOOPBACK, Kind.INTERFACE_VIRTUAL, Kind.INTERFACE_MISSING)


@dataclass(frozen=True)
class Part:
    """What one rank has to tell: the report on its machine, if it is the first rank there."""

    versions: VersionFacts
    report: Report | None

    def to_record(self) -> dict[str, Any]:
        """Return it in a form that travels."""
        return {"versions": asdict(self.versions), "report": None if self.report is None else to_record(self.report)}

    @staticmethod
    def from_record(record: dict[str, Any]) -> Part:
        """Return the part of which `to_record` made ``record``."""
        report = record["report"]
        return Part(VersionFacts(**record["versions"]), None if report is None else from_record(report))


def examine_together(plan: Plan, env: RankEnv, environ: Mapping[str, str]) -> tuple[Report | None, int]:
    """Return what this rank has to show, if anything, and the exit code, which is the same on all ranks.

    Collective: every rank. Blocks until all have come, at most `MEETING_S`. Rank zero shows what was found on all
    machines. If the ranks do not meet, the first one of each machine shows that, and what it found there.

    Raises:
        ConfigurationError: There is no such script or task, or it cannot be read.
    """
    is_first = env.local_rank == 0
    report: Report | None = None
    if is_first:
        report = examine(plan if env.rank == 0 else replace(plan, target=None), environ)
    part = Part(version_facts(env.rank, on_gpus=plan.on_gpus), report)
    try:
        with init(backend="gloo", device="cpu", timeout_s=MEETING_S) as world:
            records = all_gather_object(part.to_record(), group=world.group)
    except LockstepError as error:
        return None if report is None else _alone(report, error), EXIT_CODE
    merged = merge([Part.from_record(record) for record in records])
    return merged if env.rank == 0 else None, merged.exit_code


def merge(parts: Sequence[Part]) -> Report:
    """Return one report of all machines, with the versions of all ranks; the first part has the first machine's."""
    reports = [part.report for part in parts if part.report is not None]
    first = reports[0]
    findings = list(versions.look([part.versions for part in parts]))
    missed = list(first.not_checked)
    seen = [*first.seen, ("versions", f"{versions.seen(parts[0].versions)}; {len(parts)} ranks compared")]
    hosts = _unique([report.host for report in reports])
    for host, report in zip(hosts, reports, strict=True):
        name = host if len(reports) > 1 else ""
        findings += [replace(_as_met(finding, report.plan), where=finding.where or name) for finding in report.findings]
    for host, report in zip(hosts[1:], reports[1:], strict=True):
        seen += [(f"{topic}, {host}", line) for topic, line in report.seen]
        known = {one.what for one in missed}
        others = [one for one in report.not_checked if one.what not in known and not one.what.startswith("a script")]
        missed += [replace(one, what=f"{one.what} on {host}") for one in others]
    if len(reports) > 1:
        missed.append(NotChecked("how fast the machines reach each other", "only a run under load tells"))
    return replace(
        first,
        host=", ".join(hosts),
        seen=tuple(seen),
        findings=worst_first(_once(findings)),
        not_checked=tuple(missed),
        seconds=max(report.seconds for report in reports),
    )


def _as_met(finding: Finding, plan: Plan) -> Finding:
    """Return a finding about how ranks reach each other as a note: they have just done so, over Gloo."""
    is_disproved = finding.kind in _OF_MEETING or (finding.kind in _OF_GLOO and not plan.on_gpus)
    if not is_disproved or finding.severity is not Severity.HANG:
        return finding
    return replace(finding, severity=Severity.NOTE, found=f"{finding.found} The ranks met all the same.")


def _once(findings: list[Finding]) -> list[Finding]:
    """Return the findings; those that are the same on several machines once, with all their names."""
    places: dict[Finding, list[str]] = {}
    for finding in findings:
        places.setdefault(replace(finding, where=""), []).append(finding.where)
    return [replace(finding, where=", ".join(where)) for finding, where in places.items()]


def _unique(hosts: list[str]) -> list[str]:
    """Return the names of hosts, numbered where two are alike, as those of containers may be."""
    return [f"{host} (machine {index})" if hosts.count(host) > 1 else host for index, host in enumerate(hosts)]


def _alone(report: Report, error: LockstepError) -> Report:
    cause, *advice = str(error).splitlines()
    finding = Finding(
        Kind.RANKS_DO_NOT_MEET,
        Severity.HANG,
        cause,
        f"No run can begin: ranks wait for each other. This examination waited {MEETING_S:g} s.",
        " ".join(advice) or "Look at the other ranks' output.",
        "ping -c 1 $MASTER_ADDR && nc -vz $MASTER_ADDR $MASTER_PORT",
    )
    missed = NotChecked("versions across ranks", "the ranks did not meet")
    return replace(report, findings=worst_first([finding, *report.findings]), not_checked=(*report.not_checked, missed))
