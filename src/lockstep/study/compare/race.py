"""What each rank does: all contenders take turns in one set of processes, in rounds, so that noise hits all alike."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch

from lockstep.comm.collectives import all_reduce, broadcast_object
from lockstep.comm.world import World, init
from lockstep.study.compare.figures import SINGLE, Turn
from lockstep.train.devices import PER_PROCESS
from lockstep.train.load import load_task
from lockstep.train.loop import Loop, StepRecord
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.task import Task

TURN_S = 0.5
"""How long single's turn takes if nobody says how many steps: long against the clock, short against the noise."""

MOST_STEPS = 500
TURN_TIMEOUT_S = 3600.0
"""How long the other ranks wait for a turn of one process."""


@dataclass(frozen=True)
class Race:
    """What to run; the same on every rank.

    Attributes:
        task: The task, or where to find it, as on the command line.
        num_steps: Steps of a turn; None: as many as take single about half a second.
        num_threads: By strategy, threads of one process (dp divides them among its replicas).
    """

    task: Task | str
    settings: Settings
    strategies: tuple[StrategyName, ...]
    num_devices: int
    num_rounds: int
    num_warmup: int
    num_steps: int | None
    num_threads: dict[str, int]


@dataclass(frozen=True)
class RankReport:
    """What one rank measured: by strategy, its turns (none where it only waited) and the losses of all steps."""

    num_steps: int
    turns: dict[str, tuple[Turn, ...]]
    losses: dict[str, tuple[float, ...]]


def load(task: Task | str) -> Task:
    """Return the task itself."""
    return load_task(task) if isinstance(task, str) else task


def devices_for(strategy: str, world: World, num_devices: int) -> list[torch.device]:
    """Return the devices that this process uses for ``strategy``."""
    if strategy in PER_PROCESS or strategy == SINGLE:
        return [world.device]
    if world.device.type == "cuda":
        return [torch.device("cuda", index) for index in range(num_devices)]
    return [world.device] * num_devices


def run_race(race: Race) -> RankReport:
    """Run all turns of all contenders and return what this rank measured.

    Collective: every rank of a launched job. Ranks that have no part in a turn sleep meanwhile.
    """
    with init() as world:
        track = _Track(race, world)
        try:
            return track.run()
        finally:
            track.close()


class _Track:
    """The contenders of one rank, and their turns."""

    def __init__(self, race: Race, world: World) -> None:
        self._race, self._world = race, world
        self._loops: dict[str, Loop] = {}
        self._losses: dict[str, list[torch.Tensor]] = {name: [] for name in race.strategies}
        task = load(race.task)
        for name in race.strategies:
            if self._takes_part(name):
                devices = devices_for(name, world, race.num_devices)
                self._loops[name] = Loop(task, race.settings, world, strategy=name, devices=devices)

    def run(self) -> RankReport:
        race = self._race
        turns: dict[str, list[Turn]] = {name: [] for name in race.strategies}
        warmup_s = {name: self._warm_up(name) for name in race.strategies}
        num_steps = race.num_steps or self._choose_steps(warmup_s["single"])
        with _progress(race, self._world) as advance:
            for round_index in range(race.num_rounds):
                for place in range(len(race.strategies)):
                    name = race.strategies[(round_index + place) % len(race.strategies)]
                    turn = self._turn(name, num_steps, round_index, place)
                    if turn is not None:
                        turns[name].append(turn)
                    advance()
        losses = {name: tuple(float(loss) for loss in values) for name, values in self._losses.items()}
        return RankReport(num_steps, {name: tuple(values) for name, values in turns.items()}, losses)

    def close(self) -> None:
        for loop in self._loops.values():
            loop.close()

    def _takes_part(self, name: str) -> bool:
        return name in PER_PROCESS or self._world.is_rank_zero

    def _start(self, name: str) -> bool:
        """Wait for all ranks; return whether this one computes. Those that do leave within a network round trip."""
        torch.set_num_threads(self._race.num_threads[name])
        self._world.barrier(TURN_TIMEOUT_S)  # sleeps, while a turn of one process may take long
        if name in PER_PROCESS:
            self._align()
        return self._takes_part(name)

    def _align(self) -> None:
        flag = torch.zeros(1, device=self._world.device)
        all_reduce(flag, group=self._world.group)
        flag.item()

    def _warm_up(self, name: str) -> float:
        """Run the steps that are not measured; return the seconds of the fastest."""
        if not self._start(name):
            return 0.0
        seconds = []
        for _ in range(self._race.num_warmup):
            start = time.perf_counter()
            self._losses[name].append(self._loops[name].step().loss)
            self._finish_work()
            seconds.append(time.perf_counter() - start)
        with self._loops[name].without_sync():
            self._loops[name].step()
        return min(seconds)

    def _choose_steps(self, single_step_s: float) -> int:
        """Return how many steps a turn has. Collective: every rank; rank zero's measurement decides."""
        wanted = math.ceil(TURN_S / single_step_s) if single_step_s else 0
        wanted = min(max(wanted, 3), MOST_STEPS)
        return int(broadcast_object(wanted, group=self._world.group, device=self._world.device))

    def _turn(self, name: str, num_steps: int, round_index: int, place: int) -> Turn | None:
        """Train ``num_steps`` steps, then run a third as many without synchronisation, which change nothing.

        All contenders run the latter, so that they see the same samples.
        """
        if not self._start(name):
            return None
        loop = self._loops[name]
        exchanged_s = []
        start = time.perf_counter()
        records = []
        for _ in range(num_steps):
            records.append(loop.step())
            if loop.exposed_s is not None:
                exchanged_s.append(loop.exposed_s)
        self._finish_work()
        seconds = time.perf_counter() - start
        self._losses[name] += [record.loss for record in records]
        with loop.without_sync():
            alone = [loop.step() for _ in range(max(3, num_steps // 3))]
        self._finish_work()
        return Turn(
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

    def _finish_work(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()


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


def merge(reports: Sequence[RankReport], strategy: str) -> tuple[Turn, ...]:
    """Return a contender's turns over all ranks that took part: the slowest rank's wall time, means of the parts."""
    by_rank = [report.turns[strategy] for report in reports if report.turns[strategy]]
    return tuple(_merge_turn(turns) for turns in zip(*by_rank, strict=True))


def _merge_turn(turns: Sequence[Turn]) -> Turn:
    exposed = [turn.exposed_s for turn in turns if turn.exposed_s is not None]
    return Turn(
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


def _progress(race: Race, world: World) -> "_Progress":
    return _Progress(race, shown=world.is_rank_zero)


class _Progress:
    """A bar over all turns on rank zero's terminal; a line a round where there is no terminal."""

    def __init__(self, race: Race, *, shown: bool) -> None:
        from lockstep.study.compare.table import console

        self._race, self._shown = race, shown
        self._console = console(stderr=True)
        self._num_done = 0

    def __enter__(self) -> Callable[[], None]:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("turn {task.completed}/{task.total}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (self._shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task("racing", total=self._race.num_rounds * len(self._race.strategies))
        self._bar.start()
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _advance(self) -> None:
        self._num_done += 1
        self._bar.advance(self._task)
        num_rounds, rest = divmod(self._num_done, len(self._race.strategies))
        if self._shown and not self._console.is_terminal and rest == 0:
            self._console.print(f"round {num_rounds}/{self._race.num_rounds}")
