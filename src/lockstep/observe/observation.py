"""All that watches a training loop from outside, and its record, put together."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
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

from lockstep.comm.clocks import ClockOffset, machine_name, measure_clock_offsets
from lockstep.comm.collectives import Group, all_gather_object, backend_name, default_group, is_initialized
from lockstep.errors import ConfigurationError
from lockstep.observe.hooks import (
    Batches,
    Forwards,
    Optimizers,
    has_compiled_call,
    num_samples,
    watch_all_loaders,
    watch_loader,
)
from lockstep.observe.steps import Step, Steps
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.telemetry.provenance import Provenance, gather
from lockstep.telemetry.resources import MachineSampler
from lockstep.telemetry.run_record import (
    Event,
    LineWriter,
    Mark,
    PeriodicThread,
    Reduction,
    RunFolder,
    StepRecorder,
    has_timeline,
    num_restarts,
)

# What exchanges gradients in a script, and what it tells of that.

Kind = Literal["single", "ddp", "torch-ddp", "dp", "torch-dp", "unknown"]


@dataclass
class Engine:
    """What exchanges gradients.

    Attributes:
        kind: ``single`` if nobody has to, ``unknown`` if it is something else than the engines named so in docs/fit.
        ours: Wrappers of ours.
        stamps: What takes their moments, by wrapper.
        torch_module: torch's wrapper.
    """

    kind: Kind
    ours: list[Any] = field(default_factory=list)
    stamps: list[BucketStamps] = field(default_factory=list)
    torch_module: Any = None
    _last_iteration: Any = None

    def include(self, other: Engine) -> None:
        """Take in what exchanges the gradients of one more model."""
        self.ours += [each for each in other.ours if all(each is not known for known in self.ours)]
        if self.kind in ("single", "unknown"):
            self.kind, self.torch_module = other.kind, other.torch_module

    def stamp(self, device: torch.device) -> None:
        """Have the buckets of our engines stamped from now on."""
        for module in self.ours[len(self.stamps) :]:
            self.stamps.append(BucketStamps(device))
            module.stamp_buckets(self.stamps[-1])

    def stop(self) -> None:
        """Have nothing stamped any more."""
        for module in self.ours:
            module.stamp_buckets(None)

    def look_closely(self, closely: bool) -> None:
        """Have single buckets stamped in the coming step, or not."""
        for each in self.stamps:
            each.closely = closely

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

    def torch_hidden_s(self) -> float | None:
        """Return the time in which buckets of torch's engine travelled beside its last backward, if it knows.

        It measures that in some steps, and works it out as the next forward begins.
        """
        told = self.torch_module._get_ddp_logging_data()
        before, self._last_iteration = self._last_iteration, told.get("iteration")
        nanoseconds = told.get("backward_compute_comm_overlap_time", 0)
        return nanoseconds / 1e9 if self._last_iteration != before and nanoseconds > 0 else None


def find_engine(models: Sequence[nn.Module], num_ranks: int) -> Engine:
    """Return what exchanges the gradients of ``models`` among so many ranks."""
    modules = [module for model in models for module in model.modules()]
    ours = [
        each for each in modules if isinstance(each, _class("lockstep.parallel.ddp.wrapper", "DistributedDataParallel"))
    ]
    if ours:
        return Engine("ddp", ours)
    theirs = [each for each in modules if isinstance(each, TorchDistributedDataParallel)]
    if theirs:
        return Engine("torch-ddp", torch_module=theirs[0])
    if any(isinstance(each, _class("lockstep.parallel.dp.wrapper", "DataParallel")) for each in modules):
        return Engine("dp")
    if any(isinstance(each, nn.DataParallel) for each in modules):
        return Engine("torch-dp")
    return Engine("single" if num_ranks == 1 else "unknown")


def _class(module: str, name: str) -> Any:
    """Return a class of ours if the script uses it, else what nothing is an instance of."""
    found = sys.modules.get(module)
    return () if found is None else getattr(found, name)


_NUM_SIZED = 1000


class MonitorRecorder:
    """Hands the steps and events that were seen to the recorder of this rank.

    Args:
        writer: Of the rank's file.
        engine: That exchanges gradients.
        num_ranks: That train together, each with as many samples.
        first_step: Steps done before.

    Attributes:
        sizes: How many of the first steps had how many samples of this rank.
    """

    def __init__(self, writer: LineWriter, engine: Engine, *, num_ranks: int, first_step: int) -> None:
        self._engine, self._num_ranks, self._num_done = engine, num_ranks, first_step
        self._recorder = StepRecorder(writer)
        self._owing: Step | None = None
        self.sizes: Counter[int] = Counter()
        self._thread = PeriodicThread(self._recorder.drain)

    def opened(self, step: Step) -> None:
        """Take note that a step has begun."""
        self._engine.look_closely(has_timeline(step.number))

    def forward_ended(self) -> None:
        """Take note that a training forward is over, in which torch's engine has worked out its figures."""
        if self._owing is not None:
            self._settle(self._engine.torch_hidden_s())

    def done(self, step: Step) -> None:
        """Take a step; the device may still owe its figures. Does not block."""
        self._num_done = step.number + 1
        self._settle(None)
        self._engine.complete(step)
        if self._engine.torch_module is not None and step.has_timeline:
            step.owes_hidden, self._owing = True, step
        if step.number < _NUM_SIZED:
            self.sizes[step.samples] += 1
        step.samples *= self._num_ranks
        self._recorder.add(step)
        if step.is_skipped:
            self.event("skipped", f"step {self._num_done}: left out by GradScaler: the gradient was not finite")

    def evaluated(self, num_steps: int, wall_s: float, seconds: float) -> None:
        """Take note of an evaluation: when it began, and how long training stood still for it."""
        text = "forwards that did not train"
        self._recorder.event("evaluation", text, step=num_steps, time_s=wall_s, seconds=seconds)

    def event(self, event: Event, text: str) -> None:
        """Take an event. Does not block."""
        self._recorder.event(event, text, step=self._num_done)

    def close(self, *, waits: bool) -> None:
        """Write what is left, and what the device owes if this ``waits``. Blocks some seconds at most for the disk."""
        self._settle(None)
        last = self._recorder.last_step
        if waits and last is not None and isinstance(last.end, torch.cuda.Event):
            last.end.synchronize()
        if self._thread.stop():
            self._recorder.drain(at_once=True)
        self._recorder.close()

    def _settle(self, hidden_s: float | None) -> None:
        step, self._owing = self._owing, None
        if step is not None:
            step.hidden_s, step.owes_hidden = hidden_s, False


