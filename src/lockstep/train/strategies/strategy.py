"""Strategies: one device, several devices in this process, or one device in each process; with our engines or torch's.

A strategy runs forward and backward of a micro-batch. Then ``param.grad`` of the model without wrappers is the sum over
all devices of ``grad(value * weight) * scale``. Everything else in the training step is the same for all strategies.
"""

import contextlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.base.accelerator import is_on_meta, mark_on
from lockstep.checkpoints.model_state import load_state_dict, plain_names, read_tensors, unwrap
from lockstep.comm import fully_shard
from lockstep.comm.collectives import Group, reduces_on_its_own, split_group
from lockstep.comm.world import World
from lockstep.data.loader import MicroBatch, to_device
from lockstep.data.order import BatchSplit
from lockstep.errors import ConfigurationError
from lockstep.parallel.compile import compile_in_place
from lockstep.parallel.consistency import Buffers, Replica, refuse_difference, replica_of
from lockstep.parallel.ddp.bucket_gradients import FlatGradients
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.dp.wrapper import DataParallel
from lockstep.parallel.local_sgd import DiLoCo, LocalSGD
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer, shard_optimizer
from lockstep.telemetry.recorder import StepTimer
from lockstep.telemetry.step_times import Mark
from lockstep.train.plan import PER_PROCESS
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.step_parts import GradientList, GradScaler, LossModule, Objective, Part
from lockstep.train.task import build_model, initialize

OnLosses = Callable[[list[Part]], object]


@dataclass(frozen=True)
class Pass:
    """How a micro-batch is run.

    Args:
        factor: Factor on the gradient of ``value * weight``, apart from the loss scale.
        sync: Whether gradients are summed over the ranks at the end of backward.
        timer: Gets the phases forward and backward.
        on_losses: Called with the losses once they are queued: before backward, or after it where both are one
            operation (`Strategy.stops_between`). It may change the loss scale, and waits for the device in the first
            forward of a step.
        seed: Seeds the generators of this process and of ``device`` for a share.
        all_have_samples: Returns whether every share has samples; the same on every rank. Either all ranks call it or
            none.
        scaler: The loss scaling, in fp16.
    """

    factor: float
    sync: bool
    timer: StepTimer
    on_losses: OnLosses
    seed: Callable[..., None]
    all_have_samples: Callable[[], bool]
    scaler: GradScaler | None = None

    def scaled(self, part: Part, times: float = 1.0) -> Tensor:
        """Return ``value * weight * scale * times``, at least in float32."""
        factor = part.weight * ((self.factor if self.scaler is None else self.factor * self.scaler.scale) * times)
        value = part.value if part.value.dtype in (torch.float32, torch.float64) else part.value.float()
        return value if factor == 1.0 else value * factor


