"""`PreparedLoader`: a script's own loader, whose batches are divided among ranks. Design: docs/design/prepare.md."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import data

from lockstep.base.containers import map_tensors
from lockstep.base.torch_internals import BaseDataLoaderIter, fetch_of, unread_iterator
from lockstep.comm.collectives import device_for, gather_states
from lockstep.comm.world import World
from lockstep.data.loader import MicroBatch, Prefetcher, batched_getitem
from lockstep.data.order import Purpose, cut, mix, seed_cpu
from lockstep.errors import ConfigurationError
from lockstep.loop.batch_parts import parts
from lockstep.loop.passes import DividedCollate, GlobalBatch, Pass, Progress, StreamBatch, models
from lockstep.loop.random_state import draws, seeded

_END = object()


class _Shown:
    """An attribute of the `Progress` of a loader, unless the script's loader has one of the same name."""

    def __init__(self, get: Callable[[Progress], Any]) -> None:
        self._get = get

    def __get__(self, loader: Any, _: object = None) -> Any:
        return self if loader is None else self._get(loader._lockstep)


class PreparedLoader(data.DataLoader[Any]):
    """A script's ``DataLoader``, whose batches are this rank's parts, on the device of the rank; made by `prepare`.

    It is a copy of the loader, of a class derived from the loader's: attributes, methods and an ``__iter__`` of its own
    are kept, and may be changed. The data set, the samplers and ``collate_fn`` are the script's objects.

    Every rank reads the same lists of indices from the batch sampler, and loads its part of each; of a stream, every
    rank reads all samples. On several ranks, each sample has random numbers of its own, the same on any number of ranks
    and workers. The gradients of prepared models are weighted by the samples of the part that a forward was given.

    A rank without a part of a batch gets a sample that does not count, if the script may train on it: gradients are
    enabled, and a prepared model is in training mode, or has last trained in evaluation mode, or nothing has trained
    yet. Else it gets no batch. So evaluate under ``torch.no_grad()``, where each sample is read once.

    ``batch_size`` and ``len()`` are those of all ranks together. A pass that was left counts; but a single rank may
    look at one batch, if nothing is trained before the next pass.

    Attributes:
        loader: The loader that was prepared.
        epoch: The number of the current pass, or of the next one.
        batch: The number of the newest batch in its pass, counted from 0, also if the pass was resumed.
    """

    _lockstep: Progress  # the only attribute that is added to those of the script's loader
    loader = _Shown(lambda progress: progress.loader)
    epoch = _Shown(lambda progress: progress.epoch)
    batch = _Shown(lambda progress: progress.num_returned - 1)

    def __iter__(self) -> Any:
        """Begin a pass. Not collective: batches may be read on a single rank."""
        own, progress, division = vars(self), self._lockstep, self._lockstep.division
        this = progress.begin_pass(parts.begin(self))
        is_stream = isinstance(self.dataset, data.IterableDataset)
        this.draws_seed = own.get("_iterator") is None
        kept = {name: own[name] for name in ("batch_sampler", "collate_fn")}
        division.this = this
        if is_stream and progress.world_size > 1:
            own["collate_fn"] = DividedCollate(self.collate_fn, progress.rank, progress.world_size)
        elif not is_stream:
            division.lists, own["batch_sampler"] = self.batch_sampler, division
            collate = None if self.collate_fn is data.default_collate else self.collate_fn
            progress.seeds_samples = progress.world_size > 1 and batched_getitem(self.dataset, collate) is None
        try:
            with draws.open():
                batches = super().__iter__()
        finally:
            own.update(kept)
        if this.resumed and not is_stream:
            division.replay()
        elif this.resumed and self.num_workers:
            draws.set_states(this.resumed["now"][0])
        return self._run(batches, this)

    def _reread(self, iterator: Any) -> Iterator[Any]:
        """Return what ``iterator``, which an attribute of the loader holds, will return, divided.

        Raises:
            ConfigurationError: It has begun to read.
        """
        this = self._lockstep.begin_pass(parts.begin(self))
        unread = unread_iterator(iterator, lambda lists: self._lockstep.division.divide(lists, this))
        if unread is None:
            raise ConfigurationError(
                f"{self._lockstep.name} holds an iterator that has begun to read, or whose loader processes have, so "
                "prepare() cannot divide its batches.\nMake the iterator after prepare(), as in the first __iter__."
            )
        return self._run(unread, this)

    def _run(self, batches: Iterator[Any], this: Pass) -> Iterator[Any]:
        """Yield the parts of a pass, on the device."""
        progress = self._lockstep
        micros: Any = self._micro_batches(batches, this)
        if self._lockstep.device.type != "cpu":
            micros = Prefetcher(micros, {0: self._lockstep.device})
        progress.open.append(this)
        try:
            while (micro := next(micros, None)) is not None:
                number = micro.step
                if progress.world_size > 1:
                    part = progress.part_of(this.wholes[number], number)
                    if part.share == 0 and not self._needs_sample(this):
                        this.num_returned = number + 1
                        continue
                    parts.returned(this.reading, part, micro.batches[0], is_final=not self._lockstep.is_followed)
                progress.returned(this, number)
                yield micro.batches.pop()  # no reference is left here while the script computes
            progress.end_pass(this)
        finally:
            this.reading.is_over = True
            if this in progress.open:
                progress.open.remove(this)

    def _micro_batches(self, batches: Iterator[Any], this: Pass) -> Iterator[MicroBatch]:
        is_stream = isinstance(self.dataset, data.IterableDataset)
        for number in itertools.count(0 if is_stream else this.skip):
            item = self._load(batches, number)
            if item is _END:
                return
            if isinstance(item, StreamBatch):
                this.wholes.append(item.whole)
                item = item.batch
            if number >= this.skip:
                yield MicroBatch(number, 0, [0], [], [item])

    def _load(self, batches: Iterator[Any], number: int) -> Any:
        """Return the next batch, or `_END`; the script's random numbers do not depend on what is drawn for it."""
        progress = self._lockstep
        if progress.world_size == 1 or self.num_workers:
            return next(batches, _END)
        if isinstance(self.dataset, data.IterableDataset):
            with draws.open():
                return next(batches, _END)
        if not progress.seeds_samples:
            return next(batches, _END)
        value = mix(progress.seed, Purpose.PREPARED_SAMPLE, progress.epoch, number)
        fetch = fetch_of(batches)

        def again() -> Any:
            seed_cpu(value)
            return fetch(progress.division.newest)

        if fetch is None:
            progress.seeds.draws = True
        with seeded(value):
            return progress.seeds.read(lambda: next(batches, _END), again)

    def _needs_sample(self, this: Pass) -> bool:
        """Return whether this rank must take part in what the others do with a batch of which it has no part."""
        if models and all(model.shares_statistics for model in models):
            return True
        if not (this.has_grad or torch.is_grad_enabled()):
            return False
        if any(model.training for model in models):
            return True
        # In evaluation mode: a frozen batch norm or dropout, or an evaluation without no_grad.
        trained = [model.reducer for model in models if model.reducer.num_backwards]
        is_used = parts.num_forwards > this.num_forwards and not this.reading.reads_ahead
        if not trained and is_used and this.reading.thread == threading.get_ident():
            return False  # nothing has come of the batches before
        return bool(models) and (not trained or any(reducer.trains_in_evaluation_mode for reducer in trained))

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield what the loader's own ``__iter__`` makes of the parts."""
        progress, outer = self._lockstep, parts.begin(self)
        try:
            for batch in batches:
                if progress.world_size > 1:
                    inner = progress.newest and progress.newest.reading
                    part = parts.of_batch(batch, inner) if inner else None
                    if part is None:
                        raise ConfigurationError(
                            f"{progress.name} has an __iter__ that does not read from DataLoader.__iter__, so "
                            "prepare() cannot divide its batches.\n"
                            "Call super().__iter__() in it, or leave the loader out of prepare() and give each rank "
                            "its samples with lockstep.DistributedSampler."
                        )
                    parts.returned(outer, part, batch)
                yield batch
        finally:
            outer.is_over = True

    def gather(self, outputs: Sequence[Any]) -> Any:
        """Return what the ranks computed from the newest pass, in the order in which one process would have read it.

        Without shuffling, that is the order of the data set; each sample is there once.

        Collective: every rank, after the pass or in it. Blocks until complete.

        Args:
            outputs: What this rank computed from each batch that it got, in order; such as a list of predictions, or of
                pairs of predictions and labels. Each is a tensor, an array or a list, with an item for each sample of
                the batch; or a tuple or dict of these.

        Returns:
            One such output for all samples; arrays become tensors, which are on this rank's device.

        Raises:
            ConfigurationError: On every rank: an output has not one item for each sample, or the ranks have read
                different batches.
        """
        progress, this = self._lockstep, self._lockstep.newest
        own, problem = [], ""
        numbers, wholes = (this.numbers, this.wholes[: this.num_returned]) if this else ([], [])
        if len(outputs) != len(numbers):
            problem = f"gather() got {len(outputs)} outputs, but {progress.name} has returned {len(numbers)} batches"
        for number, output in zip(numbers, outputs, strict=False):
            size = self._size(wholes[number], progress.rank) if wholes else None  # not counted in a stream of one rank
            plain = _plain(output)
            other = next((length for length in _lengths(plain) if size and length != size), None)
            if other is not None:
                problem = problem or f"an output has {other} items, but batch {number} has {size} samples on this rank"
            own += [plain] if size != 0 else []
        world = World.opened or World.from_group()
        state = problem, [[batch.size, batch.digest] for batch in wholes], own
        everyones = gather_states(state, group=world.group, device=device_for(world.group))
        for rank, (problem, batches, _) in enumerate(everyones):
            if problem:
                raise ConfigurationError(
                    f"Rank {rank}: {problem}.\n"
                    "Give a list with one output for each batch, which has an item for each sample."
                )
            if batches != everyones[0][1]:
                raise ConfigurationError(
                    f"{progress.name} has read other batches on rank {rank} than on rank 0.\n"
                    "Every rank must read the same samples in the same order; prepare() divides each batch."
                )
        if progress.world_size > 1:
            rows = [iter(row) for *_, row in everyones]
            places = (
                (rank, batch) for batch in wholes[this.skip if this else 0 :] for rank in range(progress.world_size)
            )
            own = [next(rows[rank]) for rank, batch in places if self._size(batch, rank)]
        return map_tensors(_joined(own), lambda tensor: tensor.to(self._lockstep.device))

    def _size(self, whole: GlobalBatch, rank: int) -> int:
        return len(cut(whole.size, self._lockstep.world_size, rank))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned; it loads on any number of ranks and workers.

        A pass that was left by ``break`` goes on there after a resume, until the next pass begins.

        Raises:
            ConfigurationError: There is no position to go on from: a loop within another reads the same loader, or the
                loader has an ``__iter__`` of its own and is in the middle of a pass.
        """
        state = self._lockstep.state()
        if self._lockstep.is_followed and (state["batch"] or self._lockstep.open):
            raise ConfigurationError(
                f"{self._lockstep.name} has an __iter__ of its own, which may read ahead of the batches that it "
                "returns, so the position in the middle of a pass is not known.\n"
                "Save between epochs, or do in the data set or collate_fn what it does."
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there in the next pass; of the batches that were returned before, only a stream loads the samples.

        Not collective: call it on every rank, between passes.

        Raises:
            ConfigurationError: It is the state of a loader of another batch size, number of samples or kind of sampler.
        """
        self._lockstep.load(state)


