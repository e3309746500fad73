"""What else a report derives from a record: network, costs, cores and timelines; pure functions."""

import itertools
import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from lockstep.study.links import Computing, Link, Profile, ReadyBucket, cable_bytes
from lockstep.telemetry.cost import Price, Usage
from lockstep.telemetry.figures import Figures
from lockstep.telemetry.record import Recorded, Timeline

# The network between machines.


@dataclass(frozen=True)
class Network:
    """The traffic between the machines of a run.

    Args:
        num_machines: The number of machines.
        profile: The times of a step of one rank, and its buckets.
        link: The rate of the links in the run; None for one machine.
        slowest: The two ends of the slowest link; empty if unknown.
    """

    num_machines: int
    profile: Profile
    link: Link | None
    slowest: str = ""

    @property
    def sent_bytes(self) -> float:
        """Bytes that each machine sends in a step without compression."""
        return cable_bytes(self.profile.gradient_bytes, self.num_machines)


def num_machines(run: Recorded) -> int:
    """Return the number of machines; containers may have equal host names."""
    ranks = [each for each in run.last.get("ranks") or () if isinstance(each, dict) and each]
    return len({(each.get("host"), each.get("node")) for each in ranks}) or 1


def find_network(run: Recorded, figures: Figures) -> Network | None:
    """Return the traffic of a run; None unless steps have timelines with buckets."""
    machines, num_ranks = num_machines(run), len(run.ranks)
    batch = run.last.get("global_batch_size")
    timelines = [each for each in run.zero.timelines if each.buckets and each.waited]
    if not timelines or not figures.by_rank or type(batch) is not int:
        return None
    last, parts = timelines[-1], figures.critical
    begin_s = max((begin for phase, begin, _ in last.spans if phase == "backward"), default=0.0)
    own_s = max(last.waited[0] - begin_s if last.waited else 0.0, 1e-9)
    order = sorted(last.buckets, key=lambda bucket: bucket.sent_s)
    ready = [min(1.0, max(0.0, (bucket.ready_s - begin_s) / own_s)) for bucket in order[:-1]]
    buckets = [ReadyBucket(each.size_bytes, at) for each, at in zip(order, [*ready, 1.0], strict=True)]
    rest_s = parts.part("optimizer", "other", "core_wait")
    alone = Computing(parts.part("data_wait", "forward"), parts.part("backward"), rest_s)
    profile = Profile(batch, {-(-batch // num_ranks): alone}, buckets, ranks_per_machine=-(-num_ranks // machines))
    rates = [rate for each in timelines if (rate := _link_rate(each, run, machines))]
    link = Link(median(rates)) if rates else None
    return Network(machines, profile, link, _slowest_link(run))


def _link_rate(timeline: Timeline, run: Recorded, machines: int) -> float | None:
    """Return the bytes per second that a machine sent while buckets were exchanged; None if unknown."""
    ratio = {None: 1.0, "bf16": 0.5, "fp16": 0.5}.get(run.config.get("compression"))
    if ratio is None or machines < 2:
        return None  # with other compression, the bytes depend on the model
    members = machines if run.last.get("backend") == "shm+gloo" else len(run.ranks)
    buckets = timeline.buckets
    # All buckets together, which keep a slow link busy; or the largest bucket, as a fast link is often idle.
    largest = max(buckets, key=lambda each: each.size_bytes)
    whole_s = max(each.done_s for each in buckets) - min(each.sent_s for each in buckets)
    whole = sum(each.size_bytes for each in buckets), whole_s
    spans = [(largest.size_bytes, largest.done_s - largest.sent_s), whole]
    return max((ratio * cable_bytes(size, members) / seconds for size, seconds in spans if seconds > 0), default=None)


def _slowest_link(run: Recorded) -> str:
    by_link: dict[str, list[float]] = {}
    for rank, record in run.ranks.items():
        for line in record.machine:
            if per_s := line.figures.get("link_bytes_per_s"):
                by_link.setdefault(f"{record.host} (rank {rank}) to {line.link_peer}", []).append(per_s)
    if not by_link:
        return ""
    slowest = min(by_link, key=lambda name: median(by_link[name]))
    return f"{slowest}, {median(by_link[slowest]) / 1e6:.3g} MB/s"


# Costs: of the run, of an epoch, and until a loss.

# Number of steps in the mean of the training loss, as a single batch may have a low loss by chance.
NUM_LOSSES = 10


def find_costs(run: Recorded, price: str | None, until_loss: float | None) -> list[str]:
    """Return sentences on what all starts of the run used; empty if that was not recorded.

    Args:
        run: The run.
        price: Of a device for an hour; by default that of the record.
        until_loss: Also return the use until this loss.

    Raises:
        ConfigurationError: The price cannot be read.
    """
    whole, steps = _usage(run), run.zero.steps
    cost = Price.read(str(run.config["price"]) if price is None and "price" in run.config else price)
    if not whole.device_s:
        return []
    found = [f"The run (starts: {len(run.sessions)}) used {whole.text(cost)}."]
    if steps and isinstance(per_epoch := run.last.get("steps_per_epoch"), int):
        found.append(f"An epoch used {(whole * (per_epoch / (steps[-1].step + steps[-1].num_steps))).text(cost)}.")
    if until_loss is not None:
        name, losses = _losses(run)
        reached = next(((end, step) for end, loss, step in losses if loss <= until_loss), None)
        was = f"was {until_loss:g} or less"
        if reached is None:
            return [*found, f"The {name} never {was}."]
        found.append(f"Until the {name} {was}, after step {reached[1]}, it used {_usage(run, reached[0]).text(cost)}.")
    return found


def _usage(run: Recorded, until: float = math.inf) -> Usage:
    """Return the use until a time on rank zero's clock; of a killed start, up to its last line."""
    total = Usage()
    for line in run.machine:
        if device_s := line.figures.get("device_s"):
            # A line covers the time since the line before, in which the loss may have been reached.
            share = 1 + min(0.0, until - line.time) * line.figures.get("num_devices", 1.0) / device_s
            if share > 0:
                total += Usage(device_s, line.figures.get("energy_j", math.nan)) * share
    return total


def _losses(run: Recorded) -> tuple[str, list[tuple[float, float, int]]]:
    """Return the name of the loss; and for each value the time, the loss, and the number of steps done."""
    with_loss = [(event, event.metrics["loss"]) for event in run.events if event.metrics and "loss" in event.metrics]
    if with_loss:
        return "evaluated loss", [(event.time + (event.seconds or 0.0), loss, event.step) for event, loss in with_loss]
    steps = [step for step in run.zero.steps if step.loss is not None]
    known = [(step.time + step.times.total_s, step.loss or 0.0, step.step + step.num_steps) for step in steps]
    windows = [known[at - NUM_LOSSES : at] for at in range(NUM_LOSSES, len(known) + 1)]
    means = [(each[-1][0], fmean(loss for _, loss, _ in each), each[-1][2]) for each in windows]
    return f"training loss (mean of {NUM_LOSSES} steps)", means


# The use of the cores of the machine on which ranks waited most, mean over the run.


class Cores(NamedTuple):
    """The cores available to a process (0 if unknown), and those used by the ranks, other programs and the hypervisor.

    ``throttled`` is the number of cores withheld by a quota. ``num_ranks`` is the number of ranks of the machine, and
    ``threads`` that of the threads with which each of them computes (0 if unknown).
    """

    total: float
    ranks: float
    others: float
    stolen: float
    throttled: float
    num_ranks: int = 1
    threads: float = 0


def find_cores(run: Recorded) -> Cores | None:
    """Return the use of the cores; None if it was not recorded."""
    waiting = max(run.ranks.values(), key=lambda each: each.mean("core_wait_percent") or 0.0, default=run.zero)
    names = ("host_cpu_percent", "steal_percent", "throttled_percent")
    busy, stolen, throttled = ((waiting.mean(name) or 0.0) / 100 for name in names)
    if not busy:
        return None
    beside = [record for record in run.ranks.values() if record.host == waiting.host]
    loads = [each.mean(name) or 0.0 for each in beside for name in ("cpu_percent", "workers_cpu_percent")]
    ranks = sum(loads) / 100
    text = str(run.config.get("machine/cores"))
    total = float(text) if text.isdecimal() else 0.0
    threads = max(line.figures.get("num_threads", 0.0) for record in beside for line in record.machine)
    return Cores(total, ranks, max(0.0, busy - ranks), stolen, throttled, len(beside), threads)


# Timelines of all ranks on one clock.

MOST_STEPS = 3


def find_window(run: Recorded) -> list[dict[int, Timeline]]:
    """Return by rank the timelines of some consecutive steps in the middle of the run; empty if there are none."""
    by_rank = {rank: {each.step: each for each in record.timelines} for rank, record in sorted(run.ranks.items())}
    common = sorted(set.intersection(*map(set, by_rank.values()))) if by_rank else []
    # The beginnings of consecutive steps.
    begin = begins[len(begins) // 2] if (begins := [step for step in common if step - 1 not in common]) else 0
    steps = itertools.takewhile(common.__contains__, range(begin, begin + MOST_STEPS))
    return [{rank: of_rank[step] for rank, of_rank in by_rank.items()} for step in steps]


def bars_of(timeline: Timeline, zero: float) -> list[tuple[str, float, float]]:
    """Return the phases of a rank in a step: name, begin and end, in seconds after the time ``zero``.

    ``waiting`` is waiting for gradients, within backward.
    """
    found: list[tuple[str, float, float]] = []
    for phase, begin_s, end_s in timeline.spans:
        if phase == "backward" and timeline.waited is not None and begin_s <= timeline.waited[0] <= end_s:
            since_s, until_s = timeline.waited
            found += [(phase, begin_s, since_s), ("waiting", since_s, min(until_s, end_s))]
        else:
            found.append(("waiting" if phase == "communication" else phase, begin_s, end_s))
    shift_s = timeline.time - zero
    return [(phase, shift_s + begin_s, shift_s + end_s) for phase, begin_s, end_s in found]
