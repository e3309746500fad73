"""Whether all ranks see the same folder."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from pathlib import Path

from lockstep.comm.collectives import all_gather_object, broadcast_object
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError

_PATIENCE_S = 15.0
"""Network drives may show a new file late."""
_PAUSE_S = 0.05
_MARK = "seen-by-all-"


def require_shared(folder: Path, world: World) -> None:
    """Check that what rank zero puts into ``folder`` is there for every rank.

    Collective: every rank. Blocks until all have looked, at most some seconds.

    Raises:
        ConfigurationError: On every rank: one of them sees another folder, or none.
    """
    if world.world_size == 1:
        return
    name = _MARK + secrets.token_hex(8)
    if world.is_rank_zero:
        with contextlib.suppress(OSError):  # then nobody sees it
            for left in folder.glob(f"{_MARK}*"):
                left.unlink(missing_ok=True)  # by a run that was killed
            (folder / name).touch()
    name = broadcast_object(name, group=world.group, device=world.device)
    deadline = time.monotonic() + _PATIENCE_S
    while not (is_there := (folder / name).exists()) and not world.is_rank_zero and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    answers = all_gather_object([socket.gethostname(), is_there], group=world.group, device=world.device)
    if world.is_rank_zero:
        (folder / name).unlink(missing_ok=True)
    for rank, (host, sees) in enumerate(answers):
        if not sees:
            raise ConfigurationError(
                f"Rank {rank} on {host} does not see the folder {folder} of rank 0 on {answers[0][0]}.\n"
                "Checkpoints are read by every rank: name a folder on a drive that all machines share."
            )
