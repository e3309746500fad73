"""`prepare`: a script for one device becomes one for many. Design: docs/design/prepare.md."""

from operator import length_hint
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import data

from lockstep.base.accelerator import move
from lockstep.base.activity import log
from lockstep.comm.collectives import all_gather_object, device_for, gather_states
from lockstep.comm.world import World, init
from lockstep.data.comparison import check_same_data
from lockstep.data.loader import LoadOptions
from lockstep.data.order import mix
from lockstep.errors import ConfigurationError, called_by_all
from lockstep.loop.batch_parts import parts
from lockstep.loop.passes import models
from lockstep.loop.prepared_loader import PreparedLoader as PreparedLoader
from lockstep.loop.prepared_loader import prepared_loader
from lockstep.loop.random_state import draws, kept_states, process_states, seed_rank, share_states
from lockstep.parallel.ddp.updates import refuse_outside
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.sync_batchnorm import describe_apart, synchronise


@called_by_all("lockstep.prepare")
def prepare(*objects: Any, sync_batchnorm: bool = True) -> Any:
    """Return the parts of a training script, made for all ranks together: the run stays that of one device.

    A loop that is right on one device, with losses that are means over the batch, then needs no other change. Opens the
    world, as `lockstep.init`, if that was not called before:

    - Models are moved to the device of the rank, and wrapped in `DistributedDataParallel` if they have trainable
      parameters. Wrapped ones stay as they are. Their batch norms become `SyncBatchNorm`, in place.
    - Optimizers and learning-rate schedulers stay as they are; the optimizer's state is moved to the device.
    - A ``DataLoader`` returns this rank's part of each batch, on the device: see `PreparedLoader`. Its ``batch_size``
      is that of all ranks together, its sampler may be any but a ``DistributedSampler``.

    Afterwards ``random`` and numpy draw the same on all ranks, as the script may decide with them; torch's default
    generators differ between ranks, for dropout. Rank zero keeps its states, and a single rank draws what it draws
    without `prepare`.

    Collective: every rank. Blocks until all have called it.

    Args:
        objects: In any order. In several calls, models before their optimizers.
        sync_batchnorm: Whether batch norms normalise over the samples of all ranks, as on one device, and not over
            those of each rank.

    Returns:
        The same number of objects in the same order, as a tuple; a single one alone.

    Raises:
        ConfigurationError: On every rank: an object cannot be prepared, an optimizer updates what is
            in no prepared model, or the objects or the data differ between ranks.
    """
    world = World.opened or init()
    group, device = world.group, device_for(world.group)
    everyones = all_gather_object(list(map(_check, objects)), group=group, device=device)
    for error in (error for names in everyones for error, _ in names if error):
        raise ConfigurationError(error)
    for rank, rank_names in enumerate(everyones):
        if rank_names != everyones[0]:
            first, other = (", ".join(name for _, name in names) for names in (everyones[0], rank_names))
            raise ConfigurationError(
                f"prepare() was called with ({other}) on rank {rank}, but with ({first}) on rank 0.\n"
                "Create the same objects on every rank: prepare() divides the data."
            )
    made = [_prepare_model(item, world, sync_batchnorm) if isinstance(item, nn.Module) else item for item in objects]
    for item in objects:
        if isinstance(item, Optimizer):
            _prepare_optimizer(item, world)
    states, num_taken = gather_states([process_states(), draws.num_taken], group=group, device=device)[0]
    seed = mix(*states[0].view(torch.int64).tolist(), num_taken)
    if world.rank:
        seed_rank(seed, world.rank, world.device)
    if world.world_size > 1:
        share_states(states)
    draws.take(states if world.world_size > 1 else None)
    for place, item in enumerate(made):
        if isinstance(item, data.DataLoader) and not isinstance(item, PreparedLoader):
            if length_hint(item.dataset) and not isinstance(item.dataset, data.IterableDataset):
                options = LoadOptions(None, item.num_workers, pin_memory=False)
                with kept_states():
                    check_same_data(item.dataset, _DATA, options, seed=seed, group=group, device=device)
            name = f"{type(item).__name__} of {type(item.dataset).__name__} (argument {place + 1} of prepare)"
            made[place] = prepared_loader(item, world, mix(seed, place), name)
    return made[0] if len(made) == 1 else tuple(made)


_DATA = "The data set of a DataLoader"


def _check(item: Any) -> tuple[str, str]:
    """Return why an object cannot be prepared, if so, and what must be the same on all ranks."""
    error, name = "", type(item).__name__
    if isinstance(item, PreparedLoader):
        pass
    elif isinstance(item, data.DataLoader):
        sizes = length_hint(item.batch_sampler), length_hint(item.dataset)
        name = f"{name} of {sizes[0]} batches of {item.batch_size}, {sizes[1]} samples"
        if isinstance(item.dataset, data.IterableDataset):
            name += f", {item.num_workers} workers"
        elif not isinstance(item.sampler, data.SequentialSampler):
            name += f", {type(item.sampler).__name__}"
        if isinstance(getattr(item.batch_sampler, "sampler", item.sampler), data.DistributedSampler):
            error = (
                "A DataLoader has a DistributedSampler, but prepare() divides each batch among the ranks.\n"
                "Leave the sampler out (shuffle=True shuffles), and give the batch size of all ranks together."
            )
        elif item.batch_sampler is None:
            error = (
                "A DataLoader has batch_size=None, so prepare() cannot divide its batches.\n"
                "Return single samples from the data set, and give batch_size or batch_sampler."
            )
    elif isinstance(item, DistributedDataParallel | Optimizer | LRScheduler):
        pass
    elif isinstance(item, TorchDistributedDataParallel | nn.DataParallel):
        error = f"A model is wrapped in torch's {name}.\nPass the model itself: prepare() wraps it."
    elif not isinstance(item, nn.Module):
        error = (
            f"prepare() cannot prepare a {name}.\n"
            "It accepts models (torch.nn.Module), optimizers, learning-rate schedulers and DataLoaders."
        )
    return error, name


def _prepare_model(module: nn.Module, world: World, sync_batchnorm: bool) -> nn.Module:
    if not isinstance(module, DistributedDataParallel):
        module = move(module, world.device)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        line = synchronise(module, world) if sync_batchnorm else describe_apart(module)
        if line is not None and world.is_rank_zero and world.world_size > 1:
            log(line)
        module = DistributedDataParallel(module)
    module.use_batches(parts)
    models.add(module)
    return module


def _prepare_optimizer(optimizer: Optimizer, world: World) -> None:
    refuse_outside(optimizer, {id(parameter) for model in models for parameter in model.parameters()})
    if optimizer.state and world.device.type != "cpu":
        optimizer.load_state_dict(optimizer.state_dict())  # to the devices of the parameters
