"""Who gets the figures of a run: subscribers, and the sinks of ``log_to``: TensorBoard, Prometheus, W&B, MLflow."""

import json
import os
import platform
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, final

from lockstep.base.activity import in_time, one_line
from lockstep.base.rank_files import read_object, replace_file
from lockstep.errors import ConfigurationError
from lockstep.telemetry import figures
from lockstep.telemetry.figures import Snapshot
from lockstep.telemetry.record import Event, config_of, guarded, how_called

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

    def service_id(self, target: str, create: Callable[[], str]) -> str:
        """Return the id of the run in the service of ``target``: of an earlier session, or a new one."""
        ids = {} if self.memory is None else read_object(self.memory / SINK_STATE_FILE)
        if self.is_fresh or target not in ids:
            ids[target] = create()
            if self.memory is not None:
                with suppress(OSError):  # on a full disk, the sink still works, but the next session starts a new run
                    self.memory.mkdir(parents=True, exist_ok=True)
                    replace_file(self.memory / SINK_STATE_FILE, json.dumps(ids, indent=1))
        return str(ids[target])


def run_info(facts: Mapping[str, Any], memory: str | Path | None, first_step: int, *, is_fresh: bool) -> RunInfo:
    """Return the description of a run from the facts about its session in ``run.json``."""
    config = config_of({**facts, "host": platform.node(), "command": how_called()["command"]})
    folder = None if memory is None else Path(memory)
    return RunInfo(name=facts["task"], config=config, first_step=first_step, is_fresh=is_fresh, memory=folder)


# --- subscribers: displays and sinks, which must not delay or fail training -------------------------------------------


class Subscriber(ABC):
    """Gets events and figures on rank zero, in a thread of its own: a display, or a sink.

    Must not use CUDA or collectives. If it blocks, snapshots are dropped, but no events, and training continues. If it
    raises, it gets nothing more, and a warning is printed.
    """

    @abstractmethod
    def event(self, event: Event) -> None:
        """Handle an event of rank zero, such as an evaluation with its ``metrics``; before the next snapshot."""

    @abstractmethod
    def update(self, snapshot: Snapshot) -> None:
        """Handle the figures of all ranks, about once a second; the last ones of a run have ``is_last``."""

    @abstractmethod
    def close(self) -> None:
        """Write the remaining data. Called once, also after an error."""


# Seconds that the end of a run waits for a subscriber.
CLOSE_S = 10.0


class Delivery:
    """Calls a subscriber in a thread of its own. While it is busy, snapshots are dropped, but not events.

    Args:
        subscriber: Gets nothing more after it has raised.
    """

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        # Not a queue: after a minute without an answer, a service gets the current snapshot, not sixty old ones.
        self._changed = threading.Condition()
        self._next: Snapshot | None = None
        self._events: list[Event] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="lockstep-sink", daemon=True)
        self._thread.start()

    def give(self, snapshot: Snapshot, events: Sequence[Event] = ()) -> None:
        """Pass on ``snapshot``, and the ``events`` before it. Does not block."""
        with self._changed:
            self._next = snapshot
            self._events += events
            self._changed.notify()

    def close(self) -> None:
        """Close the subscriber. Blocks at most `CLOSE_S`; after that, the daemon thread is abandoned."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        consequence = f"{type(self._subscriber).__name__} gets no more figures of this run"
        is_on = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._is_over)
                snapshot, self._next = self._next, None
                events, self._events = self._events, []
            if snapshot is None:
                break
            is_on = is_on and guarded(partial(self._pass_on, snapshot, events), consequence)
        guarded(self._subscriber.close, consequence)

    def _pass_on(self, snapshot: Snapshot, events: Sequence[Event]) -> None:
        for event in events:
            self._subscriber.event(event)
        self._subscriber.update(snapshot)


# --- the sinks --------------------------------------------------------------------------------------------------------


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
        last: The last snapshot; an empty one until then.
    """

    form = pattern = package = advice = where = ""
    last = Snapshot()
    _last_step = -1

    @abstractmethod
    def __init__(self, place: str, run: RunInfo) -> None:
        """Open the sink. Import its library only here, as that is slow, and the library may not be installed."""

    @abstractmethod
    def _write(self, step: int, time_s: float, values: Mapping[str, float], event: Event | None = None) -> None:
        """Write values by name, at a Unix time; with the ``event`` that they belong to, if there is one."""

    @final
    def event(self, event: Event) -> None:
        """Write the metrics of an event, for its own step."""
        values = {figures.EVALUATION.name_of(name): value for name, value in (event.metrics or {}).items()}
        self._write(event.step, event.time, values, event)

    @final
    def update(self, snapshot: Snapshot) -> None:
        """Write the figures of a step, once."""
        self.last = snapshot
        if snapshot.step > self._last_step:  # services refuse decreasing steps
            self._last_step = snapshot.step
            self._write(snapshot.step, snapshot.time, figures.scalars(snapshot))


