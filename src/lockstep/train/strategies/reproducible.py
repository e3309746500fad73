"""The same bits on any number of devices: virtual shards, summed in one tree. Design: docs/design/reproducible.md."""

from __future__ import annotations

import os
import pickle
import random
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.comm.collectives import Group, all_gather, broadcast_coalesced
from lockstep.comm.world import World
from lockstep.data.loader import MicroBatch
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.setup import ModelSync
from lockstep.parallel.dp.threads import ReplicaGradients
from lockstep.parallel.reduction_tree import (
    GradientLayout,
    GradientRow,
    LeafPlacement,
    LocalReduction,
    PairwiseAccumulator,
    RankReduction,
    TreeReduction,
)
from lockstep.train.buffers import BufferSnapshot, overwrite_buffer
from lockstep.train.plan import VirtualShards, place_shards
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.step import Objective, Part
from lockstep.train.strategies.strategy import Pass, Strategy, scaled

# The settings of the process that change the bits of a sum: threads and the choice of kernels.

_NO_DETERMINISTIC_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")


def use_threads(count: int) -> None:
    """Set the number of cores that an operation of the calling thread may use.

    torch gives a thread the process's number at the first operation that asks for it, over the thread's own; asking
    for it first gets that behind us.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


@dataclass(frozen=True)
class Arithmetic:
    """How a process computes.

    Args:
        threads: Cores that an operation on the CPU may use; as many as torch likes if None.
        deterministic: Whether to take deterministic kernels wherever there are some.
    """

    threads: int | None
    deterministic: bool

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Compute this way inside, and as before afterwards."""
        threads = torch.get_num_threads()
        deterministic, warn_only = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        benchmark = torch.backends.cudnn.benchmark
        if self.deterministic:
            # cuBLAS reads it when it is first used in the process.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=not deterministic or warn_only)
            torch.backends.cudnn.benchmark = False
        if self.threads is not None:
            use_threads(self.threads)
        try:
            yield
        finally:
            if self.threads is not None:
                torch.set_num_threads(threads)
            if self.deterministic:
                torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
                torch.backends.cudnn.benchmark = benchmark


@contextmanager
def watch_for_other_kernels(found: list[str]) -> Iterator[None]:
    """Add to ``found`` the operations that have no deterministic kernel here; other warnings go on as they are."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        match = _NO_DETERMINISTIC_KERNEL.match(str(warning.message))
        if match is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif match[1] not in found:
            found.append(match[1])


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return what the bits of a sum depend on besides program and data, by name."""
    machine = {"torch": torch.__version__.partition("+")[0]}
    if device.type == "cuda":
        return machine | {"device": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda)}
    return machine | {"device": _cpu_name(), "instructions": torch.backends.cpu.get_cpu_capability()}


