"""A training loop goes on in place when a rank is lost: the step that was not completed is done again.

[Note: attempts]
A loop is a row of attempts, each with the same collectives on every rank. When a rank is lost, the attempts of the
others fail: in the collective that it does not take part in, or because the generation has changed
(comm/generations.py). All of them, and the rank that takes its place, then

1. meet in the next generation, and connect their engines to its group;
2. compare how many attempts each has completed. A rank may have received the last collective of an attempt that others
   have not, and complete it: then it counts, and the ranks that are behind copy its state;
3. copy the state from the first rank that is most ahead to each rank that lacks it, over the group;
4. repeat the attempt, from the same parameters, optimizer state and buffers, with the same samples and random numbers.

A failed attempt must leave no trace. Parameters and optimizer state usually change in the optimizer's step only, after
the last collective, so that no rank can fail between the update and the end of the attempt. What changes before that is
kept at the start of an attempt and restored: buffers, residuals of compressed gradients, and parts such as a scheduler,
a scaler or a loader. Before an update, the buffers of rank zero are sent to all ranks, as rank zero may be lost after
it. On a device, collectives do not fail but are aborted, and leave anything in the gradients: so before an update, when
all collectives were started, the host waits for the device.

A script's block may be another one: with several updates, with a collective behind its update, or with an update in
forward (a momentum encoder). The first block shows that; from then on parameters and optimizer state are copied at the
start of each (`Changes`). A rank that has changed its state and has no copy holds the state no more, and copies that of
another one; if none is left, all ranks restart.
"""

import contextlib
import copy
import gc
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

from lockstep.base import activity
from lockstep.base.accelerator import synchronize
from lockstep.base.containers import map_tensors
from lockstep.base.rank_files import Arrival, Generation, RecoveryReport, launcher_folder, withdraw_recovery
from lockstep.base.torch_internals import version_of
from lockstep.comm.collectives import (
    Group,
    all_gather_object,
    broadcast_coalesced,
    broadcast_object,
    has_all_gather,
    packed_state,
    unpacked_state,
    wait_for_transfer,
)
from lockstep.comm.generations import Membership
from lockstep.comm.world import World
from lockstep.data.stream import Stateful
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError, tells_of_others
from lockstep.health.heartbeat import num_calls
from lockstep.loop.buffers import BufferSnapshot
from lockstep.parallel.consistency import Buffers, Replica, checksum, refuse_difference, replica_of
from lockstep.parallel.ddp.updates import call_before_updates
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.local_sgd import LocalSGD
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.parallel.zero.partition import options_of
from lockstep.telemetry.recorder import Place, end_recoveries, num_recorded, record_recovery

# Size of a message with state.
_CHUNK_BYTES = 64 * 2**20


