"""What to change first in a run, each with the gain that is predicted for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from lockstep.study.report.figures import Figures, Parts, Traffic
from lockstep.study.report.run_reader import Recorded
from lockstep.telemetry.stragglers import Straggler

__all__ = ["Advice", "Facts", "advise"]


# What the rules of advice need to know of a run, and what an advice is.

WORTH = 1.03
"""A gain below this is not worth a sentence."""


@dataclass(frozen=True)
class Facts:
    """What the rules need to know of a run; see `Figures` and `Traffic`.

    Args:
        num_ranks: Devices with a process each.
        device: ``cpu`` or ``cuda``.
        num_hosts: Machines that they are on.
        critical: Where the time of a step goes along the critical path.
        computing_s: Of all ranks together in a step: forward and backward; None: what the critical path has, each.
        straggler: A rank that keeps the others waiting in every step.
        workers: Loader processes a rank; None if not known.
        num_buckets: In which gradients travel; 0 if not known.
        bucket_latency_s: Of a bucket's trip, however small: at most the fastest one's.
        trip_s: Of a bucket's trip: the median.
        best_trip_s: The same of each bucket's fastest trip.
        load_per_core: How many threads wanted to run for each core of the machine; None if not known.
        gradient_bytes: All together.
        wire: Whether gradients are rounded for their way already.
        strategy: Who computes.
        accumulate: Micro-batches a step.
        paused_share: What training stood still for checkpoints and evaluations, as a share of the whole run, by event.
        cores: Of the machine; None if not known. On CPUs all ranks share them.
        busy_cores: How many of them the ranks used, all together; None if not known.
        global_batch_size: Samples of a step; None if not known.
        precision: In which it computes.
        bf16_speed: How many times as fast as now the device computes a layer in bf16; None if that was not measured.
        pinned: Whether a script's loader gives samples in page-locked memory; None if not known, and for `fit`.
    """

    num_ranks: int
    device: str
    critical: Parts
    computing_s: float | None = None
    straggler: Straggler | None = None
    workers: int | None = None
    num_buckets: int = 0
    bucket_latency_s: float = 0.0
    trip_s: float = 0.0
    best_trip_s: float = 0.0
    load_per_core: float | None = None
    num_hosts: int = 1
    gradient_bytes: int = 0
    wire: bool = False
    strategy: str = "ddp"
    accumulate: int = 1
    paused_share: Mapping[str, float] | None = None
    cores: int | None = None
    busy_cores: float | None = None
    global_batch_size: int | None = None
    precision: str = "fp32"
    bf16_speed: float | None = None
    pinned: bool | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.critical.total_s

    @property
    def computing(self) -> float:
        """Seconds of forward and backward along the critical path."""
        return self.critical.forward_s + self.critical.backward_s

    def gain(self, saved_s: float) -> float:
        """Return the throughput if a step were so much shorter, over that of now."""
        return self.step_s / (self.step_s - min(saved_s, 0.95 * self.step_s))

    def share(self, seconds: float) -> str:
        """Return a part of a step in words."""
        return f"{seconds / self.step_s:.0%}"

    def is_one_ranks(self, phase: str) -> bool:
        """Return whether a phase is slow on one rank only, which another rule says."""
        return self.straggler is not None and self.straggler.phase == phase


@dataclass(frozen=True)
class Advice:
    """One thing to change.

    Args:
        cause: What was measured.
        change: What to do.
        gain: The throughput then over that of now, as predicted.
        keeps_run: Whether it stays the same training run; a larger batch is another one.
        at_most: Whether the gain is a bound, of which only trying tells how much is to be had.
        settings: The change as settings of a run, by name; None as a value is the default. Empty if it is none.
    """

    cause: str
    change: str
    gain: float
    keeps_run: bool = True
    at_most: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All in one sentence."""
        about = "at most" if self.at_most else "about"
        return f"{self.cause}: {self.change} would give {about} {self.gain:.2f} times the throughput."


def milliseconds(seconds: float) -> str:
    """Return a duration in words."""
    found = 1e3 * seconds
    return f"{found:.0f} ms" if found >= 10 else f"{found:.1f} ms"


# Rules about what devices do: load, compute, update, stand still; and how many of them there should be.

LARGE_BYTES = 4 * 2**20
"""From so many bytes on it is they that take long, not each message's own delay."""

_MOST_WORKERS = 16
_TIMES = 4
"""How many times as large a batch is advised."""

_OVERHEAD = 0.25
"""From this part of a step on that does not grow with the batch, a larger one is worth a sentence."""

_HANDOVER_S = 0.0003
"""What a process waits for a micro-batch of a loader process at least: it comes through a pipe and shared memory."""


