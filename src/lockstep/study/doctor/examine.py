"""Examine a machine, a script and a task for a run that is planned, on one machine or on all of a job."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lockstep.comm.collectives import all_gather_object
from lockstep.comm.world import init
from lockstep.env import RankEnv
from lockstep.errors import EXIT_CODE, LockstepError
from lockstep.launcher.api import num_cores
from lockstep.study.doctor.findings import (
    HANG,
    NOTE,
    SLOW,
    WRONG,
    Facts,
    Finding,
    NotChecked,
    Plan,
    Report,
    judge,
    report_from,
    worst_first,
)
from lockstep.study.doctor.gpus import read_gpus
from lockstep.study.doctor.machine import Switches, read_cores, read_disk, read_limits, read_memory
from lockstep.study.doctor.network import (
    Rendezvous,
    Versions,
    read_host,
    read_network,
    read_port,
    read_versions,
)
from lockstep.study.doctor.script import path_of, read_script
from lockstep.study.doctor.task import ALL_S, TaskFacts, read_task

RENDEZVOUS_S = 20.0
"""How long ranks wait for each other; a launcher starts them within seconds."""


def make_plan(
    target: str | None,
    env: RankEnv,
    environ: Mapping[str, str],
    *,
    devices: int | None = None,
    machines: int = 1,
    workers: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    checkpoint: str | None = None,
) -> Plan:
    """Return the run that is planned: what was asked for, else what `lockstep run` would do here.

    What ``env`` says of a job that has begun comes before what was asked for.
    """
    num_gpus = torch.cuda.device_count()
    port = environ.get("MASTER_PORT", "")
    plan = Plan(
        devices=devices or num_gpus or num_cores(),
        machines=machines,
        on_gpus=num_gpus > 0,
        workers=workers,
        master_addr=master_addr or environ.get("MASTER_ADDR"),
        master_port=master_port or (int(port) if port.isdigit() else None),
        checkpoint=checkpoint or ".",
        target=target,
    )
    if env.world_size == 1:
        return plan
    return replace(
        plan,
        devices=env.local_world_size,
        machines=-(-env.world_size // env.local_world_size),
        master_addr=env.master_addr,
        master_port=env.master_port,
        is_running=True,
    )


@dataclass
class _Notes:
    """What comes together while the machine is examined."""

    seen: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    missed: list[NotChecked] = field(default_factory=list)

    def add(self, facts: Facts, missed: Sequence[NotChecked] = ()) -> None:
        """Judge facts, and note what was seen."""
        if facts.summary:
            self.seen[facts.topic] = facts.summary
        self.findings += judge(facts)
        self.missed += missed


def examine(plan: Plan, environ: Mapping[str, str], task_s: float = ALL_S) -> Report:
    """Return what on this machine, and in the script or task of ``plan``, will slow or hang the run.

    Blocks under ten seconds: what does not answer by then is not checked. Writes some MiB to the checkpoint folder and
    removes them; imports a task's file, in a process of its own that has ``task_s``, but never runs a script.

    Raises:
        ConfigurationError: There is no such script or task, or it cannot be read.
    """
    began = time.perf_counter()
    notes = _Notes()
    plan, task = _examine_target(plan, notes, task_s)
    notes.add(*read_gpus(plan))
    network = read_network(plan, environ, task.trained_bytes if task else None)
    notes.add(network)
    notes.add(read_host(plan, environ, network.interfaces))
    port = read_port(plan)
    if isinstance(port, NotChecked):
        notes.missed.append(port)
    else:
        notes.add(port)
    if plan.machines > 1 and not plan.is_running:
        because = "it takes all of them: start `lockstep doctor` as their ranks, see --help"
        notes.missed.append(NotChecked("whether the machines reach each other, and their versions", because))
    notes.add(read_limits(plan, has_infiniband=network.has_infiniband))
    cores = read_cores(plan, environ)
    notes.add(cores)
    notes.seen["threads"] = cores.threads_summary
    notes.add(read_memory(plan, task))
    if plan.workers and (task is None or task.batch_bytes is None):
        because = "only a Task tells how large a batch is"
        notes.missed.append(NotChecked("whether /dev/shm holds the loaders' batches", because))
    notes.add(read_disk(plan.checkpoint, task.checkpoint_bytes if task else None))
    notes.add(Switches(environ))
    if not plan.is_running:  # otherwise those of all ranks are compared
        notes.add(Versions((read_versions(on_gpus=plan.on_gpus),)))
    findings, missed = worst_first(notes.findings), notes.missed
    return Report(plan, socket.gethostname(), notes.seen, findings, tuple(missed), time.perf_counter() - began)


def _examine_target(plan: Plan, notes: _Notes, task_s: float) -> tuple[Plan, TaskFacts | None]:
    """Read the script, and the task if it has one; the script may say how many loader workers there will be."""
    target = plan.target
    if target is None:
        notes.missed.append(NotChecked("a script or task", "none was named: lockstep doctor train.py"))
        return plan, None
    script = read_script(target, plan.world_size)
    notes.add(script, script.not_checked)
    if plan.workers is None:
        plan = replace(plan, workers=script.most_workers)
    is_named = str(path_of(target)) != target
    if not script.uses_task and not is_named:
        return plan, None
    task, missed = read_task(target, plan, is_named=is_named, seconds=task_s)
    notes.missed += missed
    if task is not None:
        notes.add(task)
    return plan, task if isinstance(task, TaskFacts) else None


def examine_job(plan: Plan, env: RankEnv, environ: Mapping[str, str]) -> tuple[Report | None, int]:
    """Return what this rank has to show, if anything, and the exit code, which is the same on all ranks.

    Collective: every rank. Blocks until all have come, at most `RENDEZVOUS_S`. Rank zero shows what was found on all
    machines. If the ranks do not meet, the first one of each machine shows that, and what it found there.

    Raises:
        ConfigurationError: There is no such script or task, or it cannot be read.
    """
    report: Report | None = None
    if env.local_rank == 0:
        report = examine(plan if env.rank == 0 else replace(plan, target=None), environ)
    own = {"versions": read_versions(on_gpus=plan.on_gpus), "report": report.to_record() if report else None}
    try:
        with init(backend="gloo", device="cpu", timeout_s=RENDEZVOUS_S) as world:
            parts = all_gather_object(own, group=world.group)
    except LockstepError as error:
        if report is None:
            return None, EXIT_CODE
        findings = worst_first([*judge(Rendezvous(str(error))), *report.findings])
        missed = (*report.not_checked, NotChecked("versions across ranks", "the ranks did not meet"))
        return replace(report, findings=findings, not_checked=missed), EXIT_CODE
    versions = Versions(tuple(part["versions"] for part in parts))
    merged = merge([report_from(part["report"]) for part in parts if part["report"]], versions)
    return merged if env.rank == 0 else None, merged.exit_code


def merge(reports: Sequence[Report], versions: Versions) -> Report:
    """Return one report of all machines, with the versions of all ranks; the first one is the first machine's."""
    first = reports[0]
    names = [report.host for report in reports]
    # Containers may have the same name; then they are numbered.
    hosts = [f"{name} (machine {index})" if names.count(name) > 1 else name for index, name in enumerate(names)]
    findings, seen, missed = judge(versions), dict(first.seen), list(first.not_checked)
    seen[versions.topic] = versions.summary
    places: dict[Finding, list[str]] = {}
    for host, report in zip(hosts, reports, strict=True):
        for finding in report.findings:
            own = finding.where or (host if len(reports) > 1 else "")
            places.setdefault(_as_met(replace(finding, where=""), report.plan), []).append(own)
        if report is not first:
            seen |= {f"{topic}, {host}": line for topic, line in report.seen.items()}
            known = {one.what for one in missed}
            new = [one for one in report.not_checked if one.what not in known and not one.what.startswith("a script")]
            missed += [replace(one, what=f"{one.what} on {host}") for one in new]
    findings += [replace(finding, where=", ".join(where)) for finding, where in places.items()]
    if len(reports) > 1:
        missed.append(NotChecked("how fast the machines reach each other", "only a run under load tells"))
    seconds = max(report.seconds for report in reports)
    return Report(first.plan, ", ".join(hosts), seen, worst_first(findings), tuple(missed), seconds)


