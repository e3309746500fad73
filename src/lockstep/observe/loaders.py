"""How long a loop waits for the batches of a DataLoader, seen at the loader or at all of them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lockstep.observe.hook import Hook
from lockstep.observe.samples import num_samples
from lockstep.observe.steps import Steps
from lockstep.parallel.ddp.capture import is_capturing

Fail = Callable[[Exception], None]
Undo = Callable[[], None]


class Batches:
    """Tells of batches that are asked for and come.

    Args:
        steps: Is told.
        device: Where the model is.
        fail: Gets errors of ours.
    """

    def __init__(self, steps: Steps, device: torch.device, fail: Fail) -> None:
        self._steps, self._device, self._fail = steps, device, fail
        self._is_cuda = device.type == "cuda"
        self._is_within = False

    def timed(self, call: Callable[[], Any], size: Callable[[Any], int | None]) -> Any:
        """Return what ``call`` returns, and tell how long that took; ``size`` tells the samples in it.

        What ends the iteration, or fails, is not told; nor is what is asked for within such a call.
        """
        if self._is_within or not self._steps.is_mine or (self._is_cuda and is_capturing(self._device)):
            return call()
        asked = self._steps.moment()
        self._is_within = True
        try:
            batch = call()
        finally:
            self._is_within = False
        try:
            self._steps.batch(asked, size(batch))
        except Exception as error:
            self._fail(error)
        return batch

    def iterated(self, batches: Any) -> Iterator[Any]:
        """Yield what ``batches`` yields."""
        iterator = self.timed(lambda: iter(batches), lambda _: None)
        while True:
            try:
                batch = self.timed(lambda: next(iterator), num_samples)
            except StopIteration:
                return
            yield batch


def watch_loader(loader: DataLoader[Any], batches: Batches) -> Undo:
    """Have ``batches`` told of each iteration of this loader that begins from now on; return what undoes that.

    Nothing that is put there keeps the loader or its iterators alive: loader processes end when they always did.
    """
    inner = getattr(loader, "base_dataloader", None)  # Accelerate's iterate one within
    loader = inner if isinstance(inner, DataLoader) else loader
    kind, known = type(loader), weakref.ref(loader)

    def get_iterator() -> Any:
        owner = known()
        iterator = batches.timed(lambda: kind._get_iterator(owner), lambda _: None)  # type: ignore[arg-type]
        Hook(lambda: _watch_iterator(iterator, batches, _batch_size(owner)), batches._fail)()
        return iterator

    loader._get_iterator = get_iterator  # type: ignore[method-assign]

    def undo() -> None:
        if (owner := known()) is not None:
            owner.__dict__.pop("_get_iterator", None)

    return undo


def _watch_iterator(iterator: Any, batches: Batches, batch_size: int | None) -> None:
    known = weakref.ref(iterator)
    original = type(iterator)._next_data

    def next_data() -> Any:
        return batches.timed(lambda: original(known()), lambda batch: num_samples(batch, batch_size))

    iterator._next_data = next_data


def watch_all_loaders(batches: Batches) -> Undo:
    """Have ``batches`` told of each DataLoader of the process; return what undoes that."""
    began, came = DataLoader.__iter__, _BaseDataLoaderIter.__next__

    @functools.wraps(began)
    def begin(loader: DataLoader[Any]) -> Any:
        iterator = batches.timed(lambda: began(loader), lambda _: None)
        Hook(lambda: sizes.__setitem__(iterator, _batch_size(loader)), batches._fail)()
        return iterator

    @functools.wraps(came)
    def following(iterator: Any) -> Any:
        return batches.timed(lambda: came(iterator), lambda batch: num_samples(batch, sizes.get(iterator)))

    sizes: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
    owner: Any = DataLoader
    iterators: Any = _BaseDataLoaderIter
    owner.__iter__, iterators.__next__ = begin, following

    def undo() -> None:
        if owner.__iter__ is begin:
            owner.__iter__ = began
        if iterators.__next__ is following:
            iterators.__next__ = came

    return undo


def _batch_size(loader: Any) -> int | None:
    """Return how many samples a batch of a loader has, as far as it says."""
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None
