"""A training loop goes on in place when a rank is lost: the step that was not completed is done again.

[Note: attempts]
A loop is a row of attempts, each with the same collectives on every rank. When a rank is lost, the attempts of the
others fail: in the collective that it does not take part in, or because the generation has changed
(comm/generations.py). All of them, and the rank that takes its place, then

1. meet in the next generation, and connect their engines to its group;
2. compare how many attempts each has completed. A rank may have received the last collective of an attempt that others
   have not; its update is made, so it counts, and those that are behind copy its state;
3. copy the state from the first rank that is most ahead to each rank that lacks it, over the group;
4. repeat the attempt, from the same parameters, optimizer state and buffers, with the same samples and random numbers.

A failed attempt must leave no trace. Parameters and optimizer state change in the optimizer's step only, after the last
collective. Buffers change in forward: they are kept at the start of an attempt and restored. Before an update, the
buffers of rank zero are sent to all ranks, as rank zero may be lost after it. On a device, collectives do not fail but
are aborted, and leave anything in the gradients: so before an update the host waits for the device.
"""

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep import activity
from lockstep.accelerator import synchronize
from lockstep.comm.collectives import (
    Group,
    all_gather_object,
    broadcast_coalesced,
    broadcast_object,
    has_all_gather,
    wait_for_transfer,
)
from lockstep.comm.generations import Membership
from lockstep.comm.world import World
from lockstep.containers import map_tensors
from lockstep.data.stream import Stateful
from lockstep.errors import CollectiveError, ConfigurationError, tells_of_others
from lockstep.parallel.local_sgd import LocalSGD
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.rank_files import Arrival, Generation, RecoveryReport, launcher_folder, withdraw_recovery
from lockstep.telemetry.recorder import Place, end_recoveries, record_recovery
from lockstep.train.skipping import BufferSnapshot

# Size of a message with state.
_CHUNK_BYTES = 64 * 2**20


@runtime_checkable
class Connected(Protocol):
    """A part that holds process groups, such as an engine."""

    def modules_to_restore(self) -> list[nn.Module]:
        """Return the modules whose buffers change in a step."""

    def restore(self) -> None:
        """Return to the begin of the attempt, apart from buffers."""

    def reconnect(self, world: World) -> None:
        """Use the groups of ``world`` from now on. Collective: every rank."""

    def agreed_plan(self) -> Any:
        """Return what the ranks have agreed on so far, such as the order of buckets; any JSON value."""

    def use_plan(self, plan: Any) -> None:
        """Use what another rank's `agreed_plan` returned. Collective: every rank."""


@runtime_checkable
class Sharded(Protocol):
    """A part of whose state each rank has a shard, which `Connected.use_plan` divides again."""

    def replica_state(self) -> dict[str, Any]:
        """Return the rest of its state, for ``load_state_dict``."""


