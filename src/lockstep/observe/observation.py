"""All that looks at a training loop from outside, and its record, put together."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.comm.clocks import Offset
from lockstep.comm.collectives import is_initialized
from lockstep.observe.engine import find_engine
from lockstep.observe.forwards import Forwards, has_compiled_call
from lockstep.observe.loaders import Batches, watch_all_loaders, watch_loader
from lockstep.observe.optimizers import Optimizers
from lockstep.observe.recorder import Recorder
from lockstep.observe.samples import num_samples
from lockstep.observe.session import Place, Session
from lockstep.observe.steps import Steps
from lockstep.telemetry.provenance import Provenance
from lockstep.telemetry.record.names import Event
from lockstep.train.stopwatch import Mark


class Observation:
    """Looks at a training loop and records it, until it is closed or the process ends.

    Collective if ``place`` has a group: every rank makes one. Blocks until all have.

    Args:
        models: That are trained; there may be more later.
        optimizers: That end steps; all that update a model if ``None``.
        loaders: Whose waiting is seen; all of the process if ``None``.
        run_dir: The folder for the record.
        place: This rank.
        first_step: Steps done before.
        provenance: What was found out before; looked for now if ``None``.
        failure: Returns at the end of the process what has ended it, if the interpreter does not know.

    Attributes:
        steps: What was seen so far.
        batches: What is told of batches.
        is_closed: Whether the record has ended.

    Raises:
        ConfigurationError: On every rank: a rank cannot write into the folder.
    """

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: Sequence[Optimizer] | None,
        loaders: Sequence[DataLoader[Any]] | None,
        *,
        run_dir: Path,
        place: Place,
        first_step: int = 0,
        provenance: Provenance | None = None,
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.run_dir = run_dir
        self.is_closed = False
        self._models, self._place, self._failure = models, place, failure
        self._pid, self._error_before = os.getpid(), getattr(sys, "last_value", None)
        device = next(each.device for model in models for each in model.parameters() if each.requires_grad)
        self._device = device
        self._engine = engine = find_engine(models, self._num_peers)
        facts = {
            "strategy": None if engine.kind == "unknown" else engine.kind,
            "workers": loaders[0].num_workers if loaders else None,
            "pin_memory": loaders[0].pin_memory if loaders else None,
            "run_dir": str(run_dir),
        }
        self._session = Session(run_dir, place, device, models, facts, first_step=first_step, provenance=provenance)
        self._recorder = Recorder(self._session.writer, engine, num_ranks=place.num_ranks, first_step=first_step)
        self._tell_beginning(first_step)
        self.steps = Steps(self._mark if device.type == "cuda" else None, self._recorder, first_step)
        engine.stamp(device)
        self._forwards = Forwards(self.steps, device, engine.take, self._fail)
        for model in models:
            self._forwards.watch(model)
        self._optimizers = Optimizers(self.steps, device, optimizers, models, self._fail)
        self.batches = Batches(self.steps, device, self._fail)
        if loaders is None:
            self._undo = [watch_all_loaders(self.batches)]
        else:
            self._undo = [watch_loader(loader, self.batches) for loader in loaders]
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=partial(_leave_alone, weakref.ref(self.steps)))

    def add_model(self, model: nn.Module) -> None:
        """Watch one more model."""
        self._models.append(model)
        self._engine.include(find_engine([model], self._num_peers))
        self._engine.stamp(self._device)
        self._forwards.watch(model)

    def forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Take notice of a forward that has begun before its model was watched, and so maybe before its batch was."""
        if self.steps.current is None:
            self.steps.batch_was(num_samples(args) or num_samples(kwargs))
        if not has_compiled_call(model):  # whose calls are watched already
            self._forwards.begins(model, args, kwargs)

    def close(self, error: BaseException | None = None) -> None:
        """End the record, with what has ended the training if that failed; again has no effect.

        Blocks until the device is done, unless there is an error, and some seconds at most for the disk.
        """
        has_failed = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
        self._close("error" if has_failed else "end", text=_describe(error) if has_failed else None)

    def finish(self) -> None:
        """End the record, and compare the clocks of the ranks once more. Collective if there is a group: every rank."""
        if not self.is_closed:
            self._close("end", self._place.offsets())

    @property
    def _num_peers(self) -> int:
        return self._place.num_ranks if is_initialized() else 1

    def _tell_beginning(self, first_step: int) -> None:
        if num_restarts := self._session.num_restarts:
            text = f"started again ({num_restarts} so far), and counts from {first_step}"
            self._recorder.event("restart", text)
        if first_step:
            self._recorder.event("resume", f"went on after step {first_step}")

    def _mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _fail(self, error: Exception) -> None:
        """End the watching after an error of ours; training goes on."""
        if not self.steps.is_over:
            self.steps.is_over = True
            text = f"the recording ended with an error of its own: {_describe(error)}"
            self._recorder.event("remark", text)
            sys.stderr.write(f"lockstep: {text}\n")

    def _close(self, event: Event, offsets: Sequence[Offset] = (), *, text: str | None = None) -> None:
        if self.is_closed or os.getpid() != self._pid:
            return
        self.is_closed = True
        atexit.unregister(self._at_exit)
        self._forwards.stop()
        self._optimizers.stop()
        self._engine.stop()
        for undo in self._undo:
            undo()
        self.steps.close()
        self.steps.is_over = True
        self._recorder.event(event, text or f"{self.steps.num_done} steps done")
        self._recorder.close(waits=event != "error")
        self._session.finish(self._recorder.sizes, self.steps.num_done, offsets)

    def _at_exit(self) -> None:
        # Set by the interpreter when an exception ended the script.
        error = getattr(sys, "last_value", None)
        text = _describe(error) if error is not None and error is not self._error_before else self._failure()
        self._close("end" if text is None else "error", text=text)


def _leave_alone(steps: weakref.ref[Steps]) -> None:
    """Watch nothing in a process that was forked: nobody there takes what is seen."""
    if (found := steps()) is not None:
        found.is_over = True


def _describe(error: BaseException | None) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