def loading(facts: Facts) -> list[Advice]:
    """Samples that a loader process prepares while the device computes are waited for no longer.

    On CPUs the work of loading stays, and all ranks share the cores: what they are busy with now takes at least as long
    as all cores together need for it.
    """
    wait_s, rest_s = facts.critical.data_wait_s, facts.step_s - facts.critical.data_wait_s
    if facts.workers is None or facts.is_one_ranks("loader"):
        return []
    # Without workers all loading is waiting; with them, they are busy all the time and still do not keep up.
    loading_s = wait_s if facts.workers == 0 else facts.workers * facts.step_s
    workers = min(_MOST_WORKERS, max(facts.workers + 1, math.ceil(loading_s / max(rest_s, 1e-9))))
    step_s = max(rest_s, loading_s / workers) + facts.accumulate * _HANDOVER_S
    step_s = max(step_s, _own_work_s(facts, workers))
    cause = f"Data wait is {facts.share(wait_s)} of the step"
    change = f"{workers} loader worker{'s' * (workers > 1)} a rank instead of {facts.workers} (--workers {workers})"
    return [Advice(cause, change, facts.step_s / step_s, settings={"workers": workers})]


def _own_work_s(facts: Facts, workers: int) -> float:
    """Return what the work of a step takes with all cores that so many loader processes a rank can get hold of.

    Nothing where ranks compute elsewhere, or it is not known. What other programs run is what the machine's load has
    more than these processes can make of it; cores are shared evenly among all that want one.
    """
    if facts.device != "cpu" or not facts.cores or facts.busy_cores is None:
        return 0.0
    before = max(facts.busy_cores, facts.num_ranks * (1 + (facts.workers or 0)))
    others = max(0.0, (facts.load_per_core or 0.0) * facts.cores - before)
    own = max(facts.busy_cores, facts.num_ranks * (1 + workers))
    free = facts.cores * min(1.0, own / (own + others))
    return min(facts.step_s, facts.busy_cores * facts.step_s / free)


def pinning(facts: Facts) -> list[Advice]:
    """Copies from memory that is not page-locked let a script wait, between its phases; `fit` has none of these."""
    if facts.device != "cuda" or facts.pinned is not False:
        return []
    between_s = facts.critical.other_s
    cause = (
        f"Samples are in pageable memory, and {facts.share(between_s)} of the step lies between phases, as copies do"
    )
    change = "page-locked samples (pin_memory=True in the DataLoader, non_blocking=True in .to())"
    return [Advice(cause, change, facts.gain(between_s), at_most=True)]


def slow_rank(facts: Facts) -> list[Advice]:
    """All others wait for a slow rank, so what it loses is lost to all."""
    slow = facts.straggler
    if slow is None:
        return []
    where = {"loader": "loading its data"}.get(slow.phase, slow.phase)
    took = f"{milliseconds(slow.took_s)} where {milliseconds(slow.usual_s)} is usual"
    cause = f"Rank {slow.rank} is slow in {where} ({took}), and the others wait for it"
    change = f"making rank {slow.rank} as fast as the others (look at its machine, its data and what else runs there)"
    return [Advice(cause, change, facts.gain(slow.lost_s))]


def too_small(facts: Facts) -> list[Advice]:
    """One device computes all shares one after the other, and exchanges nothing.

    On CPUs that one process has the cores of all ranks; how much of them an operation can use is not known, so it is
    taken to use none of the others: it is no slower than predicted.
    """
    critical = facts.critical
    if facts.num_ranks < 2 or facts.straggler is not None:  # then that is why the others wait
        return []
    computing_s = facts.computing_s or facts.num_ranks * facts.computing
    alone_s = computing_s + facts.num_ranks * critical.data_wait_s + critical.optimizer_s + critical.other_s
    is_large = facts.gradient_bytes >= LARGE_BYTES
    why = "Exchanging gradients takes longer than it saves" if is_large else "The model is too small to divide"
    cause = f"{why}: computing is {facts.share(facts.computing)} of the step on {facts.num_ranks} devices"
    change = "one device (--devices 1), or a larger global batch,"
    return [Advice(cause, change, facts.step_s / alone_s, settings={"devices": 1})]


def is_too_small(facts: Facts) -> bool:
    """Return whether one device is advised."""
    return any(each.gain >= WORTH for each in too_small(facts))


def fewer_devices(facts: Facts) -> list[Advice]:
    """Half as many devices compute twice as long and exchange a little less; worth it where one would not be best."""
    half = facts.num_ranks // 2
    if half < 2 or facts.straggler is not None or facts.device == "cpu" or is_too_small(facts):
        return []
    times = facts.num_ranks / half
    ring = (1 - 1 / half) / (1 - 1 / facts.num_ranks)  # of the bytes that each sends
    grows_s = facts.computing + facts.critical.data_wait_s
    step_s = facts.step_s - facts.critical.wire_s * (1 - ring) + grows_s * (times - 1)
    cause = f"Computing is {facts.share(facts.computing)} of the step on {facts.num_ranks} devices"
    return [Advice(cause, f"{half} devices (--devices {half})", facts.step_s / step_s, settings={"devices": half})]


