"""A run as files: each rank's lines of JSON, and the folder with them. Does not import torch."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lockstep.activity import one_line
from lockstep.errors import ConfigurationError
from lockstep.run_folder import hide_secrets, read_object, replace_file

if TYPE_CHECKING:
    from lockstep.comm.clocks import ClockOffset  # imports torch

Line = dict[str, Any]

# --- names that files and dashboards depend on; docs/reference/metrics.md says what each name of a line means ---------

# Grows when a name or a meaning changes, not when one is added.
VERSION = 1

RUN_FILE = "run.json"
RANK_FILES = "rank-*.jsonl"

# Of a line of kind ``machine``, written every two seconds or so.
MACHINE_FIGURES = (
    *("memory_bytes", "memory_peak_bytes", "rss_bytes", "workers_rss_bytes", "num_workers", "cpu_percent"),
    *("workers_cpu_percent", "load", "gpu_percent", "gpu_power_w", "gpu_temperature_c"),
    *("sent_bytes", "link_bytes_per_s", "link_peer"),
)

# A name in ``EVENTS``.
Event = str

EVENTS = {
    "resume": "the run went on from a checkpoint",
    "restart": "all ranks were started again, after a failure or with other machines",
    "evaluation": "the model was evaluated",
    "checkpoint": "a checkpoint was taken; the time is what training stood still for it",
    "skipped": "a step was skipped or undone, or a sample left out",
    "straggler": "a rank kept the others waiting in every step",
    "profile": "steps were handed over to torch.profiler, and are slower; the time is what writing the trace took",
    "remark": "what the engine or the loader found out",
    "stop": "a signal stopped the run in order",
    "error": "the run ended with an error on this rank",
    "end": "the run is done",
}


# --- what a step left behind -----------------------------------------------------------------------------------------

# A moment: of the host's clock (``time.perf_counter``), or an event on the stream that the work runs on. Used
# without being named, so that ``lockstep report`` reads records without importing torch.
Mark = Any

# What a step does, by the names of `RecordedStep.spans`; ``communication`` is waiting as a whole.
PHASES = ("data_wait", "forward", "backward", "communication", "optimizer")


def kind_of(device: str) -> str:
    """Return what messages call devices such as ``cuda:0``: GPU, CPU, or another type in capitals."""
    device_type = device.partition(":")[0]
    return "GPU" if device_type in ("cuda", "xpu") else device_type.upper()


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds from one mark to another, which are both of the host or both of a device."""
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1e3


@dataclass(slots=True)
class BucketTimes:
    """When a bucket's last gradient was there, when it was launched, and when it was reduced."""

    position: int
    size_bytes: int
    ready: Mark
    sent: Mark | None = None
    done: Mark | None = None


@dataclass(slots=True)
class Reduction:
    """What one backward exchanged.

    Attributes:
        buckets: In the order in which they were launched; empty unless the step has a timeline.
        waited: From when this rank's own work was done, until all buckets were reduced.
        exposed_s: What of that was waiting; None if it is all.
    """

    buckets: list[BucketTimes] = field(default_factory=list)
    waited: tuple[Mark, Mark] | None = None
    exposed_s: float | None = None

    @property
    def waited_s(self) -> float:
        """Seconds that the rank waited for communication after its own work."""
        if self.exposed_s is not None:
            return self.exposed_s
        return 0.0 if self.waited is None else seconds_between(*self.waited)

    def hidden_s(self, start: Mark) -> float | None:
        """Return the time in which buckets were on their way while this rank still worked; ``start`` is the step's."""
        if self.waited is None or not self.buckets:
            return None
        until = seconds_between(start, self.waited[0])
        hidden = reached = 0.0
        for each in self.buckets:
            if each.sent is not None and each.done is not None:
                sent, done = seconds_between(start, each.sent), min(until, seconds_between(start, each.done))
                # Buckets overlap: what two of them were on their way together counts once.
                hidden += max(0.0, done - max(sent, reached))
                reached = max(reached, done)
        return hidden


@dataclass(slots=True)
class Number:
    """A number of the step, here already or on its way from the device; see `RecordedStep.device_marks`."""

    value: Any
    arrived: Mark | None = None

    def __float__(self) -> float:
        return float(self.value)


