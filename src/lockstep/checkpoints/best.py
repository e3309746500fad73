"""What the best checkpoint is. Standard library only, as settings are read before torch is imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import ConfigurationError


@dataclass(frozen=True)
class Monitor:
    """The metric by which evaluations are compared.

    Attributes:
        name: Of the metric.
        sign: 1 if less is better, -1 if more is.
    """

    name: str
    sign: int

    @classmethod
    def of(cls, spec: bool | str) -> Monitor:
        """Read ``loss`` or ``accuracy:max``; True is the loss.

        Raises:
            ConfigurationError: It is none of these.
        """
        name, _, mode = ("loss" if isinstance(spec, bool) else spec).partition(":")
        if not name or mode not in ("", "min", "max"):
            raise ConfigurationError(
                f"{spec!r} is not a metric.\nGive its name, such as loss, or accuracy:max if more of it is better."
            )
        return cls(name, -1 if mode == "max" else 1)

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return what is less for a better evaluation; infinite for NaN.

        Raises:
            ConfigurationError: The metric is not in ``metrics``.
        """
        if self.name not in metrics:
            names = ", ".join(metrics)
            raise ConfigurationError(f"The evaluation has no metric {self.name!r}.\nName one of those it has: {names}.")
        value = self.sign * metrics[self.name]
        return math.inf if math.isnan(value) else value
