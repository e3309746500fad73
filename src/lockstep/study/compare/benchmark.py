"""Run every candidate in turns in one set of processes, measure time and peak memory, and put the figures together."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor

from lockstep.comm.collectives import all_reduce, broadcast_object
from lockstep.comm.world import World, init
from lockstep.errors import ConfigurationError, LockstepError, RankFailed
from lockstep.launcher.api import launch
from lockstep.study.common import RoundsProgress, load, log, peak_bytes, reset_peak
from lockstep.study.compare.comparison import SINGLE, Candidate, Comparison, LeftOut, Measurement, Memory, Setup
from lockstep.train.plan import PER_PROCESS, check_batch, check_gpus
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.task import Task
from lockstep.train.timing import StepRecord
from lockstep.train.trainer import Trainer

# Measure one turn of one contender, and put together what its ranks measured.


def measure_candidate(
    loop: Trainer, name: str, num_steps: int, round_index: int, place: int
) -> tuple[Measurement, list[Tensor]]:
    """Train ``num_steps`` steps, then run a third as many without synchronisation, which change no weight.

    All contenders run the latter, so that all go on with the same samples. Returns the turn and the steps' losses.

    Collective for ``ddp`` and ``torch-ddp``: every rank. Blocks until the device is done.
    """
    exchanged_s = []

    def note_exchange() -> None:
        # The engine's is the host's clock, which says nothing of CUDA's work; and it tells of one micro-batch.
        if loop.strategy.exposed_s is not None and loop.device.type == "cpu":
            exchanged_s.append(loop.strategy.exposed_s * loop.settings.accumulate)

    seconds, records = time_steps(loop, num_steps, after_each=note_exchange)
    with loop.without_sync():
        alone = [loop.step() for _ in range(max(3, num_steps // 3))]
    _finish_work(loop.device)
    turn = Measurement(
        round=round_index,
        place=place,
        num_samples=sum(record.num_samples for record in records),
        seconds=seconds,
        step_s=seconds / num_steps,
        data_wait_s=_mean(records, lambda record: record.times.data_wait_s),
        forward_s=_mean(records, lambda record: record.times.forward_s),
        backward_s=_mean(records, _backward_s),
        exposed_s=_exposed_s(name, records, alone, exchanged_s),
        optimizer_s=_mean(records, lambda record: record.times.optimizer_s),
    )
    return turn, [record.loss for record in records]


def time_steps(
    loop: Trainer, num_steps: int, *, after_each: Callable[[], None] = lambda: None
) -> tuple[float, list[StepRecord]]:
    """Train ``num_steps`` steps; return their wall time in seconds, and what they tell of themselves.

    Collective for strategies with a process for each device: every rank. Blocks until the device is done.

    Args:
        loop: What trains.
        num_steps: How many.
        after_each: Called after each.
    """
    records = []
    start = time.perf_counter()
    for _ in range(num_steps):
        records.append(loop.step())
        after_each()
    _finish_work(loop.device)
    return time.perf_counter() - start, records


def merge(by_rank: Sequence[Sequence[Measurement]]) -> tuple[Measurement, ...]:
    """Return a contender's turns over all ranks that took part: the slowest rank's wall time, means of the parts.

    Args:
        by_rank: Each rank's turns; none from a rank that only waited.
    """
    return tuple(_merge_turn(turns) for turns in zip(*filter(None, by_rank), strict=True))


def _merge_turn(turns: Sequence[Measurement]) -> Measurement:
    exposed = [turn.exposed_s for turn in turns if turn.exposed_s is not None]
    return Measurement(
        round=turns[0].round,
        place=turns[0].place,
        num_samples=turns[0].num_samples,
        seconds=max(turn.seconds for turn in turns),
        step_s=max(turn.step_s for turn in turns),
        data_wait_s=fmean(turn.data_wait_s for turn in turns),
        forward_s=fmean(turn.forward_s for turn in turns),
        backward_s=fmean(turn.backward_s for turn in turns),
        exposed_s=fmean(exposed) if exposed else None,
        optimizer_s=fmean(turn.optimizer_s for turn in turns),
    )


def _finish_work(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _backward_s(record: StepRecord) -> float:
    return record.times.backward_s + record.times.communication_s


def _mean(records: Sequence[StepRecord], read: Callable[[StepRecord], float]) -> float:
    return fmean(read(record) for record in records)


def _exposed_s(
    name: str, records: Sequence[StepRecord], alone: Sequence[StepRecord], exchanged_s: Sequence[float]
) -> float | None:
    if name in PER_PROCESS:
        return median(_backward_s(record) for record in records) - median(_backward_s(record) for record in alone)
    return fmean(exchanged_s) if exchanged_s else None


# What each rank does: all contenders take turns in one set of processes, in rounds, so that noise hits all alike.

Name = TypeVar("Name", bound=str)

TURN_S = 0.5
"""How long the fastest contender's turn takes if nobody says how many steps: long against the clock and the start."""

LONGEST_TURN_S = 5.0
"""How long the slowest contender's turn may take then."""

FEWEST_STEPS, MOST_STEPS = 3, 500

