"""What a layer tells ranks that have no batch: which of its collectives comes next.

Layers know nothing of who listens; see follow.py, which does. It enters itself here for the layers of a model as long
as a step lasts in which some rank may be without a batch.
"""

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


class Announcer(Protocol):
    """Tells ranks without a batch what comes next."""

    @property
    def step(self) -> int:
        """Which step is open."""

    def announce(self, event: Event, layer: nn.Module, step: int) -> None:
        """Say that ``layer`` is about to exchange something. Collective: every rank with a batch. Blocks.

        Args:
            event: What it is about to do.
            layer: The layer.
            step: What `step` was in the layer's forward.
        """


_announcers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Announcer]] = weakref.WeakKeyDictionary()


def announcer_of(layer: nn.Module) -> Announcer | None:
    """Return whom ``layer`` has to tell before it exchanges anything; None in ordinary steps."""
    reference = _announcers.get(layer) if _announcers else None
    return None if reference is None else reference()


def enter(announcer: Announcer, layers: Sequence[nn.Module]) -> None:
    """Have ``layers`` tell ``announcer``."""
    for layer in layers:
        _announcers[layer] = weakref.ref(announcer)


def leave(layers: Sequence[nn.Module]) -> None:
    """Have ``layers`` tell nobody."""
    for layer in layers:
        _announcers.pop(layer, None)
