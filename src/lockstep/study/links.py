"""What a training step takes over a network: a model of buckets on one link, shared by predict, report and doctor."""

# Loads torch only to probe a link: `lockstep report` reads records without it.

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.comm.world import World

# --- links ------------------------------------------------------------------------------------------------------------

_RATE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kMGT])(b|bit|B)(?:/s|ps)?", re.ASCII)
_PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}

# Of what a link is called by, the share that gradients have: the rest are headers of TCP, IP and Ethernet, and what
# Gloo's ring leaves idle between its two passes. Measured by bench/predict.py.
PAYLOAD_SHARE = 0.9

# Between two hosts of a local network, from one process to the other.
LAN_LATENCY_S = 2e-4


@dataclass(frozen=True)
class Link:
    """What joins each machine to the others.

    Attributes:
        bytes_per_s: Of gradients that a machine can send while it receives as many.
        latency_s: Of one message between two ranks.
        source: Where the figures are from, in words.
    """

    bytes_per_s: float
    latency_s: float = LAN_LATENCY_S
    source: str = "as given"


def parse_rate(text: str) -> float:
    """Return the bytes per second of a rate such as ``100Mb``, ``1Gb`` (bits) or ``20MB/s`` (bytes).

    Raises:
        ConfigurationError: It is no such rate.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigurationError(
            f"{text!r} is no rate of a link.\nGive bits per second, such as 100Mb or 2.5Gb, or bytes, such as 20MB/s."
        )
    return float(match[1]) * _PREFIXES[match[2]] / (1 if match[3] == "B" else 8)


def given_link(text: str, latency_s: float = LAN_LATENCY_S) -> Link:
    """Return the link that is called by the rate ``text``; see `parse_rate`. One in bytes is what gradients get."""
    share = 1.0 if "B" in text else PAYLOAD_SHARE
    return Link(share * parse_rate(text), latency_s, f"{text} as given")


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in bits, by which networks are called: ``100 Mb/s``."""
    for prefix, unit in reversed(_PREFIXES.items()):
        if 8 * bytes_per_s >= 0.9995 * unit:
            return f"{8 * bytes_per_s / unit:.3g} {prefix}b/s"
    return f"{8 * bytes_per_s:.3g} b/s"


def format_megabytes(size_bytes: float) -> str:
    """Return such as ``43.2 MB``, with three figures."""
    megabytes = size_bytes / 1e6
    return f"{megabytes:,.0f} MB" if megabytes >= 99.95 else f"{megabytes:.3g} MB"


def cable_bytes(size_bytes: float, num_members: int) -> float:
    """Return what crosses a machine's cable in one direction when ``size_bytes`` are all-reduced in a ring.

    A ring over n members moves 2 (n-1)/n of the bytes from each to the next. In a hierarchy the machines are the
    members. One ring over all ranks has these as members, and leaves each machine once.
    """
    return 2 * (num_members - 1) / num_members * size_bytes


