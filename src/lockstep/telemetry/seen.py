"""What the launcher sees of a rank, and what that means: pure functions of frames and figures."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

Frames = Sequence[Sequence[str | int]]

SILENT_S = 2.0
"""A beacon beats twice a second: after this long, no Python thread of the rank runs."""

_STDLIB = os.path.dirname(os.__file__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", f"{os.sep}lockstep{os.sep}launcher{os.sep}")
_COLLECTIVE_FILES = ("torch/distributed/distributed_c10d.py", "lockstep/comm/collectives.py", "comm/host_sync.py")
_KNOWN = (f"{_PACKAGE}train{os.sep}", f"{_PACKAGE}data{os.sep}", f"{_PACKAGE}parallel{os.sep}")
"""What of the package users may have heard of: named where none of their own lines is under way."""
_NOT_CALLED = ("_", "wrapper", "call")
_WAITS = (".wait(", ".synchronize(")
_GPU_WAITS = (*_WAITS, ".item(", ".cpu(", ".tolist(", ".numpy(", "float(", "print(", ".backward(")
_DEBUGGERS = ("bdb.py", "pdb.py", "code.py", "pydevd.py", "pydevd_frame.py")
_OUTSIDE = {
    "socket.py": "an answer from the network",
    "ssl.py": "an answer from the network",
    "base_events.py": "an event of asyncio",
    "subprocess.py": "a program that it has started",
}


@dataclass(frozen=True)
class RankSeen:
    """What the launcher sees of a rank.

    Attributes:
        frames: File, line and function of the main thread, innermost first.
        still_s: For how long its main thread has been at the same place, with no step and no collective done.
        silent_s: For how long its beacon has not been heard.
        is_busy: Whether it, or a process that it has started, used the processor meanwhile.
        life: What says that it may move although its main thread does not, such as ``it reads or writes``.
        is_stopped: Whether a signal such as SIGSTOP holds it.
        has_left: Whether it has ended.
        step: The step of ``fit``, counted from 0.
        phase: What of that step runs.
        num_steps: Optimizer steps that it has done.
        has_trained: Whether it has done an optimizer step or a collective.
        bucket: The bucket that it waits for, with the names of its parameters.
        collective: The last collective by torch's own record.
        handles: The exception that it is handling.
        failure: The exception that ended its part in the job, although its process goes on.
        held_up: The exception that will end its program, while a ``finally`` holds it up.
        uses_gpu: Whether it has a CUDA context.
    """

    rank: int
    frames: Frames = ()
    still_s: float = 0.0
    silent_s: float = 0.0
    is_busy: bool = False
    life: str = ""
    is_stopped: bool = False
    has_left: bool = False
    step: int | None = None
    phase: str = ""
    num_steps: int = 0
    has_trained: bool = False
    bucket: str = ""
    collective: str = ""
    handles: str = ""
    failure: str = ""
    held_up: str = ""
    uses_gpu: bool = False

    @property
    def idle_s(self) -> float:
        """For how long nothing of it has moved, as far as its place tells."""
        return max(self.still_s, self.silent_s)


def operation(seen: RankSeen) -> str | None:
    """Return what a rank waits in, such as ``all_reduce``; ``None`` if it is in something of its own."""
    if seen.has_left or seen.is_stopped or seen.silent_s > SILENT_S:
        return None
    if seen.bucket:
        return f"all_reduce of {seen.bucket}"
    for file, _, function in reversed(seen.frames):
        if str(file).endswith(_COLLECTIVE_FILES) and not str(function).startswith(_NOT_CALLED):
            return str(function)
    if not seen.frames:
        return None
    file, line, _ = user_frame(seen.frames)
    text = linecache.getline(file, line)
    if in_backward(seen) and (not seen.is_busy or seen.uses_gpu):
        what = f": {seen.collective}" if seen.collective else ""
        return f"backward (gradient exchange{what})"
    if seen.frames[0][0] != file:
        return None
    if seen.uses_gpu and seen.is_busy:  # the host spins while it waits for its GPU
        return "a wait for its GPU" if any(mark in text for mark in _GPU_WAITS) else None
    return next((mark[1:-1] for mark in _WAITS if mark in text and not seen.is_busy), None)


def in_backward(seen: RankSeen) -> bool:
    """Tell whether a rank is in autograd, at a line that calls for it, and not in a hook of somebody's."""
    return bool(seen.frames) and seen.frames[0][2] == "_engine_run_backward"


def is_debugged(seen: RankSeen) -> bool:
    """Tell whether the rank waits for a person: in a debugger, or in ``input()``."""
    if seen.frames and "input(" in linecache.getline(str(seen.frames[0][0]), int(seen.frames[0][1])):
        return True
    return any(os.path.basename(str(file)) in _DEBUGGERS for file, _, _ in seen.frames)


def waits_outside(frames: Frames) -> str:
    """Return what outside of the job a rank waits for, as far as its frames tell; empty if nothing."""
    for file, _, _ in frames[:4]:
        if what := _OUTSIDE.get(os.path.basename(str(file))):
            return what
    return ""


def where_of(file: str, line: int) -> str:
    """Return a short form of file and line."""
    if not file:
        return "an unknown place"
    name = os.path.join("lockstep", os.path.relpath(file, _PACKAGE)) if file.startswith(_PACKAGE) else None
    return f"{name or os.path.basename(file)}:{line}"


def user_frame(frames: Frames) -> tuple[str, int, str]:
    """Return the innermost frame that is neither of Python nor of an installed package."""
    ours: tuple[str, int, str] | None = None
    for entry in frames:
        file, line, function = str(entry[0]), int(entry[1]), str(entry[2])
        if file.startswith(_PACKAGE):
            if ours is None and file.startswith(_KNOWN):
                ours = file, line, function
        elif not (file.startswith((_STDLIB, sys.prefix)) or any(part in file for part in _LIBRARIES)):
            return file, line, function
    if ours is not None:
        return ours
    return (str(frames[0][0]), int(frames[0][1]), str(frames[0][2])) if frames else ("", 0, "")


def place(seen: RankSeen) -> str:
    """Say where a rank is, with the verb of a single rank."""
    if seen.has_left:
        return "has finished already"
    file, line, function = user_frame(seen.frames)
    where = where_of(file, line)
    if seen.is_stopped:
        return f"was stopped by a signal (SIGSTOP), last seen at {where}"
    if seen.silent_s > SILENT_S:
        return f"does not answer: native code holds the interpreter, last seen at {where}"
    if seen.failure:
        return f"has failed ({seen.failure}) but goes on, and is in {function} ({where})"
    if name := operation(seen):
        return f"waits in {name} ({where})"
    for frame_file, _, frame_function in seen.frames:
        if str(frame_file).endswith("torch/utils/data/dataloader.py") and frame_function == "__next__":
            function = "DataLoader.__next__"
    handling = f", handling {seen.handles}" if seen.handles else ""
    return f"is in {function} ({where}){handling}"
