"""Data sets for files that are larger than memory, loaded on first use: ``import lockstep.data`` imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.tokens import TokenFiles as TokenFiles

__all__ = ["TokenFiles"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lockstep.data' has no attribute {name!r}")
    return getattr(import_module("lockstep.data.tokens"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
