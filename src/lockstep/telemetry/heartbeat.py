"""In a rank: a thread that writes twice a second what the rank is doing, for the launcher's watchdog."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lockstep import activity
from lockstep.activity import name_of_bucket
from lockstep.comm.network import set_keepalive

# Modules that the program has imported already: what a rank is watched with imports none by itself.


def imported(name: str) -> Any:
    """Return a module that is there and whole, else None."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if spec is None or getattr(spec, "_initializing", False) else module


# What this process holds on its GPUs, by the figures of torch's allocator: no call of the driver, none waits.


def device_memory() -> list[tuple[str, int, int, int]]:
    """Return for each GPU in use its name and the bytes in tensors, taken at most, and there; see `DeviceMemory`."""
    cuda = imported("torch.cuda")
    found = []
    if getattr(cuda, "_initialized", False):
        with contextlib.suppress(Exception):  # a device that has failed
            for index in range(cuda.device_count()):
                figures: Any = cuda.memory_stats_as_nested_dict(index)
                taken = figures["reserved_bytes"]["all"]["peak"] if figures else 0
                if taken:
                    held = figures["allocated_bytes"]["all"]["current"]
                    found.append((f"cuda:{index}", held, taken, cuda.get_device_properties(index).total_memory))
    return found


# The step that a rank is in, in memory that outlives it: a rank that is killed cannot say it any more.

_FORM = struct.Struct("qq")
"""The step in a loop of ours, counted from 1; optimizer steps done in any other. 0 for neither."""


def make_step_counter(run_dir: str, rank: int) -> memoryview:
    """Make the file ``run_dir/step-RANK``; what is written to the two numbers returned is in it at once."""
    path = os.path.join(run_dir, f"step-{rank}")
    with open(path, "wb+") as file:
        file.truncate(_FORM.size)
        return memoryview(mmap.mmap(file.fileno(), _FORM.size)).cast("q")


def read_step_counter(run_dir: Path, rank: int) -> tuple[int | None, int]:
    """Return the step that a rank is or was in, counted from 0, and the optimizer steps that it had done."""
    try:
        step, num_updates = _FORM.unpack((run_dir / f"step-{rank}").read_bytes())
    except (OSError, struct.error):
        return None, 0
    return (step - 1 if step else None), num_updates


# Torch's own record of the collectives that a process has called, if it keeps one (its flight recorder).


class Call(NamedTuple):
    """A collective that this process has called."""

    name: str
    numel: int
    is_over: bool


def recorded_calls() -> list[Call]:
    """Return the collectives of this process that torch remembers, oldest first; none if it keeps no record."""
    c10d = imported("torch._C._distributed_c10d") or sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with contextlib.suppress(Exception):  # an interface of torch's own, which changes
            entries = [entry for entry in json.loads(getattr(c10d, name)())["entries"] if not entry.get("is_p2p")]
            entries.sort(key=lambda entry: (entry["time_created_ns"], entry["record_id"]))
            if entries:
                return [_call(entry) for entry in entries]
    return []


def awaited(calls: list[Call]) -> int | None:
    """Return the place of the collective that holds up the others: the first of the last that are not over.

    Where torch does not say which are over, it is the last.
    """
    if not calls:
        return None
    place = len(calls) - 1
    if any(call.is_over for call in calls):
        while place > 0 and not calls[place].is_over and not calls[place - 1].is_over:
            place -= 1
    return place


def _call(entry: dict[str, Any]) -> Call:
    numel = sum(_numel(size) for size in entry["input_sizes"])
    is_over = bool(entry.get("retired")) or entry.get("state") == "completed"  # Gloo says the one, NCCL both
    return Call(entry["profiling_name"].rpartition(":")[2], numel, is_over)


def _numel(size: list[int]) -> int:
    total = 1
    for length in size:
        total *= length
    return total


