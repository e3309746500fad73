"""Where figures of a run go besides the display, as ``log_to`` names it: TensorBoard, Prometheus, W&B, MLflow."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

from typing_extensions import override

from lockstep.activity import one_line
from lockstep.comm.collectives import broadcast_object
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.run_folder import read_object, replace_file
from lockstep.telemetry import metrics
from lockstep.telemetry.metrics import Snapshot, SnapshotSink
from lockstep.telemetry.run_record import guarded

Plain = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run that begins, or goes on.

    Attributes:
        name: Of its task.
        config: All that it depends on, by name: settings, sizes, versions, commits.
        first_step: Steps done before.
        is_fresh: Whether it begins; else it goes on where an earlier session ended.
        memory: Folder in which is kept what the next session needs to go on in the same places, if there is one.
    """

    name: str
    config: Mapping[str, Plain]
    first_step: int = 0
    is_fresh: bool = True
    memory: Path | None = None


class MetricsSink(SnapshotSink):
    """A sink that can say where its figures are to be seen.

    Args:
        place: What stands behind the colon in ``log_to``.
        run: What is recorded.

    Attributes:
        form, pattern: How one is asked for; what may follow the colon.
        package: What it imports; the extra of the sink's name installs it.
        advice: What to do if one cannot be opened.
        where: One line for whoever started the run.
    """

    form: ClassVar[str]
    pattern: ClassVar[str]
    package: ClassVar[str]
    advice: ClassVar[str]
    where: str
    _last_step = -1

    @abstractmethod
    def __init__(self, place: str, run: RunInfo) -> None:
        """Open it. Libraries are imported here: they take their time, and may not be installed."""

    def news(self, snapshot: Snapshot) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Yield what is new in ``snapshot``: step, Unix time and values by name, evaluations first."""
        for event, values in metrics.evaluations(snapshot):  # before the step: services refuse steps that go back
            yield event.step, event.time, values
        if snapshot.step > self._last_step:
            self._last_step = snapshot.step
            yield snapshot.step, snapshot.time, metrics.scalars(snapshot)


@final
class TensorBoard(MetricsSink):
    """Adds an event file to a folder, which TensorBoard takes for one run; by torch's own writer.

    A run that goes on in the folder has TensorBoard hide what was written of the steps that it does again; one that
    begins there, all that was before.
    """

    form, pattern, package = "tensorboard:DIR", ".+", "tensorboard"
    advice = "Name another folder in log_to."

    @override
    def __init__(self, place: str, run: RunInfo) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(place).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        self.where = f"metrics go to TensorBoard: tensorboard --logdir {folder}"
        self._summary: Any = Summary
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step)
        # The writer under it, which takes a whole summary at once; see `update`.
        self._events = self._writer._get_file_writer()
        if run.first_step == 0:
            self._describe(run)
        self._writer.flush()  # so that a folder that cannot be written shows now

    @override
    def update(self, snapshot: Snapshot) -> None:
        for event in snapshot.events:
            self._writer.add_text(f"events/{event.event}", event.text, event.step, event.time)
        for step, time_s, values in self.news(snapshot):
            # All as one event, which costs a fifth of one for each.
            found = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._events.add_summary(self._summary(value=found), step, time_s)
        self._writer.flush()

    @override
    def close(self) -> None:
        self._writer.close()

    def _describe(self, run: RunInfo) -> None:
        """Write what the run is."""
        cells = {name: str(value).replace("|", "&#124;").replace("\n", " ") for name, value in run.config.items()}
        rows = "\n".join(f"| {name} | {value} |" for name, value in cells.items())
        self._writer.add_text("run", f"| {run.name} | |\n|---|---|\n{rows}", 0)


LOOPBACK = "127.0.0.1"

# Of a run's config, what is a label of ``lockstep_run_info``; each label that changes makes new series of all.
_IN_INFO = ("strategy", "precision", "global_batch_size", "host", "version/lockstep", "version/torch")
_JOIN_S = 5.0


def address_of(place: str) -> tuple[str, int]:
    """Return host and port of a sink for Prometheus."""
    host, _, port = place.rpartition(":")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


@final
class Prometheus(MetricsSink):
    """Answers whoever asks over HTTP with the last snapshot, until it is closed; on this machine alone by default."""

    form, pattern, package = "prometheus:[HOST:]PORT", r"(.*:)?[0-9]{1,5}", "prometheus_client"
    advice = "Name another port in log_to, or 0 for any that is free."

    @override
    def __init__(self, place: str, run: RunInfo) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        labels = {name.replace("/", "_"): str(run.config[name]) for name in _IN_INFO if name in run.config}
        self._info = {"task": run.name, **labels}
        self._snapshot: Snapshot | None = None
        # One of its own: a script may have metrics in the default one, which are not this run's.
        registry = CollectorRegistry()
        registry.register(self)
        host, port = address_of(place)
        self._server, self._thread = start_http_server(port, host, registry)
        # A process that was forked, such as one that loads samples, would keep the port taken.
        os.register_at_fork(after_in_child=self._server.socket.close)
        host = f"[{host}]" if ":" in host else host
        self.where = f"metrics for Prometheus at http://{host}:{self._server.server_port}/metrics"

    @override
    def update(self, snapshot: Snapshot) -> None:
        # One assignment: threads of the server read it whenever somebody asks.
        self._snapshot = snapshot

    @override
    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)

    def collect(self) -> Iterator[Any]:
        """Yield the last snapshot in Prometheus' terms; what is not known any more is left out."""
        yield from _family(metrics.RUN_INFO, "what the run is", [(self._info, 1.0)])
        snapshot = self._snapshot
        if snapshot is None:
            return
        yield from _family(metrics.UPDATED, "when these figures were taken", [({}, snapshot.time)])
        names = ("rank", "host", "device")
        where = [({name: str(getattr(each, name)) for name in names}, 1.0) for each in snapshot.ranks]
        yield from _family(metrics.RANK_INFO, "where a rank computes", where)
        for metric in metrics.METRICS:
            yield from _family(metric.prometheus, metric.meaning, [({}, metric.read(snapshot))], metric.scale)
        for metric in metrics.RANK_METRICS:
            by_rank = [({"rank": str(each.rank)}, metric.read(each)) for each in snapshot.ranks]
            yield from _family(metric.prometheus, metric.meaning, by_rank, metric.scale)
        for metric, values in ((metrics.EVALUATION, snapshot.evaluation), (metrics.EVENT_COUNT, snapshot.event_counts)):
            yield from _family(metric.prometheus, metric.meaning, [({metric.label: n}, v) for n, v in values.items()])


