"""Run a command and note when it says what, while its output passes on line by line."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

_FAREWELL_S = 60.0
"""How long the launcher may take to end its ranks after Ctrl-C; it gives them half a minute."""


class Line(NamedTuple):
    """One line of what the command said, and when, in nanoseconds since the epoch."""

    time_ns: int
    text: str


def observe(command: Sequence[str], environ: Mapping[str, str], *, shows: bool) -> tuple[int, list[Line], float]:
    """Run ``command`` to its end; return its exit code, what it said, and how many seconds it took.

    Blocks as long as it runs. Ctrl-C reaches it as well, and its end is waited for.
    """
    lines: list[Line] = []
    began = time.monotonic()
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        threads = [
            threading.Thread(target=_follow, args=(stream, shown if shows else None, lines), daemon=True)
            for stream, shown in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        for thread in threads:
            thread.start()
        try:
            code = process.wait()
        except BaseException:
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(_FAREWELL_S)
            process.kill()  # its guardian ends the ranks
            raise
        for thread in threads:
            thread.join(_FAREWELL_S)
    return code, sorted(lines), time.monotonic() - began


def _follow(stream: IO[str], shown: IO[str] | None, lines: list[Line]) -> None:
    for text in stream:
        lines.append(Line(time.time_ns(), text.rstrip("\n")))
        if shown is not None:
            shown.write(text)
            shown.flush()
