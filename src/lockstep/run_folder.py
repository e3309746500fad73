"""The files by which the launcher and its ranks talk in the run's folder. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

RUN_DIR = "LOCKSTEP_RUN_DIR"
"""The environment variable that tells a rank where the files are."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What a run may be stopped with in order: SIGUSR1 is what schedulers are told to send ahead of time."""

FIRST_CTRL_C_MESSAGE = b"lockstep: stopping after this step; Ctrl-C again stops at once\n"

ANOTHER_MACHINE = "another machine"
"""What ranks are asked to stop for, if it is not a signal: they are started again with it."""

_REQUEST = "stop"


def current_run_folder() -> Path | None:
    """Return the folder of the run that this process is a rank of; None if no launcher of ours started it."""
    name = os.environ.get(RUN_DIR)
    folder = None if name is None else Path(name)
    return folder if folder is not None and folder.is_dir() else None


def announce_graceful_stop(folder: Path, rank: int) -> None:
    """Tell the launcher that this rank stops in order when asked."""
    (folder / f"stops-{rank}").touch()


def withdraw_graceful_stop(folder: Path, rank: int) -> None:
    """Tell the launcher that this rank no longer does."""
    with contextlib.suppress(OSError):
        (folder / f"stops-{rank}").unlink(missing_ok=True)


def num_graceful_ranks(folder: Path) -> int:
    """Return how many ranks of this machine would stop in order."""
    return len(list(folder.glob("stops-*")))


def request_stop(folder: Path, why: str) -> None:
    """Ask the ranks to stop; ``why`` is the name of a signal, or `ANOTHER_MACHINE`."""
    _replace_file(folder / _REQUEST, why)


def stop_reason(folder: Path) -> str | None:
    """Return why the launcher wants the ranks to stop, or None if it does not."""
    try:
        return (folder / _REQUEST).read_text()
    except OSError:
        return None


def is_stopped_by_signal(folder: Path) -> bool:
    """Return whether the launcher wants the ranks to stop for good."""
    return stop_reason(folder) not in (None, ANOTHER_MACHINE)


def report_stopped(folder: Path, rank: int, text: str) -> None:
    """Tell the launcher that this rank has stopped in order, and what it saved."""
    with contextlib.suppress(OSError):
        _replace_file(folder / f"stopped-{rank}", text)


def stop_reports(folder: Path) -> list[str]:
    """Return what the ranks have reported."""
    return [file.read_text() for file in sorted(folder.glob("stopped-*"))]


def _replace_file(path: Path, text: str) -> None:
    temporary = path.with_name(f"new-{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def forget_stop(folder: Path) -> None:
    """Forget what ranks that have ended were asked and told; what a signal asked for concerns the next ones, too."""
    for name in ("stops-*", "stopped-*", *([] if is_stopped_by_signal(folder) else [_REQUEST])):
        for path in folder.glob(name):
            path.unlink(missing_ok=True)
