"""The files that a data set is told to read: lists, braces and wildcards, in an order that is the same everywhere."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator

from lockstep.errors import ConfigurationError, DataError

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A name, in which braces and wildcards are expanded, or several."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand(files: Files) -> list[str]:
    """Return the absolute paths that ``files`` stands for.

    ``train-{000..031}.tar`` counts, with as many digits as are given; ``{train,valid}.bin`` lists; ``*``, ``?`` and
    ``[...]`` match what is there, sorted by name. What exists under the very name is taken as it is.

    Raises:
        ConfigurationError: There are none, or one is named twice.
        DataError: Nothing matches a pattern.
    """
    names = [files] if isinstance(files, str | os.PathLike) else list(files)
    paths = [path for name in names for path in _expand_one(os.path.expanduser(os.fspath(name)))]
    if not paths:
        raise ConfigurationError("No files are named.\nGive the path of at least one.")
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise ConfigurationError(f"{path} is named twice, so its samples would count twice.\nName each file once.")
        seen.add(path)
    return paths


def _expand_one(name: str) -> Iterator[str]:
    if os.path.exists(name):
        yield os.path.abspath(name)
        return
    for path in _braces(name):
        if not glob.has_magic(path) or os.path.exists(path):
            yield os.path.abspath(path)
            continue
        matches = sorted(glob.glob(path))
        if not matches:
            raise DataError(f"No file matches {path}.\nCheck the pattern, and that this machine sees the folder.")
        yield from map(os.path.abspath, matches)


def _braces(name: str) -> Iterator[str]:
    parts = _BRACES.split(name)  # the contents of braces are at odd places
    choices = [[part] if place % 2 == 0 else _alternatives(part) for place, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _alternatives(content: str) -> list[str]:
    numbers = _RANGE.fullmatch(content)
    if numbers is None:
        return content.split(",") if "," in content else [f"{{{content}}}"]
    first, last = numbers.groups()
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
