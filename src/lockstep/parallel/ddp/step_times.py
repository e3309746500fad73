"""How long the parts of some steps took, for ``_get_ddp_logging_data()``.

As in torch, the first steps are looked at, up to number ten, and one of a hundred after those. The others cost a
comparison for each part of a step. On CUDA the device's own clock is read, later, when somebody asks or the next step
is looked at: no step waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch

from lockstep.parallel.ddp.capture import is_capturing
from lockstep.parallel.ddp.pace_clock import PaceClock

_LAST_OF_FIRST = 10
_DEFAULT_RATE = 100


class Moment(Enum):
    """When something begins or ends in a step, by torch's names where it has one."""

    FORWARD = "forward_compute_time_start"
    BACKWARD = "backward_compute_time_start"
    COMMUNICATION = "backward_comm_time_start"
    BACKWARD_END = "backward_compute_time_end"
    COMMUNICATION_END = "backward_comm_time_end"


@dataclass
class _Sample:
    """What is known of one step."""

    iteration: int
    unused_bytes: int = 0
    num_buckets: int = 0
    host_ns: dict[Moment, int] = field(default_factory=dict)
    events: dict[Moment, torch.cuda.Event] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether the device has come to its end; where there is no device, the step has ended."""
        event = self.events.get(Moment.COMMUNICATION_END)
        return event is None or event.query()

    def span_ns(self, start: Moment, end: Moment) -> int:
        """Return the time between two moments, 0 if they come in the other order. Blocks on CUDA until `is_known`."""
        if self.events:
            self.events[Moment.COMMUNICATION_END].synchronize()
            return max(0, int(self.events[start].elapsed_time(self.events[end]) * 1e6))
        return max(0, self.host_ns[end] - self.host_ns[start])

    def times_ns(self) -> dict[str, int]:
        """Return what torch reports of a step."""
        return {
            "forward_compute_time": self.span_ns(Moment.FORWARD, Moment.BACKWARD),
            "backward_compute_time": self.span_ns(Moment.BACKWARD, Moment.BACKWARD_END),
            "backward_comm_time": self.span_ns(Moment.COMMUNICATION, Moment.COMMUNICATION_END),
            "backward_compute_comm_overlap_time": self.span_ns(Moment.COMMUNICATION, Moment.BACKWARD_END),
        }


class StepTimes:
    """Takes the times of some steps.

    Args:
        device: Where the model is.

    Attributes:
        rate: One of how many steps is looked at, after the first ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.rate = _DEFAULT_RATE
        self._is_sampling = False
        self._device = device
        self._num_forwards = 0
        self._pace = PaceClock(device)
        self._sample = _Sample(0)
        self._last: _Sample | None = None
        self._sums_ns: dict[str, int] = {}
        self._num_summed = 0

    def begin(self) -> None:
        """Take notice that a forward begins whose backward is to be synchronised."""
        self._pace.begin()
        number, self._num_forwards = self._num_forwards, self._num_forwards + 1
        self._is_sampling = (number <= _LAST_OF_FIRST or number % self.rate == 0) and not is_capturing(self._device)
        if self._is_sampling:
            self._sample = _Sample(number)
            self.mark(Moment.FORWARD)

    def mark(self, moment: Moment) -> None:
        """Take notice of the first ``moment`` of its kind in this step."""
        if moment is Moment.BACKWARD:
            self._pace.backward()
        elif moment is Moment.BACKWARD_END:
            self._pace.ready()
        if not self._is_sampling or moment in self._sample.host_ns:
            return
        self._sample.host_ns[moment] = time.time_ns()
        if self._device.type == "cuda":
            self._sample.events[moment] = event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))

    def end(self, num_buckets: int, unused_bytes: Callable[[], int]) -> None:
        """Take notice that the step is over.

        Args:
            num_buckets: How many were reduced.
            unused_bytes: Returns the size of the parameters that received no gradient on this rank.
        """
        self._pace.end()
        if not self._is_sampling:
            return
        self.mark(Moment.COMMUNICATION_END)
        self._is_sampling = False
        if len(self._sample.host_ns) < len(Moment):  # its buckets left before a forward, or none did
            return
        self._sample.num_buckets, self._sample.unused_bytes = num_buckets, unused_bytes()
        if self._last is not None and self._last.is_known:
            for name, value_ns in self._last.times_ns().items():
                self._sums_ns[name] = self._sums_ns.get(name, 0) + value_ns
            self._num_summed += 1
        self._last = self._sample

    def figures(self) -> dict[str, int]:
        """Return torch's figures, in nanoseconds. Blocks on CUDA until the step that was looked at last is over."""
        last = self._last
        if last is None:
            return {"iteration": 0}
        times_ns = last.times_ns()
        averages = {
            f"avg_{name}": (self._sums_ns.get(name, 0) + value_ns) // (self._num_summed + 1)
            for name, value_ns in times_ns.items()
        }
        return {
            "iteration": last.iteration,
            "num_buckets_reduced": last.num_buckets,
            "unused_parameter_size": last.unused_bytes,
            **times_ns,
            **averages,
            **{moment.value: stamp_ns for moment, stamp_ns in last.host_ns.items()},
        }
