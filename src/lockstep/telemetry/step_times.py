"""The time of a step: its parts, with their names and colors; how marks become times. Does not import torch.

[Note: the parts of a step]
``total_s`` = the parts of `PARTS` together. ``backward`` has no communication in it: what backward cannot hide is
``exposed`` = ``wire`` (the transfer) + ``peers`` (waiting for ranks that come later). Waiting for a core is in none of
the other parts, and ``other`` is what is left. ``copy`` and ``hidden`` happen beside the parts, and are in no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

from lockstep.base.activity import core_wait_s

# --- the parts of a step ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """How pages, messages and the live view show a part of a step.

    Attributes:
        label: Its name.
        letter: In a bar of letters, which is readable without colors.
        color, ink: The color of its bar, and of a letter on it.
        hatch: In plots, for those who cannot tell the colors apart.
        doing: What a rank does in it, for a message that it is slow.
    """

    label: str
    letter: str
    color: str
    ink: str = "#000000"
    hatch: str = ""
    doing: str = ""


# In order, by name: ``StepTimes`` has the seconds of each as ``NAME_s``.
#
# The colors are those of Okabe and Ito, which most people with color blindness can tell apart.
PARTS = {
    "data_wait": Part("data wait", "D", "#E69F00", doing="loading data"),
    "forward": Part("forward", "F", "#56B4E9", doing="forward"),
    "backward": Part("backward", "B", "#0072B2", ink="#FFFFFF", doing="backward"),
    "wire": Part("exchange", "X", "#009E73", hatch="/"),
    "peers": Part("waiting for ranks", "W", "#D55E00", hatch="\\"),
    "optimizer": Part("optimizer", "O", "#CC79A7", doing="optimizer"),
    "core_wait": Part("waiting for a core", "C", "#F0E442", hatch="x", doing="waiting for a core"),
    "other": Part("other", "-", "#999999", doing="code between steps"),
}

# The parts that are a rank's own work: in these it can be slow.
OWN_PARTS = tuple(name for name in PARTS if name not in ("wire", "peers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step of one rank, or of a typical step; None is unknown. See [Note: the parts of a step].

    Attributes:
        total_s: The whole step.
        data_wait_s: Waiting for samples and their copy.
        forward_s: Model and loss.
        backward_s: Backward without exposed communication, or with it if that is unknown.
        exposed_s: Communication without overlap.
        optimizer_s: Checking, clipping and the update.
        core_wait_s: Waiting for a core; None on devices other than CPUs.
        peers_s: The part of ``exposed_s`` that is waiting for ranks that come later; only known with all ranks.
        copy_s: Copying samples to the device, in parallel to other work.
        hidden_s: Communication that overlaps with backward.
    """

    total_s: float
    data_wait_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    exposed_s: float | None = None
    optimizer_s: float | None = None
    core_wait_s: float | None = None
    peers_s: float | None = None
    copy_s: float | None = None
    hidden_s: float | None = None

    @property
    def wire_s(self) -> float | None:
        """The part of ``exposed_s`` that is the transfer of gradients, not waiting for other ranks."""
        return None if self.exposed_s is None else self.exposed_s - (self.peers_s or 0.0)

    @property
    def other_s(self) -> float:
        """Seconds of what no other part accounts for."""
        return max(0.0, self.total_s - self.part(*(name for name in PARTS if name != "other")))

    @property
    def own_s(self) -> float:
        """The rank's own work: the time without exposed communication, the sum of `OWN_PARTS`."""
        return sum(map(self.part, OWN_PARTS))

    def part(self, *names: str) -> float:
        """Return the seconds of parts in `PARTS`, or of another time, by name; 0 if unknown."""
        return sum(getattr(self, f"{name}_s") or 0.0 for name in names)

    def share(self, *names: str) -> float:
        """Return the share of the step that these parts are: its one definition, for all tables and sentences."""
        return self.part(*names) / (self.total_s or 1.0)

    def parts(self) -> dict[str, float]:
        """Return the seconds of the parts that are known, by name and in order."""
        return {name: self.part(name) for name in PARTS if getattr(self, f"{name}_s") is not None}


# The names of the fields.
TIMES = tuple(attribute.name for attribute in fields(StepTimes))


