"""In a rank: a thread that writes its state twice a second, which the launcher's watchdog reads.

Uses only the standard library, to keep the start of scripts fast. Nothing of the program is wrapped: the thread reads
the Python frames of the main thread, the number of calls that torch's process groups count, the state that the engines
write into `lockstep.base.activity`, and torch's record of collectives (the flight recorder).
"""

import atexit
import contextlib
import faulthandler
import importlib
import json
import math
import mmap
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.base import activity
from lockstep.base.activity import format_bytes
from lockstep.base.rank_files import HEARTBEAT, STACKS, STEP, rank_file, rename_rank, replace_file
from lockstep.health.rank_state import process_state

# The signal at which a rank writes its stacks; programs may use SIGUSR1 and SIGUSR2.
STACKS_SIGNAL = signal.SIGRTMIN + 11

_PERIOD_S = 0.5
_STOP_TIMEOUT_S = 2.0
_MEMORY_PERIOD_S = 2.0
_NUM_FRAMES = 120
# After this share of the patience at one place, a rank reads which collective torch recorded last.
_RECORDED_AFTER = 0.5
# What a heartbeat has of `lockstep.base.activity.now`.
_REPORTED = ("step", "phase", "num_steps", "collective", "failure")
# No program trains alone for so many steps before it joins a process group.
_SURE_STEPS = 100
_ALONE = (
    "lockstep: no rank has joined a process group: each of {} processes runs the whole script alone.\n"
    "To train one model on all of them, call lockstep.init() and wrap the model in lockstep.DistributedDataParallel; "
    "if each is to run alone, nothing is wrong."
)


def imported(name: str) -> Any:
    """Return a module if the program has completely imported it, or None. Imports nothing."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if spec is None or getattr(spec, "_initializing", False) else module


def internals() -> Any:
    """Return the module of torch's private names once the program has imported torch, or None."""
    return imported("torch") and importlib.import_module("lockstep.base.torch_internals")


# --- the files --------------------------------------------------------------------------------------------------------


def read_step_counter(run_dir: Path, rank: int) -> tuple[int | None, int]:
    """Return the current or last step of a rank, counted from 0, and the number of its optimizer steps."""
    try:
        step, num_updates = memoryview(rank_file(run_dir, STEP, rank).read_bytes()).cast("q")
    except (OSError, ValueError, TypeError):  # there is none, or it is being created
        return None, 0
    return (step - 1 if step else None), num_updates


