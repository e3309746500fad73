"""Records and logs: files in a folder that the user chose. Nothing of an earlier run is erased."""

import contextlib
import errno
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.base.terminal import lock_file

# How long to wait for the lock of a run that has just ended: its loader processes, which were forked with the file
# open, notice within 5 s that their rank is gone.
_HANDOVER_S = 6.0


def open_locked(path: Path, *, wait_s: float = _HANDOVER_S) -> int:
    """Open a file for appending, locked until this process closes it or ends; return its descriptor.

    The folder is created if it does not exist. Blocks at most ``wait_s`` for a run that is about to end.

    Raises:
        OSError: It cannot be opened; a BlockingIOError if another run writes it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        is_locked = lock_file(file, wait_s)
        if is_locked and path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)  # it may have been moved aside while this process waited
        if not is_locked:
            raise BlockingIOError(errno.EWOULDBLOCK, "another run, which has not ended, writes there", str(path))


def open_record(path: Path, *, fresh: bool) -> int:
    """Open a rank's file of a record as `open_locked` does; if the run begins, keep that of an earlier run aside."""
    file = open_locked(path)
    if not fresh or os.fstat(file).st_size == 0:
        return file
    _keep_aside(path)
    os.close(file)
    return open_locked(path)


def keep_rest_aside(folder: Path, world_size: int) -> None:
    """Keep what else there is of an earlier run's record aside, when the ranks have opened their files; on rank zero.

    Args:
        folder: Of the record.
        world_size: The number of ranks of the run that begins.
    """
    rank_names = {f"rank-{rank}.jsonl" for rank in range(world_size)}
    paths = [path for path in sorted(folder.glob("*rank-*.jsonl")) if path.name not in rank_names]
    paths += folder.glob("run.json")
    for earlier in {_keep_aside(path) for path in paths}:
        print(f"lockstep: the record of an earlier run is now in {earlier}", file=sys.stderr, flush=True)


def _keep_aside(path: Path) -> Path:
    """Move a file of an earlier run's record into the folder ``earlier-RUN`` beside it; return that folder."""
    run = "run"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError), path.open(errors="replace") as lines:
        # Ranks do not wait for each other: each takes the name from its own file, in which it is the same.
        first = json.load(lines)["sessions"][0] if path.name == "run.json" else json.loads(lines.readline())
        run = first["run"].replace(os.sep, "-")
    names = itertools.chain([run], (f"{run}.{number}" for number in itertools.count(1)))
    folder = next(dest for name in names if not (dest := path.parent / f"earlier-{name}").joinpath(path.name).exists())
    folder.mkdir(exist_ok=True)
    path.rename(folder / path.name)
    return folder


# Secrets: command lines are kept in records, which users share.

# Ends at a word boundary: ``--hf-token`` and ``AWS_SECRET_ACCESS_KEY``, but neither ``--tokenizer`` nor ``--author``.
_SECRET_NAME = re.compile(
    r"(?i)(?:token|passw(?:or)?d|passphrase|secret|credentials?|api[-_]?key|(?:access|private)[-_]?key"
    r"|(?:^|[-_])(?:auth|bearer|pwd))(?:$|[-_])"
)
_SECRET_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")
_HIDDEN = "HIDDEN"


def hide_secrets(command: Sequence[str]) -> str:
    """Return a command line for a record, without the values of flags and variables whose names look like secrets.

    Args:
        command: Such as ``["train.py", "--api-key", "k", "HF_TOKEN=t", "--lr", "0.1"]``: this hides ``k`` and ``t``.
    """
    shown: list[str] = []
    hides_next = False
    for part in command:
        name, equals, _ = part.partition("=")
        is_secret = _SECRET_NAME.search(name) is not None
        text = _SECRET_IN_ADDRESS.sub(_HIDDEN, part)
        if hides_next and not part.startswith("-"):
            text = _HIDDEN
        elif equals and is_secret:
            text = f"{name}={_HIDDEN}"
        shown.append(text)
        hides_next = is_secret and not equals and part.startswith("-")
    return shlex.join(shown)
