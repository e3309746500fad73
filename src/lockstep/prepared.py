"""`prepare`: a script for one device becomes one for many, with the same global batches."""

import itertools
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import length_hint
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import data

from lockstep.accelerator import move
from lockstep.comm.collectives import all_gather_object, broadcast, device_for
from lockstep.comm.world import World
from lockstep.data.comparison import check_same_data
from lockstep.data.loader import LoadOptions, MicroBatch, Prefetcher, batched_getitem
from lockstep.data.order import cut, mix, seed_cpu, seed_device
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.wrapper import DistributedDataParallel

_models = WeakSet[DistributedDataParallel]()  # the prepared models of this process

# --- Random state
#
# [Note: the order of samples of a script]
# Samplers draw from the default generator, as the model does. But dropout has other random numbers on each rank, and
# draws more of them for larger parts. So the samplers of all prepared loaders draw from one private copy of rank zero's
# generator, taken in `prepare`. If nothing else draws, these are the numbers of the script without `prepare`. For
# samplers that use Python's or numpy's generators, these are seeded before each batch.

_draws = torch.Generator()
# Separate random numbers of samples, samplers and ranks from those of other purposes with the same seed.
_SAMPLE, _SAMPLER, _RANK = 8, 9, 10
_TORCHS = {data.RandomSampler, data.SequentialSampler, data.SubsetRandomSampler, data.WeightedRandomSampler}


@contextmanager
def _kept_states() -> Iterator[None]:
    """Leave the CPU's generators as they were before the block. Takes 200 us, because of numpy's."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


@contextmanager
def _drawing(seed: int | None) -> Iterator[None]:
    """Let a sampler draw from `_draws`; with a seed, the other generators have it in the block."""
    with torch.random.fork_rng(devices=()) if seed is None else _kept_states():
        if seed is not None:
            seed_cpu(seed)
        torch.set_rng_state(_draws.get_state())
        yield
        _draws.set_state(torch.get_rng_state())


# --- The parts of global batches


class _Request(NamedTuple):
    """This rank's part of a global batch: its samples or their indices, and the micro-batch without its data."""

    seed: int
    samples: list[Any]
    micro: MicroBatch

    @classmethod
    def of(cls, seed: int, samples: list[Any], number: int, place: tuple[int, int]) -> "_Request":
        """Return that of the rank in ``place``; if it has no part, of the first sample, which does not count."""
        rank, world_size = place
        part = cut(len(samples), world_size, rank)
        micro = MicroBatch(number, len(samples), [0], [np.array(part, dtype=np.int64)], [])
        return cls(seed, samples[part.start : part.stop] or samples[:1], micro)


class _Lists:
    """The sampler of the inner loader: reads the global batches of indices, and yields this rank's requests."""

    now: Iterator[_Request]

    def __iter__(self) -> Iterator[_Request]:
        return self.now


class _Parts(data.Dataset[MicroBatch]):
    """Loads the samples of requests; runs in the loader's processes if there are any."""

    def __init__(self, samples: Any, collate: Any) -> None:
        self._samples, self._collate = samples, collate
        self._read_at_once = batched_getitem(samples, None if collate is data.default_collate else collate)

    def __getitem__(self, request: _Request) -> MicroBatch:
        if self._read_at_once is not None:
            return request.micro._replace(batches=[self._read_at_once(request.samples)])
        samples = []
        with _kept_states() if data.get_worker_info() is None else nullcontext():
            # By the position in the global batch: an index may be there twice, and need not be a number.
            first = request.micro.samples[0][0] if len(request.micro.samples[0]) else 0
            for position, index in enumerate(request.samples, int(first)):
                seed_cpu(mix(request.seed, position))
                samples.append(self._samples[index])
            return request.micro._replace(batches=[self._collate(samples)])


class _StreamParts(data.IterableDataset[MicroBatch]):
    """Reads a stream in groups of a global batch, and collates this rank's part of each."""

    seed = epoch = 0

    def __init__(self, loader: data.DataLoader[Any], place: tuple[int, int]) -> None:
        self._loader, self._place = loader, place

    def __iter__(self) -> Iterator[MicroBatch]:
        worker, size = data.get_worker_info(), cast(int, self._loader.batch_size)
        samples: Iterator[Any] | None = None
        for number in itertools.count():
            with _kept_states() if worker is None else nullcontext():
                seed_cpu(mix(self.seed, _SAMPLE, self.epoch, number, 0 if worker is None else worker.id))
                samples = iter(self._loader.dataset) if samples is None else samples
                group = list(itertools.islice(samples, size))
                if not group or (self._loader.drop_last and len(group) < size):
                    return
                request = _Request.of(0, group, number, self._place)
                batch = self._loader.collate_fn(request.samples)
            yield request.micro._replace(batches=[batch])


# --- The loader


class _Pass:
    """A pass over a loader: the batches that it skips, as another process has had them, and the states at its begin."""

    def __init__(self, skip: int, states: list[Tensor]) -> None:
        self.skip, self.states = skip, states


_KEPT = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")


