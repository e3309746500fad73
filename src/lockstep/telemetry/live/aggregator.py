"""Makes one snapshot of what all ranks tell of themselves: on rank zero, from a thread beside training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from lockstep.comm.board import Board
from lockstep.telemetry.live.delivery import Delivery
from lockstep.telemetry.live.figures import Figures
from lockstep.telemetry.live.snapshot import RankFigures, Snapshot
from lockstep.telemetry.live.time_left import TimeLeft

_FIELDS = tuple(field.name for field in fields(RankFigures) if field.name != "age_s")


@dataclass(frozen=True)
class RunInfo:
    """What stays the same in a run, or is asked for at each look.

    Attributes:
        num_steps: Of the whole run.
        first_step: Steps done before.
        num_restarts: How often all ranks were started again.
        steps_per_epoch: None for a stream.
        num_skipped: Asked for the steps that were skipped so far.
        counts: What the task calls that which its loss counts.
    """

    num_steps: int
    first_step: int = 0
    num_restarts: int = 0
    steps_per_epoch: int | None = None
    num_skipped: Callable[[], int] = lambda: 0
    counts: str = "tokens"


class Aggregator:
    """Posts this rank's figures; on rank zero, gathers those of all and hands a snapshot to each of ``deliveries``.

    Args:
        figures: Of this rank.
        board: Where ranks post theirs.
        info: Of the run.
        world_size: How many ranks there are.
        deliveries: On rank zero, to whom snapshots go.
    """

    def __init__(
        self, figures: Figures, board: Board, info: RunInfo, *, world_size: int, deliveries: Iterable[Delivery] = ()
    ) -> None:
        self._figures, self._board, self._info, self._world_size = figures, board, info, world_size
        self.deliveries = list(deliveries)
        self._is_rank_zero = figures.rank == 0
        self._num_posts = 0
        self._last_own: RankFigures | None = None
        self._seen: dict[int, tuple[int, float]] = {}
        self._left = TimeLeft(info.num_steps, info.first_step)

    def beat(self, *, is_last: bool = False) -> None:
        """Post, and on rank zero gather and deliver. Blocks some seconds at most, if the store does not answer."""
        figures, interval = self._figures.read()
        figures = self._kept(figures)
        if not self._is_rank_zero:
            self._num_posts += 1
            self._board.post([self._num_posts, *encode(figures)])
            return
        if not self.deliveries:
            return
        now = time.time()
        seconds = interval.seconds
        self._left.reached(figures.step)
        snapshot = Snapshot(
            time=now,
            step=figures.step,
            num_steps=self._info.num_steps,
            epoch=None if not self._info.steps_per_epoch else figures.step / self._info.steps_per_epoch,
            loss=interval.loss,
            learning_rate=interval.learning_rate,
            grad_norm=interval.grad_norm,
            samples_per_s=interval.num_samples / seconds if seconds and interval.num_samples else None,
            tokens_per_s=interval.num_tokens / seconds if seconds and interval.num_tokens else None,
            counts=self._info.counts,
            num_restarts=self._info.num_restarts,
            num_skipped_steps=self._info.num_skipped(),
            elapsed_s=self._left.elapsed_s,
            left_s=self._left.seconds(),
            ranks=with_waits((figures, *self._others())),
            world_size=self._world_size,
            buckets=interval.buckets,
            events=interval.events,
            is_last=is_last,
        )
        for delivery in self.deliveries:
            delivery.give(snapshot)

    def close(self) -> None:
        """Let everybody who was given snapshots finish."""
        for delivery in self.deliveries:
            delivery.close()

    def _kept(self, figures: RankFigures) -> RankFigures:
        """Return ``figures`` with the times of those before if no step was done since."""
        last = self._last_own
        if not figures.num_steps and last is not None and last.step_s is not None:
            new = {name: getattr(figures, name) for name in _FIELDS if getattr(figures, name) is not None}
            figures = replace(last, **{**new, "num_steps": 0})
        self._last_own = figures
        return figures

    def _others(self) -> list[RankFigures]:
        """Return what the other ranks told last, and how long ago that was seen to change."""
        now_s = time.monotonic()
        found = []
        for rank, (number, *values) in sorted(self._board.read().items()):
            count, since_s = self._seen.get(rank, (-1, now_s))
            if number != count:
                since_s = now_s
                self._seen[rank] = number, now_s
            found.append(replace(decode(values), age_s=now_s - since_s))
        return found


def encode(figures: RankFigures) -> list[Any]:
    """Return figures as what JSON can hold, and short."""
    values = [getattr(figures, name) for name in _FIELDS]
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]


def decode(values: Iterable[Any]) -> RankFigures:
    """Return the figures that `encode` was given."""
    named: Mapping[str, Any] = dict(zip(_FIELDS, values, strict=True))
    return RankFigures(**named)


def with_waits(ranks: Iterable[RankFigures]) -> tuple[RankFigures, ...]:
    """Return ``ranks`` with what each waited for its peers: what it was exposed longer than the one that was least.

    All ranks leave a reduction together, so the rank that comes last waits for the wire alone; see stragglers.py.
    """
    ranks = tuple(ranks)
    known = [each.exposed_s for each in ranks if each.exposed_s is not None]
    if not known:
        return ranks
    least_s = min(known)
    return tuple(each if each.exposed_s is None else replace(each, peers_s=each.exposed_s - least_s) for each in ranks)