@runtime_checkable
class Connected(Protocol):
    """A part that holds process groups, such as an engine."""

    def modules_to_restore(self) -> list[nn.Module]:
        """Return the modules whose buffers change in a step."""

    def keep(self) -> None:
        """Keep what changes before the update, apart from buffers, at the begin of an attempt."""

    def restore(self) -> None:
        """Return to the begin of the attempt, apart from buffers."""

    def reconnect(self, world: World) -> None:
        """Use the groups of ``world`` from now on. Collective: every rank."""

    def agreed_plan(self) -> Any:
        """Return what the ranks have agreed on so far, such as the order of buckets; any JSON value."""

    def use_plan(self, plan: Any) -> None:
        """Use what another rank's `agreed_plan` returned. Collective: every rank."""

    def replica_state(self) -> dict[str, Any]:
        """Return the state that is the same on every rank, for `load_replica_state` of a rank that lacks it."""

    def load_replica_state(self, state: dict[str, Any]) -> None:
        """Load what another rank's `replica_state` returned."""


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
    given parts, or follow from `step` and from the world, whose numbers may change. All micro-batches of an update are
    in one block. What calls collectives, such as an evaluation or `lockstep.save`, comes before the update; otherwise,
    and if there are several updates, each block begins with a copy of all parts, as long as it lasts. Process groups of
    the script's own are gone after a recovery.

    With `LocalSGD` or `DiLoCo` as the last of the parts, enter no block: each exchange is one; see there.

    Collective: every rank creates one, after the set-up, and enters the same blocks.

    Args:
        world: Of `lockstep.init`.
        step: Number of blocks done before, if the parts were loaded from a checkpoint. Load them first: a rank that
            takes the place of a lost one gets the newer state of the others here.
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
        step: int = 0,
        doing: Callable[[], str] | None = None,
        exchanging: LocalSGD | None = None,
        kinds: Sequence[type] = (),
        **parts: Stateful,
    ) -> None:
        check_parts(parts)
        averagings = [part for part in parts.values() if isinstance(part, LocalSGD)]
        # If ranks train alone between exchanges, each exchange is an attempt, and steps are not done again.
        averaging = averagings[0] if averagings else exchanging
        self._world, self._parts, self._kinds = world, parts, kinds
        self._connected = {name: part for name, part in parts.items() if isinstance(part, Connected)}
        self._engines: list[Connected | LocalSGD] = [*self._connected.values(), *averagings]
        self.step, self._has_state = step, not world.is_late
        self._doing = doing or (lambda: f"{'exchange' if averagings else 'step'} {self.step + 1}")
        self.on_rejoined: Callable[[], None] | None = None
        modules = [module for part in self._connected.values() for module in part.modules_to_restore()]
        self._buffers = [snapshot for module in modules if (snapshot := BufferSnapshot(module)).names]
        self._kept: list[BufferSnapshot | Connected] = [*self._buffers, *self._connected.values()]
        # After the newest update: the buffers of all ranks are those of rank zero as long as none has changed.
        self._sent: list[int] | None = None
        self._recovered_at: int | None = None  # the step of the newest recovery
        # At the begin of the attempt: updates done, and steps recorded, which may both be several in a block, or none.
        self._counts = [0, 0]
        self._plans: dict[str, Any] = {}
        self._membership: Membership | None = None
        self._changes: Changes | None = None
        may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        folder = launcher_folder()
        # Only groups that `init` has made can be made again.
        is_ours = folder is not None and world.owned is not None
        if folder is not None and Membership.is_used:
            withdraw_recovery(folder, os.getpid())  # not complete any more, but it can only be restarted
        elif may_restart and is_ours and (averaging is None or averaging.can_reconnect):
            # In `fit`, the trainer knows what a step changes.
            self._changes = Changes(parts) if doing is None and averaging is None else None
            self._membership = Membership(world, None if averaging is None else Arrival(0, averaging.sync_patience))
            if averaging is not None:
                averaging.attempt, averaging.before_update = self.attempt, self.before_update
            if not self._has_state:
                self._rejoin()
            for part in averagings:
                part.exchange()  # the one that the others are in

    @property
    def is_active(self) -> bool:
        """Whether a lost rank can be replaced."""
        return self._membership is not None

    def close(self) -> None:
        """End the recovery: a rank that is lost from now on ends the job, or restarts it."""
        if self._membership is not None:
            self._membership.close()
            self._membership = self._changes = None
            end_recoveries()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a block that is done again if a rank is lost in it; count it when it is complete.

        Collective: every rank. If a rank is lost, blocks until another one has its place.

        Raises:
            ConfigurationError: An optimizer steps in it that is no part; or a CUDA graph has captured collectives.
            ReplicasDiffer: After a recovery, the parts differ between ranks.
        """
        if self._membership is not None:
            if activity.now.has_captured:
                raise ConfigurationError(
                    "A CUDA graph has captured collectives, and NCCL cannot abort what a graph holds: a lost rank "
                    "could not be replaced.\nTrain without a graph, or without Recovery."
                )
            self._membership.join(self.step)
            self._counts = [activity.now.num_steps, num_recorded()]
            for snapshot in self._kept:
                snapshot.keep()
        watching = contextlib.nullcontext() if self._changes is None else self._changes.block(self._before_step)
        try:
            with watching:
                yield
            if self._changes is not None and self._changes.has_calls and self._world.device.type != "cpu":
                self.refuse_cut()
            self.step += 1
        except Exception as error:
            if not self._is_of_lost_rank(error):
                raise
            error.__traceback__ = None  # its frames hold tensors
            self._has_state &= self._changes is None or self._changes.undo()
            for snapshot in self._kept:
                snapshot.restore()
            # Kept until the recovery is complete: another rank may be lost when the engines are connected again.
            self._plans = {name: part.agreed_plan() for name, part in self._connected.items()}
            self._rejoin()
        finally:
            if self._membership is not None:
                self._membership.leave()

    def _is_of_lost_rank(self, error: Exception) -> bool:
        """Return whether a generation is there that makes up for a lost rank; wait for it if the error tells of one."""
        if self._membership is None or (self._membership.newer() is None and not tells_of_others(error)):
            return False
        return self._membership.await_newer() is not None

    def before_update(self, *_: Any) -> None:
        """Make sure that an update is made with all gradients; send buffers. Collective: every rank."""
        if self._membership is None:
            return
        if buffers := self._current_buffers():
            broadcast_coalesced(buffers, group=self._world.group)
        self._sent = [*map(version_of, buffers)]
        self.refuse_cut()

    def refuse_cut(self) -> None:
        """Raise CollectiveError if a rank was lost: on a device, collectives then leave anything. Blocks."""
        if self._membership is None:
            return
        if self._world.device.type != "cpu":
            synchronize(self._world.device)
        if self._membership.is_cut:
            raise CollectiveError("A rank was lost in this step.")

    def _before_step(self, is_first: bool) -> None:
        """Do what comes before an optimizer's step in a block. Collective: every rank."""
        num_since = 0 if self._recovered_at is None else self.step - self._recovered_at
        # What a forgotten part has changed may show in the next step, or long after.
        if is_first and num_since > 0 and num_since.bit_count() == 1:
            self._refuse_difference("healed")
        self.before_update()

    def _current_buffers(self) -> list[Tensor]:
        return [buffer for snapshot in self._buffers for buffer in snapshot.current()]

    # --- the recovery -------------------------------------------------------------------------------------------------

    def _rejoin(self) -> None:
        """Go on in the newest generation; see [Note: attempts]. Collective: every rank. Blocks."""
        assert self._membership is not None
        while True:
            try:
                generation = self._membership.rejoin()
                with activity.waiting("Recovery"):
                    self._share(generation)
                if self.on_rejoined is not None:
                    self.on_rejoined()
                return
            except Exception as error:
                # A rank was lost during the recovery.
                if not self._is_of_lost_rank(error):
                    raise

    def _share(self, generation: Generation) -> None:
        """Connect the engines, and copy the state to the ranks that lack it. Collective: every rank. Blocks."""
        world = self._world
        for engine in self._engines:
            engine.reconnect(world)
        rows, source, lacking = self._compare()
        joins = not self._has_state
        num_bytes = self._copy(source, lacking)
        _, self.step, counts, _ = rows[source]
        if world.rank in lacking:
            self._counts = counts
        activity.now.num_steps, num_done = self._counts
        self._recovered_at = self.step
        if self._changes is not None:
            self._refuse_difference("same" if all(row[3] for row in rows if row[0]) else "healed")
            self._changes.refuse_unlisted(world)
        self._report(generation, source, lacking, num_bytes, num_done, joins=joins)

    def _compare(self) -> tuple[list[list[Any]], int, list[int]]:
        """Return what each rank holds, the first rank that is most ahead, and who lacks its state. Collective."""
        world = self._world
        settled = self._sent == [*map(version_of, self._current_buffers())]
        row_of_rank = [self._has_state, self.step, self._counts, settled]
        rows = all_gather_object(row_of_rank, group=world.group, device=world.device)
        self.refuse_cut()
        most = max((step for has_state, step, *_ in rows if has_state), default=None)
        if most is None:
            raise LockstepError(
                "No rank that is left holds the state of the run: a rank was lost within a block that had changed it.\n"
                "All ranks restart. To go on in place, make the update the last in the block, and put all of its "
                "micro-batches there. Several updates are no obstacle from the second block on."
            )
        lacking = [rank for rank, row in enumerate(rows) if row[:2] != [True, most]]
        return rows, next(rank for rank in range(world.world_size) if rank not in lacking), lacking

    def _copy(self, source: int, lacking: list[int]) -> int:
        """Copy the state of a rank to the ranks that lack it; return the bytes on this rank. Collective: every rank."""
        world, num_bytes = self._world, 0
        plans = broadcast_object(self._plans, group=world.group, src=source, device=world.device)
        for name, plan in plans.items():
            self._connected[name].use_plan(plan)
        if world.rank == source or world.rank in lacking:
            self._has_state = self._has_state and world.rank == source
            states = {name: _state_of(part) for name, part in self._parts.items()} if world.rank == source else {}
            for rank in lacking if world.rank == source else [world.rank]:
                received, size = exchange_state(
                    states, source, rank, world.group, world.device, self.refuse_cut, self._kinds
                )
                num_bytes += size
                for name in received:
                    part = self._parts[name]
                    load = part.load_replica_state if isinstance(part, Connected) else part.load_state_dict
                    load(received[name])
            self._has_state = True
        return num_bytes

    def _report(
        self, generation: Generation, source: int, lacking: list[int], num_bytes: int, num_done: int, *, joins: bool
    ) -> None:
        """Report the recovery to the launcher and in the record. Collective: every rank."""
        world, group = self._world, self._world.group
        lost_at_s = generation.lost_at_ns / 1e9
        seconds = time.time() - lost_at_s
        # Without a rank that was replaced, there are fewer ranks than before.
        met = f"{world.world_size} {'ranks have' if world.world_size > 1 else 'rank has'} met after {seconds:.1f} s"
        if lacking:
            are = "is" if len(lacking) == 1 else "are"
            met = f"{activity.format_ranks(lacking)} {are} back after {seconds:.1f} s with the state of rank {source}"
        text = f"{met}; {self._doing()} is done again"
        # Until all have the state, none may change its own.
        report = RecoveryReport(generation.number, text, num_bytes, generation.why, lost_at_s, seconds)
        reports = all_gather_object(asdict(report), group=group, device=world.device)
        # Only the launcher of the machine of a lost rank knows why.
        reasons = [report["why"].partition("\n") for report in reports if report["why"]]
        causes = filter(None, dict.fromkeys(cause for _, _, cause in reasons))
        why = "\n".join(["; ".join(dict.fromkeys(reason for reason, _, _ in reasons)), *causes])
        report = RecoveryReport(**reports[source] | {"why": why})
        if world.local_rank == 0:  # the launcher of each machine keeps account of its ranks
            report.write(launcher_folder())
        record_recovery(report, Place(world.rank, world.world_size, group), num_done, joins=joins)

    def _refuse_difference(self, buffers: Buffers) -> None:
        """Raise ReplicasDiffer if the parts differ between ranks. Collective: every rank. Blocks."""
        assert self._changes is not None and self._recovered_at is not None
        refuse_difference(
            self._changes.replica(buffers),
            group=self._world.group,
            device=self._world.device,
            now=f" (before block {self.step + 1})",
            since=f"A rank was replaced before block {self._recovered_at + 1}. What the loop changes and is no part "
            "of lockstep.Recovery, such as a scaler or a counter, began anew on that rank: give it to Recovery by a "
            "name.",
        )


