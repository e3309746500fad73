"""CPU cores: how many there are to use, and whether ranks, loader workers and threads fit on them."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.study.doctor.finding import Finding, Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.quantities import plural

_BUSY = 0.5


@dataclass(frozen=True)
class CoreFacts:
    """Cores, and what is to run on them.

    Attributes:
        logical: That the machine has.
        affinity: That this process may run on.
        physical: Without those that share one with another; ``None`` if the system does not tell.
        quota: Cores' worth of time that the control group allows; ``None`` without a limit.
        load: Processes that want to run, on average over the last minute.
        ranks: Of this machine.
        workers: Loader processes of each rank; ``None`` if nobody said.
        on_gpus: Whether ranks compute on GPUs.
        omp: ``OMP_NUM_THREADS``, if it is set to a number.
        mkl: ``MKL_NUM_THREADS``, likewise.
        started_threads: Threads that torch chose in this process.
    """

    logical: int
    affinity: int
    physical: int | None = None
    quota: float | None = None
    load: float = 0.0
    ranks: int = 1
    workers: int | None = None
    on_gpus: bool = False
    omp: int | None = None
    mkl: int | None = None
    started_threads: int = 1

    @property
    def usable(self) -> float:
        """Cores' worth of time that this process and its children get."""
        return min(self.affinity, self.quota) if self.quota is not None else self.affinity

    @property
    def threads(self) -> int | None:
        """Threads that each rank was told to use; ``None`` if it was told nothing."""
        return self.mkl if self.mkl is not None else self.omp


def look(facts: CoreFacts) -> list[Finding]:
    """Return where cores are too few, taken, or left idle."""
    pinned = _affinity(facts)
    found = [*_quota(facts), *pinned, *_threads(facts)]
    if not pinned:  # otherwise that is why they are too few
        found += _shortage(facts)
    if facts.load > _BUSY * facts.affinity:
        found.append(_busy(facts))
    return found


def _shortage(facts: CoreFacts) -> list[Finding]:
    if not facts.on_gpus and facts.ranks > max(1.0, facts.usable):
        return [_ranks(facts)]
    if facts.workers and facts.ranks * (facts.workers + 1) > facts.usable:
        return [_workers(facts)]
    return []


def seen(facts: CoreFacts) -> str:
    """Say in a line what there is for whom."""
    limits = [f"{facts.affinity} of {plural(facts.logical, 'core')}"]
    if facts.physical is not None and facts.physical < facts.logical:
        limits.append(f"{facts.physical} physical")
    if facts.quota is not None:
        limits.append(f"a quota of {facts.quota:g}")
    per_rank = facts.usable / facts.ranks
    each = f"; {per_rank:.3g} for each of {plural(facts.ranks, 'rank')}"
    if facts.workers:
        each += f", {per_rank / (facts.workers + 1):.2g} for each of its {plural(facts.workers + 1, 'process', 'es')}"
    return ", ".join(limits) + each


def seen_threads(facts: CoreFacts) -> str:
    """Say in a line how many threads a rank will use."""
    told = [
        f"{name}={value}" for name, value in (("OMP_NUM_THREADS", facts.omp), ("MKL_NUM_THREADS", facts.mkl)) if value
    ]
    if told:
        return ", ".join(told)
    chosen = f"lockstep run sets {_fair(facts)}, torchrun 1, python alone uses {facts.started_threads}"
    return f"OMP_NUM_THREADS is not set: {chosen}"