def _plain(output: Any) -> Any:
    """Return ``output`` of tensors on the CPU, lists, tuples and dicts, which can be sent."""
    if isinstance(output, Tensor | np.ndarray):
        return torch.as_tensor(output).detach().cpu()
    if isinstance(output, Mapping):
        return {name: _plain(item) for name, item in output.items()}
    return tuple(map(_plain, output)) if isinstance(output, tuple) else output


def _lengths(output: Any) -> Iterator[int]:
    """Yield the number of items of each tensor and list in ``output``; 0 of what has none."""
    if isinstance(output, dict | tuple):
        for item in output.values() if isinstance(output, dict) else output:
            yield from _lengths(item)
    else:
        has_items = output.dim() > 0 if isinstance(output, Tensor) else isinstance(output, list)
        yield len(output) if has_items else 0


def _joined(outputs: list[Any]) -> Any:
    """Return one output with the items of all."""
    if not outputs:
        return []
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, dict):
        return {name: _joined([output[name] for output in outputs]) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(list(column)) for column in zip(*outputs, strict=True))
    return list(itertools.chain.from_iterable(outputs))


# --- Making one


def prepared_loader(loader: data.DataLoader[Any], world: World, seed: int, name: str) -> PreparedLoader:
    """Return a copy of ``loader`` that returns this rank's parts.

    Raises:
        ConfigurationError: The loader holds an iterator that has begun to read.
    """
    if type(loader).__module__.startswith("torchdata."):  # what it adds is a state, which ours has
        loader = _without_state(loader)
    kind = type(loader)
    made = object.__new__(_class_of(kind))
    own, progress = vars(made), Progress(loader, world, seed, name)
    own |= vars(loader) | {"in_order": True, "_lockstep": progress}
    progress.is_followed = kind.__iter__ is not data.DataLoader.__iter__
    for attribute, value in vars(loader).items():
        if attribute == "_iterator":  # of persistent workers
            own[attribute] = None
        elif isinstance(value, BaseDataLoaderIter):
            own[attribute] = made._reread(value)
    return made


