"""Data sets for files that are larger than memory. They are loaded on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.tables import open_tables as open_tables
    from lockstep.data.tar import TarShards as TarShards
    from lockstep.data.tokens import TokenFiles as TokenFiles

__all__ = ["TarShards", "TokenFiles", "open_tables"]

_HOMES = {
    "TarShards": "lockstep.data.tar",
    "TokenFiles": "lockstep.data.tokens",
    "open_tables": "lockstep.data.tables",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep.data' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
