"""The checkpoints of a run in its folder: which there are, which are to stay, and how a new one comes to be there.

Each is a folder such as ``step-0000000100``, written under another name and renamed. Those that are to go are renamed
first as well, so that whatever has a checkpoint's name was whole once.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.train.checkpoints import disk
from lockstep.train.checkpoints.folder import read_manifest, write_folder
from lockstep.train.checkpoints.tensors import Pieces

_NAME = re.compile(r"step-(\d{10})")
_LEFTOVER = re.compile(r"step-\d{10}\.(partial|removed)")
_OLD_FORMAT = re.compile(r"step-\d{10}\.pt")


@dataclass(frozen=True)
class Found:
    """A checkpoint in a run's folder.

    Attributes:
        step: After how many steps it was taken.
        number: Of the save, in the order in which they happened in this folder; infinite if it does not say.
        loss: What the evaluation after that step found, or None.
        problem: Why it cannot be loaded, as far as its manifest tells.
    """

    path: Path
    step: int
    number: float
    loss: float | None
    problem: str | None


def name_of(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps."""
    return f"step-{step:010d}"


def find(folder: Path) -> list[Found]:
    """Return the checkpoints in a run's ``folder``, newest first. Reads their manifests only."""
    found = [_look_at(path, int(match[1])) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found, key=lambda each: (each.number, each.step), reverse=True)


def find_old_format(folder: Path) -> list[Path]:
    """Return the checkpoints that Lockstep wrote before it had this format, oldest first."""
    return sorted(path for path in folder.iterdir() if _OLD_FORMAT.fullmatch(path.name))


def best_of(found: Sequence[Found]) -> Found | None:
    """Return the one whose evaluation found the lowest loss, the older one of equals; None if none was evaluated."""
    evaluated = [each for each in found if each.loss is not None]
    return min(evaluated, key=lambda each: (each.loss, each.number), default=None)


def to_remove(found: Sequence[Found], *, keep: int, keep_best: bool, damaged: Iterable[Path] = ()) -> list[Found]:
    """Return which of a run's checkpoints are to go now that the first of them was written.

    Args:
        found: All of them, as `find` returns them.
        keep: So many of the newest whole ones stay.
        keep_best: Whether the best one stays, too.
        damaged: Those that are known not to be whole.
    """
    bad = set(damaged)
    whole = [each for each in found if each.problem is None and each.path not in bad]
    stay = [*whole[:keep]]
    if keep_best and (best := best_of(whole)) is not None:
        stay.append(best)
    # A damaged one ahead of the newest may be one that can be read later.
    newest = whole[0].step if whole else -1
    return [each for each in found if each not in stay and (each in whole or each.step <= newest)]


def write_kept(
    folder: Path, step: int, files: Mapping[str, Pieces], *, number: int, loss: float | None, anew: bool = False
) -> None:
    """Write the checkpoint after ``step`` steps into a run's ``folder``. Blocks until it is on disk.

    Args:
        folder: Of the run.
        step: Of the run.
        files: The content of each.
        number: Of the save.
        loss: What an evaluation after that step found.
        anew: Whether one of that step is of another run: then it is not changed, but moved out of the way.

    Raises:
        OSError: It cannot be written; the others, and one of that name, are as they were.
    """
    path = folder / name_of(step)
    about = {"step": step, "number": number, "loss": loss if loss is None or math.isfinite(loss) else None}
    if path.exists() and not anew:
        write_folder(path, files, about)
        return
    partial = folder / f"{path.name}.partial"
    write_folder(partial, files, about)
    if path.exists():
        disk.rename(path, folder / f"{path.name}.removed")  # a leftover, cleared away with the others
    disk.rename(partial, path)
    disk.flush_folder(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what writes and removals left that were not finished. What cannot be removed stays."""
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            _remove(path)


def remove_kept(path: Path) -> None:
    """Remove a checkpoint. What cannot be removed stays, under another name."""
    aside = path.with_name(f"{path.name}.removed")
    with contextlib.suppress(OSError):
        disk.rename(path, aside)
        _remove(aside)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            disk.remove(path)
        disk.remove_folder(folder)


def _look_at(path: Path, step: int) -> Found:
    try:
        about = read_manifest(path).about
    except CheckpointError as error:
        # "The checkpoint PATH is damaged: FILE WHY." or that there is none
        return Found(path, step, math.inf, None, reason(error))
    number, loss = about.get("number"), about.get("loss")
    if type(number) is not int or about.get("step") != step:
        return Found(path, step, math.inf, None, "it is not a checkpoint of a run")
    return Found(path, step, number, loss if type(loss) is float else None, None)


def reason(error: CheckpointError) -> str:
    """Return why a checkpoint cannot be loaded, without its path."""
    return str(error).splitlines()[0].removesuffix(".").partition(" is damaged: ")[2] or str(error).splitlines()[0]
