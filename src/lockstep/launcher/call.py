"""A function on its way to the ranks and its results on their way back, as files in the run's folder."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from lockstep.errors import ConfigurationError, LockstepError


def send(run_dir: Path, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Write the call into ``run_dir``, for every rank to read.

    Raises:
        ConfigurationError: The function or an argument cannot be pickled.
    """
    # The ranks import from where this process does, such as the folder of a notebook.
    (run_dir / "sys_path.json").write_text(json.dumps(sys.path))
    (run_dir / "sources.json").write_text(json.dumps(_sources_without_file()))
    try:
        with _unimportable_by_value(fn), open(run_dir / "call", "wb") as file:
            cloudpickle.dump((fn, args), file)
    except Exception as error:
        raise ConfigurationError(
            f"The function or one of its arguments cannot be sent to the ranks: {error}\n"
            "Make what cannot be pickled, such as locks, open files and CUDA tensors, inside the function."
        ) from error


def run_from(run_dir: str) -> None:
    """Make the call in this rank, and leave the result, or the exception, in ``run_dir``."""
    folder, rank = Path(run_dir), int(os.environ["RANK"])
    if rank == 0:  # after a restart there may be fewer
        (folder / "world_size").write_text(os.environ["WORLD_SIZE"])
    for name, lines in json.loads((folder / "sources.json").read_text()).items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    with open(folder / "call", "rb") as file:
        fn, args = cloudpickle.load(file)
    try:
        result = fn(*args)
    except Exception as error:
        # A courtesy: the traceback travels as text in any case.
        with contextlib.suppress(Exception):
            _write(folder / f"error-{rank}", error)
        raise
    try:
        _write(folder / f"result-{rank}", result)
    except Exception as error:
        raise LockstepError(
            f"What {getattr(fn, '__name__', 'the function')} returned on rank {rank} cannot be sent back: {error}\n"
            "Return numbers, CPU tensors or other data that can be pickled."
        ) from error


def results(run_dir: Path) -> list[Any]:
    """Read what the ranks returned, by rank."""
    num_ranks = int((run_dir / "world_size").read_text())
    return [_read(run_dir / f"result-{rank}") for rank in range(num_ranks)]


def error_of(run_dir: Path, rank: int | None) -> BaseException | None:
    """Return the exception that a rank raised, if it could be sent."""
    with contextlib.suppress(Exception):
        error = _read(run_dir / f"error-{rank}")
        return error if isinstance(error, BaseException) else None
    return None


def _write(path: Path, value: object) -> None:
    with open(path, "wb") as file:
        cloudpickle.dump(value, file)


def _read(path: Path) -> Any:
    with open(path, "rb") as file:
        return cloudpickle.load(file)


def _sources_without_file() -> dict[str, list[str]]:
    """Return the source of what was typed into a notebook or a console, for the tracebacks of the ranks."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}
    return {name: list(entry[2]) for name, entry in entries.items()}


@contextlib.contextmanager
def _unimportable_by_value(fn: Callable[..., Any]) -> Iterator[None]:
    """Send the function's whole module along when a rank could not import it by its name."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    name = module.__name__ if module is not None else "__main__"
    if module is None or name == "__main__" or _importable(name):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable(name: str) -> bool:
    top, _, rest = name.partition(".")
    if top in sys.builtin_module_names:
        return True
    found = PathFinder.find_spec(top, sys.path)
    if found is None or not rest or found.submodule_search_locations is None:
        return found is not None and not rest
    path: list[str] = list(found.submodule_search_locations)
    full = top
    for part in rest.split("."):
        full = f"{full}.{part}"
        found = PathFinder.find_spec(full, path)
        if found is None:
            return False
        path = list(found.submodule_search_locations or [])
    return True
