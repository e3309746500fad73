"""Show what ranks write where a child process's own output would not be seen, as in a notebook."""

from __future__ import annotations

import codecs
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import BinaryIO

from lockstep.launcher.live_view import make_notebook_view
from lockstep.launcher.log_files import LogFiles
from lockstep.launcher.logs import LEVELS, Logs

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
def forwarded(run_dir: Path, num_ranks: int, logs: Logs) -> Iterator[None]:
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