class Strategy(ABC):
    """Runs micro-batches. Abstract; `Trainer` creates the strategy by its name."""

    # The ranks that take part; None: only this process.
    group: Group | None = None

    # The ranks whose gradients are summed, and which wait for each other in every step.
    step_group: Group | None = None

    # Seconds of the last micro-batch in which devices only exchanged data, if the engine measures it.
    exposed_s: float | None = None

    # Whether the losses it reports are already summed over all ranks.
    sums_losses = False

    # The gradients after backward; None: ``param.grad``, the same on every rank.
    gradients: GradientList | FlatGradients | None = None

    # How the ranks keep buffers equal.
    buffers: Buffers = "same"

    # Returns whether this rank's part of the last gradient was not finite, if that is monitored; blocks.
    part_was_bad: Callable[[], bool] | None = None

    # Our engine, if this is the one.
    ours: DistributedDataParallel | None = None

    # The same, if it compresses gradients: its residuals are a part of the state.
    compressed: DistributedDataParallel | None = None

    # Number of replicas whose gradients are not summed: each divides by the count of its own share of a global batch.
    num_replicas = 1

    # A line for rank zero to print when a run begins.
    note: str | None = None

    # A line about the batch norms of the model, if it has any.
    batch_norms: str | None = None

    # Whether a micro-batch can be computed again without exchanging gradients, to find the origin of a NaN.
    can_replay = True

    # Whether ``on_losses`` is called before backward begins.
    stops_between = True

    def take_over(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to use instead of ``optimizer``, which has not made a step yet.

        Collective if there is a group: every rank, before the first micro-batch.
        """
        return optimizer

    def whole(self, model: nn.Module) -> nn.Module:
        """Return ``model``, without wrappers, with all parameters after the last step; a copy if it is sharded.

        Collective if it is sharded: every rank. Blocks.
        """
        return model

    def weights(self, model: nn.Module) -> nn.Module:
        """Return ``model`` as `whole` does, but a sharded model with the shards of this rank."""
        return self.whole(model)

    def agrees(self, step: int) -> bool:
        """Return whether all ranks of the group communicate in step ``step``, counted from 0."""
        return True

    # What exchanges parameters between ranks: then `end_step` is called after each step.
    averaging: LocalSGD | None = None

    def end_step(self, step: int, flags: Tensor) -> None:  # noqa: B027 - most need nothing
        """Finish step ``step`` after the update, and sum ``flags``. Collective if the ranks agree then: every rank."""

    def replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Return the state that should be equal on all ranks of the group."""
        return replica_of(model, optimizer, buffers=self.buffers)

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return entries of a checkpoint that add to the state of model and optimizer, or replace it.

        Collective if there is a group: every rank.
        """
        return {}

    def replica_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what `state_dict` does, for a rank that joins the others. Not collective."""
        return self.state_dict(optimizer)

    def load_state_dict(self, state: Mapping[str, Any], optimizer: Optimizer) -> None:  # noqa: B027 - most need nothing
        """Continue from ``state`` of any strategy, after model and optimizer were loaded."""

    @abstractmethod
    def run(self, micro: MicroBatch, context: Pass) -> None:
        """Run forward and backward of ``micro``, adding to ``param.grad``.

        Collective if ``context.sync`` and there is a group: every rank, with or without samples.
        """


class Single(Strategy):
    """One device computes everything; ``model`` may also be torch's DataParallel."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self._model, self._objective = model, objective

    @override
    def run(self, micro: MicroBatch, context: Pass) -> None:
        context.timer.begin("forward")
        parts = [self._objective(self._model, *item) for item in zip(micro.batches, micro.sizes, strict=True)]
        context.timer.begin("backward")
        context.on_losses(parts)
        for part in parts:
            context.scaled(part).backward()


class Replicated(Strategy):
    """Our `DataParallel`: one thread per device, which also computes the loss."""

    stops_between = False

    def __init__(self, model: nn.Module, objective: Objective, devices: Sequence[torch.device]) -> None:
        self._engine = DataParallel(model, device_ids=list(devices))
        self._objective = objective
        self._places = dict(enumerate(devices))

    @override
    def run(self, micro: MicroBatch, context: Pass) -> None:
        if not micro.batches:
            return
        places = list(range(len(micro.batches)))
        if micro.numbers != places:  # a share has no samples, but the engine uses the first replicas
            micro = to_device(micro._replace(numbers=places), self._places)
        parts: list[Part | None] = [None] * len(micro.batches)
        forward_ends: list[Mark] = []

        def loss(replica: nn.Module, shard: tuple[int, object]) -> Tensor:
            index, batch = shard
            part = self._objective(replica, batch, micro.sizes[index])
            parts[index] = part._replace(value=part.value.detach())
            if index == 0:
                forward_ends.append(mark_on(self._places[0]))
            return part.value * part.weight

        context.timer.begin("forward")
        context.timer.name_phase("replicas")  # whose threads have both phases in the trace
        scale = context.factor if context.scaler is None else context.factor * context.scaler.scale
        self._engine.backward(loss, list(enumerate(micro.batches)), [scale] * len(micro.batches))
        self.exposed_s = self._engine.overhead_s
        context.timer.begin("backward", at=forward_ends[0])
        context.on_losses([part for part in parts if part is not None])


class Distributed(Strategy):
    """One process for each device; ``wrap`` is our `DistributedDataParallel` or torch's.

    Args:
        model: The model without wrappers.
        objective: Its loss.
        group: The ranks.
        device: Device of this rank.
        wrap: Creates the engine.
        overlap_optimizer: Whether parameters are updated in backward, as soon as their bucket is reduced.
        shards_optimizer: Whether each rank updates its part of the parameters (ZeRO-1).
        redundancy: Whether the next rank keeps a copy of that part.
    """

    buffers = "healed"

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        group: Group,
        device: torch.device,
        wrap: Callable[..., nn.Module],
        *,
        overlap_optimizer: bool = False,
        shards_optimizer: bool = False,
        redundancy: bool = False,
    ) -> None:
        self.group = self.step_group = group
        self._device, self._num_ranks = device, group.size()
        self._overlap_optimizer, self._shards_optimizer = overlap_optimizer, shards_optimizer
        self._redundancy = redundancy
        self._sharded: ZeroRedundancyOptimizer | None = None
        self._module = wrap(LossModule(model, objective), process_group=group)
        self.ours = self._module if isinstance(self._module, DistributedDataParallel) else None
        if self.ours is not None:
            self.gradients = self.ours.flat_gradients
            if not shards_optimizer:
                self.ours.flat_gradients.expect_norm()  # of each bucket, as soon as it is reduced
            # A step cannot be computed again, to find the origin of a NaN, after the parameters have changed: with an
            # optimizer in backward, and on a device, where gradients are checked later. So each rank checks its part.
            if overlap_optimizer or device.type != "cpu":
                self.part_was_bad = self.ours.monitor_local_gradients()
            if self.ours.compression is not None:
                self.compressed = self.ours
        self._has_sync_layers = any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())

    @override
    def take_over(self, optimizer: Optimizer) -> Optimizer:
        if self._overlap_optimizer:
            assert self.ours is not None, "checked when the strategy was made"
            self.ours.overlap_optimizer(optimizer)
        if self._shards_optimizer:
            assert self.group is not None
            if isinstance(optimizer, ZeroRedundancyOptimizer):  # of another strategy object
                self._sharded = optimizer
            else:
                self._sharded = shard_optimizer(optimizer, group=self.group)
                if not self._redundancy and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
                    self.note = (
                        "a lost rank restarts all: it holds the only copy of its optimizer state "
                        "(redundancy=1 keeps one more)"
                    )
                if self._redundancy:
                    sent, held = (f"{num_bytes / 2**20:.1f} MiB" for num_bytes in self._sharded.keep_copies())
                    self.note = (
                        "redundancy: each rank keeps a copy of the optimizer state of the rank before it: "
                        f"{sent} more sent per step, {held} more memory and once more its part of that state"
                    )
            optimizer = self._sharded
            # In shared memory a copy occupies a core, so overlapping it gains nothing.
            self._sharded.overlaps = reduces_on_its_own(self.group, self._device)
            if not self._sharded.has_hooks:  # which get whole gradients, clipped
                like = self._sharded.param_groups[0]["params"][0]
                self.gradients = GradientList(self._sharded.local_gradients, like, self.group)
        return optimizer

    @override
    def whole(self, model: nn.Module) -> nn.Module:
        """Return the model. Blocks until its parameters are gathered."""
        if self._sharded is not None:
            self._sharded.wait()
        return model

    @override
    def run(self, micro: MicroBatch, context: Pass) -> None:
        """Collective: every rank, with or without samples; forward may exchange buffers whatever ``context.sync`` is.

        Raises:
            ConfigurationError: On every rank: some have no samples, which torch's engine does not support here.
        """
        batch, num_samples = (micro.batches[0], len(micro.samples[0])) if micro.batches else (None, 0)
        with contextlib.ExitStack() as contexts:
            if self._has_sync_layers and not context.all_have_samples():
                if self.ours is None:
                    raise ConfigurationError(
                        "A batch leaves ranks without samples, so the model's SyncBatchNorm layers would wait "
                        "forever.\nUse strategy ddp, or omit the last batch of an epoch (drop_last=True in the task)."
                    )
                # Ranks without samples take part in the synchronised layers of the others.
                contexts.enter_context(self.ours.some_without_batch(has_batch=num_samples > 0))
            if not context.sync:
                contexts.enter_context(self._module.no_sync())  # type: ignore[operator]
            context.timer.begin("forward")
            with contextlib.nullcontext() if self._sharded is None else self._sharded.wait_late():
                part: Part = self._module(batch, num_samples)
            context.timer.begin("backward")
            context.on_losses([part] if num_samples else [])
            if num_samples or context.sync:
                # The engine's mean over the ranks becomes the sum again.
                context.scaled(part, self._num_ranks).backward()


@final
class FullyShard(Strategy):
    """torch's own ``fully_shard``: each rank keeps its part of the parameters, gradients and optimizer state.

    For models that are too large for one device.
    The root is the module that computes the loss, so parameters outside of the units are whole during that time.
    """

    buffers = "own"
    can_replay = False  # torch's engine would add unreduced gradients to those of the next step

    def __init__(
        self, model: nn.Module, objective: Objective, world: World, device: torch.device, *, compiles: bool
    ) -> None:
        self.group = self.step_group = world.group
        self._task, self._device, self._num_ranks = objective.task, device, world.world_size
        # Every rank builds its own part: the model must depend on the seed alone, not on the rank.
        replica = replica_of(model, buffers="same")
        since = "Under fsdp the model must depend on the seed alone, not on the rank."
        refuse_difference(replica, group=world.group, device=world.device, now=" when they begin", since=since)
        self._module = LossModule(model, objective)
        units = find_units(model) if self._task.shard is None else list(self._task.shard(model))
        for unit in (units or [model]) if compiles else ():
            compile_in_place(unit, "fsdp", is_exact=False, in_hooks=True)
        fully_shard.fully_shard_units(self._module, units, group=world.group, device=device)
        if is_on_meta(model):
            initialize(model, device)
        parameters = list(model.parameters())

        def local_gradients() -> list[Tensor]:
            return [fully_shard.local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]

        like = next(parameter for parameter in parameters if parameter.requires_grad)
        self.gradients = GradientList(local_gradients, fully_shard.local_part(like), world.group)

    @override
    def whole(self, model: nn.Module) -> nn.Module:
        """Return a new model with all parameters, on this rank's device. Collective: every rank. Blocks."""
        state = {name: fully_shard.whole(value) for name, value in model.state_dict().items()}
        copy = build_model(self._task, self._device)
        copy.load_state_dict(state)
        return copy

    @override
    def weights(self, model: nn.Module) -> nn.Module:
        return model

    @override
    def run(self, micro: MicroBatch, context: Pass) -> None:
        """Collective: every rank, with samples.

        Raises:
            ConfigurationError: On every rank: some have no samples.
        """
        if not context.all_have_samples():
            raise ConfigurationError(
                "A batch leaves ranks without samples, which would not take part in fsdp's collectives.\n"
                "Omit the last batch of an epoch (drop_last=True in the task), or use strategy ddp-zero1."
            )
        # Set in each micro-batch, because torch's engine keeps the setting of the last one.
        self._module.set_requires_gradient_sync(context.sync)  # type: ignore[operator]
        context.timer.begin("forward")
        part: Part = self._module(micro.batches[0], micro.sizes[0])
        context.timer.begin("backward")
        context.on_losses([part])
        context.scaled(part, self._num_ranks).backward()  # torch's mean over the ranks becomes the sum again


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return the units of sharding: each child with parameters of the outermost ``ModuleList`` and ``Sequential``.

    Blocks that share parameters with other modules belong to the root.
    """
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    units = []
    for unit in dict.fromkeys(_children_of_lists(model)):
        inside = Counter(id(parameter) for module in unit.modules() for parameter in module.parameters(recurse=False))
        if inside and all(uses[parameter] == count for parameter, count in inside.items()):
            units.append(unit)
    return units


def _children_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            yield child
        else:
            yield from _children_of_lists(child)


# --- local-sgd and diloco: ranks or machines train independently and exchange parameters sometimes --------------------

_SYNC_EVERY = {"local-sgd": 8, "diloco": 50}


@final
class LocalSteps(Strategy):
    """Replicas of the model train independently, each on its share of every global batch.

    A replica is a rank, or with ``across="machines"`` the ranks of a machine. Its gradient is the mean over its own
    samples. In an exchange, its weight is the number of samples, or tokens, that it has trained on since the last one.
    """

    averaging: LocalSGD

    def __init__(
        self, name: str, model: nn.Module, objective: Objective, world: World, settings: Settings, num_steps: int
    ) -> None:
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
            raise ConfigurationError(
                f"SyncBatchNorm exchanges statistics in every step, but strategy {name} does not communicate in every "
                "step.\nUse nn.BatchNorm, whose running statistics are averaged in exchanges, or strategy ddp."
            )
        self.group: Group = world.group
        self._device, self._task = world.device, objective.task
        self._model, self._num_steps = model, num_steps
        self._inner: Single | Distributed = Single(model, objective)
        if settings.across == "machines":
            # A separate group: the groups of a hierarchy run the stages of its collectives in their own order.
            inside = split_group(world.node_rank, group=world.group, device=world.device)
            if inside.size() == world.world_size > 1:
                raise ConfigurationError(
                    "across=machines needs several machines, but all ranks are on one.\n"
                    "Omit across, or use strategy ddp."
                )
            self._inner = Distributed(model, objective, inside, world.device, DistributedDataParallel)
        self.step_group = self._inner.group
        self.ours, self.gradients, self.part_was_bad = self._inner.ours, self._inner.gradients, self._inner.part_was_bad
        self.num_replicas = world.world_size // (1 if self.step_group is None else self.step_group.size())
        # The ranks of a replica have the same state: the first of them saves it.
        self._replica_rank = world.rank - (0 if self.step_group is None else self.step_group.rank())
        every = settings.sync_every or _SYNC_EVERY[name]
        options = ["fragments", "sync_delay", "compression", "sync_patience"]
        options += ["outer_lr", "outer_momentum"] * (name == "diloco")
        values = {option: getattr(settings, option) for option in options if getattr(settings, option) is not None}
        engine = DiLoCo if name == "diloco" else LocalSGD
        self.averaging = engine(model, None, every, process_group=world.group, **values)
        self._weight: float | Tensor = 0.0
        who = "ranks" if self.step_group is None else "machines"
        self.note = f"{who} exchange parameters every {every} steps: by design not the same run as on one device"

    @override
    def take_over(self, optimizer: Optimizer) -> Optimizer:
        return self._inner.take_over(optimizer)

    @override
    def whole(self, model: nn.Module) -> nn.Module:
        """Return a new model with the outer parameters, and the buffers of the last exchange."""
        copy = build_model(self._task, self._device)
        load_state_dict(copy, None, {"model": self._outer_model_state()})
        return copy

    @override
    def run(self, micro: MicroBatch, context: Pass) -> None:
        """Collective in the replica, as `Distributed`."""

        def on_losses(parts: list[Part]) -> None:
            for part in parts:
                self._weight = self._weight + part.out_of
            context.on_losses(parts)

        # A replica has only its part of the sum over the global batch, and scales it to its own mean.
        self._inner.run(micro, replace(context, factor=context.factor * self.num_replicas, on_losses=on_losses))

    @override
    def agrees(self, step: int) -> bool:
        return bool(self.averaging.schedule.due(step + 1)) or step + 1 == self._num_steps

    @override
    def end_step(self, step: int, flags: Tensor) -> None:
        """Exchange the parameters that are due after this step; all of them after the last step of the run."""
        weight, self._weight = self._weight, 0.0
        if self.agrees(step):
            self.averaging.flags = flags.tolist()
        if step + 1 < self._num_steps:
            self.averaging.step(weight)
        else:
            self.averaging.count(weight)
            self.averaging.sync()

    def reconnect(self, world: World) -> None:
        """Use the default group of ``world`` from now on; each rank is a replica. Collective: every rank."""
        self.group, self.num_replicas, self._replica_rank = world.group, world.world_size, world.rank
        self.averaging.reconnect(world)

    @override
    def replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Return the state that is equal on all ranks also between exchanges: outer parameters and outer optimizer."""
        outer = {f"outer {name}": value for name, value in self.averaging.outer_state().items() if value.numel()}
        return {**outer, **replica_of(nn.Module(), self.averaging.outer_optimizer, buffers="same")}

    # --- checkpoints: the outer model, which is equal on all ranks, and the state of each replica ---

    def _outer_model_state(self) -> dict[str, Any]:
        """Return the state of the model with outer parameters; tied parameters under each of their names."""
        outer, model = self.averaging.outer_state(), unwrap(self._model)
        names = {id(tensor): name for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers())}
        return {
            name: outer.get(names.get(id(value), ""), value)
            for name, value in plain_names(model.state_dict(keep_vars=True)).items()
        }

    @override
    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the outer model instead of this rank's model, and ``replicas``. Collective: every rank. Blocks."""
        state = self.averaging.state_dict()
        own_state, replica = state.pop("own"), {}
        if own_state["rank"] == self._replica_rank:
            replica = {**own_state, "model": plain_names(unwrap(self._model).state_dict())}
            if own_state["rank"]:  # the optimizer of rank 0 is the checkpoint's ``optimizer``
                replica["optimizer"] = optimizer.state_dict()["state"]
        from lockstep.checkpoints.checkpoint_storage import states_of_ranks  # imports DCP, which takes a second

        everyone = states_of_ranks(replica, group=self.group, device=self._device)
        return {"model": self._outer_model_state(), "replicas": {**state, "own": everyone}}

    @override
    def replica_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {"model": self._outer_model_state(), "replicas": {**self.averaging.state_dict(), "own": []}}

    @override
    def load_state_dict(self, state: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Continue from ``state``, whose outer model and optimizer of rank 0 were loaded. Blocks.

        With the same number of ranks the run continues with the same bits. With another number, all replicas start
        from the outer parameters; each rank gets the optimizer state of the rank of its number, and new ranks that of
        rank 0. After a run with another strategy, all start from its state.
        """
        if "replicas" not in state:
            self.averaging.restart(state["num_steps_done"])
            return
        replicas = dict(state["replicas"])
        everyone = replicas.pop("own")
        replica = read_tensors(everyone[self._replica_rank]) if self._replica_rank < len(everyone) else {}
        load_state_dict(self._model, None, {"model": replica.get("model", state["model"])})
        if "optimizer" in replica:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": replica["optimizer"]})
        # All ranks of a replica continue with the state of its first rank.
        own_state = {**replica, "rank": self.group.rank(), "world_size": len(everyone) if replica else 0}
        self.averaging.load_state_dict({**read_tensors(replicas), "own": own_state})


# --- the division of a global batch -----------------------------------------------------------------------------------


def split_batch(name: StrategyName, world: World, devices: Sequence[torch.device], settings: Settings) -> BatchSplit:
    """Return how strategy ``name`` divides a global batch, and the shares of this process.

    Raises:
        ConfigurationError: ``settings.shares`` is given, but the strategy can only divide a batch evenly.
    """
    accumulate, shares = settings.accumulate, settings.shares
    if name in PER_PROCESS:
        return BatchSplit(world.world_size, range(world.rank, world.rank + 1), accumulate, shares)
    if name == "torch-dp" and shares is not None:
        raise ConfigurationError(
            "Strategy torch-dp does not support shares: torch.nn.DataParallel divides a batch evenly.\n"
            "Use strategy dp, or omit shares."
        )
    num_shares = len(devices) if name == "dp" else 1  # torch's DataParallel divides the batch itself
    return BatchSplit(num_shares, range(num_shares), accumulate, shares)
