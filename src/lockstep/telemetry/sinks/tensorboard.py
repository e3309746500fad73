"""Figures as an event file of TensorBoard, by torch's own writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from typing_extensions import override

from lockstep.telemetry.metrics import EventCounts, Snapshot, evaluations, scalars
from lockstep.telemetry.sinks.base import MetricsSink, RunInfo


@final
class TensorBoard(MetricsSink):
    """Adds an event file to a folder, which TensorBoard takes for one run.

    A run that goes on in the folder has TensorBoard hide what was written of the steps that it does again; one that
    begins there, all that was before.

    Args:
        folder: Made if it is not there.
        facts: Of the run.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, folder: Path, facts: RunInfo) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._last_step = -1
        self._tally = EventCounts()
        self._writer = SummaryWriter(str(folder), purge_step=facts.first_step)
        self._events = self._writer._get_file_writer()
        if facts.first_step == 0:
            self._tell(facts)
        self._writer.flush()  # so that a folder that cannot be written shows now

    @property
    @override
    def where(self) -> str:
        return f"metrics go to TensorBoard: tensorboard --logdir {self._folder}"

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._tally.add(snapshot.events)
        for found in evaluations(snapshot):
            self._add(found.metrics, found.step, found.time)
        for event in snapshot.events:
            self._writer.add_text(f"events/{event.event}", event.text, event.step, event.time)
        if snapshot.step > self._last_step:
            self._last_step = snapshot.step
            self._add(scalars(snapshot, self._tally), snapshot.step, snapshot.time)
        self._writer.flush()

    @override
    def close(self) -> None:
        self._writer.close()

    def _add(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Write all as one event, which costs a fifth of one for each."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._events.add_summary(summary, step, time)

    def _tell(self, facts: RunInfo) -> None:
        """Write what the run is, as text and for the HParams page.

        `SummaryWriter.add_hparams` would make a run of its own for it, in another folder.
        """
        rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in facts.config.items())
        self._writer.add_text("run", f"| {facts.name} | |\n|---|---|\n{rows}", 0)
        for summary in hparams(dict(facts.config), {"train/loss": 0.0, "train/samples_per_s": 0.0, "eval/loss": 0.0}):
            self._events.add_summary(summary)


def _cell(value: object) -> str:
    return str(value).replace("|", "&#124;").replace("\n", " ")