def optimizer(facts: Facts) -> list[Advice]:
    """With ZeRO-1 each rank updates its part; the exchange carries the same bytes.

    Half of them, the parameters, come back after the update, beside nothing: half of what buckets need on their way is
    waited for instead of half of what was waited for.
    """
    if facts.num_ranks < 2 or facts.strategy != "ddp":
        return []
    late_s = max(0.0, facts.num_buckets * facts.best_trip_s - facts.critical.wire_s) / 2
    saved_s = facts.critical.optimizer_s * (1 - 1 / facts.num_ranks) - late_s
    cause = f"The optimizer is {facts.share(facts.critical.optimizer_s)} of the step, the same on every rank"
    change = "dividing it among the ranks (--strategy ddp-zero1)"
    return [Advice(cause, change, facts.gain(saved_s), settings={"strategy": "ddp-zero1"})]


def lower_precision(facts: Facts) -> list[Advice]:
    """Forward and backward get no faster than a layer alone, which is mostly a product; only trying tells how much."""
    speed = facts.bf16_speed
    if speed is None or speed <= 1 or facts.precision != "fp32":
        return []
    computing = facts.share(facts.computing)
    cause = f"Computing is {computing} of the step, and a layer is {speed:.1f} times as fast in bf16 here"
    saved_s = facts.computing * (1 - 1 / speed)
    settings = {"precision": "bf16"}
    return [Advice(cause, "bf16 (--precision bf16)", facts.gain(saved_s), False, at_most=True, settings=settings)]


def larger_batch(facts: Facts) -> list[Advice]:
    """What a step takes however many samples it has is taken less often; the rest grows with them."""
    critical = facts.critical
    fixed_s = critical.wire_s + critical.optimizer_s + critical.other_s
    if (
        fixed_s < _OVERHEAD * facts.step_s
        or facts.straggler is not None
        or not (is_too_small(facts) or facts.num_ranks < 2)
    ):
        return []  # what is not small accumulates
    size = None if facts.global_batch_size is None else _TIMES * facts.global_batch_size
    named = f"--global-batch-size {size}" if size else "--global-batch-size"
    cause = f"{facts.share(fixed_s)} of the step does not depend on the number of samples"
    change = f"a global batch {_TIMES} times as large ({named})"
    settings = {"global_batch_size": size}
    return [Advice(cause, change, facts.gain((1 - 1 / _TIMES) * fixed_s), keeps_run=False, settings=settings)]


def pauses(facts: Facts) -> list[Advice]:
    """Half as many pauses take half as long."""
    found = []
    flags = {"evaluation": "--eval-every", "checkpoint": "--checkpoint-every"}
    for event, share in (facts.paused_share or {}).items():
        cause = f"Training stands still for {event}s during {share:.0%} of the run"
        change = f"doing so half as often ({flags[event]} STEPS)"
        found.append(Advice(cause, change, 1 / (1 - min(share, 0.99) / 2)))
    return found


# Rules about the exchange of gradients: buckets, bytes, links, and how often.

_MIB = 2**20
_USUAL_CAP_BYTES = 25 * _MIB

_BUSY = 3.0
"""Trips that take so many times as long as the fastest are held up by something else."""

_MANY = 4
_CROWDED = 1.25
"""Threads that want to run, for each core of the machine, from which on they take it from each other."""

_EXCHANGE_TIMES = 4


def buckets(facts: Facts) -> list[Advice]:
    """Each bucket costs its latency; what fewer of them save is at most what was waited for."""
    fewer = max(1, math.ceil(facts.gradient_bytes / _USUAL_CAP_BYTES))
    if facts.num_buckets <= 2 * fewer:
        return []
    saved_s = min((facts.num_buckets - fewer) * facts.bucket_latency_s, _saveable_s(facts))
    size = facts.gradient_bytes / facts.num_buckets / _MIB
    number = "one" if fewer == 1 else str(fewer)
    cause = (
        f"Gradients travel in {facts.num_buckets} buckets of {_size(size)}, and {facts.share(facts.critical.wire_s)} "
        "of the step waits for them"
    )
    change = f"{number} of at most 25 MiB (leave --bucket-cap-mb out)"
    return [Advice(cause, change, facts.gain(saved_s), settings={"bucket_cap_mb": None})]


