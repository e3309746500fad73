"""Persistent replicas of a module, the tensors that they use instead of its own, and the sum of their gradients."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.cuda import nccl
from torch.torch_version import TorchVersion

from lockstep.base import torch_internals
from lockstep.base.containers import in_chunks
from lockstep.errors import ConfigurationError
from lockstep.parallel.compile import is_compiled
from lockstep.parallel.flat import cut_views, flatten_like, view_like

# torch 2.11 crashes the process when two threads compile at the same time, with or without this package.
_COMPILES_IN_THREADS = TorchVersion(torch.__version__) >= "2.13"

# One gradient for each weight, all on the device of one replica; None where the replica did not use the weight.
Gradients = list[Tensor | None]
Tensors = Sequence[Tensor]


class Replicas:
    """The replicas of ``module`` on ``devices``, the first of which is the module's own.

    [Note: replicas]

    A replica is a tree of *shells*: objects of the types of the module's own modules, created once. Before each use a
    shell gets a fresh copy of its module's ``__dict__``, with the current value of every attribute (flags, hooks,
    ``training``), but with its own children, the weights of its replica and its own buffers. So an attribute that a
    forward sets on a shell is lost at the next forward, as with torch's replicas. Writes *into* a buffer persist in the
    first replica, which has the module's own buffers, and are lost in the others.

    [Note: which tensor a replica sees]

    A *weight* is a parameter, or a buffer that requires a gradient. A replica can replace it in two ways:

    - *connected*: an output of ``_Replicate``, so that ``backward`` of a replica's output fills the ``grad`` of the
      module. Used by ``DataParallel.forward``. As in torch's replicas it is no ``nn.Parameter`` and has a ``grad_fn``.
    - *leaf*: a tensor with a ``grad`` of its own, so that every replica can run its own backward in its own thread.
      Used by ``DataParallel.backward``, which sums the gradients afterwards.

    Nothing is created before the first `refresh`.

    Attributes:
        module: The module that is replicated.
        devices: One for each replica; the same device may be named several times.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.module = module
        self.devices = tuple(devices)
        self._sources: list[nn.Module] = []
        self._shells: list[list[nn.Module]] = []
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}
        self._weights: list[Tensor] = []
        self._leaves: list[list[Tensor | None]] = []

    def refresh(self, num_replicas: int, *, leaves: bool) -> list[nn.Module]:
        """Bring the first ``num_replicas`` replicas up to date and return them: always the same objects.

        Args:
            num_replicas: How many are needed now.
            leaves: Whether their weights are leaves with gradients of their own, or connected to the module's by
                autograd; see [Note: which tensor a replica sees].

        Raises:
            ConfigurationError: The module cannot be replicated, or is not on the first device.
        """
        self._update_shells()
        parameters = _unique_tensors(parameter for source in self._sources for parameter in source._parameters.values())
        buffers = _unique_tensors(buffer for source in self._sources for buffer in source._buffers.values())
        plain_buffers = [buffer for buffer in buffers if not buffer.requires_grad]
        self._weights = [*parameters, *(buffer for buffer in buffers if buffer.requires_grad)]
        check_devices([*self._weights, *plain_buffers], self.devices[0])

        # On the module's own device every replica's weight shares the memory of the module's weight: nothing is copied
        # or out of date. Other devices get new copies each time: a write through ``weight.data``, NumPy or a foreign
        # kernel changes neither the version counter nor the pointer of a weight, so an outdated copy cannot be
        # detected.
        devices = self.devices[:num_replicas]
        remote = [device for device in dict.fromkeys(devices) if device != devices[0]]
        copies = dict(zip(remote, coalesced_copies(self._weights, remote), strict=True))
        values = [copies.get(device, self._weights) for device in devices]
        rows = self._make_leaves(values) if leaves else _connect(self._weights, values, devices)
        # The first replica has the module's own buffers, so writes of its forward persist, as with torch's replicas.
        # The others write into copies, which are lost.
        buffer_rows = [plain_buffers, *coalesced_copies(plain_buffers, devices[1:])]
        for shells, weights, own_buffers in zip(self._shells, rows, buffer_rows, strict=False):
            stand_ins = dict(zip(map(id, self._weights), weights, strict=True))
            stand_ins.update(zip(map(id, plain_buffers), own_buffers, strict=True))
            self._fill(shells, stand_ins)
        return [shells[0] for shells in self._shells[:num_replicas]]

    def drop_gradients(self) -> None:
        """Release the leaves and their gradients."""
        for leaf in (leaf for leaves in self._leaves for leaf in leaves if leaf is not None):
            leaf.grad = None  # the shells hold the leaf until the next `refresh`; it must not hold this memory
        self._leaves = []

    def reduce_gradients(self) -> None:
        """Sum the gradients of all leaves of the last `refresh` into those of the module's weights."""
        rows = [[None if leaf is None else leaf.grad for leaf in leaves] for leaves in self._leaves]
        self.drop_gradients()
        deliver(self._weights, sum_gradients(rows, self.devices[: len(rows)], in_place=True))

    def forget(self) -> None:
        """Create new shells at the next `refresh`: abandoned threads still use the present ones."""
        self._sources = []

    def _update_shells(self) -> None:
        # Checked in each step: a script may have replaced a layer. Comparing a list of modules takes microseconds.
        sources = list(self.module.modules())
        shell_types = map(type, self._shells[0]) if self._shells else ()
        # A type changes where a parametrization is registered, or a lazy layer has seen its first input.
        if sources == self._sources and list(map(type, sources)) == list(shell_types):
            return
        for name, source in self.module.named_modules():
            _check_replicable(name, source)
        self._sources = sources
        self._shells = [[object.__new__(type(source)) for source in sources] for _ in self.devices]
        self._compiled = {}

    def _make_leaves(self, values: Sequence[Tensors]) -> list[list[Tensor]]:
        with torch.inference_mode(False):
            rows = [list(map(_leaf_over, self._weights, row)) for row in values]
        # A frozen weight has no leaf: the replica uses the weight itself, and a gradient it may have is the module's.
        self._leaves = [
            [leaf if weight.requires_grad else None for weight, leaf in zip(self._weights, row, strict=True)]
            for row in rows
        ]
        return rows

    def _fill(self, shells: Sequence[nn.Module], tensors: dict[int, Tensor]) -> None:
        """Give the shells of one replica the present attributes of their modules. Called in each step: kept quick.

        Args:
            shells: Of the replica.
            tensors: By id of a weight or buffer of the module, its replacement in the replica.
        """
        stand_in = {id(None): None, **tensors, **dict(zip(map(id, self._sources), shells, strict=True))}
        for source, shell in zip(self._sources, shells, strict=True):
            # A fresh copy costs half a microsecond, so changes need not be detected. It also removes attributes that
            # the last forward set on the shell.
            state: dict[str, Any] = vars(torch_internals.replicate_for_data_parallel(source))
            state = state.copy()
            state["_is_replica"] = True  # zero_grad() warns in a replica
            # From module.compile(), bound to the original: the replica runs uncompiled.
            state[torch_internals.COMPILED_CALL] = None
            for kind in ("_modules", "_parameters", "_buffers"):
                state[kind] = {name: stand_in[id(tensor)] for name, tensor in vars(source)[kind].items()}
            if isinstance(source, nn.RNNBase):  # also keeps its parameters in a list
                named = torch_internals.flat_weights(source).items()
                state["_flat_weights"] = [state["_parameters"].get(name, weight) for name, weight in named]
            object.__setattr__(shell, "__dict__", state)
        for source, shell in zip(self._sources, shells, strict=True):
            if is_compiled(source):
                self._bind_compiled(source, shell)

    def _bind_compiled(self, source: Any, shell: Any) -> None:
        """Make the shell of a compiled module call its own inner module, compiled at the first call.

        The attribute ``forward`` of the original is bound to the original, which a replica must not use.
        """
        if shell not in self._compiled:
            inner = getattr(shell, torch_internals.ORIGINAL)
            self._compiled[shell] = source.dynamo_ctx(inner).forward if _COMPILES_IN_THREADS else inner.__call__
        vars(shell)["forward"] = self._compiled[shell]


