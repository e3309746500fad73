"""``lockstep run --monitor [DIR]``: has the ranks recorded into a folder, and says so at the end."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import ConfigurationError
from lockstep.launcher.log_options import level_of
from lockstep.telemetry.record.names import RANK_FILES

MONITOR = "LOCKSTEP_MONITOR"
"""The variable that tells the ranks into which folder they are recorded; their bootstrap looks for it."""


@contextmanager
def recorded(args: argparse.Namespace) -> Iterator[None]:
    """Within, ranks that are started are recorded, if ``--monitor`` was given.

    Raises:
        ConfigurationError: The folder cannot be, or what is started is no Python program.
    """
    if args.monitor is None:
        yield
        return
    given = args.monitor or str(Path("runs") / (Path(args.training_script).stem or "script"))
    folder = Path(given).absolute()
    if args.no_python:
        raise ConfigurationError("--monitor records Python scripts, but --no-python starts anything.\nLeave one out.")
    _check_folder(folder, given)
    began_s = time.time()
    os.environ[MONITOR] = str(folder)
    try:
        yield
    finally:
        del os.environ[MONITOR]
        if level_of(args) != "error":
            print(f"lockstep: {_outcome(folder, given, began_s)}", file=sys.stderr, flush=True)


def _check_folder(folder: Path, given: str) -> None:
    if folder.is_file():
        raise ConfigurationError(
            f"--monitor {given}: that is a file.\n"
            "Give the folder for the record, and then the script: lockstep run --monitor runs/first train.py"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"Cannot record the run in {given}: {error.strerror}.\nName another folder (--monitor DIR)."
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(
            f"Cannot record the run in {given}: it is not writable.\nName another folder (--monitor DIR)."
        )


def _outcome(folder: Path, given: str, began_s: float) -> str:
    """Return what to say at the end."""
    files = [path for path in folder.glob(RANK_FILES) if path.stat().st_mtime >= began_s - 1.0]
    if files:
        return f"recorded in {given}; look at it with: lockstep report {given}"
    return f"nothing was recorded in {given}: no rank ran forward and backward of a torch model that could be seen"
