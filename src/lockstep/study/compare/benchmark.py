"""Run all candidates in turns in one set of processes, measure time and peak memory, and collect the figures."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar, cast

import psutil
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.base.accelerator import default_device, synchronize
from lockstep.base.torch_internals import BatchNorm, Dropout
from lockstep.comm.collectives import all_reduce, broadcast_object
from lockstep.comm.world import World
from lockstep.data.loader import LoadOptions
from lockstep.errors import ConfigurationError
from lockstep.study.common import check_numbers, load, log, measure_busy_cores, peak_bytes, reset_peak, run_ranks
from lockstep.study.compare.comparison import LOCAL_BN, SINGLE, Candidate, Comparison, Measurement, Setup, judge
from lockstep.telemetry.cost import Price
from lockstep.telemetry.resources import UsageMeter
from lockstep.telemetry.step_times import combine
from lockstep.train.plan import PER_PROCESS, check_batch
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.task import Task
from lockstep.train.trainer import StepRecord, Trainer

# The default candidates, in the order of the table.
STRATEGIES: tuple[StrategyName, ...] = ("single", "torch-dp", "dp", "torch-ddp", "ddp")

# Two only take part if they are named. The last is ddp with batch norms that normalise on each device apart.
POSSIBLE = (*STRATEGIES, "ddp-zero1", LOCAL_BN)

T = TypeVar("T")

# The duration of the fastest candidate's turn by default: long compared with the clock's resolution and the start.
TURN_S = 0.5

FEWEST_STEPS, MOST_STEPS = 3, 500

# More steps than a sweep or a forecast ever runs: a stream needs a number of steps, and a schedule is spread over it.
MANY_STEPS = 1_000_000

# How long the other ranks wait for a turn of one process.
TURN_TIMEOUT_S = 3600.0

# How often single is tried with each number of threads, before the first round.
NUM_TRIES = 3

# Enough for the optimizer's state, and for rebuilding the buckets after the first step.
NUM_PEAK_STEPS = 4


def compare(
    task: Task | str,
    *,
    devices: int = 2,
    strategies: Sequence[str] = STRATEGIES,
    steps: int | None = None,
    rounds: int = 10,
    warmup: int = 5,
    settings: Settings | None = None,
    memory: bool = True,
    price: str | None = None,
    command: str = "",
    quiet: bool = False,
) -> Comparison:
    """Train ``task`` with every strategy, in turns, and return all figures with a verdict.

    Starts processes and blocks until they are done. ``single`` always takes part.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        devices: Devices for all strategies except ``single``.
        strategies: The strategies that take part; ``ddp-local-bn`` is ``ddp`` with ``sync_batchnorm=False``.
        steps: Steps of a turn; None: as many as the fastest needs for about half a second.
        rounds: Number of rounds.
        warmup: Steps of each strategy before the first round.
        settings: How to train; ``steps`` and ``epochs`` have no meaning here.
        memory: Whether to measure peak memory, in fresh processes.
        price: Of a device for an hour, such as ``2.50 EUR``.
        command: The command line, for the record.
        quiet: Whether to show no progress.

    Raises:
        ConfigurationError: The task, the devices or the strategies cannot be used; says what to change.
        RankFailed: A rank failed.
    """
    settings = settings or Settings()
    loaded = load(task, prepares=True)
    device_type = default_device().type
    taking_part, left_out = choose(strategies, cuda=device_type == "cuda")
    check_numbers(devices, rounds=rounds, warmup=warmup, steps=steps)
    check_batch(loaded, settings, devices)
    # The schedule, if the task has one, covers the longest possible run.
    settings = replace(settings, epochs=None, steps=warmup + rounds * (steps or MOST_STEPS))
    num_cores = torch.get_num_threads()
    setup = Setup(
        task=Path(task).name if isinstance(task, str) else loaded.name,
        command=command,
        device=device_type,
        num_devices=devices,
        num_cores=num_cores,
        # Before our own processes start, because their load would be included.
        busy_cores=measure_busy_cores(),
        global_batch_size=settings.global_batch_size or loaded.global_batch_size,
        num_steps=steps or 0,
        num_rounds=rounds,
        num_warmup=warmup,
        seed=settings.seed,
        precision=settings.precision,
        price=Price.read(price),
    )
    arms: dict[str, tuple[StrategyName, Settings]] = {
        name: (cast(StrategyName, name), settings) for name in taking_part
    }
    if LOCAL_BN in arms:
        arms[LOCAL_BN] = "ddp", replace(settings, sync_batchnorm=False)
    benchmark = Benchmark(task, arms, setup, quiet)
    by_rank = run_ranks(run_benchmark, benchmark, devices=devices)
    setup, _, losses = by_rank[0]
    benchmark = replace(benchmark, setup=setup)
    contenders: list[Candidate] = []
    for name in taking_part:
        # Threads of one device's work: one process of DataParallel has the cores of all its replicas.
        num_threads = benchmark.threads(name) if name == SINGLE else max(1, num_cores // devices)
        peaks: tuple[int, ...] | None = None
        if memory:
            benchmark.log(f"measuring the peak memory of {name} in fresh processes")
            # In a shared process, the memory of the candidates would add up.
            by_process = run_ranks(
                measure_peak, benchmark, name, devices=devices if arms[name][0] in PER_PROCESS else 1
            )
            peaks = tuple(itertools.chain(*by_process))
        single, turns = contenders[0] if contenders else None, merge([turns[name] for _, turns, _ in by_rank])
        contenders.append(Candidate(name, num_threads, turns, tuple(losses[name]), peaks, single, devices))
    comparison = Comparison(setup, tuple(contenders), left_out)
    return replace(comparison, verdict=judge(comparison))


def choose(strategies: Sequence[str], *, cuda: bool) -> tuple[tuple[str, ...], tuple[dict[str, str], ...]]:
    """Return the strategies that take part, with ``single`` always first, and the strategies that cannot.

    Raises:
        ConfigurationError: There is no such strategy.
    """
    if unknown := [name for name in strategies if name not in POSSIBLE]:
        raise ConfigurationError(f"There is no strategy {unknown[0]!r}.\nChoose from: {', '.join(POSSIBLE)}.")
    wanted = [name for name in POSSIBLE if name in strategies or name == SINGLE]
    if cuda or "torch-dp" not in wanted:
        return tuple(wanted), ()
    reason = "torch.nn.DataParallel does nothing on CPUs; ours runs there, as dp."
    return tuple(name for name in wanted if name != "torch-dp"), ({"strategy": "torch-dp", "reason": reason},)


def threads_of(strategy: str, num_cores: int, num_devices: int) -> int:
    """Return the threads of one process: all cores for a single process, an equal share if all ranks compute."""
    return max(1, num_cores // num_devices) if strategy in PER_PROCESS else num_cores


@dataclass(frozen=True)
class Benchmark:
    """The description of a benchmark; the same on every rank.

    Attributes:
        task: The task, or where to find it, as on the command line.
        arms: What takes turns, by name: strategies with their settings.
        setup: What is known; if the steps of a turn are not set, `choose_steps` chooses them.
        quiet: Whether to show no progress.
        turn_s, fewest: See `choose_steps`.
        until: After this time no new round begins, in Unix time.
        speed_only: Whether to measure no parts of a step, and single with all cores only.
    """

    task: Task | str
    arms: Mapping[str, tuple[StrategyName, Settings]]
    setup: Setup
    quiet: bool = False
    turn_s: float = TURN_S
    fewest: int = FEWEST_STEPS
    until: float = math.inf
    speed_only: bool = False

    def log(self, text: str) -> None:
        """Print a line about progress: instead of a bar, whose thread would draw during the measurements."""
        if not self.quiet:
            log(text)

    def threads(self, strategy: str) -> int:
        """Return the threads of one process (dp divides them among its replicas)."""
        if strategy == SINGLE and self.setup.single_threads:
            return self.setup.single_threads
        return threads_of(strategy, self.setup.num_cores, self.setup.num_devices)


# By name, the turns of a rank; none if it only waited.
Turns = dict[str, list[Measurement]]


def run_benchmark(benchmark: Benchmark, world: World) -> tuple[Setup, Turns, dict[str, list[float]]]:
    """Run the turns of all arms; return what was set up, and by name the turns and losses of this rank.

    Collective: every rank of a launched job. Ranks that do not take part in a turn sleep.
    """
    names, setup = list(benchmark.arms), benchmark.setup
    turns: Turns = {name: [] for name in names}
    losses: dict[str, list[Tensor]] = {name: [] for name in names}
    entrants: dict[str, Entrant] = {}
    with contextlib.ExitStack() as at_exit:
        for name in names:
            entrants[name] = at_exit.enter_context(contextlib.closing(Entrant(benchmark, name, world)))
        fastest_s = []
        for name, entrant in entrants.items():
            if warm := entrant.turn(partial(_warm_up, num_steps=setup.num_warmup, threads=entrant.threads)):
                tries_s, losses[name] = warm
                fastest_s.append(min(tries_s.values()))
                entrant.num_threads = min(tries_s, key=tries_s.__getitem__)
        # Only rank zero takes part in all turns, so only it has measured the steps of every candidate.
        chosen = choose_steps(fastest_s, benchmark.turn_s, benchmark.fewest) if world.is_rank_zero else 0
        num_steps = setup.num_steps or int(broadcast_object(chosen, group=world.group, device=world.device))
        began_at = time.perf_counter()
        for index in range(setup.num_rounds):
            for place, name in enumerate(order_of_round(names, index)):
                measure = partial(measure_candidate, name=benchmark.arms[name][0], has_parts=not benchmark.speed_only)
                turn = partial(measure, num_steps=num_steps, round_index=index, place=place)
                if measured := entrants[name].turn(turn):
                    turns[name].append(measured[0])
                    losses[name] += measured[1]
            if world.is_rank_zero:
                left_s = (time.perf_counter() - began_at) * (setup.num_rounds / (index + 1) - 1)
                benchmark.log(f"round {index + 1}/{setup.num_rounds}, {left_s:.0f} s left")
            world.barrier(TURN_TIMEOUT_S)  # in which ranks sleep that have no part in the last turn
            # The clocks of the ranks may differ: rank zero decides.
            if broadcast_object(time.time() > benchmark.until, group=world.group, device=world.device):
                break
        # A rank that only waited has none.
        models = (entrant.trainer.model for entrant in entrants.values() if entrant.trainer is not None)
        model = next(models, torch.nn.Module())
        setup = replace(
            setup,
            num_steps=num_steps,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            single_threads=entrants[SINGLE].num_threads if SINGLE in entrants else 0,
            split_layers=split_layers(model),
            norms_apart=tuple(name for name in names if setup.num_devices > 1 and entrants[name].normalises_apart()),
        )
        # Read only now: reading a loss waits for the device.
        return setup, turns, {name: [float(loss) for loss in values] for name, values in losses.items()}


class Entrant:
    """An arm as it takes turns. It has a trainer on the ranks that compute; the other ranks only wait.

    Collective: every rank creates it, calls `turn` in the same order, and closes it.

    Attributes:
        threads: Numbers of threads of one process to try.
        num_threads: Threads of one process during its turns.
        trainer: None on a rank that only waits.
    """

    def __init__(self, benchmark: Benchmark, name: str, world: World) -> None:
        strategy, settings = benchmark.arms[name]
        self._strategy, self._world, self.num_threads = strategy, world, benchmark.threads(strategy)
        # As many tries for each strategy. Threads of one operation wait for each other at its end, so small models are
        # often faster with one thread.
        tries_one = strategy == SINGLE and world.device.type == "cpu" and not benchmark.speed_only
        self.threads = self.num_threads, 1 if tries_one else self.num_threads
        ahead = settings.workers * (settings.prefetch or LoadOptions.ahead)
        self._num_steps_ahead = math.ceil(ahead / settings.accumulate) + 1 if ahead else 0
        self.trainer: Trainer | None = None
        if strategy in PER_PROCESS or world.is_rank_zero:
            task = replace(load(benchmark.task), eval_dataset=None, metrics=None, after=None)
            devices, kind = [world.device], world.device.type
            if strategy not in PER_PROCESS and strategy != SINGLE:
                indices = range(benchmark.setup.num_devices)
                devices = [world.device if kind == "cpu" else torch.device(kind, index) for index in indices]
            self.trainer = Trainer(task, settings, world, strategy=strategy, devices=devices)

    def close(self) -> None:
        """End its processes and free its memory."""
        if self.trainer is not None:
            self.trainer.close()

    def normalises_apart(self) -> bool:
        """Return whether a batch norm of this rank's model normalises over the samples of each device apart."""
        if self.trainer is None or self._strategy == SINGLE:
            return False
        together = torch.nn.SyncBatchNorm if self._strategy in PER_PROCESS else ()  # replicas are alone in any case
        return any(
            isinstance(each, BatchNorm) and not isinstance(each, together) for each in self.trainer.model.modules()
        )

    def turn(self, run: Callable[[Trainer], T]) -> T | None:
        """Wait for all ranks, then call ``run`` on the ranks that compute and return its result; None on the others."""
        start = partial(start_together, self._strategy, self.num_threads, self._world)
        if self._num_steps_ahead and start() and self.trainer is not None:
            # Consume the batches that loader processes loaded while others were measured.
            with self.trainer.without_sync():
                time_steps(self.trainer, self._num_steps_ahead)
        if not start() or self.trainer is None:
            return None
        try:
            result = run(self.trainer)
        except Exception as error:  # a task may work with one engine only
            error.add_note(f"Strategy {self._strategy} was running. To measure only others: --strategies LIST")
            raise
        _stop_loading(self.trainer)
        return result