class _Replicate(torch.autograd.Function):
    """Maps each weight to its replacement in every replica; backward sums the gradients of the replacements.

    Takes the devices of the replicas, for each replica the tensors that hold the values, and the weights. Returns the
    replacements, those of the first replica first.
    """

    @staticmethod
    def forward(
        ctx: Any, devices: Sequence[torch.device], values: list[list[Tensor]], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a weight that no replica used keeps its ``grad``
        # Not save_for_backward: neither values nor weights are needed to sum gradients.
        ctx.num_weights, ctx.devices = len(weights), devices
        # Backward runs on the stream of one device only. On the others, gradients are ready on the stream of the
        # replica's own backward. The first device comes last, so that it becomes the current one.
        ctx.streams = [torch.accelerator.current_stream(device) for device in reversed(devices) if device.type != "cpu"]
        return tuple(_alias_of(value) for row in values for value in row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count = ctx.num_weights
        rows = [list(gradients[start : start + count]) for start in range(0, len(gradients), count)]
        with ExitStack() as streams:
            for stream in ctx.streams:
                streams.enter_context(stream)
            if torch.is_grad_enabled():  # create_graph: the sum must be differentiable
                sums = [_differentiable_sum(parts, ctx.devices[0]) for parts in zip(*rows, strict=True)]
            else:
                # Not in place: autograd may also pass these tensors elsewhere.
                sums = sum_gradients(rows, ctx.devices, in_place=False)
        return (None, None, *sums)


def _connect(weights: Tensors, values: Sequence[Tensors], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    trainable = [weight.requires_grad and torch.is_grad_enabled() for weight in weights]
    outputs: Iterator[Tensor] = iter(())
    if any(trainable):
        chosen = [list(compress(row, trainable)) for row in values]
        outputs = iter(_Replicate.apply(devices, chosen, *compress(weights, trainable)))  # type: ignore[no-untyped-call]
    return [
        [
            next(outputs) if is_trainable else value if replica == 0 else _alias_of(value)
            for is_trainable, value in zip(trainable, row, strict=True)
        ]
        for replica, row in enumerate(values)
    ]


def _leaf_over(weight: Tensor, value: Tensor) -> Tensor:
    if not weight.requires_grad:
        return value
    leaf = nn.Parameter(value.detach()) if isinstance(weight, nn.Parameter) else value.detach().requires_grad_()
    # Attributes that a script or a library has set on the parameter, which a forward may read.
    if attributes := vars(weight):
        vars(leaf).update(attributes)
    return leaf


def _alias_of(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that autograd does not treat as a view.

    Unlike the result of ``detach()``, it may be ``set_()`` to other memory. ``flatten_parameters`` of a recurrent layer
    does that in the thread of its replica.
    """
    with torch.inference_mode(False), torch.no_grad():
        if not is_strided(tensor):
            return tensor.detach()
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return alias


def _differentiable_sum(parts: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    moved = [part.to(device) for part in parts if part is not None]
    return functools.reduce(torch.add, moved) if moved else None


def _unique_tensors(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the tensors of shared layers once, in the order of ``parameters()``."""
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def check_devices(tensors: Tensors, device: torch.device) -> None:
    """Check that parameters and buffers are on the device of the first replica.

    Raises:
        ConfigurationError: One of them is on another device.
    """
    for tensor in tensors:
        if tensor.device != device:
            raise ConfigurationError(
                f"module must have its parameters and buffers on device {device} (device_ids[0]) but found one of them "
                f"on device: {tensor.device}\n"
                f'Move the module with .to("{device}"), or name its device first in device_ids.'
            )


def _check_replicable(name: str, source: nn.Module) -> None:
    owner = f"its submodule {name!r}" if name else "it"
    if isinstance(source, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"DataParallel cannot replicate the module: {owner} is a TorchScript module.\n"
            "Wrap the Python module, and script or trace the bare module for export."
        )
    own_tensors = [*source._parameters.values(), *source._buffers.values()]
    if any(tensor is not None and nn.parameter.is_lazy(tensor) for tensor in own_tensors):
        raise ConfigurationError(
            f"DataParallel cannot replicate the module: {owner} has parameters or buffers without a shape.\n"
            "Run one forward of the bare module first, so that its lazy layers see an input."
        )


# --- gradients of the replicas ----------------------------------------------------------------------------------------

# Tensors are packed before they are copied to other devices: a chunk is complete when it has this size. So packing
# needs little memory, and a device sends one chunk while others still receive the one before.
_CHUNK_BYTES = 25 * 2**20


def _chunks(tensors: Tensors, indices: Iterable[int]) -> list[list[int]]:
    return in_chunks(indices, lambda index: tensors[index].dtype, lambda index: tensors[index].nbytes, _CHUNK_BYTES)


def _flat(parts: Tensors, like: Tensors) -> Tensor:
    flats = [flatten_like(part, other) for part, other in zip(parts, like, strict=True)]
    return torch.cat(flats) if len(flats) > 1 else flats[0]


def _has_ring(devices: Sequence[torch.device]) -> bool:
    """Return whether NCCL connects the devices in this process, and they are so many that its ring beats a tree."""
    is_many = devices[0].type == "cuda" and len(set(devices)) == len(devices) > 2
    return is_many and nccl.is_available([torch.empty(1, device=device) for device in devices])


@torch.no_grad()
def coalesced_copies(tensors: Tensors, devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Copy ``tensors``, which share one device, to each of ``devices``, in large chunks.

    Does not block; copies are in order with the current streams. NCCL sends them to more than one GPU, all at the same
    time. Otherwise, devices that have a copy pass it on: with n copies, the first device sends log2(n + 1) times,
    rounded up.

    Returns:
        One list for each device, with shapes, strides and values of ``tensors``. The copies do not require gradients.
        They share memory with each other, but each has a version counter of its own.
    """
    copies = [list(tensors) for _ in devices]
    strided = [index for index, tensor in enumerate(tensors) if is_strided(tensor)]
    has_ring = bool(strided) and _has_ring([tensors[0].device, *devices])
    with torch.inference_mode(False):
        for index in set(range(len(tensors))).difference(strided):
            for row, device in zip(copies, devices, strict=True):
                row[index] = tensors[index].detach().to(device, copy=True)
        for indices in _chunks(tensors, strided) if devices else ():
            parts = [tensors[index] for index in indices]
            sent = [_flat(parts, parts)]
            if has_ring:
                sent += [torch.empty_like(sent[0], device=device) for device in devices]
                nccl.broadcast(sent)
            for place, (row, device) in enumerate(zip(copies, devices, strict=True), 1):
                if not has_ring:
                    # A binomial tree: from the place without the highest bit, which got its copy log2 rounds earlier.
                    sent.append(sent[place - 2 ** (place.bit_length() - 1)].to(device, non_blocking=True, copy=True))
                pieces = sent[place].split([part.numel() for part in parts])
                for index, piece, part in zip(indices, pieces, parts, strict=True):
                    # Not detach(): a write to one buffer would increment the version counter of all, and autograd would
                    # then refuse the backward of an operation that has saved another buffer.
                    row[index] = view_like(piece, part).data
    return copies


def is_strided(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is an ordinary tensor or parameter: not sparse, not quantized, no other subclass."""
    kind = type(tensor)
    is_ordinary = kind is Tensor or issubclass(kind, torch.nn.Parameter)
    return is_ordinary and tensor.layout is torch.strided and not tensor.is_quantized


@torch.no_grad()
def sum_gradients(rows: Sequence[Gradients], devices: Sequence[torch.device], *, in_place: bool) -> Gradients:
    """Add the replicas' gradients: by NCCL where more than two GPUs have the same ones, otherwise `sum_in_tree`."""
    sums: dict[int, Tensor] = {}
    if _has_ring(devices):
        columns = enumerate(zip(*rows, strict=True))
        dense = [place for place, column in columns if all(each is not None and is_strided(each) for each in column)]
        first = cast("list[Tensor]", rows[0])
        for indices in _chunks(first, dense):
            like = [first[index] for index in indices]
            flats = [_flat([cast("Tensor", row[index]) for index in indices], like) for row in rows]
            total = torch.empty_like(flats[0])  # not in place: a flat tensor of one gradient is that gradient
            nccl.reduce(flats, total)
            sums.update(zip(indices, cut_views(total, like), strict=True))
    rows = [[None if place in sums else each for place, each in enumerate(row)] for row in rows]
    rest = sum_in_tree(rows, devices, in_place=in_place)
    return [sums.get(place, each) for place, each in enumerate(rest)]


@torch.no_grad()
def sum_in_tree(rows: Sequence[Gradients], devices: Sequence[torch.device], *, in_place: bool) -> Gradients:
    """Add the replicas' gradients, weight by weight, in a binary tree: (0 + 1) + (2 + 3), and so on.

    The order depends only on the number of rows, not on which thread finished first, so the sum always has the same
    bits.

    Args:
        rows: One for each replica.
        devices: The device of each row. The sums are on the first.
        in_place: Whether the memory of ``rows`` may be used for the sums.

    Returns:
        The sums; None where all were None.
    """
    # For a sum of two views of parameters, autograd returns two views of one gradient. Adding to one of them in place
    # would change the other.
    uses = Counter(_address(grad) for row in rows for grad in row if grad is not None and not grad.is_sparse)
    writable = {address for address, count in uses.items() if count == 1} if in_place else set()
    level = list(zip(rows, devices, strict=True))
    while len(level) > 1:
        merged = [
            (_add_rows(left, _row_on(device, right, origin), writable), device)
            for (left, device), (right, origin) in zip(level[0::2], level[1::2], strict=False)
        ]
        level = merged + level[2 * len(merged) :]
    return level[0][0]


def deliver(weights: Tensors, gradients: Gradients) -> None:
    """Add each gradient to ``weight.grad`` as a backward pass would: a missing one is set, and hooks are called."""
    pairs: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is None:
                continue
            # A buffer may have been computed from other tensors.
            if torch_internals.has_hooks(weight) or not weight.is_leaf:
                torch.autograd.backward([weight], [gradient])
            elif weight.grad is None:
                weight.grad = gradient  # without a copy, as autograd does with an otherwise unreferenced gradient
            elif weight.grad.is_sparse or gradient.is_sparse:
                torch.autograd.backward([weight], [gradient])
            else:
                pairs.append((weight.grad, gradient))
        _add_pairs(pairs)


def _add_rows(left: Gradients, right: Gradients, writable: set[int]) -> Gradients:
    result = list(left)
    in_place: list[tuple[Tensor, Tensor]] = []
    for index, (target, addend) in enumerate(zip(left, right, strict=True)):
        if target is None or addend is None:
            result[index] = addend if target is None else target
        elif target.is_sparse:
            result[index] = addend + target  # torch adds dense and sparse gradients in this order only
        elif _address(target) in writable and not addend.is_sparse:
            in_place.append((target, addend))
        else:
            result[index] = target + addend  # new memory, which no other gradient shares
    _add_pairs(in_place)
    return result


def _row_on(device: torch.device, row: Gradients, origin: torch.device) -> Gradients:
    if origin == device:
        return row
    (copies,) = coalesced_copies([gradient for gradient in row if gradient is not None], [device])
    moved = iter(copies)
    return [None if gradient is None else next(moved) for gradient in row]


def _add_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add in place, the second of each pair to the first."""
    if pairs:
        torch_internals.foreach_add_([target for target, _ in pairs], [other for _, other in pairs])


def _address(gradient: Tensor) -> int:
    return gradient.untyped_storage().data_ptr()
