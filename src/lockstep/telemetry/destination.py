"""Where a record goes: a folder, sinks and a view. Imports no torch, as settings are read before it."""
# ruff: noqa: RUF009 - `setting` is dataclasses.field with metadata

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.base.setting import setting, settings_of

ViewName = Literal["auto", "live", "lines", "none"]


def read_targets(log_to: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the sinks that ``log_to`` names.

    Raises:
        ConfigurationError: A sink is unknown, or is not of the form of its kind.
    """
    if log_to is None:
        return None
    from lockstep.telemetry.sinks import parse_targets  # imports torch

    return parse_targets(log_to)


@dataclass(frozen=True)
class Destination:
    """Where the record of a script's loop goes.

    Attributes:
        run_dir: The folder of the record.
        view: The view on the terminal.
        log_to: Comma-separated sinks for metrics.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    run_dir: str | Path = setting("runs", "", "DIR")
    view: ViewName = setting("none", "")
    log_to: str | Sequence[str] | None = setting(None, "")

    def __post_init__(self) -> None:
        for declared in settings_of(Destination):
            declared.check(getattr(self, declared.name))
        object.__setattr__(self, "log_to", read_targets(self.log_to))
