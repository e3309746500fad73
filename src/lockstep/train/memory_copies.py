"""Copies of a run's state in the memory of every host, from which ranks that are started again go on."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.comm.collectives import all_gather_object, broadcast
from lockstep.comm.world import World
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.launcher.reaper import MEMORY, memory_of
from lockstep.run_folder import current_run_folder
from lockstep.telemetry.resources import free_and_total_bytes
from lockstep.train.checkpoint import BackgroundWriter, State, parts_of, state_in
from lockstep.train.checkpoint_storage import UnfitValueError, unfit_message, unwritable_message
from lockstep.train.checkpoints.slot import Mark, Slot, parts_in, read_copy, read_mark

_CHUNK_BYTES = 1 << 26
"""What travels at a time to hosts that have no copy."""

_WAIT_S = 600.0
"""How long a device may take to copy its state to the host."""

_WAIT_AFTER_ERROR_S = 2.0

_numbers = itertools.count()


def claim_folder() -> Path:
    """Return where this host keeps the copies of the run that begins now.

    A process may do one run after the other, and does them again if it is started again: so they are numbered. The
    copies of those before are removed.

    Raises:
        ConfigurationError: No launcher of ours started this process, or there is no file system in memory.
    """
    number, launcher = next(_numbers), current_run_folder()
    if launcher is None:
        raise ConfigurationError(
            "memory_checkpoint_every keeps copies of the state in memory until ranks are started again, and nobody "
            "would start these again.\nUse lockstep train or lockstep run with --max-restarts N, or leave it out."
        )
    if not os.path.ismount(MEMORY):
        raise ConfigurationError(
            f"memory_checkpoint_every needs a file system in memory, and there is none at {MEMORY} on "
            f"{socket.gethostname()}.\nMount a tmpfs there, or use checkpoints on disk instead."
        )
    base = Path(memory_of(str(launcher)))
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        found = base.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(0, "it belongs to somebody else")
        for earlier in range(number):
            shutil.rmtree(base / str(earlier), ignore_errors=True)
        (base / str(number)).mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"Cannot make the folder {base} for memory_checkpoint_every: {error.strerror}.\nCheck its permissions."
        ) from error
    return base / str(number)


def make_copies(world: World) -> MemoryCopies:
    """Return the copies of the run that begins now. Collective: every rank.

    Raises:
        ConfigurationError: On every rank, if one of them cannot have any.
    """
    folder, problem = None, None
    try:
        folder = claim_folder()
    except ConfigurationError as error:
        problem = str(error)
    for rank, text in enumerate(all_gather_object(problem, group=world.group, device=world.device)):
        if text is not None:
            raise ConfigurationError(text if rank == 0 else f"Rank {rank}: {text}")
    assert folder is not None
    one_host = world.local_world_size == world.world_size
    return MemoryCopies(folder, world, is_writer=world.local_rank == 0, several_hosts=not one_host)


@dataclass
class _Held:
    """The newest whole copy on this rank's host."""

    mark: Mark
    body: bytearray

    @property
    def identity(self) -> list[int]:
        return [self.mark.step, self.mark.tensors_bytes, self.mark.rest_bytes, self.mark.sum]


