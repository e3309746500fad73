"""What each rank does: all contenders take turns in one set of processes, in rounds, so that noise hits all alike."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from lockstep.comm.collectives import all_reduce, broadcast_object
from lockstep.comm.world import World, init
from lockstep.errors import LockstepError
from lockstep.study.compare.figures import SINGLE, Turn
from lockstep.study.compare.measure import measure_turn
from lockstep.study.compare.progress import RaceProgress
from lockstep.study.compare.table import console
from lockstep.train.devices import PER_PROCESS
from lockstep.train.load import load_task
from lockstep.train.loop import Loop
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.task import Task

Name = TypeVar("Name", bound=str)

TURN_S = 0.5
"""How long the fastest contender's turn takes if nobody says how many steps: long against the clock and the start."""

LONGEST_TURN_S = 5.0
"""How long the slowest contender's turn may take then."""

FEWEST_STEPS, MOST_STEPS = 3, 500

TURN_TIMEOUT_S = 3600.0
"""How long the other ranks wait for a turn of one process."""


@dataclass(frozen=True)
class Race:
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
    turns: dict[str, tuple[Turn, ...]]
    losses: dict[str, tuple[float, ...]]
    num_parameters: int
    split_layers: tuple[str, ...]


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
def naming(strategy: str) -> Iterator[None]:
    """Let an exception say whose turn it was: a task may suit one engine and not another."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"It was the turn of {strategy}. If the others can train this task, name them: --strategies LIST"
        )
        raise


def run_race(race: Race) -> RankReport:
    """Run all turns of all contenders and return what this rank measured.

    Collective: every rank of a launched job. Ranks that have no part in a turn sleep meanwhile.

    Raises:
        LockstepError: The contenders do not fit into the devices' memory side by side.
    """
    with init() as world:
        shown = world.is_rank_zero and not race.quiet
        num_turns = race.num_rounds * len(race.strategies)
        progress = RaceProgress(num_turns, len(race.strategies), shown=shown, console=console(stderr=True))
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

    def __init__(self, race: Race, world: World) -> None:
        self._race, self._world = race, world
        self._loops: dict[str, Loop] = {}
        self._losses: dict[str, list[torch.Tensor]] = {name: [] for name in race.strategies}

    def run(self, progress: RaceProgress) -> RankReport:
        race = self._race
        progress.say("building the models")
        task = load(race.task)
        for name in race.strategies:
            if takes_part(name, self._world):
                devices = devices_for(name, self._world, race.num_devices)
                with naming(name):
                    self._loops[name] = Loop(task, race.settings, self._world, strategy=name, devices=devices)
        progress.say("warming up")
        step_s = [self._warm_up(name) for name in race.strategies]
        num_steps = race.num_steps or self._agree(choose_steps(step_s) if self._world.is_rank_zero else 0)
        turns: dict[str, list[Turn]] = {name: [] for name in race.strategies}
        progress.start()
        for round_index in range(race.num_rounds):
            for place, name in enumerate(order_of_round(race.strategies, round_index)):
                if self._start(name):
                    with naming(name):
                        turn, losses = measure_turn(self._loops[name], name, num_steps, round_index, place)
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
        with naming(name):
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
