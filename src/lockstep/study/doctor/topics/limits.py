"""Limits of the system: open files, locked memory, processes."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import GIB, plural, size

_FILES_OF_A_PROCESS = 64
_FILES_OF_A_PEER = 4
_FILES_OF_A_BATCH = 16
"""Files that a batch on its way from a worker keeps open: one for each of its tensors."""

_FEW_FILES = 1024
_BATCHES_AHEAD = 2
_THREADS_OF_A_RANK = 32
"""Threads that torch, NCCL or Gloo and autograd start in a rank, about, besides those that compute."""


@dataclass(frozen=True)
class LimitFacts:
    """Limits of this process; ``None`` stands for none.

    Attributes:
        open_files: The soft limit.
        open_files_hard: What it may be raised to.
        locked_bytes: Of memory that may be pinned.
        processes: And threads, of this user or container.
        processes_of: What limits them, in words.
        running: How many of them there are.
        ranks: Of this machine.
        world_size: Of the job.
        workers: Loader processes of each rank.
        threads: That each process computes with.
        has_infiniband: Whether there is an active port.
        long_temp_folder: The folder for temporary files, if its name is too long for loader processes.
    """

    open_files: int | None
    open_files_hard: int | None
    locked_bytes: int | None
    processes: int | None = None
    processes_of: str = "this user"
    running: int = 0
    ranks: int = 1
    world_size: int = 1
    workers: int = 0
    threads: int = 1
    has_infiniband: bool = False
    long_temp_folder: str | None = None

    @property
    def files_needed(self) -> int:
        """Files that a rank will have open, about."""
        batches = self.workers * _BATCHES_AHEAD * _FILES_OF_A_BATCH
        return _FILES_OF_A_PROCESS + _FILES_OF_A_PEER * self.world_size + batches

    @property
    def processes_needed(self) -> int:
        """Processes and threads that the ranks will start, about."""
        return self.ranks * (_THREADS_OF_A_RANK + self.threads + self.workers * (2 + self.threads))


def look(facts: LimitFacts) -> list[Finding]:
    """Return which limits the run would meet."""
    return [*_open_files(facts), *_locked(facts), *_processes(facts), *_temp_folder(facts)]


def seen(facts: LimitFacts) -> str:
    """Say the limits in a line."""
    files = "any number of" if facts.open_files is None else f"{facts.open_files:,}"
    locked = "any amount of" if facts.locked_bytes is None else size(facts.locked_bytes)
    processes = "any number of" if facts.processes is None else f"{facts.processes:,}"
    return f"{files} open files, {locked} locked memory, {processes} processes"


def _open_files(facts: LimitFacts) -> list[Finding]:
    limit = facts.open_files
    if limit is None:
        return []
    needed = facts.files_needed
    if needed > limit:
        severity = Severity.HANG
        cost = "A rank fails with 'Too many open files', perhaps only after hours."
    elif limit <= _FEW_FILES and facts.workers:
        severity = Severity.NOTE
        cost = (
            "Batches of many tensors, or a data set that keeps its files open, meet the limit: 'Too many open files'."
        )
    else:
        return []
    most = facts.open_files_hard
    wanted = 65536 if most is None else min(65536, most)
    return [
        Finding(
            Kind.OPEN_FILES,
            severity,
            f"A process may have {plural(limit, 'file')} open; a rank of this run needs about {needed}.",
            cost,
            "Raise the limit in the shell that starts the run."
            if wanted > limit
            else "Only root can raise it: ask for it, or let workers pass batches without files.",
            f"ulimit -n {wanted}"
            if wanted > limit
            else "torch.multiprocessing.set_sharing_strategy('file_system')  # at the top of the script",
        )
    ]


def _locked(facts: LimitFacts) -> list[Finding]:
    if facts.locked_bytes is None or facts.locked_bytes >= GIB or not facts.has_infiniband:
        return []
    return [
        Finding(
            Kind.LOCKED_MEMORY,
            Severity.HANG,
            f"A process may lock {size(facts.locked_bytes)} of memory, and there is an InfiniBand card.",
            "NCCL cannot register its buffers with the card and fails at the first collective.",
            "Lift the limit: in the container, or in /etc/security/limits.conf for a login.",
            "docker run --ulimit memlock=-1 ..."
            "\necho '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf  # or this",
        )
    ]


def _processes(facts: LimitFacts) -> list[Finding]:
    if facts.processes is None or facts.running + facts.processes_needed <= facts.processes:
        return []
    return [
        Finding(
            Kind.PROCESSES_LIMIT,
            Severity.HANG,
            f"{facts.processes_of[:1].upper()}{facts.processes_of[1:]} may have {facts.processes} processes and "
            f"threads; {facts.running} run, and the ranks need about {facts.processes_needed} more.",
            "A thread or a loader worker cannot be started: 'Resource temporarily unavailable', or a silent end.",
            "Raise the limit, or use fewer loader workers and threads.",
            f"docker run --pids-limit -1 ...  # or: ulimit -u {2 * (facts.running + facts.processes_needed)}",
        )
    ]


def _temp_folder(facts: LimitFacts) -> list[Finding]:
    if facts.long_temp_folder is None or not facts.workers:
        return []
    return [
        Finding(
            Kind.TEMP_FOLDER,
            Severity.HANG,
            f"The folder for temporary files has a name of {len(facts.long_temp_folder)} characters: "
            f"{facts.long_temp_folder}.",
            "Loader workers hand tensors over by sockets in it, whose names may have 107: the first batch never comes.",
            "Name a shorter folder. Ranks of lockstep run and train take another one for these sockets.",
            "export TMPDIR=/tmp",
        )
    ]
