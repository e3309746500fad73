"""The sinks that ``log_to`` asks for: how they are named, and opened on rank zero before it trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from urllib.parse import urlsplit

from lockstep.activity import one_line
from lockstep.comm.collectives import broadcast_object
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.telemetry.sinks.base import MetricsSink, RunInfo, SinkState


@dataclass(frozen=True)
class Kind:
    """A kind of sink.

    Attributes:
        form: How one is asked for.
        package: What its module imports; the extra of the sink's name installs it.
        sink: Its class, by name, as its module imports its library, which takes its time, and may not be installed.
        advice: What to do if one cannot be opened.
        is_service: Whether somebody else has to answer for it.
    """

    form: str
    package: str
    sink: str
    advice: str
    is_service: bool = False


_SINKS = "lockstep.telemetry.sinks"
KINDS = {
    "tensorboard": Kind(
        "tensorboard:DIR", "tensorboard", f"{_SINKS}.tensorboard:TensorBoard", "Name another folder in log_to."
    ),
    "prometheus": Kind(
        "prometheus:[HOST:]PORT",
        "prometheus_client",
        f"{_SINKS}.prometheus:Prometheus",
        "Name another port in log_to, or 0 for any that is free.",
    ),
    "wandb": Kind(
        "wandb:[ENTITY/]PROJECT",
        "wandb",
        f"{_SINKS}.wandb_run:WandbRun",
        "Run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later; or leave it out of log_to.",
        is_service=True,
    ),
    "mlflow": Kind(
        "mlflow:[URI]",
        "mlflow",
        f"{_SINKS}.mlflow_run:MlflowRun",
        "Check whether MLflow can be reached there, or leave it out of log_to.",
        is_service=True,
    ),
}

LOOPBACK = "127.0.0.1"

# --- what ``log_to`` asks for, as data --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """One sink.

    Attributes:
        kind: Which of `KINDS`.
        place: What follows the colon.
    """

    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of one for Prometheus. Raises ``ValueError`` if there is no port at its end."""
        host, _, port = self.place.rpartition(":")
        if not (port.isascii() and port.isdecimal()):
            raise ValueError(self.place)
        return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


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
    if kind not in KINDS:
        *most, last = (each.form for each in KINDS.values())
        forms = f"{', '.join(most)} or {last}"
        raise ConfigurationError(f"log_to={text!r} names no sink that there is.\nGive {forms}.")
    target = Target(kind, place)
    if problem := _problem(target):
        raise ConfigurationError(f"log_to={text!r} {problem}.\nGive {KINDS[kind].form}.")
    if kind == "mlflow" and _has_password(place):
        raise ConfigurationError(
            "The URI of mlflow in log_to has a password, which would stay in the records of the run.\n"
            "Set MLFLOW_TRACKING_URI to it, and give mlflow: without one."
        )
    return target


def _problem(target: Target) -> str | None:
    """Return what is wrong with the place of ``target``, if anything is."""
    if not target.place and target.kind != "mlflow":  # whose own environment variables name a place
        return "does not say where to"
    if target.kind == "prometheus":
        try:
            return None if target.address[1] < 2**16 else f"has a port above {2**16 - 1}"
        except ValueError:
            return "has no port at its end"
    return "has more than one slash" if target.kind == "wandb" and target.place.count("/") > 1 else None


def _has_password(uri: str) -> bool:
    try:
        return urlsplit(uri).password is not None
    except ValueError:
        return False


# --- opening them -----------------------------------------------------------------------------------------------------

# How long all services together may take to begin with a run; less than ranks wait for each other.
OPEN_TIMEOUT_S = 40.0


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


def open_here(targets: Sequence[Target], run: RunInfo) -> list[MetricsSink]:
    """Open ``targets`` in this process: all of them or none.

    Raises:
        ConfigurationError: One of them cannot be; says why, and what to do.
    """
    for target in targets:
        require_package(target)
    sinks: list[MetricsSink] = []
    with ExitStack() as undo:
        until_s = time.monotonic() + OPEN_TIMEOUT_S
        for target in targets:
            sinks.append(_open(target, run, until_s))
            undo.callback(_close, sinks[-1])
        undo.pop_all()
    return sinks


def require_package(target: Target) -> None:
    """Check that what ``target`` needs is installed, without importing it.

    Raises:
        ConfigurationError: It is not; says how to install it.
    """
    package = KINDS[target.kind].package
    if find_spec(package) is None:
        raise ConfigurationError(
            f"{target} needs the package {package}, which is not installed on rank zero's machine.\n"
            f"pip install 'lockstep-torch[{target.kind}]'"
        )


def _open(target: Target, run: RunInfo, until_s: float) -> MetricsSink:
    kind, make = KINDS[target.kind], partial(_make, target, run)
    try:
        if kind.is_service:
            return opened_within(max(0.0, until_s - time.monotonic()), make, str(target), kind.advice)
        return make()
    except ConfigurationError:
        raise
    except Exception as error:  # of somebody else's library, which may raise anything
        reason = error.strerror if isinstance(error, OSError) else None
        reason = reason or one_line(error).rstrip(".")
        raise ConfigurationError(f"{target} cannot be opened: {reason}.\n{kind.advice}") from error


def _make(target: Target, run: RunInfo) -> MetricsSink:
    make: Callable[..., MetricsSink] = resolve_name(KINDS[target.kind].sink)
    if target.kind == "tensorboard":
        return make(Path(target.place).expanduser(), run)
    if target.kind == "prometheus":
        return make(*target.address, run)
    return make(target.place, run, SinkState(str(target), run))


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
    opening: Future[MetricsSink] = Future()

    def work() -> None:
        try:
            opening.set_result(make())
        except Exception as error:
            opening.set_exception(error)

    # A daemon, unlike the threads of an executor: a service that never answers must not keep the process from ending.
    threading.Thread(target=work, name="lockstep-opening", daemon=True).start()
    if not wait([opening], seconds).done:
        opening.add_done_callback(_close_late)
        raise ConfigurationError(f"{target} has not answered for {seconds:.3g} s.\n{advice}")
    return opening.result()


def _close_late(opening: Future[MetricsSink]) -> None:
    if opening.exception() is None:
        _close(opening.result())


def _close(sink: MetricsSink) -> None:
    with suppress(Exception):  # there is an error already, which says why
        sink.close()
