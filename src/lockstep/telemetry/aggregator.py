"""From the steps of each rank to one snapshot of all, made on rank zero beside training, for displays and sinks."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from lockstep.comm.store import StatusKeys
from lockstep.telemetry.metrics import EventFigures, RankFigures, Snapshot, SnapshotSink
from lockstep.telemetry.run_record import MACHINE_FIGURES, RecordedStep, StepSeconds, guarded

# --- what one rank measures -------------------------------------------------------------------------------------------


class Sums:
    """Sums of steps; each part over the steps that knew it."""

    def __init__(self) -> None:
        self.num_steps = self.num_samples = self.num_counted_samples = 0
        self.slowest_s = self.seconds = self.num_counted = 0.0
        self._sums = dict.fromkeys(StepSeconds._fields, 0.0)
        self._counts = dict.fromkeys(StepSeconds._fields, 0)

    def add(self, step: RecordedStep, took: StepSeconds) -> None:
        """Add a step."""
        self.num_steps += 1
        self.num_samples += step.samples
        if step.counted is not None:
            self.num_counted += float(step.counted)
            self.num_counted_samples += step.samples
        self.seconds += took.total_s if step.interval_s is None else step.interval_s
        self.slowest_s = max(self.slowest_s, took.total_s)
        for name, value in took._asdict().items():
            if value is not None:
                self._sums[name] += value
                self._counts[name] += 1

    def means(self) -> dict[str, Any]:
        """Return the means by the names of `RankFigures`; empty if there was no step."""
        if not self.num_steps:
            return {}
        means = {name: self._sums[name] / count if count else None for name, count in self._counts.items()}
        return {"step_s": means.pop("total_s"), "slowest_s": self.slowest_s, **means}

    def rates(self) -> dict[str, float]:
        """Return the rates by the names of `Snapshot`; empty if there was no step."""
        if not (self.seconds and self.num_samples):
            return {}
        rates = {"samples_per_s": self.num_samples / self.seconds}
        # The loss of not every step is copied from the device: the others count as the known ones do.
        if self.num_counted_samples:
            rates["tokens_per_s"] = self.num_counted / self.num_counted_samples * rates["samples_per_s"]
        return rates


class RankMetrics:
    """Takes what this rank measures; used by one thread.

    Args:
        rank: Of this process.
        host: Its machine.
        device: Where it computes.
        first_step: Steps done before.
    """

    def __init__(self, rank: int, *, host: str, device: str, first_step: int = 0) -> None:
        self.rank = rank
        self.num_done = first_step
        self._who: dict[str, Any] = {"rank": rank, "host": host, "device": device}
        # Since the figures were read before; and over all steps but the first.
        self._new, self._whole, self._num_steps = Sums(), Sums(), 0
        self._events: list[EventFigures] = []
        self._means: dict[str, Any] = {}
        self._machine: dict[str, Any] = {}
        self._sampled_at = first_step  # steps done by the line before
        self._step_sent: float | None = None
        self._last: dict[str, float | None] = {}

    def add_step(self, step: RecordedStep, took: StepSeconds) -> None:
        """Take a step of this rank."""
        self.num_done = step.number + 1
        self._num_steps += 1
        if self._num_steps == 2:  # the first allocates and compiles: it counts until there is another
            self._whole, self._new = Sums(), Sums()
        self._whole.add(step, took)
        self._new.add(step, took)
        if (loss := step.loss) is not None:
            norm = None if step.grad_norm is None else float(step.grad_norm)
            self._last |= {"loss": loss, "learning_rate": step.learning_rate, "grad_norm": norm}

    def add_event(self, line: Mapping[str, Any]) -> None:
        """Take a line of kind ``event``; ``metrics`` may be in it."""
        self._events.append(EventFigures(**{name: line[name] for name in line if name != "kind"}))

    def machine(self, line: Mapping[str, Any]) -> None:
        """Take a line of kind ``machine``."""
        before, self._machine = self._machine, {name: line.get(name) for name in MACHINE_FIGURES}
        sent, sent_before = self._machine["sent_bytes"], before.get("sent_bytes")
        if sent is not None and sent_before is not None and self.num_done > self._sampled_at:
            self._step_sent = (sent - sent_before) / (self.num_done - self._sampled_at)
        self._sampled_at = self.num_done

    def read(self) -> tuple[RankFigures, dict[str, Any]]:
        """Return the figures since they were read before, and what they add to a `Snapshot`, by its names."""
        new, self._new = self._new, Sums()
        events, self._events = self._events, []
        # A rank that evaluates or saves keeps the times and rates of its last steps, with 0 as their number.
        self._means = new.means() or self._means
        self._last |= new.rates()
        who = {**self._who, "step": self.num_done, "num_steps": new.num_steps, "step_sent_bytes": self._step_sent}
        figures = RankFigures(**who, **self._means, **self._machine)
        return figures, {**self._last, "events": tuple(events)}

    def whole_run(self) -> RankFigures:
        """Return the means over all steps but the first; over that if there is no other."""
        return RankFigures(**self._who, step=self.num_done, num_steps=self._whole.num_steps, **self._whole.means())


def decode(note: Mapping[str, Any]) -> RankFigures:
    """Return the figures of a rank that were posted as a dictionary.

    Raises:
        TypeError: They are none of ours.
    """
    figures = RankFigures(**note)
    # A text where a number belongs would fail much later, in the thread that draws the live view.
    for name, value in asdict(figures).items():
        kind = (
            str
            if name in ("host", "device", "link_peer")
            else int
            if name in ("rank", "step", "num_steps")
            else int | float
        )
        if not (isinstance(value, kind) or (value is None and kind is not int)):
            raise TypeError(f"{name} is {value!r}")
    return figures


def with_waits(ranks: Iterable[RankFigures]) -> tuple[RankFigures, ...]:
    """Return ``ranks`` with what each waited for its peers: what it was exposed longer than the one that was least.

    All ranks leave a reduction together, so the rank that comes last waits for the wire alone; see stragglers.py.
    """
    ranks = tuple(ranks)
    # Engines that do not measure what they wait for have no part in it, and keep None.
    least_s = min((each.exposed_s for each in ranks if each.exposed_s is not None), default=0.0)
    return tuple(each if each.exposed_s is None else replace(each, peers_s=each.exposed_s - least_s) for each in ranks)


# --- to displays and sinks, so that neither their slowness nor their errors reach training ----------------------------

# How long the end of a run waits for a sink.
CLOSE_S = 10.0


class SinkThread:
    """Calls a display or sink in a thread of its own. While it is busy snapshots are left out, but for their events.

    Args:
        sink: Gets no more snapshots once it has raised.
    """

    def __init__(self, sink: SnapshotSink) -> None:
        self._sink = sink
        # Not a queue: a service that is slow for a minute is to get the run as it is then, not sixty old snapshots.
        self._changed = threading.Condition()
        self._next: Snapshot | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="lockstep-sink", daemon=True)
        self._thread.start()

    def give(self, snapshot: Snapshot) -> None:
        """Hand on ``snapshot``. Does not block."""
        with self._changed:
            if self._next is not None:
                snapshot = replace(snapshot, events=self._next.events + snapshot.events)
            self._next = snapshot
            self._changed.notify()

    def close(self) -> None:
        """Let the sink finish. Blocks `CLOSE_S` at most: the thread is a daemon, and is left alone then."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        consequence = f"{type(self._sink).__name__} gets no more figures of this run"
        is_on = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._is_over)
                snapshot, self._next = self._next, None
            if snapshot is None:
                guarded(self._sink.close, consequence)
                return
            is_on = is_on and guarded(partial(self._sink.update, snapshot), consequence)