def _fair(facts: CoreFacts) -> int:
    return max(1, int(min(facts.usable, facts.physical or facts.usable) // facts.ranks))


def _quota(facts: CoreFacts) -> list[Finding]:
    quota = facts.quota
    if quota is None or quota >= facts.affinity or (facts.threads is not None and facts.ranks * facts.threads <= quota):
        return []
    return [
        Finding(
            Kind.CPU_QUOTA,
            # Launchers tell several ranks how many threads to use; one process goes by what it sees.
            Severity.SLOW if facts.ranks == 1 and facts.started_threads > quota else Severity.NOTE,
            f"The container may use {quota:g} cores' worth of time, but programs see {plural(facts.affinity, 'core')}.",
            "What starts a thread for each core that it sees is stopped by the kernel for a part of every tenth of a "
            "second; one rank that is stopped makes all others wait.",
            "Say how many threads a rank may use, or start the container with more.",
            f"export OMP_NUM_THREADS={_fair(facts)}  # or: docker run --cpus {facts.affinity}",
        )
    ]


def _affinity(facts: CoreFacts) -> list[Finding]:
    needed = facts.ranks * (1 + (facts.workers or 0))
    if facts.affinity >= min(facts.logical, needed):
        return []
    return [
        Finding(
            Kind.CPU_AFFINITY,
            Severity.SLOW,
            f"This process may run on {facts.affinity} of the machine's {plural(facts.logical, 'core')}, "
            f"for {plural(needed, 'process', 'es')}.",
            "Ranks and loader workers take turns on them, while other cores may be idle.",
            "Ask the scheduler for more cores a task; SLURM gives one unless it is told otherwise.",
            f"srun --cpus-per-task={1 + (facts.workers or 0)} ...  # or: taskset -c 0-{facts.logical - 1}",
        )
    ]


def _threads(facts: CoreFacts) -> list[Finding]:
    threads = facts.threads
    if threads is None:
        return []
    told = "MKL_NUM_THREADS" if facts.mkl is not None else "OMP_NUM_THREADS"
    total = facts.ranks * threads
    fair = _fair(facts)
    if total > max(facts.usable, facts.ranks):
        return [
            Finding(
                Kind.THREADS_TOO_MANY,
                Severity.SLOW,
                f"{told}={threads} on {plural(facts.ranks, 'rank')} are {total} threads for {facts.usable:g} cores.",
                "Threads that wait for each other take turns on a core: operations take several times as long.",
                "Let the ranks together use each core once.",
                f"export {told}={fair}",
            )
        ]
    if not facts.on_gpus and 2 * total <= facts.usable and fair > threads:
        return [
            Finding(
                Kind.THREADS_TOO_FEW,
                Severity.SLOW,
                f"{told}={threads} on {plural(facts.ranks, 'rank')} use {total} of {facts.usable:g} cores.",
                "The other cores are idle while the ranks compute.",
                "Let the ranks together use each core once, or start more ranks.",
                f"export {told}={fair}",
            )
        ]
    return []


def _ranks(facts: CoreFacts) -> Finding:
    most = max(1, int(facts.usable))
    return Finding(
        Kind.RANKS_OVER_CORES,
        Severity.SLOW,
        f"{plural(facts.ranks, 'rank')} compute on {facts.usable:g} CPU cores.",
        f"They take turns: a step takes about {facts.ranks / facts.usable:.1f} times as long as with a core each.",
        "Start as many as there are cores.",
        f"lockstep run --devices {most} train.py",
    )


def _workers(facts: CoreFacts) -> Finding:
    assert facts.workers is not None
    processes = facts.ranks * (facts.workers + 1)
    fitting = max(0, int(facts.usable // facts.ranks) - 1)
    return Finding(
        Kind.WORKERS_OVER_CORES,
        Severity.SLOW,
        f"{plural(facts.ranks, 'rank')} with {plural(facts.workers, 'loader worker')} each are {processes} processes "
        f"for {facts.usable:g} cores: {facts.usable / processes:.2g} of a core for each.",
        "Workers take time from the ranks that they load for, and one slow rank makes all wait.",
        "Use fewer.",
        f"lockstep train TASK.py --workers {fitting}  # or num_workers={fitting} in a script",
    )


def _busy(facts: CoreFacts) -> Finding:
    return Finding(
        Kind.MACHINE_BUSY,
        Severity.NOTE,
        f"{facts.load:.1f} processes wanted to run over the last minute, on {plural(facts.affinity, 'core')}.",
        "Ranks share their cores with others, and whatever is measured now is too slow.",
        "See who it is.",
        "ps -eo pid,user,pcpu,comm --sort=-pcpu | head",
    )
