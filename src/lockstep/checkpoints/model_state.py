"""The state dict of model and optimizer in a checkpoint: collect it without wrappers, in shards, and load it.

[Note: shards]
A rank holds boxes of a sharded tensor, identified by their offsets (`TensorChunks`; DCP calls them chunks), and a
checkpoint contains these boxes. Any number of ranks and any strategy can read the parts that they need. Nothing is
gathered.
    fsdp        a DTensor has one box: rows of the parameter
    ddp-zero1   a rank has adjacent elements of a parameter: a part of a row, whole rows, a part of a row. It writes the
                optimizer state of these elements and, although all ranks have all parameters, only these elements
    others      rank zero has everything, the others nothing

[Note: residuals in a checkpoint]
Residuals of compressed gradients differ between ranks. A checkpoint has one tensor for each parameter, with one row per
rank. With the same number of ranks, each rank takes its own row and continues with the same bits. With another number
n, rank r takes the sum of the rows r, r + n, r + 2n, ...: only the sum over all ranks matters, and it does not change.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.torch_internals import ORIGINAL, submodules
from lockstep.comm.collectives import all_gather_object
from lockstep.comm.fully_shard import is_sharded, local_chunk, whole
from lockstep.errors import ConfigurationError
from lockstep.parallel.compile import is_compiled
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.dp.wrapper import DataParallel
from lockstep.parallel.flat import flatten_like, order_in_memory
from lockstep.parallel.zero.optimizer import ZeroRedundancyOptimizer
from lockstep.parallel.zero.partition import SCALARS, ShardRange

_WRAPPERS = (DataParallel, DistributedDataParallel, nn.DataParallel, nn.parallel.DistributedDataParallel)

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class TensorChunks:
    """The part of a tensor that this rank holds; may be empty.

    Attributes:
        size: Size of the whole tensor.
        dtype: Its dtype.
        chunks: Boxes of it by their offsets. They are views: writing to them writes to the tensor itself.
    """

    size: torch.Size
    dtype: torch.dtype
    chunks: Mapping[Offsets, Tensor]

    @classmethod
    def of(cls, tensor: Any) -> TensorChunks:
        """Return this rank's chunk of a sharded tensor, or the whole of any other tensor."""
        offsets, local = local_chunk(tensor) if is_sharded(tensor) else ((0,) * tensor.dim(), tensor)
        return cls(tensor.shape, tensor.dtype, {offsets: local.detach()} if local.numel() else {})


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint that has not been read yet.

    Attributes:
        load: Reads into the given chunks.
    """

    size: torch.Size
    dtype: torch.dtype
    load: Callable[[TensorChunks], None]

    def read(self, like: Any = None) -> Tensor:
        """Return it on the CPU; sharded like ``like`` if ``like`` is sharded and has the same shape. Blocks."""
        if is_sharded(like) and like.shape == self.size:
            tensor = torch.empty_like(like, dtype=self.dtype, requires_grad=False)
        else:
            tensor = torch.empty(self.size, dtype=self.dtype)
        self.load(TensorChunks.of(tensor))
        return tensor


def read_tensors(value: Any, like: Any = None) -> Any:
    """Return a state with all its tensors read; for ``like`` see `StoredTensor.read`."""
    if isinstance(value, StoredTensor):
        return value.read(like)
    if type(value) in (list, tuple):
        return type(value)(read_tensors(item) for item in value)
    return {key: read_tensors(item) for key, item in value.items()} if isinstance(value, dict) else value


# --- names ---


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without data-parallel wrappers and without the wrapper of ``torch.compile``."""
    while True:
        if isinstance(model, _WRAPPERS):
            model = model.module
        elif is_compiled(model):
            model = model.get_submodule(ORIGINAL)
        else:
            return model


def plain_name(name: str) -> str:
    """Return the name of an entry of a model's state in the model that is not compiled."""
    return ".".join(part for part in name.split(".") if part != ORIGINAL)


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state under the names that it has in the model that is not compiled."""
    return {plain_name(name): value for name, value in state.items()}


# --- collect the part of a rank ---


def local_state_dict(model: nn.Module | None, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return this rank's part of the state of model and optimizer: its shards, and everything that is not sharded.

    With `ZeroRedundancyOptimizer`: collective, every rank, and blocks.
    """
    state: dict[str, Any] = {}
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.wait()  # it may still gather the parameters that other ranks have updated
    if model is not None:
        state["model"] = plain_names(unwrap(model).state_dict())
    if (compressed := _compressed(model)) is not None:
        state["compression"] = compression_state(compressed)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        if model is not None:
            state["model"] |= _own_parts(unwrap(model), optimizer)
        state["optimizer"] = _zero_state_dict(optimizer)
    elif optimizer is not None:
        state["optimizer"] = _state_with_held(optimizer)
    return state