# --- one snapshot of all ranks ----------------------------------------------------------------------------------------


class Aggregator:
    """Posts this rank's figures; on rank zero, gathers those of all and hands a snapshot to each of ``deliveries``.

    Args:
        figures: Of this rank.
        keys: Where ranks post theirs.
        run: Has what stays the same from snapshot to snapshot.
        steps_per_epoch: None for a stream.
        num_skipped: Returns how many steps were skipped so far.
    """

    def __init__(
        self,
        figures: RankMetrics,
        keys: StatusKeys,
        run: Snapshot,
        *,
        steps_per_epoch: int | None = None,
        num_skipped: Callable[[], int] = lambda: 0,
    ) -> None:
        self._figures, self._keys, self._run = figures, keys, run
        self._steps_per_epoch, self._num_skipped = steps_per_epoch, num_skipped
        self.deliveries: list[SinkThread] = []
        self._num_posts = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._began_s = time.perf_counter()
        # Steps done when some were first seen done, and when that was: those before allocate and compile.
        self._first: tuple[int, float] | None = None
        self._first_step = figures.num_done
        self._event_counts: Counter[str] = Counter()
        self._evaluation: Mapping[str, float] = {}

    def beat(self, *, is_last: bool = False) -> None:
        """Post, and on rank zero gather and deliver. Blocks some seconds at most, if the store does not answer."""
        figures, of_run = self._figures.read()
        if figures.rank != 0:
            self._num_posts += 1
            self._keys.post([self._num_posts, asdict(figures)])
            return
        if not self.deliveries:
            return  # a run that is recorded and not shown: its figures are in the file
        for event in of_run["events"]:
            self._event_counts[event.event] += 1
            self._evaluation = event.metrics or self._evaluation
        snapshot = replace(
            self._run,
            time=time.time(),
            step=figures.step,
            epoch=figures.step / self._steps_per_epoch if self._steps_per_epoch else None,
            num_skipped_steps=self._num_skipped(),
            elapsed_s=time.perf_counter() - self._began_s,
            left_s=self._left_s(figures.step),
            ranks=with_waits((figures, *self._others())),
            event_counts=dict(self._event_counts),
            evaluation=self._evaluation,
            is_last=is_last,
            **of_run,
        )
        for delivery in self.deliveries:
            delivery.give(snapshot)

    def close(self) -> None:
        """Let everybody who was given snapshots finish."""
        for delivery in self.deliveries:
            delivery.close()

    def _left_s(self, step: int) -> float | None:
        """Return how long the run will take yet, pauses and all, at the pace since its first steps; None before."""
        now_s = time.perf_counter()
        if self._first is None and step > self._first_step:
            self._first = step, now_s
        if self._first is None or step == self._first[0]:
            return None
        return (now_s - self._first[1]) / (step - self._first[0]) * (self._run.num_steps - step)

    def _others(self) -> list[RankFigures]:
        """Return what the other ranks posted last, and how long ago that was seen to change."""
        now_s = time.monotonic()
        found = []
        for rank, note in sorted(self._keys.read().items()):
            try:
                number, values = note
                figures = decode(values)
            except (TypeError, ValueError):  # whoever reaches the store can write there: one wrong note stops nothing
                continue
            if rank not in self._seen or number != self._seen[rank][0]:
                self._seen[rank] = number, now_s
            if figures.rank == rank:
                found.append(replace(figures, age_s=now_s - self._seen[rank][1]))
        return found
