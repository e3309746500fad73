"""The names of everything that is recorded of a run. Files and dashboards depend on them: frozen by a test.

docs/metrics.md explains each in a table that is compared with this one.
"""

from __future__ import annotations

from typing import Literal

VERSION = 1
"""Grows when a name or a meaning changes, not when one is added."""

RUN_FILE = "run.json"
RANK_FILES = "rank-*.jsonl"

STEP = {
    "step": "number of the (first) step of the line, counted from 0 over all epochs",
    "num_steps": "steps that the line stands for; times are their means",
    "epoch": "passes over the data set before the step; null for a stream",
    "time": "when the step began, Unix time of this rank's host",
    "interval_s": "from its beginning to that of the next step, or to what came between them",
    "total_s": "the whole step",
    "slowest_s": "the longest of the steps that the line stands for",
    "slowest_step": "and its number",
    "data_wait_s": "waiting for samples, and for their copy to the device",
    "copy_s": "copying samples to a CUDA device, beside other work; null elsewhere",
    "forward_s": "model and loss",
    "backward_s": "backward, without exposed communication where that is known",
    "exposed_s": "waiting for gradients and the sum of the losses, after this rank's own work; null if not known",
    "hidden_s": "time in which buckets travelled beside backward; only of steps with a timeline",
    "optimizer_s": "dividing, clipping, checking the gradient, and the update",
    "loss": "mean over the global batch",
    "learning_rate": "of the first parameter group",
    "grad_norm": "norm of the whole gradient before clipping; null if nothing needed it",
    "samples": "of the global batch",
    "samples_per_s": "of the global batch, over `interval_s`",
    "counts": "what the loss of the global batch is a mean over if not samples, such as tokens; null if samples",
    "tokens_per_s": "these, over `interval_s`, whatever it is that the task counts; null if samples",
}
"""Of a line of kind ``step``."""

MACHINE = {
    "time": "Unix time of this rank's host",
    "memory_bytes": "held by tensors on this rank's devices; null on CPUs",
    "memory_peak_bytes": "the most that tensors held so far; null on CPUs",
    "rss_bytes": "resident memory of this process",
    "rss_peak_bytes": "the most so far",
    "workers_rss_bytes": "resident memory of its loader processes together",
    "num_workers": "its loader processes",
    "cpu_percent": "of one core, used by this process since the line before",
    "workers_cpu_percent": "of one core, used by its loader processes together",
    "load": "of the machine, the mean over a minute",
    "gpu_percent": "part of the time in which a kernel ran, as NVML says; null without NVML",
    "gpu_power_w": "power",
    "gpu_temperature_c": "temperature",
}
"""Of a line of kind ``machine``, written every two seconds or so."""

TIMELINE = {
    "step": "number of the step",
    "time": "when it began, Unix time of this rank's host",
    "spans": "list of [phase, begin, end], in seconds after `time`",
    "buckets": "list of [number, bytes, ready, sent, done], in seconds after `time`; empty where not recorded",
    "waited_from": "when this rank's own work of backward was done, and it waited for buckets; null if not known",
    "waited_until": "when it had them",
}
"""Of a line of kind ``timeline``, written for some steps; see `has_timeline` in lockstep.telemetry.record.steps."""

EVENT = {
    "event": "which of EVENTS",
    "step": "steps done by then",
    "time": "Unix time of this rank's host, at its beginning",
    "seconds": "how long training stood still for it; null if it did not",
    "text": "what happened, in words",
}
"""Of a line of kind ``event``."""

EVENTS = {
    "resume": "the run went on from a checkpoint",
    "restart": "all ranks were started again, after a failure or with other machines",
    "evaluation": "the model was evaluated",
    "checkpoint": "a checkpoint was taken; the time is what training stood still for it",
    "skipped": "a step was skipped or undone, or a sample left out",
    "straggler": "a rank kept the others waiting in every step",
    "spike": "a step took three times as long as usual, or more",
    "profile": "steps were handed over to torch.profiler, and are slower; the time is what writing the trace took",
    "remark": "what the engine or the loader found out",
    "stop": "a signal stopped the run in order",
    "error": "the run ended with an error on this rank",
    "end": "the run is done",
}

START = {
    "run": "name of the session, the same on all ranks",
    "rank": "this rank",
    "host": "name of its machine",
    "pid": "its process",
    "device": "where it computes",
    "time": "Unix time of this rank's host",
    "first_step": "steps done before",
}
"""Of a line of kind ``start``, with which each session of a rank begins."""

KINDS = {"start": START, "step": STEP, "timeline": TIMELINE, "machine": MACHINE, "event": EVENT}

Event = Literal[
    "resume",
    "restart",
    "evaluation",
    "checkpoint",
    "skipped",
    "straggler",
    "spike",
    "profile",
    "remark",
    "stop",
    "error",
    "end",
]
"""One of ``EVENTS``."""
