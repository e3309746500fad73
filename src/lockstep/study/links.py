"""A model of the time of a training step over a network, used by predict, report and doctor."""

# torch is imported only to probe a link, as `lockstep report` reads records without it.

from __future__ import annotations

import re
import time
from bisect import bisect_left
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

# The share of the nominal rate of a link that is available for gradients: the rest are headers of TCP, IP and Ethernet,
# and idle time of Gloo's ring between its two passes. Measured by bench/predict.py.
PAYLOAD_SHARE = 0.9

# From a process to another on two hosts of a local network.
LAN_LATENCY_S = 2e-4


@dataclass(frozen=True)
class Link:
    """The connection of each machine to the others.

    Attributes:
        bytes_per_s: The rate at which a machine can send gradients while it receives as many.
        latency_s: Of one message between two ranks.
        source: The origin of the figures, in words.
        payload: The share of its rate, as ``source`` and verdicts name it, that this is.
    """

    bytes_per_s: float
    latency_s: float = LAN_LATENCY_S
    source: str = "as given"
    payload: float = 1.0


def parse_rate(text: str) -> float:
    """Return the bytes per second of a rate such as ``100Mb``, ``1Gb`` (bits) or ``20MB/s`` (bytes).

    Raises:
        ConfigurationError: It cannot be read.
    """
    if (match := _RATE.fullmatch(text.strip())) is None or not float(match[1]):
        raise ConfigurationError(
            f"{text!r} is not the rate of a link.\n"
            "Give bits per second, such as 100Mb or 2.5Gb, or bytes, such as 20MB/s."
        )
    return float(match[1]) * _PREFIXES[match[2]] / (1 if match[3] == "B" else 8)


def given_link(text: str, latency_s: float = LAN_LATENCY_S) -> Link:
    """Return the link with the nominal rate ``text``; see `parse_rate`. A rate in bytes is that of gradients."""
    share = 1.0 if "B" in text else PAYLOAD_SHARE
    return Link(share * parse_rate(text), latency_s, f"{text} as given", share)


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in bits, as is usual for networks: ``100 Mb/s``."""
    for prefix, unit in reversed(_PREFIXES.items()):
        if 8 * bytes_per_s >= 0.9995 * unit:
            return f"{8 * bytes_per_s / unit:.3g} {prefix}b/s"
    return f"{8 * bytes_per_s:.3g} b/s"


def format_megabytes(size_bytes: float) -> str:
    """Return a size such as ``43.2 MB``, with three digits."""
    megabytes = size_bytes / 1e6
    return f"{megabytes:,.0f} MB" if megabytes >= 99.95 else f"{megabytes:.3g} MB"


def cable_bytes(size_bytes: float, num_members: int) -> float:
    """Return the bytes that a machine sends in an all-reduce of ``size_bytes`` in a ring.

    In a ring with n members, each sends 2 (n-1)/n of the bytes. In a hierarchy, the members are the machines. In one
    ring over all ranks, the members are the ranks, and each machine has one outgoing connection.
    """
    return 2 * (num_members - 1) / num_members * size_bytes


# --- the times of one rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Computing:
    """Seconds of a step of one rank without an exchange.

    Attributes:
        before_s, backward_s, after_s: Before, in and after backward, without waiting for a core.
        wall_s: A measured step as the clock shows it, with waiting for a core.
        fastest_s: The fastest measured step, without that.
    """

    before_s: float
    backward_s: float
    after_s: float
    wall_s: float = 0.0
    fastest_s: float = 0.0


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket: its bytes, and the fraction of backward, from 0 to 1, at which its last gradient is ready."""

    size_bytes: int
    ready: float


@dataclass(frozen=True)
class Cost:
    """The cost of exchanging gradients, per byte, without the time of the link.

    Attributes:
        sent: Bytes that a rank sends for each byte of an all-reduce without compression.
        encode_s: Seconds of the computing thread to encode a bucket.
        decode_s: Seconds of the computing thread to decode it after its arrival.
        cpu_s: Seconds of a core in other threads, for each byte that an all-reduce would send: encoding, sending,
            adding and decoding.
        staged: Whether a bucket is completely encoded before it is sent; otherwise both overlap.
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
        name: In the table.
        flags: Of ``lockstep train``.
        effect: How it changes the training; empty if it does not.
        cost: Of its exchange.
        sync_every: Steps between exchanges; if more than one, parameters are exchanged, after the update.
        accumulate: Micro-batches per exchange, each as large as the original global batch.
        is_compressed: Whether gradients are compressed.
    """

    name: str
    flags: str = ""
    effect: str = ""
    cost: Cost = Cost()
    sync_every: int = 1
    accumulate: int = 1
    is_compressed: bool = False