_HELD = "lockstep.held"


def _state_with_held(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer, with that of optimizers that it holds, which torch's ``state_dict`` lacks."""
    state: dict[str, Any] = optimizer.state_dict()
    if state.keys() == {"state", "param_groups"} and (held := held_by(optimizer)):  # else the class saves it itself
        state = {**state, _HELD: {name: _state_with_held(part) for name, part in held.items()}}
    return state


def held_by(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that ``optimizer`` has as attributes and that have another state, by name."""
    parts = {name: part for name, part in vars(optimizer).items() if isinstance(part, Optimizer)}
    return {name: part for name, part in parts.items() if part.state is not optimizer.state}


def _compressed(model: nn.Module | None) -> DistributedDataParallel | None:
    """Return the wrapper of ``model`` that compresses gradients, or None."""
    while model is not None and not isinstance(model, DistributedDataParallel) and unwrap(model) is not model:
        model = (parts := submodules(model)).get("module", parts.get(ORIGINAL))
    return model if isinstance(model, DistributedDataParallel) and model.compression is not None else None


def compression_state(model: DistributedDataParallel) -> dict[str, Any]:
    """Return this rank's residuals of compressed gradients; see [Note: residuals in a checkpoint]."""
    rank, num_ranks = model.process_group.rank(), model.process_group.size()
    state: dict[str, Any] = model.compression_state_dict()
    rows = {}
    for name, residual in state["residuals"].items():
        chunks = {(rank, *[0] * residual.dim()): residual[None]} if residual.numel() else {}
        rows[name] = TensorChunks(torch.Size([num_ranks, *residual.shape]), residual.dtype, chunks)
    return {**state, "residuals": rows}


def _own_parts(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> dict[str, TensorChunks]:
    """Return the elements of each parameter that this rank updates, by name: so all ranks write equally much."""
    parameters = _parameters_of(optimizer)
    chunks: list[dict[Offsets, Tensor]] = [{} for _ in parameters]
    for index, start, stop, _ in optimizer.local_ranges():
        parameter = parameters[index].detach()
        chunks[index] |= boxes_in_memory(flatten_like(parameter, parameter)[start:stop], parameter, start)
    # One object for each parameter, also if it is empty: tied parameters must be recognised on every rank.
    parts = {id(p): TensorChunks(p.shape, p.dtype, held) for p, held in zip(parameters, chunks, strict=True)}
    state = model.state_dict(keep_vars=True)  # a hook may have replaced some of the values
    return {plain_name(name): parts[id(value)] for name, value in state.items() if id(value) in parts}


def _zero_state_dict(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Return the state of an optimizer in torch's format, shards as `TensorChunks`. Collective: every rank. Blocks."""
    parameters = _parameters_of(optimizer)
    held: dict[tuple[int, str], Any] = {}
    for shard, entries in optimizer.local_shards():
        for name, value in entries.items():
            key = shard.parameter, name
            if isinstance(value, Tensor) and value.dim() == 1 and optimizer.is_elementwise:
                parameter = parameters[shard.parameter]
                chunks = dict(held[key].chunks) if key in held else {}
                chunks |= boxes_in_memory(value, parameter, shard.start)
                held[key] = TensorChunks(parameter.shape, value.dtype, chunks)
            else:  # one value for the whole parameter
                held[key] = TensorChunks.of(value) if isinstance(value, Tensor) else value
    state = _name_all(held, optimizer)
    return {"state": state, "param_groups": Optimizer.state_dict(optimizer)["param_groups"]}


def _name_all(held: Mapping[tuple[int, str], Any], optimizer: ZeroRedundancyOptimizer) -> dict[int, dict[str, Any]]:
    """Return the state of all parameters, of which this rank holds ``held``. Collective: every rank. Blocks.

    A rank only knows the state of the parameters whose elements it has. Rank zero writes the description of the whole
    state, so it needs names and sizes from all ranks. All ranks build the same description.
    """
    local_entries = [
        [*key, str(value.dtype).removeprefix("torch."), list(value.size)]
        if isinstance(value, TensorChunks)
        else [*key, None, value]
        for key, value in held.items()
    ]
    state: dict[int, dict[str, Any]] = {}
    for entries in all_gather_object(local_entries, group=optimizer.process_group, device=optimizer.join_device):
        for index, name, dtype, content in entries:
            absent = content if dtype is None else TensorChunks(torch.Size(content), getattr(torch, dtype), {})
            state.setdefault(index, {}).setdefault(name, held.get((index, name), absent))
    return dict(sorted(state.items()))


def boxes_in_memory(flat: Tensor, parameter: Tensor, start: int) -> dict[Offsets, Tensor]:
    """Divide ``flat``, elements of ``parameter`` from ``start`` on in memory order, into boxes of its shape.

    The boxes are views. For a contiguous parameter they are parts of rows and whole rows. A parameter in channels_last
    is divided in the order of its strides.
    """
    order = order_in_memory(parameter) or list(range(parameter.dim()))  # it may have gaps; its state does not
    back = [order.index(dim) for dim in range(parameter.dim())]
    boxes, done = {}, 0
    for offsets, sizes in _boxes([parameter.shape[dim] for dim in order], start, start + flat.numel()):
        numel = math.prod(sizes)
        box = flat[done : done + numel].view(sizes)
        boxes[tuple(offsets[dim] for dim in back)] = box.permute(back)
        done += numel
    return boxes


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Offsets, Offsets]]:
    """Yield offsets and sizes of the boxes that contain the elements from ``start`` to ``stop``, in order."""
    if len(shape) < 2:
        if start < stop:
            yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        num_rows = 0 if within else (stop - start) // row
        if num_rows:
            yield (index, *[0] * (len(shape) - 1)), (num_rows, *shape[1:])
            start += num_rows * row
        else:
            end = min(stop, start - within + row)
            for offsets, sizes in _boxes(shape[1:], within, within + end - start):
                yield (index, *offsets), (1, *sizes)
            start = end


# --- load a state ---


def load_state_dict(model: nn.Module | None, optimizer: Optimizer | None, state: Mapping[str, Any]) -> None:
    """Load a state of any strategy and number of ranks into model and optimizer. Each rank reads its part. Blocks.

    Raises:
        CheckpointError: It cannot be read.
        RuntimeError, ValueError: It belongs to another model or optimizer.
    """
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.wait()  # otherwise gathered parameters would overwrite what is loaded
    if model is not None:
        # Both this model and the saved one may be compiled, completely or in part.
        bare = unwrap(model)
        current = bare.state_dict()
        names = {plain_name(name): name for name in current}
        loaded = {names.get(plain_name(name), name): value for name, value in state["model"].items()}
        # Directly into the model's memory, one tensor at a time: there may be no memory for a second copy.
        stored = {name: value for name, value in loaded.items() if isinstance(value, StoredTensor)}
        fits = loaded.keys() == current.keys() and all(
            isinstance(current[name], Tensor) and value.size == current[name].shape for name, value in stored.items()
        )
        for name, value in stored.items():
            if fits:
                value.load(TensorChunks.of(current[name]))
            loaded[name] = current[name] if fits else value.read(current.get(name))
        bare.load_state_dict(loaded)
    if (compressed := _compressed(model)) is not None:
        load_compression_state(compressed, state.get("compression"))
    if optimizer is not None:
        _load_optimizer(optimizer, state["optimizer"])


def load_compression_state(model: DistributedDataParallel, state: Mapping[str, Any] | None) -> None:
    """Load this rank's residuals from a run on any number of ranks; None: that run did not compress. Blocks.

    A state without residuals is that of another rank (`Trainer.replica_state`): this one keeps its own.
    """
    if state is None:
        model.load_compression_state_dict()
        return
    if "residuals" not in state:
        model.load_compression_bases(state["bases"])
        return
    rank, num_ranks = model.process_group.rank(), model.process_group.size()
    residuals = {}
    for name, stored in state["residuals"].items():
        total = residuals[name] = torch.zeros(stored.size[1:])
        row = torch.empty(stored.size[1:])
        for number in range(rank, stored.size[0], num_ranks):
            chunk = {(number, *[0] * row.dim()): row[None]}
            stored.load(TensorChunks(stored.size, stored.dtype, chunk if row.numel() else {}))
            total += row
    model.load_compression_state_dict({"residuals": residuals, "bases": read_tensors(state["bases"])})


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    parameters = dict(enumerate(_parameters_of(optimizer)))
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        entries = {
            index: {name: read_tensors(value, parameters.get(index)) for name, value in entry.items()}
            for index, entry in state.get("state", {}).items()
        }
        own = {name: read_tensors(value) for name, value in state.items() if name not in ("state", _HELD)}
        if "state" in state:
            own["state"] = entries
        groups, held = [*map(id, optimizer.param_groups)], held_by(optimizer)
        sharing = [part for part in held.values() if [*map(id, part.param_groups)] == groups]
        optimizer.load_state_dict(own)
        for name, part_state in state.get(_HELD, {}).items():
            _load_optimizer(held[name], part_state)
        for part in sharing:  # torch gives each its own param groups, and rates are set in one
            part.param_groups = optimizer.param_groups
        return

    def read(shard: ShardRange) -> dict[str, Any] | None:
        parameter, entries = parameters[shard.parameter], state["state"].get(shard.parameter)
        if entries is None:
            return None
        if not optimizer.is_elementwise:  # each rank has the state of whole parameters
            return {name: read_tensors(value) for name, value in entries.items()}
        return {name: _read_range(name, value, parameter, shard) for name, value in entries.items()}

    optimizer.load_shards(read, state["param_groups"])


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _read_range(name: str, value: Any, parameter: Tensor, shard: ShardRange) -> Any:
    """Return the elements of ``shard`` if ``value`` has the shape of the parameter, otherwise the whole value."""
    if not isinstance(value, StoredTensor) or value.size != parameter.shape or (not value.size and name in SCALARS):
        return read_tensors(value)
    # The boxes are views of the flat range, so nothing is copied a second time.
    flat = torch.empty(shard.numel, dtype=value.dtype)
    value.load(TensorChunks(value.size, value.dtype, boxes_in_memory(flat, parameter, shard.start)))
    return flat


# --- safetensors files, and the export of weights for other programs ---

SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def safetensors_pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file, without a copy of tensors that are contiguous and on the host.

    The safetensors package requires all tensors as bytes objects, which would be a second copy of a large state.

    Collective if some are sharded: every rank. Each sharded tensor is whole on every rank while it is yielded.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # aligns each tensor to its element size
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.itemsize
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires data to begin at a multiple of 8, for mapping
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if tensors[name].numel():
            array: Any = whole(tensors[name].detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(array)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces ``path`` at the end of the block. Blocks until it is on disk.

    An error in the block, or the end of the process, leaves ``path`` unchanged.
    """
    temporary = path.with_name(f"{path.name}-{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        sync(temporary)
        sync(path.parent)  # the names of all files must be on disk before a manifest that lists them
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Block until the content of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_export(path: Path) -> None:
    """Check before the training that the file can be written after it.

    Raises:
        ConfigurationError: Its folder does not exist or is read-only, or it is a folder itself.
    """
    if not path.parent.is_dir():
        raise ConfigurationError(f"There is no folder {path.parent} to export the weights to.\nCreate it first.")
    if path.is_dir():
        raise ConfigurationError(f"export={path} is a folder.\nName a file.")
    if not os.access(path.parent, os.W_OK):
        raise ConfigurationError(f"export={path} cannot be written: its folder is read-only.\nName another one.")


def export_weights(model: nn.Module, path: Path, *, writes: bool = True) -> None:
    """Write the parameters and buffers of ``model`` to ``path``, completely or not at all.

    The same weights give the same bytes. Tensors that share memory, such as tied weights, are written once, under the
    alphabetically first of their names; ``safetensors.torch.load_model`` restores all of them.

    Collective if the model is sharded: every rank. No rank has more than two whole tensors at a time.

    Args:
        model: The model without wrappers.
        path: Path of the file.
        writes: Whether this rank writes it.
    """
    # ``safetensors.torch.save_model`` also writes the other names, in an order that can differ between calls.
    identities: set[object] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in sorted(plain_names(model.state_dict(keep_vars=True)).items()):
        # Shards are not compared by memory: empty ones would seem tied on some ranks only.
        is_part = is_sharded(value)
        tensor = value if is_part else (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() == 0 or tensor not in identities:
            tensors[name] = value
        identities.add(tensor)
    pieces = safetensors_pieces(tensors, {"format": "pt"})
    try:
        if writes:
            with whole_file(path) as temporary, temporary.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
    finally:
        if any(map(is_sharded, tensors.values())):  # also after an error: the other ranks wait in collectives
            for _ in pieces:
                pass
