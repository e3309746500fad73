"""Figures as a page that Prometheus reads: a small HTTP server that answers with the last snapshot."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from lockstep.telemetry import metrics
from lockstep.telemetry.metrics import EventCounts, Snapshot, of_bucket
from lockstep.telemetry.sinks.base import MetricsSink, RunInfo

_JOIN_S = 5.0
_IN_INFO = ("strategy", "precision", "global_batch_size", "host", "version/lockstep", "version/torch")
"""Of a run's config, what is a label of ``lockstep_run_info``; each label that changes makes new series of all."""

_listening: set[socket.socket] = set()


def _leave_to_parent() -> None:
    """Close the ports in a process that was forked, such as one that loads samples: it would keep them taken."""
    for listener in _listening:
        listener.close()


os.register_at_fork(after_in_child=_leave_to_parent)


@final
class Prometheus(MetricsSink):
    """Listens for whoever asks for metrics, until it is closed.

    Args:
        host: The address at which it listens; with the default of `Target`, this machine alone can ask.
        port: Any that is free if 0.
        facts: Of the run.

    Raises:
        OSError: The port is taken, or the address is not one of this machine.
    """

    def __init__(self, host: str, port: int, facts: RunInfo) -> None:
        self._figures = _Figures(facts)
        registry = CollectorRegistry()
        registry.register(self._figures)
        self._server, self._thread = start_http_server(port, host, registry)
        _listening.add(self._server.socket)
        self._host = f"[{host}]" if ":" in host else host

    @property
    @override
    def where(self) -> str:
        return f"metrics for Prometheus at http://{self._host}:{self._server.server_port}/metrics"

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._figures.update(snapshot)

    @override
    def close(self) -> None:
        _listening.discard(self._server.socket)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)


@final
class _Figures(Collector):
    """Gives the last snapshot in Prometheus' terms; what is not known any more is left out, but for buckets."""

    def __init__(self, facts: RunInfo) -> None:
        labels = {name.replace("/", "_"): str(facts.config[name]) for name in _IN_INFO if name in facts.config}
        self._info = {"task": facts.name, **labels}
        self._snapshot: Snapshot | None = None
        self._tally = EventCounts()

    def update(self, snapshot: Snapshot) -> None:
        self._tally.add(snapshot.events)
        if not snapshot.buckets and self._snapshot is not None:
            # They are looked at now and then, and Prometheus looks at us now and then.
            snapshot = replace(snapshot, buckets=self._snapshot.buckets)
        self._snapshot = snapshot

    @override
    def collect(self) -> Iterator[Metric]:
        yield _family(metrics.RUN_INFO, "what the run is", [(self._info, 1.0)])
        snapshot = self._snapshot
        if snapshot is None:
            return
        yield _family(metrics.UPDATED, "when these figures were taken", [({}, snapshot.time)])
        for metric in metrics.METRICS:
            if (value := metric.read(snapshot)) is not None:
                yield _family(metric.prometheus, metric.meaning, [({}, value)])
        infos = [
            ({"rank": str(each.rank), "host": each.host or "", "device": each.device or ""}, 1.0)
            for each in snapshot.ranks
        ]
        yield _family(metrics.RANK_INFO, "where a rank computes", infos)
        for of_rank in metrics.RANK_METRICS:
            known = [
                ({"rank": str(each.rank)}, value * of_rank.unit)
                for each in snapshot.ranks
                if (value := getattr(each, of_rank.figure)) is not None
            ]
            if known:
                yield _family(of_rank.prometheus, of_rank.meaning, known)
        by_family: dict[metrics.Family, list[tuple[Mapping[str, str], float]]] = {each: [] for each in metrics.FAMILIES}
        for bucket in snapshot.buckets:
            for family, value in of_bucket(bucket):
                by_family[family].append(({family.label: str(bucket.number)}, value))
        for family, found in (
            (metrics.EVALUATION, dict(self._tally.evaluation)),
            (metrics.EVENT_COUNT, dict(self._tally.counts)),
            (metrics.EVENT_SECONDS, dict(self._tally.seconds)),
        ):
            by_family[family] = [({family.label: name}, float(value)) for name, value in found.items()]
        for family, samples in by_family.items():
            if samples:
                yield _family(family.prometheus, family.meaning, samples)


def _family(name: str, meaning: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Metric:
    """Return a metric with its samples; what only grows is a counter, by its name."""
    make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    labels = list(samples[0][0]) if samples else []
    family = make(name, meaning, labels=labels)
    for of_one, value in samples:
        family.add_metric([of_one[label] for label in labels], float(value))
    return family
