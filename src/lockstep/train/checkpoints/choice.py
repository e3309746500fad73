"""Which of a run's checkpoints is loaded: the newest that is whole, and the same one by every rank."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.train.checkpoints import kept
from lockstep.train.checkpoints.parts import read_parts


@dataclass
class Choice:
    """What rank zero has found, for the others to do the same.

    Attributes:
        name: Of the checkpoint; empty if there is none.
        checksum: Of its manifest.
        host: Where rank zero runs.
        passed_over: The names of those that are newer and not whole, each with why.
        problem: Why there is nothing to load though something is there.
    """

    name: str = ""
    checksum: str = ""
    host: str = field(default_factory=socket.gethostname)
    passed_over: dict[str, str] = field(default_factory=dict)
    problem: str | None = None


def choose(folder: Path) -> tuple[Choice, dict[str, Any] | None]:
    """Read the newest checkpoint in ``folder`` that is whole; return which that is, and its parts if there is one."""
    choice = Choice()
    try:
        found, old = kept.find(folder), kept.find_old_format(folder)
    except OSError as error:
        choice.problem = f"Cannot look into the checkpoint folder {folder}: {error.strerror}.\nCheck its permissions."
        return choice, None
    for each in found:
        why = each.problem
        if why is None:
            try:
                parts, manifest = read_parts(each.path)
                choice.name, choice.checksum = each.path.name, manifest.checksum
                return choice, parts
            except CheckpointError as error:
                why = kept.reason(error)
        choice.passed_over[each.path.name] = why
    if found:
        reasons = "\n".join(f"{name}: {why}" for name, why in choice.passed_over.items())
        choice.problem = (
            f"No checkpoint in {folder} is whole.\n{reasons}\nPut back the files of one, or start anew (resume=False)."
        )
    elif old:
        choice.problem = (
            f"The checkpoints in {folder}, such as {old[-1].name}, are of an older Lockstep, whose format is "
            "no longer read.\nEnd that run with the version it was started with, or start anew (resume=False)."
        )
    return choice, None


def read_chosen(folder: Path, choice: Choice) -> dict[str, Any]:
    """Return the parts of the checkpoint that rank zero chose.

    Raises:
        CheckpointError: It cannot be read here, or is another one.
    """
    path = folder / choice.name
    parts, manifest = read_parts(path)
    if manifest.checksum != choice.checksum:
        raise CheckpointError(
            f"{path} on {socket.gethostname()} is another checkpoint than on rank 0's host {choice.host}.\n"
            "The folder must be one that every rank sees, such as on a network drive."
        )
    return parts
