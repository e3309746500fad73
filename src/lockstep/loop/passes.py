"""The passes over a prepared loader: what each rank reads, which passes count, and where the next one begins."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import length_hint
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import data

from lockstep.base.containers import items_of
from lockstep.comm.world import World
from lockstep.data.comparison import checksum
from lockstep.data.order import Purpose, SampleSeeds, cut, mix, seed_cpu
from lockstep.errors import ConfigurationError
from lockstep.loop.batch_parts import Reading, parts
from lockstep.loop.random_state import draws, generators_of, get_state, kept_states, set_state
from lockstep.parallel.ddp.shares import BatchPart
from lockstep.parallel.ddp.wrapper import DistributedDataParallel

models = weakref.WeakSet[DistributedDataParallel]()  # the prepared models of this process

# Samplers of torch, which draw only when the first index is read.
_TORCHS = {data.RandomSampler, data.SequentialSampler, data.SubsetRandomSampler, data.WeightedRandomSampler}


# --- What is read: parts of lists of indices, or of groups of samples


class GlobalBatch(NamedTuple):
    """What all ranks know of a global batch.

    Args:
        size: Its number of samples.
        digest: Of its indices and the indices of all lists before in the pass; of a stream, of some samples.
    """

    size: int
    digest: int


class SeededIndices(list[Any]):
    """Indices of samples; seeds the CPU's generators before each is read, by its position in the global batch.

    A data set reads it as any list, also in a loader process, where all samples are seeded.
    """

    def __init__(self, indices: list[Any], seed: int, first: int, seeds: SampleSeeds | None = None) -> None:
        super().__init__(indices)
        self.seed, self.first, self._seeds = seed, first, seeds or SampleSeeds(draws=True)

    def __iter__(self) -> Iterator[Any]:
        """Yield the indices, each when its sample is about to be read."""
        # By the position: an index may be there twice, and need not be a number.
        for position, index in enumerate(super().__iter__(), self.first):
            self._seeds.seed(self.seed, position)
            yield index

    def __reduce__(self) -> Any:
        """Pickle it without a call of ``__iter__``, which seeds."""
        return SeededIndices, (self[:], self.seed, self.first)


class StreamBatch(NamedTuple):
    """This rank's part of the next samples of a stream, from a loader process or this one."""

    whole: GlobalBatch
    batch: Any


