"""Where figures of a run go besides the display, as ``log_to`` names it: TensorBoard, Prometheus, W&B, MLflow."""

from __future__ import annotations

import json
import os
import platform
import re
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, final

from typing_extensions import override

from lockstep.activity import one_line
from lockstep.errors import ConfigurationError
from lockstep.run_folder import read_object, replace_file
from lockstep.telemetry import figures
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.record import Event, guarded, how_called
from lockstep.telemetry.recorder import Place, Subscriber

# Keeps the ids of the run in services, for the next session.
SINK_STATE_FILE = "sinks.json"


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run that begins or resumes.

    Attributes:
        name: The name of its task.
        config: Settings, sizes, versions and commits, by name.
        first_step: Number of steps done before.
        is_fresh: Whether the run begins; otherwise it resumes an earlier session.
        memory: The folder that keeps the ids of runs in services for the next session, if there is one.
    """

    name: str
    config: Mapping[str, str | int | float | bool]
    first_step: int = 0
    is_fresh: bool = True
    memory: Path | None = None

    def known_id(self, target: str) -> str | None:
        """Return the id of the run in the service of ``target``, as an earlier session stored it; None without one."""
        if self.memory is None or self.is_fresh:
            return None
        run_id = read_object(self.memory / SINK_STATE_FILE).get(target)
        return run_id if isinstance(run_id, str) else None

    def store_id(self, target: str, run_id: str) -> None:
        """Store ``run_id`` for the next session."""
        if self.memory is not None:
            path = self.memory / SINK_STATE_FILE
            with suppress(OSError):  # on a full disk, the sink still works
                replace_file(path, json.dumps({**read_object(path), target: run_id}, indent=1))


def run_info(facts: Mapping[str, Any], memory: str | Path | None, first_step: int, *, is_fresh: bool) -> RunInfo:
    """Return the description of a run from the facts about its session in ``run.json``."""
    folder = None if memory is None else Path(memory)
    if folder is not None:
        with suppress(OSError):  # then sinks start a new run
            folder.mkdir(parents=True, exist_ok=True)
    flat = {**facts["settings"], **facts, "host": platform.node(), "command": how_called()["command"]}
    for name, group in (("version", "versions"), ("commit", "commits"), ("machine", "machine")):
        flat |= {f"{name}/{key}": fact for key, fact in facts["provenance"][group].items() if key != "load"}
    for name, value in flat.items():
        if isinstance(value, (list, tuple)):
            flat[name] = ", ".join(map(str, value))
    config = {
        name: value if isinstance(value, (str, int, float)) else str(value)
        for name, value in flat.items()
        if not (value is None or isinstance(value, dict))
    }
    return RunInfo(name=facts["task"], config=config, first_step=first_step, is_fresh=is_fresh, memory=folder)


class MetricsSink(Subscriber):
    """A sink that ``log_to`` can name.

    Args:
        place: The text after the colon in ``log_to``.
        run: The run.

    Attributes:
        form, pattern: How ``log_to`` names it; a regular expression for the text after the colon.
        package: The package that it imports; the extra with the name of the sink installs it.
        advice: What to do if it cannot be opened.
        where: One line for the user: where to find the metrics.
    """

    form: ClassVar[str]
    pattern: ClassVar[str]
    package: ClassVar[str]
    advice: ClassVar[str]
    where: str

    @abstractmethod
    def __init__(self, place: str, run: RunInfo) -> None:
        """Open the sink. Import its library only here, as that is slow, and the library may not be installed."""


class SeriesSink(MetricsSink):
    """A sink that keeps the values of all steps.

    Attributes:
        last: The last snapshot.
    """

    last: Snapshot | None = None
    _last_step = -1

    @abstractmethod
    def write(self, step: int, time_s: float, values: Mapping[str, float], event: Event | None = None) -> None:
        """Write values by name, at a Unix time; with the ``event`` that they belong to, if there is one."""

    @final
    @override
    def event(self, event: Event) -> None:
        values = {figures.EVALUATION.name_of(name): value for name, value in (event.metrics or {}).items()}
        self.write(event.step, event.time, values, event)

    @final
    @override
    def update(self, snapshot: Snapshot) -> None:
        self.last = snapshot
        if snapshot.step > self._last_step:  # services refuse decreasing steps
            self._last_step = snapshot.step
            self.write(snapshot.step, snapshot.time, figures.scalars(snapshot))


@final
class TensorBoard(SeriesSink):
    """Adds an event file to a folder, which TensorBoard shows as one run.

    If a run goes on in the folder, TensorBoard hides the earlier values of the steps that are repeated. If a new run
    begins there, TensorBoard hides all earlier values.
    """

    form, pattern, package = "tensorboard:DIR", ".+", "tensorboard"
    advice = "Name another folder in log_to."

    @override
    def __init__(self, place: str, run: RunInfo) -> None:
        # Not torch's SummaryWriter: it writes in a thread of its own, which prints a traceback if the disk is full.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import text

        folder = Path(place).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        self.where = f"metrics go to TensorBoard: tensorboard --logdir {folder}"
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._text: Any = text
        path = folder / f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}"
        # Unbuffered, so that nothing is left to write when it is closed after an error.
        self._records = RecordWriter(path.open("xb", buffering=0))
        self._add(file_version="brain.Event:2")
        # TensorBoard then hides what other files in the folder have from this step on.
        self._add(step=run.first_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        if run.first_step == 0:
            cells = {name: str(value).replace("|", "&#124;").replace("\n", " ") for name, value in run.config.items()}
            rows = "\n".join(f"| {name} | {value} |" for name, value in cells.items())
            self._add(summary=text("run", f"| {run.name} | |\n|---|---|\n{rows}"))

    @override
    def write(self, step: int, time_s: float, values: Mapping[str, float], event: Event | None = None) -> None:
        summary = self._summary() if event is None else self._text(f"events/{event.event}", event.text)
        # All values in one event, which costs a fifth of an event for each value.
        summary.value.extend(self._summary.Value(tag=name, simple_value=value) for name, value in values.items())
        self._add(time_s, step=step, summary=summary)

    @override
    def close(self) -> None:
        self._records.close()

    def _add(self, time_s: float | None = None, **content: Any) -> None:
        event = self._event(wall_time=time.time() if time_s is None else time_s, **content)
        self._records.write(event.SerializeToString())


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
    """Serves the last snapshot over HTTP until it is closed; by default only to this machine."""

    form, pattern, package = "prometheus:[HOST:]PORT", r"(.*:)?[0-9]{1,5}", "prometheus_client"
    advice = "Name another port in log_to, or 0 for any that is free."

    @override
    def __init__(self, place: str, run: RunInfo) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        labels = {name.replace("/", "_"): str(run.config[name]) for name in _IN_INFO if name in run.config}
        self._info = {"task": run.name, **labels}
        self._snapshot: Snapshot | None = None
        # Not the default registry, which may have metrics of the script.
        registry = CollectorRegistry()
        registry.register(self)
        host, port = address_of(place)
        self._server, self._thread = start_http_server(port, host, registry)
        # Otherwise a forked process, such as a loader process, would keep the port in use.
        os.register_at_fork(after_in_child=self._server.socket.close)
        host = f"[{host}]" if ":" in host else host
        self.where = f"metrics for Prometheus at http://{host}:{self._server.server_port}/metrics"

    @override
    def event(self, event: Event) -> None:
        pass  # a snapshot has the last evaluation, and counts of all events

    @override
    def update(self, snapshot: Snapshot) -> None:
        # One assignment, as threads of the server read it at any time.
        self._snapshot = snapshot

    @override
    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of the last snapshot, without unknown values."""
        from prometheus_client import Metric

        for name, meaning, samples, scale in _families(self._info, self._snapshot):
            family = Metric(name.removesuffix("_total"), meaning, "counter" if name.endswith("_total") else "gauge")
            for labels, value in samples:
                if value is not None:
                    family.add_sample(name, labels, value * scale)
            if family.samples:
                yield family