def _stop_loading(trainer: Trainer) -> None:
    """End the loader processes, which would otherwise load during the turns of others."""
    if not trainer.settings.workers:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a stream that does not report its position: irrelevant here
        state = trainer.batches.state()
    if state is not None or not isinstance(trainer.samples, IterableDataset):
        trainer.batches.seek(trainer.num_steps_done, state)


def start_together(strategy: str, num_threads: int, world: World) -> bool:
    """Wait for all ranks; return whether this one computes. Ranks that do leave at the same moment.

    Collective: every rank. The others sleep until they are called again.

    Args:
        strategy: The strategy of this turn.
        num_threads: Of one process in this turn.
        world: All ranks.
    """
    torch.set_num_threads(num_threads)
    # The barrier sleeps: a rank that spins here would take a core from the turn of one process. But the barrier ends at
    # slightly different times on the ranks, so the ranks that compute then run a collective, which spins.
    world.barrier(TURN_TIMEOUT_S)
    if strategy in PER_PROCESS:
        flag = torch.zeros(1, device=world.device)
        all_reduce(flag, group=world.group)
        flag.item()
    return strategy in PER_PROCESS or world.is_rank_zero


def order_of_round(strategies: Sequence[str], round_index: int) -> list[str]:
    """Return the order of the candidates in a round.

    A turn leaves warm caches and a warm processor to the next, so no candidate may always follow the same one: the
    order rotates, and is reversed in every other round.
    """
    shift = round_index // 2 % len(strategies)
    rotated = [*strategies[shift:], *strategies[:shift]]
    return rotated[::-1] if round_index % 2 else rotated