TURN_TIMEOUT_S = 3600.0
"""How long the other ranks wait for a turn of one process."""


@dataclass(frozen=True)
class Benchmark:
    """What to run; the same on every rank.

    Attributes:
        task: The task, or where to find it, as on the command line.
        num_steps: Steps of a turn; None: chosen by `choose_steps`.
        num_threads: By strategy, threads of one process (dp divides them among its replicas).
        quiet: Whether to show no progress.
    """

    task: Task | str
    settings: Settings
    strategies: tuple[StrategyName, ...]
    num_devices: int
    num_rounds: int
    num_warmup: int
    num_steps: int | None
    num_threads: dict[str, int]
    quiet: bool = False


@dataclass(frozen=True)
class RankReport:
    """What one rank measured: by strategy, its turns (none where it only waited) and the losses of all steps.

    Attributes:
        num_parameters: Of the model.
        split_layers: See `split_layers`.
    """

    num_steps: int
    turns: dict[str, tuple[Measurement, ...]]
    losses: dict[str, tuple[float, ...]]
    num_parameters: int
    split_layers: tuple[str, ...]


def devices_for(strategy: str, world: World, num_devices: int) -> list[torch.device]:
    """Return the devices that this process uses for ``strategy``."""
    if strategy in PER_PROCESS or strategy == SINGLE:
        return [world.device]
    if world.device.type == "cuda":
        return [torch.device("cuda", index) for index in range(num_devices)]
    return [world.device] * num_devices


def order_of_round(strategies: Sequence[Name], round_index: int) -> list[Name]:
    """Return who runs when in a round.

    A turn leaves warm caches and a warm processor to the next, so nobody may always follow the same one: the order
    rotates, and every other round runs backwards.
    """
    shift = round_index // 2 % len(strategies)
    rotated = [*strategies[shift:], *strategies[:shift]]
    return rotated[::-1] if round_index % 2 else rotated


def choose_steps(
    step_s: Sequence[float],
    *,
    turn_s: float = TURN_S,
    longest_s: float = LONGEST_TURN_S,
    fewest: int = FEWEST_STEPS,
) -> int:
    """Return how many steps a turn has, from the seconds of every contender's step: enough for the fastest one.

    Args:
        step_s: By contender.
        turn_s: How long the fastest one's turn is to take.
        longest_s: How long the slowest one's may take.
        fewest: Steps of a turn, however long they take.
    """
    wanted = min(math.ceil(turn_s / min(step_s)), math.floor(longest_s / max(step_s)))
    return min(max(wanted, fewest), MOST_STEPS)


def takes_part(strategy: str, world: World) -> bool:
    """Return whether this rank computes in the turns of ``strategy``."""
    return strategy in PER_PROCESS or world.is_rank_zero


def start_together(strategy: str, num_threads: int, world: World) -> bool:
    """Wait for all ranks; return whether this one computes. Those that do leave at the same moment.

    Collective: every rank. The others sleep until they are called again.

    Args:
        strategy: Whose turn it is.
        num_threads: Of one process in this turn.
        world: All ranks.
    """
    torch.set_num_threads(num_threads)
    world.barrier(TURN_TIMEOUT_S)  # sleeps, and does so for long while a turn of one process lasts
    if strategy in PER_PROCESS:
        flag = torch.zeros(1, device=world.device)
        all_reduce(flag, group=world.group)
        flag.item()
    return takes_part(strategy, world)


