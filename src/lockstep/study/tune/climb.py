"""The largest micro-batch that fits into memory, found from below: pure decisions.

[Note: from below]
A GPU says when its memory is used up, and all ranks agree to go on in smaller pieces (train/memory.py). The host does
not: it gives more than it has, and then kills. So sizes grow from two samples on, each tried with a real step of
that many samples a device, and the next is tried only if a straight line through the peaks so far stays under
the limit: what is held anyway, and something for each sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Climb:
    """Says what to try next, until it is found.

    Args:
        share: Samples of a global batch that fall to one device.
        limit_bytes: What one process may use; None: only trying tells.
    """

    share: int
    limit_bytes: int | None = None
    peaks: dict[int, int] = field(default_factory=dict)
    too_large: int | None = None

    def record(self, size: int, peak_bytes: int | None) -> None:
        """Take what a micro-batch of ``size`` samples needed; None: there was not enough."""
        if peak_bytes is None:
            self.too_large = min(size, self.too_large or size)
        else:
            self.peaks[size] = peak_bytes

    def next(self) -> int | None:
        """Return the size to try next; None if it is found."""
        sizes = [size for size in range(1, self.share + 1) if self.share % size == 0]
        tried = max(self.peaks, default=0)
        if self.too_large is None:
            if not tried:
                return next((size for size in sizes if size > 1), sizes[0])  # batch norm takes no single sample
            if tried == self.share:
                return None
            if len(self.peaks) > 1 and self._may_jump(self.share):
                return self.share
            larger = next((size for size in sizes if size >= 2 * tried), None)
            return larger if larger is not None and self._may_fit(larger) else None
        between = [size for size in sizes if tried < size < self.too_large and self._may_fit(size)]
        return between[-1] if between else None

    @property
    def largest(self) -> int | None:
        """The largest size that fits; None if none does."""
        return max(self.peaks, default=None)

    def bytes_of(self, size: int) -> int | None:
        """Return what a micro-batch of ``size`` samples needs, by a line through the largest that were measured."""
        if not self.peaks:
            return None
        return self._line(size, self._slopes()[-1])

    def _line(self, size: int, per_sample: float) -> int:
        large, large_bytes = max(self.peaks.items())
        return int(large_bytes + max(0, size - large) * per_sample)

    def _slopes(self) -> list[float]:
        """Return the bytes of one more sample, from each size to the next; nothing is known from one size."""
        pairs = pairwise(sorted(self.peaks.items()))
        return [max(0.0, (more - some) / (large - small)) for (small, some), (large, more) in pairs] or [0.0]

    def _may_jump(self, size: int) -> bool:
        """Return whether a size far away fits, by the steepest slope: one alone may be lost in what else grows."""
        return self.limit_bytes is None or self._line(size, max(self._slopes())) <= self.limit_bytes

    def _may_fit(self, size: int) -> bool:
        needed = self.bytes_of(size)
        return self.limit_bytes is None or needed is None or needed <= self.limit_bytes