# Which parameters are in the buckets of torch's DistributedDataParallel, which does not say what it waits for.
#
# [Note: without wrapping anything]
# While its forward runs, torch's class keeps the instance in an attribute of its own; the beacon looks there now and
# then. A few steps later it asks for what the reducer logs: the sizes of the buckets, and the numbers of their
# parameters once they have been built anew. That takes a lock which backward holds while it waits for other ranks; so
# it is asked for early, and in a thread of its own, which may wait for ever without any harm.
#
# Afterwards, a collective that a rank waits in is told by its size, and by the sizes of those before it: backward sends
# the buckets in their order, so the k-th is the one behind the first k. If that leaves a choice, no bucket is named.

_ASK_AFTER = (3, 12)
"""Optimizer steps: by then buckets were built anew, which is logged in the second step or, after a warm-up, later."""


class Parameter(NamedTuple):
    """A parameter that is trained."""

    name: str
    numel: int
    num_bytes: int


class Bucket(NamedTuple):
    """A bucket of torch's reducer."""

    names: tuple[str, ...]
    numel: int


class TorchBuckets:
    """The buckets of the program's model, as soon as they are known."""

    def __init__(self) -> None:
        self._model: weakref.ref[Any] | None = None
        self._num_asked = 0
        self._plan: list[Bucket] = []

    def look(self, num_steps: int) -> None:
        """Look for the model, and ask it once it has trained for some steps. Does not block.

        Args:
            num_steps: Optimizer steps so far.
        """
        if self._model is None:
            active = getattr(_class(), "_active_ddp_module", None)
            self._model = None if active is None else weakref.ref(active)
        elif self._num_asked < len(_ASK_AFTER) and num_steps >= _ASK_AFTER[self._num_asked] and not self._plan:
            self._num_asked += 1
            threading.Thread(target=self._ask, name="lockstep-buckets", daemon=True).start()

    def _ask(self) -> None:
        model = None if self._model is None else self._model()
        if model is None:
            return
        with contextlib.suppress(Exception):  # an interface of torch's own, which changes
            ignored = set(getattr(model, "parameters_to_ignore", ()))
            parameters = [
                Parameter(name, each.numel(), each.numel() * each.element_size())
                for name, each in model.module.named_parameters()
                if each.requires_grad and name not in ignored
            ]
            self._plan = plan_of(model._get_ddp_logging_data(), parameters)

    def name(self, calls: Sequence[Call], place: int) -> str:
        """Return a name for the collective at ``place``, such as ``bucket 4 (layers.7.mlp.*)``, if it is a bucket."""
        found = buckets_at(calls, place, self._plan)
        return f"bucket {found[0]} ({name_of_bucket(self._plan[found[0]].names)})" if len(found) == 1 else ""


def plan_of(logged: Mapping[str, Any], parameters: Sequence[Parameter]) -> list[Bucket]:
    """Return the buckets that a reducer logs after some steps, in the order in which they leave.

    They are built anew after the first step, unless it looks for unused parameters. What does not add up is left out.
    """
    if logged.get("find_unused_parameters") and not logged.get("static_graph"):
        sizes = [int(size) for size in str(logged.get("bucket_sizes", "")).split(",") if size.strip()]
        return _runs(sizes, parameters)
    rebuilt = str(logged.get("rebuilt_per_bucket_param_indices", ""))
    numbers = [[int(number) for number in part.split()] for part in rebuilt.split(",") if part.strip()]
    if sorted(number for part in numbers for number in part) != list(range(len(parameters))):
        return []
    return [_bucket([parameters[number] for number in part]) for part in numbers]


def _runs(sizes: Sequence[int], parameters: Sequence[Parameter]) -> list[Bucket]:
    """Return the buckets of ``sizes`` in bytes: runs of parameters, of which the last ones are in the first bucket."""
    buckets, place = [], 0
    for size in reversed(sizes):
        run: list[Parameter] = []
        while place < len(parameters) and sum(each.num_bytes for each in run) < size:
            run.append(parameters[place])
            place += 1
        if sum(each.num_bytes for each in run) != size:
            return []
        buckets.append(_bucket(run))
    return buckets[::-1] if place == len(parameters) else []


