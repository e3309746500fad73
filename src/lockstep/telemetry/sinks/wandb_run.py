"""Figures as a run of Weights & Biases, by its own client; its environment variables say where and as whom."""

from __future__ import annotations

import uuid
from typing import Any, final

import wandb
from typing_extensions import override

from lockstep.telemetry.metrics import EventCounts, Snapshot, evaluations, has_failed, scalars
from lockstep.telemetry.sinks.base import MetricsSink, RunInfo, SinkState

_MOST_EVENTS = 1000
"""Events whose texts are kept for the table at the end."""


@final
class WandbRun(MetricsSink):
    """Begins a run, or goes on with the one that the earlier sessions had.

    Args:
        project: Its name, or ENTITY/NAME.
        facts: Of the run.
        kept: The id of its run.
    """

    def __init__(self, project: str, facts: RunInfo, kept: SinkState) -> None:
        entity, _, name = project.rpartition("/")
        run_id = kept.run_id or uuid.uuid4().hex[:8]
        self._run: Any = wandb.init(
            entity=entity or None,
            project=name,
            id=run_id,
            resume="allow",
            config=dict(facts.config),
            allow_val_change=True,  # a run may go on with other settings, or on other machines
            reinit="create_new",  # a script may have a run of its own
            # What ranks print is merged and kept by the launcher.
            settings=wandb.Settings(console="off", silent=True),
        )
        self._kept = kept
        self._kept.begin(run_id)
        self._tally = EventCounts()
        self._events: list[list[str | int | float | None]] = []

    @property
    @override
    def where(self) -> str:
        place = f"run {self._kept.run_id}, offline in {self._run.dir}" if self._run.offline else self._run.url
        return f"metrics go to Weights & Biases: {place}"

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._tally.add(snapshot.events)
        for event in snapshot.events:
            self._events.append([event.step, event.event, event.rank, event.seconds, event.text])
        del self._events[_MOST_EVENTS:]
        for found in evaluations(snapshot):
            if self._kept.is_new_evaluation(found.step):
                # W&B takes no step that lies behind one that it has.
                self._run.log(dict(found.metrics), step=max(found.step, self._kept.last_step))
                self._kept.told_evaluation(found.step)
        if self._kept.is_new(snapshot.step):
            self._run.log(scalars(snapshot, self._tally), step=snapshot.step)
            self._kept.told(snapshot.step)

    @override
    def close(self) -> None:
        if self._events:
            table = wandb.Table(columns=["step", "event", "rank", "seconds", "text"], data=self._events)
            self._run.log({"events": table}, step=max(0, self._kept.last_step))
        self._run.finish(exit_code=int(has_failed(self._tally.counts)))