@final
class TensorBoard(MetricsSink):
    """Adds an event file to a folder, which TensorBoard shows as one run.

    If a run goes on in the folder, TensorBoard hides the earlier values of the steps that are repeated. If a new run
    begins there, TensorBoard hides all earlier values.
    """

    form, pattern, package = "tensorboard:DIR", ".+", "tensorboard"
    advice = "Name another folder in log_to."

    def __init__(self, place: str, run: RunInfo) -> None:
        # Not torch's SummaryWriter: it writes in a thread of its own, which prints a traceback if the disk is full.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import text

        folder = Path(place).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        self.where = f"metrics go to TensorBoard: tensorboard --logdir {folder}"
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._text: Any = text
        path = folder / f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}"
        # Unbuffered, so that nothing is left to write when it is closed after an error.
        self._records = RecordWriter(path.open("xb", buffering=0))
        self._add(file_version="brain.Event:2")
        # TensorBoard then hides what other files in the folder have from this step on. The evaluation after the last
        # step that is done was made before its checkpoint.
        begin = run.first_step + 1 if run.first_step else 0
        self._add(step=begin, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        if run.first_step == 0:
            rows = "\n".join(f"| {name} | {' '.join(str(value).split())} |" for name, value in run.config.items())
            self._add(summary=text("run", f"| {run.name} | |\n|---|---|\n{rows}"))

    def _write(self, step: int, time_s: float, values: Mapping[str, float], event: Event | None = None) -> None:
        summary = self._summary() if event is None else self._text(f"events/{event.event}", event.text)
        # All values in one event, which costs a fifth of an event for each value.
        summary.value.extend(self._summary.Value(tag=name, simple_value=value) for name, value in values.items())
        self._add(time_s, step=step, summary=summary)

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _add(self, time_s: float | None = None, **content: Any) -> None:
        event = self._event(wall_time=time.time() if time_s is None else time_s, **content)
        self._records.write(event.SerializeToString())


# Of a run's config, what is a label of ``lockstep_run_info``; each label that changes makes new series of all.
_IN_INFO = ("strategy", "precision", "global_batch_size", "host", "version/lockstep", "version/torch")

# What only Prometheus gets.
_RUN = figures.Metric("", "lockstep_run_info", "what the run is")
_UPDATED = figures.Metric("", "lockstep_updated_timestamp_seconds", "when these figures were taken", attrgetter("time"))
_RANK = figures.Metric("", "lockstep_rank_info", "where a rank computes")


@final
class Prometheus(MetricsSink):
    """Serves the last snapshot over HTTP until it is closed; by default only to this machine."""

    form, pattern, package = "prometheus:[HOST:]PORT", r"(.*:)?[0-9]{1,5}", "prometheus_client"
    advice = "Name another port in log_to, or 0 for any that is free."

    def __init__(self, place: str, run: RunInfo) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        labels = {name.replace("/", "_"): str(run.config[name]) for name in _IN_INFO if name in run.config}
        self._info = {"task": run.name, **labels}
        # Not the default registry, which may have metrics of the script.
        registry = CollectorRegistry()
        registry.register(self)
        host, _, port = place.rpartition(":")
        host = host or "127.0.0.1"
        self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        # Otherwise a forked process, such as a loader process, would keep the port in use.
        os.register_at_fork(after_in_child=self._server.socket.close)
        self.where = f"metrics for Prometheus at http://{host}:{self._server.server_port}/metrics"

    def _write(self, step: int, time_s: float, values: Mapping[str, float], event: Event | None = None) -> None:
        """Do nothing: the server reads ``last``, which also has the last evaluation, and counts of all events."""

    def close(self) -> None:
        """End the server, and give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of the last snapshot, without unknown values."""
        from prometheus_client import Metric

        # Of each metric, the labels and the value of each sample.
        samples: dict[figures.Metric, list[tuple[dict[str, str], float | None]]] = {_RUN: [(self._info, 1.0)]}
        if (run := self.last).time:  # read once, as another thread sets it
            ranks = [({"rank": str(rank.rank)}, rank) for rank in run.ranks]
            samples[_RANK] = [({**of, "host": str(rank.host), "device": str(rank.device)}, 1.0) for of, rank in ranks]
            samples |= {metric: [({}, metric.read(run))] for metric in (_UPDATED, *figures.METRICS)}
            samples |= {metric: [(of, metric.read(rank)) for of, rank in ranks] for metric in figures.RANK_METRICS}
            samples[figures.EVALUATION] = [({"metric": name}, value) for name, value in run.evaluation.items()]
            samples[figures.LOGGED] = [({"name": name}, value) for name, value in run.logged.items()]
            samples[figures.EVENT_COUNT] = [({"event": name}, value) for name, value in run.event_counts.items()]
        for metric, values in samples.items():
            name = metric.prometheus
            kind = "counter" if name.endswith("_total") else "gauge"
            family = Metric(name.removesuffix("_total"), metric.meaning, kind)
            for labels, value in values:
                if value is not None:
                    family.add_sample(name, labels, value * metric.scale)
            yield family


@final
class WandbRun(MetricsSink):
    """Starts a run of Weights & Biases, or resumes that of the earlier sessions, with its own client.

    Its environment variables define server and user. Steps that a run repeats from a checkpoint are not logged again,
    as the service refuses steps before its last one.
    """

    form, pattern, package = "wandb:[ENTITY/]PROJECT", "([^/]*/)?[^/]+", "wandb"
    advice = "Run `wandb login`, or set WANDB_MODE=offline and run `wandb sync` later, or remove it from log_to."

    def __init__(self, place: str, run: RunInfo) -> None:
        import wandb

        run_id = run.service_id(f"wandb:{place}", lambda: os.urandom(4).hex())
        entity, _, name = place.rpartition("/")
        # A resumed run may have other settings, or other machines; and the script may have a run of its own.
        options: dict[str, Any] = {"resume": "allow", "allow_val_change": True, "reinit": "create_new"}
        # The launcher merges and keeps the output of the ranks.
        options |= {"config": dict(run.config), "settings": wandb.Settings(console="off", silent=True)}
        self._run: Any = wandb.init(entity=entity or None, project=name, id=run_id, **options)
        seen_at = f"run {run_id}, offline in {self._run.dir}" if self._run.offline else self._run.url
        self.where = f"metrics go to Weights & Biases: {seen_at}"

    def _write(self, step: int, time_s: float, values: Mapping[str, float], event: Event | None = None) -> None:
        if values:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End this session of the run; services show whether it has failed."""
        self._run.finish(exit_code=int(self.last.has_failed))


@final
class MlflowRun(MetricsSink):
    """Starts a run of MLflow, or resumes that of the earlier sessions, with its own client.

    Its environment variables define server (if ``place`` is empty), user and experiment.
    """

    form, pattern, package = "mlflow:[URI]", ".*", "mlflow"
    advice = "Check that the MLflow server is reachable, or remove it from log_to."

    def __init__(self, place: str, run: RunInfo) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(tracking_uri=place or None), Metric

        def create() -> str:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            run_id: str = self._client.create_run(number, run_name=run.name).info.run_id
            # MLflow accepts so many characters of a parameter.
            self._client.log_batch(run_id, params=[Param(key, str(value)[:500]) for key, value in run.config.items()])
            return run_id

        self._run_id = run.service_id(f"mlflow:{place}", create)
        self._client.update_run(self._run_id, status="RUNNING")
        # MLflow would keep a second value of each step that a resumed run repeats from a checkpoint.
        history = self._client.get_metric_history(self._run_id, "train/loss")
        self._last_step = max((metric.step for metric in history), default=-1)
        self.where = f"metrics go to MLflow: run {self._run_id} at {self._client.tracking_uri}"

    def _write(self, step: int, time_s: float, values: Mapping[str, float], event: Event | None = None) -> None:
        if values:
            metrics = [self._metric(name, value, int(time_s * 1e3), step) for name, value in values.items()]
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """End this session of the run; services show whether it has failed."""
        self._client.set_terminated(self._run_id, "FAILED" if self.last.has_failed else "FINISHED")


# --- what ``log_to`` asks for -----------------------------------------------------------------------------------------


SINKS: dict[str, type[MetricsSink]] = {
    kind.form.partition(":")[0]: kind for kind in (TensorBoard, Prometheus, WandbRun, MlflowRun)
}


def parse_targets(log_to: str | Sequence[str]) -> tuple[str, ...]:
    """Return the sinks that ``log_to`` names, as a list or separated by commas, such as ``tensorboard:runs/a``.

    Raises:
        ConfigurationError: A sink is unknown, or is not of the form of its kind; names it.
    """
    targets = []
    for text in map(str.strip, log_to.split(",") if isinstance(log_to, str) else log_to):
        kind, _, place = text.partition(":")
        if kind not in SINKS:
            forms = ", ".join(sink.form for sink in SINKS.values())
            raise ConfigurationError(f"log_to={text!r} does not name a known sink.\nGive one of {forms}.")
        if kind == "mlflow" and "@" in place:
            raise ConfigurationError(
                "The URI of mlflow in log_to contains a password, which would be kept in the record of the run.\n"
                "Set MLFLOW_TRACKING_URI to the URI, and give mlflow: without one."
            )
        if not re.fullmatch(SINKS[kind].pattern, place):
            raise ConfigurationError(f"log_to={text!r} does not say where to write.\nGive {SINKS[kind].form}.")
        targets.append(f"{kind}:{place}")
    return tuple(dict.fromkeys(targets))


# Time for all sinks together; less than the timeout of the collective in which the other ranks wait.
OPEN_TIMEOUT_S = 40.0


def open_sinks(targets: Sequence[str], run: RunInfo) -> tuple[list[MetricsSink], str | None]:
    """Return the opened ``targets``; if one of them cannot be opened, close all, and return the reason.

    Blocks some seconds, or up to `OPEN_TIMEOUT_S` if a service does not answer. A package may not be installed, a port
    taken, or a folder not be writable.
    """
    sinks: list[MetricsSink] = []
    until_s = time.monotonic() + OPEN_TIMEOUT_S
    try:
        for target in targets:  # before a port is in use or a run of a service exists
            require_package(target)
        for target in targets:
            kind, _, place = target.partition(":")
            sinks.append(in_time(until_s - time.monotonic(), SINKS[kind], place, run))
    except ConfigurationError as error:
        return [], str(error)
    except Exception as error:  # a library may raise anything
        for sink in sinks:  # an error while closing must not replace the first error
            guarded(sink.close, f"{type(sink).__name__} could not be closed")
        reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error).rstrip(".")
        return [], f"{target} cannot be opened: {reason}.\n{SINKS[kind].advice}"
    return sinks, None


def require_package(target: str) -> None:
    """Check that the package of a sink is installed, without importing it.

    Raises:
        ConfigurationError: It is not installed; says how to install it.
    """
    kind = target.partition(":")[0]
    package = SINKS[kind].package
    if find_spec(package) is None:
        raise ConfigurationError(
            f"{target} needs the package {package}, which is not installed on rank zero's machine.\n"
            f"pip install 'lockstep-torch[{kind}]'"
        )
