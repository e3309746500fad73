"""What else a report derives from a record: network, costs, cores and timelines; pure functions."""

import itertools
import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from lockstep.study.links import Computing, Link, Profile, ReadyBucket, cable_bytes
from lockstep.telemetry.cost import Price, Usage
from lockstep.telemetry.figures import Figures
from lockstep.telemetry.record import RankRecord, Recorded, StepLine, Timeline
from lockstep.telemetry.step_times import StepTimes

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
    ranks = [rank for rank in run.last.get("ranks") or () if isinstance(rank, dict) and rank]
    return len({(rank.get("host"), rank.get("node")) for rank in ranks}) or 1


def find_network(run: Recorded, figures: Figures) -> Network | None:
    """Return the traffic of a run; None unless steps have timelines with buckets."""
    machines, num_ranks = num_machines(run), len(run.ranks)
    batch = run.last.get("global_batch_size")
    timelines = [timeline for timeline in run.zero.timelines if timeline.buckets and timeline.waited]
    if not timelines or not figures.by_rank or type(batch) is not int:
        return None
    last_timeline, parts = timelines[-1], figures.critical
    begin_s = max((begin for phase, begin, _ in last_timeline.spans if phase == "backward"), default=0.0)
    backward_s = max(last_timeline.waited[0] - begin_s if last_timeline.waited else 0.0, 1e-9)
    order = sorted(last_timeline.buckets, key=lambda bucket: bucket.sent_s)
    ready = [min(1.0, max(0.0, (bucket.ready_s - begin_s) / backward_s)) for bucket in order[:-1]]
    buckets = [ReadyBucket(bucket.size_bytes, fraction) for bucket, fraction in zip(order, [*ready, 1.0], strict=True)]
    rest_s = parts.part("optimizer", "other", "core_wait")
    computing = Computing(parts.part("data_wait", "forward"), parts.part("backward"), rest_s)
    profile = Profile(batch, {-(-batch // num_ranks): computing}, buckets, ranks_per_machine=-(-num_ranks // machines))
    rates = [rate for timeline in timelines if (rate := _link_rate(timeline, run, machines))]
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
    largest = max(buckets, key=lambda bucket: bucket.size_bytes)
    whole_s = max(bucket.done_s for bucket in buckets) - min(bucket.sent_s for bucket in buckets)
    all_buckets = sum(bucket.size_bytes for bucket in buckets), whole_s
    spans = [(largest.size_bytes, largest.done_s - largest.sent_s), all_buckets]
    return max((ratio * cable_bytes(size, members) / seconds for size, seconds in spans if seconds > 0), default=None)


def _slowest_link(run: Recorded) -> str:
    by_link: dict[str, list[float]] = {}
    for rank, record in run.ranks.items():
        for line in record.machine:
            if bytes_per_s := line.figures.get("link_bytes_per_s"):
                by_link.setdefault(f"{record.host} (rank {rank}) to {line.link_peer}", []).append(bytes_per_s)
    if not by_link:
        return ""
    slowest = min(by_link, key=lambda name: median(by_link[name]))
    return f"{slowest}, {median(by_link[slowest]) / 1e6:.3g} MB/s"


# Costs: of the run and of an epoch.


def find_costs(run: Recorded, price: str | None = None) -> list[str]:
    """Return sentences on what all starts of the run used, and an epoch; empty if that was not recorded.

    Args:
        run: The run.
        price: Of a device for an hour; by default that of the record.

    Raises:
        ConfigurationError: The price cannot be read.
    """
    entries = [line.figures for line in run.machine if "device_s" in line.figures]
    usage = sum((Usage(entry["device_s"], entry.get("energy_j", math.nan)) for entry in entries), start=Usage())
    steps = run.zero.steps
    cost = Price.read(str(run.config["price"]) if price is None and "price" in run.config else price)
    if not usage.device_s:
        return []
    texts = [f"The run (starts: {len(run.sessions)}) used {usage.text(cost)}."]
    if steps and isinstance(per_epoch := run.last.get("steps_per_epoch"), int):
        texts.append(f"An epoch used {(usage * (per_epoch / (steps[-1].step + steps[-1].num_steps))).text(cost)}.")
    return texts


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
    waiter = max(run.ranks.values(), key=lambda record: record.mean("core_wait_percent") or 0.0, default=run.zero)
    names = ("host_cpu_percent", "steal_percent", "throttled_percent")
    busy, stolen, throttled = ((waiter.mean(name) or 0.0) / 100 for name in names)
    if not busy:
        return None
    host_records = [record for record in run.ranks.values() if record.host == waiter.host]
    loads = [record.mean(name) or 0.0 for record in host_records for name in ("cpu_percent", "workers_cpu_percent")]
    ranks = sum(loads) / 100
    text = str(run.config.get("machine/cores"))
    total = float(text) if text.isdecimal() else 0.0
    threads = max(line.figures.get("num_threads", 0.0) for record in host_records for line in record.machine)
    return Cores(total, ranks, max(0.0, busy - ranks), stolen, throttled, len(host_records), threads)


# Timelines of all ranks on one clock, in the parts that the means have.

MOST_STEPS = 3

# Of a step: a name in `PARTS`, begin and end in seconds.
Bar = tuple[str, float, float]


def timelines_by_step(run: Recorded) -> dict[int, dict[int, Timeline]]:
    """Return the timelines by step and by rank."""
    by_step: dict[int, dict[int, Timeline]] = {}
    for rank, record in sorted(run.ranks.items()):
        for timeline in record.timelines:
            by_step.setdefault(timeline.step, {})[rank] = timeline
    return by_step


def find_window(run: Recorded) -> list[dict[int, Timeline]]:
    """Return by rank the timelines of some consecutive steps in the middle of the run; empty if there are none."""
    by_step = timelines_by_step(run)
    common = sorted(step for step, timelines in by_step.items() if timelines.keys() == run.ranks.keys())
    # The beginnings of consecutive steps.
    begin = begins[len(begins) // 2] if (begins := [step for step in common if step - 1 not in common]) else 0
    return [by_step[step] for step in itertools.takewhile(common.__contains__, range(begin, begin + MOST_STEPS))]


def bars_of(run: Recorded, step: Mapping[int, Timeline], zero: float) -> dict[int, list[Bar]]:
    """Return the bars of each rank in a step, in seconds after the time ``zero``.

    The shortest wait for gradients of all ranks is the exchange: the end of each rank's wait. What a rank waited for a
    core in a phase, of which only the sum is known, is the end of the phase.
    """
    spans = {rank: _spans(timeline) for rank, timeline in step.items()}
    wire_s = min(sum(end_s - begin_s for name, begin_s, end_s in bars if name == "peers") for bars in spans.values())
    lanes = {}
    for rank, timeline in step.items():
        line = _line_at(run.ranks[rank], timeline.step)
        times = line.times if line is not None else StepTimes(total_s=0.0)
        lasted_s: dict[str, float] = {}
        for name, begin_s, end_s in spans[rank]:
            lasted_s[name] = lasted_s.get(name, 0.0) + end_s - begin_s
        # The times of phases are without it; other differences are collectives within forward.
        ends_s = {name: max(0.0, seconds - times.part(name)) for name, seconds in lasted_s.items() if name != "peers"}
        without_core = min(1.0, times.part("core_wait") / (sum(ends_s.values()) or 1.0))
        shares = {name: without_core * ends_s[name] / lasted_s[name] for name in ends_s}
        shares["peers"] = wire_s / lasted_s.get("peers", math.inf)
        bars: list[Bar] = []
        until_s = 0.0
        for name, begin_s, end_s in spans[rank]:
            turn_s = end_s - shares[name] * (end_s - begin_s)
            end_name = "wire" if name == "peers" else "core_wait"
            bars += [("other", until_s, begin_s), (name, begin_s, turn_s), (end_name, turn_s, end_s)]
            until_s = max(until_s, end_s)
        bars.append(("other", until_s, line.lasted_s if line is not None and line.num_steps == 1 else until_s))
        shift_s = timeline.time - zero
        lanes[rank] = [(name, shift_s + begin, shift_s + end) for name, begin, end in bars if end - begin > _SHORTEST_S]
    return lanes


# Times are recorded with fewer digits.
_SHORTEST_S = 1e-6


def _spans(timeline: Timeline) -> list[Bar]:
    """Return the phases of a rank in a step, with the wait for gradients as ``peers``."""
    bars: list[Bar] = []
    for phase, begin_s, end_s in timeline.spans:
        if phase == "backward" and timeline.waited is not None and begin_s <= timeline.waited[0] <= end_s:
            since_s, until_s = timeline.waited
            bars += [(phase, begin_s, since_s), ("peers", since_s, min(until_s, end_s))]
        else:
            bars.append(("peers" if phase == "communication" else phase, begin_s, end_s))
    return [span for span in bars if span[2] > span[1]]


def _line_at(record: RankRecord, step: int) -> StepLine | None:
    """Return the line that covers a step, if there is one."""
    place = bisect(record.steps, step, key=lambda line: line.step) - 1
    line = record.steps[place] if place >= 0 else None
    return line if line is not None and step < line.step + line.num_steps else None