# --- what one rank takes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Computing:
    """Seconds of a step without any exchange, on one rank: up to backward, backward, and what comes after it."""

    before_s: float
    backward_s: float
    after_s: float


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket: its bytes, and at which part of backward, from 0 to 1, its last gradient is there."""

    size_bytes: int
    ready: float


@dataclass(frozen=True)
class Cost:
    """What the exchange of gradients takes beside the link, for each of their bytes.

    Attributes:
        sent: Bytes that a rank sends, where an all-reduce without compression sends one.
        encode_s: Seconds until a bucket can leave, of the thread that computes.
        decode_s: Seconds from its arrival until the gradients are there, of the same.
        cpu_s: Seconds of a core beside that thread for each byte that an all-reduce would send: encoding, sending,
            adding and decoding.
        staged: Whether a bucket is encoded before any of it is sent; if not, both go on at the same time.
    """

    sent: float = 1.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    cpu_s: float = 0.0
    staged: bool = False


@dataclass(frozen=True)
class Method:
    """A way to train on several machines.

    Attributes:
        name: As the table shows it.
        flags: What ``lockstep train`` needs for it.
        effect: What it does to the training; empty if that stays the same run.
        cost: Of its exchange.
        sync_every: Steps from one exchange to the next; more than one: of parameters, after the update.
        accumulate: Micro-batches for each exchange, each as large as the global batch was.
        hierarchical: Whether ranks of one machine reduce first.
        is_compressed: Whether gradients are compressed.
    """

    name: str
    flags: str = ""
    effect: str = ""
    cost: Cost = Cost()
    sync_every: int = 1
    accumulate: int = 1
    hierarchical: bool = True
    is_compressed: bool = False


@dataclass(frozen=True)
class Profile:
    """A task on this machine.

    Attributes:
        global_batch_size: Samples of a step over all machines.
        computing: By the samples of one rank.
        buckets: In the order in which they leave.
        small_buckets: The same where gradients are compressed; empty: those above.
        cores: Of a machine.
        busy_cores: Those that computing keeps busy, of all ranks of a machine.
        ranks_per_machine: Ranks.
        inside_s: Seconds for each byte of gradients that the ranks of one machine take to reduce and gather them.
    """

    global_batch_size: int
    computing: Mapping[int, Computing]
    buckets: Sequence[ReadyBucket]
    cores: float = 1
    busy_cores: float = 1
    ranks_per_machine: int = 1
    inside_s: float = 0.0
    small_buckets: Sequence[ReadyBucket] = ()

    @property
    def gradient_bytes(self) -> int:
        """Of all buckets."""
        return sum(bucket.size_bytes for bucket in self.buckets)

    def share(self, num_machines: int) -> int:
        """Return the samples of the largest rank's part of a global batch; 0 if some rank would have none."""
        ranks = num_machines * self.ranks_per_machine
        return -(-self.global_batch_size // ranks) if self.global_batch_size >= ranks else 0

    def computing_for(self, num_samples: int) -> Computing:
        """Return what so many samples take: as measured, else in proportion to the nearest number that was."""
        nearest = min(self.computing, key=lambda known: abs(known - num_samples))
        found, times = self.computing[nearest], num_samples / nearest
        return Computing(found.before_s * times, found.backward_s * times, found.after_s)  # the update stays


# --- a step over a link -----------------------------------------------------------------------------------------------

# However busy sending keeps a machine's cores, computing gets on at this part of its pace.
_LEAST_PACE = 0.1


@dataclass(frozen=True)
class Step:
    """A predicted step.

    Attributes:
        seconds: Of a step, over many.
        sent_bytes: By a machine in a step, over many.
        num_samples: Of all machines.
    """

    seconds: float
    sent_bytes: float
    num_samples: int

    @property
    def samples_per_s(self) -> float:
        """Of all machines."""
        return self.num_samples / self.seconds


class _Trip(NamedTuple):
    """A bucket's exchange: seconds before it is on the link, on it, and behind it; bytes; cores that it keeps busy."""

    before_s: float
    link_s: float
    behind_s: float
    sent_bytes: float
    busy_cores: float


def _trip(size_bytes: float, profile: Profile, method: Method, link: Link, num_machines: int) -> _Trip:
    cost, ranks = method.cost, profile.ranks_per_machine
    members = num_machines if method.hierarchical else num_machines * ranks
    # Inside a machine nothing is compressed; a ring over all ranks passes it at the pace of the link.
    inside_s = profile.inside_s * size_bytes if ranks > 1 and (method.hierarchical or num_machines == 1) else 0.0
    if num_machines == 1:
        return _Trip(0.0, inside_s, 0.0, 0.0, 0.0)
    moved = cable_bytes(size_bytes, members)
    link_s, cpu_s = cost.sent * moved / link.bytes_per_s, cost.cpu_s * moved
    # In a hierarchy each rank of a machine moves its slice; in one ring each moves all.
    rank_s, machine_s = (cpu_s / ranks, cpu_s) if method.hierarchical else (cpu_s, cpu_s * ranks)
    beside_s = rank_s / 2 if cost.staged else 0.0
    link_s = (link_s if cost.staged else max(link_s, rank_s)) + 2 * (members - 1) * link.latency_s + inside_s
    return _Trip(beside_s, link_s, beside_s, cost.sent * moved, machine_s / (link_s + 2 * beside_s))


def predict_step(profile: Profile, method: Method, link: Link, num_machines: int) -> Step:
    """Return what a step takes; a pure function.

    Buckets become ready during backward, and leave in order over one link. Sending takes cores from computing where
    all are in use. The last bucket is ready when backward is over, and the update comes after the last one has arrived.

    Raises:
        ValueError: Some rank would have no sample.
    """
    share = profile.share(num_machines)
    if not share:
        raise ValueError("more ranks than samples")
    alone = profile.computing_for(share)
    if method.is_compressed and profile.small_buckets:
        profile = replace(profile, buckets=profile.small_buckets)
    trips = [_trip(bucket.size_bytes, profile, method, link, num_machines) for bucket in profile.buckets]
    sent_bytes = sum(trip.sent_bytes for trip in trips) / method.sync_every
    if method.sync_every == 1:
        seconds = method.accumulate * alone.before_s + (method.accumulate - 1) * alone.backward_s + alone.after_s
        seconds += _reduced_backward_s(alone.backward_s, trips, profile, method.cost)
    else:
        # Parameters are as many bytes as gradients. They are there all at once, and nothing is computed meanwhile.
        exchange_s = (method.cost.encode_s + method.cost.decode_s) * profile.gradient_bytes
        exchange_s += sum(trip.before_s + trip.link_s + trip.behind_s for trip in trips)
        seconds = alone.before_s + alone.backward_s + alone.after_s + exchange_s / method.sync_every
    return Step(seconds, sent_bytes, profile.global_batch_size * method.accumulate)


def _reduced_backward_s(alone_s: float, trips: Sequence[_Trip], profile: Profile, cost: Cost) -> float:
    """Return the seconds from the beginning of a backward that takes ``alone_s`` until all gradients are reduced."""
    if not any(trip.link_s for trip in trips):  # one rank alone
        return alone_s
    now_s = done_s = free_s = 0.0  # the clock; the work of backward that is done; when the link is free
    pace, arrivals = 1.0, []
    for bucket, trip in zip(profile.buckets, trips, strict=True):
        work_s, done_s = bucket.ready * alone_s - done_s, bucket.ready * alone_s
        # While the link is busy, computing gets the cores that sending leaves.
        beside_s = min(work_s / pace, max(0.0, free_s - now_s))
        now_s += beside_s + (work_s - beside_s * pace) + cost.encode_s * bucket.size_bytes
        free_s = max(now_s + trip.before_s, free_s) + trip.link_s
        if profile.busy_cores:
            pace = max(_LEAST_PACE, min(1.0, (profile.cores - trip.busy_cores) / profile.busy_cores))
        arrivals.append((free_s + trip.behind_s, cost.decode_s * bucket.size_bytes))
    now_s += alone_s - done_s
    for arrived_s, decode_s in arrivals:  # taken in one by one, in order, when backward is over
        now_s = max(now_s, arrived_s) + decode_s
    return now_s


# --- from which bandwidth on more machines pay ------------------------------------------------------------------------

_SLOWEST, _FASTEST = 1e2, 1e12  # bytes per second


def break_even(rate_over: Callable[[float], float], target: float) -> float | None:
    """Return the bytes per second from which on ``rate_over`` is above ``target``; None if it never is.

    Args:
        rate_over: Samples per second over a link of so many bytes per second; grows with them.
        target: Samples per second.
    """
    low, high = _SLOWEST, _FASTEST
    if rate_over(high) <= target:
        return None
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if rate_over(middle) > target else (middle, high)
    return high


# --- what a link gives ------------------------------------------------------------------------------------------------

# Messages have so many bytes at least and at most; short ones are sent so often.
_LEAST_BYTES, _MOST_BYTES, _NUM_TIMES, _SHORT_S = 2**12, 2**26, 5, 0.1


def probe_link(world: World, *, limit_s: float = 8.0) -> Link:
    """Return what the link between the machines gives all-reduces. Collective: every rank. Blocks about ``limit_s``.

    Not what one connection could carry: all-reduces get less of a link, as they wait for both of its ends.

    Args:
        world: The ranks, on two machines or more.
        limit_s: No larger message is sent if that would take longer; 540 MB are sent at most.
    """
    import torch

    times: dict[int, float] = {}
    size, used_s = _LEAST_BYTES, 0.0
    # The ranks decide by the same figures. Four times the bytes take four times as long at most. As large as there is
    # time for: over a slow link large messages get less of it than small ones, as the ends wait for each other.
    while len(times) < 2 or (size <= _MOST_BYTES and used_s + 8 * times[size // 4] <= limit_s):
        tensor = torch.zeros(size // 4, device=world.device)
        found = [_time_all_reduce(tensor, world)]
        for _ in range(_NUM_TIMES if found[0] < _SHORT_S else 1):
            found.append(_time_all_reduce(tensor, world))
        times[size], used_s = median(found[1:]), used_s + sum(found)
        size *= 4
    (small, small_s), (large, large_s) = min(times.items()), max(times.items())
    members = world.world_size // (world.local_world_size if is_staged(world) else 1)
    bytes_per_s = cable_bytes(large - small, members) / max(large_s - small_s, 1e-9)
    latency_s = small_s / (2 * (members - 1))
    return Link(bytes_per_s, latency_s, f"{format_rate(bytes_per_s)}, probed with up to {large / 1e6:.3g} MB")


def is_staged(world: World) -> bool:
    """Return whether ranks of one machine reduce first, and machines then."""
    return world.backend == "shm+gloo"


def _time_all_reduce(tensor: Tensor, world: World) -> float:
    """Return the seconds that it takes on the slowest rank. Collective: every rank."""
    from lockstep.comm.collectives import all_reduce

    began_s = time.perf_counter()
    all_reduce(tensor, group=world.group)
    took = tensor.new_tensor([float(tensor[-1]) + time.perf_counter() - began_s])  # waits for a GPU
    all_reduce(took, group=world.group, op="max")
    return float(took)