def differences(first: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return in words in what ``other`` differs from ``first``."""
    names = dict.fromkeys([*first, *other])
    return [
        f"{name} {other.get(name, 'none')} instead of {first.get(name, 'none')}"
        for name in names
        if first.get(name) != other.get(name)
    ]


def first_unlike(machines: Sequence[dict[str, str]]) -> str | None:
    """Return in words the first of the ranks' ``machines`` that differs from rank 0's, and in what, or None."""
    for rank, machine in enumerate(machines):
        if unlike := differences(machines[0], machine):
            return f"rank {rank} computes elsewhere than rank 0: {', '.join(unlike)}"
    return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else "CPU"


# The buffers of a model whose virtual shards run one after the other, or in several places at once.
#
# [Note: buffers]
# Each virtual shard starts from the buffers that the step started with. Afterwards a floating-point buffer that any of
# them changed becomes the mean of what they all left in it, weighted by samples and summed in the tree in float64; so
# batch norm's statistics see every sample. Any other buffer that was changed becomes what the first shard with samples
# left in it: a counter counts steps.


class ShardBuffers:
    """What the virtual shards of this process leave in the buffers of ``model``, and what becomes of it.

    Args:
        model: With all of its buffers.
        leaves: The virtual shards of this process.

    Raises:
        ConfigurationError: A buffer requires a gradient.
    """

    def __init__(self, model: nn.Module, leaves: range) -> None:
        self._leaves = leaves
        self._kept = BufferSnapshot(model)
        for name, buffer in model.named_buffers():
            if buffer.requires_grad:
                raise ConfigurationError(
                    f"The buffer {name} requires a gradient, which reproducible does not sum.\nMake it a parameter."
                )
        self._left: dict[int, list[Tensor | None]] = {}

    def begin(self) -> None:
        """Keep the buffers that the step starts with."""
        self._kept.keep()
        self._left = {}

    @property
    def _start(self) -> list[Tensor]:
        return self._kept.values

    def record(self, leaf: int, module: nn.Module) -> None:
        """Keep what a virtual shard left in the buffers of ``module``, which is the model or a replica of it.

        Raises:
            ConfigurationError: A buffer has another shape or dtype than before.
        """
        left: list[Tensor | None] = []
        for value, name, start in zip(self._kept.read(module), self._kept.names, self._start, strict=True):
            if value.shape != start.shape or value.dtype != start.dtype:
                raise ConfigurationError(
                    f"The buffer {name} changed from {_shape_and_dtype(start)} "
                    f"to {_shape_and_dtype(value)} in forward.\n"
                    "With reproducible, buffers keep their shape and dtype. Keep what grows in a plain attribute."
                )
            left.append(None if torch.equal(value.to(start.device), start) else value.detach().clone())
        self._left[leaf] = left

    def restore(self) -> None:
        """Give the model the buffers that the step started with."""
        self._kept.restore()

    def changed(self) -> list[bool]:
        """Return for each buffer whether a shard of this process changed it."""
        return [any(left[index] is not None for left in self._left.values()) for index in range(len(self._kept.names))]

    def finish(
        self,
        changed: Sequence[bool],
        sizes: Mapping[int, int],
        placement: LeafPlacement,
        exchange: TreeReduction,
        group: Group | None,
    ) -> None:
        """Set the buffers of the model, which are those that the step started with, to what the step makes of them.

        Collective if there is a group: every rank. Blocks until complete.

        Args:
            changed: For each buffer whether any shard of any rank changed it; alike on all ranks.
            sizes: The samples of every virtual shard that has any.
            placement: Of the shards over the ranks.
            exchange: Sums between the ranks.
            group: The ranks, or None if it is only this process.
        """
        floating = [i for i, start in enumerate(self._start) if changed[i] and start.is_floating_point()]
        others = [i for i, start in enumerate(self._start) if changed[i] and not start.is_floating_point()]
        if floating:
            self._average(floating, sizes, placement, exchange, 1 if group is None else group.size())
        if others:
            first = min(sizes)
            owner = next(rank for rank, leaves in enumerate(placement.ranges) if first in leaves)
            if first in self._left:
                for index in others:
                    overwrite_buffer(self._kept.objects[index], self._at(first, index))
            if group is not None:
                broadcast_coalesced([self._kept.objects[index] for index in others], group=group, src=owner)

    def _average(
        self,
        indices: Sequence[int],
        sizes: Mapping[int, int],
        placement: LeafPlacement,
        exchange: TreeReduction,
        num_ranks: int,
    ) -> None:
        device = self._start[indices[0]].device
        numel = sum(self._start[index].numel() for index in indices)
        padding = -numel % num_ranks
        flats: dict[range, Tensor] = {}
        for leaf in self._leaves:
            flat = torch.zeros(numel + padding, dtype=torch.float64, device=device)
            if leaf in self._left:
                pieces = [self._at(leaf, index).to(device, torch.float64).flatten() for index in indices]
                torch.cat(pieces, out=flat[:numel]).mul_(sizes[leaf])
            flats[range(leaf, leaf + 1)] = flat
        nodes = placement.tree.roots(self._leaves)
        parts = {node: GradientRow([placement.tree.combine(flats, Tensor.add_, root=node)], []) for node in nodes}
        total = exchange.sum([parts]).flats[0][:numel] / sum(sizes.values())
        for index, piece in zip(indices, total.split([self._start[i].numel() for i in indices]), strict=True):
            overwrite_buffer(self._kept.objects[index], piece.view(self._start[index].shape))

    def _at(self, leaf: int, index: int) -> Tensor:
        """Return what a shard left in a buffer, changed or not."""
        left = self._left[leaf][index]
        return self._start[index] if left is None else left


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# What the ranks tell each other of their virtual shards besides gradients: small, and the same on all afterwards.


class Entry(NamedTuple):
    """A virtual shard with samples: how many, and its part of the loss."""

    num_samples: int
    total: float
    out_of: float
    is_mean: bool


@dataclass(frozen=True)
class Table:
    """All virtual shards that have samples, the parameters that received a gradient, and the buffers that changed.

    Args:
        entries: By number of the shard.
        used: For each parameter.
        changed: For each buffer.
    """

    entries: dict[int, Entry]
    used: list[bool]
    changed: list[bool]

    @property
    def sizes(self) -> dict[int, int]:
        """The samples of each shard."""
        return {leaf: entry.num_samples for leaf, entry in self.entries.items()}

    def loss(self, placement: LeafPlacement) -> Part:
        """Return the parts of the loss, summed in the tree in float64."""
        nothing = Entry(0, 0.0, 0.0, True)
        entries = [self.entries.get(leaf, nothing) for leaf in placement.tree.root]
        total, count = (
            placement.tree.combine({range(i, i + 1): value for i, value in enumerate(values)}, float.__add__)
            for values in ([entry.total for entry in entries], [entry.out_of for entry in entries])
        )
        is_mean = all(entry.is_mean for entry in entries)
        return Part(torch.tensor(total, dtype=torch.float64), 1.0, count if is_mean else torch.tensor(count).double())


def own_entries(sizes: Mapping[int, int], parts: Mapping[int, Part], device: torch.device) -> dict[int, Entry]:
    """Return the entries of this process's shards. Waits for ``device``, once."""
    if not parts:
        return {}
    values = [
        torch.stack(
            [
                part.value.detach().to(device, torch.float64) * part.weight,
                torch.as_tensor(part.out_of).detach().to(device, torch.float64),
            ]
        )
        for part in parts.values()
    ]
    numbers: list[list[float]] = torch.stack(values).tolist()
    return {
        leaf: Entry(sizes[leaf], total, count, part.is_mean)
        for (leaf, part), (total, count) in zip(parts.items(), numbers, strict=True)
    }


def share_table(mine: Table, placement: LeafPlacement, group: Group, device: torch.device) -> Table:
    """Return what all ranks have. Collective: every rank. Blocks until complete.

    Args:
        mine: Of this rank's shards.
        placement: Of the shards over the ranks.
        group: The ranks.
        device: Where the bytes lie while they travel.
    """
    most = max(map(len, placement.ranges))
    rows = torch.zeros(most, 4, dtype=torch.float64)
    for position, leaf in enumerate(placement.ranges[group.rank()]):
        if leaf in mine.entries:
            rows[position] = torch.tensor(mine.entries[leaf], dtype=torch.float64)
    flags = torch.tensor([*mine.used, *mine.changed], dtype=torch.uint8)
    gathered = all_gather(torch.cat([rows.view(torch.uint8).flatten(), flags]).to(device), group=group)
    entries: dict[int, Entry] = {}
    seen = torch.zeros_like(flags)
    for leaves, data in zip(placement.ranges, gathered, strict=True):
        data = data.cpu()
        table = data[: rows.nbytes].view(torch.float64).view(most, 4).tolist()
        entries |= _read(leaves, table)
        seen |= data[rows.nbytes :]
    found = [bool(flag) for flag in seen.tolist()]
    return Table(entries, found[: len(mine.used)], found[len(mine.used) :])


def _read(leaves: Sequence[int], rows: Sequence[Sequence[float]]) -> dict[int, Entry]:
    return {
        leaf: Entry(int(num_samples), total, count, bool(is_mean))
        for leaf, (num_samples, total, count, is_mean) in zip(leaves, rows, strict=False)
        if num_samples
    }


# Compute virtual shards on the devices of this process, each with random numbers of its own.


class Shard(NamedTuple):
    """A virtual shard that has samples."""

    leaf: int
    batch: object
    num_samples: int


class ShardResult(NamedTuple):
    """What came of it; ``gradients`` are one a parameter of the model."""

    part: Part
    gradients: Sequence[Tensor | None]


class LocalReplicas(ABC):
    """The replicas of the model in this process."""

    @abstractmethod
    def compute(self, shards: Mapping[int, Shard], how: Pass, buffers: ShardBuffers) -> dict[int, ShardResult]:
        """Run forward and backward of at most one shard a replica, from the model as it is.

        Args:
            shards: By number of the replica.
            how: As for any strategy.
            buffers: Records what each shard leaves there; the model has those that the step started with again.

        Returns:
            By number of the replica. ``param.grad`` of the model is None.
        """


@final
class OneReplica(LocalReplicas):
    """The model itself."""

    def __init__(self, model: nn.Module, objective: Objective, device: torch.device) -> None:
        self._model, self._objective, self._device = model, objective, device
        self._parameters = list(model.parameters())

    @override
    def compute(self, shards: Mapping[int, Shard], how: Pass, buffers: ShardBuffers) -> dict[int, ShardResult]:
        """Run forward and backward of the only shard."""
        results = {}
        for replica, shard in shards.items():
            how.timer.name_phase("forward")
            how.seed(shard.leaf, self._device)
            part = self._objective(self._model, shard.batch, shard.num_samples)
            how.timer.lap("forward")
            scaled(part, how.scale).backward()
            gradients = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
            how.timer.lap("backward")
            buffers.record(shard.leaf, self._model)
            buffers.restore()
            results[replica] = ShardResult(part._replace(value=part.value.detach()), gradients)
        return results


@final
class ManyReplicas(LocalReplicas):
    """Our `DataParallel`: a thread for each device.

    Random numbers come from generators that belong to the process (Python's, numpy's, torch's for the CPU) or to a
    device. Threads that draw from the same one at the same time get what their timing gives them, so replicas that
    share one take turns: on the CPU always, and elsewhere from the first step on in which a shared one was drawn from.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, devices: Sequence[torch.device], arithmetic: Arithmetic
    ) -> None:
        from lockstep.parallel.dp.wrapper import DataParallel

        self._engine = DataParallel(model, device_ids=list(devices))
        self._objective, self._devices, self._arithmetic = objective, list(devices), arithmetic
        self._take_turns = devices[0].type == "cpu" or len(set(devices)) < len(devices)

    @override
    def compute(self, shards: Mapping[int, Shard], how: Pass, buffers: ShardBuffers) -> dict[int, ShardResult]:
        """Run forward and backward of the shards, all at the same time where that is safe."""
        if not self._take_turns:
            before = _shared_state()
            found = self._differentiate(shards, how)
            self._take_turns = _shared_state() != before
            if not self._take_turns:
                return self._results(shards, found, buffers)
            buffers.restore()
        results: dict[int, ShardResult] = {}
        for replica, shard in shards.items():
            alone = {replica: shard}
            results |= self._results(alone, self._differentiate(alone, how), buffers)
        return results

    def _differentiate(self, shards: Mapping[int, Shard], how: Pass) -> dict[int, tuple[Part, ReplicaGradients]]:
        """Run forward and backward of all ``shards`` at the same time."""
        parts: dict[int, Part] = {}

        def loss(module: nn.Module, item: tuple[int, Shard]) -> Tensor:
            replica, shard = item
            if self._arithmetic.threads is not None:
                use_threads(self._arithmetic.threads)
            part = self._objective(module, shard.batch, shard.num_samples)
            parts[replica] = part._replace(value=part.value.detach())
            return scaled(part, how.scale)

        for replica, shard in shards.items():
            how.seed(shard.leaf, self._devices[replica])
        items = [(index, shards[index]) if index in shards else None for index in range(max(shards) + 1)]
        how.timer.name_phase("replicas")
        found = self._engine.gradients(loss, items, [1.0] * len(items))  # the same roundings as in one replica
        how.timer.lap("backward")
        return {replica: (parts[replica], gradients) for replica, gradients in found.items()}

    def _results(
        self, shards: Mapping[int, Shard], found: Mapping[int, tuple[Part, ReplicaGradients]], buffers: ShardBuffers
    ) -> dict[int, ShardResult]:
        for replica, (_, computed) in found.items():
            buffers.record(shards[replica].leaf, computed.module)
        buffers.restore()
        return {replica: ShardResult(part, computed.gradients) for replica, (part, computed) in found.items()}


def _shared_state() -> tuple[object, ...]:
    """Return the state of the generators that all threads share, to see whether anybody drew from them."""
    numpy_state = pickle.dumps(np.random.get_state())
    return random.getstate(), numpy_state, torch.get_rng_state().numpy().tobytes()


def check_gradients(names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
    """Check that gradients can be summed in the tree.

    Raises:
        ConfigurationError: One is sparse.
    """
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"The gradient of {name} is sparse, which reproducible does not sum.\n"
                "Make the embedding with sparse=False, and use an optimizer for dense gradients."
            )


# Train so that the bits do not depend on the number of devices; see docs/design/reproducible.md.


@final
class Reproducible(Strategy):
    """Runs the virtual shards of this process, and sums what comes of all of them in one tree.

    Args:
        model: The bare model.
        replicas: Where shards are computed.
        placement: Of the shards over the replicas of this process, if there is no group.
        devices: Of the replicas.
        group: The ranks, with ``placement`` over them and one replica each; or None.

    Raises:
        ConfigurationError: The model has layers or buffers that this cannot sum.
    """

    sums_losses = True

    def __init__(
        self,
        model: nn.Module,
        replicas: LocalReplicas,
        placement: LeafPlacement,
        devices: Sequence[torch.device],
        group: Group | None,
    ) -> None:
        check_layers(model)
        self.group = group
        self._replicas, self._placement, self._device = replicas, placement, devices[0]
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._trained = [index for index, parameter in enumerate(model.parameters()) if parameter.requires_grad]
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        layout = GradientLayout(self._parameters, multiple_of=1 if group is None else group.size())
        tree = placement.tree
        self._ladders = [PairwiseAccumulator(tree, layout, device) for device in devices]
        self._exchange: TreeReduction = LocalReduction(tree) if group is None else RankReduction(placement, group)
        self._mine = placement.ranges if group is None else placement.ranges[group.rank() : group.rank() + 1]
        self._over_ranks = placement if group is not None else LeafPlacement((tree.root,))
        self._buffers = ShardBuffers(model, range(self._mine[0].start, self._mine[-1].stop))
        self._given_away: list[GradientRow] = []

    @override
    def run(self, micro: MicroBatch, how: Pass) -> None:
        """Run forward and backward of this process's virtual shards; leave the sum of all shards' gradients.

        Collective if there is a group and ``how.sync``: every rank, with or without samples.
        """
        shards = {
            leaf: Shard(leaf, batch, size)
            for leaf, batch, size in zip(micro.numbers, micro.batches, micro.sizes, strict=True)
        }
        for parameter in self._parameters:
            parameter.grad = None  # also of those that the optimizer does not have
        self._ladders[0].give_back(self._given_away)
        self._given_away = []
        table = self._compute(shards, how)
        how.timer.name_phase("communication")
        if not how.sync:
            self._deliver_own(table.used)
            how.after_forward([table.loss(self._placement)])
            return
        how.timer.mark_waits_counted()
        if self.group is not None:
            table = share_table(table, self._placement, self.group, self._device)
        how.after_forward([table.loss(self._placement)])
        self._buffers.finish(table.changed, table.sizes, self._over_ranks, self._exchange, self.group)
        self._deliver(table.used)
        how.timer.lap("communication")
        how.timer.name_phase("data_wait")

    def _compute(self, shards: dict[int, Shard], how: Pass) -> Table:
        """Run the shards, round after round: one on each replica at a time."""
        parts = {}
        used = [False] * len(self._parameters)
        nothing = [None] * len(self._parameters)
        self._buffers.begin()
        for leaves in zip_longest(*self._mine):
            current = {replica: shards[leaf] for replica, leaf in enumerate(leaves) if leaf in shards}
            results = self._replicas.compute(current, how, self._buffers) if current else {}
            for replica, leaf in enumerate(leaves):
                if leaf is None:
                    continue
                if replica not in results:
                    self._ladders[replica].push(leaf, nothing)
                    continue
                result = results[replica]
                gradients = [result.gradients[index] for index in self._trained]
                check_gradients(self._names, gradients)
                used = [was or gradient is not None for was, gradient in zip(used, gradients, strict=True)]
                self._ladders[replica].push(leaf, gradients)
                parts[leaf] = result.part
            how.timer.lap("backward")
        entries = own_entries({leaf: shard.num_samples for leaf, shard in shards.items()}, parts, self._device)
        return Table(entries, used, self._buffers.changed())

    def _deliver_own(self, used: Sequence[bool]) -> None:
        """Leave the sum over this process's shards alone: enough to see where a NaN came from, in no fixed order."""
        total, *others = [(ladder, row) for ladder in self._ladders for row in ladder.take().values()]
        for ladder, row in others:
            for mine, flat in zip(total[1].flats, row.flats, strict=True):
                mine.add_(flat.to(mine.device))
            ladder.give_back([row])
        for parameter, view, is_used in zip(self._parameters, total[1].views, used, strict=True):
            parameter.grad = view if is_used else None
        self._given_away = [total[1]]

    def _deliver(self, used: Sequence[bool]) -> None:
        """Sum the gradients over replicas and ranks for the parameters. Collective if there is a group."""
        taken = [ladder.take() for ladder in self._ladders]
        total = self._exchange.sum(taken)
        for parameter, view, is_used in zip(self._parameters, total.views, used, strict=True):
            parameter.grad = view if is_used else None
        for ladder, rows in zip(self._ladders, taken, strict=True):
            ladder.give_back([row for row in rows.values() if row is not total])
        self._given_away = [total]


def check_layers(model: nn.Module) -> None:
    """Check that no layer looks beyond its own virtual shard.

    Raises:
        ConfigurationError: One does; names it.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):  # ours is one of these
            raise ConfigurationError(
                f"The layer {name} is a SyncBatchNorm, which needs all samples of a batch at once.\n"
                "With reproducible, virtual shards run one after the other. Use BatchNorm, which then normalises over "
                "a virtual shard on any number of devices, or leave reproducible out."
            )


# Put the reproducible mode together: the virtual shards of this process, and the strategy that computes them.


def virtual_shards(
    name: StrategyName, world: World, devices: Sequence[torch.device], settings: Settings
) -> VirtualShards | None:
    """Return the virtual shards if ``settings`` ask for them, else None.

    Raises:
        ConfigurationError: The strategy is torch's, or there are fewer shards than devices.
    """
    if settings.reproducible is None:
        return None
    if name not in ("single", "dp", "ddp"):
        is_torchs = name.startswith("torch-")
        why = "torch's engine sums in an order of its own" if is_torchs else "it works on slices, which end anywhere"
        instead = "dp" if "dp" in (name.removeprefix("torch-"), name.removesuffix("-zero1")) else "ddp"
        raise ConfigurationError(
            f"Strategy {name} cannot be reproducible: {why}.\nUse strategy {instead}, or leave reproducible out."
        )
    num_devices = world.world_size if name == "ddp" else len(devices) if name == "dp" else 1
    placement = place_shards(settings.reproducible, num_devices, settings.shares)
    ranges = placement.ranges
    return VirtualShards(placement, (ranges[world.rank],) if name == "ddp" else ranges)


def make_reproducible(
    shards: VirtualShards,
    name: StrategyName,
    model: nn.Module,
    objective: Objective,
    world: World,
    devices: Sequence[torch.device],
    arithmetic: Arithmetic,
) -> Reproducible:
    """Return the strategy for the bare ``model``, which is on the first of ``devices``.

    Collective for ``ddp``: every rank, which all take over the model of rank 0.

    Raises:
        ConfigurationError: The model has layers or buffers that cannot be summed.
        ModelMismatch: The model differs between ranks.
    """
    group = world.group if name == "ddp" else None
    if group is not None:
        sync = ModelSync(model, set(), group, devices[0])
        sync.check(with_buffers=True)
        sync.broadcast(src=0, with_buffers=True)
    replicas: LocalReplicas = (
        ManyReplicas(model, objective, devices, arithmetic)
        if name == "dp" and len(devices) > 1
        else OneReplica(model, objective, devices[0])
    )
    return Reproducible(model, replicas, shards.placement, devices, group)
