"""Measure one turn of one contender, and put together what its ranks measured."""

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median

import torch
from torch import Tensor

from lockstep.study.compare.figures import Turn
from lockstep.train.devices import PER_PROCESS
from lockstep.train.loop import Loop
from lockstep.train.step_record import StepRecord


def measure_turn(loop: Loop, name: str, num_steps: int, round_index: int, place: int) -> tuple[Turn, list[Tensor]]:
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
    turn = Turn(
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
    loop: Loop, num_steps: int, *, after_each: Callable[[], None] = lambda: None
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


def merge(by_rank: Sequence[Sequence[Turn]]) -> tuple[Turn, ...]:
    """Return a contender's turns over all ranks that took part: the slowest rank's wall time, means of the parts.

    Args:
        by_rank: Each rank's turns; none from a rank that only waited.
    """
    return tuple(_merge_turn(turns) for turns in zip(*filter(None, by_rank), strict=True))


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
