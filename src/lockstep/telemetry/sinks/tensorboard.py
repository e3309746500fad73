"""Figures as an event file of TensorBoard, by torch's own writer."""

from pathlib import Path
from typing import final

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from typing_extensions import override

from lockstep.telemetry.metrics import Snapshot
from lockstep.telemetry.sinks.base import MetricsSink, RunInfo, SinkState


@final
class TensorBoard(MetricsSink):
    """Adds an event file to a folder, which TensorBoard takes for one run.

    A run that goes on in the folder has TensorBoard hide what was written of the steps that it does again; one that
    begins there, all that was before.

    Args:
        folder: Made if it is not there.
        run: What is recorded.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, folder: Path, run: RunInfo) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        # Nothing is remembered for the next session: TensorBoard hides by itself what is written twice.
        self._state = SinkState("tensorboard", RunInfo(name=run.name, config={}))
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step)
        self._events = self._writer._get_file_writer()
        if run.first_step == 0:
            self._describe(run)
        self._writer.flush()  # so that a folder that cannot be written shows now

    @property
    @override
    def where(self) -> str:
        return f"metrics go to TensorBoard: tensorboard --logdir {self._folder}"

    @override
    def update(self, snapshot: Snapshot) -> None:
        for event in snapshot.events:
            self._writer.add_text(f"events/{event.event}", event.text, event.step, event.time)
        for step, time, values in self._state.news(snapshot):
            # All as one event, which costs a fifth of one for each.
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
            self._events.add_summary(summary, step, time)
        self._writer.flush()

    @override
    def close(self) -> None:
        self._writer.close()

    def _describe(self, run: RunInfo) -> None:
        """Write what the run is, as text and for the HParams page."""
        cells = {name: str(value).replace("|", "&#124;").replace("\n", " ") for name, value in run.config.items()}
        rows = "\n".join(f"| {name} | {value} |" for name, value in cells.items())
        self._writer.add_text("run", f"| {run.name} | |\n|---|---|\n{rows}", 0)
        # `SummaryWriter.add_hparams` would make a run of its own for it, in another folder.
        for summary in hparams(dict(run.config), {"train/loss": 0.0, "train/samples_per_s": 0.0, "eval/loss": 0.0}):
            self._events.add_summary(summary)
