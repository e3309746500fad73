"""Rules about what devices do: load, compute, update, stand still; and how many of them there should be."""

from __future__ import annotations

import math

from lockstep.study.report.facts import WORTH, Advice, Facts, milliseconds

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
