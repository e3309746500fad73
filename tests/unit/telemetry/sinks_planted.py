"""Snapshots and a run for the tests of sinks."""

from collections import Counter
from dataclasses import dataclass, replace

from lockstep.telemetry.figures import RankFigures, Snapshot, with_waits
from lockstep.telemetry.record import Event
from lockstep.telemetry.sinks import RunInfo

CONFIG = {"strategy": "ddp", "seed": 3, "clip": 0.5, "quiet": True, "global_batch_size": 64, "version/torch": "2.13.0"}


@dataclass(frozen=True, kw_only=True)
class Planted(Snapshot):
    """A snapshot, and the events that come before it."""

    events: tuple[Event, ...] = ()


def facts(**changes):
    return RunInfo(**{"name": "digits", "config": CONFIG, **changes})


def event(kind, step, *, seconds=None, metrics=None):
    return Event(event=kind, step=step, time=1e9 + step, seconds=seconds, text=f"{kind}!", metrics=metrics)


def snapshot(step, *events, **changes):
    """Return one of two ranks on a CPU; rank 1 works longer, so rank 0 waits for it."""
    about = {"data_wait_s": 0.0, "backward_s": 0.04, "optimizer_s": 0.01, "rss_bytes": 2**30, "cpu_percent": 150.0}
    ranks = []
    for rank in range(2):
        values = {"age_s": 0.5 * rank, "step_s": 0.1, "forward_s": 0.02 + 0.02 * rank, "exposed_s": 0.03 - 0.02 * rank}
        values["own_s"] = values["step_s"] - values["exposed_s"]
        who = {"rank": rank, "host": "here", "device": "cpu", "step": step, "num_steps": 4}
        ranks.append(RankFigures(**who, values={**values, **about}))
    fields = {
        "time": 1e9 + step,
        "step": step,
        "num_steps": 100,
        "loss": 4.0 / (step + 1),
        "learning_rate": 0.5,
        "samples_per_s": 640.0,
        "num_restarts": 1,
        "elapsed_s": 2.0,
        "ranks": with_waits(ranks),
        "world_size": 2,
        "events": events,
    }
    return Planted(**{**fields, **changes})


def feed(sink, *snapshots):
    """Give a sink snapshots, with the counts of all events so far, and close it."""
    for each in counted(*snapshots):
        give(sink, each)
    sink.close()


def give(sink, snapshot):
    """Give a sink a snapshot, after its events."""
    for event in snapshot.events:
        sink.event(event)
    sink.update(snapshot)


def counted(*snapshots):
    """Yield the snapshots with the counts of all events so far, as the recorder has them."""
    counts, evaluation = Counter(), {}
    for each in snapshots:
        for event in each.events:
            counts[event.event] += 1
            evaluation = event.metrics or evaluation
        yield replace(each, event_counts=dict(counts), evaluation=evaluation)
