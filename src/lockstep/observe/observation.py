"""All that watches a training loop from outside, and its record, put together."""

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
from lockstep.comm.clocks import ClockOffset, machine_name, measure_clock_offsets
from lockstep.comm.collectives import Group, all_gather_object, backend_name, default_group, device_for, is_initialized
from lockstep.errors import ConfigurationError
from lockstep.observe.hooks import Hooks, compiled_call, num_samples
from lockstep.observe.steps import Step, Steps
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.run_folder import current_run_folder, read_failure
from lockstep.telemetry.provenance import Provenance, gather
from lockstep.telemetry.recorder import StepRecorder, has_timeline
from lockstep.telemetry.resources import MachineSampler
from lockstep.telemetry.run_record import Event, Reduction, RunFolder, num_restarts

# --- what exchanges gradients in a script, and what is known of that --------------------------------------------------

Kind = Literal["single", "ddp", "torch-ddp", "dp", "torch-dp", "unknown"]


@dataclass
class Engine:
    """What exchanges gradients.

    Attributes:
        kind: ``single`` if nobody has to, ``unknown`` if it is something else than the engines named so in docs/fit.
        ours: Wrappers of ours.
        stamps: What takes their moments, by wrapper.
    """

    kind: Kind
    ours: list[Any] = field(default_factory=list)
    stamps: list[BucketStamps] = field(default_factory=list)

    def stamp(self, device: torch.device) -> None:
        """Have the buckets of our engines stamped from now on."""
        self.stamps = [BucketStamps(device) for _ in self.ours]
        for module, stamps in zip(self.ours, self.stamps, strict=True):
            module.stamp_buckets(stamps)

    def stop(self) -> None:
        """Have nothing stamped any more."""
        for module in self.ours:
            module.stamp_buckets(None)

    def take(self) -> list[Reduction]:
        """Return what was recorded of the backward that has just ended."""
        return [found for each in self.stamps if (found := each.take()) is not None]

    def complete(self, step: Step) -> None:
        """Add to a step that is over what is known of its communication, and what could not be seen of it."""
        if self.kind == "torch-ddp":
            step.reductions = [Reduction(waited=wait) for wait in step.waits]
        is_known = self.kind == "single" or (step.has_backward and self.kind in ("ddp", "torch-ddp"))
        step.exposed_s = 0.0 if is_known else None
        seen = {"data_wait": step.sees_batches, "forward": step.has_forward, "backward": step.has_backward}
        step.unseen = frozenset(phase for phase, is_seen in seen.items() if not is_seen)
        step.has_timeline = has_timeline(step.number)


def find_engine(models: Sequence[nn.Module], num_ranks: int) -> Engine:
    """Return what exchanges the gradients of ``models`` among so many ranks."""
    # Each once: one model may be a part of another.
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
    """Return a class of ours if the script uses it, else what nothing is an instance of."""
    return getattr(sys.modules.get(module), name, ())


# --- this rank among those that train together ------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """This rank among those that train together.

    Attributes:
        rank, num_ranks: Of the job.
        group: Through which they agree on the record; ``None`` if they do without.
        name: Of the session, where they do without.
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
        """Return how far the ranks' clocks are apart. Collective if there is a group: every rank."""
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
            "Call monitor() behind lockstep.init() or torch.distributed.init_process_group()."
        )
    return Place(0, 1)


# --- the hooks and the record -----------------------------------------------------------------------------------------


