"""Examine a machine, a script and a task for a run that is planned, on one machine or on all of a job."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from textwrap import indent
from typing import Any

import torch
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from lockstep.comm.collectives import all_gather_object
from lockstep.comm.world import init
from lockstep.env import RankEnv
from lockstep.errors import EXIT_CODE, LockstepError
from lockstep.launcher.api import num_cores
from lockstep.study.common import grid
from lockstep.study.doctor import machine, network
from lockstep.study.doctor.findings import WORDS, Finding, NotChecked, Plan, Report, Severity, judge, worst_first
from lockstep.study.doctor.script import Script, path_of, read_script
from lockstep.study.doctor.task import TaskFacts, read_task
from lockstep.study.links import probe_link

# How long ranks wait for each other; a launcher starts them within seconds.
RENDEZVOUS_S = 20.0

# How long the link between machines is measured.
PROBE_S = 3.0


def run(asked: Plan, env: RankEnv, environ: Mapping[str, str]) -> tuple[Report | None, int]:
    """Return what this process has to show, if anything, and the exit code, which is the same on all ranks.

    Collective: every rank, if a job has begun: then ``env`` comes before what was ``asked``. Without a number of
    devices, it is what `lockstep run` would take here.

    Raises:
        ConfigurationError: There is no such script or task, or it cannot be read or made.
    """
    num_gpus = torch.accelerator.device_count()
    plan = replace(asked, devices=asked.devices or num_gpus or num_cores(), on_gpus=num_gpus > 0)
    if env.world_size == 1:
        report = examine(plan, environ)
        return report, report.exit_code
    # The ranks that run are what counts, not what the flags of this one process suppose.
    plan = replace(
        plan,
        devices=env.local_world_size,
        machines=-(-env.world_size // env.local_world_size),
        master_addr=env.master_addr,
        master_port=env.master_port,
        is_running=True,
    )
    return examine_job(plan, env, environ)


def examine(plan: Plan, environ: Mapping[str, str]) -> Report:
    """Return what on this machine, and in the script or task of ``plan``, will slow or hang the run.

    Blocks under ten seconds: what does not answer by then is not checked. Writes some MiB to the checkpoint folder and
    removes them; imports a task's file, in a process of its own that is ended in time, but never runs a script.

    Raises:
        ConfigurationError: There is no such script or task, or it cannot be read or made.
    """
    began = time.perf_counter()
    missed: list[NotChecked] = []
    script: Script | None = None
    task: TaskFacts | None = None
    if (target := plan.target) is not None:
        script = read_script(target)
        missed += script.not_checked
        if plan.workers is None:
            plan = replace(plan, workers=script.num_workers)
        is_named = str(path_of(target)) != target
        if script.uses_task or is_named:
            task, unknown = read_task(target, plan, is_named=is_named)
            missed += unknown
    elif not plan.is_running:
        missed.append(NotChecked("a script or task", "none was named: lockstep doctor train.py"))
    gpus, unknown = machine.read_gpus(plan)
    missed += unknown
    port = network.read_port(plan)
    if isinstance(port, NotChecked):
        missed.append(port)
    if plan.machines > 1 and not plan.is_running:
        because = "it takes all of them: start `lockstep doctor` as their ranks, see --help"
        missed.append(NotChecked("whether the machines reach each other, and their versions", because))
    cores, memory = machine.read_cores(plan, environ), machine.read_memory(plan, task)
    interfaces = network.read_network(plan, environ)
    seen = {"devices": gpus.summary, "network": interfaces.summary, "cores": cores.summary, "memory": memory.summary}
    if task is not None:
        seen["task"] = task.summary
    if not plan.is_running:  # otherwise those of all ranks are compared
        seen["versions"] = network.Versions((network.read_versions(),)).summary
    disk = machine.read_disk(plan.checkpoint, task.checkpoint_bytes if task else 0)
    limits, switches = machine.read_limits(plan), machine.Switches(environ)
    facts = (script, task, gpus, interfaces, port, limits, cores, memory, disk, switches)
    findings = worst_first([finding for each in facts for finding in judge(each)])
    return Report(plan, socket.gethostname(), seen, findings, tuple(missed), time.perf_counter() - began)


def examine_job(plan: Plan, env: RankEnv, environ: Mapping[str, str]) -> tuple[Report | None, int]:
    """Return what this rank has to show, if anything, and the exit code, which is the same on all ranks.

    Collective: every rank. Blocks until all have come, at most `RENDEZVOUS_S`. Rank zero shows what was found on all
    machines. If the ranks do not meet, the first one of each machine shows that, and what it found there.

    Raises:
        ConfigurationError: There is no such script or task, or it cannot be read.
    """
    report: Report | None = None
    if env.local_rank == 0:  # one rank of a machine examines it, and the first one the script
        report = examine(plan if env.rank == 0 else replace(plan, target=None), environ)
    own = {"versions": network.read_versions(), "report": asdict(report) if report else None}
    try:
        with init(backend="gloo", device="cpu", timeout_s=RENDEZVOUS_S) as world:
            parts = all_gather_object(own, group=world.group)
            probed = None
            if plan.machines > 1 and not plan.on_gpus:  # GPUs may have a network of their own
                probed = network.ProbedLink(probe_link(world, limit_s=PROBE_S), plan.machines)
    except LockstepError as error:
        if report is None:
            return None, EXIT_CODE
        # Nobody could be asked: each machine shows what it knows by itself.
        findings = worst_first([*judge(network.Rendezvous(str(error))), *report.findings])
        missed = (*report.not_checked, NotChecked("versions across ranks", "the ranks did not meet"))
        return replace(report, findings=findings, not_checked=missed), EXIT_CODE
    versions = network.Versions(tuple(part["versions"] for part in parts))
    merged = merge([report_from(part["report"]) for part in parts if part["report"]], versions, probed)
    return merged if env.rank == 0 else None, merged.exit_code


def report_from(record: dict[str, Any]) -> Report:
    """Return the report of which `dataclasses.asdict` made ``record``, which came from another rank as JSON."""
    findings = tuple(Finding(**each | {"severity": Severity(each["severity"])}) for each in record["findings"])
    missed = tuple(NotChecked(**each) for each in record["not_checked"])
    return Report(**record | {"plan": Plan(**record["plan"]), "findings": findings, "not_checked": missed})


def merge(reports: Sequence[Report], versions: network.Versions, probed: network.ProbedLink | None = None) -> Report:
    """Return one report of all machines, with the versions of all ranks; the first one is the first machine's."""
    first = reports[0]
    # How ranks reach each other need not be feared: they have just met, over Gloo.
    disproved = {"master-address", "hostname-loopback"}
    if not first.plan.on_gpus:
        disproved |= {"interface-local", "interface-missing"}
    seen = {"versions": versions.summary}
    if probed is not None:
        disproved.add("interface-slow")
        seen["link"] = f"all-reduces between {probed.machines} machines run at {probed.link.source}"
    # What is the same on several machines is shown once, with the names of all.
    places: dict[Finding, list[str]] = {}
    hosts = []
    for index, report in enumerate(reports):
        # Containers may have the same name; so machines are numbered, too.
        host = f"{report.host} (machine {index})" if len(reports) > 1 else report.host
        hosts.append(host)
        seen |= {f"{topic}, {host}" if index else topic: line for topic, line in report.seen.items()}
        for finding in report.findings:
            if finding.kind not in disproved:
                where = finding.where or (host if len(reports) > 1 else "")
                places.setdefault(replace(finding, where=""), []).append(where)
    measured = judge(versions) + ([] if probed is None else judge(probed))
    findings = measured + [replace(finding, where=", ".join(where)) for finding, where in places.items()]
    missed = dict.fromkeys(one for report in reports for one in report.not_checked)
    seconds = max(report.seconds for report in reports)
    return Report(first.plan, ", ".join(hosts), seen, worst_first(findings), tuple(missed), seconds)


