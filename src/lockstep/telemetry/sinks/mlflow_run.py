"""Figures as a run of MLflow, by its own client; its environment variables say who asks, and for which experiment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import final

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from typing_extensions import override

from lockstep.telemetry.metrics import EventCounts, Snapshot, evaluations, has_failed, scalars
from lockstep.telemetry.sinks.base import MetricsSink, RunInfo, SinkState

_MOST_METRICS, _MOST_PARAMS, _PARAM_CHARS = 1000, 100, 500
"""Of what MLflow takes in one call, and of a parameter's text."""
_MOST_EVENTS = 1000
"""Events whose texts are kept for the file at the end."""


@final
class MlflowRun(MetricsSink):
    """Begins a run, or goes on with the one that the earlier sessions had.

    Args:
        uri: Of the tracking server, or a folder or database; where MLflow itself would look if empty.
        facts: Of the run.
        kept: The id of its run.
    """

    def __init__(self, uri: str, facts: RunInfo, kept: SinkState) -> None:
        self._client = MlflowClient(tracking_uri=uri or None)
        self._kept = kept
        self._tally = EventCounts()
        self._events: list[str] = []
        self._events_file = f"events/from-step-{facts.first_step}.txt"
        if kept.run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            self._run_id: str = self._client.create_run(number, run_name=facts.name).info.run_id
            params = [Param(key, str(value)[:_PARAM_CHARS]) for key, value in facts.config.items()]
            for start in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._run_id, params=params[start : start + _MOST_PARAMS])
        else:
            self._run_id = kept.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        kept.begin(self._run_id)

    @property
    @override
    def where(self) -> str:
        return f"metrics go to MLflow: run {self._run_id} at {self._client.tracking_uri}"

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._tally.add(snapshot.events)
        self._events += [
            f"step {event.step}  rank {event.rank}  {event.event}: {event.text}" for event in snapshot.events
        ]
        del self._events[_MOST_EVENTS:]
        for found in evaluations(snapshot):
            if self._kept.is_new_evaluation(found.step):
                self._log(found.metrics, found.step, found.time)
                self._kept.told_evaluation(found.step)
        if self._kept.is_new(snapshot.step):
            self._log(scalars(snapshot, self._tally), snapshot.step, snapshot.time)
            self._kept.told(snapshot.step)

    @override
    def close(self) -> None:
        if self._events:
            self._client.log_text(self._run_id, "\n".join(self._events) + "\n", self._events_file)
        stopped = bool(self._tally.counts.get("stop"))
        status = "FAILED" if has_failed(self._tally.counts) else "KILLED" if stopped else "FINISHED"
        self._client.set_terminated(self._run_id, status)

    def _log(self, values: Mapping[str, float], step: int, time: float) -> None:
        metrics = [Metric(name, value, int(time * 1e3), step) for name, value in values.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])
