"""Snapshots and a run for the tests of sinks."""

from collections import Counter
from dataclasses import replace

from lockstep.telemetry.metrics import RankFigures, Snapshot
from lockstep.telemetry.record import Event
from lockstep.telemetry.sinks import RunInfo

CONFIG = {"strategy": "ddp", "seed": 3, "clip": 0.5, "quiet": True, "global_batch_size": 64, "version/torch": "2.13.0"}


def facts(**changes):
    return RunInfo(**{"name": "digits", "config": CONFIG, **changes})


def event(kind, step, *, seconds=None, metrics=None):
    return Event(event=kind, step=step, time=1e9 + step, seconds=seconds, text=f"{kind}!", metrics=metrics)


def snapshot(step, *events, **changes):
    """Return one of two ranks on a CPU; rank 1 works longer, so rank 0 waits for it."""
    ranks = tuple(
        RankFigures(
            rank=rank,
            host="here",
            device="cpu",
            age_s=0.5 * rank,
            step=step,
            num_steps=4,
            step_s=0.1,
            forward_s=0.02 + 0.02 * rank,
            backward_s=0.04,
            exposed_s=0.03 - 0.02 * rank,
            peers_s=0.02 - 0.02 * rank,
            data_wait_s=0.0,
            optimizer_s=0.01,
            rss_bytes=2**30,
            cpu_percent=150.0,
        )
        for rank in range(2)
    )
    fields = {
        "time": 1e9 + step,
        "step": step,
        "num_steps": 100,
        "loss": 4.0 / (step + 1),
        "learning_rate": 0.5,
        "samples_per_s": 640.0,
        "num_restarts": 1,
        "elapsed_s": 2.0,
        "ranks": ranks,
        "world_size": 2,
        "events": events,
    }
    return Snapshot(**{**fields, **changes})


def feed(sink, *snapshots):
    """Give a sink snapshots, with the counts of all events so far, and close it."""
    for each in counted(*snapshots):
        sink.update(each)
    sink.close()


def counted(*snapshots):
    """Yield the snapshots with the counts of all events so far, as the aggregator has them."""
    counts, evaluation = Counter(), {}
    for each in snapshots:
        for event in each.events:
            counts[event.event] += 1
            evaluation = event.metrics or evaluation
        yield replace(each, event_counts=dict(counts), evaluation=evaluation)
