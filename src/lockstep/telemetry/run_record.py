"""The files of a run: one file of JSON lines per rank, and ``run.json``. Does not import torch."""

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
from lockstep.env import core_wait_s
from lockstep.errors import ConfigurationError
from lockstep.run_folder import hide_secrets, read_object, replace_file

if TYPE_CHECKING:
    from lockstep.comm.clocks import ClockOffset  # imports torch

Line = dict[str, Any]

# --- names in the files, which dashboards depend on; docs/reference/metrics.md explains them --------------------------

# Incremented if a name or a meaning changes, not if one is added.
VERSION = 1

RUN_FILE = "run.json"
RANK_FILES = "rank-*.jsonl"

# A name in ``EVENTS``.
Event = str

EVENTS = {
    "resume": "the run resumed from a checkpoint",
    "restart": "all ranks were restarted, after a failure or with other machines",
    "evaluation": "the model was evaluated",
    "checkpoint": "a checkpoint was taken; the time is the pause of training",
    "skipped": "a step was skipped or undone, or a sample left out",
    "straggler": "a rank kept the others waiting in every step",
    "profile": "torch.profiler recorded steps, which were slower; the time is that of writing the trace",
    "remark": "a note of the engine or the loader",
    "stop": "a signal stopped the run gracefully",
    "error": "the run ended with an error on this rank",
    "end": "the run is complete",
}


# --- the record of a step ---------------------------------------------------------------------------------------------

# A moment: a time of the host's clock (``time.perf_counter``), or an event on the stream of the work. Not typed, so
# that ``lockstep report`` reads records without importing torch.
Mark = Any

# The phases in `RecordedStep.spans`; all of ``communication`` is waiting.
PHASES = ("data_wait", "forward", "backward", "communication", "optimizer")


def kind_of(device: str) -> str:
    """Return the word for a device such as ``cuda:0`` in messages: GPU, CPU, or another type in capitals."""
    device_type = device.partition(":")[0]
    return "GPU" if device_type in ("cuda", "xpu") else device_type.upper()


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds between two marks, both of the host or both of a device."""
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1e3


@dataclass(slots=True)
class BucketTimes:
    """When the last gradient of a bucket was ready, when the bucket was launched, and when it was reduced."""

    position: int
    size_bytes: int
    ready: Mark
    sent: Mark | None = None
    done: Mark | None = None


@dataclass(slots=True)
class Reduction:
    """The exchange of gradients of one backward.

    Attributes:
        buckets: In launch order; empty unless the step has a timeline.
        waited: From the end of this rank's own work until all buckets were reduced.
        exposed_s: The part of that time in which the rank waited; None if it is all of it.
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
        """Return the time in which buckets were being reduced while this rank worked; ``start`` is that of the step."""
        if self.waited is None or not self.buckets:
            return None
        until = seconds_between(start, self.waited[0])
        hidden = reached = 0.0
        for each in self.buckets:
            if each.sent is not None and each.done is not None:
                sent, done = seconds_between(start, each.sent), min(until, seconds_between(start, each.done))
                # Buckets may overlap: the common time counts once.
                hidden += max(0.0, done - max(sent, reached))
                reached = max(reached, done)
        return hidden


@dataclass(slots=True)
class Number:
    """A number of the step, which may still be copied from the device; see `RecordedStep.device_marks`.

    Attributes:
        value: The number, or a tensor of several; no view of it, as host buffers are reused (accelerator.py).
        arrived: After which it can be read; None: at once.
        place: Which number of the tensor.
    """

    value: Any
    arrived: Mark | None = None
    place: int | None = None

    def __float__(self) -> float:
        return float(self.value if self.place is None else self.value[self.place])


