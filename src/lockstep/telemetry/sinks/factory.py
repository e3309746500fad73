"""The sinks that ``log_to`` asks for: how they are named, opened, and what they keep from one session to the next."""

from __future__ import annotations

import json
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.comm.collectives import broadcast_object
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.telemetry.metrics import SnapshotSink

# What sinks are told of a run when it begins, and the base of all of them.

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
    """A sink that can say where its figures are to be seen."""

    @property
    @abstractmethod
    def where(self) -> str:
        """One line for whoever started the run."""


# What ``log_to`` asks for, as data: sinks by name, each with its place, such as ``tensorboard:runs/digits``.

FORMS = {
    "tensorboard": "tensorboard:DIR",
    "prometheus": "prometheus:[HOST:]PORT",
    "wandb": "wandb:[ENTITY/]PROJECT",
    "mlflow": "mlflow:[URI]",
}
"""How each kind of sink is asked for."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Target:
    """One sink.

    Attributes:
        kind: Which of `FORMS`.
        place: What follows the colon.
    """

    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of one for Prometheus."""
        return _address(self.place)


def parse_targets(log_to: str | Sequence[str]) -> tuple[Target, ...]:
    """Return the sinks that ``log_to`` names: in a list of texts, or in one text with commas between them.

    Raises:
        ConfigurationError: One of them is not of the form of its kind, of no known kind, or there twice; says which.
    """
    texts = log_to.split(",") if isinstance(log_to, str) else log_to
    targets = tuple(_parse(text.strip()) for text in texts)
    for target in targets:
        if targets.count(target) > 1:
            raise ConfigurationError(f"log_to names {target} twice.\nLeave one of them out.")
    return targets


def _parse(text: str) -> Target:
    kind, _, place = text.partition(":")
    if kind not in FORMS:
        raise ConfigurationError(f"log_to={text!r} names no sink that there is.\nGive {_all_forms()}.")
    target = Target(kind, place)
    if problem := _problem(target):
        raise ConfigurationError(f"log_to={text!r} {problem}.\nGive {FORMS[kind]}.")
    if kind == "mlflow" and _has_password(place):
        raise ConfigurationError(
            "The URI of mlflow in log_to has a password, which would stay in the records of the run.\n"
            "Set MLFLOW_TRACKING_URI to it, and give mlflow: without one."
        )
    return target


def _problem(target: Target) -> str | None:
    """Return what is wrong with the place of ``target``, if anything is."""
    if not target.place:
        # MLflow has a place of its own, which its environment variables may change.
        return None if target.kind == "mlflow" else "does not say where to"
    if target.kind == "prometheus":
        try:
            _, port = target.address
        except ValueError:
            return "has no port at its end"
        return None if 0 <= port < 2**16 else f"has a port above {2**16 - 1}"
    if target.kind == "wandb" and target.place.count("/") > 1:
        return "has more than one slash"
    return None


def _address(place: str) -> tuple[str, int]:
    host, colon, port = place.rpartition(":")
    if not (port.isascii() and port.isdecimal()):
        raise ValueError(place)
    return host.removeprefix("[").removesuffix("]") if colon and host else LOOPBACK, int(port)


def _has_password(uri: str) -> bool:
    try:
        return urlsplit(uri).password is not None
    except ValueError:
        return False


def _all_forms() -> str:
    *most, last = FORMS.values()
    return f"{', '.join(most)} or {last}"


# What sinks remember from one session of a run to the next: the id under which a service knows it, and how far it is.
#
# A run that goes on from a checkpoint does some steps again. Services want steps that only grow, so what has been
# told is remembered, too; the steps done again have the same figures anyway.

SINK_STATE_FILE = "sinks.json"


