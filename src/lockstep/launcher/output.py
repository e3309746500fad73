"""What ranks write: read through pipes, de-duplicated for the terminal, kept in a file for each rank."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import selectors
import sys
import termios
import threading
import time
import tty
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, NamedTuple

from lockstep.errors import ConfigurationError
from lockstep.launcher.live_view import LiveView, make_live_view, make_notebook_view

# What ranks write, kept in files of bounded size: one for each rank, and one of JSON lines for programs.

DEFAULT_MIB = 100


class RotatingFile:
    """A file that is given a new beginning when it is half its bound, with the half before beside it.

    A full disk is no reason to end a job: then lines are lost.

    Args:
        path: Is replaced if it is there; the half before is PATH.1.
        max_bytes: Of both together.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._num_bytes = 0
        self._file: IO[bytes] = path.open("wb", buffering=0)
        self.older.unlink(missing_ok=True)

    @property
    def older(self) -> Path:
        """Where the half before is."""
        return self._path.with_name(f"{self._path.name}.1")

    def write(self, line: bytes) -> None:
        """Append a line, which is never cut in two."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: it could not be opened again
            if self._num_bytes and self._num_bytes + len(line) > self._max_bytes // 2:
                self._num_bytes = 0
                self._file.close()
                os.replace(self._path, self.older)
                self._file = self._path.open("wb", buffering=0)
            self._file.write(line)
            self._num_bytes += len(line)

    def close(self) -> None:
        """Close it."""
        self._file.close()


class LogFiles:
    """Where lines go besides the terminal: all of them, whatever the terminal shows.

    Args:
        folder: For a file per rank; ``None`` for none.
        json_file: For one of all ranks; ``None`` for none.
        max_bytes: Of each.
    """

    def __init__(self, folder: Path | None, json_file: Path | None, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._by_rank: dict[int, RotatingFile] = {}
        self._json = None if json_file is None else RotatingFile(json_file, max_bytes)

    def line(self, rank: int, stream: str, text: str) -> None:
        """Keep a line of a rank."""
        if self._folder is not None:
            if rank not in self._by_rank:
                self._by_rank[rank] = RotatingFile(self._folder / f"rank-{rank}.log", self._max_bytes)
            self._by_rank[rank].write(f"{text}\n".encode())
        if self._json is not None:
            entry = {"time": round(time.time(), 6), "rank": rank, "stream": stream, "text": text}
            self._json.write(f"{json.dumps(entry, ensure_ascii=False)}\n".encode())

    def close(self) -> None:
        """Close all files."""
        for file in [*self._by_rank.values(), *([] if self._json is None else [self._json])]:
            file.close()


# What is to become of what ranks write: what the terminal shows of it, and the files in which it is kept.

LEVELS = {"info": ("stdout", "stderr"), "warning": ("stderr",), "error": ()}
"""Which of the ranks' streams the terminal shows."""


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What was asked for.

    Attributes:
        folder: For a file per rank.
        json_file: For one of all ranks.
        size_mib: Bound of each.
        level: What the terminal shows; a key of `LEVELS`.
        merges: Whether the terminal shows one stream; otherwise ranks write to it themselves.
    """

    folder: str | os.PathLike[str] | None = None
    json_file: str | os.PathLike[str] | None = None
    size_mib: float = DEFAULT_MIB
    level: str = "info"
    merges: bool = True

    @property
    def names(self) -> list[str]:
        """What of it needs somebody who reads what ranks write, as flags."""
        asked = {"--log-json": self.json_file is not None, f"--log-level {self.level}": self.level != "info"}
        asked["--log-dir"] = self.folder is not None
        return [name for name, is_asked in asked.items() if is_asked]

    def are_read(self, num_ranks: int) -> bool:
        """Return whether the launcher reads what its ranks write; else they write to the terminal themselves."""
        return bool(self.names) or (self.merges and num_ranks > 1)

    def refuse(self, what: str) -> None:
        """Refuse all that needs somebody who reads what ranks write, as ``what`` rules that out.

        Raises:
            ConfigurationError: Something does.
        """
        if self.names:
            raise ConfigurationError(f"{' and '.join(self.names)} cannot be had with {what}.\nLeave one of them out.")

    def open_files(self) -> LogFiles:
        """Return the files, which are there now.

        Raises:
            ConfigurationError: They cannot be written, or there is no such level.
        """
        if not self.size_mib > 0:
            raise ConfigurationError(f"--log-size {self.size_mib:g} is no size.\nPass MiB, such as 100.")
        if self.level not in LEVELS:
            raise ConfigurationError(f"There is no log level {self.level!r}.\nPass one of {', '.join(LEVELS)}.")
        folder = None if self.folder is None else Path(self.folder)
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            json_file = None if self.json_file is None else Path(self.json_file)
            return LogFiles(folder, json_file, int(self.size_mib * 2**20))
        except OSError as error:
            raise ConfigurationError(
                f"{error.filename} cannot be written: {error.strerror}.\n"
                "Name another place with --log-dir or --log-json."
            ) from None


# One stream of lines out of many: what the first rank says, and of the others only what differs from it.
#
# The first rank's lines pass at once and unchanged. Another rank's line is left out if the first rank has said the
# same, occurrence by occurrence; if it has not yet, it has a moment to. Then the line is shown with its rank, once
# for all ranks that said it. So a line without a prefix is the first rank's, or everybody's. A warning is shown once,
# whoever repeats it.
#
# Pure: lines go in with the time of their arrival, lines come out.

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


class LogDeduplicator:
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


# Show what ranks write where a child process's own output would not be seen, as in a notebook.

STREAMS = ("stdout", "stderr")

_INTERVAL_S = 0.05


def path_of(run_dir: str | os.PathLike[str], stream: str, rank: int | str) -> Path:
    """Return the file into which a rank's bootstrap leads one of its streams."""
    return Path(run_dir) / f"{stream}-{rank}"


