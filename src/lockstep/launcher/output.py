"""The ranks' output: read through pipes, merged into one stream for the terminal, saved in a file for each rank."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import selectors
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.base.activity import format_ranks
from lockstep.base.rank_files import rank_file
from lockstep.base.record_files import open_locked
from lockstep.base.terminal import TERMINAL, TerminalRegion, erase_rows
from lockstep.errors import ConfigurationError

STREAMS = ("stdout", "stderr")

# Which of the ranks' streams the terminal shows.
LEVELS = {"info": ("stdout", "stderr"), "warning": ("stderr",), "error": ()}


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Settings for the ranks' output.

    Attributes:
        folder: For a file of each rank.
        level: What the terminal shows; a key of `LEVELS`.
        merges: Whether the terminal shows one stream; otherwise ranks write to it themselves.
        excluded_by: The user's flag, if any, that makes ranks write to the terminal themselves.
        num_nodes: The largest number of machines, each of which has its own ranks.
    """

    folder: str | os.PathLike[str] | None = None
    level: str = "info"
    merges: bool = True
    excluded_by: str = ""
    num_nodes: int = 1

    def __post_init__(self) -> None:
        error = ""
        if self.level not in LEVELS:
            error = f"There is no log level {self.level!r}.\nPass one of {', '.join(LEVELS)}."
        elif "://" in str(self.folder):  # files are appended line by line, which object stores do not support
            error = f"--log-dir {self.folder} is not a local folder.\nName one; logs cannot be in an object store."
        elif self.excluded_by and self.flags:
            error = f"{self.flags} cannot be combined with {self.excluded_by}.\nLeave one of them out."
        if error:
            raise ConfigurationError(error)

    @property
    def flags(self) -> str:
        """The flags that require the launcher to read the ranks' output."""
        level = f"--log-level {self.level}" if self.level != "info" else ""
        return " and ".join(filter(None, (level, "--log-dir" if self.folder is not None else "")))

    def need_launcher(self, num_ranks: int) -> bool:
        """Return whether the launcher reads its ranks' output; else they write to the terminal themselves."""
        return bool(self.flags) or (self.merges and not self.excluded_by and num_ranks > 1)


# De-duplication: many streams of lines become one.

# How long a line waits for the first rank to write the same line.
HOLD_S = 0.5

# Distinct lines of the first rank that another one may still repeat.
_REMEMBERED = 65536

_TORCH_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
_GLOG_PREFIX = re.compile(r"^\[([IWEF])\d{4} [\d:.]+ ")


class LogDeduplicator:
    """One stream, such as standard output, of the ranks of a machine: the first rank's lines, and lines that differ.

    The first rank's lines pass at once and unchanged. A line of another rank is dropped if the first rank has written
    the same line; each occurrence counts once. Otherwise it waits for the first rank, at most `HOLD_S`, and is then
    shown with its rank, once for all ranks that wrote it. So a line without a prefix was written by the first rank, or
    by all ranks.

    No side effects: lines go in with the time of their arrival, lines come out.

    Args:
        ranks: The ranks of this machine.
    """

    def __init__(self, ranks: range) -> None:
        self._first = ranks.start
        # On machines other than the first, lines without a prefix could be mistaken for those of rank zero.
        self._prefix = "" if ranks.start == 0 else f"[rank {ranks.start}] "
        # Lines that wait for the first rank: their key, text, and time of arrival.
        self._held: dict[int, deque[tuple[str, str, float]]] = {rank: deque() for rank in ranks[1:]}
        # Lines that the first rank has written and another one has not yet, oldest first.
        self._ahead: dict[int, Counter[str]] = {rank: Counter() for rank in ranks[1:]}

    def add(self, rank: int, text: str, now_s: float) -> list[str]:
        """Take in a line that ``rank`` has written; return the lines to show now, of this or other ranks."""
        # What is compared: the line without torch's rank prefix, and without times in its log.
        key = _GLOG_PREFIX.sub(r"[\1 ", _TORCH_PREFIX.sub("", _last_state(text)))
        shown = []
        if rank == self._first:
            shown.append(f"{self._prefix}{text}")
            for unmatched in self._ahead.values():  # each other rank may still write it, once
                unmatched[key] += 1
                if len(unmatched) > _REMEMBERED:
                    del unmatched[next(iter(unmatched))]  # the oldest
        else:
            self._held[rank].append((key, text, now_s))
        # The first rank's line may be what held lines have waited for, and others may have waited long enough.
        return shown + self.due(now_s)

    def due(self, now_s: float, *, final: bool = False) -> list[str]:
        """Return the lines that have waited long enough for the first rank; all of them at the end."""
        shown = []
        for rank, lines_held in self._held.items():
            ahead = self._ahead[rank]
            while lines_held:
                key, text, at_s = lines_held[0]
                if key in ahead:
                    ahead.subtract([key])
                    if not ahead[key]:
                        del ahead[key]
                    lines_held.popleft()
                elif final or now_s - at_s >= HOLD_S:
                    ranks = [other for other, lines in self._held.items() if lines and lines[0][0] == key]
                    for other in ranks:
                        self._held[other].popleft()
                    shown.append(f"[{format_ranks(ranks)}] {text}")
                else:
                    break
        return shown