def bytes_on_the_way(facts: Facts) -> list[Advice]:
    """Half the bytes take half the time, where it is bytes that take it: not in the memory that CPUs share."""
    if facts.gradient_bytes < LARGE_BYTES or facts.wire or facts.strategy != "ddp":
        return []
    if facts.device == "cpu" and facts.num_hosts == 1:  # to round them takes as long as to add them
        return []
    cause = f"Exposed communication is {facts.share(facts.critical.wire_s)} of the step"
    change = "rounding gradients on their way (--wire bf16)"
    return [Advice(cause, change, facts.gain(facts.critical.wire_s / 2), settings={"wire": "bf16"})]


def accumulation(facts: Facts) -> list[Advice]:
    """Gradients are exchanged and applied once for several batches; on CPUs that frees cores for backward, too."""
    wire_s = facts.critical.wire_s
    if facts.num_ranks < 2 or wire_s <= 0 or is_too_small(facts):  # which advises a larger batch, too
        return []
    rarer = 1 - 1 / _EXCHANGE_TIMES
    if facts.gain(rarer * wire_s) < WORTH:
        return []
    hidden_s = max(0.0, facts.num_buckets * facts.best_trip_s - wire_s) if facts.device == "cpu" else 0.0
    taken_s = min(hidden_s, facts.critical.backward_s / 2)
    saved_s = rarer * (wire_s + taken_s + facts.critical.optimizer_s)
    pieces = _EXCHANGE_TIMES * facts.accumulate
    cause = f"Exposed communication is {facts.share(wire_s)} of the step"
    change = (
        f"exchanging gradients once for {pieces} micro-batches (--accumulate {pieces} with a global batch "
        f"{_EXCHANGE_TIMES} "
        "times as large)"
    )
    size = None if facts.global_batch_size is None else _EXCHANGE_TIMES * facts.global_batch_size
    settings = {"accumulate": pieces, "global_batch_size": size}
    return [Advice(cause, change, facts.gain(saved_s), keeps_run=False, settings=settings)]


def hidden_exchange(facts: Facts) -> list[Advice]:
    """The replicas of dp exchange when backward is over; those of ddp beside it."""
    if facts.strategy != "dp" or facts.critical.wire_s <= 0:
        return []
    saved_s = min(facts.critical.wire_s, facts.critical.backward_s)
    cause = f"Exchange is {facts.share(facts.critical.wire_s)} of the step, after backward"
    change = "a process a device, which exchange beside it (--strategy ddp)"
    return [Advice(cause, change, facts.gain(saved_s), at_most=True, settings={"strategy": "ddp"})]


def busy_link(facts: Facts) -> list[Advice]:
    """What a bucket takes longer than its fastest trip, something else takes from the link or from the processors."""
    if not facts.trip_s or facts.trip_s < _BUSY * facts.best_trip_s or facts.num_buckets > _MANY:
        return []  # of many buckets, one waits for the other
    if is_too_small(facts):  # then a quiet link makes no sense of so many devices
        return []
    if facts.device == "cpu" and (facts.load_per_core or 0.0) < _CROWDED:
        return []
    took, best = milliseconds(facts.trip_s), milliseconds(facts.best_trip_s)
    cause = f"A bucket takes {took} on its way where {best} were enough at best"
    on_cpu = "cores that nothing else uses (look at the load of the machine, and at --threads)"
    saved_s = facts.critical.wire_s * (1 - facts.best_trip_s / facts.trip_s)
    free = on_cpu if facts.device == "cpu" else "a link that nothing else uses"
    return [Advice(cause, free, facts.gain(saved_s))]


def _saveable_s(facts: Facts) -> float:
    """Return what of a step communication may have cost: what was waited for, and on CPUs what backward lost to it."""
    return facts.critical.wire_s + (facts.critical.backward_s / 2 if facts.device == "cpu" else 0.0)


def _size(mib: float) -> str:
    return f"{mib:.1f} MiB" if mib >= 1 else f"{mib * 1024:.0f} KiB"


# What to change, from measurements alone, each with what it would gain: pure functions.
#
# A gain is predicted as the time of a step now over that of the step without what is to go. Every rule says what it
# takes for granted; what cannot be predicted from what was measured is not advised. `lockstep tune` tries what is
# advised, and shows how far the prediction was off.

_RULES = (
    loading,
    pinning,
    slow_rank,
    buckets,
    bytes_on_the_way,
    busy_link,
    hidden_exchange,
    lower_precision,
    optimizer,
    fewer_devices,
    too_small,
    accumulation,
    larger_batch,
    pauses,
)


def advise(facts: Facts) -> list[Advice]:
    """Return what is worth changing: the largest gain first, and what makes it another training run last."""
    if facts.step_s <= 0:
        return []
    worth = [each for rule in _RULES for each in rule(facts) if each.gain >= WORTH]
    return sorted(worth, key=lambda each: (not each.keeps_run, -each.gain))


# What the rules of advice need to know, from what was recorded of a run.


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