# The report for a terminal; plain text in a pipe.

_STYLES = dict(zip(Severity, ("bold red", "bold magenta", "bold yellow", "bold cyan"), strict=True))


def show(report: Report, console: Console) -> None:
    """Print what was seen, what was found, worst first, and what was not checked; the verdict comes last."""
    target = f"{report.plan.target} as " if report.plan.target else ""
    console.print(Text(f"lockstep doctor: {target}{report.plan.describe()}, seen from {report.host}", style="bold"))
    console.print(Padding(grid(report.seen.items(), gap=2), (1, 0, 1, 2), expand=False))
    for finding in report.findings:
        title = f"{WORDS[finding.severity].capitalize()}: {finding.kind}"
        console.print(Text.assemble((title, _STYLES[finding.severity]), f"  {finding.where}".rstrip()))
        rows = {"found": finding.found, "cost": finding.cost, "fix": finding.fix}
        console.print(Padding(grid(rows.items(), gap=2), (0, 0, 0, 2), expand=False))
        # Never wrapped, so that it can be pasted.
        console.print(Text(indent(finding.paste, " " * 9), style="green"), soft_wrap=True)
        console.print(Text(f"  more   {finding.link}\n", style="dim"))
    if report.not_checked:
        console.print(Text("Not checked", style="bold"))
        lines = "".join(f"  {one.what}: {one.because}\n" for one in report.not_checked)
        console.print(Text(lines), soft_wrap=not console.is_terminal)
    style = "bold" if report.exit_code else "bold green"
    ends = f" Exit code {report.exit_code}; took {report.seconds:.1f} s."
    console.print(Text(report.verdict, style=style) + Text(ends, style="dim"))