class Observation:
    """Watches a training loop and records it, until it is closed or the process ends.

    Collective if ``place`` has a group: every rank makes one. Blocks until all have.

    Args:
        models: That are trained; there may be more later.
        optimizers: That end steps; all that update a model if ``None``.
        loaders: Whose waiting is seen; all of the process if ``None``.
        run_dir: The folder for the record; made if it is not there. Ranks of several machines may have one each.
        place: This rank.
        first_step: Steps done before; the record goes on behind what is in the folder then.
        provenance: What was found out before; gathered now if ``None``.

    Attributes:
        steps: What was seen so far.
        hooks: That see it.
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
        self._recorder = StepRecorder(self._folder.writer, sample=MachineSampler([device]))
        self._recorder.start()
        self._batch_size = 0
        if restarts := num_restarts():
            self._event("restart", f"started again ({restarts} so far), and counts from {first_step}", first_step)
        if first_step:
            self._event("resume", f"went on after step {first_step}", first_step)
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
        """Watch one more model."""
        self._models.append(model)
        self._engine = find_engine(self._models, self._num_peers)
        self._engine.stamp(self._device)
        self.hooks.watch_model(model)

    def forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Take a forward that has begun before its model was watched, and so maybe before its batch was."""
        if self.steps.current is None:
            self.steps.batch_was(num_samples(args) or num_samples(kwargs))
        if compiled_call(model) is None:  # else its calls are watched already
            self.hooks.forward_begins(model, args, kwargs)

    # --- from the hooks, by way of Steps ---

    def opened(self, step: Step) -> None:
        """A step has begun."""
        # Before its first bucket: single buckets are stamped only in steps that have a timeline.
        for each in self._engine.stamps:
            each.closely = has_timeline(step.number)

    def done(self, step: Step) -> None:
        """Record a step; the device may still owe its figures. Does not block."""
        self._engine.complete(step)
        # Ranks are taken to have batches of one size: to ask them would be a collective in somebody else's loop.
        step.samples *= self._place.num_ranks
        # The largest: the last batch of an epoch may be smaller.
        self._batch_size = max(self._batch_size, step.samples)
        self._recorder.add(step)
        if step.is_skipped:
            text = f"step {step.number + 1}: left out by GradScaler: the gradient was not finite"
            self._event("skipped", text, step.number + 1)

    def evaluated(self, num_steps: int, wall_s: float, seconds: float) -> None:
        """Record an evaluation: when it began, and how long training stood still for it."""
        text = "forwards that did not train"
        self._recorder.event("evaluation", text, step=num_steps, time_s=wall_s, seconds=seconds)

    # --- the end ---

    def close(self, error: BaseException | None = None) -> None:
        """End the record, with what has ended the training if that failed; again has no effect.

        Blocks until the device is done, unless there is an error, and some seconds at most for the disk.
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
        # The hooks go first, so that nothing comes behind the last step.
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
        """End the watching after an error of ours; training goes on."""
        if not self.steps.is_over:
            self.steps.is_over = True
            text = f"the recording ended with an error of its own: {one_line(error)}"
            self._event("remark", text, self.steps.num_done)
            sys.stderr.write(f"lockstep: {text}\n")

    def _event(self, event: Event, text: str, num_done: int) -> None:
        self._recorder.event(event, text, step=num_done)

    @property
    def _num_peers(self) -> int:
        return self._place.num_ranks if is_initialized() else 1

    def _open_folder(
        self, loaders: Sequence[DataLoader[Any]] | None, first_step: int, provenance: Provenance | None
    ) -> RunFolder:
        place, rank_zero = self._place, self._place.rank == 0
        if not first_step and num_restarts():
            # It is not known at which step the script goes on: what was recorded before gets another name.
            name = f"rank-{place.rank}.jsonl"
            with suppress(OSError):
                os.replace(self.run_dir / name, self.run_dir / f"before-restart-{num_restarts()}.{name}")
        opened = RunFolder(
            self.run_dir,
            place.rank,
            place.num_ranks,
            device=str(self._device),
            machine=machine_name(),
            first_step=first_step,
            fresh=not first_step,
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
    """Return the parameters that are trained, as often as they are in the models."""
    return [each for model in models for each in model.parameters() if each.requires_grad]


def _failure() -> str | None:
    """Return what ended this rank, as the launcher's bootstrap has written it down; None if nothing did."""
    folder = current_run_folder()
    failure = {} if folder is None else read_failure(folder, os.environ["RANK"])
    return str(failure["message"]).splitlines()[0] if failure.get("message") else None


def _leave_to_parent(steps: weakref.ref[Steps]) -> None:
    """Watch nothing in a process that was forked: nobody there takes what is seen."""
    if (found := steps()) is not None:
        found.is_over = True
