"""`examine`: gather the facts of this machine and of a script, and look at them."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from lockstep.study.doctor.finding import Finding, NotChecked
from lockstep.study.doctor.gather.cores import core_facts
from lockstep.study.doctor.gather.disk import disk_facts
from lockstep.study.doctor.gather.gpus import gpu_facts, link_facts
from lockstep.study.doctor.gather.memory import limit_facts, memory_facts
from lockstep.study.doctor.gather.network import host_facts, network_facts, port_facts
from lockstep.study.doctor.gather.task import ALL_S, TaskFails, task_facts
from lockstep.study.doctor.gather.versions import version_facts
from lockstep.study.doctor.plan import Plan
from lockstep.study.doctor.report import Report, worst_first
from lockstep.study.doctor.script import look as script
from lockstep.study.doctor.script.traits import ScriptFacts
from lockstep.study.doctor.target import names_task, read_script
from lockstep.study.doctor.topics import (
    cores,
    disk,
    gpus,
    hostname,
    limits,
    links,
    memory,
    network,
    port,
    switches,
    versions,
)
from lockstep.study.doctor.topics import task as tasks
from lockstep.study.doctor.topics.switches import SwitchFacts
from lockstep.study.doctor.topics.task import TaskFacts


class _Notes:
    """What comes together while topics are looked at."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.findings: list[Finding] = []
        self.missed: list[NotChecked] = []

    def add(self, topic: str, line: str, findings: list[Finding], missed: list[NotChecked] | None = None) -> None:
        self.seen.append((topic, line))
        self.findings += findings
        self.missed += missed or []


def examine(plan: Plan, environ: Mapping[str, str], task_s: float = ALL_S) -> Report:
    """Return what on this machine, and in the script or task of ``plan``, will slow or hang the run.

    Blocks under ten seconds: what does not answer by then is not checked. Writes some MiB to the checkpoint folder and
    removes them; imports a task's file, in a process of its own that has ``task_s``, but never runs a script.

    Raises:
        ConfigurationError: There is no such script or task, or it cannot be read.
    """
    began = time.perf_counter()
    notes = _Notes()
    plan, task = _target(plan, notes, task_s)
    _devices(plan, notes)
    _network(plan, environ, task, notes)
    _machine(plan, environ, task, notes)
    return Report(
        plan=plan,
        host=socket.gethostname(),
        seen=tuple(notes.seen),
        findings=worst_first(notes.findings),
        not_checked=tuple(notes.missed),
        seconds=time.perf_counter() - began,
    )


def _target(plan: Plan, notes: _Notes, task_s: float) -> tuple[Plan, TaskFacts | None]:
    """Look at the script, and at the task if it has one; the script may say how many loader workers there will be."""
    target = plan.target
    if target is None:
        notes.missed.append(NotChecked("a script or task", "none was named: lockstep doctor train.py"))
        return plan, None
    facts = ScriptFacts(read_script(target), plan.world_size, torch.cuda.device_count())
    notes.add("script", script.seen(facts), script.look(facts), script.not_checked(facts))
    if plan.workers is None:
        plan = replace(plan, workers=facts.most_workers)
    if not (facts.uses_task or names_task(target)):
        return plan, None
    try:
        task, missed = task_facts(target, plan, task_s)
    except TaskFails as error:
        notes.findings.append(tasks.fails(target, str(error)))
        return plan, None
    if task is not None:
        notes.add("task", tasks.seen(task), tasks.look(task))
    notes.missed += missed
    return plan, task


def _devices(plan: Plan, notes: _Notes) -> None:
    gpu, missed = gpu_facts(plan)
    notes.add("devices", gpus.seen(gpu), gpus.look(gpu), missed)
    link, missed = link_facts(gpu)
    notes.missed += missed
    if link.links:
        notes.add("links", links.seen(link), links.look(link))


def _network(plan: Plan, environ: Mapping[str, str], task: TaskFacts | None, notes: _Notes) -> None:
    net = network_facts(plan, environ, None if task is None else task.trained_bytes)
    notes.add("network", network.seen(net), network.look(net))
    host = host_facts(plan, environ, net.interfaces)
    notes.add("host name", hostname.seen(host), hostname.look(host))
    place, missed = port_facts(plan)
    notes.missed += missed
    if place is not None:
        notes.add("port", port.seen(place), port.look(place))
    if plan.machines > 1 and not plan.is_running:
        because = "it takes all of them: start `lockstep doctor` as their ranks, see --help"
        notes.missed.append(NotChecked("whether the machines reach each other, and their versions", because))
    has_infiniband = any(found.state == "ACTIVE" for found in net.infiniband)
    limit, missed = limit_facts(plan, threads=torch.get_num_threads(), has_infiniband=has_infiniband)
    notes.add("limits", limits.seen(limit), limits.look(limit), missed)


def _machine(plan: Plan, environ: Mapping[str, str], task: TaskFacts | None, notes: _Notes) -> None:
    core = core_facts(plan, environ)
    notes.add("cores", cores.seen(core), cores.look(core))
    notes.seen.append(("threads", cores.seen_threads(core)))
    room = memory_facts(plan, task)
    notes.add("memory", memory.seen(room), memory.look(room))
    if plan.workers and room.batch_bytes is None:
        because = "only a Task tells how large a batch is"
        notes.missed.append(NotChecked("whether /dev/shm holds the loaders' batches", because))
    folder = disk_facts(plan.checkpoint, None if task is None else task.checkpoint_bytes)
    notes.add("checkpoints", disk.seen(folder), disk.look(folder))
    on = SwitchFacts(environ)
    notes.add("debug switches", switches.seen(on), switches.look(on))
    if not plan.is_running:  # otherwise those of all ranks are compared
        notes.add("versions", versions.seen(version_facts(0, on_gpus=plan.on_gpus)), [])
