"""What the rules of advice need to know, from what was recorded of a run."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from lockstep.study.report.facts import Facts
from lockstep.study.report.figures import Figures
from lockstep.study.report.read import Recorded
from lockstep.study.report.traffic import Traffic


def find_facts(run: Recorded, device: str, figures: Figures, traffic: Traffic | None) -> Facts:
    """Return the facts of a run on a kind of ``device``."""
    session = run.last
    settings = _dict(session.get("settings"))
    gradient_bytes = _whole(session.get("gradient_bytes"))
    pinned = settings.get("pin_memory")
    return Facts(
        num_ranks=len(figures.by_rank),
        device=device,
        num_hosts=len(_hosts(run)),
        critical=figures.critical,
        computing_s=sum(parts.forward_s + parts.backward_s for parts in figures.by_rank.values()),
        straggler=figures.straggler,
        workers=_whole(session.get("workers", settings.get("workers"))),
        num_buckets=0 if traffic is None else traffic.num_buckets,
        bucket_latency_s=0.0 if traffic is None else min(traffic.best_s.values()),
        trip_s=0.0 if traffic is None else traffic.median_s,
        best_trip_s=0.0 if traffic is None else median(traffic.best_s.values()),
        load_per_core=_load_per_core(run),
        gradient_bytes=(0 if traffic is None else traffic.total_bytes) if gradient_bytes is None else gradient_bytes,
        wire=settings.get("wire") is not None,
        strategy=str(settings.get("strategy", "ddp")),
        accumulate=_whole(settings.get("accumulate")) or 1,
        paused_share={name: paused / figures.total_s for name, paused in figures.paused_s.items() if figures.total_s},
        cores=_cores(run),
        busy_cores=_busy_cores(run),
        global_batch_size=_whole(session.get("global_batch_size")),
        precision=str(settings.get("precision", "fp32")),
        pinned=pinned if isinstance(pinned, bool) else None,
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _hosts(run: Recorded) -> set[str]:
    return {record.host for record in run.ranks.values()}


def _cores(run: Recorded) -> int | None:
    """Return the cores of the machine; None if it is not known, or there are several machines."""
    cores = str(_dict(_dict(run.last.get("provenance")).get("machine")).get("cores", ""))
    return int(cores) if len(_hosts(run)) == 1 and cores.isdecimal() and int(cores) else None


def _busy_cores(run: Recorded) -> float | None:
    """Return how many cores the ranks used, with their loader processes; None if it is not known of each."""
    used = []
    for record in run.ranks.values():
        lines = [line.figures for line in record.machine if "cpu_percent" in line.figures]
        if not lines:
            return None
        used.append(fmean(line["cpu_percent"] + line.get("workers_cpu_percent", 0.0) for line in lines) / 100)
    return sum(used)


def _load_per_core(run: Recorded) -> float | None:
    """Return how many threads wanted to run for each core, by what the first rank saw; None if it is not known."""
    lines = run.ranks[min(run.ranks)].machine
    loads = [line.figures["load"] for line in lines if "load" in line.figures]
    cores = _cores(run)
    return fmean(loads) / cores if loads and cores else None
