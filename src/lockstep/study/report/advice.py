"""What to change, from measurements alone, each with what it would gain: pure functions.

A gain is predicted as the time of a step now over that of the step without what is to go. Every rule says what it takes
for granted; what cannot be predicted from what was measured is not advised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.study.report.figures import Parts
from lockstep.telemetry.stragglers import Straggler

WORTH = 1.03
"""A gain below this is not worth a sentence."""

_MIB = 2**20
_USUAL_CAP_BYTES = 25 * _MIB
_MOST_WORKERS = 16
_LARGE_BYTES = 4 * _MIB
"""From so many bytes on it is they that take long, not each message's own delay."""

_BUSY = 3.0
"""Trips that take so many times as long as the fastest are held up by something else."""

_MANY = 4
_CROWDED = 1.25
"""Threads that want to run, for each core of the machine, from which on they take it from each other."""


@dataclass(frozen=True)
class Facts:
    """What the rules need to know of a run; see `Figures` and `Traffic`.

    Args:
        num_ranks: Devices with a process each.
        device: ``cpu`` or ``cuda``.
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
    gradient_bytes: int = 0
    wire: bool = False
    strategy: str = "ddp"
    accumulate: int = 1
    paused_share: Mapping[str, float] | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.critical.total_s


@dataclass(frozen=True)
class Advice:
    """One thing to change.

    Args:
        cause: What was measured.
        change: What to do.
        gain: The throughput then over that of now, as predicted.
        keeps_run: Whether it stays the same training run; a larger batch is another one.
    """

    cause: str
    change: str
    gain: float
    keeps_run: bool = True

    @property
    def text(self) -> str:
        """All in one sentence."""
        return f"{self.cause}: {self.change} would give about {self.gain:.2f} times the throughput."


def advise(facts: Facts) -> list[Advice]:
    """Return what is worth changing: the largest gain first, and what makes it another training run last."""
    if facts.step_s <= 0:
        return []
    found = [
        *_loading(facts),
        *_slow_rank(facts),
        *_buckets(facts),
        *_bytes(facts),
        *_busy(facts),
        *_too_small(facts),
        *_optimizer(facts),
        *_pauses(facts),
    ]
    worth = [each for each in found if each.gain >= WORTH]
    return sorted(worth, key=lambda each: (not each.keeps_run, -each.gain))


def _loading(facts: Facts) -> list[Advice]:
    """Samples that a loader process prepares while the device computes are waited for no longer."""
    wait_s, rest_s = facts.critical.data_wait_s, facts.step_s - facts.critical.data_wait_s
    if facts.workers is None or _is_one_ranks(facts, "loader"):
        return []
    # Without workers all loading is waiting; with them, they are busy all the time and still do not keep up.
    loading_s = wait_s if facts.workers == 0 else facts.workers * facts.step_s
    workers = min(_MOST_WORKERS, max(facts.workers + 1, math.ceil(loading_s / max(rest_s, 1e-9))))
    step_s = max(rest_s, loading_s / workers)
    cause = f"Data wait is {_share(wait_s, facts)} of the step"
    change = f"{workers} loader worker{'s' * (workers > 1)} a rank instead of {facts.workers} (--workers {workers})"
    return [Advice(cause, change, facts.step_s / step_s)]


def _slow_rank(facts: Facts) -> list[Advice]:
    """All others wait for a slow rank, so what it loses is lost to all."""
    slow = facts.straggler
    if slow is None:
        return []
    where = {"loader": "loading its data"}.get(slow.phase, slow.phase)
    took = f"{_ms(slow.took_s)} where {_ms(slow.usual_s)} is usual"
    cause = f"Rank {slow.rank} is slow in {where} ({took}), and the others wait for it"
    lost_s = min(slow.lost_s, 0.95 * facts.step_s)
    change = f"making rank {slow.rank} as fast as the others (look at its machine, its data and what else runs there)"
    return [Advice(cause, change, facts.step_s / (facts.step_s - lost_s))]


def _buckets(facts: Facts) -> list[Advice]:
    """Each bucket costs its latency; what fewer of them save is at most what was waited for."""
    fewer = max(1, math.ceil(facts.gradient_bytes / _USUAL_CAP_BYTES))
    if facts.num_buckets <= 2 * fewer:
        return []
    saved_s = min((facts.num_buckets - fewer) * facts.bucket_latency_s, _saveable_s(facts))
    size = facts.gradient_bytes / facts.num_buckets / _MIB
    number = "one" if fewer == 1 else str(fewer)
    cause = (
        f"Gradients travel in {facts.num_buckets} buckets of {_size(size)}, and {_share(facts.critical.wire_s, facts)}"
    )
    change = f"{number} of at most 25 MiB (leave --bucket-cap-mb out, or try auto)"
    return [Advice(f"{cause} of the step waits for them", change, facts.step_s / (facts.step_s - saved_s))]


def _bytes(facts: Facts) -> list[Advice]:
    """Half the bytes take half the time, where it is bytes that take it; fewer exchanges take it less often."""
    wire_s = facts.critical.wire_s
    cause = f"Exposed communication is {_share(wire_s, facts)} of the step"
    found = []
    if facts.gradient_bytes >= _LARGE_BYTES and not facts.wire and facts.strategy == "ddp":
        found.append(Advice(cause, "rounding gradients on their way (--wire bf16)", _gain(facts, wire_s / 2)))
    if facts.num_ranks > 1 and wire_s > 0 and not _is_too_small(facts):  # which advises a larger batch, too
        times = 4
        per_batch_s = facts.step_s - (1 - 1 / times) * wire_s
        change = (
            f"exchanging gradients once for {times * facts.accumulate} micro-batches (--accumulate "
            f"{times * facts.accumulate} with a global batch {times} times as large)"
        )
        found.append(Advice(cause, change, facts.step_s / per_batch_s, keeps_run=False))
    return found


def _busy(facts: Facts) -> list[Advice]:
    """What a bucket takes longer than its fastest trip, something else takes from the link or from the processors."""
    if not facts.trip_s or facts.trip_s < _BUSY * facts.best_trip_s or facts.num_buckets > _MANY:
        return []  # of many buckets, one waits for the other
    if _is_too_small(facts):  # then a quiet link makes no sense of so many devices
        return []
    if facts.device == "cpu" and (facts.load_per_core or 0.0) < _CROWDED:
        return []
    cause = f"A bucket takes {_ms(facts.trip_s)} on its way where {_ms(facts.best_trip_s)} were enough at best"
    on_cpu = "cores that nothing else uses (look at the load of the machine, and at --threads)"
    saved_s = facts.critical.wire_s * (1 - facts.best_trip_s / facts.trip_s)
    free = on_cpu if facts.device == "cpu" else "a link that nothing else uses"
    return [Advice(cause, free, _gain(facts, saved_s))]


def _too_small(facts: Facts) -> list[Advice]:
    """One device computes all shares one after the other, and exchanges nothing."""
    critical = facts.critical
    if facts.num_ranks < 2 or facts.straggler is not None:  # then that is why the others wait
        return []
    computing_s = facts.computing_s or facts.num_ranks * (critical.forward_s + critical.backward_s)
    alone_s = computing_s + facts.num_ranks * critical.data_wait_s + critical.optimizer_s + critical.other_s
    share = (critical.forward_s + critical.backward_s) / facts.step_s
    is_large = facts.gradient_bytes >= _LARGE_BYTES
    why = "Exchanging gradients takes longer than it saves" if is_large else "The model is too small to divide"
    cause = f"{why}: computing is {share:.0%} of the step on {facts.num_ranks} devices"
    change = "one device (--devices 1), or a larger global batch,"
    return [Advice(cause, change, facts.step_s / alone_s)]


def _is_too_small(facts: Facts) -> bool:
    return any(each.gain >= WORTH for each in _too_small(facts))


def _optimizer(facts: Facts) -> list[Advice]:
    """With ZeRO-1 each rank updates its part; the exchange carries the same bytes."""
    if facts.num_ranks < 2 or facts.strategy != "ddp":
        return []
    saved_s = facts.critical.optimizer_s * (1 - 1 / facts.num_ranks)
    cause = f"The optimizer is {_share(facts.critical.optimizer_s, facts)} of the step, the same on every rank"
    return [Advice(cause, "dividing it among the ranks (--strategy ddp-zero1)", _gain(facts, saved_s))]


def _pauses(facts: Facts) -> list[Advice]:
    """Half as many pauses take half as long."""
    found = []
    flags = {"evaluation": "--eval-every", "checkpoint": "--checkpoint-every"}
    for event, share in (facts.paused_share or {}).items():
        cause = f"Training stands still for {event}s during {share:.0%} of the run"
        change = f"doing so half as often ({flags[event]} STEPS)"
        found.append(Advice(cause, change, 1 / (1 - min(share, 0.99) / 2)))
    return found


def _gain(facts: Facts, saved_s: float) -> float:
    return facts.step_s / (facts.step_s - min(saved_s, 0.95 * facts.step_s))


def _saveable_s(facts: Facts) -> float:
    """Return what of a step communication may have cost: what was waited for, and on CPUs what backward lost to it."""
    exposed_s = facts.critical.wire_s
    return exposed_s + (facts.critical.backward_s / 2 if facts.device == "cpu" else 0.0)


def _is_one_ranks(facts: Facts, phase: str) -> bool:
    """Return whether a phase is slow on one rank only, which another rule says."""
    return facts.straggler is not None and facts.straggler.phase == phase


def _share(seconds: float, facts: Facts) -> str:
    return f"{seconds / facts.step_s:.0%}"


def _size(mib: float) -> str:
    return f"{mib:.1f} MiB" if mib >= 1 else f"{mib * 1024:.0f} KiB"


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
