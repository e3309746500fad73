"""What ``log_to`` asks for, as data: sinks by name, each with its place, such as ``tensorboard:runs/digits``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from lockstep.errors import ConfigurationError

FORMS = {
    "tensorboard": "tensorboard:DIR",
    "prometheus": "prometheus:[HOST:]PORT",
    "wandb": "wandb:[ENTITY/]PROJECT",
    "mlflow": "mlflow:[URI]",
    "jsonl": "jsonl:FILE",
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