# The record of a script: who takes part, its files, and what is known of it as a whole.


@dataclass(frozen=True)
class Place:
    """This rank among those that train together.

    Attributes:
        rank, num_ranks: Of the job.
        group: Through which they agree on the record; ``None`` if they do without.
        name: Of the session, where they do without.
        clocks: Of the ranks, where they do without.
    """

    rank: int
    num_ranks: int
    group: Group | None = None
    name: str | None = None
    clocks: tuple[ClockOffset, ...] = ()

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank, or only this one's. Collective if there is a group: every rank."""
        if self.group is None:
            return [value]
        return all_gather_object(value, group=self.group, device=self.device)

    def offsets(self) -> list[ClockOffset]:
        """Return how far the ranks' clocks are apart. Collective if there is a group: every rank."""
        return list(self.clocks) if self.group is None else measure_clock_offsets(self.group, self.device)

    @property
    def device(self) -> torch.device:
        """Where small messages lie that the group sends."""
        is_nccl = self.group is not None and backend_name(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


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


def open_folder(
    folder: Path,
    place: Place,
    device: torch.device,
    models: Sequence[nn.Module],
    facts: dict[str, Any],
    *,
    first_step: int = 0,
    provenance: Provenance | None = None,
) -> RunFolder:
    """Return the files of this rank. Collective if ``place`` has a group: every rank. Blocks until all have.

    Args:
        folder: Made if it is not there; the ranks of several machines may have one each.
        place: This rank.
        device: Where it computes.
        models: That are trained.
        facts: Settings, as far as they are known.
        first_step: Steps done before; the record goes on behind what is in the folder then.
        provenance: What was found out before; looked for now if ``None``.

    Raises:
        ConfigurationError: On every rank: a rank cannot write there.
    """
    fresh = not first_step
    if fresh and num_restarts():
        _set_aside(folder, place.rank, num_restarts())
    opened = RunFolder(
        folder,
        place.rank,
        place.num_ranks,
        device=str(device),
        machine=machine_name(),
        first_step=first_step,
        fresh=fresh,
        sample=MachineSampler([device]),
        gather=place.gather,
        name=place.name,
    )
    offsets = place.offsets()
    if place.rank == 0:
        opened.describe(
            offsets,
            "start",
            num_steps=None,
            recorded_by="monitor",
            task=Path(sys.argv[0]).name or "a script",
            settings={key: value for key, value in facts.items() if value is not None},
            **_sizes(models),
            backend=backend_name(default_group()) if is_initialized() else None,
            provenance=asdict(provenance or gather(Path(sys.argv[0]) if sys.argv[0] else None)),
        )
    return opened


def _sizes(models: Sequence[nn.Module]) -> dict[str, int]:
    """Return how much is trained, by name."""
    trained = [each for model in models for each in model.parameters() if each.requires_grad]
    unique = list({id(each): each for each in trained}.values())
    return {
        "num_parameters": sum(each.numel() for each in unique),
        "gradient_bytes": sum(each.numel() * each.element_size() for each in unique),
    }


def _set_aside(folder: Path, rank: int, num_restarts: int) -> None:
    """Keep what was recorded before a restart under another name: nobody has said at which step the script goes on."""
    with suppress(OSError):
        os.replace(folder / f"rank-{rank}.jsonl", folder / f"before-restart-{num_restarts}.rank-{rank}.jsonl")


# All that looks at a training loop from outside, and its record, put together.


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
        self._folder = open_folder(run_dir, place, device, models, facts, first_step=first_step, provenance=provenance)
        self._recorder = MonitorRecorder(self._folder.writer, engine, num_ranks=place.num_ranks, first_step=first_step)
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
        if restarts := num_restarts():
            text = f"started again ({restarts} so far), and counts from {first_step}"
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

    def _close(self, event: Event, offsets: Sequence[ClockOffset] = (), *, text: str | None = None) -> None:
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
        known: dict[str, Any] = {"num_steps": self.steps.num_done}
        if sizes := self._recorder.sizes:
            known["global_batch_size"] = sizes.most_common(1)[0][0] * self._place.num_ranks
        self._folder.describe(offsets, "end", **known)

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
