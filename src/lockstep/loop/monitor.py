"""`monitor` records a training script with one line; ``lockstep run --monitor`` records it without a change."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.base import activity
from lockstep.base.accelerator import HostCopy, widest_dtype
from lockstep.base.containers import find_tensors
from lockstep.comm.collectives import backend_name, default_group, is_initialized
from lockstep.comm.rendezvous import JOINS
from lockstep.errors import ConfigurationError
from lockstep.loop.instrument import Hook, Instrument, compiled_call, in_backward
from lockstep.loop.passes import prepared_loaders
from lockstep.loop.steps import Steps, num_samples, updates
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.dp.wrapper import DataParallel
from lockstep.telemetry.destination import Destination, ViewName
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.provenance import Provenance, gather
from lockstep.telemetry.record import Event, EventName, num_restarts
from lockstep.telemetry.recorder import Place, Recorder, has_timeline, is_late, learning_rate_of, moment, num_recorded
from lockstep.telemetry.step_times import Number, StepMarks

# --- `monitor`: one line in a script ----------------------------------------------------------------------------------

# What to give to `monitor`.
_ADVICE = {
    "model": "not an nn.Module.\nGive the model that is called in training, or a list.",
    "optimizer": "not a torch.optim.Optimizer.\nGive the optimizer, or a list, or omit it.",
    "loader": "not a DataLoader, so waiting for its batches cannot be measured.\n"
    "Omit it, and write: for batch in watch.batches(loader), where watch is the result of monitor().",
}

_last: Watch | None = None


def monitor(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loader: DataLoader[Any] | Sequence[DataLoader[Any]] | None = None,
    *,
    run_dir: str | Path | None = None,
    first_step: int = 0,
    view: ViewName = "none",
    log_to: str | Sequence[str] | None = None,
) -> Watch:
    """Record the training loop of a script for ``lockstep report``, and show it while it runs.

    Each rank records the time of its steps and their parts, the learning rate, memory and load, and the values given
    to `Watch.loss` and `Watch.grad_norm`. A step ends with ``optimizer.step()`` and may have any number of
    micro-batches. Forwards without gradients, or in evaluation mode, are an evaluation. Works with
    ``DistributedDataParallel`` and ``DataParallel`` of Lockstep and torch, and with a bare model. Does not change the
    computation, and does not synchronize devices.

    Collective if there is a default process group: call it on every rank, after creating the group. Blocks until all
    ranks have called it.

    Args:
        model: The module that is called in a forward, on its device: the wrapper, if there is one. A list if the loop
            trains several models.
        optimizer: The optimizer whose ``step()`` ends a step; of several, the first one. By default, all optimizers
            that update ``model``.
        loader: The DataLoader (or several) whose waiting is recorded; by default, all of the process. For other
            iterables, see `Watch.batches`.
        run_dir: The folder for the record, created if it does not exist; by default ``runs/`` and the name of the
            script. An earlier record in it is moved to ``earlier-...`` within it, or continued with ``first_step``.
        first_step: Number of steps done before, in a script that resumes from a checkpoint.
        view: The display of progress on rank zero, as for `fit`; the loss in it is the one given to `Watch.loss`.
        log_to: Sinks for metrics, as for `fit`, such as ``tensorboard:runs/mine``.

    Returns:
        The record, which also takes losses. It ends with the process.

    Raises:
        ConfigurationError: The arguments do not fit together; or, on all ranks, a rank cannot write into the folder, or
            a sink cannot be opened.
    """
    models: list[nn.Module] = _listed("model", model, nn.Module)
    loaders: list[DataLoader[Any]] = _listed("loader", loader, DataLoader)
    # Some libraries wrap them.
    optimizers = [getattr(value, "optimizer", None) or value for value in _listed("optimizer", optimizer, Optimizer)]
    names = " and ".join(type(module).__name__ for module in models)
    if not trained_parameters(models):
        raise ConfigurationError(
            f"{names or 'model'} has no parameter that requires a gradient.\nGive the model that is called in training."
        )
    for item in optimizers:
        if not updates(item, models):
            raise ConfigurationError(
                f"The optimizer {type(item).__name__} updates no parameter of {names}.\n"
                "Give the optimizer of this model; create it after wrapping the model."
            )
    if not isinstance(first_step, int) or first_step < 0:
        raise ConfigurationError(f"first_step is {first_step!r}.\nGive the number of steps done before, at least 0.")
    folder: Any = Path("runs") / (Path(sys.argv[0]).stem or "script")
    if _attached is not None:
        _attached.stop()
        folder = _attached.destination.run_dir
    destination = Destination(run_dir or folder, view, log_to or None)
    global _last
    if _last is not None and not _last.is_closed:
        raise ConfigurationError(
            f"This process is already being recorded, into {_last.run_dir}.\n"
            "Call close() on the result of monitor(), or give all models and optimizers in one call."
        )
    _last = Watch(models, destination, find_place(), optimizers or None, loaders or None, first_step=first_step)
    return _last


def _listed(name: str, value: Any, kind: type) -> list[Any]:
    """Return an argument as a list whose items have the type ``kind``; empty if it was omitted."""
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    for item in values:
        if not isinstance(item, kind):
            raise ConfigurationError(f"{name} is of type {type(item).__name__}, which is {_ADVICE[name]}")
    return list(values)


# --- the hooks and the record -----------------------------------------------------------------------------------------

Batch = TypeVar("Batch")

# Maximum number of losses per step.
_MOST_LOSSES = 1024


class Watch:
    """The record of a training loop; returned by `lockstep.monitor`.

    As a context manager, it ends the record at the end of the block. Otherwise the record ends with the process.

    Attributes:
        run_dir: The folder of the record, for ``lockstep report``.
        models: The models that are observed.
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
        destination: Destination,
        place: Place,
        optimizers: Sequence[Optimizer] | None = None,
        loaders: Sequence[DataLoader[Any]] | None = None,
        *,
        first_step: int = 0,
        provenance: Provenance | None = None,
    ) -> None:
        self.run_dir, self.models, self._loaders, self._place = Path(destination.run_dir), models, loaders, place
        self.is_closed, self._provenance = False, provenance
        self._pid, self._error_before = os.getpid(), getattr(sys, "last_value", None)
        self._device = next(parameter.device for parameter in trained_parameters(models))
        if is_late():
            first_step = max(first_step, num_recorded())
        elif not first_step and num_restarts():
            # The step at which the script resumes is unknown: the earlier record is renamed.
            name = f"rank-{place.rank}.jsonl"
            with suppress(OSError):
                os.replace(self.run_dir / name, self.run_dir / f"before-restart-{num_restarts()}.{name}")
        run, log_to = Snapshot(world_size=place.num_ranks), destination.log_to or ()
        self._recorder = Recorder(
            place, [self._device], run, first_step=first_step, run_dir=self.run_dir, log_to=log_to, facts=self._facts
        )
        self._recorder.num_done, self._recorder.on_recovery = lambda: self.num_steps, self._recovered
        display = None
        if destination.view != "none" and place.rank == 0:
            from lockstep.telemetry.live_view import Display  # imports rich

            display = Display(destination.view, silent=False)
            for sink in self._recorder.sinks:
                display.log(sink.where)
        if destination.view != "none" or log_to:
            self._recorder.subscribe(display)
        self._recorder.start()
        self._batch_size = self._num_updates = 0
        self._is_within = False
        self.steps = steps = Steps(self._device, self._record, self._record_evaluation, first_step)
        self._instrument = instrument = Instrument(self._fail)
        self._on_gradient = instrument.backward(
            steps.backward_begins, steps.own_work_done, self._backward_ends, is_watching=steps.is_watching
        )
        self.observe(models)
        # Weak references, so that optimizers end as without hooks.
        self._are_ours = weakref.WeakKeyDictionary[Any, bool](dict.fromkeys(optimizers or (), True))
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
        if (step := self._step_for(value)) is not None and len(step.losses) < _MOST_LOSSES:
            step.losses.append(_number(value))

    def grad_norm(self, value: Tensor | float) -> None:
        """Record the gradient norm of the current step, such as that returned by ``clip_grad_norm_``. Does not block.

        Args:
            value: A number, or a tensor with one element.

        Raises:
            ConfigurationError: It has more than one element.
        """
        if (step := self._step_for(value)) is not None:
            step.grad_norm = _number(value)

    def _step_for(self, value: Tensor | float) -> StepMarks | None:
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigurationError(
                f"The value to record has {value.numel()} elements.\nGive one number, such as the mean."
            )
        # While a graph is captured, no step is recorded, and a copy would become a part of the graph.
        return self.steps.current if self.steps.is_watching() else None

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of an iterable that is not a DataLoader, and record the waiting for them."""
        iterator = self._timed(lambda: iter(batches))
        with suppress(StopIteration):
            while True:
                yield self._timed(lambda: next(iterator))

    def finish(self) -> None:
        """Do the same as `close`."""
        self._end()

    def close(self) -> None:
        """End the record; further calls have no effect. Blocks for the device, and at most some seconds for the disk.

        Not collective. Without a call, the record ends with the process.
        """
        self._end()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error=error)

    def observe(self, models: Sequence[nn.Module]) -> None:
        """Observe these of the ``models``, and the engine of all."""
        self._strategy, ours = find_engine(self.models, self._place.num_ranks)
        self._stamps = {module: BucketStamps(self._device) for module in ours}
        for module, stamps in self._stamps.items():
            module.stamp_buckets(stamps)
            stamps.closely = has_timeline(self.num_steps)
        for model in models:
            self._instrument.forwards(model, self._forward_begins, self._forward_ends)

    # --- forward and backward -----------------------------------------------------------------------------------------

    def _forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self.steps.is_on_training_thread():
            self.steps.forward_begins(is_training=model.training)

    def _forward_ends(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.steps.is_on_training_thread():
            # Backward may start from any output: the first gradient of any of them counts.
            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_gradient)
            self.steps.forward_ends(num_samples(args) or num_samples(kwargs))

    def _backward_ends(self) -> None:
        taken = [stamps.take() for stamps in self._stamps.values()]
        self.steps.backward_ends([stamps for stamps in taken if stamps is not None] if self._stamps else None)

    # --- loaders ------------------------------------------------------------------------------------------------------

    def _timed(self, fetch: Callable[[], Any], batch_size: int | None = None) -> Any:
        """Return the result of ``fetch``, and report its time and the number of samples in it.

        Calls that raise, and calls inside others, are not reported.
        """
        if self._is_within or not self.steps.is_on_training_thread():
            return fetch()  # the loop waits for the outer of two nested loaders
        asked = moment(self._device)
        self._is_within = True
        try:
            batch = fetch()
        finally:
            self._is_within = False
        Hook(lambda: self.steps.batch(asked, num_samples(batch, batch_size)), self._fail)()
        return batch

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def _scaled(self, step: Callable[..., Any], scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Report an optimizer's step that GradScaler skips if a gradient is not finite."""
        num_before = self._num_updates
        Hook(self._optimizer_begins, self._fail)(optimizer)
        result = step(scaler, optimizer, *args, **kwargs)
        Hook(self._optimizer_ends, self._fail)(optimizer, is_skipped=self._num_updates == num_before)
        return result

    def _optimizer_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if self.steps.is_on_training_thread() and self._is_ours(optimizer):
            self.steps.optimizer_begins(id(optimizer))

    def _optimizer_ends(self, optimizer: Optimizer, *_: Any, is_skipped: bool = False) -> None:
        if in_backward():  # in any thread
            if not self.steps.is_over and self._is_ours(optimizer):
                self.steps.optimizer_within(learning_rate_of(optimizer))
        elif self.steps.is_on_training_thread() and self._is_ours(optimizer):
            self._num_updates += 1
            self.steps.optimizer_ends(id(optimizer), learning_rate_of(optimizer), is_skipped=is_skipped)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._are_ours:
            self._are_ours[optimizer] = updates(optimizer, self._updated)
        return self._are_ours[optimizer]

    # --- steps --------------------------------------------------------------------------------------------------------

    def _record(self, step: StepMarks) -> None:
        """Record a step, which the device may not have completed. Does not block."""
        # Single buckets get time stamps only in steps with a timeline.
        for stamps in self._stamps.values():
            stamps.closely = has_timeline(step.number + 1)
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

    def _recovered(self, num_done: int) -> None:
        self._place = self._recorder.place
        self.steps.drop(num_done)

    def _event(self, event: EventName, text: str, num_done: int) -> None:
        self._recorder.event(Event(event=event, text=text, step=num_done))

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end(self, *, error: BaseException | None = None) -> None:
        """End the record; after an error, this does not block for the device."""
        if self.is_closed or os.getpid() != self._pid:
            return
        self.is_closed = True
        atexit.unregister(self._at_exit)
        # Hooks first, so that nothing follows the last step.
        self._instrument.close()
        for module in self._stamps:
            module.stamp_buckets(None)
        self.steps.close()
        num_done = self.num_steps
        failure = None if isinstance(error, SystemExit) and error.code in (None, 0) else error
        if failure is None:
            self._event("end", f"{num_done} steps done", num_done)
        else:
            self._event("error", activity.one_line(failure), num_done)
        totals = {"num_steps": num_done, "global_batch_size": self._batch_size or None}
        self._recorder.finish(waits=failure is None, **totals)
        self._recorder.close()

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # set by the interpreter when an exception ended the script
        self._end(error=None if error is self._error_before else error)

    def _fail(self, error: Exception) -> None:
        """Stop observing after an internal error; training continues."""
        if not self.steps.is_over:
            self.steps.is_over = True
            text = f"the recording ended with an internal error: {activity.one_line(error)}"
            self._event("remark", text, self.num_steps)
            sys.stderr.write(f"lockstep: {text}\n")

    def _facts(self) -> dict[str, Any]:
        """Return what is known of the script, for its record and its sinks. Blocks for some calls of git."""
        parameters = dict.fromkeys(trained_parameters(self.models))  # two models may share one
        settings: dict[str, Any] = {"run_dir": str(self.run_dir)}
        strategy, ours = find_engine(self.models, self._place.num_ranks)
        if strategy != "unknown":
            settings["strategy"] = strategy
        if ours:
            settings["compression"] = ours[0].compression
        for loader in (self._loaders or prepared_loaders())[:1]:
            settings |= {"workers": loader.num_workers, "pin_memory": loader.pin_memory}
        return {
            "recorded_by": "monitor",
            "task": Path(sys.argv[0]).name or "a script",
            "settings": settings,
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "backend": backend_name(default_group()) if is_initialized() else None,
            "provenance": asdict(self._provenance or gather(Path(sys.argv[0]) if sys.argv[0] else None)),
        }


