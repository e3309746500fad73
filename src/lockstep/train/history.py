"""The losses of a run, read from the device a few at a time, and how fast it goes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.train.step_record import StepRecord

_MAX_UNREAD = 256


@dataclass
class History:
    """Takes every step's loss without waiting for it, and measures the throughput.

    The first step, which also allocates and compiles, is left out of the throughput as soon as there is a second.
    """

    losses: list[float] = field(default_factory=list)
    num_samples: int = 0
    num_counted: float = 0.0
    _unread: list[Tensor] = field(default_factory=list)
    _unread_counts: list[Tensor] = field(default_factory=list)
    _num_timed: int = 0
    _elapsed_s: float = 0.0
    _first: tuple[int, float] | None = None
    _started_at: float = 0.0

    def start(self) -> None:
        """Start the clock: a step begins."""
        self._started_at = time.perf_counter()

    def add(self, record: StepRecord) -> None:
        """Add a step that ends now. Blocks every 256 steps until the device has come to it."""
        self.num_samples += record.num_samples
        self._unread.append(record.loss)
        if record.count is not None:
            self._unread_counts.append(record.count)
        if len(self._unread) >= _MAX_UNREAD:
            self.read()
        self._count(record.num_samples)

    def read(self) -> list[float]:
        """Return all losses so far. Blocks until the device has come to the last step."""
        if self._unread:
            self.losses += torch.stack(self._unread).tolist()
            self._unread = []
        if self._unread_counts:
            self.num_counted += float(torch.stack(self._unread_counts).sum())
            self._unread_counts = []
        return self.losses

    def stop(self) -> None:
        """Wait for the device, and count that as training: something else comes next."""
        self._started_at = time.perf_counter()
        self.read()
        self._count(0)

    def _count(self, num_samples: int) -> None:
        elapsed_s = time.perf_counter() - self._started_at
        if self._first is None:
            self._first = (num_samples, elapsed_s)
            return
        self._num_timed += num_samples
        self._elapsed_s += elapsed_s

    @property
    def samples_per_s(self) -> float:
        """Samples of the global batches per second of training."""
        num_samples, elapsed_s = self._num_timed, self._elapsed_s
        if num_samples == 0 and self._first is not None:
            num_samples, elapsed_s = self._first
        return num_samples / elapsed_s if elapsed_s else 0.0

    @property
    def counted(self) -> tuple[float, float] | None:
        """What the losses were means over if not samples, such as tokens: how many, and how many a second.

        None if they were means over samples. Blocks until the device has come to the last step.
        """
        self.read()
        if not self.num_counted:
            return None
        return self.num_counted, self.samples_per_s * self.num_counted / self.num_samples

    def in_words(self, counts: str) -> str:
        """Return the throughput in words; ``counts`` is what the losses count if not samples."""
        text = f"{self.samples_per_s:,.0f} samples/s"
        return text if self.counted is None else f"{text}, {self.counted[1]:,.0f} {counts}/s"