@dataclass(slots=True)
class RecordedStep:
    """A step of one rank: what the thread that trains leaves behind, mostly marks that are read later.

    Attributes:
        number: Counted from 0.
        begin: The first mark.
        began_at: When the host got there, by ``time.perf_counter``.
        wall_s: The same in Unix time.
        end: The last mark.
        spans: What was seen of it, in order: phase, begin, end, and how long the host was in collectives meanwhile that
            block it, those of the engine left out. What lies between spans is the script's own.
        samples: Of the global batch.
        losses: One for each micro-batch or one for all: the mean is recorded.
        grad_norm, counted: Gradient norm before clipping; what the loss is a mean over if that is not samples.
        learning_rate: Of the first parameter group.
        reductions: Of an engine that reports what it waits for, one for each backward that it synchronised.
        exposed_s: Of any other engine, how long backward waited for communication; None if that is not known.
        copies: Begin and end of copies to the device, which run beside other work.
        unseen: Phases that nobody could see; null in the record.
        has_timeline: Whether each span and bucket is recorded; see `lockstep.telemetry.recorder.has_timeline`.
        interval_s: From its beginning to that of the next step, or to what came between them.
        is_skipped: Whether the gradient was not finite, and so there was no update.
    """

    number: int
    begin: Mark
    began_at: float
    wall_s: float
    end: Mark
    spans: list[tuple[str, Mark, Mark, float]] = field(default_factory=list)
    samples: int = 0
    losses: list[Number] = field(default_factory=list)
    grad_norm: Number | None = None
    counted: Number | None = None
    learning_rate: float | None = None
    reductions: list[Reduction] = field(default_factory=list)
    exposed_s: float | None = None
    copies: Sequence[tuple[Mark, Mark]] = ()
    unseen: frozenset[str] = frozenset()
    has_timeline: bool = False
    interval_s: float | None = None
    is_skipped: bool = False

    @property
    def device_marks(self) -> list[Any]:
        """The CUDA events behind which all that is to be read is there."""
        numbers = [each for each in (*self.losses, self.grad_norm, self.counted) if each is not None]
        marks = [self.end, *(number.arrived for number in numbers), *(end for _, end in self.copies)]
        return [mark for mark in marks if mark is not None and not isinstance(mark, float)]

    @property
    def loss(self) -> float | None:
        """The mean of the losses, if there are any."""
        return sum(map(float, self.losses)) / len(self.losses) if self.losses else None

    def backward_waited_s(self) -> float | None:
        """Return how long backward waited for communication after its own work; None if that is not known."""
        return sum(each.waited_s for each in self.reductions) if self.reductions else self.exposed_s


class StepSeconds(NamedTuple):
    """Seconds of one step by what they went into; the names are those of ``STEP``. None is not known."""

    total_s: float
    data_wait_s: float | None
    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None
    exposed_s: float | None = None
    copy_s: float | None = None
    hidden_s: float | None = None


def measure(step: RecordedStep) -> StepSeconds:
    """Return where the time of a step went, once it is known; waiting is taken out of the phases it happened in."""
    seconds = dict.fromkeys(PHASES, 0.0)
    in_collectives_s = 0.0
    for phase, begin, end, waited_s in step.spans:
        seconds[phase] += seconds_between(begin, end)
        if phase != "communication":
            # Such as SyncBatchNorm's all-reduce within forward: it is waiting, not forward.
            seconds[phase] -= waited_s
            in_collectives_s += waited_s
    in_backward_s = step.backward_waited_s()
    seconds["backward"] = max(0.0, seconds["backward"] - (in_backward_s or 0.0))
    exposed_s = None if in_backward_s is None else in_backward_s + seconds["communication"] + in_collectives_s
    hidden = [each for reduction in step.reductions if (each := reduction.hidden_s(step.begin)) is not None]
    parts = {f"{phase}_s": None if phase in step.unseen else seconds[phase] for phase in PHASES}
    del parts["communication_s"]
    return StepSeconds(
        total_s=seconds_between(step.begin, step.end),
        **parts,
        exposed_s=exposed_s,
        copy_s=sum(seconds_between(*copy) for copy in step.copies) if step.copies else None,
        hidden_s=sum(hidden) if hidden else None,
    )


def step_line(step: RecordedStep, took: StepSeconds, began_s: float, steps_per_epoch: int | None) -> Line:
    """Return the line of kind ``step``."""
    total_s = round(took.total_s, 7)
    lasted_s = step.interval_s or total_s or 1e-9
    counted = None if step.counted is None else float(step.counted)
    return {
        "kind": "step",
        "step": step.number,
        "num_steps": 1,
        "epoch": round(step.number / steps_per_epoch, 6) if steps_per_epoch else None,
        "time": round(began_s, 6),
        "interval_s": _rounded(step.interval_s),
        "slowest_s": total_s,
        "slowest_step": step.number,
        **{name: _rounded(value) for name, value in took._asdict().items()},
        "loss": step.loss,
        "learning_rate": step.learning_rate,
        "grad_norm": None if step.grad_norm is None else float(step.grad_norm),
        "samples": step.samples,
        "samples_per_s": round(step.samples / lasted_s, 3),
        "counts": counted,
        "tokens_per_s": None if counted is None else round(counted / lasted_s, 3),
    }


