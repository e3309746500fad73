"""A run as files: each rank's lines of JSON, what they mean, and who writes them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from lockstep.errors import ConfigurationError

# The names of everything that is recorded of a run. Files and dashboards depend on them: frozen by a test.
#
# docs/metrics.md explains each in a table that is compared with this one.

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
"""Of a line of kind ``timeline``, written for some steps; see `has_timeline` in lockstep.telemetry.run_record."""

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


# What a step took, in seconds, whoever measured it.


class Measured(NamedTuple):
    """Seconds of one step by what they went into; the names are those of ``STEP`` in names.py."""

    total_s: float
    data_wait_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    exposed_s: float | None = None
    copy_s: float | None = None
    hidden_s: float | None = None


PART_NAMES = {
    "data_wait_s": "data wait",
    "forward_s": "forward",
    "backward_s": "backward",
    "exposed_s": "waiting for gradients",
    "optimizer_s": "optimizer",
}
"""What parts of a step are called in sentences."""


# Keeps the file of a long run small: each line of steps stands for more and more of them.
#
# The first ``SINGLY`` lines hold a step each, the next so many two, then four, and so on: a million steps take 60,000
# lines. What was slow in between stays: the longest step is named.

SINGLY = 8192

_LAST = ("loss", "learning_rate", "grad_norm", "samples")
_MEANS = (
    *("interval_s", "total_s", "data_wait_s", "copy_s", "forward_s", "backward_s", "exposed_s", "hidden_s"),
    *("optimizer_s", "samples_per_s", "counts", "tokens_per_s"),
)


class Downsampler:
    """Takes the lines of single steps, and gives those to write.

    Args:
        singly: Lines until each next one stands for twice as many steps.
    """

    def __init__(self, singly: int = SINGLY) -> None:
        self._singly = singly
        self._num_lines = 0
        self._held: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> dict[str, Any] | None:
        """Take the line of a step; return one to write if there are enough."""
        self._held.append(line)
        if len(self._held) < 2 ** (self._num_lines // self._singly):
            return None
        return self.rest()

    def rest(self) -> dict[str, Any] | None:
        """Return the line of what is held, if anything is."""
        if not self._held:
            return None
        held, self._held = self._held, []
        self._num_lines += 1
        return merge_lines(held)


def merge_lines(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one line for several steps: means of times, the last loss, and the longest step by number."""
    if len(lines) == 1:
        return lines[0]
    slowest = max(lines, key=lambda line: line["total_s"])
    merged = {
        **lines[0],
        "num_steps": len(lines),
        "slowest_s": slowest["total_s"],
        "slowest_step": slowest["step"],
    }
    for name in _LAST:
        merged[name] = lines[-1][name]
    for name in _MEANS:
        known = [line[name] for line in lines if line.get(name) is not None]
        merged[name] = sum(known) / len(known) if known else None
    return merged


# Finds the steps that took far longer than those before.

_TIMES, _LONGER_S, _AFTER, _MOST = 3.0, 0.005, 20, 200
"""A step is a spike if it takes so many times the median of those before, and so much longer; not among the first."""


class OutlierSteps:
    """Looks at each step in turn."""

    def __init__(self) -> None:
        self._totals: deque[float] = deque(maxlen=64)
        self._usual_s = 0.0
        self._num_steps = self._num_found = 0

    def look(self, measured: Measured) -> str | None:
        """Return what to say of the next step if it is a spike."""
        total_s, usual_s = measured.total_s, self._usual_s
        self._num_steps += 1
        self._totals.append(total_s)
        found = None
        if total_s > _TIMES * usual_s and total_s > usual_s + _LONGER_S and self._num_steps > _AFTER:
            self._num_found += 1
            found = describe_outlier(measured, usual_s) if self._num_found <= _MOST else None
        if self._num_steps % 16 == 0 or self._num_steps == _AFTER:
            self._usual_s = median(self._totals)
        return found


def describe_outlier(measured: Measured, usual_s: float) -> str:
    """Say how long a step took, and in what most of it was."""
    part = max(PART_NAMES, key=lambda name: getattr(measured, name) or 0.0)
    text = f"took {measured.total_s * 1e3:.1f} ms, usually {usual_s * 1e3:.1f} ms; "
    return text + f"{(getattr(measured, part) or 0.0) * 1e3:.1f} ms of it {PART_NAMES[part]}"


# The lines of steps on their way to the file: those that were far too long are told of, and many share a line.

Line = dict[str, Any]

TIMELINE_FIRST, TIMELINE_STEPS = 4, 4


def has_timeline(step: int) -> bool:
    """Return whether a step has a timeline, the same on every rank: four of 64, from step 4096 on ever fewer."""
    period = max(64, 1 << (step.bit_length() - 6)) if step >= 4096 else 64
    return (step - TIMELINE_FIRST) % period < TIMELINE_STEPS


