"""Data sets for files that are larger than memory."""

from lockstep.data.tokens import TokenFiles as TokenFiles

__all__ = ["TokenFiles"]
