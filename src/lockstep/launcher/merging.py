"""One stream of lines out of many: what the first rank says, and of the others only what differs from it.

The first rank's lines pass at once and unchanged. Another rank's line is left out if the first rank has said the
same, occurrence by occurrence; if it has not yet, it has a moment to. Then the line is shown with its rank, once for
all ranks that said it. So a line without a prefix is the first rank's, or everybody's. A warning is shown once, whoever
repeats it.

Pure: lines go in with the time of their arrival, lines come out.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

HOLD_S = 0.5
"""How long a line waits for the first rank to say the same."""

_REMEMBERED = 65536
"""Distinct lines of the first rank that others may still repeat."""

_TORCH_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
_GLOG_PREFIX = re.compile(r"^\[([IWEF])\d{4} [\d:.]+ ")
_WARNING = re.compile(r"\b\w*Warning: |^\[W\d{4} ")


class Shown(NamedTuple):
    """A line for the terminal."""

    stream: str
    text: str


class _Held(NamedTuple):
    at_s: float
    text: str
    key: str


def key_of(text: str) -> str:
    """Return what of a line counts when lines are compared: not torch's rank prefix, nor times in its log.

    Of a progress bar, each of whose states begins with a return, it is the last state.
    """
    last = text.rstrip("\r").rpartition("\r")[2]
    return _GLOG_PREFIX.sub(r"[\1 ", _TORCH_PREFIX.sub("", last))


class Merger:
    """Merges one stream, such as standard output, of the ranks of a machine.

    Args:
        stream: Its name.
        ranks: The ranks of this machine.
        warned: The warnings that were shown already; shared between streams.
    """

    def __init__(self, stream: str, ranks: range, warned: set[str]) -> None:
        self._stream, self._first, self._warned = stream, ranks.start, warned
        # On other machines than the first, even the first rank's lines could be taken for those of rank zero.
        self._mark = "" if ranks.start == 0 else f"{label([ranks.start])} "
        self._said: OrderedDict[str, int] = OrderedDict()
        self._matched: Counter[tuple[int, str]] = Counter()
        self._held: dict[int, deque[_Held]] = {rank: deque() for rank in ranks if rank != ranks.start}
        self._drops_source: set[int] = set()

    def add(self, rank: int, text: str, now_s: float) -> list[Shown]:
        """Take in a line; return what is to be shown now."""
        if self._is_known_warning(rank, text):
            return []
        key = key_of(text)
        if rank == self._first:
            self._said[key] = self._said.pop(key, 0) + 1
            if len(self._said) > _REMEMBERED:
                self._forget(next(iter(self._said)))
            shown = [Shown(self._stream, f"{self._mark}{text}")]
        else:
            self._held[rank].append(_Held(now_s, text, key))
            shown = []
        return [*shown, *self.due(now_s)]

    def due(self, now_s: float, *, final: bool = False) -> list[Shown]:
        """Return the lines that have waited long enough for the first rank; all of them at the end."""
        shown = []
        for rank, held in self._held.items():
            while held:
                line = held[0]
                if self._is_matched(rank, line.key):
                    held.popleft()
                elif final or now_s - line.at_s >= HOLD_S:
                    others = list(self._pop_alike(line.key))
                    shown.append(Shown(self._stream, f"{label(others)} {line.text}"))
                else:
                    break
        return shown

    def _is_matched(self, rank: int, key: str) -> bool:
        if self._matched[rank, key] < self._said.get(key, 0):
            self._matched[rank, key] += 1
            return True
        return False

    def _pop_alike(self, key: str) -> Iterator[int]:
        for rank, held in self._held.items():
            if held and held[0].key == key:
                held.popleft()
                yield rank

    def _forget(self, key: str) -> None:
        del self._said[key]
        for rank in self._held:
            del self._matched[rank, key]

    def _is_known_warning(self, rank: int, text: str) -> bool:
        """Say whether a line repeats a warning, or is the line of source that Python shows below one."""
        if rank in self._drops_source and text.startswith("  "):
            self._drops_source.discard(rank)
            return True
        self._drops_source.discard(rank)
        if not _WARNING.search(text):
            return False
        key = key_of(text)
        if key in self._warned:
            self._drops_source.add(rank)
            return True
        if len(self._warned) < _REMEMBERED:
            self._warned.add(key)
        return False


def label(ranks: Iterable[int]) -> str:
    """Return such as ``[rank 1]`` or ``[ranks 1-3, 5]``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"[rank{'s' if len(spans) > 1 or spans[0][0] != spans[0][1] else ''} {text}]"