def _as_met(finding: Finding, plan: Plan) -> Finding:
    """Return a finding about how ranks reach each other as a note: they have just done so, over Gloo."""
    disproved = {"master-address", "hostname-loopback"}
    if not plan.on_gpus:
        disproved |= {"interface-local", "interface-missing"}
    if finding.kind not in disproved or finding.severity is not HANG:
        return finding
    return replace(finding, severity=NOTE, found=f"{finding.found} The ranks met all the same.")


# The report for a terminal; plain text in a pipe.

_TITLES = {
    HANG: ("Will hang or fail", "bold red"),
    WRONG: ("Will be wrong", "bold magenta"),
    SLOW: ("Will be slow", "bold yellow"),
    NOTE: ("To note", "bold cyan"),
}


def show(report: Report, console: Console) -> None:
    """Print the report; without the blanks that fill lines up where it goes to a file or another program."""
    if console.is_terminal:
        _print(report, console)
        return
    with console.capture() as captured:
        _print(report, console)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _print(report: Report, console: Console) -> None:
    """Print what was seen, what was found, worst first, and what was not checked; the verdict comes last."""
    target = f"{report.plan.target} as " if report.plan.target else ""
    console.print(Text(f"lockstep doctor: {target}{report.plan.describe()}, seen from {report.host}", style="bold"))
    console.print(Padding(_grid(report.seen), (1, 0, 1, 2)))
    for severity, (title, style) in _TITLES.items():
        findings = [finding for finding in report.findings if finding.severity is severity]
        if findings:
            console.print(Rule(Text(f"{title} ({len(findings)})", style=style), align="left", style=style))
            for finding in findings:
                _print_finding(finding, console, style)
            console.print()
    if report.not_checked:
        console.print(Rule(Text("Not checked", style="bold"), align="left", style="dim"))
        for one in report.not_checked:
            console.print(Padding(_grid({"-": f"{one.what}, because {one.because}"}, gap=1), (0, 0, 0, 2)))
        console.print()
    ends = f" Exit code {report.exit_code}; took {report.seconds:.1f} s."
    style = "bold" if report.exit_code else "bold green"
    console.print(Text(report.verdict, style=style) + Text(ends, style="dim"))


def _grid(rows: Mapping[str, str], gap: int = 2) -> Table:
    grid = Table.grid(padding=(0, gap, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column()
    for label, text in rows.items():
        grid.add_row(label, Text(text))
    return grid


def _print_finding(finding: Finding, console: Console, style: str) -> None:
    console.print()
    console.print(Text.assemble("  ", (finding.kind, style), f"  {finding.where}" if finding.where else ""))
    rows = {"found": finding.found, "cost": finding.cost, "fix": finding.fix}
    console.print(Padding(_grid(rows), (0, 0, 0, 4)))
    for line in finding.paste.splitlines():
        # Never wrapped, so that it can be pasted.
        console.print(Text(f"           {line}", style="green"), soft_wrap=True)
    console.print(Text(f"    more   {finding.link}", style="dim"))