def is_shared_with_children() -> bool:
    """Say whether what a child process writes ends up where our own prints do; in a notebook it does not."""
    try:
        return sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):
        return False


@contextmanager
def forwarded(run_dir: Path, num_ranks: int, logs: LogSettings) -> Iterator[None]:
    """Print the lines of all ranks with their number, as they come, while inside, and keep them in files."""
    done = threading.Event()
    with ExitStack() as stack:
        files = stack.enter_context(closing(logs.open_files()))
        view = make_notebook_view(run_dir)
        tails = []
        for rank in range(num_ranks):
            for stream in STREAMS:
                path = path_of(run_dir, stream, rank)
                path.touch()
                file = stack.enter_context(path.open("rb"))
                tails.append(_Tail(file, stream, rank, files, is_shown=stream in LEVELS[logs.level]))

        def follow() -> None:
            while not done.wait(_INTERVAL_S):
                for tail in tails:
                    tail.print_lines()
                if view is not None:
                    view.look()

        thread = threading.Thread(target=follow, name="lockstep-output", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            if view is not None:
                view.close()
            for tail in tails:
                tail.print_lines(final=True)


class _Tail:
    """One stream of one rank."""

    def __init__(self, file: BinaryIO, stream: str, rank: int, files: LogFiles, *, is_shown: bool) -> None:
        self._file, self._stream, self._rank = file, stream, rank
        self._files, self._is_shown = files, is_shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def print_lines(self, *, final: bool = False) -> None:
        """Print the lines that were completed since the last time; at the end also an incomplete one."""
        text = self._rest + self._decoder.decode(self._file.read(), final)
        # A progress bar returns to the start of its line: each state is a line to us.
        *lines, self._rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        if final and self._rest:
            lines.append(self._rest)
        for line in lines:
            self._files.line(self._rank, self._stream, line)
        if lines and self._is_shown:
            # Looked up each time: a notebook replaces it from cell to cell.
            print(
                "".join(f"[rank {self._rank}] {line}\n" for line in lines),
                end="",
                file=getattr(sys, self._stream),
                flush=True,
            )


# What ranks write reaches the launcher through pipes, and from there the terminal and files, in whole lines.

_PARTIAL_S = 0.2
"""What stands at the end of the first rank's output without a line end is shown after so long, such as a prompt."""


def pipe_path(run_dir: Path, stream: str, local_rank: int) -> Path:
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


class LogTail:
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
                path = pipe_path(run_dir, stream, local_rank)
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

    def __enter__(self) -> LogTail:
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

    def _make_mergers(self) -> dict[str, LogDeduplicator]:
        ranks = range(self._first_rank, self._first_rank + self._num_ranks)
        return {stream: LogDeduplicator(stream, ranks, self._warned) for stream in STREAMS}

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
