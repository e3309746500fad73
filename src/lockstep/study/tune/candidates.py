"""What is worth trying, stage by stage: pure, from what is known of the task so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import ConfigurationError
from lockstep.study.tune.values import (
    Values,
    changed,
    in_words,
    loop_settings,
    num_shares,
    strategy_of,
    threads,
    value_of,
)
from lockstep.train.step import check_engine

_MIB = 2**20
_FIRST_CAP_MIB, _USUAL_CAP_MIB = 1.0, 25.0
_HARDLY = 0.02
"""Loader processes are not tried if a step waits for data no longer than this part of it."""

_MOST_WORKERS = 16
_ENGINES_OWN = {"bucket_cap_mb": None, "wire": None, "overlap_optimizer": False}
"""What only strategy ddp can do."""


@dataclass(frozen=True)
class Candidate:
    """A change to try.

    Args:
        changes: Settings by name, defaults spelled out.
        predicted: What advice said that it would gain; None if it said nothing.
        cause: What the advice went by.
    """

    changes: Mapping[str, Any]
    predicted: float | None = None
    cause: str = ""

    @property
    def name(self) -> str:
        """The change in words."""
        return in_words(self.changes)


@dataclass(frozen=True)
class Stage:
    """Changes that are tried together; ``skipped`` says why none is worth it."""

    name: str
    candidates: tuple[Candidate, ...] = ()
    skipped: str = ""


@dataclass(frozen=True)
class Known:
    """What is known of task and machine.

    Args:
        num_devices: That take part.
        on_cuda: Whether they are GPUs.
        num_cores: Of this machine, as far as a process may use them.
        global_batch_size: Samples of a step.
        strategies: That may be tried.
        wait_share: The part of a step that waits for data; None if it was not measured.
        gradient_bytes: Of all gradients; None if not known.
        largest: Samples of the largest micro-batch that fits on a device.
        bytes_of: What a micro-batch of so many samples needs; None if not known.
        limit_bytes: What one process may use.
    """

    num_devices: int
    on_cuda: bool
    num_cores: int
    global_batch_size: int
    strategies: Sequence[str]
    wait_share: float | None = None
    gradient_bytes: int | None = None
    largest: int | None = None
    bytes_of: Callable[[int], int | None] = field(default=lambda size: None)
    limit_bytes: int | None = None


STAGES = ("loading", "prefetch", "strategy", "micro-batch", "threads", "buckets", "precision")
"""In this order: behind a slow loader nothing else can be seen, and what comes later depends on the strategy."""


def stage(name: str, base: Values, known: Known) -> Stage:
    """Return what to try on top of ``base``."""
    found = _MAKERS[name](base, known)
    if isinstance(found, str):
        return Stage(name, skipped=found)
    possible = tuple(Candidate(changes) for changes in found if can_be_had(base, changes))
    return Stage(name, possible, "" if possible else "the other settings rule it out")


def can_be_had(base: Values, changes: Mapping[str, Any]) -> bool:
    """Return whether a change goes together with the settings that it is made to."""
    values = changed(base, changes)
    try:
        check_engine(strategy_of(values), loop_settings(values))
    except ConfigurationError:
        return False
    reproducible = value_of(values, "reproducible") is not None
    return not reproducible or strategy_of(values) in ("single", "dp", "ddp")


def _loading(base: Values, known: Known) -> list[Values] | str:
    now = value_of(base, "workers")
    if now == 0 and known.wait_share is not None and known.wait_share < _HARDLY:
        most = 1 / (1 - known.wait_share)
        return f"a step waits for data {known.wait_share:.1%} of its time: no more than {most:.2f} times to gain"
    per_rank = max(1, known.num_cores // known.num_devices)
    if now == 0:
        counts = {1, 2, min(max(4, per_rank), _MOST_WORKERS)}
    else:
        counts = {now // 2, min(2 * now, _MOST_WORKERS)} - {now}
    return [{"workers": count} for count in sorted(counts)]


def _prefetch(base: Values, known: Known) -> list[Values] | str:
    if not isinstance(value_of(base, "workers"), int) or not value_of(base, "workers"):
        return "there are no loader processes"
    now = value_of(base, "prefetch") or 2
    return [{"prefetch": count} for count in (4, 8) if count != now]


def _strategy(base: Values, known: Known) -> list[Values] | str:
    if known.num_devices == 1:
        return "there is one device"
    names = [name for name in known.strategies if name != strategy_of(base)]
    return [to_strategy(base, name, known) for name in names] or "no other was asked for"


def to_strategy(base: Values, name: str, known: Known) -> Values:
    """Return the changes that make ``name`` compute: without what only others can do, and in pieces that fit."""
    changes: Values = {"strategy": name}
    if name != "ddp":
        changes |= {key: value for key, value in _ENGINES_OWN.items() if value_of(base, key) != value}
    now = value_of(base, "accumulate")
    pieces = now
    if num_shares(changed(base, changes), known.num_devices) < num_shares(base, known.num_devices):
        while not _fits_alone(known, known.global_batch_size // pieces) and known.global_batch_size % (2 * pieces) == 0:
            pieces *= 2
    elif strategy_of(base) == "single":
        pieces = max(1, now // known.num_devices)
    return changes if pieces == now else {**changes, "accumulate": pieces}


def _fits_alone(known: Known, size: int) -> bool:
    """Return whether one device can be expected to hold a micro-batch; where nothing is known, as much as it held."""
    needed = known.bytes_of(size)
    if needed is None or known.limit_bytes is None:
        return known.largest is None or size <= known.largest
    return needed <= known.limit_bytes * (1 if known.on_cuda else known.num_devices)


def _micro_batch(base: Values, known: Known) -> list[Values] | str:
    now, shares = value_of(base, "accumulate"), num_shares(base, known.num_devices)
    if value_of(base, "reproducible") is not None or value_of(base, "shares") is not None:
        return "reproducible and shares set the sizes"
    share = known.global_batch_size // shares
    smallest = 1 if known.largest is None or shares == 1 else -(-share // known.largest)
    counts = {smallest, now // 2, 2 * now, 4 * now} - {0, now}
    fitting = [count for count in sorted(counts) if count >= smallest and share % count == 0 and share // count > 1]
    return [{"accumulate": count} for count in fitting] or "the batch cannot be cut otherwise"


def _threads(base: Values, known: Known) -> list[Values] | str:
    if known.on_cuda:
        return "GPUs compute"
    if value_of(base, "reproducible") is not None:
        return "reproducible computes with one"
    now = value_of(base, "threads") or threads(base, known.num_cores, known.num_devices)
    counts = {1, now // 2, 2 * now, known.num_cores} - {0, now}
    fitting = [count for count in sorted(counts) if count <= known.num_cores]
    return [{"threads": count} for count in fitting] or "there is one core"


def _buckets(base: Values, known: Known) -> list[Values] | str:
    if strategy_of(base) != "ddp" or known.num_devices == 1:
        return "only ddp on several devices has them"
    found: list[Values] = []
    now = value_of(base, "bucket_cap_mb")
    mib = None if known.gradient_bytes is None else known.gradient_bytes / _MIB
    if now is not None:
        found.append({"bucket_cap_mb": None})
    if mib is None or mib > _FIRST_CAP_MIB:
        found += [{"bucket_cap_mb": 5.0}] if (mib is None or mib > 10) and now != 5.0 else []
        found += [{"bucket_cap_mb": 100.0}] if (mib is None or mib > _USUAL_CAP_MIB) and now != 100.0 else []
    if value_of(base, "clip") is None and not value_of(base, "overlap_optimizer"):
        found.append({"overlap_optimizer": True})
    return found or f"all gradients ({mib:.1f} MiB) travel in one bucket"


def _precision(base: Values, known: Known) -> list[Values] | str:
    found: list[Values] = [{"precision": "bf16"}] if value_of(base, "precision") == "fp32" else []
    large = known.gradient_bytes is None or known.gradient_bytes > _MIB
    if strategy_of(base) == "ddp" and known.num_devices > 1 and large and value_of(base, "wire") is None:
        found.append({"wire": "bf16"})
    return found or "it is low already"


_MAKERS: dict[str, Callable[[Values, Known], list[Values] | str]] = {
    "loading": _loading,
    "prefetch": _prefetch,
    "strategy": _strategy,
    "micro-batch": _micro_batch,
    "threads": _threads,
    "buckets": _buckets,
    "precision": _precision,
}
