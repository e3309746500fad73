"""What a script loads, and gives to its models: its passes over loaders, cut short, and the batches of each update."""

import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import length_hint
from typing import Any, SupportsIndex

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lockstep.base.containers import find_tensors
from lockstep.base.torch_internals import INDEX_SAMPLER, BaseDataLoaderIter
from lockstep.data.loader import Fetch, HasEpochs
from lockstep.data.order import cut
from lockstep.loop.instrument import Instrument
from lockstep.loop.passes import Division, StreamBatch
from lockstep.loop.passes import Pass as PreparedPass
from lockstep.study.verify.script.draws import Draws
from lockstep.study.verify.script.trace import Pass, as_bytes, generator_states, row_digests, storage_of, tensor_digests

# [Note: the script is cut short]
# A script is not changed, but its passes over its loaders are shorter. A pass that trains has a few updates and then
# the last batches of the pass; one that evaluates has the first batches and the last. The samplers are read to their
# end, so it is known what a whole pass would have loaded; of a prepared loader that is the script's own sampler. After
# `NUM_EPOCHS` passes that train, the others have one batch. A sampler without an end is not cut: a script that reads
# one counts its updates; it ends after some of them.
# Scripts that cannot do with less than ``len(loader)`` batches run again without cuts, and end after some updates.
# All of this depends on counts only, which are the same on all ranks of a script without errors.

NUM_EPOCHS = 3
# Updates of a pass over a stream.
_NUM_OF_STREAM = 20
# After so many passes of one batch the script ends: it may train until it has made a number of updates.
_NUM_LATE = 40
# A sampler that yields more indices than so many times the data set's length has no end.
_NUM_REPEATS = 4
# The length of a data set that does not know it.
_NUM_UNKNOWN = 1_000_000


@dataclass(eq=False)
class _Batch:
    """A batch that the script has received, and not yet used for an update.

    Attributes:
        pass_: Over the loader that returned it.
        indices: Of its samples.
        rows: A digest of each sample.
        tensors: Its tensors.
        digests: Of these.
        is_evaluated: Whether a model was evaluated on it; it may also be trained on.
    """

    pass_: Pass
    indices: list[Any]
    rows: list[bytes]
    tensors: list[weakref.ref[Tensor]]
    digests: set[bytes]
    is_evaluated: bool = False

    def num_common(self, tensors: Sequence[Tensor], digests: set[bytes]) -> int:
        """Return how many tensors of a forward are its own, views or copies of them, or have been changed in place."""
        held = {storage_of(own) for ref in self.tensors if (own := ref()) is not None} - {0}
        return sum(storage_of(tensor) in held for tensor in tensors) + len(self.digests & digests)


class _ShortSampler:
    """The index sampler of a loader; each iteration is a pass, see [Note: the script is cut short]."""

    def __init__(self, recorder: "DataRecorder", dataset: Any, lists: Any) -> None:
        self._recorder, self._dataset, self.lists = recorder, dataset, lists

    def __len__(self) -> int:
        """Return the number of batches of a whole pass."""
        return len(self.lists)

    def __iter__(self) -> Iterator[Any]:
        """Yield what the sampler yields for the batches that are loaded."""
        rest = self._recorder.shorten(self, self._dataset, self.lists, iter(self.lists), lambda indices: indices)
        self._recorder.samplers[rest] = self
        return rest


