"""Low-precision forward passes, and the scaling that keeps fp16 gradients from vanishing."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TypedDict

import torch

from lockstep.train.settings import Precision

_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context that a forward pass on ``device`` runs in; it holds for the calling thread only."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


class ScalerState(TypedDict):
    """What a `GradScaler` remembers from step to step."""

    scale: float
    num_good_steps: int


@dataclass
class GradScaler:
    """The factor on the loss that keeps fp16 gradients in range: halved after an overflow, doubled after a good while.

    It is a power of two, so it changes no digit of a gradient. It sees only whether the *global* gradient was finite,
    so all ranks hold the same factor.
    """

    scale: float = 2.0**16
    num_good_steps: int = 0
    growth_interval: int = 2000

    @property
    def is_smallest(self) -> bool:
        """Whether it cannot become smaller, so that an overflow has another cause."""
        return self.scale <= 1.0

    def update(self, *, finite: bool) -> None:
        """Take note of whether the gradient of a step was finite."""
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
            self.num_good_steps = 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.scale = min(self.scale * 2, 2.0**24)
            self.num_good_steps = 0

    def state_dict(self) -> ScalerState:
        """Return what a resumed run needs."""
        return {"scale": self.scale, "num_good_steps": self.num_good_steps}

    def load_state_dict(self, state: ScalerState) -> None:
        """Go on from ``state``."""
        self.scale, self.num_good_steps = state["scale"], state["num_good_steps"]