_Family = tuple[str, str, list[tuple[dict[str, str], float | None]], float]


def _families(info: dict[str, str], snapshot: Snapshot | None) -> Iterator[_Family]:
    """Yield name, meaning, samples (labels and value) and the scale of each metric."""
    yield "lockstep_run_info", "what the run is", [(info, 1.0)], 1.0
    if snapshot is None:
        return
    yield "lockstep_updated_timestamp_seconds", "when these figures were taken", [({}, snapshot.time)], 1.0
    for metric in figures.METRICS:
        yield metric.prometheus, metric.meaning, [({}, metric.read(snapshot))], metric.scale
    ranks = [({"rank": str(each.rank)}, each) for each in snapshot.ranks]
    where = [({**label, "host": str(each.host), "device": str(each.device)}, 1.0) for label, each in ranks]
    yield "lockstep_rank_info", "where a rank computes", [*where], 1.0
    for metric in figures.RANK_METRICS:
        yield metric.prometheus, metric.meaning, [(label, metric.read(each)) for label, each in ranks], metric.scale
    for metric, values in ((figures.EVALUATION, snapshot.evaluation), (figures.EVENT_COUNT, snapshot.event_counts)):
        yield metric.prometheus, metric.meaning, [({metric.label: n}, v) for n, v in values.items()], metric.scale