def _state_of(part: Stateful) -> dict[str, Any]:
    return part.replica_state() if isinstance(part, Connected) else part.state_dict()


class Changes:
    """What a block of a script changes before it is complete, and the way back to its begin; see [Note: attempts].

    Args:
        parts: As for `Recovery`.

    Attributes:
        has_calls: Whether collectives were called behind the last update of the block.
    """

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        self._optimizers = {name: part for name, part in parts.items() if isinstance(part, Optimizer)}
        named = self._modules.keys() | self._optimizers.keys()
        self._others = [part for name, part in parts.items() if name not in named]
        self._buffers = [BufferSnapshot(part) for part in self._modules.values() if not isinstance(part, Connected)]
        self._tensors: list[Tensor] = []
        # Whether each block begins with a copy of parameters and optimizer state; of the first block, a checksum.
        self._copies = False
        self._checksum: int | None = None
        self._values: list[Tensor] | None = None
        # Whether the gradients of a block before are needed.
        self._accumulates = self.has_calls = False

    @contextlib.contextmanager
    def block(self, before_step: Callable[[bool], None]) -> Iterator[None]:
        """Watch a block; call ``before_step`` before each step of an optimizer, with whether it is the first."""
        self._begin()
        num_updates, num_calls_before, is_stepping = 0, num_calls(), False

        def update(optimizer: Optimizer, _loss: Any) -> None:
            nonlocal num_updates, num_calls_before, is_stepping
            if is_stepping:  # by means of another optimizer or of its base class, or with a closure once more
                return before_step(False)
            if all(optimizer is not part for part in self._optimizers.values()):
                raise ConfigurationError(
                    f"{type(optimizer).__name__}.step() was called in a block of lockstep.Recovery, which has no such "
                    "part: a rank that takes the place of a lost one would begin with another state.\n"
                    "Give the optimizer to lockstep.Recovery, by a name."
                )
            before_step(num_updates == 0)
            if self._checksum is not None:  # parameters may change in forward, unnoticed by autograd
                self._copies |= checksum(self._tensors) != self._checksum
                self._checksum = None
            num_updates, num_calls_before, is_stepping = num_updates + 1, num_calls(), True

        def stepped(*_: Any) -> None:
            nonlocal is_stepping
            is_stepping = False

        remove, handle = call_before_updates(update), register_optimizer_step_post_hook(stepped)
        try:
            yield
        finally:
            remove()
            handle.remove()
        # The ranks behind the last update, or all in a block without one.
        self.has_calls = num_calls() != num_calls_before
        self._copies |= num_updates > 1 or (num_updates > 0 and self.has_calls)
        newest = self._newest_gradient()
        is_new = newest is not None and newest != self._gradient
        self._accumulates = num_updates == 0 and (self._accumulates or is_new)

    def _begin(self) -> None:
        if not self._tensors:
            groups = [group["params"] for optimizer in self._optimizers.values() for group in optimizer.param_groups]
            parameters = itertools.chain(*(module.parameters() for module in self._modules.values()), *groups)
            self._tensors = list(dict.fromkeys(parameters))
            self._checksum = checksum(self._tensors)
        self._gradient = self._newest_gradient()
        self._accumulates &= self._gradient is not None
        self._versions = [*map(version_of, self._tensors)]
        self._options = [copy.deepcopy(options_of(optimizer.param_groups)) for optimizer in self._optimizers.values()]
        states = [part.state_dict() for part in self._others]
        self._states = copy.deepcopy(map_tensors(states, Tensor.detach))  # a running loss may have a graph
        self._values = None
        for buffers in self._buffers:
            buffers.keep()
        if self._copies:
            self._values = [tensor.detach().clone() for tensor in self._tensors]
            self._optimizer_states = copy.deepcopy([optimizer.state_dict() for optimizer in self._optimizers.values()])

    def _newest_gradient(self) -> tuple[int, int] | None:
        """Return what identifies the gradient of the last parameter with one, and its value."""
        gradient = next((tensor.grad for tensor in reversed(self._tensors) if tensor.grad is not None), None)
        return None if gradient is None else (id(gradient), version_of(gradient))

    @torch.no_grad()
    def undo(self) -> bool:
        """Return to the begin of the block, apart from buffers; return False if there is no way back."""
        is_changed = self._versions != [*map(version_of, self._tensors)]
        if self._values is not None:
            for tensor, value in zip(self._tensors, self._values, strict=True):
                tensor.copy_(value)
            for optimizer, state in zip(self._optimizers.values(), self._optimizer_states, strict=True):
                optimizer.load_state_dict(state)
        for optimizer, options in zip(self._optimizers.values(), self._options, strict=True):
            for group, values in zip(optimizer.param_groups, options, strict=True):
                group.update(values)
        for buffers in self._buffers:
            buffers.restore()
        for part, state in zip(self._others, self._states, strict=True):
            if isinstance(part, GradScaler) and part.is_enabled():
                with contextlib.suppress(AssertionError):  # it was not used yet
                    part.update(state["scale"])  # forgets that gradients were unscaled
            part.load_state_dict(state)
        return not self._accumulates and not (is_changed and self._values is None)

    def replica(self, buffers: Buffers) -> Replica:
        """Return what is the same on all ranks between two blocks, by name; ``buffers``: of wrapped models."""
        tensors_of_parts: dict[str, Tensor] = {}
        for name, module in self._modules.items():
            ignore = module.parameters_to_ignore if isinstance(module, DistributedDataParallel) else ()
            kind = buffers if isinstance(module, Connected) else "own"
            tensors = replica_of(module, buffers=kind, ignore=[f"module.{key}" for key in ignore])
            tensors_of_parts |= {f"{key} of {name}": value for key, value in tensors.items()}
        for name, optimizer in self._optimizers.items():
            tensors = replica_of(nn.Module(), optimizer, buffers="same")
            tensors_of_parts |= {f"{key} ({name})": value for key, value in tensors.items()}
        return tensors_of_parts

    def refuse_unlisted(self, world: World) -> None:
        """Refuse schedulers and the like that are no parts, and differ between ranks. Collective: every rank.

        Raises:
            ConfigurationError: There is one.
        """
        modules = itertools.chain(*(module.modules() for module in self._modules.values()))
        listed = {*map(id, self._others), *map(id, modules)}
        digests: dict[str, list[str]] = {}
        for item in gc.get_objects():
            if issubclass(type(item), (LRScheduler, GradScaler, AveragedModel)) and id(item) not in listed:
                digests.setdefault(type(item).__name__, []).append(_digest(item.state_dict()))
        states = {kind: sorted(values) for kind, values in digests.items()}
        ranks = all_gather_object(states, group=world.group, device=world.device)
        for kind in sorted(set().union(*ranks)):
            rows = [states.get(kind, []) for states in ranks]
            if len({len(row) for row in rows}) == 1 and any(row != rows[0] for row in rows):
                raise ConfigurationError(
                    f"{kind} has another state on the rank that takes the place of a lost one: it is no part of "
                    "lockstep.Recovery.\nGive it to lockstep.Recovery, by a name."
                )