class SinkState:
    """What one sink remembers.

    Args:
        target: The sink, as `Target` spells it.
        facts: Of the run; without a folder, nothing is remembered.

    Attributes:
        run_id: Under which the service knows the run; None before it does.
        last_step: The last step that was told; -1 before the first.
        last_evaluation: The step of the last evaluation that was told, likewise.
    """

    def __init__(self, target: str, facts: RunInfo) -> None:
        self._target = target
        self._path = None if facts.memory is None else facts.memory / SINK_STATE_FILE
        self.run_id: str | None = None
        self.last_step = self.last_evaluation = -1
        if self._path is not None and not facts.is_fresh:
            with suppress(KeyError, TypeError, ValueError):
                mine = _read(self._path)[target]
                numbers = int(mine["last_step"]), int(mine["last_evaluation"])
                self.run_id = str(mine["run_id"])
                self.last_step, self.last_evaluation = numbers

    def begin(self, run_id: str) -> None:
        """Remember that the service now knows the run as ``run_id``; of another run than before, no step is known."""
        if run_id != self.run_id:
            self.run_id = run_id
            self.last_step = self.last_evaluation = -1
        self._write()

    def is_new(self, step: int) -> bool:
        """Return whether the figures after ``step`` steps were not told yet."""
        return step > self.last_step

    def told(self, step: int) -> None:
        """Remember that the figures after ``step`` steps were told."""
        self.last_step = step
        self._write()

    def is_new_evaluation(self, step: int) -> bool:
        """Return whether the evaluation after ``step`` steps was not told yet."""
        return step > self.last_evaluation

    def told_evaluation(self, step: int) -> None:
        """Remember that the evaluation after ``step`` steps was told."""
        self.last_evaluation = step
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        # Not flushed to the disk: it is written every other second, and worth little.
        with suppress(OSError):
            mine = {"run_id": self.run_id, "last_step": self.last_step, "last_evaluation": self.last_evaluation}
            content = _read(self._path) | {self._target: mine}
            temporary = self._path.with_name(f"{SINK_STATE_FILE}.{os.getpid()}.partial")
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
            os.replace(temporary, self._path)


