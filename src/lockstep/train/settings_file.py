"""Settings in a file: TOML lines such as ``workers = 2``, which `lockstep tune` writes and ``lockstep train`` reads."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigurationError
from lockstep.train.declared import FilePath, settings_of
from lockstep.train.settings import FitSettings

_RIVALS = {"steps": "epochs", "epochs": "steps"}
"""Settings of which only one can be given: the one that has the last word takes the other's place."""

_PLACE = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")


def read_settings(path: FilePath) -> dict[str, Any]:
    """Return the settings in a file by their names, each checked by itself.

    Raises:
        ConfigurationError: It cannot be read, or a line names no setting, or gives a value that is not allowed; names
            the file and the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}.\nName a file of settings, such as lockstep tune writes."
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"{path} is no text.\nName a file of settings, such as lockstep tune writes."
        ) from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(path, text, str(error)) from None
    known = {setting.name: setting for setting in settings_of(FitSettings)}
    for name, value in values.items():
        where = _Where(path, text, name)
        if name not in known:
            raise where.error(f"there is no setting {name!r}.", _hint(name, value, list(known)))
        try:
            known[name].check(value)
        except ConfigurationError as error:
            cause, _, advice = str(error).partition("\n")
            raise where.error(cause, advice) from None
    return values


def over(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` of a file with what was ``given`` otherwise over them, which has the last word."""
    rivals = {_RIVALS[name] for name in given if name in _RIVALS}
    return {name: value for name, value in values.items() if name not in rivals} | dict(given)


def as_toml(name: str, value: object) -> str:
    """Return the line of a setting."""
    return f"{name} = {_plain(value)}"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_plain(each) for each in value)}]"
    return json.dumps(str(value), ensure_ascii=False)


class _Where:
    """The line of a file that sets a name."""

    def __init__(self, path: FilePath, text: str, name: str) -> None:
        sets = re.compile(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[=.\]]""")
        lines = text.splitlines()
        self._path = path
        self._number = next((number for number, line in enumerate(lines, 1) if sets.match(line)), 1)
        self._line = lines[self._number - 1].strip()

    def error(self, cause: str, advice: str) -> ConfigurationError:
        return ConfigurationError(f"{self._path}, line {self._number}: {cause}\n    {self._line}\n{advice}")


def _not_toml(path: FilePath, text: str, reason: str) -> ConfigurationError:
    lines = text.splitlines() or [""]
    found = _PLACE.search(reason)
    number = int(found[1]) if found and found[1] else len(lines)
    line = lines[min(number, len(lines)) - 1].strip()
    return ConfigurationError(
        f"{path}, line {number}: {_PLACE.sub('', reason)}.\n    {line}\n"
        'Write a setting in each line, as in workers = 2 or strategy = "ddp".'
    )


def _hint(name: str, value: object, known: list[str]) -> str:
    if isinstance(value, dict):
        return "Write each setting in a line of its own, without a heading in brackets."
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"Did you mean {near[0]}?" if near else "lockstep train --help lists them all."