def combine(steps: Sequence[StepTimes], average: Callable[[Sequence[float]], float] = fmean) -> StepTimes:
    """Return the mean of each time, or another ``average``, over those of ``steps`` in which it is known."""
    means: dict[str, Any] = {name: mean_of_known((getattr(step, name) for step in steps), average) for name in TIMES}
    return StepTimes(**means)


def mean_of_known(values: Iterable[float | None], average: Callable[[Sequence[float]], float] = fmean) -> float | None:
    """Return the mean, or another ``average``, of those ``values`` that are known; None if none is."""
    return average(numbers) if (numbers := [value for value in values if value is not None]) else None


def milliseconds(seconds: float) -> str:
    """Return a short time with its unit, such as ``14.5 ms``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.{1 if seconds >= 0.001 else 2}f} ms"


# --- a step as marks, which are read later ----------------------------------------------------------------------------

# A moment: a time of the host's clock (``time.perf_counter``), or an event on the stream of the work. Not typed, so
# that ``lockstep report`` reads records without importing torch.
Mark = Any

# The phases that a loop goes through, the names of spans; all of ``communication`` is waiting.
PHASES = ("data_wait", "forward", "backward", "communication", "optimizer")


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds between two marks, both of the host or both of a device."""
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1e3


@dataclass(slots=True)
class BucketMarks:
    """When the last gradient of a bucket was ready, when the bucket was launched, and when it was reduced."""

    position: int
    size_bytes: int
    ready: Mark
    sent: Mark | None = None
    done: Mark | None = None


@dataclass(slots=True)
class Reduction:
    """The exchange of gradients of one backward.

    Attributes:
        buckets: In launch order; empty unless the step has a timeline.
        waited: From the end of this rank's own work until all buckets were reduced.
        exposed_s: The part of that time in which the rank waited; None if it is all of it.
    """

    buckets: list[BucketMarks] = field(default_factory=list)
    waited: tuple[Mark, Mark] | None = None
    exposed_s: float | None = None

    @property
    def waited_s(self) -> float:
        """Seconds that the rank waited for communication after its own work."""
        if self.exposed_s is not None:
            return self.exposed_s
        return 0.0 if self.waited is None else seconds_between(*self.waited)

    def hidden_s(self, start: Mark) -> float | None:
        """Return the time in which buckets were being reduced while this rank worked; ``start`` is that of the step."""
        if self.waited is None or not self.buckets:
            return None
        until = seconds_between(start, self.waited[0])
        hidden = reached = 0.0
        for bucket in self.buckets:
            if bucket.sent is not None and bucket.done is not None:
                sent, done = seconds_between(start, bucket.sent), min(until, seconds_between(start, bucket.done))
                # Buckets may overlap: the common time counts once.
                hidden += max(0.0, done - max(sent, reached))
                reached = max(reached, done)
        return hidden


@dataclass(slots=True)
class Number:
    """A number of the step, which may still be copied from the device; see `StepMarks.device_marks`.

    Attributes:
        value: The number, or a tensor of several; no view of it, as host buffers are reused (accelerator.py).
        arrived: After which it can be read; None: at once.
        place: Which number of the tensor.
    """

    value: Any
    arrived: Mark | None = None
    place: int | None = None

    def __float__(self) -> float:
        return float(self.value if self.place is None else self.value[self.place])


