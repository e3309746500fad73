"""Aggregates the steps of all ranks into snapshots on rank zero, for displays and sinks, in a thread of its own."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

from lockstep.comm.store import StatusKeys
from lockstep.telemetry.metrics import RankFigures, Snapshot, SnapshotSink
from lockstep.telemetry.record import Event, guarded
from lockstep.telemetry.step_times import TIMES, StepMarks, StepTimes

# --- what one rank measures -------------------------------------------------------------------------------------------

# What a rank waited for others is only known with the figures of all.
_MEANS = tuple(name for name in TIMES if name != "peers_s")
_FIGURES = frozenset(each.name for each in fields(RankFigures))


class Sums:
    """Sums over steps; of each part over the steps in which it is known."""

    def __init__(self) -> None:
        self.num_steps = self.num_samples = self.num_counted_samples = 0
        self.slowest_s = self.seconds = self.num_counted = 0.0
        self._sums = dict.fromkeys(_MEANS, 0.0)
        self._counts = dict.fromkeys(_MEANS, 0)

    def add(self, step: StepMarks, took: StepTimes) -> None:
        """Add a step."""
        self.num_steps += 1
        self.num_samples += step.samples
        if step.counted is not None:
            self.num_counted += float(step.counted)
            self.num_counted_samples += step.samples
        self.seconds += took.total_s if step.interval_s is None else step.interval_s
        self.slowest_s = max(self.slowest_s, took.total_s)
        for name in _MEANS:
            if (value := getattr(took, name)) is not None:
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
        # Not every step's loss and count are copied from the device: the mean of the known ones is used.
        if self.num_counted_samples:
            rates["tokens_per_s"] = self.num_counted / self.num_counted_samples * rates["samples_per_s"]
        return rates


class RankMetrics:
    """The measurements of this rank; used by one thread.

    Args:
        rank: Of this process.
        host: Its machine.
        device: Its device.
        first_step: Number of steps done before.
    """

    def __init__(self, rank: int, *, host: str, device: str, first_step: int = 0) -> None:
        self.rank = rank
        self.num_done = first_step
        self._who: dict[str, Any] = {"rank": rank, "host": host, "device": device}
        # Since the last `read`, and over all steps but the first.
        self._new, self._whole, self._num_steps = Sums(), Sums(), 0
        self._events: list[Event] = []
        self._means: dict[str, Any] = {}
        self._machine: dict[str, Any] = {}
        self._sampled_at = first_step  # steps done at the last line
        self._step_sent: float | None = None
        self._last: dict[str, float | None] = {}

    def add_step(self, step: StepMarks, took: StepTimes) -> None:
        """Add a step of this rank."""
        self.num_done = step.number + 1
        self._num_steps += 1
        if self._num_steps == 2:  # the first step allocates and compiles, and counts only until there is another
            self._whole, self._new = Sums(), Sums()
        self._whole.add(step, took)
        self._new.add(step, took)
        if (loss := step.loss) is not None:
            norm = None if step.grad_norm is None else float(step.grad_norm)
            self._last |= {"loss": loss, "learning_rate": step.learning_rate, "grad_norm": norm}

    def add_event(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def machine(self, line: Mapping[str, Any]) -> None:
        """Set the figures of the machine to those of a line of kind ``machine``."""
        before, self._machine = self._machine, {name: line[name] for name in line if name in _FIGURES}
        sent, sent_before = self._machine.get("sent_bytes"), before.get("sent_bytes")
        if sent is not None and sent_before is not None and self.num_done > self._sampled_at:
            self._step_sent = (sent - sent_before) / (self.num_done - self._sampled_at)
        self._sampled_at = self.num_done

    def read(self) -> tuple[RankFigures, dict[str, Any]]:
        """Return the figures since the last call, and the fields that they add to a `Snapshot`."""
        new, self._new = self._new, Sums()
        events, self._events = self._events, []
        # While a rank evaluates or saves, it keeps the times and rates of its last steps; ``num_steps`` is 0.
        self._means = new.means() or self._means
        self._last |= new.rates()
        who = {**self._who, "step": self.num_done, "num_steps": new.num_steps, "step_sent_bytes": self._step_sent}
        figures = RankFigures(**who, **self._means, **self._machine)
        return figures, {**self._last, "events": tuple(events)}

    def whole_run(self) -> RankFigures:
        """Return the means over all steps without the first, unless it is the only one."""
        return RankFigures(**self._who, step=self.num_done, num_steps=self._whole.num_steps, **self._whole.means())


def decode(note: Mapping[str, Any]) -> RankFigures:
    """Return the figures that a rank posted as a dictionary.

    Raises:
        TypeError: A name or a type is wrong.
    """
    figures = RankFigures(**note)
    # Otherwise a text in place of a number would fail later, in the thread of the live view.
    for name, value in asdict(figures).items():
        kind = str if name in ("host", "device", "link_peer") else int | float
        if not isinstance(value, kind) and (value is not None or name in ("rank", "step", "num_steps")):
            raise TypeError(f"{name} is {value!r}")
    return figures


def with_waits(ranks: Iterable[RankFigures]) -> tuple[RankFigures, ...]:
    """Return ``ranks`` with ``peers_s``: by how much each waited longer than the rank that waited least.

    All ranks leave a reduction together, so the last rank waits only for the transfer; see stragglers.py.
    """
    ranks = tuple(ranks)
    # Ranks whose engine does not measure the waiting keep None.
    least_s = min((each.exposed_s for each in ranks if each.exposed_s is not None), default=0.0)
    return tuple(each if each.exposed_s is None else replace(each, peers_s=each.exposed_s - least_s) for each in ranks)


# --- displays and sinks, which must not delay or fail training --------------------------------------------------------

# Seconds that the end of a run waits for a sink.
CLOSE_S = 10.0


class SinkThread:
    """Calls a display or sink in a thread of its own. While it is busy, snapshots are dropped, but not their events.

    Args:
        sink: Gets no more snapshots after it has raised.
    """

    def __init__(self, sink: SnapshotSink) -> None:
        self._sink = sink
        # Not a queue: after a minute without an answer, a service gets the current snapshot, not sixty old ones.
        self._changed = threading.Condition()
        self._next: Snapshot | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="lockstep-sink", daemon=True)
        self._thread.start()

    def give(self, snapshot: Snapshot) -> None:
        """Pass on ``snapshot``. Does not block."""
        with self._changed:
            if self._next is not None:
                snapshot = replace(snapshot, events=self._next.events + snapshot.events)
            self._next = snapshot
            self._changed.notify()

    def close(self) -> None:
        """Close the sink. Blocks at most `CLOSE_S`; after that, the daemon thread is abandoned."""
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
                if is_on:
                    guarded(self._sink.close, consequence)
                else:
                    with suppress(Exception):  # its first error was reported
                        self._sink.close()
                return
            is_on = is_on and guarded(partial(self._sink.update, snapshot), consequence)


# --- one snapshot of all ranks ----------------------------------------------------------------------------------------


class Aggregator:
    """Posts this rank's figures. On rank zero, gathers those of all ranks, and gives a snapshot to ``deliveries``.

    Args:
        figures: Of this rank.
        keys: Where the ranks post their figures.
        run: A snapshot with the values that do not change.
        steps_per_epoch: None for a stream.
        num_skipped: Returns the number of steps skipped so far.
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
        # Number of steps, and time, when the first steps, which allocate and compile, were found to be done.
        self._first: tuple[int, float] | None = None
        self._first_step = figures.num_done
        self._event_counts: Counter[str] = Counter()
        self._evaluation: Mapping[str, float] = {}

    def beat(self, *, is_last: bool = False) -> None:
        """Post the figures; on rank zero, gather and deliver. Blocks some seconds if the store does not answer."""
        figures, of_run = self._figures.read()
        if figures.rank != 0:
            self._num_posts += 1
            self._keys.post([self._num_posts, asdict(figures)])
            return
        if not self.deliveries:
            return  # the run is only recorded
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
        """Close all displays and sinks."""
        for delivery in self.deliveries:
            delivery.close()

    def _left_s(self, step: int) -> float | None:
        """Return the remaining seconds at the mean pace since the first steps, including pauses; None before."""
        now_s = time.perf_counter()
        if self._first is None and step > self._first_step:
            self._first = step, now_s
        if self._first is None or step == self._first[0]:
            return None
        return (now_s - self._first[1]) / (step - self._first[0]) * (self._run.num_steps - step)

    def _others(self) -> list[RankFigures]:
        """Return the last figures of the other ranks, with their age."""
        now_s = time.monotonic()
        found = []
        for rank, note in sorted(self._keys.read().items()):
            try:
                number, values = note
                figures = decode(values)
            except (TypeError, ValueError):  # other programs can write to the store: a wrong note is ignored
                continue
            if rank not in self._seen or number != self._seen[rank][0]:
                self._seen[rank] = number, now_s
            if figures.rank == rank:
                found.append(replace(figures, age_s=now_s - self._seen[rank][1]))
        return found
