"""Draws docs/pictures/live.svg: the live view of a real run on four ranks, of which one is slow on purpose.

Usage: python -m tools.live_picture [FILE]
"""

import io
import os
import re
import sys
import time
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.text import Text

import lockstep
from lockstep.telemetry.live_view import picture
from lockstep.telemetry.metrics import EventFigures, Snapshot, SnapshotSink
from lockstep.train.task import load_task

REPO = Path(__file__).parents[1]
FILE = REPO / "docs" / "pictures" / "live.svg"
WIDTH, HEIGHT = 100, 30
SLOW_RANK, SLOW_S = 2, 0.03
AT_STEP = 150


class LastPicture(SnapshotSink):
    """Keeps the picture of one snapshot in the middle of the run."""

    def __init__(self) -> None:
        self.lines: list[Text] = []
        self._events: list[EventFigures] = []

    def update(self, snapshot: Snapshot) -> None:
        """Keep the first picture after some steps."""
        self._events += snapshot.events
        if not self.lines and snapshot.step >= AT_STEP and len(snapshot.ranks) == snapshot.world_size:
            self.lines = picture(snapshot, self._events, width=WIDTH, height=HEIGHT)

    def log(self, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def train() -> list[Text]:
    """Train on each rank; return the lines of the picture on rank zero."""
    from lockstep.env import RankEnv

    rank = RankEnv.from_environ(os.environ).rank
    task, display = load_task(str(REPO / "examples" / "digits.py")), LastPicture()
    compute = task.loss

    def loss(model, batch):  # type: ignore[no-untyped-def]
        time.sleep(SLOW_S if rank == SLOW_RANK else 0.001)
        return compute(model, batch)

    object.__setattr__(task, "loss", loss)
    with patch("lockstep.train.fit.Display", lambda view, silent: display):
        lockstep.fit(task, strategy="ddp", steps=400, clip=1.0, eval_every=10_000)
    return display.lines


def main() -> None:
    """Train, and write the picture."""
    lines = lockstep.launch(train, devices=4, timeout_s=300.0)[0]
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", highlight=False)
    page = console.export_svg(title="lockstep train --devices 4")
    page = re.sub(r"@font-face \{.*?\}\s*", "", page, flags=re.DOTALL)  # which come from the network
    Path(sys.argv[1] if len(sys.argv) > 1 else FILE).write_text(page.replace("Fira Code,", ""))


if __name__ == "__main__":
    main()
