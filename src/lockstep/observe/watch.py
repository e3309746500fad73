"""`Watch`: the hooks on the training loop of a script, and its record."""

from __future__ import annotations

import atexit
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.accelerator import HostCopy, is_capturing, widest_dtype
from lockstep.activity import one_line
from lockstep.comm.clocks import ClockOffset
from lockstep.comm.collectives import backend_name, default_group, is_initialized
from lockstep.comm.store import StatusKeys
from lockstep.errors import ConfigurationError
from lockstep.observe.steps import Steps, num_samples, updates
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.dp.wrapper import DataParallel
from lockstep.parallel.module_io import find_tensors
from lockstep.run_folder import FailureRecord, current_run_folder
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.instrument import Hook, Instrument, in_backward, learning_rate_of
from lockstep.telemetry.provenance import Provenance, gather
from lockstep.telemetry.record import Event, EventName, num_restarts
from lockstep.telemetry.recorder import Place, Recorder, Subscriber, has_timeline
from lockstep.telemetry.sinks import open_sinks, run_info
from lockstep.telemetry.step_times import Number, StepMarks
from lockstep.train.settings import ViewName

Batch = TypeVar("Batch")

# Maximum number of losses per step.
_MOST_LOSSES = 1024

# A model may return thousands of tensors, such as caches; hooks on all would slow it down.
_MOST_OUTPUTS = 64