def _family(
    name: str, meaning: str, samples: Sequence[tuple[dict[str, str], float | None]], scale: float = 1.0
) -> Iterator[Any]:
    """Yield a metric with its samples, if any is known; what only grows is a counter, by its name."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    known = [(labels, value) for labels, value in samples if value is not None]
    if known:
        make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = make(name, meaning, labels=list(known[0][0]))
        for labels, value in known:
            family.add_metric(list(labels.values()), value * scale)
        yield family


# Remembers from session to session under which ids services know the run.
SINK_STATE_FILE = "sinks.json"


def known_run_id(target: str, run: RunInfo) -> str | None:
    """Return the id under which the service of ``target`` knows ``run`` from earlier sessions; None if it does not."""
    if run.memory is None or run.is_fresh:
        return None
    run_id = read_object(run.memory / SINK_STATE_FILE).get(target)
    return run_id if isinstance(run_id, str) else None


def remember_run_id(target: str, run: RunInfo, run_id: str) -> None:
    """Keep ``run_id`` for the next session."""
    if run.memory is not None:
        path = run.memory / SINK_STATE_FILE
        with suppress(OSError):  # a full disk costs this memory, not the sink
            replace_file(path, json.dumps({**read_object(path), target: run_id}, indent=1))


@final
class WandbRun(MetricsSink):
    """Begins a run of Weights & Biases, or goes on with that of the earlier sessions, by its own client.

    Its environment variables say where and as whom. It leaves out steps behind the last that it has, as those that a
    run does again from a checkpoint.
    """

    form, pattern, package = "wandb:[ENTITY/]PROJECT", "([^/]*/)?[^/]+", "wandb"
    advice = "Run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later; or leave it out of log_to."

    @override
    def __init__(self, place: str, run: RunInfo) -> None:
        import wandb

        target = f"wandb:{place}"
        run_id = known_run_id(target, run) or uuid.uuid4().hex[:8]
        entity, _, name = place.rpartition("/")
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
        remember_run_id(target, run, run_id)
        seen_at = f"run {run_id}, offline in {self._run.dir}" if self._run.offline else self._run.url
        self.where = f"metrics go to Weights & Biases: {seen_at}"
        self._has_failed = True

    @override
    def update(self, snapshot: Snapshot) -> None:
        self._has_failed = snapshot.has_failed
        for step, _, values in self.news(snapshot):
            self._run.log(values, step=step)

    @override
    def close(self) -> None:
        self._run.finish(exit_code=int(self._has_failed))


# Of a parameter's text, what MLflow takes.
_PARAM_CHARS = 500


@final
class MlflowRun(MetricsSink):
    """Begins a run of MLflow, or goes on with that of the earlier sessions, by its own client.

    Its environment variables say where if ``place`` is empty, as whom, and for which experiment.
    """

    form, pattern, package = "mlflow:[URI]", ".*", "mlflow"
    advice = "Check whether MLflow can be reached there, or leave it out of log_to."

    @override
    def __init__(self, place: str, run: RunInfo) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(tracking_uri=place or None), Metric
        target = f"mlflow:{place}"
        run_id = known_run_id(target, run)
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            run_id = self._client.create_run(number, run_name=run.name).info.run_id
            params = [Param(key, str(value)[:_PARAM_CHARS]) for key, value in run.config.items()]
            self._client.log_batch(run_id, params=params)
        else:
            self._client.update_run(run_id, status="RUNNING")
            # It would keep a second value of each step that the run does again from a checkpoint.
            history = self._client.get_metric_history(run_id, "train/loss")
            self._last_step = max((metric.step for metric in history), default=-1)
        self._run_id: str = run_id
        remember_run_id(target, run, run_id)
        self.where = f"metrics go to MLflow: run {run_id} at {self._client.tracking_uri}"
        self._status = "FAILED"

    @override
    def update(self, snapshot: Snapshot) -> None:
        was_stopped = "stop" in snapshot.event_counts
        self._status = "FAILED" if snapshot.has_failed else "KILLED" if was_stopped else "FINISHED"
        for step, time_s, values in self.news(snapshot):
            found = [self._metric(name, value, int(time_s * 1e3), step) for name, value in values.items()]
            self._client.log_batch(self._run_id, metrics=found)

    @override
    def close(self) -> None:
        self._client.set_terminated(self._run_id, self._status)


# --- what ``log_to`` asks for -----------------------------------------------------------------------------------------


SINKS: dict[str, type[MetricsSink]] = {
    "tensorboard": TensorBoard,
    "prometheus": Prometheus,
    "wandb": WandbRun,
    "mlflow": MlflowRun,
}


class Target(NamedTuple):
    """One sink: its name in `SINKS`, and what follows the colon."""

    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"


def parse_targets(log_to: str | Sequence[str]) -> tuple[Target, ...]:
    """Return the sinks that ``log_to`` names: in a list of texts, or in one text with commas between them.

    Raises:
        ConfigurationError: One of them is not of the form of its kind, of no known kind, or there twice; says which.
    """
    targets: list[Target] = []
    for text in map(str.strip, log_to.split(",") if isinstance(log_to, str) else log_to):
        kind, _, place = text.partition(":")
        target, sink = Target(kind, place), SINKS.get(kind)
        if sink is None:
            *most, last = (each.form for each in SINKS.values())
            forms = f"{', '.join(most)} or {last}"
            raise ConfigurationError(f"log_to={text!r} names no sink that there is.\nGive {forms}.")
        if kind == "mlflow" and "@" in place:
            raise ConfigurationError(
                "The URI of mlflow in log_to has a password, which would stay in the records of the run.\n"
                "Set MLFLOW_TRACKING_URI to it, and give mlflow: without one."
            )
        if not re.fullmatch(sink.pattern, place):
            raise ConfigurationError(f"log_to={text!r} does not say where to.\nGive {sink.form}.")
        if target in targets:
            raise ConfigurationError(f"log_to names {target} twice.\nLeave one of them out.")
        targets.append(target)
    return tuple(targets)


def open_sinks(targets: Sequence[Target], run: Callable[[], RunInfo], world: World) -> list[MetricsSink]:
    """Open ``targets`` on rank zero; other ranks have none.

    Collective: every rank. Blocks until rank zero has done so, which takes seconds, or most of a minute with a
    service that does not answer.

    Args:
        targets: The same on every rank.
        run: Describes the run; only called on rank zero.
        world: Of the run.

    Raises:
        ConfigurationError: On every rank: a sink's package is not installed, its port is taken, its folder cannot be
            written, or its service does not answer.
    """
    sinks: list[MetricsSink] = []
    problem = None
    if world.is_rank_zero:
        try:
            sinks = open_here(targets, run())
        except ConfigurationError as error:
            problem = str(error)
    # Rank zero raises behind the broadcast as well: otherwise the others would wait for it in vain.
    problem = broadcast_object(problem, group=world.group, device=world.device)
    if problem is not None:
        raise ConfigurationError(problem)
    return sinks


# How long all sinks together may take to open; less than ranks wait for each other.
OPEN_TIMEOUT_S = 40.0


def open_here(targets: Sequence[Target], run: RunInfo) -> list[MetricsSink]:
    """Open ``targets`` in this process: all of them or none.

    Raises:
        ConfigurationError: One of them cannot be; says why, and what to do.
    """
    # All are checked first: what is not installed shows before a port or a run of a service is taken.
    for target in targets:
        require_package(target)
    sinks: list[MetricsSink] = []
    until_s = time.monotonic() + OPEN_TIMEOUT_S
    with ExitStack() as undo:
        for target in targets:
            try:
                sinks.append(_open(target, run, until_s - time.monotonic()))
            except Exception as error:  # of somebody else's library, which may raise anything
                reason = error.strerror if isinstance(error, OSError) else None
                reason = reason or one_line(error).rstrip(".")
                advice = SINKS[target.kind].advice
                raise ConfigurationError(f"{target} cannot be opened: {reason}.\n{advice}") from error
            # An error of closing must not take the place of that which says why.
            undo.callback(guarded, sinks[-1].close, f"{target} could not be closed")
        undo.pop_all()
    return sinks


def _open(target: Target, run: RunInfo, seconds: float) -> MetricsSink:
    opening: Future[MetricsSink] = Future()

    def work() -> None:
        try:
            opening.set_result(SINKS[target.kind](target.place, run))
        except Exception as error:
            opening.set_exception(error)

    # A daemon, unlike the threads of an executor: a service that never answers must not keep the process from ending.
    threading.Thread(target=work, name="lockstep-opening", daemon=True).start()
    if not wait([opening], seconds).done:
        raise TimeoutError(f"no answer in {OPEN_TIMEOUT_S:.3g} s")
    return opening.result()


def require_package(target: Target) -> None:
    """Check that what ``target`` needs is installed, without importing it.

    Raises:
        ConfigurationError: It is not; says how to install it.
    """
    package = SINKS[target.kind].package
    if find_spec(package) is None:
        raise ConfigurationError(
            f"{target} needs the package {package}, which is not installed on rank zero's machine.\n"
            f"pip install 'lockstep-torch[{target.kind}]'"
        )