@final
class WandbRun(SeriesSink):
    """Starts a run of Weights & Biases, or resumes that of the earlier sessions, with its own client.

    Its environment variables define server and user. Steps that a run repeats from a checkpoint are not logged again,
    as the service refuses steps before its last one.
    """

    form, pattern, package = "wandb:[ENTITY/]PROJECT", "([^/]*/)?[^/]+", "wandb"
    advice = "Run `wandb login`, or set WANDB_MODE=offline and run `wandb sync` later, or remove it from log_to."

    @override
    def __init__(self, place: str, run: RunInfo) -> None:
        import wandb

        run_id = run.known_id(f"wandb:{place}") or uuid.uuid4().hex[:8]
        entity, _, name = place.rpartition("/")
        self._run: Any = wandb.init(
            entity=entity or None,
            project=name,
            id=run_id,
            resume="allow",
            config=dict(run.config),
            allow_val_change=True,  # a resumed run may have other settings, or other machines
            reinit="create_new",  # the script may have a run of its own
            # The launcher merges and keeps the output of the ranks.
            settings=wandb.Settings(console="off", silent=True),
        )
        run.store_id(f"wandb:{place}", run_id)
        seen_at = f"run {run_id}, offline in {self._run.dir}" if self._run.offline else self._run.url
        self.where = f"metrics go to Weights & Biases: {seen_at}"

    @override
    def write(self, step: int, time_s: float, values: Mapping[str, float], event: Event | None = None) -> None:
        if values:
            self._run.log(dict(values), step=step)

    @override
    def close(self) -> None:
        self._run.finish(exit_code=int(self.last is None or self.last.has_failed))


# MLflow accepts so many characters of a parameter.
_PARAM_CHARS = 500


@final
class MlflowRun(SeriesSink):
    """Starts a run of MLflow, or resumes that of the earlier sessions, with its own client.

    Its environment variables define server (if ``place`` is empty), user and experiment.
    """

    form, pattern, package = "mlflow:[URI]", ".*", "mlflow"
    advice = "Check that the MLflow server is reachable, or remove it from log_to."

    @override
    def __init__(self, place: str, run: RunInfo) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(tracking_uri=place or None), Metric
        run_id = run.known_id(f"mlflow:{place}")
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            run_id = self._client.create_run(number, run_name=run.name).info.run_id
            params = [Param(key, str(value)[:_PARAM_CHARS]) for key, value in run.config.items()]
            self._client.log_batch(run_id, params=params)
        else:
            self._client.update_run(run_id, status="RUNNING")
            # MLflow would keep a second value of each step that the run repeats from a checkpoint.
            history = self._client.get_metric_history(run_id, "train/loss")
            self._last_step = max((metric.step for metric in history), default=-1)
        self._run_id: str = run_id
        run.store_id(f"mlflow:{place}", run_id)
        self.where = f"metrics go to MLflow: run {run_id} at {self._client.tracking_uri}"

    @override
    def write(self, step: int, time_s: float, values: Mapping[str, float], event: Event | None = None) -> None:
        if values:
            found = [self._metric(name, value, int(time_s * 1e3), step) for name, value in values.items()]
            self._client.log_batch(self._run_id, metrics=found)

    @override
    def close(self) -> None:
        status = "FAILED" if self.last is None or self.last.has_failed else "FINISHED"
        was_stopped = self.last is not None and "stop" in self.last.event_counts
        self._client.set_terminated(self._run_id, "KILLED" if was_stopped else status)


# --- what ``log_to`` asks for -----------------------------------------------------------------------------------------


SINKS: dict[str, type[MetricsSink]] = {
    "tensorboard": TensorBoard,
    "prometheus": Prometheus,
    "wandb": WandbRun,
    "mlflow": MlflowRun,
}