def _last_state(text: str) -> str:
    """Return the last state of a line: each state of a progress bar begins with a carriage return."""
    return text.rstrip("\r").rpartition("\r")[2]


# The pipes.

# How long other lines wait while the first rank has an unfinished line: Python writes a line and its end separately.
_UNFINISHED_S = 0.2


@dataclass
class _Pipe:
    stream: str
    local_rank: int
    decoder: codecs.IncrementalDecoder
    # Text received without a line end so far.
    rest: str = ""


class LogTail:
    """Reads the output of this machine's ranks in a thread, inside a ``with`` block.

    Rank zero's output goes to the terminal as it arrives, so prompts and progress bars look as in a single process. The
    output of the others is processed line by line.

    Args:
        run_dir: The folder for the pipes.
        num_ranks: Of this machine.
        settings: What to do with the lines.

    Raises:
        ConfigurationError: The files cannot be created, or another run writes them.
    """

    def __init__(self, run_dir: Path, num_ranks: int, settings: LogSettings) -> None:
        self._shown, self._folder = LEVELS[settings.level], settings.folder
        self._files: dict[int, int] = {}
        self._closing = contextlib.ExitStack()
        # With several machines, the numbers of the ranks are known later.
        if settings.num_nodes == 1:
            try:
                self._open_files(range(num_ranks))
            except OSError as error:
                self._closing.close()
                text = f"{error.filename} cannot be written: {error.strerror}.\nName another place with --log-dir."
                raise ConfigurationError(text) from None
        self._over, self._lock = threading.Event(), threading.Lock()
        self._selector = self._closing.enter_context(selectors.DefaultSelector())
        for local_rank in range(num_ranks):
            for stream in STREAMS:
                path = rank_file(run_dir, stream, local_rank)
                os.mkfifo(path, 0o600)
                # Opened for reading and writing, so that it has no end while no rank has it open.
                descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                self._closing.callback(os.close, descriptor)
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                self._selector.register(descriptor, selectors.EVENT_READ, _Pipe(stream, local_rank, decoder))
        self._set_ranks(range(num_ranks))
        # Streams and texts for the terminal, in order.
        self._unwritten: deque[tuple[str, str]] = deque()
        # Whether rank zero has an unfinished line, and when its last part arrived.
        self._is_mid_line, self._last_part_s = False, 0.0
        self._region: TerminalRegion | None = None
        if "stdout" in self._shown and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
            self._region = TerminalRegion(run_dir)
            self._closing.callback(self._region.close)
            os.environ[TERMINAL] = os.ttyname(sys.stdout.fileno())  # for the ranks
        self._thread = threading.Thread(target=self._follow, name="lockstep-log-tail", daemon=True)

    def started(self, ranks: range) -> None:
        """Set the ranks' numbers, which may change after a restart."""
        with self._lock:
            if ranks != self._ranks:  # otherwise lines that have already arrived are kept
                self._set_ranks(ranks)
            with contextlib.suppress(OSError):
                self._open_files(ranks)

    def _set_ranks(self, ranks: range) -> None:
        self._ranks = ranks
        self._deduplicators = {stream: LogDeduplicator(ranks) for stream in STREAMS}

    def _open_files(self, ranks: range) -> None:
        """Open a file for each rank, also for ranks that write nothing; what an earlier run wrote stays."""
        for rank in ranks:
            if self._folder is not None and rank not in self._files:
                self._files[rank] = open_locked(Path(self._folder) / f"rank-{rank}.log")
                self._closing.callback(os.close, self._files[rank])
                if os.fstat(self._files[rank]).st_size:
                    self._keep(rank, time.strftime("--- another run, %Y-%m-%d %H:%M:%S ---"))

    def print(self, text: str) -> None:
        """Queue whole lines of the launcher for standard error. Takes no lock, so signal handlers can call it."""
        self._unwritten.append(("stderr", text))

    def settle(self, traces: Mapping[int, str] | None = None) -> None:
        """Show all output so far, after the ranks have ended; add their tracebacks, by rank, to their files."""
        with self._lock:
            self._read()
            for key in self._selector.get_map().values():
                if key.data.rest:
                    self._take(key.data, "\n")
            self._take_due(final=True)
            self._write()
        self.keep(traces or {})

    def keep(self, traces: Mapping[int, str]) -> None:
        """Add tracebacks of ranks, by rank, to their files."""
        with self._lock:
            for rank, trace in traces.items():
                for line in trace.splitlines():
                    self._keep(rank, line)

    def __enter__(self) -> LogTail:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.settle()
        self._closing.close()

    def _follow(self) -> None:
        while not self._over.is_set():
            self._selector.select(HOLD_S / 16)  # returns earlier if there is output; the job's end waits for it
            with self._lock:
                self._read()
                if not self._is_mid_line or time.monotonic() - self._last_part_s > _UNFINISHED_S:
                    self._take_due()
                self._write()

    def _read(self) -> None:
        """Read all available output."""
        # Until nothing is left: a rank that writes much would block on a full pipe.
        while events := self._selector.select(0):
            for key, _ in events:
                self._take(key.data, key.data.decoder.decode(os.read(key.fd, 65536)))

    def _take(self, pipe: _Pipe, text: str) -> None:
        rank = self._ranks.start + pipe.local_rank
        if rank == 0 and pipe.stream in self._shown:
            self._is_mid_line, self._last_part_s = not text.endswith("\n"), time.monotonic()
            self._unwritten.append((pipe.stream, text))
        *lines, pipe.rest = (pipe.rest + text).replace("\r\n", "\n").split("\n")
        # A progress bar writes many states without a line end: only the last one needs to be kept.
        pipe.rest = pipe.rest[max(0, pipe.rest.rstrip("\r").rfind("\r")) :]
        for line in map(_last_state, lines):
            self._keep(rank, line)
            if pipe.local_rank < len(self._ranks):  # otherwise of a rank that is not started again
                due = self._deduplicators[pipe.stream].add(rank, line, time.monotonic())
                self._show(pipe.stream, due[rank == 0 :])  # its own line comes first, and is shown already

    def _take_due(self, *, final: bool = False) -> None:
        for stream, deduplicator in self._deduplicators.items():
            self._show(stream, deduplicator.due(time.monotonic(), final=final))

    def _show(self, stream: str, lines: Iterable[str]) -> None:
        for line in lines if stream in self._shown else ():
            self._unwritten.append((stream, "\n" * self._is_mid_line + f"{line}\n"))
            self._is_mid_line = False

    def _keep(self, rank: int, line: str) -> None:
        """Write a line into the rank's file. If the disk is full, lines are lost, but the job continues."""
        if rank in self._files:
            with contextlib.suppress(OSError):
                os.write(self._files[rank], f"{line}\n".encode(errors="backslashreplace"))

    def _write(self) -> None:
        """Write queued text to the terminal, above rank zero's live view."""
        if not self._unwritten:
            return
        with contextlib.ExitStack() as stack:
            if self._region is not None:
                _put("stdout", erase_rows(stack.enter_context(self._region.locked())))
            while self._unwritten:
                _put(*self._unwritten.popleft())
            for stream in STREAMS:
                with contextlib.suppress(OSError, ValueError):
                    getattr(sys, stream).flush()
            if self._region is not None:
                self._region.set_rows(-1 if self._is_mid_line else 0)


def _put(stream: str, text: str) -> None:
    target = getattr(sys, stream)  # looked up each time: a notebook replaces it in every cell
    with contextlib.suppress(OSError, ValueError):  # its reader is gone
        encoding = target.encoding or "utf-8"
        target.write(text.encode(encoding, "backslashreplace").decode(encoding))
