"""torch elastic's agent with ears: it says why ranks are started again, and with how many."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast
from unittest.mock import patch

import torch
from torch.distributed.elastic.agent.server import WorkerGroup
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from lockstep.launcher import guardian
from lockstep.launcher.failure import RankEnd

_STOPPING_S = 10
"""How long ranks have to end before they are started again; what they wait for is gone."""


@dataclass(frozen=True)
class Restart:
    """Ranks are about to be started again.

    Attributes:
        first: How the rank ended that failed first; ``None`` if only other machines came or left.
        number: Of this restart, from 1.
        limit: How many there may be.
        num_ranks: On this machine from now on.
        is_fewer: Whether that is one fewer than before.
    """

    first: RankEnd | None
    number: int
    limit: int
    num_ranks: int
    is_fewer: bool


Failures = Mapping[int, ProcessFailure]


class Listener(Protocol):
    """Whom the agent tells."""

    def started(self, ranks: range) -> None:
        """Take note that these ranks of this machine have been started."""

    def first_of(self, failures: Failures) -> RankEnd:
        """Return how the rank ended that failed first."""

    def restarts(self, restart: Restart) -> None:
        """Take note that the old ranks have ended, and new ones are about to start."""


@contextmanager
def telling(listener: Listener, *, min_ranks: int | None) -> Iterator[None]:
    """Within, elastic's launcher tells of the ranks that it starts, and of why it starts them again.

    Args:
        listener: Whom it tells.
        min_ranks: After a rank was killed, go on with one fewer, but no fewer than this; as many as before if ``None``.
    """

    class Agent(_Agent):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.listener, self.min_ranks = listener, min_ranks

    with patch.object(api, "LocalElasticAgent", Agent):
        yield


class _Agent(LocalElasticAgent):
    listener: Listener
    min_ranks: int | None

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        super()._initialize_workers(worker_group)
        ranks = [worker.global_rank for worker in worker_group.workers]
        self.listener.started(range(min(ranks), max(ranks) + 1))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._last = cast(RunResult, super()._monitor_workers(worker_group))
        return self._last

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec, failures = worker_group.spec, self._last.failures
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, _STOPPING_S)
            for pid in self._pcontext.pids().values():
                guardian.kill_session(pid)  # the loader processes of a killed rank, which would go on for some seconds
        first = self.listener.first_of(failures) if failures else None
        was_killed = first is not None and first.exit_code < 0
        is_fewer = self.min_ranks is not None and was_killed and spec.local_world_size > self.min_ranks
        if is_fewer:
            assert first is not None
            _hide_device(failures[first.rank].local_rank, spec.local_world_size)
            spec.local_world_size -= 1
        number = spec.max_restarts - self._remaining_restarts
        self.listener.restarts(Restart(first, number, spec.max_restarts, spec.local_world_size, is_fewer))
        super()._restart_workers(worker_group)


def _hide_device(index: int, num_ranks: int) -> None:
    """Keep the GPU of a rank that was lost from the ranks to come."""
    if torch.cuda.device_count() < num_ranks:
        return  # the ranks are on the CPU
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:index] + visible[index + 1 :])
