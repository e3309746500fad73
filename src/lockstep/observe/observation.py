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
from lockstep.comm.clocks import ClockOffset, measure_clock_offsets
from lockstep.comm.collectives import Group, all_gather_object, backend_name, default_group, device_for, is_initialized
from lockstep.errors import ConfigurationError
from lockstep.observe.steps import Hooks, Step, Steps, num_samples
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.run_folder import FailureRecord, current_run_folder
from lockstep.telemetry.instrument import compiled_call
from lockstep.telemetry.provenance import Provenance, gather
from lockstep.telemetry.record import EventName, RunFolder, num_restarts
from lockstep.telemetry.recorder import StepRecorder, has_timeline
from lockstep.telemetry.resources import MachineSampler
from lockstep.telemetry.step_times import Reduction

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

    def take(self) -> list[Reduction]:
        """Return the record of the backward that has just ended."""
        return [found for each in self.stamps if (found := each.take()) is not None]

    def complete(self, step: Step) -> None:
        """Add to a completed step its communication, and which phases could not be observed."""
        if self.kind == "torch-ddp":
            step.reductions = [Reduction(waited=wait) for wait in step.waits]
        is_known = self.kind == "single" or (step.has_backward and self.kind in ("ddp", "torch-ddp"))
        step.exposed_s = 0.0 if is_known else None
        seen = {"data_wait": step.sees_batches, "forward": step.has_forward, "backward": step.has_backward}
        step.unseen = frozenset(phase for phase, is_seen in seen.items() if not is_seen)
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


@dataclass(frozen=True)
class Place:
    """The rank of this process, and the group of the ranks.

    Attributes:
        rank, num_ranks: Of the job.
        group: The group for collectives; ``None`` to record without collectives.
        name: The name of the session, if there is no group.
    """

    rank: int
    num_ranks: int
    group: Group | None = None
    name: str | None = None

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank, or only this one's. Collective if there is a group: every rank."""
        group = self.group
        return [value] if group is None else all_gather_object(value, group=group, device=device_for(group))

    def offsets(self) -> list[ClockOffset]:
        """Return the offsets of the ranks' clocks. Collective if there is a group: every rank."""
        return [] if self.group is None else measure_clock_offsets(self.group, device_for(self.group))


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

    Attributes:
        steps: The steps observed so far.
        hooks: The hooks that observe them.
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
    ) -> None:
        self.run_dir = run_dir
        self.is_closed = False
        self._models, self._place = models, place
        self._pid, self._error_before = os.getpid(), getattr(sys, "last_value", None)
        self._device = device = next(each.device for each in trained_parameters(models))
        self._engine = find_engine(models, self._num_peers)
        self._folder = self._open_folder(loaders, first_step, provenance)
        self._recorder = StepRecorder(self._folder.writer, sample=MachineSampler([device]), device=device)
        self._recorder.start()
        self._batch_size = 0
        if restarts := num_restarts():
            self._event("restart", f"restarted ({restarts} times so far), counting from step {first_step}", first_step)
        if first_step:
            self._event("resume", f"resumed after step {first_step}", first_step)
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

    def opened(self, step: Step) -> None:
        """A step has begun."""
        # Single buckets get time stamps only in steps with a timeline.
        for each in self._engine.stamps:
            each.closely = has_timeline(step.number)

    def done(self, step: Step) -> None:
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
        self._recorder.event("evaluation", text, step=num_steps, time_s=wall_s, seconds=seconds)

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
        self._recorder.finish(waits=text is None)
        known = {"global_batch_size": self._batch_size} if self._batch_size else {}
        self._folder.describe(offsets, "end", num_steps=num_done, **known)

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
        self._recorder.event(event, text, step=num_done)

    @property
    def _num_peers(self) -> int:
        return self._place.num_ranks if is_initialized() else 1

    def _open_folder(
        self, loaders: Sequence[DataLoader[Any]] | None, first_step: int, provenance: Provenance | None
    ) -> RunFolder:
        place, rank_zero = self._place, self._place.rank == 0
        if not first_step and num_restarts():
            # The step at which the script resumes is unknown: the earlier record is renamed.
            name = f"rank-{place.rank}.jsonl"
            with suppress(OSError):
                os.replace(self.run_dir / name, self.run_dir / f"before-restart-{num_restarts()}.{name}")
        opened = RunFolder(
            self.run_dir,
            place.rank,
            place.num_ranks,
            device=str(self._device),
            first_step=first_step,
            fresh=not first_step and not num_restarts(),  # earlier sessions are a part of the run
            gather=place.gather,
            name=place.name,
        )
        offsets = place.offsets()
        # A parameter that two models share counts once.
        parameters = list({id(each): each for each in trained_parameters(self._models)}.values())
        settings = {
            "strategy": None if self._engine.kind == "unknown" else self._engine.kind,
            "workers": loaders[0].num_workers if loaders else None,
            "pin_memory": loaders[0].pin_memory if loaders else None,
            "run_dir": str(self.run_dir),
        }
        if rank_zero:
            opened.describe(
                offsets,
                "start",
                num_steps=None,
                recorded_by="monitor",
                task=Path(sys.argv[0]).name or "a script",
                settings={key: value for key, value in settings.items() if value is not None},
                num_parameters=sum(each.numel() for each in parameters),
                gradient_bytes=sum(each.numel() * each.element_size() for each in parameters),
                backend=backend_name(default_group()) if is_initialized() else None,
                provenance=asdict(provenance or gather(Path(sys.argv[0]) if sys.argv[0] else None)),
            )
        return opened


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
