"""What a layer knows of the engine that trains it: whom to tell what comes next, and what a backward counts for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from torch import nn


class Event(IntEnum):
    """What a rank does next; the number travels."""

    NOTHING = 0  # this rank has no batch
    FORWARD = 1
    TRACKED_FORWARD = 2  # one that moves the running statistics
    BACKWARD = 3
    END_OF_FORWARD = 4  # a backward will come
    END = 5


class Engine(Protocol):
    """Trains the layer's model; see follow.py."""

    @property
    def is_open(self) -> bool:
        """Whether some rank may be without a batch, so that the others announce what they do."""

    @property
    def step(self) -> int:
        """The number of such steps so far."""

    @property
    def unit(self) -> float:
        """What this rank's gradients are multiplied by once backward is over, relative to those of the other ranks."""

    def announce(self, event: Event, layer: nn.Module, step: int) -> None:
        """Say that ``layer`` is about to exchange something. Collective: every rank. Blocks until complete.

        Args:
            event: What it is about to do.
            layer: The layer.
            step: What `step` was in the layer's forward.
        """


_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def engine_of(layer: nn.Module) -> Engine | None:
    """Return what trains ``layer``, if it is one of our engines."""
    reference = _engines.get(layer)
    return None if reference is None else reference()


def enter(engine: Engine, layers: Sequence[nn.Module]) -> None:
    """Have ``layers`` trained by ``engine`` from now on."""
    for layer in layers:
        _engines[layer] = weakref.ref(engine)