def _number(value: Tensor | float) -> Number:
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return Number(value.item() if isinstance(value, Tensor) else value)
    copy = HostCopy(value.to(widest_dtype(value.device)).reshape(()))
    return Number(copy.value, copy.arrived)


# --- what a script trains, and with which engine ----------------------------------------------------------------------


def trained_parameters(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that require a gradient, with duplicates."""
    return [p for model in models for p in model.parameters() if p.requires_grad]


def find_engine(models: Sequence[nn.Module], num_ranks: int) -> tuple[str, list[DistributedDataParallel]]:
    """Return the engine that exchanges the gradients of ``models``, and its wrappers if they are ours.

    The engine is ``single`` for one rank, and ``unknown`` if it is not listed here.
    """
    # Without duplicates, as a model may be a part of another.
    modules = dict.fromkeys(module for model in models for module in model.modules())
    if ours := [module for module in modules if isinstance(module, DistributedDataParallel)]:
        return "ddp", ours
    others = {"torch-ddp": TorchDistributedDataParallel, "dp": DataParallel, "torch-dp": nn.DataParallel}
    otherwise = "unknown" if is_initialized() and num_ranks > 1 else "single"
    engines = (name for name, kind in others.items() if any(isinstance(module, kind) for module in modules))
    return next(engines, otherwise), []


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
        if JOINS in os.environ:  # it prepares alone for the place of a lost rank
            return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), group)
        return Place(group.rank(), group.size(), group)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigurationError(
            f"This process is one of {os.environ['WORLD_SIZE']} ranks, but has no process group yet.\n"
            "Call monitor() after lockstep.init() or torch.distributed.init_process_group()."
        )
    return Place(0, 1)


# --- ``lockstep run --monitor``: an unchanged script ------------------------------------------------------------------
#
# [Note: finding the model]
# During the first optimizer steps, every call of a module is checked. The outermost modules that train are the models;
# they get hooks, and calls are no longer checked. Global hooks of torch would do the same, but compiled models warn of
# them. Functions compiled while calls are checked may be compiled again later, so the search ends with the first
# compiled model.

# After so many optimizer steps, all models have been called.
_NUM_STEPS = 3
# The search ends after so many calls, to not slow down a program that never trains.
_MOST_CALLS = 20_000


def attach(folder: str, view: ViewName = "none", log_to: str = "") -> None:
    """Record this process into ``folder`` as soon as it trains; called before the script starts."""
    global _attached
    _attached = Attached(Destination(folder, view, log_to or None))


class Attached:
    """Finds the training loop of this process, and records it.

    Args:
        destination: The folder for the record, the view and the sinks.
    """

    def __init__(self, destination: Destination) -> None:
        self.destination, self._rank = destination, int(os.environ.get("RANK") or 0)
        # Now, as the script may change the working directory, or initialize CUDA, after which git should not be forked.
        self._provenance = gather(Path(sys.argv[0])) if self._rank == 0 else None
        self._watch: Watch | None = None
        self._num_calls = 0
        self._is_searching = True
        self._instrument = Instrument(self._fail)
        self._instrument.before(nn.Module, "__call__", self._on_call)

    def stop(self) -> None:
        """Stop recording, as the script calls `monitor` itself."""
        self._stop_searching()
        if self._watch is not None:
            self._watch.close()

    def _stop_searching(self) -> None:
        self._is_searching = False
        self._instrument.close()

    def _on_call(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Check a call of any module; see [Note: finding the model]."""
        if not self._is_searching or not torch.is_grad_enabled() or not module.training:
            return
        self._num_calls += 1
        watch = self._watch
        if self._num_calls > _MOST_CALLS or (watch is not None and watch.num_steps >= _NUM_STEPS):
            self._stop_searching()
            return
        is_elsewhere = threading.current_thread() is not threading.main_thread() or in_backward()
        is_known = watch is not None and (watch.steps.phase == "forward" or module in watch.models)
        if is_elsewhere or is_known or not trained_parameters([module]):
            return
        if activity.now.step is not None:
            raise ConfigurationError("the script trains with fit(): use its setting run_dir")
        if watch is None:
            # No group: the ranks may be at different places in the script, so collectives are not possible.
            name = f"{os.environ.get('TORCHELASTIC_RUN_ID') or 'run'}-{num_restarts()}"
            place = Place(self._rank, int(os.environ.get("WORLD_SIZE") or 1), name=name)
            self._watch = watch = Watch([module], self.destination, place, provenance=self._provenance)
        else:
            watch.models.append(module)
            watch.observe([module])
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        compiled = () if dynamo is None else dynamo.OptimizedModule
        if any(compiled_call(part) is not None or isinstance(part, compiled) for part in module.modules()):
            self._stop_searching()

    def _fail(self, error: Exception) -> None:
        self._stop_searching()
        if self._rank == 0:
            reason = str(error).partition("\n")[0] or type(error).__name__
            sys.stderr.write(f"lockstep: nothing is recorded: {reason}\n")


_attached: Attached | None = None
