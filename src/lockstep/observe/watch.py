"""`Watch`: all that looks at a training loop from outside, and its record."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.comm.clocks import Offset
from lockstep.comm.collectives import is_initialized
from lockstep.errors import ConfigurationError
from lockstep.observe.engine import find_engine
from lockstep.observe.forwards import Forwards, has_compiled_call
from lockstep.observe.loaders import Batches, watch_all_loaders, watch_loader
from lockstep.observe.optimizers import Optimizers
from lockstep.observe.recorder import Recorder
from lockstep.observe.samples import num_samples
from lockstep.observe.session import Place, Session
from lockstep.observe.step import Value
from lockstep.observe.steps import Steps
from lockstep.telemetry.provenance import Provenance
from lockstep.telemetry.record.names import Event
from lockstep.train.stopwatch import Mark

Batch = TypeVar("Batch")

_MOST_LOSSES = 1024
"""Values a step that are averaged."""


class Watch:
    """Looks at a training loop, and records it; made by `lockstep.monitor`.

    A context manager: leaving the block ends the record. Otherwise it ends with the process.

    Attributes:
        run_dir: The folder with the record, for ``lockstep report``.
    """

    run_dir: Path

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
        self._models, self._place, self._failure = models, place, failure
        self._pid, self._error_before = os.getpid(), getattr(sys, "last_value", None)
        self._is_closed = False
        device = next(each.device for model in models for each in model.parameters() if each.requires_grad)
        self._device = device
        self._engine = engine = find_engine(models, device, place.num_ranks if is_initialized() else 1)
        facts = {
            "strategy": None if engine.kind == "unknown" else engine.kind,
            "workers": loaders[0].num_workers if loaders else None,
            "run_dir": str(run_dir),
        }
        self._session = Session(run_dir, place, device, models, facts, first_step=first_step, provenance=provenance)
        self._recorder = Recorder(self._session.writer, engine, num_ranks=place.num_ranks, first_step=first_step)
        self._steps = Steps(self._mark if device.type == "cuda" else None, self._recorder, first_step)
        self._forwards = Forwards(self._steps, device, engine.take, self._fail)
        self._batches = Batches(self._steps, device, self._fail)
        for model in models:
            self._forwards.watch(model)
        self._optimizers = Optimizers(self._steps, device, optimizers, models, self._fail)
        if loaders is None:
            self._undo = [watch_all_loaders(self._batches)]
        else:
            self._undo = [watch_loader(loader, self._batches) for loader in loaders]
        atexit.register(self._at_exit)

    @property
    def num_steps(self) -> int:
        """Steps done, those that GradScaler left out included."""
        return self._steps.num_done

    def loss(self, value: Tensor | float) -> None:
        """Record a loss of the current step, or of the one that is just over; of several the mean is taken.

        Does not block: a tensor on a CUDA device is copied when the device gets there.

        Args:
            value: A number, or a tensor with one element.
        """
        step = self._steps.current
        if step is not None and not self._is_closed and len(step.losses) < _MOST_LOSSES:
            step.losses.append(_value_of(value))

    def grad_norm(self, value: Tensor | float) -> None:
        """Record the norm of the gradient of the current step, such as ``clip_grad_norm_`` returns. Does not block.

        Args:
            value: A number, or a tensor with one element.
        """
        step = self._steps.current
        if step is not None and not self._is_closed:
            step.grad_norm = _value_of(value)

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield what ``batches`` yields, for loops over something else than a DataLoader, whose waiting is seen so."""
        return self._batches.iterated(batches)

    def finish(self) -> None:
        """End the record in order, and compare the clocks of the ranks' machines once more.

        Collective: every rank. Blocks for some small messages at most.
        """
        if not self._is_closed:
            self._close("end", self._place.offsets())

    def close(self) -> None:
        """End the record; again has no effect. Blocks until the device is done, and some seconds at most for the disk.

        Unlike `finish`, ranks may call this at any time, or not at all: then it happens when the process ends.
        """
        self._close("end")

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        has_failed = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
        self._close("error" if has_failed else "end", text=_describe(error) if has_failed else None)

    def add_model(self, model: nn.Module) -> None:
        """Watch one more model."""
        self._models.append(model)
        self._engine.include(find_engine([model], self._device, self._place.num_ranks if is_initialized() else 1))
        self._forwards.watch(model)

    def forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Take notice of a forward that has begun before its model was watched, and so maybe before its batch was."""
        if self._steps.current is None:
            self._steps.batch_was(num_samples(args) or num_samples(kwargs))
        if not has_compiled_call(model):  # whose calls are timed already
            self._forwards.begins(model, args, kwargs)

    @property
    def in_forward(self) -> bool:
        """Whether a training forward of a watched model runs."""
        return self._steps.in_forward

    @property
    def is_closed(self) -> bool:
        """Whether the record has ended."""
        return self._is_closed

    def _mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _fail(self, error: Exception) -> None:
        """End the watching after an error of ours; training goes on."""
        if not self._steps.is_over:
            self._steps.is_over = True
            self._recorder.event("remark", f"the recording ended with an error of its own: {_describe(error)}")
            sys.stderr.write(f"lockstep: the recording ended with an error of its own: {_describe(error)}\n")

    def _close(self, event: Event, offsets: Sequence[Offset] = (), *, text: str | None = None) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._forwards.stop()
        self._optimizers.stop()
        for undo in self._undo:
            undo()
        self._steps.close()
        self._steps.is_over = True
        self._recorder.event(event, text or f"{self._steps.num_done} steps done")
        self._recorder.close(waits=event != "error")
        self._session.finish(self._recorder.sizes, self._steps.num_done, offsets)

    def _at_exit(self) -> None:
        # Set by the interpreter when an exception ended the script.
        error = getattr(sys, "last_value", None)
        text = _describe(error) if error is not None and error is not self._error_before else self._failure()
        self._close("end" if text is None else "error", text=text)


def _value_of(value: Tensor | float) -> Value:
    if not isinstance(value, Tensor):
        return Value(float(value))
    if value.numel() != 1:
        raise ConfigurationError(
            f"What was given to be recorded has {value.numel()} elements.\nGive one number, such as the mean."
        )
    if value.device.type == "cpu":
        return Value(value.item())
    value = value.detach()
    if not value.is_cuda:
        return Value(value.clone())  # the script may change it
    there = torch.empty((), dtype=torch.float64, pin_memory=True)
    there.copy_(value.double().reshape(()), non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(value.device))
    return Value(there, arrived)


def _describe(error: BaseException | None) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
