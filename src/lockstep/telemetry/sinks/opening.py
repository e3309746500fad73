"""Opens the sinks of a run on rank zero, before it trains: what is wrong with one of them is an error on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from lockstep.comm.collectives import broadcast_object
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.telemetry.sinks.facts import MetricsSink, RunFacts
from lockstep.telemetry.sinks.kept import Kept
from lockstep.telemetry.sinks.patience import PATIENCE_S, opened_within
from lockstep.telemetry.sinks.targets import Target

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


def open_sinks(targets: Sequence[Target], facts: Callable[[], RunFacts], world: World) -> Sinks:
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


def open_here(targets: Sequence[Target], facts: RunFacts) -> Sinks:
    """Open ``targets`` in this process: all of them or none.

    Raises:
        ConfigurationError: One of them cannot be; says why, and what to do.
    """
    for target in targets:
        require_package(target)
    sinks: list[tuple[Target, MetricsSink]] = []
    try:
        until_s = time.monotonic() + PATIENCE_S
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


def _open(target: Target, facts: RunFacts, until_s: float) -> MetricsSink:
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


def _tensorboard(target: Target, facts: RunFacts) -> MetricsSink:
    from lockstep.telemetry.sinks.tensorboard import TensorBoard

    return TensorBoard(Path(target.place).expanduser(), facts)


def _prometheus(target: Target, facts: RunFacts) -> MetricsSink:
    from lockstep.telemetry.sinks.prometheus import Prometheus

    return Prometheus(*target.address, facts)


def _json_lines(target: Target, facts: RunFacts) -> MetricsSink:
    from lockstep.telemetry.sinks.json_lines import JsonLines

    return JsonLines(Path(target.place).expanduser(), facts)


def _wandb(target: Target, facts: RunFacts) -> MetricsSink:
    from lockstep.telemetry.sinks.wandb_run import WandbRun

    return WandbRun(target.place, facts, Kept(str(target), facts))


def _mlflow(target: Target, facts: RunFacts) -> MetricsSink:
    from lockstep.telemetry.sinks.mlflow_run import MlflowRun

    return MlflowRun(target.place, facts, Kept(str(target), facts))


_OPENERS: dict[str, Callable[[Target, RunFacts], MetricsSink]] = {
    "tensorboard": _tensorboard,
    "prometheus": _prometheus,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "jsonl": _json_lines,
}

_SERVICES = ("wandb", "mlflow")
"""Those that somebody else has to answer for."""

_OTHERWISE = {
    "tensorboard": "Name another folder in log_to.",
    "prometheus": "Name another port in log_to, or 0 for any that is free.",
    "wandb": "Run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later; or leave it out of log_to.",
    "mlflow": "Look whether MLflow can be reached there, or leave it out of log_to.",
    "jsonl": "Name another file in log_to.",
}