def choose_steps(step_s: Sequence[float], turn_s: float = TURN_S, fewest: int = FEWEST_STEPS) -> int:
    """Return the steps of a turn, from the seconds of every candidate's step: enough for the fastest one.

    Args:
        step_s: By candidate.
        turn_s: The duration of the fastest one's turn; the slowest one's may take ten times that.
        fewest: The minimum number of steps, however long they take.
    """
    # A turn that is long enough for the fastest must not take minutes for a candidate that is a hundred times as slow.
    wanted = min(math.ceil(turn_s / min(step_s)), math.floor(10 * turn_s / max(step_s)))
    return min(max(wanted, fewest), MOST_STEPS)


def _warm_up(trainer: Trainer, num_steps: int, threads: Sequence[int]) -> tuple[dict[int, float], list[Tensor]]:
    """Return the fastest step's seconds by number of threads, and the losses."""
    losses = [trainer.step().loss for _ in range(num_steps)]
    tries_s = dict.fromkeys(threads, math.inf)
    # Steps without synchronisation change no weights, and all candidates run the same number of them. The fastest is
    # closest to the later steps: the first ones allocate, compile, and build buckets.
    with trainer.without_sync():
        for num_threads in NUM_TRIES * tuple(threads):
            torch.set_num_threads(num_threads)
            tries_s[num_threads] = min(tries_s[num_threads], time_steps(trainer, 1)[0])
    return tries_s, losses


