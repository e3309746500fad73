"""Numbers in words."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def size(num_bytes: float) -> str:
    """Write bytes in the unit that fits, such as ``1.5 GiB``."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            amount = num_bytes / unit
            return f"{amount:.0f} {name}" if amount >= 99.5 or amount == int(amount) else f"{amount:.1f} {name}"
    return f"{num_bytes:.0f} bytes"


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Write a count with its noun, such as ``2 ranks``."""
    return f"{count} {noun}{ending if count != 1 else ''}"


def listed(names: list[str], most: int = 4) -> str:
    """Write names with commas, the first few of many."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
