"""Find the task in a file."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from lockstep.errors import ConfigurationError
from lockstep.train.task import Task

_DEFAULT = "task"

T = TypeVar("T")


def load_task(spec: str) -> Task:
    """Return the task that ``spec`` names: ``FILE.py`` for its attribute ``task``, or ``FILE.py:NAME``.

    The attribute is a `Task`, or a function without arguments that returns one. The file runs as a module, with its
    folder on ``sys.path``.

    Raises:
        ConfigurationError: There is no such file or attribute, it is no task, or the file fails; names the line.
    """
    path, name = _split(spec)
    module = _guarded(path, lambda: _import(path))
    found: object = getattr(module, name, None)
    if found is None:
        others = [key for key, value in vars(module).items() if isinstance(value, Task)]
        hint = f"Name what it has: {path}:{others[0]}" if others else f"Define one: {name} = lockstep.Task(...)"
        raise ConfigurationError(f"{path} has no {name!r}.\n{hint}")
    if not isinstance(found, Task) and callable(found):
        found = _guarded(path, found)
    if not isinstance(found, Task):
        raise ConfigurationError(
            f"{path}: {name} is a {type(found).__name__}, no lockstep.Task.\n"
            "It must be a Task, or a function without arguments that returns one."
        )
    return found


def _split(spec: str) -> tuple[Path, str]:
    file, colon, name = spec.rpartition(":")
    path = Path(file if colon and file.endswith(".py") else spec)
    if path.is_file():
        return path, name if colon and file.endswith(".py") else _DEFAULT
    kind = "is a folder" if path.is_dir() else "does not exist"
    nearby = Path(f"{path}.py")
    hint = f"Did you mean {nearby}?" if nearby.is_file() else "Name a Python file that has a lockstep.Task."
    raise ConfigurationError(f"{path} {kind}.\n{hint}")


def _import(path: Path) -> ModuleType:
    # As a script's, the folder comes first, so that the file finds its neighbours. Its own name is taken only if it
    # hides no other module: loader processes may have to import it by name.
    sys.path.insert(0, str(path.parent.resolve()))
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_task"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _guarded(path: Path, action: Callable[[], T]) -> T:
    """Run what the file does, and turn an error in it into one that shows the file's own line first."""
    try:
        return action()
    except Exception as error:
        raise ConfigurationError(_describe(error, path)) from error


def _describe(error: Exception, path: Path) -> str:
    cause, *rest = (str(error) or "no message").splitlines()
    kind = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
    if isinstance(error, SyntaxError) and error.filename:
        line = (error.text or "").strip()
        return f"{error.filename}, line {error.lineno}: {kind}{error.msg}\n    {line}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == path.resolve()]
    frame = own[-1] if own else frames[-1]
    shown = path if own else frame.filename
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return "\n".join([f"{shown}, line {frame.lineno}: {kind}{cause}", f"    {line}", *rest])
