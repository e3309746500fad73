"""What to do next, and what was found: decided from the entries of a journal alone, so that it can go on after a crash.

[Note: the journal]
All that is measured is an entry: what memory a micro-batch needed, the recorded run, the rates of a round, a change
that failed. `Search` takes them in their order and says what to do next. It measures nothing and knows no clock, so
after the processes have died it is made anew from the same entries, and goes on where it was, without what killed them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from lockstep.study.common import Spread
from lockstep.study.tune.ask import Ask
from lockstep.study.tune.candidates import STAGES, Candidate, Known, Stage, can_be_had, stage
from lockstep.study.tune.climb import Climb
from lockstep.study.tune.effects import Effect, effect_of
from lockstep.study.tune.judge import FEWEST_ROUNDS, NOW
from lockstep.study.tune.open_stage import OpenStage, Result
from lockstep.study.tune.values import Values, changed, differences, num_shares, value_of

ADVICE, AGAIN, TOGETHER = "advice", "advice, again", "all together"
ALL_STAGES = (ADVICE, AGAIN, *STAGES, TOGETHER)

Entry = Mapping[str, Any]
Action = dict[str, Any]


class Search:
    """Takes entries and says what to do next; see [Note: the journal]. Call `next` before each `record`.

    Attributes:
        start: The settings to begin with, cut into so small micro-batches that they fit.
        base: The fastest so far.
        results: Of all changes that were tried.
        skips: Of each stage in which there was nothing to try, why.
        total: How many times as fast all of it is together; None if that was not measured.
        is_out_of_time: Whether there was more to try.
        split_layers: Kinds of layer whose result depends on how a batch is divided.
        largest: Samples of the largest micro-batch that fits; None if it was not looked for to the end.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.start: Values = dict(ask.start)
        self.base: Values = dict(ask.start)
        self.results: list[Result] = []
        self.skips: list[tuple[str, str]] = []
        self.total: Spread | None = None
        self.baseline: Entry | None = None
        self.split_layers: tuple[str, ...] = ()
        self.climb = Climb(self._share, None if ask.on_cuda else ask.limit_bytes)
        self._looks_for_memory = "reproducible" not in ask.start and "shares" not in ask.start
        self._queue: deque[str] = deque(ALL_STAGES)
        self._again: list[Candidate] = []
        self._open: OpenStage | None = None
        self._is_alone = self.is_out_of_time = False
        self._now_s = 0.0

    # --- what to do -------------------------------------------------------------------------------------------------

    def next(self) -> Action:
        """Return what to do: ``probe`` a size, record a ``baseline``, a round of a ``race``, or nothing (``done``)."""
        if self._looks_for_memory:
            size = self.climb.next()
            if size is not None:
                return {"do": "probe", "size": size, "base": self.start}
            self._looks_for_memory = False
            self._cut_to_fit()
        if self.baseline is None:
            return {"do": "baseline", "base": self.start}
        while True:
            if self._open is None and not self._open_next():
                return {"do": "done"}
            assert self._open is not None
            running = self._open.running
            if running:
                return self._race(self._open, running)
            self._close()

    def overdue(self, elapsed_s: float) -> Entry | None:
        """Return the entry that ends a stage which has had its time, or all of them; None if there is time left."""
        if self._looks_for_memory and self.climb.peaks and elapsed_s > 0.4 * self.ask.seconds:
            return {"kind": "enough"}  # to know that the rest fits, too, takes longer than it is worth
        if self._open is None:
            return None
        last_s = 0.97 * self.ask.seconds - (0.0 if self._open.stage.name == TOGETHER else self.ask.reserve_s)
        if elapsed_s > last_s:
            return {"kind": "end", "rest": True}
        if len(self._open.rounds) < FEWEST_ROUNDS:  # fewer stages to their end are worth more than all without one
            return None
        share_s = 2 * (last_s - self._open.began_at_s) / (1 + len(self._queue))
        return {"kind": "end", "rest": False} if elapsed_s > self._open.began_at_s + share_s else None

    def under_way(self) -> tuple[str, int, int]:
        """Return the name of what is being tried, how many stages are over, and how many there are."""
        over = len(ALL_STAGES) - len(self._queue) - (self._open is not None)
        return self._open.stage.name if self._open else "measuring", over, len(ALL_STAGES)

    # --- what was found ---------------------------------------------------------------------------------------------

    def record(self, entry: Entry) -> None:
        """Take an entry."""
        self._now_s = max(self._now_s, entry.get("at", 0.0))
        kind = entry["kind"]
        if kind == "probe":
            self.climb.record(entry["size"], entry["peak_bytes"])
        elif kind == "enough":
            self._looks_for_memory = False
            if self.climb.too_large is not None:
                self._cut_to_fit()
        elif kind == "layers":
            self.split_layers = tuple(entry["split"])
        elif kind == "baseline":
            self.baseline = entry
        elif kind == "too large":
            self.climb.record(entry["size"], None)
            self._cut_to_fit()
            self.baseline, self._open = None, None
            self._queue = deque(ALL_STAGES)
        elif kind == "alone":
            self._is_alone = True
        elif self._open is not None and kind == "round":
            self._open.rounds.append(entry["rates"])
        elif self._open is not None and kind == "lost":
            self._open.lost[entry["name"]] = entry["why"]
        elif self._open is not None and kind == "end":
            self.is_out_of_time |= entry["rest"]
            self._close()

    def finish(self) -> None:
        """Take what there is as the result: time was up, or somebody did not want to wait any longer."""
        if self.next()["do"] == "done":
            return
        self.is_out_of_time = True
        if self._open is not None:
            self._close()

    @property
    def largest(self) -> int | None:
        """Samples of the largest micro-batch that fits; None if it was not looked for to the end."""
        return self.climb.largest if self.climb.next() is None else None

    @property
    def untried_size(self) -> int | None:
        """The size of the micro-batches, if it was not tried whether they fit, and smaller ones were found to."""
        size = self._share // value_of(self.start, "accumulate")
        return size if self.climb.largest is not None and self.climb.largest < size else None

    @property
    def _share(self) -> int:
        return self.ask.global_batch_size // num_shares(self.ask.start, self.ask.num_devices)

    def _cut_to_fit(self) -> None:
        """Begin with the largest micro-batch that fits, if the one that was asked for does not."""
        largest = self.climb.largest
        if largest is not None and self._share // value_of(self.start, "accumulate") > largest:
            self.start = self.base = changed(self.start, {"accumulate": self._share // largest})

    @property
    def _known(self) -> Known:
        baseline = self.baseline or {}
        return Known(
            num_devices=self.ask.num_devices,
            on_cuda=self.ask.on_cuda,
            num_cores=self.ask.num_cores,
            global_batch_size=self.ask.global_batch_size,
            strategies=self.ask.strategies,
            wait_share=baseline.get("wait_share"),
            gradient_bytes=baseline.get("gradient_bytes"),
            largest=self.largest,
            bytes_of=self.climb.bytes_of,
            limit_bytes=self.ask.limit_bytes,
        )

    def _open_next(self) -> bool:
        """Open the next stage that has something to try; return whether there is one."""
        while self._queue:
            name = self._queue.popleft()
            if self.is_out_of_time and name != TOGETHER:
                continue
            found, base = self._make(name), self.start if name == TOGETHER else self.base
            if found.skipped:
                self.skips.append((name, found.skipped))
            if found.candidates:
                self._open = OpenStage(found, base, self._now_s)
                return True
        return False

    def _make(self, name: str) -> Stage:
        if name == ADVICE:
            advice = (self.baseline or {}).get("advice", [])
            tried: dict[str, Candidate] = {}
            for each in advice:
                if each["changes"] and can_be_had(self.base, each["changes"]):
                    candidate = Candidate(each["changes"], each["gain"], each["cause"])
                    tried.setdefault(candidate.name, candidate)
            return Stage(name, tuple(tried.values()))
        if name == AGAIN:
            again, self._again = tuple(self._again), []
            return Stage(name, again)
        if name == TOGETHER:
            found = differences(self.start, self.base)
            return Stage(name, (Candidate(found),) if found else ())
        return stage(name, self.base, self._known)

    def _race(self, now: OpenStage, running: list[Candidate]) -> Action:
        return {
            "do": "race",
            "stage": now.stage.name,
            "round": len(now.rounds),
            "alone": self._is_alone or not self._fit_beside(1 + len(running)),
            "contenders": {NOW: now.base, **{each.name: changed(now.base, each.changes) for each in running}},
        }

    def _fit_beside(self, count: int) -> bool:
        """Return whether so many contenders are expected to fit into memory beside each other."""
        needed = self.climb.bytes_of(self.climb.largest) if self.climb.largest else None
        return needed is None or self.ask.limit_bytes is None or count * needed <= self.ask.limit_bytes

    def _close(self) -> None:
        """Judge the open stage, and go on with the best of it."""
        now, self._open = self._open, None
        assert now is not None
        effects = {each.name: self._effect(now, each) for each in now.stage.candidates}
        results, best, others = now.judge(effects, self._forbidden)
        self.results += results
        if now.stage.name == TOGETHER:
            self._conclude(self.results[-1])
            return
        if best is not None:
            self.base = changed(now.base, best.changes)
        if now.stage.name in (ADVICE, AGAIN):
            self._again = others
            if self._again and now.stage.name == AGAIN:
                self._queue.appendleft(AGAIN)

    def _conclude(self, result: Result) -> None:
        """Take what was found only if it is a gain as a whole, too; without enough rounds, believe the stages."""
        if result.num_rounds < FEWEST_ROUNDS:
            return
        self.total = result.ratio
        if not result.kept:
            self.base = dict(self.start)

    def _effect(self, now: OpenStage, candidate: Candidate) -> Effect:
        after = changed(now.base, candidate.changes)
        return effect_of(now.base, after, num_devices=self.ask.num_devices, split_layers=self.split_layers)

    def _forbidden(self, effect: Effect) -> str:
        """Return why a change with this effect is not taken; nothing if it is."""
        if effect is Effect.RUN:
            return "offered: it is another training run"
        if effect is Effect.ARITHMETIC and not self.ask.allow_precision:
            return "offered: taken with --allow-precision"
        if effect is Effect.DIVISION and not self.ask.allow_division:
            return f"offered: {' and '.join(self.split_layers)} would see another division; --allow-division takes it"
        return ""
