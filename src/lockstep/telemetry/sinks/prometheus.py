"""Figures as a page that Prometheus reads: a small HTTP server that answers with the last snapshot."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

from lockstep.telemetry import metrics
from lockstep.telemetry.metrics import Snapshot
from lockstep.telemetry.sinks.base import MetricsSink, RunInfo

_JOIN_S = 5.0
# Of a run's config, what is a label of ``lockstep_run_info``; each label that changes makes new series of all.
_IN_INFO = ("strategy", "precision", "global_batch_size", "host", "version/lockstep", "version/torch")

_listening: set[socket.socket] = set()


def _leave_to_parent() -> None:
    """Close the ports in a process that was forked, such as one that loads samples: it would keep them taken."""
    for listener in _listening:
        listener.close()


os.register_at_fork(after_in_child=_leave_to_parent)


@final
class Prometheus(MetricsSink, Collector):
    """Listens for whoever asks for metrics, until it is closed.

    Args:
        host: The address at which it listens; with the default of `Target`, this machine alone can ask.
        port: Any that is free if 0.
        run: What is recorded.

    Raises:
        OSError: The port is taken, or the address is not one of this machine.
    """

    def __init__(self, host: str, port: int, run: RunInfo) -> None:
        labels = {name.replace("/", "_"): str(run.config[name]) for name in _IN_INFO if name in run.config}
        self._info = {"task": run.name, **labels}
        self._snapshot: Snapshot | None = None
        # One of its own: a script may have metrics in the default one, which are not this run's.
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, host, registry)
        _listening.add(self._server.socket)
        self._host = f"[{host}]" if ":" in host else host

    @property
    @override
    def where(self) -> str:
        return f"metrics for Prometheus at http://{self._host}:{self._server.server_port}/metrics"

    @override
    def update(self, snapshot: Snapshot) -> None:
        if not snapshot.buckets and self._snapshot is not None:
            # They are stamped now and then, and Prometheus asks now and then.
            snapshot = replace(snapshot, buckets=self._snapshot.buckets)
        self._snapshot = snapshot

    @override
    def close(self) -> None:
        _listening.discard(self._server.socket)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)

    @override
    def collect(self) -> Iterator[Family]:
        """Yield the last snapshot in Prometheus' terms; what is not known any more is left out, but for buckets."""
        yield from _family(metrics.RUN_INFO, "what the run is", [(self._info, 1.0)])
        snapshot = self._snapshot
        if snapshot is None:
            return
        yield from _family(metrics.UPDATED, "when these figures were taken", [({}, snapshot.time)])
        where = [
            ({"rank": str(each.rank), "host": each.host or "", "device": each.device or ""}, 1.0)
            for each in snapshot.ranks
        ]
        yield from _family(metrics.RANK_INFO, "where a rank computes", where)
        samples: dict[metrics.Metric, list[tuple[Mapping[str, str], float | None]]] = {}
        samples |= {each: [({}, each.read(snapshot))] for each in metrics.METRICS}
        samples |= {
            each: [({"rank": str(r.rank)}, each.read(r)) for r in snapshot.ranks] for each in metrics.RANK_METRICS
        }
        samples |= {
            each: [({each.label: str(b.number)}, each.read(b)) for b in snapshot.buckets]
            for each in metrics.BUCKET_METRICS
        }
        by_name: dict[metrics.Metric, Mapping[str, float]] = {
            metrics.EVALUATION: snapshot.evaluation,
            metrics.EVENT_COUNT: snapshot.event_counts,
            metrics.EVENT_SECONDS: snapshot.event_seconds,
        }
        samples |= {each: [({each.label: n}, v) for n, v in values.items()] for each, values in by_name.items()}
        for metric, found in samples.items():
            known = [(labels, value * metric.scale) for labels, value in found if value is not None]
            yield from _family(metric.prometheus, metric.meaning, known)


def _family(name: str, meaning: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[Family]:
    """Yield a metric with its samples, if there are any; what only grows is a counter, by its name."""
    if samples:
        labels = list(samples[0][0])
        make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = make(name, meaning, labels=labels)
        for of_one, value in samples:
            family.add_metric([of_one[label] for label in labels], float(value))
        yield family
