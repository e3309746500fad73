"""``bucket_cap_mb="auto"``: buckets of the sizes that the first steps show to be best.

[Note: the search]
Some steps hold all buckets back until backward is over, so that nothing disturbs it, and note when each gradient is
ready. Then a handful of all-reduces are timed, and for many caps is computed when communication would end; see
pipeline.py. Some steps go by with the usual buckets and are timed, the buckets are built anew, once, and some steps are
timed again. If they are slower, the usual buckets come back. Every rank counts the same steps, hears the same numbers
and so does the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.collectives import Group, all_reduce, broadcast_object
from lockstep.parallel.compile import is_capturing, keep_out_of_graphs
from lockstep.parallel.ddp.bucket_plan import FIRST_CAP_BYTES
from lockstep.parallel.ddp.pipeline import MIN_GAIN, Costs, Timeline, candidate_caps, in_words, predict_end_s
from lockstep.parallel.ddp.probe import measure_costs
from lockstep.parallel.ddp.reducer import Reducer

_NUM_LEARNING, _NUM_TIMED = 3, 8
_NUM_SETTLING = 20
"""Steps after new buckets that are not timed: gradients find their memory, hooks are taken away again."""
_TOO_SLOW = 1.03
"""New buckets that are measured to be slower than the usual ones by this go."""


class _Phase(Enum):
    FIRST = "first step"  # in which the reducer finds the order of gradients
    LEARNING = "ready times"
    USUAL = "usual buckets"
    NEW = "new buckets"
    DONE = "done"


class CapSearch:
    """Finds caps for the buckets of ``reducer`` in its first steps, and builds them.

    Args:
        reducer: New, with the usual buckets.
        group: The ranks that take part.
        usual_caps_bytes: The usual caps.
        width: Bytes that travel for each byte of a gradient.

    Attributes:
        report: What was found, in words; what is being done, before that.
        is_done: Whether the search is over.
    """

    def __init__(self, reducer: Reducer, group: Group, usual_caps_bytes: Sequence[int], *, width: float) -> None:
        self._reducer, self._group, self._width = reducer, group, width
        self._usual_caps_bytes = tuple(usual_caps_bytes)
        self._device = reducer.row.device
        self._transport = reducer.departures.transport
        self._caps_bytes = self._usual_caps_bytes
        self._handles: list[Any] = []
        self._stamps: dict[int, Any] = {}
        self._ready: list[list[float]] = []
        self._times_s: list[float] = []
        self._usual_s = 0.0
        self._change = self._prediction = ""
        self._last_closed_s = 0.0
        self._num_steps = 0
        self._phase = _Phase.FIRST
        self.report = "The sizes of buckets are being found: ready times are measured in the first steps."
        if group.size() == 1:
            self._end("The sizes of buckets do not matter: one rank alone reduces nothing.")
        else:
            reducer.on_closed.append(self._on_closed)

    @property
    def is_done(self) -> bool:
        """Whether the search is over."""
        return self._phase is _Phase.DONE

    def _on_closed(self, had_data: bool) -> None:
        """Count a step. Collective when a phase ends: every rank."""
        if is_capturing(self._device):
            self._end("The sizes of buckets stay as they are: a step was captured in a CUDA graph.")
            return
        closed_s = self._now()
        if self._reducer.departures.transport is not self._transport:
            self._end("The sizes of buckets stay as they are: something else than an all-reduce carries them.")
        elif self._phase is _Phase.FIRST:
            self._phase = _Phase.LEARNING
            self._learn()
        elif self._phase is _Phase.LEARNING:
            self._note_ready(had_data)
            self._num_steps += 1
            if self._num_steps == _NUM_LEARNING:
                self._stop_learning()
                self._decide()
                self._begin(_Phase.USUAL)
            else:
                self._hold_back()
        elif self._time_step(closed_s):
            seconds = self._slowest([median(self._times_s)])[0]
            if self._phase is _Phase.USUAL:
                self._usual_s = seconds
                self._reducer.row.replan(self._caps_bytes)
                self._begin(_Phase.NEW)
            else:
                self._judge(seconds)
        self._last_closed_s = self._now()

    # --- when gradients are ready -----------------------------------------------------------------------------------

    def _learn(self) -> None:
        parameters = self._reducer.row.parameters
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._stamp, index))
            for index, parameter in enumerate(parameters)
        ]
        self._hold_back()

    def _hold_back(self) -> None:
        self._stamps = {}
        if self._reducer.at_end is None:
            self._reducer.at_end = _do_nothing

    @keep_out_of_graphs
    def _stamp(self, index: int, _: Tensor) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._stamps[index] = event
        else:
            self._stamps[index] = time.perf_counter()

    def _note_ready(self, had_data: bool) -> None:
        if had_data and self._stamps:
            first, *_ = self._stamps.values()
            count = len(self._reducer.row.parameters)
            times = {index: self._since(first, stamp) for index, stamp in self._stamps.items()}
            last = max(times.values())
            self._ready.append([*(times.get(index, last) for index in range(count)), last])

    def _since(self, first: Any, stamp: Any) -> float:
        if self._device.type == "cuda":
            stamp.synchronize()
            return float(first.elapsed_time(stamp)) / 1e3
        return float(stamp - first)

    def _stop_learning(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._stamps = [], {}
        if self._reducer.at_end is _do_nothing:
            self._reducer.at_end = None

    # --- the decision -----------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Choose caps. Collective: every rank. Blocks until complete."""
        count = len(self._reducer.row.parameters) + 1
        mine = [median(times) for times in zip(*self._ready, strict=True)] if self._ready else [0.0] * count
        *ready_s, end_s = self._slowest(mine)
        timeline = Timeline(tuple(ready_s), end_s)
        costs = measure_costs(group=self._group, device=self._device)
        row = self._reducer.row
        total_bytes = sum(bucket.spec.size_bytes for bucket in row.buckets)
        caps = candidate_caps(total_bytes, FIRST_CAP_BYTES)
        usual = row.plan(self._usual_caps_bytes)
        usual_s = predict_end_s(usual, timeline, costs, width=self._width)
        plans = [(each, row.plan(each)) for each in caps]
        best_s, _, best = min(
            (predict_end_s(plan, timeline, costs, width=self._width), len(plan), each) for each, plan in plans
        )
        chosen = best if best_s <= (1 - MIN_GAIN) * usual_s else self._usual_caps_bytes
        self._caps_bytes = tuple(broadcast_object(list(chosen), group=self._group, device=self._device))
        if self._caps_bytes == self._usual_caps_bytes:
            self._end(f"The usual {in_words(usual)} stay: none promised to save {MIN_GAIN:.0%} ({_measured(costs)}).")
            return
        self._prediction = _compare("Predicted", best_s, usual_s) + f" ({_measured(costs)})"
        self._change = f"{in_words(row.plan(self._caps_bytes))} instead of {in_words(usual)}"
        self.report = f"The sizes of buckets are being found. {self._prediction}."

    def _begin(self, phase: _Phase) -> None:
        if self._phase is not _Phase.DONE:
            self._phase, self._num_steps, self._times_s = phase, 0, []

    def _time_step(self, closed_s: float) -> bool:
        """Take the time of a step; return whether there are enough."""
        self._num_steps += 1
        if self._num_steps > _NUM_SETTLING:
            opened_s = self._last_closed_s if self._device.type == "cuda" else self._reducer.opened_s
            self._times_s.append(closed_s - opened_s)
        return len(self._times_s) == _NUM_TIMED

    def _judge(self, new_s: float) -> None:
        measured = _compare("Measured", new_s, self._usual_s) + f", medians of {_NUM_TIMED} steps"
        if new_s > _TOO_SLOW * self._usual_s:
            self._reducer.row.replan(self._usual_caps_bytes)
            self._end(f"The usual buckets are back, after {self._change}. {self._prediction}. {measured}.")
        else:
            self._end(f"{self._change}. {self._prediction}. {measured}.")

    def _end(self, report: str) -> None:
        self._stop_learning()
        self._phase, self.report = _Phase.DONE, report[0].upper() + report[1:]
        if self._on_closed in self._reducer.on_closed:  # which is being walked through
            self._reducer.on_closed = [each for each in self._reducer.on_closed if each != self._on_closed]

    def _slowest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, one by one. Collective: every rank. Blocks until complete."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        all_reduce(numbers, group=self._group, op="max")
        found: list[float] = numbers.tolist()
        return found

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _do_nothing() -> None:
    """Happen when backward is over: buckets wait for that."""


def _measured(costs: Costs) -> str:
    return (
        f"measured: {costs.latency_s * 1e6:.0f} us and {costs.bytes_per_s / 1e9:.2g} GB/s an all-reduce, "
        f"which beside backward costs {1 - costs.hidden:.0%} of its time"
    )


def _compare(what: str, new_s: float, usual_s: float) -> str:
    return f"{what}: backward takes {new_s * 1e3:.2f} ms instead of {usual_s * 1e3:.2f} ms"
