"""What is to become of what ranks write: what the terminal shows of it, and the files in which it is kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigurationError
from lockstep.launcher.log_files import DEFAULT_MIB, LogFiles

LEVELS = {"info": ("stdout", "stderr"), "warning": ("stderr",), "error": ()}
"""Which of the ranks' streams the terminal shows."""


@dataclass(frozen=True, kw_only=True)
class Logs:
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
