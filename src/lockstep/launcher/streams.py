"""What ranks write reaches the launcher through pipes, and from there the terminal and files, in whole lines."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import sys
import termios
import threading
import time
import tty
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lockstep.launcher.live_view import LiveView, make_live_view
from lockstep.launcher.log_files import LogFiles
from lockstep.launcher.logs import LEVELS
from lockstep.launcher.merging import HOLD_S, Merger, Shown
from lockstep.launcher.output import STREAMS

_PARTIAL_S = 0.2
"""What stands at the end of the first rank's output without a line end is shown after so long, such as a prompt."""


def pipe_of(run_dir: Path, stream: str, local_rank: int) -> Path:
    """Return where a rank's bootstrap finds the pipe for one of its streams: a pipe's name, or a link to a terminal."""
    return run_dir / f"pipe-{stream}-{local_rank}"


@dataclass
class _Source:
    stream: str
    local_rank: int
    rest: str = ""
    rest_at_s: float = 0.0
    num_shown: int = 0
    """Characters of ``rest`` that are on the terminal already."""


class Streams:
    """Reads what the ranks of this machine write, within a ``with``.

    Args:
        run_dir: Where the pipes are made.
        num_ranks: Of this machine.
        level: What the terminal shows: a key of `LEVELS`.
        files: Where all lines are kept.
    """

    def __init__(self, run_dir: Path, num_ranks: int, level: str, files: LogFiles) -> None:
        self._run_dir = run_dir
        self._files, self._shown = files, LEVELS[level]
        self._first_rank = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._descriptors: list[int] = []
        for local_rank in range(num_ranks):
            for stream in STREAMS:
                path = pipe_of(run_dir, stream, local_rank)
                terminal = _terminal(stream) if local_rank == 0 else None
                descriptor = self._open_pipe(path) if terminal is None else self._open_terminal(path, terminal)
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                self._selector.register(descriptor, selectors.EVENT_READ, (_Source(stream, local_rank), decoder))
        self._num_ranks = num_ranks
        self._warned: set[str] = set()
        self._mergers = self._make_mergers()
        self._view: LiveView | None = None
        self._thread = threading.Thread(target=self._follow, name="lockstep-streams", daemon=True)

    def settle(self) -> None:
        """Show all that has been written by now, as the ranks have ended."""
        with self._lock:
            self._read()
            self._end_lines()
            self._flush()

    def started(self, ranks: range) -> None:
        """Take note of the ranks' numbers."""
        with self._lock:
            if ranks.start != self._first_rank or len(ranks) != self._num_ranks:
                self._first_rank, self._num_ranks = ranks.start, len(ranks)
                self._mergers = self._make_mergers()

    def __enter__(self) -> Streams:
        self._view = make_live_view(self._run_dir) if "stdout" in self._shown else None
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.settle()
        if self._view is not None:
            self._view.close()
        self._selector.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._files.close()

    def _make_mergers(self) -> dict[str, Merger]:
        ranks = range(self._first_rank, self._first_rank + self._num_ranks)
        return {stream: Merger(stream, ranks, self._warned) for stream in STREAMS}

    def _open_pipe(self, path: Path) -> int:
        os.mkfifo(path, 0o600)
        # For both: so that it has no end while no rank has it open.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._descriptors.append(descriptor)
        return descriptor

    def _open_terminal(self, path: Path, like: int) -> int:
        """Give the first rank a terminal where we have one: for its progress bars and colours."""
        ours, theirs = os.openpty()
        tty.setraw(theirs)
        termios.tcsetwinsize(theirs, termios.tcgetwinsize(like))
        os.set_blocking(ours, False)
        path.symlink_to(os.ttyname(theirs))
        self._descriptors += [ours, theirs]
        return ours

    def _follow(self) -> None:
        while not self._over.is_set():
            ready = self._selector.select(HOLD_S / 4)
            with self._lock:
                if ready:
                    self._read()
                self._show_due()
                self._flush()
            if self._view is not None:
                self._view.look()

    def _read(self) -> None:
        """Take in all that there is."""
        while found := self._selector.select(0):
            num_bytes = 0
            for key, _ in found:
                source, decoder = key.data
                with contextlib.suppress(BlockingIOError, OSError):
                    data = os.read(key.fd, 65536)
                    num_bytes += len(data)
                    self._take(source, decoder.decode(data))
            if not num_bytes:
                return

    def _take(self, source: _Source, text: str) -> None:
        *lines, source.rest = (source.rest + text).replace("\r\n", "\n").split("\n")
        source.rest_at_s = time.monotonic()
        for line in lines:
            self._line(source, line)

    def _line(self, source: _Source, line: str) -> None:
        rank = self._first_rank + source.local_rank
        shown_already, source.num_shown = source.num_shown, 0
        # Of a progress bar, each of whose states begins with a return, only the last is kept.
        kept = line.rstrip("\r").rpartition("\r")[2]
        self._files.line(rank, source.stream, kept)
        if source.local_rank >= self._num_ranks:
            return
        if source.local_rank == 0 and shown_already:
            shown = self._mergers[source.stream].add(rank, kept, time.monotonic())
            self._put(source.stream, f"{line[shown_already:]}\n")
            self._show(shown[1:])
            return
        whole = line if source.local_rank == 0 else kept
        self._show(self._mergers[source.stream].add(rank, whole, time.monotonic()))

    def _show_due(self, *, final: bool = False) -> None:
        now_s = time.monotonic()
        for merger in self._mergers.values():
            self._show(merger.due(now_s, final=final))
        for key in self._selector.get_map().values():
            source = key.data[0]
            is_prompt = source.local_rank == 0 and len(source.rest) > source.num_shown
            if is_prompt and self._first_rank == 0 and now_s - source.rest_at_s >= _PARTIAL_S:
                self._put(source.stream, source.rest[source.num_shown :])
                source.num_shown = len(source.rest)

    def _end_lines(self) -> None:
        for key in list(self._selector.get_map().values()):
            source = key.data[0]
            if source.rest:
                rest, source.rest = source.rest, ""
                self._line(source, rest)
        self._show_due(final=True)

    def _show(self, lines: list[Shown]) -> None:
        for line in lines:
            self._break_partial(line.stream)
            self._put(line.stream, f"{line.text}\n")

    def _break_partial(self, stream: str) -> None:
        """End the line that the first rank has begun, before another rank's comes."""
        for key in self._selector.get_map().values():
            source = key.data[0]
            if source.stream == stream and source.num_shown:
                self._put(stream, "\n")
                source.rest, source.num_shown = source.rest[source.num_shown :], 0

    def _put(self, stream: str, text: str) -> None:
        if stream in self._shown:
            target = getattr(sys, stream)
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                try:
                    target.write(text)
                except UnicodeEncodeError:
                    target.write(text.encode(target.encoding, "backslashreplace").decode(target.encoding))

    def _flush(self) -> None:
        for stream in self._shown:
            with contextlib.suppress(OSError, ValueError):
                getattr(sys, stream).flush()


def _terminal(stream: str) -> int | None:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        descriptor: int = getattr(sys, stream).fileno()
        return descriptor if os.isatty(descriptor) else None
    return None
