"""The lines of a record as data. What cannot be what it claims to be is refused, so that all else can rely on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.telemetry.record.names import EVENTS

Line = Mapping[str, Any]


class Unfit(Exception):
    """A line that cannot be read; the message says why."""


@dataclass(frozen=True)
class Step:
    """A line of kind ``step``; see lockstep.telemetry.record.names."""

    step: int
    num_steps: int
    time: float
    interval_s: float | None
    total_s: float
    slowest_s: float
    slowest_step: int
    data_wait_s: float
    forward_s: float
    backward_s: float
    exposed_s: float | None
    hidden_s: float | None
    optimizer_s: float
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    samples: float
    counts: float | None = None

    @property
    def own_s(self) -> float:
        """Seconds of this rank's own work."""
        return self.data_wait_s + self.forward_s + self.backward_s + self.optimizer_s

    @property
    def lasted_s(self) -> float:
        """Seconds from its beginning to that of the next, as far as known."""
        return self.total_s if self.interval_s is None else self.interval_s


@dataclass(frozen=True)
class Bucket:
    """A bucket on its way; moments in seconds after the beginning of the step."""

    number: int
    size_bytes: int
    ready_s: float
    sent_s: float
    done_s: float


@dataclass(frozen=True)
class Timeline:
    """A line of kind ``timeline``; spans are of phase, begin and end."""

    step: int
    time: float
    spans: tuple[tuple[str, float, float], ...]
    buckets: tuple[Bucket, ...]
    waited: tuple[float, float] | None

    @property
    def end_s(self) -> float:
        """When the step ended, in seconds after its beginning."""
        return max((end for _, _, end in self.spans), default=0.0)


@dataclass(frozen=True)
class Machine:
    """A line of kind ``machine``; figures by name, those that are not known are left out."""

    time: float
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Event:
    """A line of kind ``event``."""

    event: str
    step: int
    time: float
    seconds: float | None
    text: str


PHASES = ("data_wait", "forward", "backward", "communication", "optimizer")


def number(line: Line, name: str) -> float | None:
    """Return a number of a line, which may be NaN or infinite; None if it is not known."""
    value = line.get(name)
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise Unfit(f"{name} is no number")


def finite(line: Line, name: str, *, at_least: float = -math.inf) -> float:
    """Return a number that has to be there."""
    value = number(line, name)
    if value is None or not math.isfinite(value) or value < at_least:
        raise Unfit(f"{name} is missing or out of range")
    return value


def seconds(line: Line, name: str) -> float | None:
    """Return a duration or a number of things, or None if it is not known."""
    value = number(line, name)
    if value is not None and not 0 <= value < math.inf:
        raise Unfit(f"{name} is out of range")
    return value


def _part(line: Line, name: str) -> float:
    """Return what a step spent on something; 0 where that could not be seen, so that it is among other things."""
    return 0.0 if name in line and line[name] is None else finite(line, name)


def step_of(line: Line) -> Step:
    """Read a line of kind ``step``."""
    total_s = finite(line, "total_s", at_least=0)
    step = int(finite(line, "step", at_least=0))
    return Step(
        step=step,
        num_steps=int(number(line, "num_steps") or 1),
        time=finite(line, "time"),
        interval_s=seconds(line, "interval_s"),
        total_s=total_s,
        slowest_s=seconds(line, "slowest_s") or total_s,
        slowest_step=int(number(line, "slowest_step") or step),
        data_wait_s=_part(line, "data_wait_s"),
        forward_s=_part(line, "forward_s"),
        backward_s=_part(line, "backward_s"),
        exposed_s=seconds(line, "exposed_s"),
        hidden_s=seconds(line, "hidden_s"),
        optimizer_s=finite(line, "optimizer_s"),
        loss=number(line, "loss"),
        learning_rate=number(line, "learning_rate"),
        grad_norm=number(line, "grad_norm"),
        samples=finite(line, "samples", at_least=0),
        counts=seconds(line, "counts"),
    )


def timeline_of(line: Line) -> Timeline:
    """Read a line of kind ``timeline``."""
    spans, buckets = [], []
    for span in _rows(line, "spans", 3):
        begin, end = (_moment(value) for value in span[1:])
        if span[0] not in PHASES or end < begin:
            raise Unfit("spans are not of phase, begin and end")
        spans.append((str(span[0]), begin, end))
    for row in _rows(line, "buckets", 5):
        moments = [_moment(value) for value in row]
        buckets.append(Bucket(int(moments[0]), int(moments[1]), *moments[2:]))
    begin_s, end_s = number(line, "waited_from"), number(line, "waited_until")
    waited = None if begin_s is None or end_s is None else (begin_s, end_s)
    return Timeline(int(finite(line, "step", at_least=0)), finite(line, "time"), tuple(spans), tuple(buckets), waited)


def _rows(line: Line, name: str, width: int) -> list[list[Any]]:
    rows = line.get(name)
    if not isinstance(rows, list) or any(not isinstance(row, list) or len(row) != width for row in rows):
        raise Unfit(f"{name} is no list of {width} values each")
    return rows


def _moment(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Unfit("a moment is no number")
    return float(value)


def machine_of(line: Line) -> Machine:
    """Read a line of kind ``machine``."""
    names = [name for name in line if name not in ("kind", "time")]
    figures = {name: value for name in names if (value := number(line, name)) is not None and math.isfinite(value)}
    return Machine(finite(line, "time"), figures)


def event_of(line: Line) -> Event:
    """Read a line of kind ``event``."""
    name = line.get("event")
    if name not in EVENTS:
        raise Unfit("no such event")
    step = int(finite(line, "step", at_least=0))
    return Event(str(name), step, finite(line, "time"), seconds(line, "seconds"), str(line.get("text", ""))[:2000])