@contextlib.contextmanager
def note_candidate(strategy: str) -> Iterator[None]:
    """Let an exception say whose turn it was: a task may suit one engine and not another."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"It was the turn of {strategy}. If the others can train this task, name them: --strategies LIST"
        )
        raise


def run_benchmark(race: Benchmark) -> RankReport:
    """Run all turns of all contenders and return what this rank measured.

    Collective: every rank of a launched job. Ranks that have no part in a turn sleep meanwhile.

    Raises:
        LockstepError: The contenders do not fit into the devices' memory side by side.
    """
    with init() as world:
        shown = world.is_rank_zero and not race.quiet
        progress = RoundsProgress(race.num_rounds, len(race.strategies), shown=shown)
        track = _Track(race, world)
        try:
            with progress:
                return track.run(progress)
        except torch.OutOfMemoryError as error:
            raise LockstepError(
                f"The memory of {world.device} does not hold {len(race.strategies)} contenders side by side.\n"
                "Compare fewer at a time, as with --strategies ddp, or set a smaller --global-batch-size."
            ) from error
        finally:
            track.close()


class _Track:
    """The contenders of one rank, and their turns."""

    def __init__(self, race: Benchmark, world: World) -> None:
        self._race, self._world = race, world
        self._loops: dict[str, Trainer] = {}
        self._losses: dict[str, list[torch.Tensor]] = {name: [] for name in race.strategies}

    def run(self, progress: RoundsProgress) -> RankReport:
        race = self._race
        progress.log("building the models")
        task = load(race.task)
        for name in race.strategies:
            if takes_part(name, self._world):
                devices = devices_for(name, self._world, race.num_devices)
                with note_candidate(name):
                    self._loops[name] = Trainer(task, race.settings, self._world, strategy=name, devices=devices)
        progress.log("warming up")
        step_s = [self._warm_up(name) for name in race.strategies]
        num_steps = race.num_steps or self._agree(choose_steps(step_s) if self._world.is_rank_zero else 0)
        turns: dict[str, list[Measurement]] = {name: [] for name in race.strategies}
        progress.start()
        for round_index in range(race.num_rounds):
            for place, name in enumerate(order_of_round(race.strategies, round_index)):
                if self._start(name):
                    with note_candidate(name):
                        turn, losses = measure_candidate(self._loops[name], name, num_steps, round_index, place)
                    turns[name].append(turn)
                    self._losses[name] += losses
                progress.advance()
        any_model = next(iter(self._loops.values())).model
        return RankReport(
            num_steps=num_steps,
            turns={name: tuple(values) for name, values in turns.items()},
            losses={name: tuple(float(loss) for loss in values) for name, values in self._losses.items()},
            num_parameters=sum(parameter.numel() for parameter in any_model.parameters()),
            split_layers=split_layers(any_model),
        )

    def close(self) -> None:
        for loop in self._loops.values():
            loop.close()

    def _start(self, name: str) -> bool:
        return start_together(name, self._race.num_threads[name], self._world)

    def _warm_up(self, name: str) -> float:
        """Run the steps that are not measured; return the seconds of the fastest. Collective: every rank."""
        if not self._start(name):
            return 0.0
        loop, seconds = self._loops[name], []
        with note_candidate(name):
            for _ in range(self._race.num_warmup):
                start = time.perf_counter()
                loss = loop.step().loss
                loss.item()
                seconds.append(time.perf_counter() - start)
                self._losses[name].append(loss)
            with loop.without_sync():
                loop.step()
        return min(seconds)

    def _agree(self, num_steps: int) -> int:
        """Return rank zero's number. Collective: every rank."""
        return int(broadcast_object(num_steps, group=self._world.group, device=self._world.device))


def split_layers(model: torch.nn.Module) -> tuple[str, ...]:
    """Name the kinds of layer whose result depends on how a batch is divided over devices."""
    kinds = {"batch norm": _is_batch_norm, "dropout": _has_dropout}
    return tuple(kind for kind, is_one in kinds.items() if any(is_one(layer) for layer in model.modules()))


def _is_batch_norm(layer: torch.nn.Module) -> bool:
    return isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(layer, torch.nn.SyncBatchNorm)


def _has_dropout(layer: torch.nn.Module) -> bool:
    if isinstance(layer, torch.nn.modules.dropout._DropoutNd):
        return layer.p > 0
    # Recurrent layers and attention keep their rate in a number of this name.
    rate = getattr(layer, "dropout", None)
    return isinstance(rate, float) and rate > 0


# Peak memory of a contender, measured in fresh processes: in a shared one, contenders would stand on each other.

NUM_PEAK_STEPS = 4
"""Enough for the optimizer's state, and for buckets to be built anew after the first step."""


def measure_peak(race: Benchmark, strategy: StrategyName) -> tuple[int, ...]:
    """Train some steps and return this process's peak: by CUDA device, or one figure for a process on the CPU.

    On CUDA the most bytes that tensors held; on the CPU the growth of resident memory since the task's file was loaded:
    data set, weights, gradients, optimizer, buckets, activations and what libraries take when first used.

    Collective for ``ddp`` and ``torch-ddp``: every rank.
    """
    torch.set_num_threads(race.num_threads[strategy])
    with init() as world:
        task = load(race.task)
        devices = devices_for(strategy, world, race.num_devices)
        reset_peak()
        before_bytes = psutil.Process().memory_info().rss
        loop = Trainer(task, race.settings, world, strategy=strategy, devices=devices)
        try:
            for _ in range(NUM_PEAK_STEPS):
                loop.step().loss.item()
        finally:
            loop.close()
        if world.device.type == "cuda":
            return tuple(torch.cuda.max_memory_allocated(device) for device in devices)
        return (max(peak_bytes() - before_bytes, 0),)


# `compare`: check what is asked for, hold the race, measure memory, and put the figures together.

STRATEGIES: tuple[StrategyName, ...] = ("single", "torch-dp", "dp", "torch-ddp", "ddp")
"""All that take part if none are named, in the order of the table."""

ON_REQUEST: tuple[StrategyName, ...] = ("ddp-zero1",)
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
    check_batch(found, settings, devices)
    batch_size = settings.global_batch_size or found.global_batch_size

    # The schedule, if the task has one, falls over the longest run that this can become.
    settings = replace(settings, epochs=None, steps=num_warmup + num_rounds * (num_steps or MOST_STEPS))

    num_cores, busy_cores = torch.get_num_threads(), measure_busy_cores()
    race = Benchmark(
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
    reports: list[RankReport] = _launch(run_benchmark, race, devices=devices)
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
        Candidate(
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


def _peak(race: Benchmark, strategy: StrategyName, *, quiet: bool) -> Memory:
    if not quiet:
        log(f"measuring the peak memory of {strategy} in fresh processes")
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
