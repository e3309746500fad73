"""The live view of a run whose ranks are processes of the launcher: rank zero sends figures, the launcher draws them.

It has the terminal, knows its size, and knows what other ranks print; and drawing takes no time from the training.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lockstep.telemetry.live import remote
from lockstep.telemetry.live.notebook import NotebookRegion, is_notebook
from lockstep.telemetry.live.region import Region
from lockstep.telemetry.live_view import picture


class LiveView:
    """Shows what rank zero sends, in a region of the terminal or of a notebook's cell.

    Args:
        folder: Of the run.
        region: Where it is shown.
    """

    def __init__(self, folder: Path, region: Region | NotebookRegion) -> None:
        self._inbox, self._region = remote.Inbox(folder), region
        self._is_off = False
        remote.offer(folder)

    def look(self) -> None:
        """Show what is new; to be called several times a second. Does not raise."""
        if self._is_off:
            return
        try:
            has_changed, snapshot = self._inbox.look()
            if has_changed:
                width, height = self._region.size
                lines = [] if snapshot is None else picture(snapshot, snapshot.events, width=width, height=height)
                self._region.show(lines)
            else:
                self._region.refresh()
        except Exception as error:  # the output of the ranks is worth more than a view of them
            self._is_off = True
            self._region.close()
            print(f"lockstep: there is no live view any more: {type(error).__name__}: {error}", file=sys.stderr)

    def close(self) -> None:
        """Leave terminal or notebook as if there had been no view."""
        self._region.close()


def make_live_view(folder: Path) -> LiveView | None:
    """Return a view if standard output is a terminal that can show one."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return None
    return LiveView(folder, Region(sys.stdout))


def make_notebook_view(folder: Path) -> LiveView | None:
    """Return a view if this process is the kernel of a notebook."""
    return LiveView(folder, NotebookRegion()) if is_notebook() else None
