"""Rules about the exchange of gradients: buckets, bytes, links, and how often."""

from __future__ import annotations

import math

from lockstep.study.report.facts import WORTH, Advice, Facts, milliseconds
from lockstep.study.report.rules_work import LARGE_BYTES, is_too_small

_MIB = 2**20
_USUAL_CAP_BYTES = 25 * _MIB

_BUSY = 3.0
"""Trips that take so many times as long as the fastest are held up by something else."""

_MANY = 4
_CROWDED = 1.25
"""Threads that want to run, for each core of the machine, from which on they take it from each other."""

_TIMES = 4


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
    change = f"{number} of at most 25 MiB (leave --bucket-cap-mb out, or try auto)"
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
    rarer = 1 - 1 / _TIMES
    if facts.gain(rarer * wire_s) < WORTH:
        return []
    hidden_s = max(0.0, facts.num_buckets * facts.best_trip_s - wire_s) if facts.device == "cpu" else 0.0
    taken_s = min(hidden_s, facts.critical.backward_s / 2)
    saved_s = rarer * (wire_s + taken_s + facts.critical.optimizer_s)
    pieces = _TIMES * facts.accumulate
    cause = f"Exposed communication is {facts.share(wire_s)} of the step"
    change = (
        f"exchanging gradients once for {pieces} micro-batches (--accumulate {pieces} with a global batch {_TIMES} "
        "times as large)"
    )
    size = None if facts.global_batch_size is None else _TIMES * facts.global_batch_size
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
