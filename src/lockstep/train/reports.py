"""What the ranks report to each other with the losses of each step: stops, failures, requests, and what they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lockstep.comm.collectives import Group
from lockstep.data.comparison import check_same_samples


@dataclass
class Reports:
    """The reports of this rank, and what all ranks have reported.

    Attributes:
        group, device: The ranks that train together, None for only this process; the device of what they exchange.
        stops, fails: Whether this rank wants the run to stop; whether something failed outside of the steps, such as a
            write to disk.
        requests: Whether callbacks request the end of the run, and a checkpoint.
        read: Checksum and step of what this rank has read of a stream since the last exchange.
    """

    group: Group | None
    device: torch.device
    stops: Callable[[], bool] | None = None
    fails: Callable[[], bool] | None = None
    requests: Callable[[], tuple[bool, bool]] | None = None
    read: tuple[str, int] = ("", 0)
    _compared: tuple[str, int] = ("", 0)  # as `read`, of the last exchange
    _reported: list[float] = field(default_factory=lambda: [0.0] * 4)

    def flags(self, num_bad: int, *, compares: bool) -> list[float]:
        """Return what is summed over the ranks: bad samples, the reports, and three numbers of what was read.

        Args:
            num_bad: Number of samples that this rank could not read.
            compares: Whether ranks compare what they have read.
        """
        number = 0
        if compares:
            self._compared, self.read = self.read, ("", 0)
            number = int(self._compared[0][:4] or "0", 16)
        requests = (False, False) if self.requests is None else self.requests()
        reports = [*map(float, [*self._own(), *requests])]
        if self.group is None:
            self._reported = reports
        # All ranks have read the same if the sum of the squares is that of equal numbers.
        return [num_bad, *reports, number > 0, number, number * number]

    def _own(self) -> list[bool]:
        return [self.stops is not None and self.stops(), self.fails is not None and self.fails()]

    def take(self, sums: list[float]) -> int:
        """Note the sums of the ranks' `flags`; return the number of unreadable samples.

        Raises:
            ConfigurationError: On every rank: they have not read the same.
        """
        num_bad, *self._reported, count, total, squares = sums
        if total**2 != count * squares:  # equal numbers have the square of their mean as the mean of their squares
            self.check_samples(*self._compared)
        return int(num_bad)

    def check_samples(self, checksum: str, step: int) -> None:
        """Compare with the other ranks what they read for ``step``. Collective: every rank of the group."""
        check_same_samples(checksum, "Task.dataset", step, group=self.group, device=self.device)

    def of_all(self) -> list[bool]:
        """Return what a rank has reported: a request to stop, a failure, and requests of callbacks.

        The same on all ranks of the group, for the last step whose sums were taken.
        """
        now = self._own() if self.group is None else []
        return [*now, *(flag > 0 for flag in self._reported[len(now) :])]
