"""Examine a machine, and a task, for a planned run, on one machine or on all machines of a job."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from textwrap import indent

import torch
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from lockstep.base.env import RankEnv
from lockstep.comm.collectives import all_gather_object
from lockstep.comm.world import init
from lockstep.errors import EXIT_CODE, ConfigurationError, LockstepError
from lockstep.launcher.api import num_cores
from lockstep.study.common import grid
from lockstep.study.doctor.findings import WORDS, Finding, NotChecked, Plan, Report, Severity, judge, worst_first
from lockstep.study.doctor.machine import read_machine, read_task
from lockstep.study.doctor.network import Job, read_network, read_versions
from lockstep.study.links import probe_link
from lockstep.train.task_file import is_script

# How long ranks wait for each other; a launcher starts them within seconds.
RENDEZVOUS_S = 20.0

# Time to measure the link between machines.
PROBE_S = 3.0


def run(asked: Plan, env: RankEnv, environ: Mapping[str, str]) -> tuple[Report | None, int]:
    """Return the report that this process has to print, if any, and the exit code, which is the same on all ranks.

    Collective: every rank, if this process is a rank of a job: then ``env`` overrides what was ``asked``. The default
    number of devices is that of `lockstep run`.

    Raises:
        ConfigurationError: The file does not exist, cannot be read, defines no task, or fails when it is imported.
    """
    if asked.target is not None and is_script(asked.target):
        raise ConfigurationError(
            f"{asked.target} defines no task: lockstep doctor examines machines and tasks, and starts no script.\n"
            f"Record a run of the script with lockstep run --monitor runs/a {asked.target}, and look at it with "
            "lockstep report runs/a."
        )
    num_gpus = torch.accelerator.device_count()
    plan = replace(asked, devices=asked.devices or num_gpus or num_cores(), on_gpus=num_gpus > 0)
    if env.world_size == 1:
        report = examine(plan, environ)
        return report, report.exit_code
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
    """Return what will slow or hang the planned run, on this machine and in its task.

    Blocks under ten seconds; what takes longer is not checked. Writes one MiB to the checkpoint folder and removes it.

    Raises:
        ConfigurationError: The task does not exist, cannot be read, or fails when it is created.
    """
    began = time.perf_counter()
    task, missed = (None, []) if plan.target is None else read_task(plan.target, plan)
    if plan.target is None and not plan.is_running:
        missed.append(NotChecked("a task", "none was given: lockstep doctor TASK.py"))
    machine, gpus_missed = read_machine(plan, environ, task)
    missed += gpus_missed
    network = read_network(plan, environ)
    if plan.machines > 1 and not plan.is_running:
        because = "this needs all of them: start `lockstep doctor` as the ranks of a job, see --help"
        missed.append(NotChecked("whether the machines reach each other, and their versions", because))
    # The versions of a running job are compared later.
    job = Job(plan, () if plan.is_running else (read_versions(),))
    seen = machine.seen | network.seen | (task.seen if task else {}) | job.seen
    findings = worst_first([finding for record in (task, machine, network) for finding in judge(record)])
    return Report(plan, socket.gethostname(), seen, findings, tuple(missed), time.perf_counter() - began)


def examine_job(plan: Plan, env: RankEnv, environ: Mapping[str, str]) -> tuple[Report | None, int]:
    """Return the report that this rank has to print, if any, and the exit code, which is the same on all ranks.

    Collective: every rank. Blocks until all ranks are connected, at most `RENDEZVOUS_S`. Rank zero prints the findings
    of all machines. If the ranks cannot connect, the first rank of each machine prints its own findings.

    Raises:
        ConfigurationError: The task does not exist, cannot be read, or fails when it is created.
    """
    report: Report | None = None
    if env.local_rank == 0:  # one rank examines a machine, and rank zero the task
        report = examine(plan if env.rank == 0 else replace(plan, target=None), environ)
    own_part = {"versions": read_versions(), "report": None if report is None else asdict(report)}
    try:
        with init(backend="gloo", device="cpu", timeout_s=RENDEZVOUS_S) as world:
            parts = all_gather_object(own_part, group=world.group)
            # GPUs may have a network of their own.
            link = probe_link(world, limit_s=PROBE_S) if plan.machines > 1 and not plan.on_gpus else None
    except LockstepError as error:
        if report is None:
            return None, EXIT_CODE
        findings = worst_first([*judge(Job(plan, error=str(error))), *report.findings])
        missed = (*report.not_checked, NotChecked("versions of all ranks", "the ranks could not connect"))
        return replace(report, findings=findings, not_checked=missed), EXIT_CODE
    reports = [Report.of(part["report"]) for part in parts if part["report"] is not None]
    job = Job(plan, [part["versions"] for part in parts], link)
    merged = merge(reports, job)
    return merged if env.rank == 0 else None, merged.exit_code


def merge(reports: Sequence[Report], job: Job) -> Report:
    """Return one report of all machines, with the findings about the job; the first report is the first machine's."""
    # The ranks are connected over Gloo, which disproves these.
    disproved = {"master-address", "hostname-loopback"}
    if not job.plan.on_gpus:
        disproved |= {"interface-local", "interface-missing"}
    seen = job.seen
    # A finding on several machines is shown once, with the names of all.
    places: dict[Finding, list[str]] = {}
    hosts = []
    for index, report in enumerate(reports):
        # Containers can have equal names, so machines are numbered.
        host = f"{report.host} (machine {index})" if len(reports) > 1 else report.host
        hosts.append(host)
        seen |= {f"{topic}, {host}" if index else topic: line for topic, line in report.seen.items()}
        for finding in report.findings:
            if finding.kind not in disproved:
                where = finding.where or (host if len(reports) > 1 else "")
                places.setdefault(replace(finding, where=""), []).append(where)
    findings = judge(job) + [replace(finding, where=", ".join(where)) for finding, where in places.items()]
    missed = dict.fromkeys(one for report in reports for one in report.not_checked)
    seconds = max(report.seconds for report in reports)
    return Report(reports[0].plan, ", ".join(hosts), seen, worst_first(findings), tuple(missed), seconds)


