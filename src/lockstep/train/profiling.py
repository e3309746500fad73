"""Some steps under torch.profiler, a Chrome trace for each rank; and the phases' names for NVIDIA's tools."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from lockstep.comm.collectives import all_gather_object
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.telemetry import ranges
from lockstep.telemetry.run_record import Event
from lockstep.train.plan import PER_PROCESS
from lockstep.train.settings import FitSettings

# Where traces go, in the folder of the run.
FOLDER = "profile"

# Unless steps were named: by then memory is allocated, kernels are chosen and buckets have found their order.
_FIRST, _COUNT = 11, 3


class SteppedRun(Protocol):
    """What is profiled: a run of `fit`."""

    num_steps: int

    @property
    def num_steps_done(self) -> int:
        """Of the whole run, up to now."""

    def step(self) -> None:
        """Train on the next global batch."""

    def pause_for(self, event: Event, act: Callable[[], str]) -> None:
        """Do something for which training stands still, and report what it returns."""


@contextmanager
def profiled(settings: FitSettings, world: World, run: SteppedRun) -> Iterator[Callable[[], None]]:
    """Give what does the next step of ``run``, under the profiler or with names if ``settings`` ask for it.

    Collective: every rank, and each step as well.

    Raises:
        ConfigurationError: On every rank: a rank cannot write its traces; or names are wanted where there is no CUDA.
    """
    if not (settings.profile or settings.nvtx):
        yield run.step
        return
    on_cuda = world.device.type == "cuda"
    if settings.nvtx and not on_cuda:
        raise ConfigurationError(
            f"NVTX ranges are for NVIDIA's tools, and this run is on {world.device.type.upper()}s.\n"
            "Leave nvtx out (--nvtx), or use profile (--profile)."
        )
    names = ranges.Ranges(nvtx=on_cuda)
    profiling = Profiling(settings, world, run, names) if settings.profile else None
    # Phases and buckets have names as long as this is set; otherwise none of it costs anything.
    ranges.now = names if settings.nvtx else None
    try:
        yield partial(_named_step, run) if profiling is None else profiling.step
        if profiling is not None:
            profiling.finish()
    finally:
        if profiling is not None:
            profiling.abandon()
        ranges.now = None


def _named_step(run: SteppedRun) -> None:
    with ranges.around(f"step {run.num_steps_done + 1}"):
        run.step()


class Profiling:
    """Hands some steps of a run over to torch.profiler.

    Collective: every rank makes one.

    Args:
        settings: Which steps, and where traces go.
        world: This process among the others.
        run: The run.
        names: What gives names to phases.

    Raises:
        ConfigurationError: On every rank: a rank cannot write there.
    """

    def __init__(self, settings: FitSettings, world: World, run: SteppedRun, names: ranges.Ranges) -> None:
        self._settings, self._world, self._run, self._names = settings, world, run, names
        self._folder = _folder(settings, world)
        # Counted from 1, in this start of the run; of a short run its last ones.
        first = max(1, min(_FIRST, run.num_steps - run.num_steps_done - _COUNT + 1))
        self._first, self._count = map(int, settings.profile_steps or (first, _COUNT))
        self._profiler: profile | None = None
        self._number = self._began_at = 0

    def step(self) -> None:
        """Do the next step of the run. Collective: every rank."""
        self._number += 1
        if self._number == self._first:
            self._start()
        _named_step(self._run)
        if self._number == self._first + self._count - 1:
            self._run.pause_for("profile", self._write)

    def finish(self) -> None:
        """Write what the end of the run has cut short, and report if there was nothing. Collective: every rank."""
        if self._profiler is not None:
            self._run.pause_for("profile", self._write)
        elif self._number < self._first:
            text = f"no step was profiled: the first was to be step {self._first} of this start, which had"
            self._run.pause_for("remark", lambda: f"{text} {self._number}")

    def abandon(self) -> None:
        """End the profiler, if it runs: an error has ended the run. What it has seen is written."""
        if self._profiler is not None:
            with suppress(Exception):  # of which that error is not to be hidden
                self._write(half_done=1)

    def _start(self) -> None:
        activities, config = [ProfilerActivity.CPU], None
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        if self._settings.strategy not in PER_PROCESS:  # replicas have threads of their own
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        profiler = profile(activities=activities, experimental_config=config, acc_events=True)
        try:
            profiler.prepare_trace()
        except RuntimeError as error:
            raise ConfigurationError(
                f"torch.profiler cannot begin: {(str(error).splitlines() or [''])[0]}\n"
                "Another profiler is probably at work in this process: end that one, or leave profile out."
            ) from error
        # Preparing takes the ranks long, and not equally long: none should see in its trace that it waits for others.
        self._world.barrier()
        profiler.start_trace()
        self._profiler, self._began_at, ranges.now = profiler, self._run.num_steps_done + 1, self._names

    def _write(self, half_done: int = 0) -> str:
        """Stop the profiler and write its trace; return what to report of it. Blocks on CUDA for the device.

        Args:
            half_done: Steps that an error has cut short, which are in the trace as well.
        """
        assert self._profiler is not None
        # What follows is in no trace of ours, so only NVIDIA's tools may still want names.
        ranges.now = self._names if self._settings.nvtx else None
        profiler, self._profiler = self._profiler, None
        first, last = self._began_at, self._run.num_steps_done + half_done
        profiler.stop_trace()
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        path = self._folder / f"rank-{self._world.rank}.steps-{first}-{last}.pt.trace.json"
        part = path.with_suffix(".part")
        try:
            profiler.export_chrome_trace(str(part))
            os.replace(part, path)
        except (OSError, RuntimeError) as error:
            return f"{steps} profiled, but {path} cannot be written: {error}"
        return f"{steps} profiled: {path.parent}/rank-*.steps-{first}-{last}.pt.trace.json, for ui.perfetto.dev"


def _folder(settings: FitSettings, world: World) -> Path:
    """Return the folder for traces, which is there then.

    Collective: every rank.

    Raises:
        ConfigurationError: On every rank: a rank cannot write there.
    """
    folder = Path(settings.profile_dir) if settings.profile_dir is not None else Path(settings.run_dir or "") / FOLDER
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            problem = f"Cannot write traces to {folder}: Permission denied."
    except OSError as failure:
        problem = f"Cannot write traces to {folder}: {failure.strerror}."
    for rank, each in enumerate(all_gather_object(problem, group=world.group, device=world.device)):
        if each is not None:
            raise ConfigurationError(
                f"Rank {rank}: {each}\nName another folder with profile_dir=DIR (--profile-dir DIR)."
            )
    return folder
