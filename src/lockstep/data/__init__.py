"""Data sets for files that are larger than memory. They are loaded on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.tar import TarShards as TarShards
    from lockstep.data.tokens import TokenFiles as TokenFiles

__all__ = ["TarShards", "TokenFiles"]

_HOMES = {"TarShards": "lockstep.data.tar", "TokenFiles": "lockstep.data.tokens"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep.data' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