def _bucket(parameters: Sequence[Parameter]) -> Bucket:
    return Bucket(tuple(each.name for each in parameters), sum(each.numel for each in parameters))


def buckets_at(calls: Sequence[Call], place: int, plan: Sequence[Bucket]) -> list[int]:
    """Return the numbers of the buckets that the collective at ``place`` may be, going by those before it."""
    found = []
    for number in range(min(len(plan), place + 1)):
        begin = place - number
        if all(_carries(*pair) for pair in zip(calls[begin : place + 1], plan, strict=False)):
            found.append(number)
    if len(found) == 1:
        return found
    return [number for number in found if _may_begin(calls, place - number, plan)]


def _may_begin(calls: Sequence[Call], place: int, plan: Sequence[Bucket]) -> bool:
    """Return whether a step may begin at ``place``: before it come whole steps, back to something else."""
    while place > 0 and _carries(calls[place - 1], plan[-1]):
        before = calls[max(0, place - len(plan)) : place]
        if not all(_carries(*pair) for pair in zip(reversed(before), reversed(plan), strict=False)):
            return False
        place -= len(before)
    return True


def _carries(call: Call, bucket: Bucket) -> bool:
    return call.name == "all_reduce" and call.numel == bucket.numel


def _class() -> Any:
    return getattr(imported("torch.nn.parallel.distributed"), "DistributedDataParallel", None)


# In a rank: a thread that looks five times a second for what should be known soon.
#
# That is an exception that will end the program, but is held up in a ``finally``; and connections to other machines
# that a new process group has made, so that the kernel probes them: see `lockstep.comm.network`. Standard library
# only.

_LOOKOUT_PERIOD_S = 0.2


class Lookout:
    """Looks at the main thread and at torch's process groups, from a thread of its own that ends with the process."""

    def __init__(self) -> None:
        self._num_machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        self._groups: set[int] = set()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="lockstep-lookout", daemon=True).start()

    def _run(self) -> None:
        pid = os.getpid()
        while os.getpid() == pid:
            time.sleep(_LOOKOUT_PERIOD_S)
            if self._num_machines > 1:
                self._look_for_groups()

    def _look_for_groups(self) -> None:
        world = getattr(imported("torch.distributed.distributed_c10d"), "_world", None)
        with contextlib.suppress(RuntimeError):  # another thread makes or destroys one just now
            groups = {id(group) for group in getattr(world, "pg_map", ())}
            if groups - self._groups:
                set_keepalive()
            self._groups = groups


# In a rank: a thread that writes twice a second what the rank is doing, for the launcher's watchdog to read.
#
# Standard library only, as every script would pay for more. What it knows it finds by looking, not by wrapping
# anything: the main thread's Python frames, the calls that torch's process groups have counted, and the marks of
# progress.py.

STACKS_SIGNAL_OFFSET = 11
"""Above SIGRTMIN: the signal at which a rank writes its stacks; programs use SIGUSR1 and SIGUSR2 themselves."""

_PERIOD_S = 0.5
_MEMORY_PERIOD_S = 2.0
_NUM_FRAMES = 120
_RECORDED_AFTER = 0.5
"""After this part of the patience at one place, a rank asks torch once which collective was the last."""