@dataclass
class MemoryCopies:
    """The last two copies of the state on each host, in a folder in memory that outlives the ranks.

    The first rank of each host writes, every rank reads.

    Args:
        folder: Of this host.
        world: The ranks that train together.
        is_writer: Whether this rank writes: the first of its host does.
        several_hosts: Whether ranks other than the first of all do, too, and so need the whole state.

    Attributes:
        passed_over: Copies of this host that are damaged, each with why.
    """

    folder: Path
    world: World
    is_writer: bool
    several_hosts: bool
    passed_over: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._slots = [Slot(self.folder / f"copy-{number}", self._make_room) for number in range(2)]
        self._next, self._num_made, self._writer = 0, 0, BackgroundWriter()

    def newest(self) -> Newest:
        """Find the newest whole copy that any host has.

        Collective: every rank. Blocks until all have read theirs.
        """
        held = self._read_newest()
        identity = None if held is None else held.identity
        found = all_gather_object([identity, self.passed_over], group=self.world.group, device=self.world.device)
        self.passed_over = sorted({text for _, texts in found for text in texts})
        return Newest(self.world, held, [each for each, _ in found])

    def save(self, state: Mapping[str, Any], *, step: int) -> None:
        """Copy ``state`` on the first rank of each host; the others do nothing.

        Blocks until the copy is made; on CUDA, until it is queued and the one before is made. A host that has no room
        goes on without copies, and says so once.
        """
        if not self.is_writer:
            return
        slot = self._slots[self._next]
        try:
            if not self._writer.wait(_WAIT_S):
                raise TimeoutError(0, f"the device did not copy it within {_WAIT_S:g} s")
            if self._writer.error is not None:
                raise self._writer.error
            finish = slot.take(parts_of(state), step)
        except UnfitValueError as error:
            self._give_up(unfit_message("in memory", error))
        except (OSError, RuntimeError) as error:
            self._give_up(unwritable_message("in memory", error))
        else:
            (self._writer.start if self.world.device.type == "cuda" else self._writer.run)(finish)
            self._next = 1 - self._next

    def close(self, *, wait_s: float = _WAIT_S) -> None:
        """Wait for what is being copied, and let go of the memory; the copies stay until the launcher ends."""
        if self._writer.wait(wait_s):
            for slot in self._slots:
                slot.close()

    def __enter__(self) -> MemoryCopies:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """After an error little is waited for: the device may be what hangs."""
        self.close(wait_s=_WAIT_S if error is None else _WAIT_AFTER_ERROR_S)

    def _read_newest(self) -> _Held | None:
        marks = [(mark, number) for number, slot in enumerate(self._slots) if (mark := read_mark(slot.path))]
        for mark, number in sorted(marks, key=lambda each: each[0].step, reverse=True):
            try:
                body = read_copy(self._slots[number].path, mark)
            except CheckpointError as error:
                host = socket.gethostname()
                self.passed_over.append(f"in the memory of {host} after step {mark.step}: it {error}")
                continue
            self._next = 1 - number
            return _Held(mark, body)
        return None

    def _make_room(self, num_bytes: int) -> None:
        """Check that there is room for a file, and for the second one if this is the first."""
        self._num_made += 1
        needed = num_bytes * (2 if self._num_made == 1 else 1)
        found = os.statvfs(self.folder)
        for what, free in ((MEMORY, found.f_bavail * found.f_frsize), ("memory", free_and_total_bytes()[0])):
            if free < needed:
                has = f"{free / 2**20:,.1f} MiB of {what} are free"
                raise OSError(0, f"two of them take {2 * num_bytes / 2**20:,.1f} MiB, and {has}")

    def _give_up(self, text: str) -> None:
        self.is_writer = False
        for slot in self._slots:
            with contextlib.suppress(OSError):
                slot.close()
                slot.path.unlink(missing_ok=True)
        cause = text.splitlines()[0]
        print(
            f"lockstep: {socket.gethostname()} keeps no copies of the state in memory from here on. {cause}\n"
            "Make room there (docker run --shm-size), or use checkpoints on disk.",
            file=sys.stderr,
            flush=True,
        )


@dataclass(frozen=True)
class Newest:
    """The newest whole copy of all hosts.

    Args:
        world: The ranks that look for it.
        held: What this rank's host has.
        identities: Of what each rank's host has.
    """

    world: World
    held: _Held | None
    identities: list[list[int] | None]

    @property
    def step(self) -> int | None:
        """After how many steps it was taken; None if there is none. The same on every rank."""
        return max((each[0] for each in self.identities if each is not None), default=None)

    def load(self) -> State:
        """Return the state in it; hosts that do not have it get it from one that does.

        Collective: every rank. Blocks until all have it.
        """
        source = next(rank for rank, each in enumerate(self.identities) if each is not None and each[0] == self.step)
        identity = self.identities[source]
        assert identity is not None
        mark = Mark(*identity)
        body = self.held.body if self.held is not None and self.held.mark == mark else bytearray(mark.num_bytes)
        if any(each != identity for each in self.identities):
            self._send(torch.frombuffer(body, dtype=torch.uint8), source)
        return state_in(parts_in(body, mark))

    def _send(self, body: torch.Tensor, source: int) -> None:
        for start in range(0, body.numel(), _CHUNK_BYTES):
            chunk = body[start : start + _CHUNK_BYTES]
            sent = chunk.to(self.world.device, copy=True)
            broadcast(sent, group=self.world.group, src=source)
            chunk.copy_(sent)
