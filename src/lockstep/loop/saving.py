"""``save`` and ``load``: checkpoints of a loop of one's own, in the format of those of `fit`."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.checkpoints import checkpoint_storage as storage
from lockstep.checkpoints import model_state
from lockstep.checkpoints.checkpoint import (
    find_checkpoint,
    gather,
    lock_folder,
    on_all_ranks,
    rank_and_size,
    read_alike,
)
from lockstep.checkpoints.object_store import place_of
from lockstep.comm.collectives import all_gather_object, default_group, device_for, is_initialized
from lockstep.data.sampler import DistributedSampler, LoaderPosition, position_of
from lockstep.data.stream import Stateful
from lockstep.errors import CheckpointError, called_by_all
from lockstep.loop.prepared_loader import PreparedLoader
from lockstep.parallel.consistency import refuse_difference, replica_of
from lockstep.parallel.ddp.wrapper import DistributedDataParallel

# In the state of what each rank reads at its own position: the states by rank.
_BY_RANK = "by rank"


def _has_own_position(value: Stateful) -> bool:
    """Return whether the state of ``value`` is that of this rank only, as that of most loaders."""
    return isinstance(value, Iterable) and not isinstance(value, DistributedSampler | PreparedLoader | nn.Module)


@called_by_all("lockstep.save")
def save(
    path: str | os.PathLike[str], *, model: nn.Module | None = None, optimizer: Optimizer | None = None, **state: Any
) -> None:
    """Write a checkpoint: the folder ``path``, with tensors as safetensors and the rest as JSON.

    An existing checkpoint is replaced by one rename; a save that fails or is killed does not change it.

    Collective: every rank, if there is a process group. Rank zero writes its state, every rank its shards of what is
    sharded (``fully_shard``, `ZeroRedundancyOptimizer`); all block until it is on disk. If ``model`` is a
    `DistributedDataParallel`, the ranks first compare it and the optimizer's state, unless it has ``check_replicas=0``.

    Args:
        path: A folder, or its URL in an object store, such as ``s3://bucket/mine`` (docs/checkpoints.md). If something
            is sharded, every rank must see it.
        model: The model, compiled or not, with or without a data-parallel wrapper of Lockstep or PyTorch; saved without
            wrappers.
        optimizer: Its state must be complete on rank zero, or sharded over the ranks.
        state: Numbers, strings, bytes, None, dense tensors, and lists, tuples and dicts of them; objects with
            ``state_dict`` and ``load_state_dict`` whose state is made of these, such as learning rate schedulers; and a
            ``DataLoader`` over a `DistributedSampler`, for its position. Of other loaders and samplers, each rank's
            state is written.

    Raises:
        CheckpointError: On every rank: something cannot be written. Then nothing is replaced.
        ReplicasDiffer: On every rank: they do not have the same bits. Nothing is replaced.
    """
    folder, (rank, world_size) = place_of(path), rank_and_size()
    _refuse_drift(model, optimizer)

    def collect() -> tuple[dict[str, Any], dict[str, Stateful], dict[str, Any]]:
        values = {name: position_of(value, name, saves=True) for name, value in state.items()}
        objects = {name: value for name, value in values.items() if isinstance(value, Stateful)}
        return values, objects, {name: value.state_dict() for name, value in objects.items()}

    values, objects, states = on_all_ranks(folder, collect)
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[storage.TreePacker, Callable[[], object]]:
            own_states = {name: states[name] for name, value in objects.items() if _has_own_position(value)}
            every = [own_states]
            if own_states and is_initialized():
                every = storage.states_of_ranks(own_states, group=default_group(), device=device_for(default_group()))
            states.update({name: {_BY_RANK: [rank_states[name] for rank_states in every]} for name in own_states})
            parts = {"state": values | states, **model_state.local_state_dict(model, optimizer)}
            packer = storage.TreePacker(parts, is_coordinator=rank == 0)
            if rank:
                return packer, lambda: None
            folder.mkdir(parents=True, exist_ok=True)
            check_lock = stack.enter_context(lock_folder(folder))
            storage.remove_leftover_files(folder)
            return packer, check_lock

        packer, check_lock = on_all_ranks(folder, begin)
        token = gather(secrets.token_hex(8))[0]  # rank zero's

        def write_part() -> None:
            if rank in packer.writers(world_size):
                storage.write_shard(folder, token, rank, packer.tensors)

        def complete() -> None:
            check_lock()
            if rank == 0:
                storage.commit(folder, token, packer, world_size, {})

        on_all_ranks(folder, write_part, packer.num_bytes)
        on_all_ranks(folder, complete, packer.num_bytes)


def _refuse_drift(model: nn.Module | None, optimizer: Optimizer | None) -> None:
    """Compare parameters and optimizer state before they are saved. Collective: every rank."""
    wrapper = model if isinstance(model, DistributedDataParallel) and model.reducer.replicas.every > 0 else None
    if not all(gather(wrapper is not None)) or wrapper is None:
        return  # a rank has given another model
    group, device = wrapper.process_group, wrapper.device
    # Buffers may differ, of which rank zero's are saved.
    replica = replica_of(wrapper.module, optimizer, buffers="healed", ignore=wrapper.parameters_to_ignore)
    # Rank zero alone may have collected the state of an optimizer.
    common = set(replica).intersection(*all_gather_object(list(replica), group=group, device=device))
    replica = {name: tensor for name, tensor in replica.items() if name in common}
    refuse_difference(replica, group=group, device=device, now=" (before lockstep.save)", since="Nothing was saved.")


@called_by_all("lockstep.load")
def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    best: bool = False,
    **objects: Stateful | DataLoader[Any],
) -> dict[str, Any]:
    """Read a checkpoint into ``model``, ``optimizer`` and ``objects``; return the rest, on the CPU.

    All checksums are compared before anything is loaded; the ranks divide the files among them. No code from the files
    runs. Each rank reads what it needs, whatever the number of ranks that saved. It also reads the checkpoints of
    `fit`: with ``optimizer`` to go on, without to use the weights, which are the averaged ones if there is `Task.ema`.

    Collective: every rank, if there is a process group. Blocks until all have read.

    Args:
        path: The folder of a checkpoint, or that of a run of `fit`, for its newest checkpoint.
        model: Gets the weights.
        optimizer: Gets its state.
        best: Whether to read the checkpoint that ``keep_best`` has kept in the folder of a run.
        objects: Each gets what `save` was given under the same name. A ``DataLoader`` over a `DistributedSampler` goes
            on at the position, on any number of ranks; other loaders and samplers only on as many as have saved.

    Raises:
        CheckpointError: On every rank: there is no checkpoint, or it is damaged, or it belongs to another model or
            other objects; or the ranks read different ones, as in folders that are not shared.
    """
    folder = place_of(path)
    readers = on_all_ranks(folder, lambda: {name: position_of(value, name) for name, value in objects.items()})
    folder = find_checkpoint(folder, best=best)
    parts = read_alike(folder)
    if optimizer is None:
        parts.get("model", {}).update(parts.get("ema", {}))

    def fill() -> dict[str, Any]:
        try:
            rest: dict[str, Any] = parts["state"]
            for name, part in (("model", model), ("optimizer", optimizer), *readers.items()):
                if part is not None and name not in (rest if name in readers else parts):
                    raise ValueError(f"it was saved without {name}")
            # First what may raise an error.
            loads = [(part.load_state_dict, _state_here(name, part, rest.pop(name))) for name, part in readers.items()]
            model_state.load_state_dict(model, optimizer, parts)
            for load_state, state in loads:
                load_state(state)
        except CheckpointError:
            raise
        except Exception as error:
            text = f"The checkpoint {folder} does not fit: {error}\nLoad the same model, optimizer and objects."
            raise CheckpointError(text) from error
        return rest

    return on_all_ranks(folder, fill)


def _state_here(name: str, reader: Stateful, saved: Any) -> Any:
    """Return the state for ``reader`` on this rank.

    Raises:
        CheckpointError, ValueError: It would read other samples than those that are left.
    """
    if isinstance(reader, LoaderPosition):
        reader.check(saved, name)
    if not _has_own_position(reader):
        return saved
    (rank, world_size), states = rank_and_size(), saved.get(_BY_RANK, [])
    if len(states) != world_size:
        raise ValueError(f"{name} has positions for {len(states)} ranks, not {world_size}: use a DistributedSampler")
    return states[rank]
