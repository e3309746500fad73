"""Records as `fit` writes them, with planted causes, for the tests of the report."""

import json

START = 1_700_000_000.0
PARTS = {"data_wait_s": 0.001, "forward_s": 0.003, "backward_s": 0.005, "exposed_s": 0.001, "optimizer_s": 0.001}


def step_line(number, time=None, **changes):
    """Return the line of a step; what it is made of adds up to `total_s`."""
    parts = {**PARTS, **{name: value for name, value in changes.items() if name in PARTS}}
    total_s = sum(value or 0.0 for value in parts.values())
    line = {
        "kind": "step",
        "step": number,
        "num_steps": 1,
        "epoch": None,
        "time": START + number * 0.011 if time is None else time,
        "interval_s": total_s,
        "total_s": total_s,
        "slowest_s": total_s,
        "slowest_step": number,
        "copy_s": None,
        "hidden_s": None,
        "loss": 2.0 / (number + 1),
        "learning_rate": 0.1,
        "grad_norm": None,
        "samples": 64,
        "samples_per_s": 64 / total_s,
        **parts,
    }
    return {**line, **{name: value for name, value in changes.items() if name not in PARTS}}


def timeline_line(number, time, *, own_s=0.009, wait_s=0.001, buckets=()):
    """Return a timeline: forward until a third of its own work, then backward, and waiting at the end of it."""
    forward_s = own_s / 3
    return {
        "kind": "timeline",
        "step": number,
        "time": time,
        "spans": [["forward", 0.0, forward_s], ["backward", forward_s, own_s + wait_s]],
        "buckets": [list(bucket) for bucket in buckets],
        "waited_from": own_s,
        "waited_until": own_s + wait_s,
    }


def event_line(event, text, step=10, seconds=None):
    """Return the line of an event."""
    time = START + step * 0.011
    return {"kind": "event", "event": event, "step": step, "time": time, "seconds": seconds, "text": text}


MACHINE = {"kind": "machine", "time": START, "rss_bytes": 3e8, "rss_peak_bytes": 4e8, "cpu_percent": 95.0, "load": 1.0}


def session(num_ranks=2, **changes):
    """Return a session of ``run.json``."""
    return {
        "run": "r",
        "began_at": START,
        "task": "digits",
        "command": "lockstep train digits.py --devices 2",
        "working_directory": "/somewhere",
        "settings": {"strategy": "ddp", "compression": None, "workers": 0, "accumulate": 1},
        "global_batch_size": 64,
        "gradient_bytes": 2**20,
        "workers": 0,
        "ranks": [{"host": "here"}] * num_ranks,
        "provenance": {"when": "today", "versions": {"torch": "2"}, "machine": {"cores": "8"}, "commits": {}},
        **changes,
    }


def write_run(folder, ranks, sessions=None):
    """Write a record: the lines of each rank, after a line that says whose they are."""
    folder.mkdir(exist_ok=True)
    sessions = [session(len(ranks))] if sessions is None else sessions
    (folder / "run.json").write_text(json.dumps({"version": 1, "sessions": sessions}))
    for rank, lines in enumerate(ranks):
        start = {"kind": "start", "run": "r", "rank": rank, "host": "here", "pid": 1, "device": "cpu", "time": START}
        text = "\n".join(json.dumps(line) for line in [{**start, "first_step": 0}, *lines])
        (folder / f"rank-{rank}.jsonl").write_text(text + "\n")
    return folder


def steps(count=30, **changes):
    """Return the lines of some steps."""
    return [step_line(number, **changes) for number in range(count)]
