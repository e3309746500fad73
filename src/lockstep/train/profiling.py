"""Profiling of some steps with torch.profiler, one Chrome trace per rank."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, supported_activities

from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.parallel.consistency import check_arguments_agree
from lockstep.telemetry import ranges
from lockstep.telemetry.record import EventName
from lockstep.torch_internals import profile_all_threads
from lockstep.train.plan import PER_PROCESS
from lockstep.train.settings import FitSettings

# The folder for traces in the run folder.
FOLDER = "profile"

# Default steps: by then memory is allocated, kernels are selected and buckets are in their final order.
_FIRST, _COUNT = 11, 3

PauseFor = Callable[[EventName, Callable[[], str]], None]


@contextmanager
def profiled(
    settings: FitSettings, world: World, steps: range, pause_for: PauseFor
) -> Iterator[Callable[[int], AbstractContextManager[object]]]:
    """Yield a function from the number of a step to its context, which profiles the steps set in ``settings``.

    Collective: every rank, and each step as well.

    Args:
        settings: The steps to profile, and the folder for traces.
        world: The ranks.
        steps: The steps of this start of the run, counted from 1.
        pause_for: Pauses the training for a function, and logs what it returns.

    Raises:
        ConfigurationError: On every rank: a rank cannot write its traces.
    """
    if not settings.profile:
        yield nullcontext
        return
    profiling = Profiling(settings, world, steps, pause_for)
    try:
        yield profiling.step
        profiling.finish()
    finally:
        profiling.stop()


class Profiling:
    """Runs some steps under torch.profiler. Collective: every rank creates one. For arguments see `profiled`."""

    def __init__(self, settings: FitSettings, world: World, steps: range, pause_for: PauseFor) -> None:
        self._settings, self._world, self._pause_for = settings, world, pause_for
        self._folder = _folder(settings, world)
        # The last steps of a short run.
        first, count = settings.profile_steps or (max(1, min(_FIRST, len(steps) - _COUNT + 1)), _COUNT)
        self._begin, self._number = steps.start, steps.start - 1
        self._first = steps.start - 1 + int(first)
        self._last = self._first + int(count) - 1
        self._profiler: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Return the context of a step. Collective: every rank."""
        self._number = number
        if number == self._first:
            self._start()
        with ranges.around(f"step {number}"):
            yield
        if number == self._last:
            self._pause_for("profile", self._write)

    def finish(self) -> None:
        """Write the trace at the end of the run, if it ends earlier; report if no step was profiled."""
        if self._profiler is not None:
            self._pause_for("profile", self._write)
        elif self._number < self._first:
            first, had = self._first - self._begin + 1, self._number - self._begin + 1
            text = f"no step was profiled: profiling begins at step {first} of this start, which had {had}"
            self._pause_for("remark", lambda: text)

    def _start(self) -> None:
        config = None
        activities = {ProfilerActivity.CPU} if self._world.device.type == "cpu" else supported_activities()
        if self._settings.strategy not in PER_PROCESS:  # replicas have threads of their own
            config = profile_all_threads()
        profiler = profile(activities=activities, experimental_config=config, acc_events=True)
        try:
            profiler.prepare_trace()
        except RuntimeError as error:
            raise ConfigurationError(
                f"torch.profiler cannot start: {(str(error).splitlines() or [''])[0]}\n"
                "Another profiler is probably active in this process: stop it, or omit profile."
            ) from error
        # Preparing takes a different time on each rank: traces should not contain the wait for the slowest.
        self._world.barrier()
        profiler.start_trace()
        self._profiler, ranges.now = profiler, True

    def stop(self) -> None:
        """Stop the profiler, if it is running. Blocks for the device."""
        ranges.now = False
        if self._profiler is not None:
            self._profiler.stop_trace()
            self._profiler = None

    def _write(self) -> str:
        """Stop the profiler and write its trace; return a text for the log. Blocks for the device."""
        profiler, first, last = self._profiler, self._first, self._number
        assert profiler is not None
        self.stop()
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
    """Create and return the folder for traces.

    Collective: every rank.

    Raises:
        ConfigurationError: On every rank: a rank cannot write there.
    """
    folder = Path(settings.profile_dir) if settings.profile_dir is not None else Path(settings.run_dir or "") / FOLDER
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied")
    except OSError as error:
        advice = "Name another folder with profile_dir=DIR (--profile-dir DIR)."
        problem = f"Cannot write traces to {folder}: {error.strerror}.\n{advice}"
    check_arguments_agree("", problem, group=world.group, device=world.device)
    return folder