# The report for a terminal; plain text in a pipe.

_STYLES = dict(zip(Severity, ("bold red", "bold magenta", "bold yellow", "bold cyan"), strict=True))


def show(report: Report, console: Console) -> None:
    """Print what was seen, the findings, worst first, what was not checked, and the verdict."""
    target = f"{report.plan.target} as " if report.plan.target else ""
    console.print(Text(f"lockstep doctor: {target}{report.plan.describe()}, seen from {report.host}", style="bold"))
    console.print(Padding(grid(report.seen.items(), gap=2), (1, 0, 1, 2), expand=False))
    for finding in report.findings:
        title = f"{WORDS[finding.severity].capitalize()}: {finding.kind}"
        console.print(Text.assemble((title, _STYLES[finding.severity]), f"  {finding.where}".rstrip()))
        rows = {"found": finding.found, "cost": finding.cost, "fix": finding.fix}
        console.print(Padding(grid(rows.items(), gap=2), (0, 0, 0, 2), expand=False))
        # Not wrapped, so that it can be pasted.
        console.print(Text(indent(finding.paste, " " * 9), style="green"), soft_wrap=True)
        console.print(Text(f"  more   {finding.more}\n", style="dim"))
    if report.not_checked:
        console.print(Text("Not checked", style="bold"))
        lines = "".join(f"  {one.what}: {one.because}\n" for one in report.not_checked)
        console.print(Text(lines), soft_wrap=not console.is_terminal)
    style = "bold" if report.exit_code else "bold green"
    ends = f" Exit code {report.exit_code}; took {report.seconds:.1f} s."
    console.print(Text(report.verdict, style=style) + Text(ends, style="dim"))
