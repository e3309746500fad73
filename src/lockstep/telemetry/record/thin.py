"""Keeps the file of a long run small: each line of steps stands for more and more of them.

The first ``SINGLY`` lines hold a step each, the next so many two, then four, and so on: a million steps take 60,000
lines. What was slow in between stays: the longest step is named.
"""

from __future__ import annotations

from typing import Any

SINGLY = 8192

_LAST = ("loss", "learning_rate", "grad_norm", "samples")
_MEANS = (
    *("interval_s", "total_s", "data_wait_s", "copy_s", "forward_s", "backward_s", "exposed_s", "hidden_s"),
    *("optimizer_s", "samples_per_s", "counts", "tokens_per_s"),
)


class Thinner:
    """Takes the lines of single steps, and gives those to write.

    Args:
        singly: Lines until each next one stands for twice as many steps.
    """

    def __init__(self, singly: int = SINGLY) -> None:
        self._singly = singly
        self._num_lines = 0
        self._held: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> dict[str, Any] | None:
        """Take the line of a step; return one to write if there are enough."""
        self._held.append(line)
        if len(self._held) < 2 ** (self._num_lines // self._singly):
            return None
        return self.rest()

    def rest(self) -> dict[str, Any] | None:
        """Return the line of what is held, if anything is."""
        if not self._held:
            return None
        held, self._held = self._held, []
        self._num_lines += 1
        return merge(held)


def merge(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one line for several steps: means of times, the last loss, and the longest step by number."""
    if len(lines) == 1:
        return lines[0]
    slowest = max(lines, key=lambda line: line["total_s"])
    merged = {
        **lines[0],
        "num_steps": len(lines),
        "slowest_s": slowest["total_s"],
        "slowest_step": slowest["step"],
    }
    for name in _LAST:
        merged[name] = lines[-1][name]
    for name in _MEANS:
        known = [line[name] for line in lines if line.get(name) is not None]
        merged[name] = sum(known) / len(known) if known else None
    return merged