class StepLines:
    """Takes the line of each step.

    Args:
        add: Gets those to write, and the event of a step that took far too long.
    """

    def __init__(self, add: Callable[[Line], None]) -> None:
        self._add = add
        self._thinner, self._spikes = Downsampler(), OutlierSteps()

    def take(self, line: Line) -> None:
        """Take the line of the next step."""
        text = self._spikes.look(Measured(**{name: line[name] for name in Measured._fields}))
        if text is not None:
            self._add(spike_line(line["step"], line["time"], text))
        if (ready := self._thinner.add(line)) is not None:
            self._add(ready)

    def close(self) -> None:
        """Give what is held, if anything is."""
        if (rest := self._thinner.rest()) is not None:
            self._add(rest)


def spike_line(step: int, time: float, text: str) -> Line:
    """Return the event of a step, counted from 0, that began at ``time`` and took far too long."""
    return {"kind": "event", "event": "spike", "step": step + 1, "time": time, "seconds": None, "text": text}


# Appends lines of JSON to a file from a thread of its own: whoever has something to write never waits.

FLUSH_S = 1.0
_JOIN_S = 10.0
_MOST_WAITING = 100_000
"""Lines that may wait for a disk that does not take them; then the oldest are dropped."""

_COMPACT = (",", ":")


class LineWriter:
    """A file of JSON lines.

    Written with ``os.write`` to a file opened for appending, so that a forked process has nothing to flush.

    Args:
        path: The file; its folder must be there.
        fresh: Whether to begin it anew.
        sample: Called from the thread that writes, every other second; what it returns is written, too.

    Attributes:
        error: Why nothing is written any more; None if all is well.

    Raises:
        ConfigurationError: The file cannot be opened.
    """

    def __init__(self, path: Path, *, fresh: bool, sample: Callable[[], dict[str, Any]] | None = None) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if fresh else 0), 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot record the run in {path}: {error.strerror}.\nName another folder (--run-dir DIR)."
            ) from error
        self._path = path
        self._lines: deque[dict[str, Any]] = deque(maxlen=_MOST_WAITING)
        self._sample = sample
        self._over = threading.Event()
        self._is_cut = not fresh and not _ends_in_newline(path)
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-recorder", daemon=True)
        self._thread.start()

    def add(self, line: dict[str, Any]) -> None:
        """Have ``line`` written soon. Does not block."""
        self._lines.append(line)

    def close(self) -> None:
        """Write what is left, and close the file. Blocks some seconds at most."""
        self._over.set()
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            os.close(self._file)

    def _run(self) -> None:
        is_over = False
        num_rounds = 0
        while not is_over:
            is_over = self._over.wait(FLUSH_S if num_rounds else 0.05)  # the first lines soon: a run may be short
            if self._sample is not None and (num_rounds % 2 == 0 or is_over):
                with contextlib.suppress(Exception):  # figures of a machine that does not tell them
                    self._lines.append(self._sample())
            num_rounds += 1
            self._flush()

    def _flush(self) -> None:
        texts = []
        while self._lines:
            texts.append(to_line(self._lines.popleft()))
        if not texts or self.error is not None:
            return
        data = ("\n" * self._is_cut + "".join(texts)).encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
                self._is_cut = False
        except OSError as error:
            self.error = f"{self._path}: {error.strerror}"


def to_line(line: dict[str, Any]) -> str:
    """Return ``line`` as one line of JSON; NaN and infinities, which JSON does not have, become strings."""
    try:
        return json.dumps(line, separators=_COMPACT, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_named(line), separators=_COMPACT) + "\n"


def _named(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _named(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_named(entry) for entry in value]
    return value


def _ends_in_newline(path: Path) -> bool:
    """Return whether a file that was written before ends with a whole line; a killed process may leave a part."""
    size = path.stat().st_size
    if not size:
        return True
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"


# A thread beside training that does something about once a second, and never harms what it watches.

PERIOD_S = 1.0
_FIRST_S = 0.3
"""Until the first beat: a run may be short."""
_PERIODIC_JOIN_S = 8.0


class PeriodicThread:
    """Calls ``beat`` from a thread of its own until it is stopped.

    Args:
        beat: What is done. If it raises, it is not called again.
        period_s: Between two calls.
    """

    def __init__(self, beat: Callable[[], None], period_s: float = PERIOD_S) -> None:
        self._beat, self._period_s = beat, period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-live", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Have it end; return whether it has. Blocks some seconds at most."""
        self._over.set()
        self._thread.join(_PERIODIC_JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s = _FIRST_S
        while not self._over.wait(wait_s):
            wait_s = self._period_s
            if not guarded(self._beat):
                return


def guarded(act: Callable[[], None]) -> bool:
    """Do what is not worth the end of a run; say so and return False if it raises."""
    try:
        act()
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        what = f"lockstep: this run is not watched any more: {type(error).__name__}: {first}"
        print(what, file=sys.stderr, flush=True)
        return False
    return True
