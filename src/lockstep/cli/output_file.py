"""A file that a command is to write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console


def check_writable(file: str | None) -> None:
    """Refuse a file that cannot be written, before minutes are spent on its contents."""
    if file is None:
        return
    path = Path(file)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigurationError(
            f"{file} cannot be written: there is no folder {folder}.\nMake it, or name another file."
        )
    try:
        is_new = not path.exists()
        path.open("ab").close()  # rights alone do not tell: the file system may be read-only
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written: {error.strerror}.\nName another file.") from error
    if is_new:
        path.unlink()


def say_written(terminal: Console, what: str, file: str) -> None:
    """Say where something was written: in one line however long it is, so that the name can be copied."""
    terminal.out(f"{what} written to {file}", highlight=False)