_SETTINGS = (
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor"),
    *("persistent_workers", "collate_fn", "generator"),
)


def _without_state(loader: data.DataLoader[Any]) -> data.DataLoader[Any]:
    """Return torch's loader with the settings of torchdata's ``StatefulDataLoader``."""
    kept = {name: getattr(loader, name) for name in ("batch_size", "drop_last", "sampler", "batch_sampler")}
    is_stream = isinstance(loader.dataset, data.IterableDataset)
    lists: dict[str, Any] = {"batch_size": loader.batch_size} if is_stream else {"batch_sampler": loader.batch_sampler}
    made = data.DataLoader(loader.dataset, **lists, **{name: getattr(loader, name) for name in _SETTINGS})
    vars(made).update(kept)
    return made


def _class_of(kind: type[data.DataLoader[Any]]) -> type[PreparedLoader]:
    """Return the class of the copy: that of the loader, whose ``super()`` is `PreparedLoader`."""
    if kind is data.DataLoader:
        return PreparedLoader
    members: dict[str, Any] = {name: getattr(PreparedLoader, name) for name in ("state_dict", "load_state_dict")}
    if kind.__iter__ is not data.DataLoader.__iter__:
        members["__iter__"] = lambda self: self._follow(iter(kind.__iter__(self)))
    return cast(type[PreparedLoader], type(kind.__name__, (kind, PreparedLoader), members))