class DataRecorder:
    """Records the passes over loaders of this process, and cuts them short.

    Args:
        num_steps: Updates of a pass.
        draws: Is told what is drawn for data, which does not count.
        end: Ends the script.
        cuts: Whether passes are cut short; else the script ends after some updates.

    Attributes:
        passes: Over loaders, or of evaluations without one.
        num_updates: Of the script; of several optimizers, those of the one with the most. Set by the owner.
        num_late: Passes of which one batch was loaded.
        is_augmented: Whether samples are drawn at random.
        unseen: What cannot be compared, in sentences.
        samplers: Of loaders, by their iterators.
    """

    def __init__(self, num_steps: int, draws: Draws, end: Callable[[], None], *, cuts: bool) -> None:
        self._num_steps, self._draws, self._end, self._cuts = num_steps, draws, end, cuts
        self.passes: list[Pass] = []
        self.num_updates = self.num_late = 0
        self.is_augmented = False
        self.unseen: dict[str, None] = {}
        self._rank, self._world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._trained: Counter[int] = Counter()  # passes that train, by id of the data set
        self.samplers: weakref.WeakKeyDictionary[Any, _ShortSampler] = weakref.WeakKeyDictionary()
        self._newest: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()  # by index sampler
        # Batches since the newest update; those of them that forwards were given; whether there was a backward,
        # and whether the newest forward was given nobody knows which of them.
        self._batches: list[_Batch] = []
        self._used: list[_Batch] = []
        self._has_backward = self._is_unknown = False
        # Of a script that makes its batches by itself: digests of the samples that forward got, for this update and
        # for the one before; whether it has evaluated since.
        self._inputs: list[bytes] = []
        self._trained_on: frozenset[bytes] = frozenset()
        self._has_evaluated = False

    def arm(self, instrument: Instrument) -> None:
        """Install the hooks."""
        original = getattr(DataLoader, INDEX_SAMPLER).fget

        def index_sampler(loader: Any) -> Any:
            lists = original(loader)
            # A prepared loader's lists are cut before they are divided; our own loaders answer requests.
            is_ours = isinstance(lists, Division) or isinstance(loader.dataset, Fetch)
            return lists if is_ours else _ShortSampler(self, loader.dataset, lists)

        instrument.replace(DataLoader, INDEX_SAMPLER, property(index_sampler))
        instrument.wrap(Division, "divide", self._around_division)
        instrument.wrap(DataLoader, "__iter__", self._around_iter)
        instrument.wrap(BaseDataLoaderIter, "__next__", self._around_next)

    # --- Passes

    @property
    def has_loaders(self) -> bool:
        """Whether the script has trained on batches of a loader."""
        return bool(self._trained)

    @property
    def is_endless(self) -> bool:
        """Whether no loader shows where the script ends: then the owner ends it."""
        return not self._cuts or not self._trained or any(each.is_endless and each.is_training for each in self.passes)

    @property
    def has_batches(self) -> bool:
        """Whether the script has received a batch since the newest update."""
        return bool(self._batches)

    def restart(self) -> None:
        """Count updates anew: updates before the first batch of a loader were a preparation."""
        self.num_updates = 0
        for pass_ in self.passes:
            pass_.num_before = 0

    def _begin_pass(self, dataset: Any, lists: Any) -> Pass:
        """Return a new pass over a data set, by a sampler of indices or of lists of them."""
        sampler, is_stream = getattr(lists, "sampler", lists), isinstance(dataset, IterableDataset)
        length = None if is_stream else length_hint(dataset, -1)
        kind = type(dataset).__name__ + (f" of {length}" if length not in (None, -1) else "")
        new = Pass(kind, is_stream, source=id(dataset), num_before=self.num_updates)
        new.shuffles = isinstance(sampler, HasEpochs) and bool(getattr(sampler, "shuffle", False))
        new.is_divided = isinstance(sampler, DistributedSampler)
        new.is_late = self._cuts and self._trained[id(dataset)] >= NUM_EPOCHS
        if self._has_backward and not new.is_late:
            self.unseen["The last batches of a pass, which no update followed: an incomplete accumulation."] = None
        self.num_late += new.is_late
        if self.num_late > _NUM_LATE:
            self._end()
        if new.is_late:
            self.unseen[f"The epochs after the first {NUM_EPOCHS}: of each, only one batch was loaded."] = None
        else:
            self.passes.append(new)
        return new

    def shorten(
        self,
        key: Any,
        dataset: Any,
        lists: Any,
        rest: Iterator[Any],
        own: Callable[[list[Any]], list[Any]],
        *,
        is_prepared: bool = False,
    ) -> Iterator[Any]:
        """Yield the lists of indices that are loaded, and note those of the whole pass.

        Args:
            key: The loader's index sampler.
            dataset: Of the loader.
            lists: The sampler of ``rest``.
            rest: Lists of indices, or single ones.
            own: Returns of a list what this rank loads.
            is_prepared: Whether it divides the lists.
        """
        pass_ = self._newest[key] = self._begin_pass(dataset, lists)
        pass_.is_prepared = is_prepared

        def noted(indices: Any) -> list[Any]:
            if pass_.is_stream and not pass_.is_endless:
                return []
            mine = own(list(indices) if isinstance(indices, list | tuple) else [indices])
            mine = [int(index) if isinstance(index, SupportsIndex) else str(index) for index in mine]
            pass_.indices += mine
            return mine

        num_read = 0
        for indices in rest:
            num_read += len(indices) if isinstance(indices, list | tuple) else 1
            pass_.waiting.append(noted(indices))
            yield indices
            if self._cuts and self._is_enough(pass_):
                break
        if pass_.is_late:
            return
        ahead = []
        for indices in () if pass_.is_stream else rest:
            ahead.append(indices)
            num_read += len(indices) if isinstance(indices, list | tuple) else 1
            if num_read > _NUM_REPEATS * max(length_hint(dataset, _NUM_UNKNOWN), self._num_steps):
                pass_.is_endless = pass_.is_stream = True
                self.unseen["What a sampler without an end would yield later."] = None
                break
        if pass_.is_endless:
            for indices in itertools.chain(ahead, rest):
                pass_.waiting.append(noted(indices))
                yield indices
            return
        left = [(indices, noted(indices)) for indices in ahead]
        for indices, mine in left[len(left) - self._num_last(pass_, len(left)) :]:
            pass_.waiting.append(mine)
            yield indices

    def _is_enough(self, pass_: Pass) -> bool:
        """Return whether of the rest of a pass only the last batches are loaded."""
        if pass_.is_late or not pass_.is_training:
            return pass_.is_late or pass_.num_loaded > self._num_steps
        # The end of a stream can only be seen by reading it.
        num_steps = _NUM_OF_STREAM if pass_.is_stream else self._num_steps - 1
        return self.num_updates - pass_.num_before >= num_steps

    def _num_last(self, pass_: Pass, num_left: int) -> int:
        """Return how many of the last batches are loaded: those of one update."""
        if not num_left:
            return 0
        per_update = round(pass_.num_loaded / max(1, self.num_updates - pass_.num_before)) if pass_.is_training else 1
        return (num_left - 1) % max(1, per_update) + 1

    def _around_division(
        self, original: Callable[..., Any], division: Division, lists: Iterator[Any], this: PreparedPass
    ) -> Any:
        def own(indices: list[Any]) -> list[Any]:
            part = cut(len(indices), self._world_size, self._rank)
            return indices[part.start : part.stop]

        loader = division.progress.loader
        key: Any = division
        if (sampler := self.samplers.get(lists)) is not None:  # of an iterator that was made before prepare()
            key, lists = sampler, iter(sampler.lists)
        shortened = self.shorten(key, loader.dataset, loader.batch_sampler, lists, own, is_prepared=True)
        return original(division, shortened, this)

    def _around_iter(self, original: Callable[..., Any], loader: Any) -> Any:
        states = generator_states()
        with self._draws.of_data():
            iterator = original(loader)
        self._draws.forget()  # models may be made before the first batch is loaded
        pass_ = self._pass_of(iterator)
        if pass_ is not None and not pass_.is_prepared and loader.num_workers and loader.generator is None:
            pass_.drawn["loader processes"] = states["torch"]  # their seeds are drawn from it
        return iterator

    def _around_next(self, original: Callable[..., Any], iterator: Any) -> Any:
        states = generator_states()
        try:
            with self._draws.of_data():
                batch = original(iterator)
        except StopIteration:
            self._draws.forget()
            if (pass_ := self._pass_of(iterator)) is not None:
                pass_.is_over = True
            raise
        if (pass_ := self._pass_of(iterator)) is not None:
            self._receive(pass_, batch, states)
        # On ranks, loaders of ours seed the generators for each sample, and set them back.
        if pass_ is None or (pass_.is_prepared and self._world_size > 1):
            self._draws.forget()
        return batch

    def _pass_of(self, iterator: Any) -> Pass | None:
        key = getattr(iterator, INDEX_SAMPLER, None)
        return self._newest.get(key) if isinstance(key, _ShortSampler | Division) else None

    def _receive(self, pass_: Pass, batch: Any, states: dict[str, bytes]) -> None:
        """Record a batch that the script gets; ``states`` are those of the generators before it was loaded."""
        indices, is_empty = pass_.waiting.popleft(), False
        if isinstance(batch, StreamBatch):
            pass_.is_prepared = True
            is_empty = not cut(batch.whole.size, self._world_size, self._rank)
            batch = batch.batch
        elif not pass_.is_stream:
            is_empty = not indices  # a sample that does not count
        rows = [] if is_empty else row_digests(batch)
        if pass_.is_stream and not pass_.is_endless:
            pass_.indices += rows
            indices = rows
        if len(rows) == len(indices):
            pass_.contents.update(zip(indices, rows, strict=True))
        is_seeded = pass_.is_prepared and self._world_size > 1  # each sample has random numbers of its own
        if pass_.num_loaded and not is_seeded:  # the first batch of a pass is preceded by the sampler's draws
            after = generator_states()
            drawn = {name: state for name, state in states.items() if after[name] != state}
            pass_.drawn = drawn | pass_.drawn
            self.is_augmented |= bool(drawn)
        pass_.num_loaded += 1
        tensors = [weakref.ref(tensor) for tensor in find_tensors(batch)]
        self._batches.append(_Batch(pass_, indices, rows, tensors, tensor_digests(batch)))

    # --- What models are given

    def forward(self, inputs: Any, *, has_parameters: bool) -> None:
        """Record what a forward that trains, of a model or a loss, is given: which of the batches."""
        if not self._trained and not self._batches:  # the script makes its batches by itself
            self._inputs += row_digests(inputs) if has_parameters else []
            return
        unused = self._unused()
        if has_parameters and len(unused) == 1:
            self._used += unused
        elif (has_parameters and unused) or self._is_unknown:  # such as in a loop that loads a batch ahead
            given = list(find_tensors(inputs)), tensor_digests(inputs)
            known = max(self._batches, key=lambda batch: batch.num_common(*given))
            self._is_unknown = not known.num_common(*given)
            self._used += [known] if not self._is_unknown and known not in self._used else []

    def _unused(self) -> list[_Batch]:
        """Return the batches that the next forward may be given."""
        unused = [batch for batch in self._batches if batch not in self._used]
        return [batch for batch in unused if not batch.is_evaluated] or unused

    def evaluate(self, inputs: Any) -> None:
        """Record what a model is evaluated on: a batch, or data without a loader."""
        if self._batches:
            given = list(find_tensors(inputs)), tensor_digests(inputs)
            for batch in self._batches:
                batch.is_evaluated |= bool(batch.num_common(*given))
        elif not self.num_late and self._trained_on.isdisjoint(rows := row_digests(inputs)):
            if not self._has_evaluated:
                self.passes.append(Pass("tensors"))
            self._has_evaluated = True
            self.passes[-1].indices += rows

    def backward(self) -> None:
        """Record that gradients are computed from what forwards were given."""
        self._has_backward = True
        unused = self._unused()
        if self._is_unknown or not self._used:  # it may have been any of them
            self._used += [batch for batch in unused if not batch.pass_.is_over] or unused
        self._is_unknown = False
        for pass_ in {id(batch.pass_): batch.pass_ for batch in self._used}.values():
            if not pass_.is_training:
                pass_.is_training = True
                self._trained[pass_.source] += 1

    def update(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Return the samples of an update, by index and by value, and begin the next one."""
        used = [batch for batch in self._used if batch.pass_.is_training]
        parts: Iterable[tuple[list[Any], list[bytes]]] = [(batch.indices, batch.rows) for batch in used]
        parts = parts or [([], self._inputs)]
        indices = [index for ids, rows in parts for index in ids or rows]
        samples = [sample for ids, rows in parts for sample in (rows if len(rows) >= len(ids) else ids)]
        # What was loaded after the batches of this update is for a later one, and so is that of an outer loop.
        newest = {id(batch.pass_): self._batches.index(batch) for batch in self._used}
        self._batches = [
            batch
            for place, batch in enumerate(self._batches)
            if place > newest.get(id(batch.pass_), -1)
            and (id(batch.pass_) in newest or not (batch.pass_.is_over or batch.is_evaluated))
        ]
        self._used, self._has_backward = [], False
        self._trained_on, self._inputs, self._has_evaluated = frozenset(self._inputs), [], False
        return as_bytes(samples), as_bytes(indices)

    def combine(self) -> None:
        """Record that ranks communicated, which may combine what they have evaluated."""
        if self.passes:
            self.passes[-1].is_combined = True