class Heartbeat:
    """Writes what the main thread does into ``run_dir/beacon-RANK``.

    Args:
        run_dir: The run's folder.
        rank: Of this process.
        patience_s: After how long the launcher asks what the rank waits for.
    """

    def __init__(self, run_dir: str, rank: int, *, patience_s: float) -> None:
        self._file = os.open(os.path.join(run_dir, f"beacon-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._stacks = open(os.path.join(run_dir, f"stacks-{rank}"), "w")  # noqa: SIM115 - open as long as the process
        activity.now.step_counter = make_step_counter(run_dir, rank)
        self._num_bytes = 0
        self._recorded_after_ns = _RECORDED_AFTER * patience_s * 1e9
        self._last: tuple[Any, ...] = ()
        self._moved_at_ns = time.monotonic_ns()
        self._counts_steps = False
        self._buckets = TorchBuckets()
        self._devices: list[tuple[str, int, int, int]] = []
        self._collective: str | None = None
        if hasattr(signal, "SIGRTMIN"):  # Linux
            faulthandler.register(signal.SIGRTMIN + STACKS_SIGNAL_OFFSET, self._stacks, all_threads=True)

    def start(self) -> None:
        """Start the thread, and one that looks for what should be known sooner; they end with the process."""
        activity.callbacks.wants_pace = True
        self.write()
        threading.Thread(target=self._run, name="lockstep-beacon", daemon=True).start()
        Lookout().start()

    def write(self) -> None:
        """Write what this rank does now."""
        ident = threading.main_thread().ident or 0
        frame = sys._current_frames().get(ident)
        frames, now, calls = _frames(frame), activity.now, _num_calls()
        place = (now.num_steps, calls, now.step, now.phase, frame.f_lasti if frame else 0, frames)
        now_ns = time.monotonic_ns()
        if place != self._last:
            self._last, self._moved_at_ns, self._collective = place, now_ns, None
        elif self._collective is None and now_ns - self._moved_at_ns > self._recorded_after_ns:
            self._collective = self._awaited()
        bucket = now.bucket
        data = {
            "pid": os.getpid(),
            "beat_ns": now_ns,
            "moved_ns": self._moved_at_ns,
            "frames": frames,
            "step": now.step,
            "phase": now.phase,
            "num_steps": now.num_steps,
            "num_calls": calls,
            "bucket": "" if bucket is None else f"bucket {bucket[0]} ({activity.name_of_bucket(bucket[1])})",
            "collective": self._collective or "",
            "handles": _handled(ident),
            "failure": now.failure,
            "uses_gpu": _uses_gpu(),
            "pace": now.pace,
            "devices": self._devices,
            "num_bytes": self._num_bytes,
        }
        with contextlib.suppress(OSError):
            text = json.dumps(data).encode()
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))
            self._num_bytes += len(text)

    def _run(self) -> None:
        pid, looked_at = os.getpid(), 0.0
        while os.getpid() == pid:
            time.sleep(_PERIOD_S)
            self._count_steps()
            self._buckets.look(activity.now.num_steps)
            if time.monotonic() - looked_at >= _MEMORY_PERIOD_S:
                self._devices, looked_at = device_memory(), time.monotonic()
            self.write()

    def _count_steps(self) -> None:
        """Count optimizer steps from now on, if torch has been imported by now."""
        optim = imported("torch.optim.optimizer")
        if not self._counts_steps and optim is not None and imported("torch") is not None:
            self._counts_steps = True
            optim.register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        activity.now.num_steps += 1

    def _awaited(self) -> str:
        """Return the collective that this rank waits in, by torch's own record of them, if it keeps one."""
        calls = recorded_calls()
        if (place := awaited(calls)) is None:
            return ""
        bucket = self._buckets.name(calls, place)
        return f"{calls[place].name} of {bucket and f'{bucket}, '}{calls[place].numel} elements"


def _num_calls() -> int:
    """Return how often this process has called collectives, as far as its process groups count them."""
    c10d, total = imported("torch.distributed.distributed_c10d"), activity.now.num_calls
    groups = getattr(getattr(c10d, "_world", None), "pg_map", ())
    with contextlib.suppress(RuntimeError):  # another thread makes or destroys one just now
        for group in list(groups):
            with contextlib.suppress(Exception):  # groups written in Python need not count
                total += group._get_sequence_number_for_group()
    return total


def _handled(ident: int) -> str:
    """Return the exception that the main thread is handling, in an ``except`` or ``finally`` block."""
    if sys.version_info >= (3, 12):
        error = sys._current_exceptions().get(ident)
    else:
        error = sys._current_exceptions().get(ident, (None, None, None))[1]
    if not isinstance(error, Exception):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}{place}"


def _uses_gpu() -> bool:
    cuda = imported("torch.cuda")
    return bool(getattr(cuda, "_initialized", False))


def _frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """Return file, line and function of the innermost frames, innermost first."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _NUM_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found