@dataclass(slots=True)
class RecordedStep:
    """A step of one rank as the training thread records it, mostly as marks that another thread evaluates later.

    Attributes:
        number: Counted from 0.
        begin: The first mark.
        began_at: When the host reached it, by ``time.perf_counter``.
        wall_s: The same in Unix time.
        end: The last mark.
        spans: In order: phase, begin, end, and the seconds in which the host was blocked by collectives other than
            those of the engine. Time between spans is spent in the script.
        samples: Of the global batch.
        losses: One per micro-batch, or one for all; the mean is recorded.
        grad_norm, counted: Gradient norm before clipping; what the loss is a mean over if that is not samples.
        learning_rate: Of the first parameter group.
        reductions: One for each synchronised backward, of an engine that measures its waiting.
        exposed_s: For any other engine, how long backward waited for communication; None if unknown.
        core_uses: For each span, `lockstep.env.core_use` of the training thread at its beginning and at its end.
        copies: Begin and end of copies to the device, which run in parallel to other work.
        unseen: Phases that could not be observed; null in the record.
        has_timeline: Whether each span and bucket is recorded; see `lockstep.telemetry.recorder.has_timeline`.
        interval_s: From its beginning to that of the next step, or of an event between them.
        is_skipped: Whether the update was skipped, as the gradient was not finite.
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
    core_uses: list[tuple[bytes, bytes]] = field(default_factory=list)
    copies: Sequence[tuple[Mark, Mark]] = ()
    unseen: frozenset[str] = frozenset()
    has_timeline: bool = False
    interval_s: float | None = None
    is_skipped: bool = False

    @property
    def device_marks(self) -> list[Any]:
        """The events of the device after which all values can be read."""
        numbers = [each for each in (*self.losses, self.grad_norm, self.counted) if each is not None]
        marks = [self.end, *(number.arrived for number in numbers), *(end for _, end in self.copies)]
        return [mark for mark in marks if mark is not None and not isinstance(mark, float)]

    @property
    def loss(self) -> float | None:
        """The mean of the losses, if there are any."""
        return sum(map(float, self.losses)) / len(self.losses) if self.losses else None


class StepSeconds(NamedTuple):
    """Seconds of one step and of its parts; None is unknown."""

    total_s: float
    data_wait_s: float | None
    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None
    exposed_s: float | None = None
    copy_s: float | None = None
    hidden_s: float | None = None
    core_wait_s: float | None = None


def measure(step: RecordedStep) -> StepSeconds:
    """Return the seconds of a step by part. Waiting is subtracted from the phase in which it occurred."""
    seconds = dict.fromkeys(PHASES, 0.0)
    in_collectives_s = 0.0
    for phase, begin, end, waited_s in step.spans:
        seconds[phase] += seconds_between(begin, end)
        if phase != "communication":
            # Such as the all-reduce of SyncBatchNorm within forward.
            seconds[phase] -= waited_s
            in_collectives_s += waited_s
    in_backward_s = sum(each.waited_s for each in step.reductions) if step.reductions else step.exposed_s
    seconds["backward"] = max(0.0, seconds["backward"] - (in_backward_s or 0.0))
    exposed_s = None if in_backward_s is None else in_backward_s + seconds["communication"] + in_collectives_s
    without_core_s = _take_out_core_wait(step, seconds)
    hidden = [each for reduction in step.reductions if (each := reduction.hidden_s(step.begin)) is not None]
    parts = {f"{phase}_s": None if phase in step.unseen else seconds[phase] for phase in PHASES}
    del parts["communication_s"]
    return StepSeconds(
        total_s=seconds_between(step.begin, step.end),
        **parts,
        exposed_s=exposed_s,
        copy_s=sum(seconds_between(*copy) for copy in step.copies) if step.copies else None,
        hidden_s=sum(hidden) if hidden else None,
        core_wait_s=without_core_s,
    )


def _take_out_core_wait(step: RecordedStep, seconds: dict[str, float]) -> float | None:
    """Return how long the training thread waited for a core, and subtract that from ``seconds`` by phase."""
    # Phases on a device are measured in its time, in which the device works while the host waits.
    if not step.core_uses or not isinstance(step.begin, float):
        return None
    total_s = 0.0
    for phase in PHASES:
        uses = [use for (name, *_), use in zip(step.spans, step.core_uses, strict=True) if name == phase]
        if uses and phase != "communication":  # in which it waits for other ranks
            # Without the kernel's count, waiting for a core and waiting for samples cannot be told apart.
            working_s = 0.0 if phase == "data_wait" else seconds[phase]
            waited_s = max(0.0, min(seconds[phase], core_wait_s(uses, working_s)))
            seconds[phase] -= waited_s
            total_s += waited_s
    return total_s


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
        "samples_per_s": float(f"{step.samples / lasted_s:.7g}"),
        "counts": counted,
        "tokens_per_s": None if counted is None else float(f"{counted / lasted_s:.7g}"),
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


# --- fewer lines for long runs ----------------------------------------------------------------------------------------

SINGLY = 8192

_LAST = ("loss", "learning_rate", "grad_norm", "samples")
_MEANS = ("interval_s", *StepSeconds._fields, "samples_per_s", "counts", "tokens_per_s")


class Downsampler:
    """Merges the lines of single steps into the lines to write.

    Args:
        singly: After so many lines, each line covers twice as many steps as before.
    """

    def __init__(self, singly: int = SINGLY) -> None:
        self._singly = singly
        self._num_lines = 0
        self._held: list[Line] = []

    def add(self, line: Line) -> Line | None:
        """Add the line of a step; return a line to write if there are enough steps for one."""
        self._held.append(line)
        return self.rest() if len(self._held) >= 2 ** (self._num_lines // self._singly) else None

    def rest(self) -> Line | None:
        """Return one line for the steps not yet written, if any: mean times, the last loss, the longest step."""
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


def guarded(act: Callable[[], None], consequence: str = "this run is no longer recorded") -> bool:
    """Call ``act``. If it raises, print the ``consequence`` and return False, as it must not end the run."""
    try:
        act()
    except Exception as error:
        print(f"lockstep: {consequence}: {one_line(error)}", file=sys.stderr, flush=True)
        return False
    return True


_COMPACT = (",", ":")


class LineWriter:
    """A file of JSON lines. If writing fails, as on a full disk, this is reported once, and the run continues.

    Args:
        path: The file; its folder is created if it does not exist.
        fresh: Whether to overwrite it.

    Raises:
        ConfigurationError: The file cannot be opened.
    """

    def __init__(self, path: Path, *, fresh: bool) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # `os.write` has no buffer that a forked process could write a second time.
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if fresh else 0), 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot record the run in {path.parent}: {error.strerror}.\nName another folder (--run-dir DIR)."
            ) from error
        self._path = path
        self._lines: list[Line] = []
        # A killed process may have left a part of a line.
        self._is_cut = not fresh and not _ends_in_newline(path)
        self._is_well = True

    def add(self, line: Line) -> None:
        """Add ``line``, which the next `flush` writes."""
        self._lines.append(line)

    def close(self) -> None:
        """Write the remaining lines, and close the file. Blocks for the disk."""
        self.flush()
        os.close(self._file)

    def flush(self) -> None:
        """Write the lines that were added. Blocks for the disk."""
        lines, self._lines = self._lines, []
        if lines and self._is_well:
            data = ("\n" * self._is_cut + "".join(map(to_line, lines))).encode()
            self._is_well = guarded(partial(self._write, data), f"{self._path} is no longer written")

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]
        self._is_cut = False


def _ends_in_newline(path: Path) -> bool:
    """Return whether a file that was written before ends with a whole line; a killed process may leave a part."""
    with path.open("rb") as file:
        file.seek(-min(1, path.stat().st_size), os.SEEK_END)
        return file.read(1) in (b"", b"\n")


def to_line(line: dict[str, Any]) -> str:
    """Return ``line`` as one line of JSON. NaN and infinities, which JSON does not have, become strings."""
    try:
        return json.dumps(line, separators=_COMPACT, allow_nan=False) + "\n"
    except ValueError:
        named = json.loads(json.dumps(line), parse_constant=lambda name: str(float(name)))
        return json.dumps(named, separators=_COMPACT) + "\n"


# --- the run folder: one file per rank, and ``run.json``, in which rank zero describes each session -------------------

# The command line, set by a command for its processes.
COMMAND_VARIABLE = "LOCKSTEP_COMMAND"


class RunFolder:
    """The files that this rank writes into the folder of a run in one session.

    Collective if ``gather`` is: every rank. Blocks until all ranks have opened their files.

    Args:
        folder: Created if it does not exist; each machine may have its own.
        rank: Of this process.
        world_size: Number of ranks of the run.
        device: The device of this rank.
        first_step: Number of steps done before.
        fresh: Whether the run begins: then the record of an earlier run in the folder is overwritten.
        gather: Returns the argument of each rank.
        name: Of the session, if the ranks cannot agree on one by ``gather``.

    Attributes:
        writer: Writes the file of this rank.
        session: The entry of this session in ``run.json``, on rank zero; see `describe`.

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
        first_step: int,
        fresh: bool,
        gather: Callable[[Any], list[Any]],
        name: str | None = None,
    ) -> None:
        writer, problem = None, ""
        # A rank that cannot write takes part in the exchange, so that all ranks raise, and none waits for it.
        try:
            writer = LineWriter(folder / f"rank-{rank}.jsonl", fresh=fresh)
        except ConfigurationError as error:
            problem = str(error)
        began_at = time.time()
        # The number of the machine by torchrun, as containers may have equal host names.
        node = os.environ.get("GROUP_RANK", "0")
        mine = {"host": platform.node(), "pid": os.getpid(), "device": device, "node": node}
        ranks = gather((mine, name or f"{began_at:.6f}-{os.getpid()}", problem))
        if problems := [f"Rank {number}: {each[2]}" for number, each in enumerate(ranks) if each[2]]:
            if writer is not None:
                writer.close()
            raise ConfigurationError(problems[0])
        assert writer is not None
        self.writer = writer
        run = {"run": ranks[0][1], "first_step": first_step}  # the name that rank 0 proposes
        about = {key: mine[key] for key in ("host", "pid", "device")}
        writer.add({"kind": "start", **run, "rank": rank, **about, "time": began_at})
        # Without a group, rank zero knows only itself.
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
        """Add facts about the session to ``run.json``, on rank zero. Blocks for the disk; errors are ignored.

        Args:
            offsets: The offsets of the ranks' clocks now; empty if they were not compared.
            when: Whether the run begins or ends.
            known: Facts by name.
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
    """Return the command line and the working directory of this process, without secrets."""
    command = os.environ.get(COMMAND_VARIABLE) or hide_secrets(sys.orig_argv)
    return {"command": command, "working_directory": str(Path.cwd())}


def num_restarts() -> int:
    """Return how often the launcher has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
