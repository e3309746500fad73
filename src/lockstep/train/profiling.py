"""Profiling of some steps with torch.profiler, one Chrome trace per rank."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryFile

from torch.profiler import ProfilerActivity, profile, supported_activities

from lockstep.base.torch_internals import profile_all_threads
from lockstep.comm.collectives import wait_for
from lockstep.comm.world import World
from lockstep.parallel.consistency import check_arguments_agree
from lockstep.telemetry import ranges
from lockstep.telemetry.record import EventName
from lockstep.train.plan import PER_PROCESS
from lockstep.train.settings import FitSettings

# The folder for traces in the run folder.
FOLDER = "profile"

# Default steps: by then memory is allocated, kernels are selected and buckets are in their final order.
_FIRST, _COUNT = 11, 3

PauseFor = Callable[[EventName, Callable[[], str]], None]
AroundStep = Callable[[int], AbstractContextManager[object]]


@contextmanager
def profiled(settings: FitSettings, world: World, steps: range, pause_for: PauseFor) -> Iterator[AroundStep]:
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
    folder = Path(settings.profile_dir or Path(settings.run_dir or "") / FOLDER)
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        advice = "Name another folder with profile_dir=DIR (--profile-dir DIR)."
        problem = f"Cannot write traces to {folder}: {error.strerror}.\n{advice}"
    check_arguments_agree("", problem, group=world.group, device=world.device)
    # By default the last steps of a short run.
    start, count = settings.profile_steps or (max(1, min(_FIRST, len(steps) - _COUNT + 1)), _COUNT)
    before = last = steps.start - 1
    first = before + int(start)
    # Replicas have threads of their own.
    config = None if settings.strategy in PER_PROCESS else profile_all_threads()
    activities = {ProfilerActivity.CPU} if world.device.type == "cpu" else supported_activities()
    profiler = profile(activities=activities, experimental_config=config, acc_events=True)

    @contextmanager
    def step(number: int) -> Iterator[None]:
        nonlocal last
        last = number
        if number == first:
            tracing.enter_context(_traced(profiler, world))
        with ranges.around(f"step {number}"):
            yield
        if number == first + int(count) - 1:
            pause_for("profile", write)

    def write() -> str:
        """End the trace and write it; return a text for the log. Blocks for the device."""
        tracing.close()
        name = f"step {first}" if first == last else f"steps {first} to {last}"
        path = folder / f"rank-{world.rank}.steps-{first}-{last}.pt.trace.json"
        try:
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            return f"{name} profiled, but {path} cannot be written: {error}"
        return f"{name} profiled: {folder}/rank-*.steps-{first}-{last}.pt.trace.json, for ui.perfetto.dev"

    with ExitStack() as tracing:
        yield step
        if ranges.now:  # the run ends earlier
            pause_for("profile", write)
        elif last < first:
            had = f"profiling begins at step {start} of this start, which had {last - before}"
            pause_for("remark", lambda: f"no step was profiled: {had}")


@contextmanager
def _traced(profiler: profile, world: World) -> Iterator[None]:
    """Trace the block. Collective: every rank."""
    profiler.prepare_trace()
    # Preparing takes a different time on each rank: traces should not contain the wait for the slowest.
    world.barrier()
    profiler.start_trace()
    ranges.now = True
    try:
        yield
        # Threads of Gloo write the end of a call into its record, after its future is complete; stopping frees the
        # record (seen in torch 2.13: a crash). Gloo's barrier waits for all calls before it.
        if world.device.type == "cpu":
            wait_for(world.group.barrier(), "the barrier after a profile")
    finally:
        ranges.now = False
        profiler.stop_trace()
