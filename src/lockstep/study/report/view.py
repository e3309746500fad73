"""A run as the report looks at it: the record, its figures, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.study.report.advice import Advice, advise
from lockstep.study.report.figures import Figures, find_figures
from lockstep.study.report.find_facts import find_facts
from lockstep.study.report.read import Recorded, read_run
from lockstep.study.report.timeline import Window, find_window
from lockstep.study.report.traffic import Traffic, find_traffic


@dataclass(frozen=True)
class View:
    """A run, and what is known of it; ``label`` tells it from the other one, and is empty if there is no other."""

    label: str
    run: Recorded
    figures: Figures | None
    traffic: Traffic | None
    window: Window | None
    advice: list[Advice]

    def named(self, text: str) -> str:
        """Return ``text`` with the label before it."""
        return f"{self.label}: {text}" if self.label else text

    @property
    def task(self) -> str:
        """What was trained."""
        return str(self.run.last.get("task") or "a run")

    @property
    def counts(self) -> str:
        """What the loss counts, in a word; only where that is not samples."""
        return str(self.run.last.get("counts") or "tokens")

    @property
    def num_devices(self) -> int:
        """How many devices trained, as far as known."""
        devices = [record.device for record in self.run.ranks.values()]
        return sum(len(device.split(", ")) for device in devices)

    @property
    def device(self) -> str:
        """What kind they are."""
        first = next(iter(self.run.ranks.values()), None)
        return "cuda" if first is not None and first.device.startswith("cuda") else "cpu"


def look_at(folder: Path, label: str = "") -> View:
    """Read a run, and find what there is to say of it.

    Raises:
        ConfigurationError: Nothing was recorded in ``folder``.
    """
    run = read_run(folder)
    figures, traffic = find_figures(run), find_traffic(run)
    view = View(label, run, figures, traffic, find_window(run), [])
    if figures is None:
        return view
    return View(label, run, figures, traffic, view.window, advise(find_facts(run, view.device, figures, traffic)))


def setting_values(session: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a session by name; nothing if it does not tell them."""
    settings = session.get("settings")
    return settings if isinstance(settings, dict) else {}
