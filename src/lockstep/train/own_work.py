"""When a rank's own work of a step is done, for engines that do not say so; see telemetry/stragglers.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.variable import Variable

from lockstep import progress
from lockstep.train.stopwatch import Mark, Stopwatch


@contextmanager
def own_work_told(loss: Tensor, watch: Stopwatch) -> Iterator[None]:
    """Within, ``loss`` is differentiated by torch's engine: tell `progress` when this rank was done, and when all were.

    What autograd calls when a backward is over it calls in the order in which that was asked for. The engine asks when
    its last bucket leaves, to wait for all of them; here it is asked for when backward begins, so that is before the
    wait. Does nothing if nobody wants to know.
    """
    waits = progress.now.waits
    if waits is None:
        yield
        return
    computed: list[Mark] = []

    def on_computed() -> None:
        computed.append(watch.mark())

    def on_begin(_gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(on_computed)

    handle = loss.register_hook(on_begin)
    try:
        yield
    finally:
        handle.remove()
    if computed:
        waits.append((computed[0], watch.mark()))


def tell_waits_apart(watch: Stopwatch) -> None:
    """Tell `progress` that this rank's own work is known, as what it waits for has a lap of its own or is counted."""
    if progress.now.waits is not None:
        now = watch.mark()
        progress.now.waits.append((now, now))


@contextmanager
def own_work_unknown(watch: Stopwatch) -> Iterator[None]:
    """Within, this rank works and waits in turns that nobody can tell apart: all of it may have been waiting."""
    waits = progress.now.waits
    began = None if waits is None else watch.mark()
    yield
    if waits is not None:
        waits.append((began, watch.mark()))
