"""Modules that the program has imported already: what a rank is watched with imports none by itself."""

from __future__ import annotations

import sys
from typing import Any


def imported(name: str) -> Any:
    """Return a module that is there and whole, else None."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if spec is None or getattr(spec, "_initializing", False) else module
