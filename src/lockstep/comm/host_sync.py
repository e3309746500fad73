"""Order blocks of code between ranks through a key-value store: no device is touched, and who is missing is known."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lockstep.comm.roll_call import listed, pause_s
from lockstep.errors import CollectiveError, RankFailed

_FIRST_PAUSE_S = 0.0002
"""Before the second look at the store; later pauses are longer, as a rank that is late will be late for long."""

_DONE = "done"


@dataclass
class HostSync:
    """Barriers and leader-first blocks of one group of ranks."""

    store: Store
    group: dist.ProcessGroup
    rank: int
    world_size: int
    _num_calls: dict[str, int] = field(default_factory=dict)

    def barrier(self, timeout_s: float) -> None:
        """Wait for all ranks.

        Collective: every rank. Blocks at most ``timeout_s``.

        Raises:
            CollectiveError: Ranks did not come; names them.
        """
        count, prefix = self._next("barrier")
        self.store.set(f"{prefix}/{self.rank}", "")
        if self.store.add(f"{prefix}/count", 1) == self.world_size:
            self.store.set(f"{prefix}/{_DONE}", "")
        if not self._wait(f"{prefix}/{_DONE}", timeout_s):
            missing = [rank for rank in range(self.world_size) if not self.store.check([f"{prefix}/{rank}"])]
            raise CollectiveError(
                f"Rank {self.rank} waited {timeout_s:g} s in World.barrier() number {count}; "
                f"missing: {listed(missing)}.\n"
                "Those ranks ended, are stuck, or do not call barrier() as often as the others; "
                "if they are only slow, pass a longer timeout_s."
            )
        self._forget(f"barrier/{count - 1}")

    def announce(self, leader: str, outcome: str | None) -> None:
        """Tell those who wait in `await_leader` that the block is over; ``outcome`` is the error, if any."""
        _, prefix = self._next(leader)
        self.store.set(prefix, outcome or _DONE)

    def await_leader(self, leader: str, timeout_s: float) -> None:
        """Wait until the leader has announced its block's end.

        Raises:
            RankFailed: The leader failed in its block.
            CollectiveError: It did not finish in time.
        """
        _, key = self._next(leader)
        if not self._wait(key, timeout_s):
            raise CollectiveError(
                f"Rank {self.rank} waited {timeout_s:g} s for {leader} to finish its rank_zero_first() block.\n"
                "It ended, is stuck, or never reached the block; if it is only slow, pass a longer timeout_s."
            )
        outcome = self.store.get(key).decode()
        if outcome != _DONE:
            raise RankFailed(f"{leader.capitalize()} failed in its rank_zero_first() block: {outcome}")

    def _next(self, what: str) -> tuple[int, str]:
        self._num_calls[what] = self._num_calls.get(what, 0) + 1
        return self._num_calls[what], f"{what}/{self._num_calls[what]}"

    def _forget(self, prefix: str) -> None:
        # All have left the barrier before the one that all have entered.
        self.store.delete_key(f"{prefix}/{self.rank}")
        if self.rank == 0:
            self.store.delete_key(f"{prefix}/count")
            self.store.delete_key(f"{prefix}/{_DONE}")

    def _wait(self, key: str, timeout_s: float) -> bool:
        """Poll for ``key``: a blocking wait would hold back Ctrl-C."""
        deadline = time.monotonic() + timeout_s
        pause, longest = _FIRST_PAUSE_S, 5 * pause_s(self.world_size)
        while not self.store.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, longest)
        return True