class Recovery:
    """Lets a script's own loop go on in place when a rank is lost; without ``--max-restarts`` it does nothing.

        with lockstep.init() as world:
            model = lockstep.DistributedDataParallel(Net().to(world.device))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            recovery = lockstep.Recovery(world, model=model, optimizer=optimizer)
            while recovery.step < 1000:
                with recovery.attempt():
                    batch = batch_of(recovery.step, world.rank, world.world_size)
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    If a rank is lost in the block, the block ends on all others, the state is as at its beginning, and `step` has not
    changed: the loop does the step again. A rank that takes the place of a lost one runs the script from its start, and
    gets the state of the others here, in the constructor: its `step` is theirs. All that the loop needs must be in the
    given parts, or follow from `step` and from the world, whose numbers may change. The update should be the
    last in the block. Process groups of the script's own are gone after a recovery.

    With `LocalSGD` or `DiLoCo` as the last of the parts, enter no block: each exchange is one; see there.

    Collective: every rank creates one, after the set-up, and enters the same blocks.

    Args:
        world: Of `lockstep.init`.
        parts: By name: the wrapped model, the optimizer, and anything else with ``state_dict`` and ``load_state_dict``.

    Attributes:
        step: Number of blocks, or of exchanges, completed.
        on_rejoined: Called after a recovery.

    Raises:
        ConfigurationError: A part cannot be used.
    """

    def __init__(
        self,
        world: World,
        *,
        doing: Callable[[], str] | None = None,
        exchanging: LocalSGD | None = None,
        **parts: Stateful,
    ) -> None:
        check_parts(parts)
        own = [part for part in parts.values() if isinstance(part, LocalSGD)]
        # If ranks train alone between exchanges, each exchange is an attempt, and steps are not done again.
        averaging = own[0] if own else exchanging
        self._world, self._parts = world, parts
        self._connected = {name: part for name, part in parts.items() if isinstance(part, Connected)}
        self._engines: list[Connected | LocalSGD] = [*self._connected.values(), *own]
        self.step, self._has_state, self._is_updated = 0, not world.is_late, False
        self._doing = doing or (lambda: f"{'exchange' if own else 'step'} {self.step + 1}")
        self.on_rejoined: Callable[[], None] | None = None
        modules = [module for part in self._connected.values() for module in part.modules_to_restore()]
        self._buffers = [each for module in modules if (each := BufferSnapshot(module)).names]
        self._handles = []
        for part in parts.values():
            if isinstance(part, Optimizer) and averaging is None:
                self._handles.append(part.register_step_pre_hook(self.before_update))
                self._handles.append(part.register_step_post_hook(self._after_update))
        self._plans: dict[str, Any] = {}
        self._membership: Membership | None = None
        may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        folder = launcher_folder()
        # Only groups that `init` has made can be made again.
        is_ours = folder is not None and world.owned is not None
        if folder is not None and Membership.is_used:
            withdraw_recovery(folder, os.getpid())  # not complete any more, but it can only be restarted
        elif may_restart and is_ours and (averaging is None or averaging.can_reconnect):
            self._membership = Membership(world, None if averaging is None else Arrival(0, averaging.sync_patience))
            if averaging is not None:
                averaging.attempt, averaging.before_update = self.attempt, self.before_update
            if not self._has_state:
                self._rejoin()
            for part in own:
                part.exchange()  # the one that the others are in

    @property
    def is_active(self) -> bool:
        """Whether a lost rank can be replaced."""
        return self._membership is not None

    def close(self) -> None:
        """End the recovery: a rank that is lost from now on ends the job, or restarts it."""
        if self._membership is not None:
            self._membership.close()
            self._membership = None
            end_recoveries()
        for handle in self._handles:
            handle.remove()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a block that is done again if a rank is lost in it; count it when it is complete.

        Collective: every rank. If a rank is lost, blocks until another one has its place.
        """
        self._is_updated = False
        if self._membership is not None:
            self._membership.arrive(self.step)
            for buffers in self._buffers:
                buffers.keep()
        try:
            yield
            self.step += 1
        except Exception as error:
            if not self._is_of_lost_rank(error):
                raise
            error.__traceback__ = None  # its frames hold tensors
            self.step += self._is_updated
            for buffers in self._buffers if not self._is_updated else ():
                buffers.restore()
            for part in self._connected.values():
                part.restore()
            # Kept until the recovery is complete: another rank may be lost when the engines are connected again.
            self._plans = {name: part.agreed_plan() for name, part in self._connected.items()}
            self._rejoin()
        finally:
            if self._membership is not None:
                self._membership.depart()

    def _is_of_lost_rank(self, error: Exception) -> bool:
        """Return whether a generation is there that makes up for a lost rank; wait for it if the error tells of one."""
        if self._membership is None:
            return False
        if self._membership.newer() is None and not tells_of_others(error):
            return False
        return self._membership.await_newer() is not None

    def before_update(self, *_: Any) -> None:
        """Make sure that an update is made with all gradients; send buffers. Collective: every rank."""
        if self._membership is None:
            return
        device = self._world.device
        if device.type != "cpu":
            synchronize(device)
        buffers = [buffer for each in self._buffers for buffer in each.current()]
        if buffers:
            broadcast_coalesced(buffers, group=self._world.group)
        if self._membership.is_cut:
            raise CollectiveError("A rank was lost in this step.")

    def _after_update(self, *_: Any) -> None:
        self._is_updated = True

    # --- the recovery -------------------------------------------------------------------------------------------------

    def _rejoin(self) -> None:
        """Go on in the newest generation; see [Note: attempts]. Collective: every rank. Blocks."""
        assert self._membership is not None
        while True:
            try:
                found = self._membership.rejoin()
                with activity.waiting("Recovery"):
                    self._share(found)
                if self.on_rejoined is not None:
                    self.on_rejoined()
                return
            except Exception as error:
                # A rank was lost during the recovery.
                if not self._is_of_lost_rank(error):
                    raise

    def _share(self, found: Generation) -> None:
        """Connect the engines, and copy the state to those that lack it. Collective: every rank. Blocks."""
        world, group = self._world, self._world.group
        for engine in self._engines:
            engine.reconnect(world)
        mine = [self._has_state, self.step, activity.now.num_steps]
        rows = all_gather_object(mine, group=group, device=world.device)
        most = max((step for has_state, step, _ in rows if has_state), default=None)
        if most is None:
            raise CollectiveError("No rank that is left holds the state of the run.\nRestart it from a checkpoint.")
        lacking = [rank for rank, row in enumerate(rows) if row[:2] != [True, most]]
        source = next(rank for rank in range(world.world_size) if rank not in lacking)
        for name, plan in broadcast_object(self._plans, group=group, src=source, device=world.device).items():
            self._connected[name].use_plan(plan)
        num_bytes = 0
        if world.rank == source or world.rank in lacking:
            self._has_state = self._has_state and world.rank == source
            states = {name: _state_of(part) for name, part in self._parts.items()} if world.rank == source else {}
            for rank in lacking if world.rank == source else [world.rank]:
                received, size = exchange_state(states, source, rank, group, world.device)
                num_bytes += size
                for name in received:
                    self._parts[name].load_state_dict(received[name])
            self._has_state, self.step, activity.now.num_steps = True, most, rows[source][2]
        num_missed = rows[source][2] - mine[2] if world.rank in lacking else 0
        lost_at_s = found.lost_at_ns / 1e9
        seconds = time.time() - lost_at_s
        # Without a rank that was replaced, there are fewer ranks than before.
        met = f"{world.world_size} {'ranks have' if world.world_size > 1 else 'rank has'} met after {seconds:.1f} s"
        if lacking:
            are = "is" if len(lacking) == 1 else "are"
            met = f"{activity.format_ranks(lacking)} {are} back after {seconds:.1f} s with the state of rank {source}"
        text = f"{met}; {self._doing()} is done again"
        # Until all have the state, none may change its own.
        report = RecoveryReport(found.number, text, num_bytes, found.why, lost_at_s, seconds)
        reports = all_gather_object(asdict(report), group=group, device=world.device)
        if world.rank == source:
            report.write(launcher_folder())
        # Only the launcher of the machine of a lost rank knows why.
        why = "; ".join(dict.fromkeys(each["why"] for each in reports if each["why"]))
        report = RecoveryReport(**reports[source] | {"why": why})
        place = Place(world.rank, world.world_size, group)
        record_recovery(report, place, num_missed, joins=not mine[0])


def _state_of(part: Stateful) -> dict[str, Any]:
    return part.replica_state() if isinstance(part, Sharded) else part.state_dict()


def exchange_state(
    state: Mapping[str, Any], source: int, to: int, group: Group, device: torch.device
) -> tuple[dict[str, Any], int]:
    """Send ``state`` from rank ``source`` to rank ``to``; return it there, and nothing at the source; and its bytes.

    Called by these two ranks only. Blocks until complete. Tensors arrive on the device that they come from.
    """
    is_source = group.rank() == source
    tensors: list[Tensor] = []

    def take_out(tensor: Tensor) -> Tensor:
        tensors.append(tensor.detach())
        return torch.empty_like(tensors[-1], device="meta")

    def put_in(tensor: Tensor) -> Tensor:
        where = torch.device("cpu") if are_on_host[len(tensors)] else device
        tensors.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=where))
        return tensors[-1]

    carrier = device if has_all_gather(group, device) else torch.device("cpu")  # Gloo sends from host memory only
    # The structure first, with tensors that have a shape only.
    structure = map_tensors(state, take_out) if is_source else None
    data = pickle.dumps((structure, [tensor.is_cpu for tensor in tensors]))
    size = torch.tensor([len(data)], device=carrier)
    _move(size, source, to, group)
    message = torch.frombuffer(bytearray(data if is_source else int(size)), dtype=torch.uint8).to(carrier)
    _move(message, source, to, group)
    received: dict[str, Any] = {}
    if not is_source:
        structure, are_on_host = pickle.loads(message.cpu().numpy().tobytes())
        received = map_tensors(structure, put_in)
    for tensor in tensors:
        for part in tensor.reshape(-1).view(torch.uint8).split(_CHUNK_BYTES):
            moved = part.to(carrier).contiguous()
            _move(moved, source, to, group)
            if not is_source and moved.data_ptr() != part.data_ptr():
                part.copy_(moved)
    return received, len(message) + sum(tensor.nbytes for tensor in tensors)


def _move(tensor: Tensor, source: int, to: int, group: Group) -> None:
    if not tensor.numel():
        return
    work = group.send([tensor], to, 0) if group.rank() == source else group.recv([tensor], source, 0)
    wait_for_transfer(work, group)


def check_parts(parts: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for a part without a state, or whose state is divided among the ranks."""
    for name, part in parts.items():
        if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None)):
            raise ConfigurationError(
                f"{name} is of type {type(part).__name__}, which has no state_dict() and load_state_dict().\n"
                "Give the wrapped model, the optimizer, and other parts with a state."
            )
        if isinstance(part, ZeroRedundancyOptimizer):
            raise ConfigurationError(
                f"{name} is a ZeroRedundancyOptimizer: a lost rank takes the only copy of its shard along, so a script "
                "cannot go on in place.\nUse lockstep.fit with strategy ddp-zero1 and redundancy=1, or an optimizer "
                "that is not sharded."
            )
