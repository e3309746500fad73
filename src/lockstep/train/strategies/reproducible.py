"""The same bits on any number of devices: virtual shards, summed in a tree. Design: docs/design/reproducible.md."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.base.accelerator import check_float64
from lockstep.comm.collectives import Group, all_reduce, broadcast_coalesced
from lockstep.comm.world import World
from lockstep.data.loader import MicroBatch
from lockstep.errors import ConfigurationError
from lockstep.loop.buffers import BufferSnapshot
from lockstep.parallel import reduction_tree as trees
from lockstep.parallel.ddp.setup import ModelSync
from lockstep.train.plan import VirtualShards, place_shards
from lockstep.train.settings import Settings, StrategyName
from lockstep.train.step_parts import Objective, Part
from lockstep.train.strategies.strategy import Pass, Strategy

# --- the causes of different bits of a sum: threads, kernels, the machine ---------------------------------------------


@dataclass(frozen=True)
class Arithmetic:
    """Number of threads and choice of kernels of a process.

    Args:
        threads: Cores that an operation on the CPU may use; None: torch's default.
        deterministic: Whether to use deterministic kernels; torch refuses operations that have none, by name.
    """

    threads: int | None
    deterministic: bool

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply these settings within the block, and restore the previous ones."""
        # The first query in a thread sets its number to that of the process, so query before setting.
        threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
        memory: Any = torch.utils.deterministic
        mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
        if self.deterministic:
            # cuBLAS reads this at its first use in the process.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            # With a warning only, attention on CUDA would use other orders of sums in each backward.
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = memory.fill_uninitialized_memory = False
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            if self.threads is not None:
                torch.set_num_threads(threads)
            if self.deterministic:
                torch.set_deterministic_debug_mode(mode)
                torch.backends.cudnn.benchmark = benchmark
                memory.fill_uninitialized_memory = fills


def explain_unordered(error: BaseException) -> None:
    """Turn torch's error about an operation without a deterministic kernel into one that says who needs one.

    Raises:
        ConfigurationError: ``error`` is this one, or that of `compile_in_place` about too many shapes.
    """
    if type(error).__name__ == "FailOnRecompileLimitHit":
        raise ConfigurationError(
            "reproducible: the inputs of the model have more shapes than torch.compile makes graphs for, so others "
            "would have other bits.\nPad inputs to fewer shapes, or omit compile."
        ) from error
    name, reason, _ = str(error).partition(" does not have a deterministic implementation")
    if reason:
        raise ConfigurationError(
            f"reproducible: {name}{reason} on this device, so each run would have other bits.\n"
            "Use another operation, or omit reproducible."
        ) from error


# With its default settings, torch gives cuBLAS at least so much memory of a device at the first use.
_CUBLAS_BYTES = 2**22


def find_late_cublas(device: torch.device) -> str | None:
    """Return a caveat if this process may have used cuBLAS before it got its setting; call it before `applied`."""
    if device.type != "cuda" or "CUBLAS_WORKSPACE_CONFIG" in os.environ:
        return None
    is_used = torch.accelerator.max_memory_allocated(device) >= _CUBLAS_BYTES
    return "the GPU was used before (start the script with CUBLAS_WORKSPACE_CONFIG=:4096:8)" if is_used else None


def describe_machine(device: torch.device) -> str:
    """Return the properties of the machine that the bits of a sum depend on."""
    version = f"torch {torch.__version__.partition('+')[0]}"
    if device.type != "cpu":
        return f"{torch.get_device_module(device).get_device_name(device)}, {version}, CUDA {torch.version.cuda}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return f"{next(names, 'CPU')}, {version}, instructions {torch.backends.cpu.get_cpu_capability()}"


# --- buffers ----------------------------------------------------------------------------------------------------------