def timeline_line(step: RecordedStep, began_s: float) -> Line:
    """Return the line of kind ``timeline``."""

    def since(mark: Mark) -> float:
        return round(seconds_between(step.begin, mark), 7)

    spans = [(phase, since(begin), since(end)) for phase, begin, end, _ in step.spans]
    buckets = [each for reduction in step.reductions for each in reduction.buckets]
    waited = step.reductions[-1].waited if step.reductions else None
    return {
        "kind": "timeline",
        "step": step.number,
        "time": round(began_s, 6),
        "spans": [[phase, begin, end] for phase, begin, end in spans if end > begin],
        "buckets": [
            [each.position, each.size_bytes, since(each.ready), since(each.sent), since(each.done)]
            for each in buckets
            if each.sent is not None and each.done is not None
        ],
        "waited_from": None if waited is None else since(waited[0]),
        "waited_until": None if waited is None else since(waited[1]),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 7)


# --- long runs in small files -----------------------------------------------------------------------------------------

SINGLY = 8192

_LAST = ("loss", "learning_rate", "grad_norm", "samples")
_MEANS = ("interval_s", *StepSeconds._fields, "samples_per_s", "counts", "tokens_per_s")


class Downsampler:
    """Takes the lines of single steps, and returns those to write.

    Args:
        singly: Lines until each next one stands for twice as many steps.
    """

    def __init__(self, singly: int = SINGLY) -> None:
        self._singly = singly
        self._num_lines = 0
        self._held: list[Line] = []

    def add(self, line: Line) -> Line | None:
        """Take the line of a step; return one to write if there are enough."""
        self._held.append(line)
        return self.rest() if len(self._held) >= 2 ** (self._num_lines // self._singly) else None

    def rest(self) -> Line | None:
        """Return one line for what is held, if anything is: means of times, the last loss, the longest step."""
        lines, self._held = self._held, []
        if len(lines) < 2:
            self._num_lines += len(lines)
            return lines[0] if lines else None
        self._num_lines += 1
        slowest = max(lines, key=lambda line: line["total_s"])
        merged = {**lines[0], "num_steps": len(lines)}
        merged |= {"slowest_s": slowest["total_s"], "slowest_step": slowest["step"]}
        merged |= {name: lines[-1][name] for name in _LAST}
        for name in _MEANS:
            known = [line[name] for line in lines if line.get(name) is not None]
            merged[name] = sum(known) / len(known) if known else None
        return merged


# --- the file ---------------------------------------------------------------------------------------------------------


def guarded(act: Callable[[], None], consequence: str = "this run is not watched any more") -> bool:
    """Do what is not worth the end of a run; print the ``consequence`` and return False if it raises."""
    try:
        act()
    except Exception as error:
        print(f"lockstep: {consequence}: {one_line(error)}", file=sys.stderr, flush=True)
        return False
    return True


_COMPACT = (",", ":")


class LineWriter:
    """A file of JSON lines. A full disk is reported once and ends it; the run goes on.

    Args:
        path: The file; its folder is made if it is not there.
        fresh: Whether to begin it anew.

    Raises:
        ConfigurationError: The file cannot be opened.
    """

    def __init__(self, path: Path, *, fresh: bool) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written with `os.write` to a file opened for appending: a forked process has nothing to flush.
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if fresh else 0), 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot record the run in {path.parent}: {error.strerror}.\nName another folder (--run-dir DIR)."
            ) from error
        self._path = path
        self._lines: list[Line] = []
        self._is_cut = not fresh and not _ends_in_newline(path)
        self._is_well = True

    def add(self, line: Line) -> None:
        """Keep ``line`` for the next `flush`."""
        self._lines.append(line)

    def close(self) -> None:
        """Write what is left, and close the file. Blocks for the disk."""
        self.flush()
        os.close(self._file)

    def flush(self) -> None:
        """Write what was added. Blocks for the disk."""
        lines, self._lines = self._lines, []
        if lines and self._is_well:
            data = ("\n" * self._is_cut + "".join(map(to_line, lines))).encode()
            self._is_well = guarded(partial(self._write, data), f"{self._path} is not written any more")

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]
        self._is_cut = False


def to_line(line: dict[str, Any]) -> str:
    """Return ``line`` as one line of JSON; NaN and infinities, which JSON does not have, become strings."""
    try:
        return json.dumps(line, separators=_COMPACT, allow_nan=False) + "\n"
    except ValueError:
        named = json.loads(json.dumps(line), parse_constant=lambda name: str(float(name)))
        return json.dumps(named, separators=_COMPACT) + "\n"