class Watch:
    """The record of a training loop; returned by `lockstep.monitor`.

    As a context manager, it ends the record at the end of the block. Otherwise the record ends with the process.

    Attributes:
        run_dir: The folder of the record, for ``lockstep report``.
        is_closed: Whether the record has ended.
        steps: The steps observed so far.
    """

    # Collective if ``place`` has a group: every rank creates one. Blocks until all ranks have. ``models`` may grow.
    # With a ``first_step`` other than 0, an existing record is continued. ``provenance`` is gathered now if ``None``.
    # For the rest see `monitor`, which has checked the arguments. Raises ConfigurationError on every rank if a rank
    # cannot write into the folder, or a sink cannot be opened.
    def __init__(
        self,
        models: list[nn.Module],
        optimizers: Sequence[Optimizer] | None = None,
        loaders: Sequence[DataLoader[Any]] | None = None,
        *,
        run_dir: Path,
        place: Place,
        first_step: int = 0,
        provenance: Provenance | None = None,
        view: ViewName = "none",
        log_to: Sequence[str] = (),
    ) -> None:
        self.run_dir, self._models, self._loaders, self._place = run_dir, models, loaders, place
        self.is_closed, self._provenance = False, provenance
        self._pid, self._error_before = os.getpid(), getattr(sys, "last_value", None)
        self._device = next(each.device for each in trained_parameters(models))
        self._strategy, self._ours = find_engine(models, place.num_ranks)
        if not first_step and num_restarts():
            # The step at which the script resumes is unknown: the earlier record is renamed.
            name = f"rank-{place.rank}.jsonl"
            with suppress(OSError):
                os.replace(run_dir / name, run_dir / f"before-restart-{num_restarts()}.{name}")
        run, facts = Snapshot(world_size=place.num_ranks), self._facts
        self._recorder = Recorder(place, [self._device], run, first_step=first_step, run_dir=run_dir, facts=facts)
        is_fresh = self._recorder.is_fresh
        sinks = open_sinks(log_to, lambda: run_info(facts(), run_dir, first_step, is_fresh=is_fresh), place)
        shown: list[Subscriber] = [*sinks]
        if view != "none" and place.rank == 0:
            from lockstep.telemetry.live_view import Display  # imports rich

            shown.append(display := Display(view, silent=False))
            for sink in sinks:
                display.log(sink.where)
        has_keys = (view != "none" or bool(log_to)) and is_initialized()
        self._recorder.subscribe(shown, StatusKeys(place.rank, place.num_ranks) if has_keys else None)
        self._recorder.start()
        self._batch_size = self._num_inputs = self._num_updates = 0
        self._trains = self._is_within = False
        self.steps = steps = Steps(self._device, self._record, self._record_evaluation, first_step)
        self._stamp_buckets()
        self._instrument = instrument = Instrument(self._fail)
        self._on_gradient = instrument.backward(
            self._backward_begins, steps.own_work_done, self._backward_ends, is_watching=lambda: steps.is_watching
        )
        for model in models:
            instrument.forwards(model, self._forward_begins, self._forward_ends)
        # Weak references, so that optimizers end as without hooks.
        self._are_ours: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._are_ours.update(dict.fromkeys(optimizers or (), True))
        self._updated = models if optimizers is None else ()
        instrument.optimizers(self._optimizer_begins, self._optimizer_ends)
        instrument.wrap(GradScaler, "step", self._scaled)
        instrument.loaders(self._timed, loaders)
        atexit.register(self._at_exit)

    @property
    def num_steps(self) -> int:
        """Number of steps done, including those that GradScaler skipped."""
        return self.steps.num_done

    def loss(self, value: Tensor | float) -> None:
        """Record a loss of the current step, or of the last one between two steps; several losses are averaged.

        Does not block: a tensor on a device is copied asynchronously.

        Args:
            value: A number, or a tensor with one element.

        Raises:
            ConfigurationError: It has more than one element.
        """
        found, step = _number(value), self.steps.current
        if step is not None and self.steps.is_watching and len(step.losses) < _MOST_LOSSES:
            step.losses.append(found)

    def grad_norm(self, value: Tensor | float) -> None:
        """Record the gradient norm of the current step, such as that returned by ``clip_grad_norm_``. Does not block.

        Args:
            value: A number, or a tensor with one element.

        Raises:
            ConfigurationError: It has more than one element.
        """
        found, step = _number(value), self.steps.current
        if step is not None and self.steps.is_watching:
            step.grad_norm = found

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of an iterable that is not a DataLoader, and record the waiting for them."""
        iterator = self._timed(lambda: iter(batches))
        with suppress(StopIteration):
            while True:
                yield self._timed(lambda: next(iterator))

    def finish(self) -> None:
        """End the record, and compare the clocks of the ranks' machines once more.

        Collective: every rank. Blocks for some small messages, and as `close` does.
        """
        if not self.is_closed:
            self._end(self._place.offsets())

    def close(self) -> None:
        """End the record; further calls have no effect. Blocks for the device, and at most some seconds for the disk.

        Unlike `finish`, this is not collective. Without a call, the record ends with the process.
        """
        self._end()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        self._end(text=None if error is None else one_line(error))

    def add_model(self, model: nn.Module) -> None:
        """Observe one more model."""
        self._models.append(model)
        self._strategy, self._ours = find_engine(self._models, self._place.num_ranks)
        self._stamp_buckets()
        self._instrument.forwards(model, self._forward_begins, self._forward_ends)

    # --- forward and backward -----------------------------------------------------------------------------------------

    def _forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.steps.is_mine or in_backward():
            return
        self._trains = torch.is_grad_enabled() and (model.training or self.steps.trains_in_eval)
        if self._trains:
            self.steps.forward_begins()
        else:
            self.steps.idle_forward(is_over=False, is_training=model.training)

    def _forward_ends(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.steps.is_mine or in_backward():
            return
        if torch.is_grad_enabled():
            self._num_inputs = max(self._num_inputs, num_samples(args) or num_samples(kwargs))
            # Backward may start from any output: the first gradient of any of them counts.
            for tensor in islice(find_tensors(output), _MOST_OUTPUTS):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_gradient)
        if self._trains:
            self.steps.forward_ends()
        else:
            self.steps.idle_forward(is_over=True, is_training=model.training)

    def _backward_begins(self) -> None:
        self.steps.backward_begins(self._num_inputs)
        self._num_inputs = 0

    def _backward_ends(self) -> None:
        taken = [each.take() for each in self._stamps]
        self.steps.backward_ends([each for each in taken if each is not None] if self._stamps else None)

    # --- loaders ------------------------------------------------------------------------------------------------------

    def _timed(self, fetch: Callable[[], Any], batch_size: int | None = None) -> Any:
        """Return the result of ``fetch``, and report its time and the number of samples in it.

        Calls that raise, and calls inside others, are not reported.
        """
        if self._is_within or not self.steps.is_mine:
            return fetch()  # the loop waits for the outer of two nested loaders
        asked = self.steps.moment()
        self._is_within = True
        try:
            batch = fetch()
        finally:
            self._is_within = False
        Hook(lambda: self.steps.batch(asked, num_samples(batch, batch_size)), self._fail)()
        return batch

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def _scaled(
        self, step: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: Any, **how: Any
    ) -> Any:
        """Report an optimizer's step that GradScaler skips if a gradient is not finite."""
        num_before = self._num_updates
        Hook(self._optimizer_begins, self._fail)(optimizer)
        result = step(scaler, optimizer, *args, **how)
        Hook(self._optimizer_ends, self._fail)(optimizer, is_skipped=self._num_updates == num_before)
        return result

    def _optimizer_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if not in_backward() and self.steps.is_mine and self._is_ours(optimizer):
            self.steps.optimizer_begins(id(optimizer))

    def _optimizer_ends(self, optimizer: Optimizer, *_: Any, is_skipped: bool = False) -> None:
        if in_backward():  # in any thread
            if not self.steps.is_over and self._is_ours(optimizer):
                self.steps.optimizer_within(learning_rate_of(optimizer))
        elif self.steps.is_mine and self._is_ours(optimizer):
            self._num_updates += 1
            self.steps.optimizer_ends(id(optimizer), learning_rate_of(optimizer), is_skipped=is_skipped)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        known = self._are_ours.get(optimizer)
        if known is None:
            known = self._are_ours[optimizer] = updates(optimizer, self._updated)
        return known

    # --- steps --------------------------------------------------------------------------------------------------------

    def _stamp_buckets(self) -> None:
        """Take time stamps of the buckets of our engines."""
        self._stamps = [BucketStamps(self._device) for _ in self._ours]
        for module, stamps in zip(self._ours, self._stamps, strict=True):
            module.stamp_buckets(stamps)
            stamps.closely = has_timeline(self.num_steps)

    def _record(self, step: StepMarks) -> None:
        """Record a step, which the device may not have completed. Does not block."""
        # Single buckets get time stamps only in steps with a timeline.
        for each in self._stamps:
            each.closely = has_timeline(step.number + 1)
        complete(step, self._strategy)
        # Assumes batches of equal size on all ranks, as a collective in the loop of the script is not allowed.
        step.samples *= self._place.num_ranks
        # The maximum, as the last batch of an epoch may be smaller.
        self._batch_size = max(self._batch_size, step.samples)
        self._recorder.add(step)
        if step.is_skipped:
            number = step.number + 1
            self._event("skipped", f"step {number}: skipped by GradScaler, as the gradient was not finite", number)

    def _record_evaluation(self, num_steps: int, wall_s: float, seconds: float) -> None:
        text = "forwards without training"
        self._recorder.event(Event(event="evaluation", step=num_steps, time=wall_s, seconds=seconds, text=text))

    def _event(self, event: EventName, text: str, num_done: int) -> None:
        self._recorder.event(Event(event=event, text=text, step=num_done))

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end(self, offsets: Sequence[ClockOffset] = (), *, text: str | None = None) -> None:
        """End the record, with an error if there is a ``text``; then it does not block for the device."""
        if self.is_closed or os.getpid() != self._pid:
            return
        self.is_closed = True
        atexit.unregister(self._at_exit)
        # Hooks first, so that nothing follows the last step.
        self._instrument.close()
        for module in self._ours:
            module.stamp_buckets(None)
        self.steps.close()
        num_done = self.num_steps
        self._event("end" if text is None else "error", text or f"{num_done} steps done", num_done)
        known = {"global_batch_size": self._batch_size} if self._batch_size else {}
        self._recorder.finish(offsets, waits=text is None, num_steps=num_done, **known)
        self._recorder.close()

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # set by the interpreter when an exception ended the script
        self._end(text=_failure() if error is None or error is self._error_before else one_line(error))

    def _fail(self, error: Exception) -> None:
        """Stop observing after an internal error; training continues."""
        if not self.steps.is_over:
            self.steps.is_over = True
            text = f"the recording ended with an internal error: {one_line(error)}"
            self._event("remark", text, self.num_steps)
            sys.stderr.write(f"lockstep: {text}\n")

    def _facts(self) -> dict[str, Any]:
        """Return what is known of the script, for its record and its sinks. Blocks for some calls of git."""
        parameters = dict.fromkeys(trained_parameters(self._models))  # two models may share one
        loader = self._loaders[0] if self._loaders else None
        settings = {
            "strategy": None if self._strategy == "unknown" else self._strategy,
            "workers": None if loader is None else loader.num_workers,
            "pin_memory": None if loader is None else loader.pin_memory,
            "run_dir": str(self.run_dir),
        }
        return {
            "num_steps": None,
            "recorded_by": "monitor",
            "task": Path(sys.argv[0]).name or "a script",
            "settings": {key: value for key, value in settings.items() if value is not None},
            "num_parameters": sum(each.numel() for each in parameters),
            "gradient_bytes": sum(each.numel() * each.element_size() for each in parameters),
            "world_size": self._place.num_ranks,
            "device": str(self._device),
            "backend": backend_name(default_group()) if is_initialized() else None,
            "provenance": asdict(self._provenance or gather(Path(sys.argv[0]) if sys.argv[0] else None)),
        }