class ShardBuffers:
    """Combines the buffers of ``model`` that the virtual shards have changed.

    Each virtual shard starts from the buffers that the step started with. Afterwards a floating-point buffer that any
    shard changed is set to the mean over all shards, weighted by samples and summed in the tree in float64, so batch
    norm's statistics contain every sample. Any other changed buffer is set to its value after the first shard with
    samples, so a counter counts steps.

    Args:
        model: The model.
        shards: The virtual shards.
        exchange: Sums between the ranks.
        group: The ranks; None: only this process.

    Raises:
        ConfigurationError: A buffer requires a gradient.
    """

    def __init__(
        self, model: nn.Module, shards: VirtualShards, exchange: trees.TreeReduction, group: Group | None
    ) -> None:
        self._leaves, self._placement = shards.split.shares, shards.placement
        self._exchange, self._group = exchange, group
        self._start = BufferSnapshot(model)
        for name, buffer in model.named_buffers():
            if buffer.requires_grad:
                raise ConfigurationError(
                    f"The buffer {name} requires a gradient, but reproducible sums gradients of parameters only.\n"
                    "Make it a parameter."
                )
        self._left: dict[int, list[Tensor | None]] = {}  # values by shard and buffer; None: not changed

    def begin(self) -> None:
        """Take a snapshot of the buffers at the start of the step."""
        self._start.keep()
        self._left = {}

    def restore(self) -> None:
        """Restore the buffers of the start of the step."""
        self._start.restore()

    def record(self, leaf: int) -> None:
        """Keep the buffers of the model after a virtual shard.

        Raises:
            ConfigurationError: A buffer has another shape or dtype than before.
        """
        left: list[Tensor | None] = []
        for value, name, start in zip(self._start.current(), self._start.names, self._start.values, strict=True):
            if value.shape != start.shape or value.dtype != start.dtype:
                raise ConfigurationError(
                    f"The buffer {name} changed from {_shape_and_dtype(start)} "
                    f"to {_shape_and_dtype(value)} in forward.\n"
                    "With reproducible, buffers must keep their shape and dtype. Store it in a plain attribute."
                )
            # Most buffers do not change and need no copy.
            left.append(None if torch.equal(value, start) else value.detach().clone())
        self._left[leaf] = left

    def changed(self) -> list[bool]:
        """Return whether a shard of this process changed it, for each buffer."""
        return [any(left[index] is not None for left in self._left.values()) for index in range(len(self._start.names))]

    @torch.no_grad()
    def finish(self, changed: Sequence[bool], sizes: Mapping[int, int]) -> None:
        """Set the buffers of the model to their values after the step.

        Collective if there is a group: every rank. Blocks until complete.

        Args:
            changed: For each buffer whether any shard of any rank changed it; the same on all ranks.
            sizes: Number of samples of every virtual shard that has any.
        """
        floating = [i for i, start in enumerate(self._start.values) if changed[i] and start.is_floating_point()]
        others = [i for i, start in enumerate(self._start.values) if changed[i] and not start.is_floating_point()]
        if floating:
            self._average(floating, sizes)
        if others:
            first = min(sizes)
            for index in others if first in self._left else ():
                self._start.objects[index].copy_(self._value(first, index))
            if self._group is not None:
                owner = next(rank for rank, leaves in enumerate(self._placement.ranges) if first in leaves)
                broadcast_coalesced([self._start.objects[index] for index in others], group=self._group, src=owner)

    def _average(self, indices: Sequence[int], sizes: Mapping[int, int]) -> None:
        tree, num_ranks = self._placement.tree, 1 if self._group is None else self._group.size()
        starts = [self._start.values[index] for index in indices]
        numels = [start.numel() for start in starts]
        numel, device = sum(numels), starts[0].device
        flats: dict[range, Tensor] = {}
        for leaf in self._leaves:
            # Padded: the ranks divide the sum among them.
            flat = torch.zeros(numel + -numel % num_ranks, dtype=torch.float64, device=device)
            if leaf in self._left:
                pieces = [self._value(leaf, index).to(device, torch.float64).flatten() for index in indices]
                torch.cat(pieces, out=flat[:numel]).mul_(sizes[leaf])
            flats[range(leaf, leaf + 1)] = flat
        nodes = tree.roots(self._leaves)
        parts = {node: trees.GradientRow([tree.combine(flats, Tensor.add_, root=node)], []) for node in nodes}
        mean = self._exchange.sum(parts).flats[0][:numel] / sum(sizes.values())
        for index, start, piece in zip(indices, starts, mean.split(numels), strict=True):
            self._start.objects[index].copy_(piece.view(start.shape))

    def _value(self, leaf: int, index: int) -> Tensor:
        """Return the value of a buffer after a shard."""
        left = self._left[leaf][index]
        return self._start.values[index] if left is None else left


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# --- other data that the ranks exchange -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The losses of virtual shards, the parameters that received a gradient, and the buffers that changed.

    Args:
        rows: For each virtual shard, on the host in float64: number of samples, total and count of its loss, and
            whether the loss is a mean over samples; zeros for shards without samples, and for those of other ranks.
        used: Whether it received a gradient, for each parameter.
        changed: Whether it changed, for each buffer.
    """

    rows: Tensor
    used: list[bool]
    changed: list[bool]

    def over_ranks(self, group: Group, device: torch.device) -> Table:
        """Return the table of all ranks. Collective: every rank. Blocks until complete."""
        flags = torch.tensor([*self.used, *self.changed], dtype=torch.float64)
        everything = torch.cat([self.rows.flatten(), flags]).to(device)
        # Each shard belongs to one rank, and the others add zeros, which does not change any bit.
        all_reduce(everything, group=group)
        rows, flags = everything.cpu().split([self.rows.numel(), len(flags)])
        bits = [flag > 0 for flag in flags.tolist()]
        return Table(rows.view_as(self.rows), bits[: len(self.used)], bits[len(self.used) :])

    @property
    def sizes(self) -> dict[int, int]:
        """Number of samples of each shard that has any."""
        return {leaf: int(size) for leaf, size in enumerate(self.rows[:, 0].tolist()) if size}

    def loss(self, tree: trees.ReductionTree) -> Part:
        """Return the loss, summed in the tree in float64."""
        sizes, totals, counts, are_means = self.rows.t().tolist()
        total, count = tree.total(totals), tree.total(counts)
        is_mean = all(is_mean for size, is_mean in zip(sizes, are_means, strict=True) if size)
        out_of = count if is_mean else torch.tensor(count, dtype=torch.float64)
        return Part(torch.tensor(total, dtype=torch.float64), 1.0, out_of)


def _rows(sizes: Mapping[int, int], parts: Mapping[int, Part], num_leaves: int, device: torch.device) -> Tensor:
    """Return the rows of a table for this process's shards. Waits for ``device``, once."""
    rows = torch.zeros(num_leaves, 4, dtype=torch.float64)
    if not parts:
        return rows
    values = [
        torch.stack([torch.as_tensor(item).detach().to(device, torch.float64) for item in (part.value, part.out_of)])
        for part in parts.values()
    ]
    for (leaf, part), (value, count) in zip(parts.items(), torch.stack(values).tolist(), strict=True):
        rows[leaf] = torch.tensor(
            [sizes[leaf], value * part.weight, count, isinstance(part.out_of, float)], dtype=torch.float64
        )
    return rows


