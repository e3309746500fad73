"""What launcher and ranks tell each other about stopping in order, as files in the run's folder.

A rank that can stop in order, saving what it has, announces it. The launcher asks for it by another file, which the
ranks look for once a step; then each reports what it did.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

RUN_DIR = "LOCKSTEP_RUN_DIR"
"""The environment variable that tells a rank where the files are."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What a run may be stopped with in order: SIGUSR1 is what schedulers are told to send ahead of time."""

FIRST_CTRL_C = b"lockstep: stopping after this step; Ctrl-C again stops at once\n"

ANOTHER_MACHINE = "another machine"
"""What ranks are asked to stop for, if it is not a signal: they are started again with it."""

_REQUEST = "stop"


def run_dir() -> Path | None:
    """Return the folder of the run that this process is a rank of; None if no launcher of ours started it."""
    name = os.environ.get(RUN_DIR)
    folder = None if name is None else Path(name)
    return folder if folder is not None and folder.is_dir() else None


def announce(folder: Path, rank: int) -> None:
    """Tell the launcher that this rank stops in order when asked."""
    (folder / f"stops-{rank}").touch()


def withdraw(folder: Path, rank: int) -> None:
    """Tell the launcher that this rank no longer does."""
    with contextlib.suppress(OSError):
        (folder / f"stops-{rank}").unlink(missing_ok=True)


def num_announced(folder: Path) -> int:
    """Return how many ranks of this machine would stop in order."""
    return len(list(folder.glob("stops-*")))


def ask(folder: Path, why: str) -> None:
    """Ask the ranks to stop; ``why`` is the name of a signal, or `ANOTHER_MACHINE`."""
    _write(folder / _REQUEST, why)


def asked(folder: Path) -> str | None:
    """Return why the launcher wants the ranks to stop, or None if it does not."""
    try:
        return (folder / _REQUEST).read_text()
    except OSError:
        return None


def asked_by_signal(folder: Path) -> bool:
    """Return whether the launcher wants the ranks to stop for good."""
    return asked(folder) not in (None, ANOTHER_MACHINE)


def report(folder: Path, rank: int, text: str) -> None:
    """Tell the launcher that this rank has stopped in order, and what it saved."""
    with contextlib.suppress(OSError):
        _write(folder / f"stopped-{rank}", text)


def reports(folder: Path) -> list[str]:
    """Return what the ranks have reported."""
    return [file.read_text() for file in sorted(folder.glob("stopped-*"))]


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"new-{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def forget(folder: Path) -> None:
    """Forget what ranks that have ended were asked and told; what a signal asked for concerns the next ones, too."""
    for name in ("stops-*", "stopped-*", *([] if asked_by_signal(folder) else [_REQUEST])):
        for path in folder.glob(name):
            path.unlink(missing_ok=True)
