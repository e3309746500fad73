"""A run as the report looks at it: the record, its figures, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.study.report.advice import Advice, Facts, advise
from lockstep.study.report.figures import Figures, find_figures
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
    return View(label, run, figures, traffic, view.window, advise(_facts(view, figures, traffic)))


def _facts(view: View, figures: Figures, traffic: Traffic | None) -> Facts:
    settings = setting_values(view.run.last)
    workers = view.run.last.get("workers", settings.get("workers"))
    bytes_known = view.run.last.get("gradient_bytes")
    accumulate = settings.get("accumulate")
    return Facts(
        num_ranks=len(figures.by_rank),
        device=view.device,
        critical=figures.critical,
        computing_s=sum(parts.forward_s + parts.backward_s for parts in figures.by_rank.values()),
        straggler=figures.straggler,
        workers=workers if isinstance(workers, int) else None,
        num_buckets=0 if traffic is None else traffic.num_buckets,
        bucket_latency_s=0.0 if traffic is None else min(traffic.best_s.values()),
        trip_s=0.0 if traffic is None else traffic.median_s,
        best_trip_s=0.0 if traffic is None else median(traffic.best_s.values()),
        load_per_core=_load_per_core(view),
        gradient_bytes=bytes_known if isinstance(bytes_known, int) else (traffic.total_bytes if traffic else 0),
        wire=settings.get("wire") is not None,
        strategy=str(settings.get("strategy", "ddp")),
        accumulate=accumulate if isinstance(accumulate, int) else 1,
        paused_share={name: paused / figures.total_s for name, paused in figures.paused_s.items() if figures.total_s},
    )


def setting_values(session: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a session by name; nothing if it does not tell them."""
    settings = session.get("settings")
    return settings if isinstance(settings, dict) else {}


def _load_per_core(view: View) -> float | None:
    """Return how many threads wanted to run for each core, by what the first rank saw; None if it is not known."""
    provenance = view.run.last.get("provenance")
    machine = provenance.get("machine") if isinstance(provenance, dict) else None
    cores = str(machine.get("cores", "")) if isinstance(machine, dict) else ""
    lines = view.run.ranks[min(view.run.ranks)].machine
    loads = [line.figures["load"] for line in lines if "load" in line.figures]
    return sum(loads) / len(loads) / int(cores) if loads and cores.isdecimal() and int(cores) else None
