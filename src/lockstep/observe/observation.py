"""The observation of a training loop by hooks, and its record."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.activity import one_line
from lockstep.comm.clocks import ClockOffset
from lockstep.comm.collectives import backend_name, default_group, is_initialized
from lockstep.comm.store import StatusKeys
from lockstep.errors import ConfigurationError
from lockstep.observe.steps import Hooks, Steps, num_samples
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.run_folder import FailureRecord, current_run_folder
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.instrument import compiled_call
from lockstep.telemetry.provenance import Provenance, gather
from lockstep.telemetry.record import Event, EventName, num_restarts
from lockstep.telemetry.recorder import Place, Recorder, Subscriber, has_timeline
from lockstep.telemetry.sinks import open_sinks, run_info
from lockstep.telemetry.step_times import Reduction, StepMarks
from lockstep.train.settings import ViewName

# --- the engine that exchanges the gradients of a script --------------------------------------------------------------

Kind = Literal["single", "ddp", "torch-ddp", "dp", "torch-dp", "unknown"]


@dataclass
class Engine:
    """The engine that exchanges gradients.

    Attributes:
        kind: ``single`` for one rank, ``unknown`` for an engine that is not listed here.
        ours: The wrappers of Lockstep.
        stamps: The time stamps of their buckets, by wrapper.
    """

    kind: Kind
    ours: list[Any] = field(default_factory=list)
    stamps: list[BucketStamps] = field(default_factory=list)

    def stamp(self, device: torch.device) -> None:
        """Start taking time stamps of the buckets of our engines."""
        self.stamps = [BucketStamps(device) for _ in self.ours]
        for module, stamps in zip(self.ours, self.stamps, strict=True):
            module.stamp_buckets(stamps)

    def stop(self) -> None:
        """Stop taking time stamps."""
        for module in self.ours:
            module.stamp_buckets(None)

    def take(self) -> list[Reduction] | None:
        """Return the record of the backward that has just ended, if the engine takes one."""
        return [found for each in self.stamps if (found := each.take()) is not None] if self.ours else None

    def complete(self, step: StepMarks) -> None:
        """Complete what is known of the communication in a step."""
        if self.kind not in ("ddp", "torch-ddp"):
            step.reductions = []
        is_known = self.kind == "single" or (self.kind in ("ddp", "torch-ddp") and "backward" not in step.unseen)
        step.exposed_s = 0.0 if is_known else None
        step.has_timeline = has_timeline(step.number)


def find_engine(models: Sequence[nn.Module], num_ranks: int) -> Engine:
    """Return the engine that exchanges the gradients of ``models`` among so many ranks."""
    # Without duplicates, as a model may be a part of another.
    modules = dict.fromkeys(module for model in models for module in model.modules())
    kinds: tuple[tuple[Kind, Any], ...] = (
        ("ddp", _imported("lockstep.parallel.ddp.wrapper", "DistributedDataParallel")),
        ("torch-ddp", TorchDistributedDataParallel),
        ("dp", _imported("lockstep.parallel.dp.wrapper", "DataParallel")),
        ("torch-dp", nn.DataParallel),
    )
    for kind, cls in kinds:
        if found := [each for each in modules if isinstance(each, cls)]:
            return Engine(kind, found if kind == "ddp" else [])
    return Engine("single" if num_ranks == 1 else "unknown")


def _imported(module: str, name: str) -> Any:
    """Return a class of ours if the script has imported it, else a tuple without classes."""
    return getattr(sys.modules.get(module), name, ())


# --- this rank and its group ------------------------------------------------------------------------------------------


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


# --- the hooks and the record -----------------------------------------------------------------------------------------


class Observation:
    """Observes a training loop and records it, until it is closed or the process ends.

    Collective if ``place`` has a group: every rank creates one. Blocks until all ranks have.

    Args:
        models: The models that are trained; more may be added.
        optimizers: The optimizers that end steps; all that update a model if ``None``.
        loaders: The loaders whose waiting is recorded; all of the process if ``None``.
        run_dir: The folder for the record, created if it does not exist. Each machine may have its own.
        place: This rank.
        first_step: Number of steps done before; if not 0, an existing record is continued.
        provenance: Machine and versions; gathered now if ``None``.
        view, log_to: The display and the sinks on rank zero, as for `fit`.

    Attributes:
        steps: The steps observed so far.
        hooks: The hooks that observe them.
        is_closed: Whether the record has ended.

    Raises:
        ConfigurationError: On every rank: a rank cannot write into the folder, or a sink cannot be opened.
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
        view: ViewName = "none",
        log_to: Sequence[str] = (),
    ) -> None:
        self.run_dir = run_dir
        self.is_closed = False
        self._models, self._loaders, self._place, self._provenance = models, loaders, place, provenance
        self._pid, self._error_before = os.getpid(), getattr(sys, "last_value", None)
        self._device = device = next(each.device for each in trained_parameters(models))
        self._engine = find_engine(models, self._num_peers)
        if not first_step and num_restarts():
            # The step at which the script resumes is unknown: the earlier record is renamed.
            name = f"rank-{place.rank}.jsonl"
            with suppress(OSError):
                os.replace(run_dir / name, run_dir / f"before-restart-{num_restarts()}.{name}")
        self._recorder = recorder = Recorder(
            place,
            [device],
            Snapshot(world_size=place.num_ranks),
            first_step=first_step,
            run_dir=run_dir,
            facts=self._facts,
        )
        sinks = open_sinks(
            log_to, lambda: run_info(self._facts(), run_dir, first_step, is_fresh=recorder.is_fresh), place
        )
        shown: list[Subscriber] = [*sinks]
        if view != "none" and place.rank == 0:
            from lockstep.telemetry.live_view import Display  # imports rich

            shown.append(display := Display(view, silent=False))
            for sink in sinks:
                display.log(sink.where)
        has_keys = (view != "none" or bool(log_to)) and is_initialized()
        recorder.subscribe(shown, StatusKeys(place.rank, place.num_ranks) if has_keys else None)
        recorder.start()
        self._batch_size = 0
        self.steps = Steps(device, self, first_step)
        self._engine.stamp(device)
        self.hooks = Hooks(self.steps, lambda: self._engine.take(), self._fail)
        for model in models:
            self.hooks.watch_model(model)
        self.hooks.watch_optimizers(optimizers, models)
        self.hooks.watch_loaders(loaders)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self.steps)))

    def add_model(self, model: nn.Module) -> None:
        """Observe one more model."""
        self._models.append(model)
        self._engine = find_engine(self._models, self._num_peers)
        self._engine.stamp(self._device)
        self.hooks.watch_model(model)

    def forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Report a forward that began before its model was observed."""
        if self.steps.current is None:
            self.steps.batch_was(num_samples(args) or num_samples(kwargs))
        if compiled_call(model) is None:  # otherwise its calls are already observed
            self.hooks.forward_begins(model, args, kwargs)

    # --- from the hooks, by way of Steps ---

    def opened(self, step: StepMarks) -> None:
        """A step has begun."""
        # Single buckets get time stamps only in steps with a timeline.
        for each in self._engine.stamps:
            each.closely = has_timeline(step.number)

    def done(self, step: StepMarks) -> None:
        """Record a step, which the device may not have completed. Does not block."""
        self._engine.complete(step)
        # Assumes batches of equal size on all ranks, as a collective in the loop of the script is not allowed.
        step.samples *= self._place.num_ranks
        # The maximum, as the last batch of an epoch may be smaller.
        self._batch_size = max(self._batch_size, step.samples)
        self._recorder.add(step)
        if step.is_skipped:
            text = f"step {step.number + 1}: skipped by GradScaler, as the gradient was not finite"
            self._event("skipped", text, step.number + 1)

    def evaluated(self, num_steps: int, wall_s: float, seconds: float) -> None:
        """Record an evaluation: when it began, and how long training paused for it."""
        text = "forwards without training"
        event = Event(event="evaluation", step=num_steps, time=wall_s, seconds=seconds, text=text)
        self._recorder.event(event)

    # --- the end ---

    def close(self, error: BaseException | None = None) -> None:
        """End the record, with the ``error`` that ended training, if any; further calls have no effect.

        Blocks until the device is idle, unless there is an error, and at most some seconds for the disk.
        """
        has_failed = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
        self._close(text=one_line(error) if error is not None and has_failed else None)

    def finish(self) -> None:
        """End the record, and compare the clocks of the ranks once more. Collective if there is a group: every rank."""
        if not self.is_closed:
            self._close(self._place.offsets())

    def _close(self, offsets: Sequence[ClockOffset] = (), *, text: str | None = None) -> None:
        """End the record, with an error if there is a ``text``."""
        if self.is_closed or os.getpid() != self._pid:
            return
        self.is_closed = True
        atexit.unregister(self._at_exit)
        # Hooks first, so that nothing follows the last step.
        self.hooks.stop()
        self._engine.stop()
        self.steps.close()
        self.steps.is_over = True
        num_done = self.steps.num_done
        self._event("end" if text is None else "error", text or f"{num_done} steps done", num_done)
        known = {"global_batch_size": self._batch_size} if self._batch_size else {}
        self._recorder.finish(offsets, waits=text is None, num_steps=num_done, **known)
        self._recorder.close()

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # set by the interpreter when an exception ended the script
        self._close(text=_failure() if error is None or error is self._error_before else one_line(error))

    def _fail(self, error: Exception) -> None:
        """Stop observing after an internal error; training continues."""
        if not self.steps.is_over:
            self.steps.is_over = True
            text = f"the recording ended with an internal error: {one_line(error)}"
            self._event("remark", text, self.steps.num_done)
            sys.stderr.write(f"lockstep: {text}\n")

    def _event(self, event: EventName, text: str, num_done: int) -> None:
        self._recorder.event(Event(event=event, text=text, step=num_done))

    @property
    def _num_peers(self) -> int:
        return self._place.num_ranks if is_initialized() else 1

    def _facts(self) -> dict[str, Any]:
        """Return what is known of the script, for its record and its sinks. Blocks for some calls of git."""
        # A parameter that two models share counts once.
        parameters = list({id(each): each for each in trained_parameters(self._models)}.values())
        loader = self._loaders[0] if self._loaders else None
        settings = {
            "strategy": None if self._engine.kind == "unknown" else self._engine.kind,
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


def trained_parameters(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that require a gradient, with duplicates."""
    return [each for model in models for each in model.parameters() if each.requires_grad]


def _failure() -> str | None:
    """Return the error that ended this rank, as written by the launcher's bootstrap; None without an error."""
    folder = current_run_folder()
    failure = None if folder is None else FailureRecord.read(folder, os.environ["RANK"])
    return failure.message.splitlines()[0] if failure else None


def _leave_to_parent(steps: weakref.ref[Steps]) -> None:
    """Stop observing in a forked process, which does not record."""
    if (found := steps()) is not None:
        found.is_over = True
