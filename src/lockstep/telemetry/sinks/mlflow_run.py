"""Figures as a run of MLflow, by its own client; its environment variables say who asks, and for which experiment."""

import os
from typing import final

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from typing_extensions import override

from lockstep.telemetry.metrics import Snapshot
from lockstep.telemetry.sinks.base import MetricsSink, RunInfo, SinkState

# Of what MLflow takes in one call, and of a parameter's text.
_MOST_METRICS, _MOST_PARAMS, _PARAM_CHARS = 1000, 100, 500


@final
class MlflowRun(MetricsSink):
    """Begins a run, or goes on with the one that the earlier sessions had.

    Args:
        uri: Of the tracking server, or a folder or database; MLflow's own default if empty.
        run: What is recorded.
        state: The id of its run.
    """

    def __init__(self, uri: str, run: RunInfo, state: SinkState) -> None:
        self._client = MlflowClient(tracking_uri=uri or None)
        self._state = state
        self._last: Snapshot | None = None
        if state.run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            self._run_id: str = self._client.create_run(number, run_name=run.name).info.run_id
            params = [Param(key, str(value)[:_PARAM_CHARS]) for key, value in run.config.items()]
            for start in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._run_id, params=params[start : start + _MOST_PARAMS])
        else:
            self._run_id = state.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        state.begin(self._run_id)

    @property
    @override
    def where(self) -> str:
        return f"metrics go to MLflow: run {self._run_id} at {self._client.tracking_uri}"

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._last = snapshot
        for step, time, values in self._state.news(snapshot):
            metrics = [Metric(name, value, int(time * 1e3), step) for name, value in values.items()]
            for start in range(0, len(metrics), _MOST_METRICS):
                self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])

    @override
    def close(self) -> None:
        has_failed = self._last is None or self._last.has_failed
        stopped = self._last is not None and "stop" in self._last.event_counts
        self._client.set_terminated(self._run_id, "FAILED" if has_failed else "KILLED" if stopped else "FINISHED")
