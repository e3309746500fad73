"""The sinks that ``log_to`` asks for: how they are named, and opened on rank zero before it trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from urllib.parse import urlsplit

from lockstep.comm.collectives import broadcast_object
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.telemetry.sinks.base import MetricsSink, RunInfo, SinkState

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
    open_it = partial(_make, target, facts)
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


_SINKS = {
    "tensorboard": "lockstep.telemetry.sinks.tensorboard:TensorBoard",
    "prometheus": "lockstep.telemetry.sinks.prometheus:Prometheus",
    "wandb": "lockstep.telemetry.sinks.wandb_run:WandbRun",
    "mlflow": "lockstep.telemetry.sinks.mlflow_run:MlflowRun",
}


def _make(target: Target, facts: RunInfo) -> MetricsSink:
    # By name, as each module imports its library, which takes its time, and may not be installed.
    make: Callable[..., MetricsSink] = resolve_name(_SINKS[target.kind])
    if target.kind == "tensorboard":
        return make(Path(target.place).expanduser(), facts)
    if target.kind == "prometheus":
        return make(*target.address, facts)
    return make(target.place, facts, SinkState(str(target), facts))


_SERVICES = ("wandb", "mlflow")
"""Those that somebody else has to answer for."""

_OTHERWISE = {
    "tensorboard": "Name another folder in log_to.",
    "prometheus": "Name another port in log_to, or 0 for any that is free.",
    "wandb": "Run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later; or leave it out of log_to.",
    "mlflow": "Look whether MLflow can be reached there, or leave it out of log_to.",
}
