"""The random numbers that a script draws for its updates, other than for data."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.loop.instrument import Instrument
from lockstep.study.verify.interventions import Watch
from lockstep.study.verify.script.trace import generator_states


class Draws:
    """Records from which generators a script draws between two updates, and with which state.

    Attributes:
        watch: Knows the names of the operations that draw, and replaces them by constants; only while it is entered.
        drawn: Since the newest update: by generator, a digest of its state before the first draw.
    """

    def __init__(self) -> None:
        self.watch = Watch(frozenset({"random"}))
        self.drawn: dict[str, bytes] = {}
        self._before: dict[str, bytes] | None = None  # the states since which draws count

    def arm(self, instrument: Instrument) -> None:
        """Install the hook: to seed a generator is no draw."""
        instrument.before(torch, "manual_seed", lambda *_: self.note())

    def turn_off(self, instrument: Instrument) -> None:
        """Replace all draws from the first batch or forward on."""
        instrument.enter_context(self.watch.generators())
        instrument.enter_context(self.watch)

    def begin(self) -> None:
        """Count what is drawn from here on, if that is not done already."""
        self.watch.active = True  # how weights and data sets are made stays random
        self._before = self._before or generator_states()

    def note(self, *, goes_on: bool = False) -> None:
        """Record what was drawn since `begin`, and go on or stop counting."""
        after = generator_states() if goes_on or self._before else {}
        for name, state in (self._before or {}).items():
            if after[name] != state:
                self.drawn.setdefault(name, state)
        self._before = after if goes_on else None

    @contextmanager
    def of_data(self) -> Iterator[None]:
        """Leave out what is drawn inside the block; afterwards, the script's draws count."""
        self.note()
        self.watch.active = True
        names = set(self.watch.seen["random"])
        try:
            yield
        finally:
            self.watch.seen["random"] = names
            self._before = generator_states()

    def forget(self) -> None:
        """Count nothing until `begin`."""
        self._before = None

    def update(self) -> dict[str, bytes]:
        """Return what was drawn for an update, and begin the next one."""
        drawn, self.drawn = self.drawn, {}
        return drawn
