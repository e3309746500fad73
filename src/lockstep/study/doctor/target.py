"""The script or task that the doctor is asked about."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import ConfigurationError
from lockstep.study.doctor.script.source import Script


def read_script(spec: str) -> Script:
    """Return the file of ``FILE.py`` or ``FILE.py:NAME``, parsed.

    Raises:
        ConfigurationError: There is no such file, or it is no Python; names the line.
    """
    path = path_of(spec)
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        nearby = Path(f"{path}.py")
        hint = f"Did you mean {nearby}?" if nearby.is_file() else "Name a Python file, or leave it out."
        raise ConfigurationError(f"{path} {kind}.\n{hint}")
    try:
        return Script(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ConfigurationError(f"{path}, line {error.lineno}: SyntaxError: {error.msg}\n    {line}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}\nName a Python file.") from None


def path_of(spec: str) -> Path:
    """Return the file in ``FILE.py`` or ``FILE.py:NAME``."""
    file, colon, _ = spec.rpartition(":")
    return Path(file if colon and file.endswith(".py") else spec)


def names_task(spec: str) -> bool:
    """Say whether the name of a task is given: ``FILE.py:NAME``."""
    return path_of(spec) != Path(spec)