class Heartbeat:
    """Writes what the main thread does into ``run_dir/heartbeat-RANK``.

    Args:
        run_dir: The launcher's folder.
        rank: Of this process; or the name of a spare.
        patience_s: After how long the launcher asks what the rank waits for; zero: nobody reads the heartbeats.
        num_peers: The number of processes that are to train together; rank zero says if they do not.
    """

    def __init__(self, run_dir: str, rank: int | str, *, patience_s: float, num_peers: int = 1) -> None:
        self._path = rank_file(run_dir, HEARTBEAT, rank)
        # Kept open, as a signal handler cannot open it; for appending, as the launcher empties it.
        self._stacks = rank_file(run_dir, STACKS, rank).open("a")
        # Mapped into memory, so that the step of a rank that was killed can be read.
        with rank_file(run_dir, STEP, rank).open("wb+") as file:
            size = file.truncate(activity.now.step_counter.nbytes)
            activity.now.step_counter = memoryview(mmap.mmap(file.fileno(), size)).cast("q")
        self._patience_s = patience_s
        self._num_peers, self._has_warned = num_peers, str(rank) != "0" or num_peers == 1
        self._counts_steps = False
        self._place: tuple[Any, ...] = ()
        # What a heartbeat has in common with the last one.
        self._state: dict[str, Any] = {"pid": os.getpid(), "recorded_call": "", "devices": [], "num_bytes": 0}
        self._writing, self._ends = threading.Lock(), threading.Event()
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)

    def start(self) -> None:
        """Start the thread, which ends before the interpreter is finalized."""
        self._count_steps()
        atexit.register(self._warn_if_alone)
        atexit.register(end_stopped_children)  # after multiprocessing's own handler, so it runs before that
        if not self._patience_s:
            return
        self.write()
        thread = threading.Thread(target=self._run, name="lockstep-heartbeat", daemon=True)
        thread.start()
        # The frames that the thread reads may hold the last reference to a process group. If it frees one while the
        # interpreter is finalized, C++ ends the process with SIGABRT. Handlers run in the opposite order.
        atexit.register(thread.join, _STOP_TIMEOUT_S)
        atexit.register(self._ends.set)

    def rename(self, before: str, after: str) -> None:
        """Go on with the files of another rank, as this process has another number now."""
        with self._writing:
            rename_rank(self._path.parent, before, after)
            self._path = rank_file(self._path.parent, HEARTBEAT, after)

    def write(self) -> None:
        """Write the state of this rank; called by the thread of the heartbeat, or by that of a fatal exception."""
        if os.getpid() != self._state["pid"] or not self._patience_s:
            return  # A forked child is not this rank; the lock may be held there forever.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        # `walk_stack(None)` would return the frames of this thread.
        walked = () if frame is None else islice(traceback.walk_stack(frame), _NUM_FRAMES)
        content: dict[str, Any] = {name: getattr(activity.now, name) for name in _REPORTED}
        content["frames"] = [(frame.f_code.co_filename, line or 0, frame.f_code.co_name) for frame, line in walked]
        if bucket := activity.now.bucket:
            content["collective"] = f"all_reduce of bucket {bucket[0]} ({activity.name_of_bucket(bucket[1])})"
        # With the last instruction, a loop on one line counts as moving.
        state, calls, now_s = self._state, num_calls(), time.monotonic()
        place = (*content.values(), calls, frame.f_lasti if frame else 0)
        if place != self._place:
            self._place = place
            state |= {"moved_s": now_s, "recorded_call": ""}
        elif not state["recorded_call"] and now_s - state["moved_s"] > _RECORDED_AFTER * self._patience_s:
            state["recorded_call"] = recorded_call()
        content |= {"beat_s": now_s, "uses_gpu": uses_gpu()}
        text = json.dumps(content | state)
        # Replaced as a whole, as a mixture of two heartbeats may be valid JSON.
        with contextlib.suppress(OSError), self._writing:
            try:
                replace_file(self._path, text)
                state["num_bytes"] += len(text)
            except OSError:  # The disk is full: with its old heartbeat, this rank would seem not to respond.
                os.truncate(self._path, 0)

    def _run(self) -> None:
        measured_at = 0.0
        while not self._ends.wait(_PERIOD_S):
            self._count_steps()
            if activity.now.num_steps >= _SURE_STEPS:
                self._warn_if_alone()
            if time.monotonic() - measured_at >= _MEMORY_PERIOD_S:
                self._state["devices"], measured_at = device_memory(), time.monotonic()
                if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and _process_groups():
                    # Let the kernel probe the connections to other machines. Those of NCCL are opened later than the
                    # group, when a collective first needs them.
                    from lockstep.comm.network import set_keepalive

                    set_keepalive()
            self.write()

    def _warn_if_alone(self) -> None:
        """Print once on rank zero that no rank has joined a process group; without it, the others cannot have."""
        if self._has_warned or os.getpid() != self._state["pid"] or activity.now.failure or has_joined():
            return
        self._has_warned = True
        print(_ALONE.format(self._num_peers), file=sys.stderr, flush=True)

    def _count_steps(self) -> None:
        # Modules are not imported here: that could change the program's measurements, and may fail while another
        # thread imports the same module.
        if not self._counts_steps and (optim := imported("torch.optim.optimizer")) and imported("torch"):
            self._counts_steps = True
            optim.register_optimizer_step_post_hook(_count_step)