class PreparedLoader:
    """This rank's parts of the batches of a ``DataLoader``, on the device of the rank; made by `prepare`.

    Every rank reads the same lists of indices from the sampler, and loads its part of each; of a stream, every rank
    reads all samples. Each sample has random numbers of its own, the same on any number of ranks and workers. With each
    batch, the gradients of the prepared models are weighted by the samples of the part. A rank without a part gets a
    sample that does not count if a prepared model is in training mode and gradients are enabled, else no batch.

    A pass of which one batch was read does not count, so a single rank may look at one. Other attributes are those of
    the loader; ``batch_size`` is that of all ranks together.

    Attributes:
        loader: The loader that was prepared.
        epoch: The number of the current pass, or of the next one.
    """

    def __init__(self, loader: data.DataLoader[Any], world: World, seed: int) -> None:
        self.loader, self.epoch, self._seed = loader, 0, seed
        self._device, self._place = world.device, (world.rank, world.world_size)
        sampler = getattr(loader.batch_sampler, "sampler", None)
        self._seeds_others = type(loader.batch_sampler) is not data.BatchSampler or type(sampler) not in _TORCHS
        candidates = [getattr(owner, "generator", None) for owner in (loader, sampler, loader.batch_sampler)]
        self._generators = [_draws, *dict.fromkeys(item for item in candidates if isinstance(item, torch.Generator))]
        self._is_new = True
        self._pass: _Pass | None = None  # the current one
        # The states of the generators at its begin, and the batches that it has returned. After `load_state_dict`, of
        # the one that was saved.
        self._begin: list[Tensor] | None = None
        self._returned = 0
        self._lists = _Lists()
        is_stream = isinstance(loader.dataset, data.IterableDataset)
        self._stream = _StreamParts(loader, self._place) if is_stream else None
        self._inner: data.DataLoader[MicroBatch] = data.DataLoader(
            self._stream or _Parts(loader.dataset, loader.collate_fn),
            sampler=None if is_stream else self._lists,
            batch_size=None,
            collate_fn=partial(cast, Any),  # returns it as it is; pickled for spawned processes, so no lambda
            generator=torch.Generator(),  # otherwise it would draw from the default generator
            # Of a stream, workers that persist would not know the epoch.
            persistent_workers=loader.persistent_workers and not is_stream,
            **{name: getattr(loader, name) for name in _KEPT},
        )

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass. Not collective: batches may be read on a single rank."""
        if self._pass is not None:  # somebody holds it
            self._end(self._pass, is_left=self._returned > self._pass.skip)
        states = self._states()
        begin = self._begin  # of a pass that was saved
        skip = self._returned if begin else 0
        self._set_states(begin or states)
        with self._drawing(-1):  # as DataLoader does, in the same order
            lists = iter(() if self._stream else cast(Any, self.loader.batch_sampler))
            if self._is_new or not self.loader.persistent_workers:
                torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        torch.empty(()).random_()  # so that the next `prepare` finds another state
        self._is_new, self._pass, self._begin, self._returned = False, _Pass(skip, states), begin or states, skip
        self._lists.now = self._requests(lists, skip, states if begin else None)
        if self._stream:
            self._stream.seed, self._stream.epoch = self._seed, self.epoch
        batches = iter(self._inner)
        if self._device.type != "cpu":
            batches = cast(Any, Prefetcher(batches, {0: self._device}))
        return self._run(batches, self._pass)

    def _requests(self, lists: Iterator[Any], skip: int, after: list[Tensor] | None) -> Iterator[_Request]:
        epoch = self.epoch
        for number in itertools.count():
            with self._drawing(number):
                indices = next(lists, None)
            if number == skip and after is not None:
                _draws.set_state(after[0])
            if indices is None:
                return
            if number >= skip:
                yield _Request.of(mix(self._seed, _SAMPLE, epoch, number), list(indices), number, self._place)

    def _run(self, batches: Iterator[MicroBatch], this: "_Pass") -> Iterator[Any]:
        is_left = True
        try:
            for number in itertools.count(0 if self._stream else this.skip):
                micro: MicroBatch | None = next(batches, None)
                if micro is None:
                    is_left = False
                    return
                if number < this.skip:  # of a stream
                    continue
                if self._pass is this:
                    self._returned = number + 1
                num_samples = len(micro.samples[0])
                if torch.is_grad_enabled():
                    _set_share(this, num_samples * self._place[1] / micro.num_global)
                if num_samples or (torch.is_grad_enabled() and any(model.training for model in _models)):
                    yield micro.batches[0]
        finally:
            _set_share(this, None)
            self._end(this, is_left=is_left)

    def _end(self, this: "_Pass", *, is_left: bool) -> None:
        """End a pass, unless it has been ended; one that was left after a batch does not count."""
        if self._pass is not this:
            return
        is_look = is_left and self._returned <= this.skip + 1
        self.epoch += not is_look
        self._pass, self._returned = None, this.skip * is_look
        self._begin = self._begin if is_look and this.skip else None
        if is_look:
            self._set_states(this.states)

    def _drawing(self, number: int) -> AbstractContextManager[None]:
        return _drawing(mix(self._seed, _SAMPLER, self.epoch, number) if self._seeds_others else None)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_states(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned; it loads on any number of ranks and workers."""
        now = self._states()
        place = {"epoch": self.epoch, "batch": self._returned, "seed": self._seed}
        return place | {"begin": self._begin or now, "now": now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there in the next pass; of the batches that were returned before, only a stream loads the samples.

        Not collective: call it on every rank, between passes.
        """
        self.epoch, self._returned, self._seed, self._pass = state["epoch"], state["batch"], state["seed"], None
        self._begin = state["begin"] if self._returned else None
        self._set_states(state["now"])


# The shares of the newest batches of the passes that are open, the newest last: an evaluation within a pass that trains
# does not change the share of its batch.
_shares: dict[object, float] = {}


def _set_share(this: object, share: float | None) -> None:
    """Set the share of the newest batch of a pass; None: the pass is over."""
    _shares.pop(this, None)
    if share is not None:
        _shares[this] = share
    for model in _models:
        model.reducer.set_share(next(reversed(_shares.values()), 1.0))


# --- prepare


def prepare(*objects: Any) -> Any:
    """Return the parts of a training script, made for all ranks together: the run stays that of one device.

    Call `lockstep.init` before. A loop that is right on one device, with losses that are means over the batch, then
    needs no other change:

    - Models are moved to the device of the rank, and wrapped in `DistributedDataParallel` if they have trainable
      parameters. Wrapped ones stay as they are.
    - Optimizers and learning-rate schedulers stay as they are; the optimizer's state is moved to the device.
    - A ``DataLoader`` returns this rank's part of each batch, on the device: see `PreparedLoader`. Its ``batch_size``
      is that of all ranks together, its sampler may be any but a ``DistributedSampler``.

    Afterwards the default generators differ between ranks, for dropout; rank zero keeps its state.

    Collective: every rank. Blocks until all have called it.

    Args:
        objects: In any order. In several calls, models before their optimizers.

    Returns:
        The same number of objects in the same order, as a tuple; a single one alone.

    Raises:
        ConfigurationError: On every rank: there is no world, an object cannot be prepared, an optimizer updates what is
            in no prepared model, or the objects or the data differ between ranks.
    """
    world = World.opened or World.from_group()
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
    made = [_prepare_model(item, world) if isinstance(item, nn.Module) else item for item in objects]
    for item in objects:
        if isinstance(item, Optimizer):
            _prepare_optimizer(item, world)
    state = torch.get_rng_state().to(device)
    broadcast(state, group=group)
    _draws.set_state(state.cpu())
    seed = mix(*state.cpu().view(torch.int64).tolist())
    for place, item in enumerate(made):
        if isinstance(item, data.DataLoader):
            if length_hint(item.dataset) and not isinstance(item.dataset, data.IterableDataset):
                options = LoadOptions(None, item.num_workers, pin_memory=False)
                with _kept_states():
                    check_same_data(item.dataset, _DATA, options, seed=seed, group=group, device=device)
            made[place] = PreparedLoader(item, world, mix(seed, place))
    if world.rank:
        seed_cpu(mix(seed, _RANK, world.rank))
        seed_device(world.device, mix(seed, _RANK, world.rank))
    return made[0] if len(made) == 1 else tuple(made)


_DATA = "The data set of a DataLoader"


def _check(item: Any) -> tuple[str, str]:
    """Return why an object cannot be prepared, if so, and what must be the same on all ranks."""
    error, name = "", type(item).__name__
    if isinstance(item, data.DataLoader):
        sizes = length_hint(item.batch_sampler), length_hint(item.dataset)
        name = f"{name} of {sizes[0]} batches of {item.batch_size}, {sizes[1]} samples"
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
    elif isinstance(item, DistributedDataParallel | Optimizer | LRScheduler | PreparedLoader):
        pass
    elif isinstance(item, TorchDistributedDataParallel | nn.DataParallel):
        error = f"A model is wrapped in torch's {name}.\nPass the model itself: prepare() wraps it."
    elif not isinstance(item, nn.Module):
        error = (
            f"prepare() cannot prepare a {name}.\n"
            "It accepts models (torch.nn.Module), optimizers, learning-rate schedulers and DataLoaders."
        )
    return error, name


def _prepare_model(module: nn.Module, world: World) -> nn.Module:
    if not isinstance(module, DistributedDataParallel):
        module = move(module, world.device)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        module = DistributedDataParallel(module)
    _models.add(module)
    return module


def _prepare_optimizer(optimizer: Optimizer, world: World) -> None:
    prepared = {id(parameter) for model in _models for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in prepared:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} updates a parameter of shape {list(parameter.shape)}, in group "
                    f"{number}, that is in no prepared model: its gradients would not be averaged over the ranks.\n"
                    "Pass each trained model to prepare(), together with its optimizer or before."
                )
    if optimizer.state and world.device.type != "cpu":
        optimizer.load_state_dict(optimizer.state_dict())  # to the devices of the parameters