def _read(path: Path) -> dict[str, Any]:
    """Return what all sinks of a run remember; nothing if the file is not there, or is none of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# Opening a sink whose service may never answer.

OPEN_TIMEOUT_S = 40.0
"""How long all services together may take to begin with a run; less than ranks wait for each other."""


def opened_within(seconds: float, make: Callable[[], MetricsSink], target: str, advice: str) -> MetricsSink:
    """Return what ``make`` returns. Blocks for ``seconds`` at most; a sink that is made later is closed at once.

    Args:
        seconds: How long it may take.
        make: Called in a thread of its own.
        target: What is opened, for the error.
        advice: What to do if it is not, likewise.

    Raises:
        ConfigurationError: It takes longer.
        Exception: What ``make`` raises.
    """
    made: list[MetricsSink] = []
    errors: list[Exception] = []
    lock, is_done, is_late = threading.Lock(), threading.Event(), threading.Event()

    def work() -> None:
        try:
            sink = make()
        except Exception as error:
            errors.append(error)
        else:
            with lock:
                made.append(sink)
            if is_late.is_set():
                with suppress(Exception):
                    sink.close()
        is_done.set()

    threading.Thread(target=work, name="lockstep-opening", daemon=True).start()
    is_done.wait(seconds)
    with lock:
        if not made and not errors:
            is_late.set()
            raise ConfigurationError(f"{target} has not answered for {seconds:.3g} s.\n{advice}")
    if errors:
        raise errors[0]
    return made[0]


# Opens the sinks of a run on rank zero, before it trains: what is wrong with one of them is an error on every rank.

PACKAGES = {"tensorboard": "tensorboard", "prometheus": "prometheus_client", "wandb": "wandb", "mlflow": "mlflow"}
"""What each kind of sink imports, and is installed by the extra of its name."""


@dataclass(frozen=True)
class Sinks:
    """The sinks of a run: none but on rank zero.

    Attributes:
        sinks: Each with its target.
    """

    sinks: tuple[tuple[Target, MetricsSink], ...] = ()

    @property
    def remarks(self) -> list[str]:
        """Lines that say where the figures are to be seen."""
        return [sink.where for _, sink in self.sinks]

    def close(self) -> None:
        """Close all of them; errors are of no account any more."""
        for _, sink in self.sinks:
            with suppress(Exception):
                sink.close()


def open_sinks(targets: Sequence[Target], facts: Callable[[], RunInfo], world: World) -> Sinks:
    """Open ``targets`` on rank zero.

    Collective: every rank. Blocks until rank zero has done so, which takes seconds, or most of a minute with a
    service that does not answer.

    Args:
        targets: The same on every rank.
        facts: Tells of the run; only called on rank zero.
        world: Of the run.

    Raises:
        ConfigurationError: On every rank: a sink's package is not installed, its port is taken, its folder cannot be
            written, or its service does not answer.
    """
    sinks, problem = Sinks(), None
    if world.is_rank_zero:
        try:
            sinks = open_here(targets, facts())
        except ConfigurationError as error:
            problem = str(error)
    problem = broadcast_object(problem, group=world.group, device=world.device)
    if problem is not None:
        raise ConfigurationError(problem)
    return sinks


def open_here(targets: Sequence[Target], facts: RunInfo) -> Sinks:
    """Open ``targets`` in this process: all of them or none.

    Raises:
        ConfigurationError: One of them cannot be; says why, and what to do.
    """
    for target in targets:
        require_package(target)
    sinks: list[tuple[Target, MetricsSink]] = []
    try:
        until_s = time.monotonic() + OPEN_TIMEOUT_S
        for target in targets:
            sinks.append((target, _open(target, facts, until_s)))
    except BaseException:
        Sinks(tuple(sinks)).close()
        raise
    return Sinks(tuple(sinks))


def require_package(target: Target) -> None:
    """Look whether what ``target`` needs is installed, without importing it.

    Raises:
        ConfigurationError: It is not; says how to install it.
    """
    package = PACKAGES.get(target.kind)
    if package is not None and find_spec(package) is None:
        raise ConfigurationError(
            f"{target} needs the package {package}, which is not installed on rank zero's machine.\n"
            f"pip install 'lockstep-torch[{target.kind}]'"
        )


def _open(target: Target, facts: RunInfo, until_s: float) -> MetricsSink:
    open_it = partial(_OPENERS[target.kind], target, facts)
    try:
        if target.kind not in _SERVICES:
            return open_it()
        return opened_within(max(0.0, until_s - time.monotonic()), open_it, str(target), _OTHERWISE[target.kind])
    except ConfigurationError:
        raise
    except OSError as error:
        raise ConfigurationError(
            f"{target} cannot be opened: {error.strerror or error}.\n{_OTHERWISE[target.kind]}"
        ) from error
    except Exception as error:  # of somebody else's library, which may raise anything
        first = (str(error) or "no message").splitlines()[0].rstrip(".")
        raise ConfigurationError(
            f"{target} cannot be opened: {type(error).__name__}: {first}.\n{_OTHERWISE[target.kind]}"
        ) from error


# Each imports its library, which takes its time, only when it is asked for.


def _tensorboard(target: Target, facts: RunInfo) -> MetricsSink:
    from lockstep.telemetry.sinks.tensorboard import TensorBoard

    return TensorBoard(Path(target.place).expanduser(), facts)


def _prometheus(target: Target, facts: RunInfo) -> MetricsSink:
    from lockstep.telemetry.sinks.prometheus import Prometheus

    return Prometheus(*target.address, facts)


def _wandb(target: Target, facts: RunInfo) -> MetricsSink:
    from lockstep.telemetry.sinks.wandb_run import WandbRun

    return WandbRun(target.place, facts, SinkState(str(target), facts))


def _mlflow(target: Target, facts: RunInfo) -> MetricsSink:
    from lockstep.telemetry.sinks.mlflow_run import MlflowRun

    return MlflowRun(target.place, facts, SinkState(str(target), facts))


_OPENERS: dict[str, Callable[[Target, RunInfo], MetricsSink]] = {
    "tensorboard": _tensorboard,
    "prometheus": _prometheus,
    "wandb": _wandb,
    "mlflow": _mlflow,
}

_SERVICES = ("wandb", "mlflow")
"""Those that somebody else has to answer for."""

_OTHERWISE = {
    "tensorboard": "Name another folder in log_to.",
    "prometheus": "Name another port in log_to, or 0 for any that is free.",
    "wandb": "Run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later; or leave it out of log_to.",
    "mlflow": "Look whether MLflow can be reached there, or leave it out of log_to.",
}