@dataclass(slots=True)
class StepMarks:
    """A step of one rank as the training thread takes it down, as marks that another thread evaluates later.

    Attributes:
        number: Counted from 0.
        begin: The first mark.
        began_at: When the host reached it, by ``time.perf_counter``.
        wall_s: The same in Unix time.
        end: The last mark.
        spans: In order: phase, begin, end, and the seconds in which the host was blocked by collectives other than
            those of the engine. Time between spans is spent in the script.
        samples: Of the global batch.
        losses: One per micro-batch, or one for all; the mean is recorded.
        grad_norm, counted: Gradient norm before clipping; what the loss is a mean over if that is not samples.
        learning_rate: Of the first parameter group.
        reductions: One for each synchronised backward, of an engine that measures its waiting.
        exposed_s: For any other engine, how long backward waited for communication; None if unknown.
        core_uses: For each span, `activity.core_use` of the training thread at its beginning and at its end.
        copies: Begin and end of copies to the device, which run in parallel to other work.
        unseen: Phases that could not be observed; null in the record.
        has_timeline: Whether each span and bucket is recorded; see `lockstep.telemetry.recorder.has_timeline`.
        interval_s: From its beginning to that of the next step, or of an event between them.
        is_skipped: Whether the update was skipped, as the gradient was not finite.
        logged: What a callback has logged, by name.
    """

    number: int
    begin: Mark
    began_at: float
    wall_s: float
    end: Mark
    spans: list[tuple[str, Mark, Mark, float]] = field(default_factory=list)
    samples: int = 0
    losses: list[Number] = field(default_factory=list)
    grad_norm: Number | None = None
    counted: Number | None = None
    learning_rate: float | None = None
    reductions: list[Reduction] = field(default_factory=list)
    exposed_s: float | None = None
    core_uses: list[tuple[bytes, bytes]] = field(default_factory=list)
    copies: Sequence[tuple[Mark, Mark]] = ()
    unseen: frozenset[str] = frozenset()
    has_timeline: bool = False
    interval_s: float | None = None
    is_skipped: bool = False
    logged: dict[str, Number] = field(default_factory=dict)

    @property
    def device_marks(self) -> list[Any]:
        """The events of the device after which all values can be read."""
        candidates = (*self.losses, self.grad_norm, self.counted, *self.logged.values())
        numbers = [number for number in candidates if number is not None]
        marks = [self.end, *(number.arrived for number in numbers), *(end for _, end in self.copies)]
        return [mark for mark in marks if mark is not None and not isinstance(mark, float)]

    @property
    def loss(self) -> float | None:
        """The mean of the losses, if there are any."""
        return sum(map(float, self.losses)) / len(self.losses) if self.losses else None

    def times(self) -> StepTimes:
        """Return the times of the step. Waiting is subtracted from the phase in which it occurred."""
        seconds = dict.fromkeys(PHASES, 0.0)
        in_collectives_s = 0.0
        for phase, begin, end, waited_s in self.spans:
            seconds[phase] += seconds_between(begin, end)
            if phase != "communication":
                # Such as the all-reduce of SyncBatchNorm within forward.
                seconds[phase] -= waited_s
                in_collectives_s += waited_s
        in_backward_s = sum(reduction.waited_s for reduction in self.reductions) if self.reductions else self.exposed_s
        seconds["backward"] = max(0.0, seconds["backward"] - (in_backward_s or 0.0))
        exposed_s = None if in_backward_s is None else in_backward_s + seconds["communication"] + in_collectives_s
        without_core_s = self._take_out_core_wait(seconds)
        if exposed_s is None:
            seconds["backward"] += seconds["communication"] + in_collectives_s
        hidden = [hidden_s for reduction in self.reductions if (hidden_s := reduction.hidden_s(self.begin)) is not None]
        del seconds["communication"]
        return StepTimes(
            total_s=seconds_between(self.begin, self.end),
            **{f"{phase}_s": None if phase in self.unseen else taken for phase, taken in seconds.items()},
            exposed_s=exposed_s,
            copy_s=sum(seconds_between(*copy) for copy in self.copies) if self.copies else None,
            hidden_s=sum(hidden) if hidden else None,
            core_wait_s=without_core_s,
        )

    def _take_out_core_wait(self, seconds: dict[str, float]) -> float | None:
        """Return how long the training thread waited for a core, and subtract that from ``seconds`` by phase."""
        # Phases on a device are measured in its time, in which the device works while the host waits.
        if not self.core_uses or not isinstance(self.begin, float):
            return None
        total_s = 0.0
        for phase in PHASES:
            uses = [use for (name, *_), use in zip(self.spans, self.core_uses, strict=True) if name == phase]
            if uses and phase != "communication":  # in which it waits for other ranks
                # Without the kernel's count, waiting for a core and waiting for samples cannot be told apart.
                working_s = 0.0 if phase == "data_wait" else seconds[phase]
                waited_s = max(0.0, min(seconds[phase], core_wait_s(uses, working_s)))
                seconds[phase] -= waited_s
                total_s += waited_s
        return total_s