@dataclass(frozen=True)
class Profile:
    """A task on this machine.

    Attributes:
        global_batch_size: Samples of a step over all machines.
        computing: By the number of samples of one rank.
        buckets: In the order in which they are sent.
        small_buckets: The buckets if gradients are compressed; empty if they are the same.
        cores: Of a machine.
        busy_cores: Cores that the ranks of a machine use for computing.
        ranks_per_machine: Number of ranks of a machine.
        start_s: From the start of a rank's process until it has built the model.
        checkpoint_s, state_bytes: Writing a checkpoint, and its tensors; 0 if none was written.
    """

    global_batch_size: int
    computing: Mapping[int, Computing]
    buckets: Sequence[ReadyBucket]
    cores: float = 1
    busy_cores: float = 1
    ranks_per_machine: int = 1
    small_buckets: Sequence[ReadyBucket] = ()
    start_s: float = 0.0
    checkpoint_s: float = 0.0
    state_bytes: int = 0

    @property
    def gradient_bytes(self) -> int:
        """Of all buckets."""
        return sum(bucket.size_bytes for bucket in self.buckets)

    def share(self, num_machines: int) -> int:
        """Return the largest number of samples of a rank in a global batch; 0 if a rank would have none."""
        ranks = num_machines * self.ranks_per_machine
        return -(-self.global_batch_size // ranks) if self.global_batch_size >= ranks else 0

    def computing_for(self, num_samples: int) -> Computing:
        """Return the times for so many samples, in proportion to those of the nearest number that was measured."""
        nearest = min(self.computing, key=lambda count: abs(count - num_samples))
        computing, factor = self.computing[nearest], num_samples / nearest
        # The update does not change.
        return replace(computing, before_s=computing.before_s * factor, backward_s=computing.backward_s * factor)


# --- a step over a link -----------------------------------------------------------------------------------------------

# While sending keeps the cores busy, computing keeps at least this share of its speed.
_LEAST_PACE = 0.1


@dataclass(frozen=True)
class Step:
    """A predicted step.

    Attributes:
        seconds: Mean time of a step.
        sent_bytes: Mean bytes that a machine sends in a step.
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
    """The exchange of a bucket: seconds before, on and after the link; bytes; cores in use."""

    before_s: float
    link_s: float
    behind_s: float
    sent_bytes: float
    busy_cores: float


def _trip(size_bytes: float, profile: Profile, method: Method, link: Link, num_machines: int) -> _Trip:
    # The ranks of a machine reduce first, without compression; then each exchanges a slice with other machines.
    cost = method.cost
    ring_bytes = cable_bytes(size_bytes, num_machines)
    link_s, cpu_s = cost.sent * ring_bytes / link.bytes_per_s, cost.cpu_s * ring_bytes
    rank_s = cpu_s / profile.ranks_per_machine
    beside_s = rank_s / 2 if cost.staged else 0.0
    link_s = (link_s if cost.staged else max(link_s, rank_s)) + 2 * (num_machines - 1) * link.latency_s
    whole_s = link_s + 2 * beside_s or 1.0  # nothing is sent on one machine
    return _Trip(beside_s, link_s, beside_s, cost.sent * ring_bytes, cpu_s / whole_s)


def predict_step(profile: Profile, method: Method, link: Link, num_machines: int) -> Step:
    """Return the prediction for a step; a pure function.

    Buckets become ready during backward, and are sent in order over one link. If all cores are in use, sending slows
    down computing. The last bucket is ready at the end of backward. The update begins after its arrival.

    Raises:
        ValueError: Some rank would have no sample.
    """
    if not (share := profile.share(num_machines)):
        raise ValueError("more ranks than samples")
    times = profile.computing_for(share)
    if method.is_compressed and profile.small_buckets:
        profile = replace(profile, buckets=profile.small_buckets)
    trips = [_trip(bucket.size_bytes, profile, method, link, num_machines) for bucket in profile.buckets]
    sent_bytes = sum(trip.sent_bytes for trip in trips) / method.sync_every
    if method.sync_every == 1:
        seconds = method.accumulate * times.before_s + (method.accumulate - 1) * times.backward_s + times.after_s
        seconds += _reduced_backward_s(times.backward_s, trips, profile, method.cost)
    else:
        # Parameters have as many bytes as gradients. They are exchanged at once, without computing meanwhile.
        exchange_s = (method.cost.encode_s + method.cost.decode_s) * profile.gradient_bytes
        exchange_s += sum(trip.before_s + trip.link_s + trip.behind_s for trip in trips)
        seconds = times.before_s + times.backward_s + times.after_s + exchange_s / method.sync_every
    return Step(seconds, sent_bytes, profile.global_batch_size * method.accumulate)


def _reduced_backward_s(alone_s: float, trips: Sequence[_Trip], profile: Profile, cost: Cost) -> float:
    """Return the seconds from the start of a backward that takes ``alone_s`` until all gradients are reduced."""
    if not any(trip.link_s for trip in trips):  # one rank alone
        return alone_s
    now_s = done_s = free_s = 0.0  # the time; the completed work of backward; when the link becomes free
    pace, arrivals = 1.0, []
    for bucket, trip in zip(profile.buckets, trips, strict=True):
        work_s, done_s = bucket.ready * alone_s - done_s, bucket.ready * alone_s
        # While the link is busy, computing has the cores that sending does not use.
        beside_s = min(work_s / pace, max(0.0, free_s - now_s))
        now_s += beside_s + (work_s - beside_s * pace) + cost.encode_s * bucket.size_bytes
        free_s = max(now_s + trip.before_s, free_s) + trip.link_s
        if profile.busy_cores:
            pace = max(_LEAST_PACE, min(1.0, (profile.cores - trip.busy_cores) / profile.busy_cores))
        arrivals.append((free_s + trip.behind_s, cost.decode_s * bucket.size_bytes))
    now_s += alone_s - done_s
    for arrived_s, decode_s in arrivals:  # decoded in order, after backward
        now_s = max(now_s, arrived_s) + decode_s
    return now_s


# --- the bandwidth from which more machines are worthwhile ------------------------------------------------------------

# Bytes per second, as all numbers of bits that `format_rate` can write, from 1 kb/s to 10 Tb/s.
_RATES = [digits * 10.0**power / 8 for power in range(1, 11) for digits in range(100, 1000)]


def break_even(speed_over: Callable[[float], float], target: float, rates: Sequence[float] = _RATES) -> float | None:
    """Return the smallest of ``rates``, in bytes per second, with which ``speed_over`` reaches ``target``, or None.

    Args:
        speed_over: Returns the speed for the rate of a link; monotonic.
        target: A speed.
        rates: In order.
    """
    place = bisect_left(rates, target, key=speed_over)
    return rates[place] if place < len(rates) else None


# --- measuring a link -------------------------------------------------------------------------------------------------

# Minimum and maximum bytes of a message; how often short messages are sent, and how long these take at most.
_LEAST_BYTES, _MOST_BYTES, _NUM_TIMES, _SHORT_S = 2**12, 2**26, 5, 0.1


def probe_link(world: World, *, limit_s: float = 8.0) -> Link:
    """Measure the link between the machines with all-reduces. Collective: every rank. Blocks about ``limit_s``.

    The rate of all-reduces is lower than that of a single connection, as they wait for both ends.

    Args:
        world: The ranks, on at least two machines.
        limit_s: Larger messages are sent only within this time; at most 540 MB are sent.
    """
    import torch

    times: dict[int, float] = {}
    size, used_s = _LEAST_BYTES, 0.0
    # All ranks have the same times, so they agree. Four times the bytes take at most four times as long. The messages
    # are as large as the time allows, as the rate of a slow link is lower for large messages.
    while len(times) < 2 or (size <= _MOST_BYTES and used_s + 8 * times[size // 4] <= limit_s):
        tensor = torch.zeros(size // 4, device=world.device)
        seconds = [_time_all_reduce(tensor, world)]
        seconds += [_time_all_reduce(tensor, world) for _ in range(_NUM_TIMES if seconds[0] < _SHORT_S else 1)]
        times[size], used_s = median(seconds[1:]), used_s + sum(seconds)
        size *= 4
    (small, small_s), (large, large_s) = min(times.items()), max(times.items())
    members = world.world_size // (world.local_world_size if is_staged(world) else 1)
    bytes_per_s = cable_bytes(large - small, members) / max(large_s - small_s, 1e-9)
    latency_s = small_s / (2 * (members - 1))
    return Link(bytes_per_s, latency_s, f"{format_rate(bytes_per_s)}, probed with up to {large / 1e6:.3g} MB")


def is_staged(world: World) -> bool:
    """Return whether the ranks of a machine reduce before machines exchange."""
    return world.backend == "shm+gloo"


def _time_all_reduce(tensor: Tensor, world: World) -> float:
    """Return the seconds of an all-reduce on the slowest rank. Collective: every rank."""
    from lockstep.comm.collectives import all_reduce

    began_s = time.perf_counter()
    all_reduce(tensor, group=world.group)
    seconds = tensor.new_tensor([float(tensor[-1]) + time.perf_counter() - began_s])  # waits for a GPU
    all_reduce(seconds, group=world.group, op="max")
    return float(seconds)