def _count_step(*_: Any) -> None:
    activity.now.num_steps += 1


# What ranks communicate with other than torch's process groups.
_OTHER_LIBRARIES = ("mpi4py.MPI", "horovod", "jax")


def has_joined() -> bool:
    """Return whether this process is, or was, in a process group of torch, or uses another library for that."""
    # `init_process_group` leaves its hook behind; a program may replace it, so the groups that live count as well.
    by_hook = getattr(sys.excepthook, "__module__", "") == "torch.distributed.distributed_c10d"
    return by_hook or num_calls() > 0 or bool(_process_groups()) or any(map(imported, _OTHER_LIBRARIES))


def end_stopped_children() -> None:
    """Kill stopped loader processes when the program ends.

    The exit handler of multiprocessing sends SIGTERM to daemonic children and joins them without a timeout. A process
    stopped by SIGSTOP does not handle SIGTERM, so the rank would never exit.
    """
    for child in multiprocessing.active_children():
        if child.daemon and process_state(child.pid or 0)[0] == "T":
            child.kill()


def _process_groups() -> list[Any]:
    with contextlib.suppress(RuntimeError):  # another thread creates or destroys one
        return list(internals().process_groups()) if imported("torch") else []
    return []


def num_calls() -> int:
    """Return how many collectives this process has called, as far as its process groups count them."""
    return activity.now.num_calls + sum(int(internals().sequence_number(group)) for group in _process_groups())


def uses_gpu() -> bool:
    """Return whether this process uses an accelerator. Imports and initializes nothing."""
    with contextlib.suppress(Exception):  # torch is not imported yet, or there is no accelerator
        return bool(internals().is_allocator_initialized())
    return False


def device_memory() -> list[str]:
    """Return a sentence on the memory of each device in use, by torch's allocator. Does not wait for a device."""
    sentences, torch = [], imported("torch")
    with contextlib.suppress(Exception):  # a device that has failed
        for index in range(torch.accelerator.device_count() if uses_gpu() else 0):
            stats = torch.accelerator.memory_stats(index)
            if taken := stats.get("reserved_bytes.all.peak", 0):
                total = torch.get_device_module().get_device_properties(index).total_memory
                held, total, peak = map(format_bytes, (stats["allocated_bytes.all.current"], total, taken))
                device = f"{torch.accelerator.current_accelerator()}:{index}"
                sentences.append(f"{held} in tensors on {device}, at most {peak} of its {total} were reserved")
    return sentences


# --- torch's flight recorder ------------------------------------------------------------------------------------------


def recorded_call() -> str:
    """Return the collective of this process in torch's record that it waits for; empty without a record.

    This is the first one after the last completed one, such as ``all_reduce of 8 elements, number 3, scheduled``. If
    torch did not record which have completed, or if all have, it is the last one.
    """
    with contextlib.suppress(Exception):  # torch is not imported, or its record has another format
        if activity.now.device is not None:
            # The record queries events: see [Note: streams and threads] in accelerator.py.
            imported("torch").accelerator.set_device_index(activity.now.device)
        for text in internals().flight_records():
            entries = [entry for entry in json.loads(text).get("entries", ()) if not entry.get("is_p2p")]
            entries.sort(key=lambda entry: (entry["time_created_ns"], entry["record_id"]))
            # Gloo only marks completed ones as retired.
            states = ["completed" if entry.get("retired") else entry.get("state") for entry in entries]
            ended = [place for place, state in enumerate(states) if state == "completed"]
            if entries:
                place = min(ended[-1] + 1, len(entries) - 1) if ended else -1
                name, sizes = entries[place]["profiling_name"].rpartition(":")[2], entries[place]["input_sizes"]
                what = f"{name} of {sum(map(math.prod, sizes))} elements"
                return f"{what}, number {entries[place].get('collective_seq_id')}, {states[place]}"
    return ""
