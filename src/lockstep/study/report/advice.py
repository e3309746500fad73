"""What to change first in a run, each with the gain that is predicted for it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.study.common import MIB
from lockstep.study.links import Cost, Method, format_megabytes, predict_step
from lockstep.study.report.figures import Figures, Network, Parts, Traffic, num_machines
from lockstep.study.report.run_reader import Recorded
from lockstep.telemetry.stragglers import Straggler

# A gain below this is not worth a sentence.
WORTH = 1.03


@dataclass(frozen=True)
class Facts:
    """What the rules need to know of a run; see `Figures` and `Traffic`.

    Args:
        num_ranks: Devices with a process each.
        device: Their type, such as ``cpu`` or ``cuda``.
        critical: Where the time of a step goes along the critical path.
        straggler: A rank that keeps the others waiting in every step.
        workers: Loader processes a rank; None if not known.
        trips_s: Of all buckets on their way, each at its best; 0 if not known.
        num_machines: That the ranks are on.
        network: What crosses the links between them; None if there are none, or that was not recorded.
        gradient_bytes: All together.
        wire: Whether gradients are rounded for their way already.
        strategy: Who computes.
        accumulate: Micro-batches a step.
        paused_share: What training stood still for checkpoints and evaluations, as a share of the whole run, by event.
        global_batch_size: Samples of a step; None if not known.
    """

    num_ranks: int
    device: str
    critical: Parts
    straggler: Straggler | None = None
    workers: int | None = None
    trips_s: float = 0.0
    num_machines: int = 1
    network: Network | None = None
    gradient_bytes: int = 0
    wire: bool = False
    strategy: str = "ddp"
    accumulate: int = 1
    paused_share: Mapping[str, float] | None = None
    global_batch_size: int | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.critical.total_s

    def gain(self, saved_s: float) -> float:
        """Return the throughput if a step were so much shorter, over that of now."""
        return self.step_s / (self.step_s - min(saved_s, 0.95 * self.step_s))

    def share(self, seconds: float) -> str:
        """Return a part of a step in words."""
        return f"{seconds / self.step_s:.0%}"


@dataclass(frozen=True)
class Advice:
    """One thing to change.

    Args:
        cause: What was measured.
        change: What to do.
        gain: The throughput then over that of now, as predicted.
        keeps_run: Whether it stays the same training run; a larger batch is another one.
        at_most: Whether the gain is a bound, of which only trying tells how much is to be had.
    """

    cause: str
    change: str
    gain: float
    keeps_run: bool = True
    at_most: bool = False

    @property
    def text(self) -> str:
        """All in one sentence."""
        about = "at most" if self.at_most else "about"
        return f"{self.cause}: {self.change} would give {about} {self.gain:.2f} times the throughput."


def advise(facts: Facts) -> list[Advice]:
    """Return what is worth changing: the largest gain first, and what makes it another training run last.

    A gain is predicted as the time of a step now over that of the step without what is to go. Every rule says what it
    takes for granted; what cannot be predicted from what was measured is not advised.
    """
    if facts.step_s <= 0:
        return []
    found = [advice for rule in _RULES if (advice := rule(facts)) is not None and advice.gain >= WORTH]
    found += [advice for advice in _pauses(facts) if advice.gain >= WORTH]
    return sorted(found, key=lambda advice: (not advice.keeps_run, -advice.gain))


def in_ms(seconds: float) -> str:
    """Write a duration in milliseconds; in seconds where these would be many."""
    if seconds >= 10:
        return f"{seconds:,.0f} s"
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


# Rules about what devices do: load, compute, update, stand still; and how many of them there should be.

# From so many bytes on it is they that take long, not each message's own delay.
LARGE_BYTES = 4 * MIB

# How many times as large a batch is advised, and how much more rarely gradients are exchanged.
_MOST_WORKERS = 16
_TIMES = 4

# From this part of a step on that does not grow with the batch, a larger one is worth a sentence.
_OVERHEAD = 0.25

# What a process waits for a micro-batch of a loader process at least: it comes through a pipe and shared memory.
_HANDOVER_S = 0.0003


def _loading(facts: Facts) -> Advice | None:
    # One rank that loads slowly is the rule of slow ranks: workers on all of them would not help it.
    if facts.workers is None or (facts.straggler is not None and facts.straggler.phase == "loader"):
        return None
    wait_s, rest_s = facts.critical.data_wait_s, facts.step_s - facts.critical.data_wait_s
    # Without workers all loading is waiting; with them, they are busy all the time and still do not keep up.
    loading_s = wait_s if facts.workers == 0 else facts.workers * facts.step_s
    # So many that what they load in the time of the other work of a step is enough for it; rounding adds none.
    workers = min(_MOST_WORKERS, max(facts.workers + 1, math.ceil(loading_s / max(rest_s, 1e-9) - 1e-9)))
    step_s = max(rest_s, loading_s / workers) + facts.accumulate * _HANDOVER_S
    cause = f"Data wait is {facts.share(wait_s)} of the step"
    change = f"{workers} loader worker{'s' * (workers > 1)} a rank instead of {facts.workers} (--workers {workers})"
    # On CPUs the loaders take cores from the ranks: how much is known only when it is tried.
    return Advice(cause, change, facts.step_s / step_s, at_most=facts.device == "cpu")


def _slow_rank(facts: Facts) -> Advice | None:
    slow = facts.straggler
    if slow is None:
        return None
    # All others wait for it, so what it loses in a step is lost to all.
    where = {"loader": "loading its data"}.get(slow.phase, slow.phase)
    took = f"{in_ms(slow.took_s)} where {in_ms(slow.usual_s)} is usual"
    cause = f"Rank {slow.rank} is slow in {where} ({took}), and the others wait for it"
    change = f"making rank {slow.rank} as fast as the others (look at its machine, its data and what else runs there)"
    return Advice(cause, change, facts.gain(slow.lost_s))


def _too_small(facts: Facts) -> Advice | None:
    if facts.num_ranks < 2 or facts.straggler is not None:  # then that is why the others wait
        return None
    critical = facts.critical
    # One device computes all shares one after the other, and exchanges nothing. On CPUs that one process has the cores
    # of all ranks; how much of them an operation can use is not known, so it is taken to use none of the others: it is
    # no slower than predicted.
    divided_s = critical.computing_s + critical.data_wait_s
    alone_s = facts.num_ranks * divided_s + critical.optimizer_s + critical.other_s
    is_large = facts.gradient_bytes >= LARGE_BYTES
    why = "Exchanging gradients takes longer than it saves" if is_large else "The model is too small to divide"
    cause = f"{why}: computing is {facts.share(critical.computing_s)} of the step on {facts.num_ranks} devices"
    return Advice(cause, "one device (--devices 1), or a larger global batch,", facts.step_s / alone_s)


def _optimizer(facts: Facts) -> Advice | None:
    if facts.num_ranks < 2 or facts.strategy != "ddp":
        return None
    # With ZeRO-1 each rank updates its part; the exchange carries the same bytes. Half of them, the parameters, come
    # back after the update, beside nothing: half of what buckets need on their way is waited for, instead of half of
    # what was waited for.
    late_s = max(0.0, facts.trips_s - facts.critical.wire_s) / 2
    if facts.num_machines > 1 and not facts.trips_s:
        return None  # what would come late over the network is not known
    saved_s = facts.critical.optimizer_s * (1 - 1 / facts.num_ranks) - late_s
    cause = f"The optimizer is {facts.share(facts.critical.optimizer_s)} of the step, the same on every rank"
    return Advice(cause, "dividing it among the ranks (--strategy ddp-zero1)", facts.gain(saved_s))


def _larger_batch(facts: Facts) -> Advice | None:
    # What a step takes however many samples it has is then taken less often; the rest grows with the samples.
    critical, rarer, alone = facts.critical, 1 - 1 / _TIMES, _too_small(facts)
    if facts.num_ranks > 1 and (alone is None or alone.gain < WORTH):
        # Accumulated, it needs no more memory. Only the exchange is worth that; the update is then rarer, too.
        if facts.gain(rarer * critical.wire_s) < WORTH:
            return None
        fixed_s, pieces = critical.wire_s + critical.optimizer_s, _TIMES * facts.accumulate
        cause = f"Exposed communication is {facts.share(critical.wire_s)} of the step"
        flags = f"--accumulate {pieces} with a global batch {_TIMES} times as large"
        change = f"exchanging gradients once for {pieces} micro-batches ({flags})"
    else:
        fixed_s = critical.wire_s + critical.optimizer_s + critical.other_s
        if fixed_s < _OVERHEAD * facts.step_s:
            return None
        size = f" {_TIMES * facts.global_batch_size}" if facts.global_batch_size else ""
        cause = f"{facts.share(fixed_s)} of the step does not depend on the number of samples"
        change = f"a global batch {_TIMES} times as large (--global-batch-size{size})"
    return Advice(cause, change, facts.gain(rarer * fixed_s), keeps_run=False)


def _pauses(facts: Facts) -> list[Advice]:
    # Half as many pauses take half as long.
    flags = {"evaluation": "--eval-every", "checkpoint": "--checkpoint-every"}
    return [
        Advice(
            f"Training stands still for {event}s during {share:.0%} of the run",
            f"doing so half as often ({flags[event]} STEPS)",
            1 / (1 - min(share, 0.99) / 2),
        )
        for event, share in (facts.paused_share or {}).items()
    ]


# Rules about the exchange of gradients: buckets, bytes, links, and how often.


def _rounding(facts: Facts) -> Advice | None:
    # Half the bytes take half the time only where it is bytes that take it.
    if facts.gradient_bytes < LARGE_BYTES or facts.wire or facts.strategy != "ddp":
        return None
    if facts.device == "cpu" and facts.num_machines == 1:
        return None  # in memory that ranks share, rounding them takes as long as adding them
    change = "rounding gradients on their way (--compression bf16)"
    if (found := _over_network(facts, Method("bf16", cost=Cost(0.5)), change)) is not None:
        return found
    cause = f"Exposed communication is {facts.share(facts.critical.wire_s)} of the step"
    return Advice(cause, change, facts.gain(facts.critical.wire_s / 2))


def _quantizing(facts: Facts) -> Advice | None:
    change = "rounding gradients to 8 bits, with error feedback (--compression int8)"
    return None if facts.wire else _over_network(facts, Method("int8", cost=Cost(0.25)), change)


def _local_steps(facts: Facts) -> Advice | None:
    change = "exchanging parameters every 8 steps (--strategy local-sgd)"
    found = _over_network(facts, Method("local-sgd", sync_every=8), change)
    return None if found is None else replace(found, keeps_run=False)


def _over_network(facts: Facts, method: Method, change: str) -> Advice | None:
    """Return what a method would give between the machines of the run; None where the link is not known."""
    network = facts.network
    if network is None or network.link is None or facts.strategy != "ddp":
        return None
    sent = f"{format_megabytes(network.sent_bytes)} from each of {network.num_machines} machines"
    rate = f"{network.link.bytes_per_s / 1e6:.3g} MB/s"
    cause = f"Exposed communication is {facts.share(facts.critical.wire_s)} of the step ({sent} at {rate})"
    now, then = (
        predict_step(network.profile, each, network.link, network.num_machines) for each in (Method("ddp"), method)
    )
    # What encoding takes is not in the record: `lockstep predict` measures it.
    return Advice(cause, change, now.seconds / then.seconds, at_most=facts.device == "cpu")


_RULES = (_loading, _slow_rank, _rounding, _quantizing, _local_steps, _optimizer, _too_small, _larger_batch)


# What the rules need to know, from what was recorded of a run.


def find_facts(run: Recorded, device: str, figures: Figures, traffic: Traffic | None, network: Network | None) -> Facts:
    """Return the facts of a run on a kind of ``device``."""
    sizes = traffic.sizes_bytes if traffic is not None else {}
    session, settings = run.last, run.settings
    return Facts(
        num_ranks=len(figures.by_rank),
        device=device,
        num_machines=num_machines(run),
        network=network,
        critical=figures.critical,
        straggler=figures.straggler,
        workers=_whole(session.get("workers", settings.get("workers"))),
        gradient_bytes=_whole(session.get("gradient_bytes")) or sum(sizes.values()),
        trips_s=sum(times[0] for times in traffic.times_s.values()) if traffic is not None else 0.0,
        wire=(settings.get("compression") or settings.get("wire")) is not None,
        strategy=str(settings.get("strategy", "ddp")),
        accumulate=_whole(settings.get("accumulate")) or 1,
        paused_share={name: paused / figures.total_s for name, paused in figures.paused_s.items() if figures.total_s},
        global_batch_size=_whole(session.get("global_batch_size")),
    )


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None
