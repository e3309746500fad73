"""Figures as a run of Weights & Biases, by its own client; its environment variables say where and as whom."""

import uuid
from typing import Any, final

import wandb
from typing_extensions import override

from lockstep.telemetry.metrics import Snapshot
from lockstep.telemetry.sinks.base import MetricsSink, RunInfo, SinkState


@final
class WandbRun(MetricsSink):
    """Begins a run, or goes on with the one that the earlier sessions had.

    Args:
        project: Its name, or ENTITY/NAME.
        run: What is recorded.
        state: The id of its run.
    """

    def __init__(self, project: str, run: RunInfo, state: SinkState) -> None:
        entity, _, name = project.rpartition("/")
        run_id = state.run_id or uuid.uuid4().hex[:8]
        self._run: Any = wandb.init(
            entity=entity or None,
            project=name,
            id=run_id,
            resume="allow",
            config=dict(run.config),
            allow_val_change=True,  # a run may go on with other settings, or on other machines
            reinit="create_new",  # a script may have a run of its own
            # What ranks print is merged and kept by the launcher.
            settings=wandb.Settings(console="off", silent=True),
        )
        self._state = state
        self._state.begin(run_id)
        self._last: Snapshot | None = None

    @property
    @override
    def where(self) -> str:
        place = f"run {self._state.run_id}, offline in {self._run.dir}" if self._run.offline else self._run.url
        return f"metrics go to Weights & Biases: {place}"

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._last = snapshot
        for step, _, values in self._state.news(snapshot):
            self._run.log(values, step=max(step, self._state.last_step))  # W&B takes no step behind one that it has

    @override
    def close(self) -> None:
        self._run.finish(exit_code=int(self._last is None or self._last.has_failed))