class DividedCollate:
    """The ``collate_fn`` of a loader over a stream: collates this rank's part of the samples that all ranks read."""

    def __init__(self, collate: Any, rank: int, world_size: int) -> None:
        self._collate, self._rank, self._world_size = collate, rank, world_size

    def __call__(self, samples: list[Any]) -> StreamBatch:
        """Return this rank's part of ``samples``, and what is compared between ranks."""
        part = cut(len(samples), self._world_size, self._rank)
        places = {0, len(samples) // 3, 2 * len(samples) // 3, len(samples) - 1}
        compared = [_in_short(samples[place]) for place in sorted(places)]
        whole = GlobalBatch(len(samples), int(checksum([len(samples), *compared]), 16) & 0xFFFF)
        # What the stream draws next must not depend on the size of the part.
        with kept_states():
            seed_cpu(mix(int(torch.randint(2**62, ())), self._rank))
            return StreamBatch(whole, self._collate(samples[part.start : part.stop] or samples[:1]))


def _in_short(sample: Any) -> Any:
    """Return what of a sample is compared between ranks: of large tensors and arrays, some elements."""
    items = items_of(sample)
    if items is not None:
        return [_in_short(item) for item in items]
    if isinstance(sample, Tensor) and sample.layout is torch.strided and sample.numel() > 64:
        return sample.flatten()[:: sample.numel() // 32]
    return sample.ravel()[:: sample.size // 32] if isinstance(sample, np.ndarray) and sample.size > 64 else sample


def _digest(indices: list[Any], before: int) -> int:
    """Return a digest of a list of indices and what came before; equal in all processes."""
    numbers = np.asarray(indices) if indices and isinstance(indices[0], int) else np.empty(0)
    is_plain = numbers.dtype == np.int64 and numbers.ndim == 1
    return zlib.crc32(numbers.tobytes() if is_plain else repr(indices).encode(), before)


# --- The position of a loader


@dataclass(eq=False)
class Pass:
    """One pass over a loader.

    Attributes:
        reading: What it has returned to the script.
        begin: The states of the generators at its begin; of a resumed one, in the process that began it.
        before: The states when this process began it.
        resumed: The state that it was loaded from.
        after: The states of the generators after the first batch.
        num_returned: Batches, with the ones that the process before had returned.
        draws_seed: Whether the seed of loader processes is drawn; not if they persist.
        numbers: Of the batches that this process has returned.
        wholes: The global batches of which it has read lists or samples.
        digest: Of these.
        num_trained: See `Progress.num_trained`, when the newest batch was returned.
        is_settled: Whether it has been decided if it counts.
        has_grad: Whether gradients were enabled at its begin.
        num_forwards: Of prepared models, before it.
    """

    reading: Reading
    begin: list[Any]
    before: list[Any]
    resumed: dict[str, Any] | None
    num_trained: int
    has_grad: bool
    num_forwards: int
    after: list[Any] | None = None
    num_returned: int = 0
    draws_seed: bool = True
    numbers: list[int] = field(default_factory=list)
    wholes: list[GlobalBatch] = field(default_factory=list)
    digest: int = 0
    is_settled: bool = False

    @property
    def skip(self) -> int:
        """The number of batches that the process before has returned."""
        return self.resumed["batch"] if self.resumed else 0


class Progress:
    """The position of a loader, and the random state of its samplers.

    [Note: when a pass counts]
    A pass that was left counts, as in the script without `prepare`: the next one has another order. But a rank may look
    at one batch alone, such as to show it, which must not give it another order than the others have. So a pass of
    which one batch was read is undone at the begin of the next one, if no prepared model was trained since, and nothing
    else has drawn random numbers. It is also undone when an evaluation begins (a pass over another loader under
    no_grad).

    Attributes:
        loader: The loader that was prepared.
        name: Of the loader, in errors.
        rank, world_size, device: Of this process.
        division: Its batch sampler.
        is_followed: Whether the loader has an ``__iter__`` of its own.
        seed: Of the random numbers of samples.
        epoch: The number of the current pass, or of the next one.
        newest: The newest pass.
        open: The passes that are being read.
        resumed: What `load` has loaded, until the next pass.
        draws_once: Whether only torch's generator is used, and only for the first list of a pass.
        seeds: Of the samples, if each has random numbers of its own and this process reads them.
        seeds_samples: Whether each sample has random numbers of its own.
    """

    def __init__(self, loader: data.DataLoader[Any], world: World, seed: int, name: str) -> None:
        self.loader, self.name, self.seed, self.epoch = loader, name, seed, 0
        self.rank, self.world_size, self.device = world.rank, world.world_size, world.device
        self.division, self.is_followed = Division(self), False
        batches, is_stream = cast(Any, loader.batch_sampler), isinstance(loader.dataset, data.IterableDataset)
        sampler = getattr(batches, "sampler", None)
        self.draws_once = type(batches) is data.BatchSampler and type(sampler) in _TORCHS and not is_stream
        self.seeds, self.seeds_samples = SampleSeeds(), False
        self._generators = generators_of(loader, batches, sampler, getattr(sampler, "sampler", None))
        self.newest: Pass | None = None
        self.open: list[Pass] = []
        self.resumed: dict[str, Any] | None = None
        _progresses[self] = None

    @staticmethod
    def num_trained() -> int:
        """Return a number that changes when a prepared model trains."""
        return parts.num_training_forwards + sum(model.reducer.num_forwards for model in models)

    @property
    def num_returned(self) -> int:
        """The number of batches of the current pass that were returned, or of the one that was loaded."""
        if self.newest is not None:
            return self.newest.num_returned
        return self.resumed["batch"] if self.resumed else 0

    def states(self) -> list[Any]:
        """Return the states of what its samplers draw from."""
        return [draws.states(only_torch=self.draws_once), *map(get_state, self._generators)]

    def set_states(self, states: list[Any]) -> None:
        """Set what `states` returned."""
        draws.set_states(states[0])
        for generator, state in zip(self._generators, states[1:], strict=True):
            set_state(generator, state)

    def begin_pass(self, reading: Reading) -> Pass:
        """Begin a pass: decide if the one before counts, and set the generators to its begin."""
        if not torch.is_grad_enabled():
            for other in list(_progresses):
                if other is not self:
                    other.undo_look()
        if not self.undo_look() and self.newest is not None and not self.newest.is_settled:
            self.newest.is_settled = True
            self.epoch += 1
        draws.num_taken = 0
        if self.world_size > 1:
            draws.follow_seed(self.rank, self.device)
            torch.empty(()).random_()  # so that the next `prepare` finds another state
        resumed, self.resumed = self.resumed, None
        before = self.states()
        begin = resumed["begin"] if resumed else before
        if resumed:
            self.set_states(begin)
        num_trained = self.num_trained()
        this = Pass(reading, begin, before, resumed, num_trained, torch.is_grad_enabled(), parts.num_forwards)
        this.num_returned, this.digest = this.skip, self.seed & 0xFFFF
        self.newest = this
        return this

    def undo_look(self) -> bool:
        """Undo the newest pass if it was a look, see [Note: when a pass counts]; return whether it was."""
        last = self.newest
        if last is None or not self._is_look(last):
            return False
        self.set_states(last.before)
        self.newest, self.resumed = None, last.resumed
        return True

    def _is_look(self, last: Pass) -> bool:
        if last.after is None or last.num_returned != last.skip + 1 or last.is_settled or last in self.open:
            return False
        return last.num_trained == self.num_trained() and checksum(self.states()) == checksum(last.after)

    def returned(self, this: Pass, number: int) -> None:
        """Record that a pass returns a batch."""
        this.num_returned, this.num_trained = number + 1, self.num_trained()
        this.numbers.append(number)
        if len(this.numbers) == 1:
            this.after = self.states()

    def end_pass(self, this: Pass) -> None:
        """Record that a pass was read to its end."""
        if not this.is_settled:
            this.is_settled = True
            self.epoch += 1

    def part_of(self, whole: GlobalBatch, number: int) -> BatchPart:
        """Return this rank's part of a batch."""
        share = len(cut(whole.size, self.world_size, self.rank)) * self.world_size / whole.size
        kind = whole.size if whole.size % self.world_size else 0
        name = f"batch {number} of epoch {self.epoch} of {self.name}"
        return BatchPart(share, kind, whole.digest & 0xFFFF, name)

    # --- state --------------------------------------------------------------------------------------------------------

    def _fits(self) -> dict[str, Any]:
        """Return what a state fits."""
        sampler = getattr(self.loader.batch_sampler, "sampler", self.loader.batch_sampler)
        is_stream = isinstance(self.loader.dataset, data.IterableDataset)
        return {
            "batch size": self.loader.batch_size,
            "number of samples": None if is_stream else length_hint(self.loader.dataset),
            "sampler": "none" if is_stream else type(sampler).__name__,
        }

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned, also of a pass that was left.

        Raises:
            ConfigurationError: It is not a position.
        """
        this = None if self.newest is None or self.newest.is_settled else self.newest
        reading = [each for each in self.open if each.num_returned > each.skip]
        if len(reading) > 1 or (reading and reading[0] is not self.newest):
            raise ConfigurationError(
                f"Several loops read {self.name} now, each at another batch, so it has no position.\n"
                "Save outside of the inner loop, delete iterators that are not read any more, or give each loop a "
                "loader of its own."
            )
        now, resumed = self.states(), self.resumed
        if this is not None and self._is_look(this):
            now, resumed, this = this.before, this.resumed, None
        place = {"epoch": self.epoch, "seed": self.seed, "now": now, "fits": self._fits()}
        if this is None and resumed:
            return place | {key: resumed[key] for key in ("batch", "begin", "digest", "draws_seed")}
        if this is None:
            return place | {"batch": 0, "begin": now, "digest": 0, "draws_seed": True}
        digest = this.wholes[this.num_returned - 1].digest if this.num_returned and this.wholes else 0
        seed = {"draws_seed": this.resumed["draws_seed"] if this.resumed else this.draws_seed}
        return place | seed | {"batch": this.num_returned, "begin": this.begin, "digest": digest}

    def load(self, state: dict[str, Any]) -> None:
        """Continue there in the next pass.

        Raises:
            ConfigurationError: It is the state of another loader.
        """
        for name, value in self._fits().items():
            saved = state["fits"][name]
            if saved != value:
                raise ConfigurationError(
                    f"{self.name} has another {name} than the one that was saved: {value}, not {saved}.\n"
                    "The position in its order would be another sample. Load it into a loader with the same data and "
                    "settings, on any number of ranks."
                )
        self.epoch, self.seed, self.newest = state["epoch"], state["seed"], None
        self.open.clear()
        self.resumed = state if state["batch"] else None
        self.set_states(state["now"])


_progresses: weakref.WeakKeyDictionary[Progress, None] = weakref.WeakKeyDictionary()  # which keeps their order


def prepared_loaders() -> list[data.DataLoader[Any]]:
    """Return the script's loaders that were prepared, in order, first the ones that are being read."""
    return [progress.loader for progress in sorted(_progresses, key=lambda progress: not progress.open)]


class Division:
    """The batch sampler of the passes over a loader: yields this rank's part of each list of indices.

    Attributes:
        lists: The batch sampler of the loader.
        this: The pass of the next iterator.
        newest: The list that was yielded last.
    """

    lists: Any
    this: Pass
    newest: list[Any]

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._replay: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return len(self.lists)

    def __iter__(self) -> Iterator[list[Any]]:
        return self.divide(iter(self.lists), self.this)

    def divide(self, lists: Iterator[Any], this: Pass) -> Iterator[list[Any]]:
        """Return this rank's part of each list of a pass that has not been returned before."""
        self._replay = partial(self._skip, lists, this)
        return self._yield(lists, this)

    def replay(self) -> None:
        """Read the lists of a resumed pass that were returned before, if this has not been done."""
        self._replay()

    def _skip(self, lists: Iterator[Any], this: Pass) -> None:
        progress = self.progress
        if this.resumed is None or len(this.wholes) >= this.skip:
            return
        if not this.resumed["draws_seed"]:  # as this process has done, which has new loader processes
            progress.set_states(this.begin)
        while len(this.wholes) < this.skip and self._read(lists, this) is not None:
            pass
        if this.digest & 0xFFFF != this.resumed["digest"]:
            raise ConfigurationError(
                f"{progress.name} cannot go on at batch {this.skip}: its sampler gives other samples than before it "
                "was saved, so some would be left out and others would be read twice.\n"
                "Let it draw from torch's generator, random or numpy.random, or from a generator that is an attribute "
                "of the sampler; or give the sampler state_dict() and load_state_dict(); or save between epochs."
            )
        if progress.draws_once:  # since then others have drawn, up to the save
            draws.set_states(this.resumed["now"][0])

    def _read(self, lists: Iterator[Any], this: Pass) -> list[Any] | None:
        """Return the next list of a pass; None: it is over."""
        is_drawn = not this.wholes or not self.progress.draws_once
        with draws.open(only_torch=self.progress.draws_once) if is_drawn else nullcontext():
            indices = next(lists, None)
        if indices is None:
            return None
        this.digest = _digest(indices := list(indices), this.digest)
        this.wholes.append(GlobalBatch(len(indices), this.digest & 0xFFFF))
        return indices

    def _yield(self, lists: Iterator[Any], this: Pass) -> Iterator[list[Any]]:
        progress = self.progress
        self._skip(lists, this)
        while (indices := self._read(lists, this)) is not None:
            if progress.world_size == 1:
                yield indices
                continue
            part = cut(len(indices), progress.world_size, progress.rank)
            mine = indices[part.start : part.stop] or indices[:1]
            seed = mix(progress.seed, Purpose.PREPARED_SAMPLE, progress.epoch, len(this.wholes) - 1)
            self.newest = SeededIndices(mine, seed, part.start, progress.seeds) if progress.seeds_samples else mine
            yield self.newest
