"""`compare`: check what is asked for, hold the race, measure memory, and put the figures together."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.errors import ConfigurationError, LockstepError, RankFailed
from lockstep.launcher.api import launch
from lockstep.study.compare.figures import SINGLE, Comparison, Contender, LeftOut, Memory, Setup
from lockstep.study.compare.measure import merge
from lockstep.study.compare.peak import measure_peak
from lockstep.study.compare.progress import say
from lockstep.study.compare.race import MOST_STEPS, Race, RankReport, load, run_race
from lockstep.train.devices import PER_PROCESS, check_gpus
from lockstep.train.plan import require_even
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.task import Task

STRATEGIES: tuple[StrategyName, ...] = ("single", "torch-dp", "dp", "torch-ddp", "ddp")
"""All that take part if none are named, in the order of the table."""

ON_REQUEST: tuple[StrategyName, ...] = ("dp-zero1", "ddp-zero1")
"""Those that take part if they are named."""

BUSY_INTERVAL_S = 0.5
"""How long to watch what other programs do. A load average would also hold what the user ran the minute before."""

NO_TORCH_DP = "torch.nn.DataParallel does nothing on CPUs; ours runs there, as dp."


def compare(
    task: Task | str,
    *,
    devices: int = 2,
    strategies: Sequence[str] = STRATEGIES,
    num_steps: int | None = None,
    num_rounds: int = 10,
    num_warmup: int = 5,
    settings: Settings | None = None,
    memory: bool = True,
    command: str = "",
    quiet: bool = False,
) -> Comparison:
    """Train ``task`` with every strategy, in turns, and return all figures.

    Starts processes of its own and blocks until they are done. ``single`` always takes part.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        devices: Devices for all strategies but ``single``.
        strategies: Who takes part.
        num_steps: Steps of a turn; None: as many as take the fastest about half a second.
        num_rounds: Turns of each strategy.
        num_warmup: Steps of each strategy before the first round.
        settings: How to train; ``steps`` and ``epochs`` have no meaning here.
        memory: Whether to measure peak memory, in fresh processes.
        command: What was typed, for the record.
        quiet: Whether to show no progress.

    Raises:
        ConfigurationError: The task, the devices or the strategies cannot be used; says what to change.
        RankFailed: A rank failed.
    """
    settings = settings or Settings()
    found = load(task)
    taking_part, left_out = choose(strategies, cuda=torch.cuda.is_available())
    for name, value in (("devices", devices), ("rounds", num_rounds), ("warmup", num_warmup), ("steps", num_steps)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{name}={value} is not allowed.\nGive a whole number of at least 1.")
    check_gpus(devices)
    batch_size = settings.global_batch_size or found.global_batch_size
    require_even(batch_size, devices, settings.accumulate)

    # The schedule, if the task has one, falls over the longest run that this can become.
    settings = replace(settings, epochs=None, steps=num_warmup + num_rounds * (num_steps or MOST_STEPS))

    num_cores, busy_cores = torch.get_num_threads(), measure_busy_cores()
    race = Race(
        task=task,
        settings=settings,
        strategies=taking_part,
        num_devices=devices,
        num_rounds=num_rounds,
        num_warmup=num_warmup,
        num_steps=num_steps,
        num_threads={name: threads_of(name, num_cores, devices) for name in taking_part},
        quiet=quiet,
    )
    reports: list[RankReport] = _launch(run_race, race, devices=devices)
    first = reports[0]
    peaks = {name: _peak(race, name, quiet=quiet) if memory else None for name in taking_part}
    setup = Setup(
        task=Path(task).name if isinstance(task, str) else found.name,
        command=command,
        device="cuda" if torch.cuda.is_available() else "cpu",
        num_devices=devices,
        num_cores=num_cores,
        busy_cores=busy_cores,
        global_batch_size=batch_size,
        num_steps=first.num_steps,
        num_rounds=num_rounds,
        num_warmup=num_warmup,
        seed=settings.seed,
        precision=settings.precision,
        num_parameters=first.num_parameters,
        split_layers=first.split_layers,
    )
    contenders = tuple(
        Contender(
            strategy=name,
            num_threads=replica_threads(name, num_cores, devices),
            turns=merge([report.turns[name] for report in reports]),
            losses=first.losses[name],
            memory=peaks[name],
        )
        for name in taking_part
    )
    return Comparison(setup, contenders, left_out)


def measure_busy_cores() -> float:
    """Return how many cores other programs use now. Blocks for half a second, without using any itself."""
    return float(psutil.cpu_percent(BUSY_INTERVAL_S)) / 100 * (psutil.cpu_count() or 1)


def choose(strategies: Sequence[str], *, cuda: bool) -> tuple[tuple[StrategyName, ...], tuple[LeftOut, ...]]:
    """Return who takes part, ``single`` always, and who cannot.

    Raises:
        ConfigurationError: There is no such strategy.
    """
    possible = (*STRATEGIES, *ON_REQUEST)
    unknown = [name for name in strategies if name not in possible]
    if unknown:
        raise ConfigurationError(f"There is no strategy {unknown[0]!r}.\nChoose from: {', '.join(possible)}.")
    wanted = [name for name in possible if name in strategies or name == SINGLE]
    cannot = () if cuda else tuple(LeftOut(name, NO_TORCH_DP) for name in wanted if name == "torch-dp")
    return tuple(name for name in wanted if name not in {left.strategy for left in cannot}), cannot


def threads_of(strategy: str, num_cores: int, num_devices: int) -> int:
    """Return the threads of one process: all cores alone, an equal part each where all ranks compute."""
    return max(1, num_cores // num_devices) if strategy in PER_PROCESS else num_cores


def replica_threads(strategy: str, num_cores: int, num_devices: int) -> int:
    """Return the threads that one device's work gets."""
    return num_cores if strategy == SINGLE else max(1, num_cores // num_devices)


def _peak(race: Race, strategy: StrategyName, *, quiet: bool) -> Memory:
    if not quiet:
        say(f"measuring the peak memory of {strategy} in fresh processes")
    num_processes = race.num_devices if strategy in PER_PROCESS else 1
    peaks = _launch(measure_peak, race, strategy, devices=num_processes)
    return Memory(tuple(peak for process in peaks for peak in process))


def _launch(function: Callable[..., Any], *args: Any, devices: int) -> list[Any]:
    """Run on ranks; what a rank found wrong with the task needs no traceback, as the others found the same."""
    try:
        return launch(function, *args, devices=devices)
    except RankFailed as error:
        if isinstance(error.__cause__, LockstepError):
            raise error.__cause__ from None
        raise