def parse_targets(log_to: str | Sequence[str]) -> tuple[str, ...]:
    """Return the sinks that ``log_to`` names, as a list or separated by commas, such as ``tensorboard:runs/a``.

    Raises:
        ConfigurationError: A sink is unknown, is not of the form of its kind, or occurs twice; names it.
    """
    targets: list[str] = []
    for text in map(str.strip, log_to.split(",") if isinstance(log_to, str) else log_to):
        kind, _, place = text.partition(":")
        target, sink = f"{kind}:{place}", SINKS.get(kind)
        if sink is None:
            *most, last = (each.form for each in SINKS.values())
            forms = f"{', '.join(most)} or {last}"
            raise ConfigurationError(f"log_to={text!r} does not name a known sink.\nGive {forms}.")
        if kind == "mlflow" and "@" in place:
            raise ConfigurationError(
                "The URI of mlflow in log_to contains a password, which would be kept in the record of the run.\n"
                "Set MLFLOW_TRACKING_URI to the URI, and give mlflow: without one."
            )
        if not re.fullmatch(sink.pattern, place):
            raise ConfigurationError(f"log_to={text!r} does not say where to write.\nGive {sink.form}.")
        if target in targets:
            raise ConfigurationError(f"log_to names {target} twice.\nRemove one of them.")
        targets.append(target)
    return tuple(targets)


def open_sinks(targets: Sequence[str], run: Callable[[], RunInfo], place: Place) -> list[MetricsSink]:
    """Open ``targets`` on rank zero; return an empty list on other ranks.

    Collective if ``place`` has a group: every rank. Blocks until rank zero has opened them. This takes seconds, or up
    to `OPEN_TIMEOUT_S` if a service does not answer.

    Args:
        targets: The same on every rank.
        run: Returns the description of the run; called on rank zero only.
        place: This rank.

    Raises:
        ConfigurationError: On every rank: a sink's package is not installed, its port is taken, its folder cannot be
            written, or its service does not answer.
    """
    sinks: list[MetricsSink] = []
    problem = None
    if not targets:
        return sinks
    if place.rank == 0:
        try:
            sinks = open_here(targets, run())
        except ConfigurationError as error:
            problem = str(error)
    # Rank zero, too, raises only after the exchange. Otherwise the others would wait for it.
    problem = place.gather(problem)[0]
    if problem is not None:
        raise ConfigurationError(problem)
    return sinks


# Time for all sinks together; less than the timeout of the collective in which the other ranks wait.
OPEN_TIMEOUT_S = 40.0


def open_here(targets: Sequence[str], run: RunInfo) -> list[MetricsSink]:
    """Open ``targets`` in this process: all of them or none.

    Raises:
        ConfigurationError: One of them cannot be opened; says why, and what to do.
    """
    # First, before a port is in use or a run of a service exists.
    for target in targets:
        require_package(target)
    sinks: list[MetricsSink] = []
    until_s = time.monotonic() + OPEN_TIMEOUT_S
    for target in targets:
        try:
            sinks.append(_open(target, run, until_s - time.monotonic()))
        except Exception as error:  # a library may raise anything
            for sink in sinks:  # an error while closing must not replace the first error
                guarded(sink.close, f"{type(sink).__name__} could not be closed")
            reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error).rstrip(".")
            advice = _kind_of(target).advice
            raise ConfigurationError(f"{target} cannot be opened: {reason}.\n{advice}") from error
    return sinks


def _kind_of(target: str) -> type[MetricsSink]:
    return SINKS[target.partition(":")[0]]


def _open(target: str, run: RunInfo, seconds: float) -> MetricsSink:
    opening: Future[MetricsSink] = Future()

    def work() -> None:
        try:
            opening.set_result(_kind_of(target)(target.partition(":")[2], run))
        except Exception as error:
            opening.set_exception(error)

    # A daemon thread, unlike those of an executor, does not prevent the exit of the process if a service never answers.
    threading.Thread(target=work, name="lockstep-opening", daemon=True).start()
    if not wait([opening], seconds).done:
        raise TimeoutError(f"no answer in {OPEN_TIMEOUT_S:.3g} s")
    return opening.result()


def require_package(target: str) -> None:
    """Check that the package of a sink is installed, without importing it.

    Raises:
        ConfigurationError: It is not installed; says how to install it.
    """
    package = _kind_of(target).package
    if find_spec(package) is None:
        raise ConfigurationError(
            f"{target} needs the package {package}, which is not installed on rank zero's machine.\n"
            f"pip install 'lockstep-torch[{target.partition(':')[0]}]'"
        )
