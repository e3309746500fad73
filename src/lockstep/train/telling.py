"""Tells what a run has found out as soon as it is known: on the display, in the log and to whoever records it."""

from __future__ import annotations

from lockstep.train.log import Log
from lockstep.train.loop import Loop
from lockstep.train.progress import Display
from lockstep.train.record import Record
from lockstep.train.words import NUM_NAMED


class Telling:
    """Tells what a loop has found out, each thing once.

    Args:
        loop: That finds out.
        display: Of this rank.
        log: Of rank zero, if there is one.
        record: Of this rank.
    """

    def __init__(self, loop: Loop, display: Display, log: Log | None, record: Record) -> None:
        self._loop, self._display, self._log, self._record = loop, display, log, record
        self._num_caveats = self._num_skipped = self._num_not_finite = 0

    def tell(self) -> None:
        """Tell what is new."""
        self._tell_caveats()
        self._tell_skipped()
        for remark in self._loop.remarks:
            self._display.say(remark)
            self._record.event("remark", remark)
        self._loop.remarks.clear()

    def slow(self, text: str) -> None:
        """Tell of a rank that keeps the others waiting."""
        self._display.say(text)
        self._record.event("straggler", text)

    def _tell_caveats(self) -> None:
        """Say why the bits may differ after all."""
        for caveat in self._loop.caveats[self._num_caveats :]:
            self._display.say(f"the same bits cannot be promised: {caveat}")
        self._num_caveats = len(self._loop.caveats)

    def _tell_skipped(self) -> None:
        """Log the samples that could not be read, and the steps that were skipped; show the first few samples."""
        skipped = self._loop.bad_samples.skipped
        for number in range(self._num_skipped, len(skipped)):
            bad = skipped[number]
            if number < NUM_NAMED:
                self._display.say(f"step {bad.step + 1}  skipped {bad.name}")
                self._record.event("skipped", f"step {bad.step + 1}: sample left out: {bad.name}")
            if self._log is not None:
                self._log.skipped(bad)
        self._num_skipped = len(skipped)
        for found in self._loop.finite.found[self._num_not_finite :]:
            self._display.say(f"step {found.step + 1}  {found.done}  {found.headline}")
            self._record.event("skipped", f"step {found.step + 1}: {found.done}: {found.headline}")
            if self._log is not None:
                self._log.not_finite(found)
        self._num_not_finite = len(self._loop.finite.found)
