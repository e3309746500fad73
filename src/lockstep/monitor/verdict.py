"""Decide whether a job hangs, and say who waits for whom: pure functions of what was seen of each rank."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

GRACE = 5.0
"""A rank that computes may keep the others waiting this many times longer than one that does nothing."""

_STDLIB = os.path.dirname(os.__file__)
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", f"{os.sep}lockstep{os.sep}launcher{os.sep}")
_COLLECTIVE_FILES = ("torch/distributed/distributed_c10d.py", "lockstep/comm/collectives.py")
_WAITS = (".wait(", ".synchronize(", ".backward(")

Frames = Sequence[tuple[str, int, str]]


@dataclass(frozen=True)
class RankSeen:
    """What the launcher sees of a rank.

    Attributes:
        frames: File, line and function of the main thread, innermost first.
        still_s: For how long its main thread has been at the same place.
        silent_s: For how long its beacon has not been heard.
        is_busy: Whether it used the processor meanwhile.
        is_stopped: Whether a signal such as SIGSTOP holds it.
        has_left: Whether it has ended.
    """

    rank: int
    frames: Frames = ()
    still_s: float = 0.0
    silent_s: float = 0.0
    is_busy: bool = False
    is_stopped: bool = False
    has_left: bool = False


SILENT_S = 2.0
"""A beacon beats twice a second: after this long, no Python thread of the rank runs."""


def operation(seen: RankSeen) -> str | None:
    """Return what a rank waits in, such as ``all_reduce``; ``None`` if it is in something of its own."""
    if seen.has_left or seen.is_stopped or seen.silent_s > SILENT_S:
        return None
    for file, _, function in reversed(seen.frames):
        if file.endswith(_COLLECTIVE_FILES) and not function.startswith(("_", "wrapper", "call")):
            return function
    if seen.frames and (seen.frames[0][0] == _user_frame(seen.frames)[0] or _in_backward(seen)):
        file, line, _ = _user_frame(seen.frames)
        text = linecache.getline(file, line)
        for mark in _WAITS:
            if mark in text and not (mark == ".backward(" and seen.is_busy):
                return "backward (gradient exchange)" if mark == ".backward(" else mark[1:-1]
    return None


def is_hanging(ranks: Sequence[RankSeen], patience_s: float) -> bool:
    """Decide whether some ranks wait for others that will not come. See docs/design/watchdog.md for the rule."""
    waiting = [seen for seen in ranks if operation(seen) is not None]
    others = [seen for seen in ranks if operation(seen) is None]
    if not waiting or any(seen.still_s < patience_s for seen in waiting):
        return False
    waits_s = min(seen.still_s for seen in waiting)
    if others:
        if all(
            seen.has_left or seen.is_stopped or (_idle_s(seen) >= patience_s and not seen.is_busy) for seen in others
        ):
            return True
        return waits_s >= GRACE * patience_s
    # A transfer may simply be slow where all are in the same call.
    return len({_place(seen) for seen in waiting}) > 1 or waits_s >= GRACE * patience_s


def report(ranks: Sequence[RankSeen], patience_s: float, folder: str, *, num_nodes: int = 1) -> str:
    """Return the report: the ranks that keep the others waiting first."""
    groups: dict[str, list[RankSeen]] = {}
    for seen in sorted(ranks, key=lambda seen: (operation(seen) is not None, seen.rank)):
        groups.setdefault(_place(seen), []).append(seen)
    lines = [f"The job hangs: ranks have waited for each other for more than {patience_s:g} s."]
    for place, members in groups.items():
        numbers = ", ".join(str(seen.rank) for seen in members)
        many = len(members) > 1
        text = place if many else place.replace("wait in", "waits in", 1)
        if not members[0].has_left and not members[0].is_stopped:
            text += f" for {max(_idle_s(seen) for seen in members):.0f} s" * (not _moves(members, patience_s))
        lines.append(f"{'ranks' if many else 'rank'} {numbers} {text}")
    called = {operation(seen) for seen in ranks} - {None}
    if all(operation(seen) for seen in ranks):
        if len(groups) > 1:
            what = "different collectives" if len(called) > 1 else f"{called.pop()} from different lines"
            lines.append(f"The ranks call {what}: each must be called by all ranks, in the same order.")
        elif num_nodes > 1:
            lines.append("All ranks of this machine wait in the same call: look at the report of the other machines.")
        else:
            lines.append(
                "All ranks wait in the same call: the transfer itself hangs, or is slower than --watchdog allows."
            )
    lines.append(f"The Python stacks of all ranks are in {folder}.")
    return "\n".join(lines)


def _moves(members: Sequence[RankSeen], patience_s: float) -> bool:
    return all(_idle_s(seen) < patience_s for seen in members)


def _idle_s(seen: RankSeen) -> float:
    return max(seen.still_s, seen.silent_s)


def _place(seen: RankSeen) -> str:
    if seen.has_left:
        return "finished already"
    file, line, function = _user_frame(seen.frames)
    where = f"{os.path.basename(file)}:{line}" if file else "an unknown place"
    if seen.is_stopped:
        return f"was stopped by a signal (SIGSTOP), last seen at {where}"
    if seen.silent_s > SILENT_S:
        return f"does not answer: native code holds the interpreter, last seen at {where}"
    if name := operation(seen):
        return f"wait in {name} ({where})"
    for frame_file, _, frame_function in seen.frames:
        if frame_file.endswith("torch/utils/data/dataloader.py") and frame_function == "__next__":
            return f"is in DataLoader.__next__ ({where})"
    return f"is in {function} ({where})"


def _user_frame(frames: Frames) -> tuple[str, int, str]:
    """Return the innermost frame that is neither of Python nor of an installed package."""
    for file, line, function in frames:
        is_ours = "/lockstep/" in file and os.path.dirname(os.path.dirname(__file__)) in file
        if not (is_ours or file.startswith((_STDLIB, sys.prefix)) or any(part in file for part in _LIBRARIES)):
            return file, line, function
    return frames[0] if frames else ("", 0, "")


def _in_backward(seen: RankSeen) -> bool:
    return any(function == "_engine_run_backward" for _, _, function in seen.frames)
