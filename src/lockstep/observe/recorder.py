"""Records steps that were seen from outside.

[Note: in another thread]
The thread that trains only puts steps into a queue. Another one comes by about once a second, looks whether the device
has come to a step's end, which is never waited for, and works out what it took, in small pieces with pauses: while it
runs Python, the thread that trains cannot.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

import torch

from lockstep.observe.engine import Engine
from lockstep.observe.lines import step_line, timeline_line
from lockstep.observe.step import Step
from lockstep.telemetry.live.beats import Beats
from lockstep.telemetry.record.names import Event
from lockstep.telemetry.record.steps import StepLines, has_timeline
from lockstep.telemetry.record.writer import LineWriter
from lockstep.train.step_begin import StepBegin
from lockstep.train.stopwatch import seconds_between

_PIECE, _PIECE_PAUSE_S = 32, 0.001
_BEHIND = 50_000
"""So many steps in the queue, and there are no pauses any more."""
_NUM_SIZED = 1000


class Recorder:
    """Takes the steps and events of this rank to its file.

    Args:
        writer: Of the file.
        engine: That exchanges gradients.
        num_ranks: That train together.
        first_step: Steps done before.

    Attributes:
        sizes: How many of the first steps had how many samples.
    """

    def __init__(self, writer: LineWriter, engine: Engine, *, num_ranks: int, first_step: int) -> None:
        self._writer, self._engine, self._num_ranks = writer, engine, num_ranks
        self._lines, self._begins = StepLines(writer.add), StepBegin()
        self._queue: deque[Step | dict[str, Any]] = deque()
        self._num_done = first_step
        self._owing: Step | None = None
        self.sizes: Counter[int] = Counter()
        self._beats = Beats(self.drain)

    def opened(self, step: Step) -> None:
        """Take notice that a step has begun."""
        self._engine.look_closely(has_timeline(step.number))

    def forward_ended(self) -> None:
        """Take notice that a training forward is over, in which torch's engine has worked out its figures."""
        if self._owing is not None:
            self._settle(self._engine.torch_hidden_s())

    def done(self, step: Step) -> None:
        """Take a step; the device may still owe its figures. Does not block."""
        self._num_done = step.number + 1
        self._settle(None)
        if self._engine.torch_module is not None and has_timeline(step.number):
            step.owes_hidden, self._owing = True, step
        self._queue.append(step)
        if step.is_skipped:
            self.event("skipped", f"step {self._num_done}: left out by GradScaler: the gradient was not finite")

    def evaluated(self, num_steps: int, wall_s: float, seconds: float) -> None:
        """Take notice of an evaluation: when it began, and how long training stood still for it."""
        self._add("evaluation", num_steps, "forwards that did not train", wall_s=wall_s, seconds=seconds)

    def event(self, event: Event, text: str) -> None:
        """Take an event. Does not block."""
        self._add(event, self._num_done, text, wall_s=time.time(), seconds=None)

    def close(self, *, waits: bool) -> None:
        """Write what is left, and what the device owes if this ``waits``. Blocks some seconds at most for the disk."""
        self._settle(None)
        last = next((item for item in reversed(self._queue) if isinstance(item, Step)), None)
        if waits and last is not None and isinstance(last.end, torch.cuda.Event):
            last.end.synchronize()
        if self._beats.stop():
            self.drain(at_once=True)
            self._lines.close()
        self._writer.close()

    def drain(self, *, at_once: bool = False) -> None:
        """Write the steps that the device is done with, and the events between them; ``at_once`` without pauses."""
        count = 0
        while self._queue:
            item = self._queue[0]
            if isinstance(item, dict):
                self._writer.add(item)
                if item["seconds"] is not None:
                    self._begins.forget()
            elif item.is_known:
                self._write(item)
            elif at_once:  # nobody waits for the device any more: events are still told
                pass
            else:
                return
            self._queue.popleft()
            count += 1
            if not at_once and count % _PIECE == 0 and len(self._queue) < _BEHIND:
                time.sleep(_PIECE_PAUSE_S)

    def _settle(self, hidden_s: float | None) -> None:
        step, self._owing = self._owing, None
        if step is not None:
            step.hidden_s, step.owes_hidden = hidden_s, False

    def _add(self, event: Event, num_steps: int, text: str, *, wall_s: float, seconds: float | None) -> None:
        line = {"kind": "event", "event": event, "step": num_steps, "time": wall_s, "seconds": seconds, "text": text}
        self._queue.append(line)

    def _write(self, step: Step) -> None:
        total_s = seconds_between(step.begin, step.end)
        began_s = self._begins.of(step.begin, wall_s=step.wall_s, began_at=step.began_at, total_s=total_s)
        self._lines.take(step_line(step, self._engine, began_s, num_ranks=self._num_ranks))
        if has_timeline(step.number):
            self._writer.add(timeline_line(step, self._engine, began_s))
        if step.number < _NUM_SIZED:
            self.sizes[step.samples] += 1