def _ends_in_newline(path: Path) -> bool:
    """Return whether a file that was written before ends with a whole line; a killed process may leave a part."""
    with path.open("rb") as file:
        file.seek(-min(1, path.stat().st_size), os.SEEK_END)
        return file.read(1) in (b"", b"\n")


# --- the run folder: each rank's file, and ``run.json`` with what rank zero knows of each session ---------------------

# Set by the command line for its processes: how it was called.
COMMAND_VARIABLE = "LOCKSTEP_COMMAND"


class RunFolder:
    """The files that this rank writes into the folder of a run, from one start of the run to its end.

    Collective if ``gather`` is: every rank. Blocks until all ranks have opened their files.

    Args:
        folder: Made if it is not there; the ranks of several machines may have one each.
        rank: Of this process.
        world_size: Ranks of the run.
        device: Where this rank computes.
        machine: The same for ranks with one clock.
        first_step: Steps done before.
        fresh: Whether the run begins anew: what an earlier run left in the folder is overwritten.
        gather: Returns what each rank gives it.
        name: Of the session, where ranks cannot agree on one.

    Attributes:
        writer: Of this rank's file.
        session: What ``run.json`` says of this session, on rank zero; see `describe`.

    Raises:
        ConfigurationError: On every rank: a rank cannot write its file.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        *,
        device: str,
        machine: str,
        first_step: int,
        fresh: bool,
        gather: Callable[[Any], list[Any]],
        name: str | None = None,
    ) -> None:
        writer, problem = None, ""
        # A rank that cannot write still takes part in the exchange: all ranks raise, and none waits for it.
        try:
            writer = LineWriter(folder / f"rank-{rank}.jsonl", fresh=fresh)
        except ConfigurationError as error:
            problem = str(error)
        began_at = time.time()
        # As torchrun has it: hosts may have one name, as containers do.
        node = os.environ.get("GROUP_RANK", "0")
        mine = {"host": platform.node(), "pid": os.getpid(), "device": device, "machine": machine, "node": node}
        ranks = gather((mine, name or f"{began_at:.6f}-{os.getpid()}", problem))
        if problems := [f"Rank {number}: {each[2]}" for number, each in enumerate(ranks) if each[2]]:
            if writer is not None:
                writer.close()
            raise ConfigurationError(problems[0])
        assert writer is not None
        self.writer = writer
        run = {"run": ranks[0][1], "first_step": first_step}  # of the names that ranks propose, the first one's counts
        about = {key: mine[key] for key in ("host", "pid", "device")}
        writer.add({"kind": "start", **run, "rank": rank, **about, "time": began_at})
        # Where ranks do without a group, rank zero knows only itself.
        known = [each for each, *_ in ranks] + [{} for _ in range(world_size - len(ranks))]
        self.session: Line = {**run, "began_at": began_at, "num_restarts": num_restarts(), **how_called()}
        self.session |= {"ranks": known, "clocks": {}}
        self._path, self._is_rank_zero = folder / RUN_FILE, rank == 0
        self._before: list[Line] = [] if fresh else read_object(self._path).get("sessions", [])
        if fresh and self._is_rank_zero:
            for path in folder.glob(RANK_FILES):  # of an earlier run with more ranks
                number = path.stem.removeprefix("rank-")
                if number.isdecimal() and int(number) >= world_size:
                    path.unlink(missing_ok=True)

    def describe(self, offsets: Sequence[ClockOffset], when: Literal["start", "end"], **known: Any) -> None:
        """Add what is known of the session to ``run.json``. Blocks for the disk; what cannot be written is missing.

        Args:
            offsets: Of the ranks' clocks just now; empty if they were not compared.
            when: Whether the run begins or ends.
            known: By name. Only those that rank zero gives are written.
        """
        if not self._is_rank_zero:
            return
        if offsets:
            bounds = {"offsets_s": [each.offset_s for each in offsets], "errors_s": [each.error_s for each in offsets]}
            self.session["clocks"][when] = {"time": time.time(), **bounds}
        self.session |= known
        record = {"version": VERSION, "sessions": [*self._before, self.session]}
        with contextlib.suppress(OSError):
            replace_file(self._path, json.dumps(record, indent=1))


def how_called() -> dict[str, str]:
    """Return how this process was called, without secrets."""
    command = os.environ.get(COMMAND_VARIABLE) or hide_secrets(sys.orig_argv)
    return {"command": command, "working_directory": str(Path.cwd())}


def num_restarts() -> int:
    """Return how often the launcher has started all ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