# --- compute virtual shards on the device of this process -------------------------------------------------------------


@final
class Reproducible(Strategy):
    """Runs the virtual shards of this process one by one, and sums the gradients of all shards in one tree.

    Strategy ``dp`` does so on its first device: generators of random numbers that threads share (Python's, NumPy's and
    that of torch on the CPU) give numbers that depend on timing. Strategy ``ddp`` uses all devices.

    Collective if there is a group: every rank. All ranks get the model of rank 0.

    Args:
        model: The model without wrappers.
        objective: Its loss.
        shards: The virtual shards.
        devices: Of this process; the model is on the first.
        group: The ranks, with one device each; None: only this process.
        is_first: Whether the ranks compare the model and copy that of rank 0.

    Raises:
        ConfigurationError: The model has layers or buffers that are not supported.
        ModelMismatch: The model differs between ranks.
    """

    sums_losses = True
    stops_between = False

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        shards: VirtualShards,
        devices: Sequence[torch.device],
        group: Group | None,
        *,
        is_first: bool = True,
    ) -> None:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):  # the base class of ours, too
                raise ConfigurationError(
                    f"The layer {name} is a SyncBatchNorm, which needs all samples of a batch at once.\n"
                    "With reproducible, virtual shards run one after the other. Use BatchNorm, which then normalises "
                    "over a virtual shard on any number of devices, or omit reproducible."
                )
        if group is not None and is_first:
            # No engine wraps the model and does this.
            sync = ModelSync(model, set(), group, devices[0])
            sync.check(with_buffers=True)
            sync.broadcast(src=0, with_buffers=True)
        self.group = self.step_group = group
        placement = shards.placement
        self._model, self._objective, self._device = model, objective, devices[0]
        if len(set(devices)) > 1:
            self.note = f"all virtual shards are computed on {devices[0]}: strategy ddp uses all devices"
        self._tree = placement.tree
        self._lay_out()
        self._exchange = trees.TreeReduction(placement, group)
        self._mine = shards.mine
        self._buffers = ShardBuffers(model, shards, self._exchange, group)

    def _lay_out(self) -> None:
        """Sum the gradients of the parameters that are trained now."""
        trained = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        self._names, self._parameters = list(trained), list(trained.values())
        self._frozen = [parameter for parameter in self._model.parameters() if not parameter.requires_grad]
        layout = trees.GradientLayout(self._parameters, multiple_of=1 if self.group is None else self.group.size())
        self._sums = trees.PairwiseAccumulator(self._tree, layout, self._device)
        self._in_use: trees.GradientRow | None = None  # ``param.grad`` are views of it

    @override
    def run(self, micro: MicroBatch, context: Pass) -> None:
        """Run forward and backward of this process's virtual shards; sum the gradients of all shards.

        Collective if there is a group and ``context.sync``: every rank, with or without samples.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            self._lay_out()  # unfrozen by a callback
        for parameter in self._parameters:
            parameter.grad = None  # also of parameters that the optimizer does not have
        if self._in_use is not None:
            # No gradient is a view of it now.
            self._sums.give_back([self._in_use])
        table = self._compute(micro, context)
        context.timer.begin("communication")
        if not context.sync:  # a replay, or a step that is timed without communication
            context.on_losses([table.loss(self._tree)])
            # In no fixed order: this is sufficient to find the origin of a NaN.
            total, *others = self._sums.take().values()
            for row in others:
                total.add_row(row)
            self._sums.give_back(others)
            self._deliver(total, table.used)
            return
        context.timer.marks.exposed_s = 0.0  # the waits of backward are counted in other phases
        if self.group is not None:
            table = table.over_ranks(self.group, self._device)
        context.on_losses([table.loss(self._tree)])
        self._buffers.finish(table.changed, table.sizes)
        rows = self._sums.take()
        total = self._exchange.sum(rows)
        self._sums.give_back([row for row in rows.values() if row is not total])
        self._deliver(total, table.used)

    def _compute(self, micro: MicroBatch, context: Pass) -> Table:
        """Run forward and backward of the shards. Afterwards the buffers are those of the start of the step."""
        batches = dict(zip(micro.numbers, micro.batches, strict=True))
        sizes = dict(zip(micro.numbers, micro.sizes, strict=True))
        parts = {}
        used = [False] * len(self._parameters)
        self._buffers.begin()
        for leaf in self._mine:
            # A shard without samples is also a leaf of the tree.
            gradients: list[Tensor | None] = [None] * len(self._parameters)
            if leaf in sizes:
                context.timer.begin("forward")
                context.seed(leaf, device=self._device)
                part = self._objective(self._model, batches[leaf], sizes[leaf])
                context.timer.begin("backward")
                context.scaled(part).backward()
                parts[leaf] = part._replace(value=part.value.detach())
                gradients = [parameter.grad for parameter in self._parameters]
                self._model.zero_grad()
                self._buffers.record(leaf)
                self._buffers.restore()
            for index, gradient in enumerate(gradients):
                if gradient is not None and gradient.layout is not torch.strided:
                    raise ConfigurationError(
                        f"The gradient of {self._names[index]} is sparse, which reproducible does not support.\n"
                        "Create the embedding with sparse=False, and use an optimizer for dense gradients."
                    )
                used[index] = used[index] or gradient is not None
            self._sums.push(leaf, gradients)
        return Table(_rows(sizes, parts, self._tree.num_leaves, self._device), used, self._buffers.changed())

    def _deliver(self, total: trees.GradientRow, used: Sequence[bool]) -> None:
        for parameter, view, is_used in zip(self._parameters, total.views, used, strict=True):
            parameter.grad = view.data if is_used else None  # the script may move it elsewhere
        self._in_use = total


def virtual_shards(
    name: StrategyName, world: World, devices: Sequence[torch.device], settings: Settings
) -> VirtualShards | None:
    """Return the virtual shards if ``settings`` ask for them, else None.

    Raises:
        ConfigurationError: The device has no float64, or there are fewer shards than devices.
    """
    if settings.reproducible is None:
        return None
    check_float64(devices[0], f"reproducible={settings.reproducible}")
    num_devices = world.world_size if name == "ddp" else len(devices) if name == "dp" else 1
    placement = place_shards(settings.reproducible, num_devices, settings.shares)
    if name != "ddp":
        placement = trees.LeafPlacement((placement.tree.root,))
    return VirtualShards(placement, placement.ranges[world.rank if name == "ddp" else 0])