def _digest(state: Any) -> str:
    tensors: list[Tensor] = []

    def take_out(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor.new_empty(0)

    rest = map_tensors(state, take_out)
    return f"{re.sub(' at 0x[0-9a-f]+', '', repr(rest))} {checksum(tensors)}"


def exchange_state(
    state: Mapping[str, Any],
    source: int,
    to: int,
    group: Group,
    device: torch.device,
    refuse_cut: Callable[[], None],
    kinds: Sequence[type] = (),
) -> tuple[dict[str, Any], int]:
    """Send ``state`` from rank ``source`` to rank ``to``; return it there, and nothing at the source; and its bytes.

    Called by these two ranks only. Blocks until complete. Tensors arrive on the device that they come from.
    ``refuse_cut`` raises an error if what has arrived is of no use. ``kinds``: as for `unpacked_state`.

    Raises:
        ConfigurationError: At the source: a part of the state holds what cannot be sent; see `unpacked_state`.
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
    structure = map_tensors(state, take_out) if is_source else {}
    for name, part in structure.items():
        try:
            unpacked_state(packed_state(part), kinds)
        except ValueError as error:
            raise ConfigurationError(
                f"The state of {name} cannot be sent to the rank that takes the place of a lost one. {error}\n"
                "Return tensors, numbers, strings and arrays of numbers from its state_dict(), in lists, tuples, sets "
                "and dicts."
            ) from error
    data = packed_state((structure, [tensor.is_cpu for tensor in tensors]))
    size = torch.tensor([data.numel()], device=carrier)
    _send_or_receive(size, source, to, group)
    refuse_cut()
    message = (data if is_source else torch.empty(int(size), dtype=torch.uint8)).to(carrier)
    _send_or_receive(message, source, to, group)
    refuse_cut()
    received: dict[str, Any] = {}
    if not is_source:
        structure, are_on_host = unpacked_state(message, kinds)
        received = map_tensors(structure, put_in)
    for tensor in tensors:
        for part in tensor.reshape(-1).view(torch.uint8).split(_CHUNK_BYTES):
            moved = part.to(carrier).contiguous()
            _send_or_receive(moved, source, to, group)
            if not is_source and moved.data_ptr() != part.data_ptr():
                part.copy_(moved)
    refuse_cut()
    return received, len(message) + sum(tensor.nbytes for tensor in tensors)


def _send_or_receive(tensor: Tensor, source: int, to: int, group: Group) -> None:
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
