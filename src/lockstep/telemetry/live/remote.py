"""Rank zero's snapshots for the launcher, which has the terminal or the notebook and shows them there.

A file in the run's folder that is replaced again and again; the launcher says by another file that it looks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lockstep.telemetry.aggregator import decode, encode
from lockstep.telemetry.metrics import BucketFigures, EventFigures, Snapshot

_OFFER, _FILE = "shows-view", "view"


def offer(folder: Path) -> None:
    """Say that this launcher shows snapshots."""
    (folder / _OFFER).touch()


def is_offered(folder: Path | None) -> bool:
    """Return whether the launcher of the run whose folder this is shows snapshots."""
    return folder is not None and (folder / _OFFER).exists()


def send(folder: Path, snapshot: Snapshot, events: Iterable[EventFigures]) -> None:
    """Replace what the launcher shows.

    Args:
        folder: Of the run.
        snapshot: What is to be shown.
        events: The last ones of the run; those of the snapshot among them.
    """
    bare = asdict(replace(snapshot, ranks=(), events=()))
    ranks = [[each.age_s, *encode(each)] for each in snapshot.ranks]
    temporary = folder / f"{_FILE}.new"
    with suppress(OSError):
        temporary.write_text(json.dumps({**bare, "ranks": ranks, "events": [asdict(event) for event in events]}))
        temporary.replace(folder / _FILE)


def withdraw(folder: Path) -> None:
    """Have the launcher show nothing any more."""
    with suppress(OSError):
        (folder / _FILE).unlink(missing_ok=True)


class Inbox:
    """In the launcher: looks for what rank zero has sent.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._seen: tuple[int, int] | None = None

    def look(self) -> tuple[bool, Snapshot | None]:
        """Return whether something has changed, and what is to be shown now, if anything."""
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_ino
            if seen == self._seen:
                return False, None
            snapshot = _decode(json.loads(self._path.read_text()))
        except FileNotFoundError:
            was_there, self._seen = self._seen is not None, None
            return was_there, None
        except (OSError, ValueError, TypeError):
            return False, None
        self._seen = seen
        return True, snapshot


def _decode(data: dict[str, Any]) -> Snapshot:
    ranks = tuple(replace(decode(values), age_s=age_s) for age_s, *values in data.pop("ranks"))
    buckets = tuple(BucketFigures(**each) for each in data.pop("buckets"))
    events = tuple(EventFigures(**each) for each in data.pop("events"))
    return Snapshot(**data, ranks=ranks, buckets=buckets, events=events)