def measure_candidate(
    trainer: Trainer, name: str, num_steps: int, round_index: int, place: int, *, has_parts: bool = True
) -> tuple[Measurement, list[Tensor]]:
    """Train ``num_steps`` steps; for the parts, then run a third as many without synchronisation.

    The latter change no weights. All candidates run them, so that all continue with the same samples. Returns the turn
    and the steps' losses.

    Collective for ``ddp`` and ``torch-ddp``: every rank. Blocks until the device is done.
    """
    meter = UsageMeter(trainer.devices)
    seconds, records = time_steps(trainer, num_steps)
    energy_j = meter.read().energy_j
    exposed_s = trainer.strategy.exposed_s if trainer.device.type == "cpu" else None  # of the last step
    if exposed_s is not None:
        # The engine measures only one micro-batch, and by the host's clock, which does not include work of a device.
        exposed_s *= trainer.settings.accumulate
    backward_s = [record.times.part("backward", "exposed") for record in records]
    if has_parts:
        # With the same data still in the caches, so that only the synchronisation differs.
        with trainer.without_sync():
            _, unsynced = time_steps(trainer, max(3, num_steps // 3))
        if name in PER_PROCESS:
            exposed_s = median(backward_s) - median(record.times.part("backward", "exposed") for record in unsynced)
    times = replace(
        combine([record.times for record in records]),
        total_s=seconds / num_steps,
        backward_s=fmean(backward_s) - (exposed_s or 0.0),
        exposed_s=exposed_s,
    )
    num_samples = sum(record.num_samples for record in records)
    return Measurement(round_index, place, num_samples, seconds, times, energy_j), [record.loss for record in records]


def time_steps(trainer: Trainer, num_steps: int) -> tuple[float, list[StepRecord]]:
    """Train ``num_steps`` steps; return their wall time in seconds, and their records.

    Collective for strategies with a process for each device: every rank. Blocks until the device is done.
    """
    start = time.perf_counter()
    records = [trainer.step() for _ in range(num_steps)]
    synchronize(trainer.device)
    return time.perf_counter() - start, records


def merge(by_rank: Sequence[Sequence[Measurement]]) -> tuple[Measurement, ...]:
    """Return a candidate's turns over all ranks that took part: the slowest rank's wall time, means of the parts.

    Args:
        by_rank: Each rank's turns; none from a rank that only waited.
    """
    # Ranks synchronise in each step, so the slowest rank's wall time is that of all; the times of phases differ.
    merged = []
    for turns in zip(*filter(None, by_rank), strict=True):
        times = replace(combine([turn.times for turn in turns]), total_s=max(turn.times.total_s for turn in turns))
        seconds, energy_j = max(turn.seconds for turn in turns), sum(turn.energy_j for turn in turns)
        merged.append(replace(turns[0], seconds=seconds, energy_j=energy_j, times=times))
    return tuple(merged)


def split_layers(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the kinds of layer whose result depends on how a batch is divided over devices."""
    kinds = set()
    for layer in model.modules():
        if isinstance(layer, BatchNorm) and not isinstance(layer, torch.nn.SyncBatchNorm):
            kinds.add("batch norm")
        # Recurrent layers and attention have their rate in a number named dropout; others have a layer of this name.
        rate = getattr(layer, "p" if isinstance(layer, Dropout) else "dropout", None)
        if isinstance(rate, float | int) and rate > 0:
            kinds.add("dropout")
    return tuple(sorted(kinds))


def measure_peak(benchmark: Benchmark, name: str, world: World) -> list[int]:
    """Train some steps and return this process's peak: by CUDA device, or one figure for a process on the CPU.

    On CUDA the peak of the bytes of tensors; on the CPU the growth of resident memory since the task's file was loaded:
    data set, weights, gradients, optimizer, buckets, activations and memory that libraries allocate at first use.

    Collective for ``ddp`` and ``torch-ddp``: every rank.
    """
    torch.set_num_threads(benchmark.threads(benchmark.arms[name][0]))
    benchmark = replace(benchmark, task=load(benchmark.task))
    reset_peak()  # the memory and the peak of importing libraries do not count
    before_bytes = psutil.Process().memory_info().rss
    with contextlib.closing(Entrant(benchmark, name, world)) as entrant:
        assert entrant.trainer is not None
        for _ in range(NUM_PEAK_STEPS):
            entrant.trainer.step().loss.item()
        if world.device.type == "cpu":
            return [max(peak_bytes() - before_bytes, 0)]
        return [torch.accelerator.max_memory_allocated(device) for device in entrant.trainer.devices]