def _number(value: Tensor | float) -> Number:
    if not isinstance(value, Tensor):
        return Number(float(value))
    if value.numel() != 1:
        raise ConfigurationError(
            f"The value to record has {value.numel()} elements.\nGive one number, such as the mean."
        )
    if is_capturing(value.device):
        return Number(math.nan)  # no step is recorded, and a copy would become a part of the graph
    if value.device.type == "cpu":
        return Number(float(value.item()))
    copy = HostCopy(value.to(widest_dtype(value.device)).reshape(()))
    return Number(copy.value, copy.arrived)


# --- what a script trains, and with which engine ----------------------------------------------------------------------


def trained_parameters(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that require a gradient, with duplicates."""
    return [each for model in models for each in model.parameters() if each.requires_grad]


def find_engine(models: Sequence[nn.Module], num_ranks: int) -> tuple[str, list[DistributedDataParallel]]:
    """Return the engine that exchanges the gradients of ``models``, and its wrappers if they are ours.

    The engine is ``single`` for one rank, and ``unknown`` if it is not listed here.
    """
    # Without duplicates, as a model may be a part of another.
    modules = dict.fromkeys(module for model in models for module in model.modules())
    if ours := [each for each in modules if isinstance(each, DistributedDataParallel)]:
        return "ddp", ours
    others = {"torch-ddp": TorchDistributedDataParallel, "dp": DataParallel, "torch-dp": nn.DataParallel}
    otherwise = "unknown" if is_initialized() and num_ranks > 1 else "single"
    found = (name for name, kind in others.items() if any(isinstance(each, kind) for each in modules))
    return next(found, otherwise), []


def complete(step: StepMarks, strategy: str) -> None:
    """Complete what is known of the communication in a step with this engine."""
    is_ddp = strategy in ("ddp", "torch-ddp")
    if not is_ddp:
        step.reductions = []
    is_known = strategy == "single" or (is_ddp and "backward" not in step.unseen)
    step.exposed_s = 0.0 if is_known else None
    step.has_timeline = has_timeline(step.number)


def find_place() -> Place:
    """Return the place of this process in its default process group.

    Raises:
        ConfigurationError: It was started as one of several ranks, and there is no process group yet.
    """
    if is_initialized():
        group = default_group()
        return Place(group.rank(), group.size(), group)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigurationError(
            f"This process is one of {os.environ['WORLD_SIZE']} ranks, but has no process group yet.\n"
            "Call monitor() after lockstep.init() or torch.distributed.init_process_group()."
        )
    return Place(0, 1)


def _failure() -> str | None:
    """Return the error that ended this rank, as written by the launcher's bootstrap; None without an error."""
    folder = current_run_folder()
    failure = None if folder is None else FailureRecord.read(folder, os.environ["RANK"])
    return failure.message.splitlines()[0] if failure else None
