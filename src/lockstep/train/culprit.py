"""Where a gradient that is not finite came from: the step's micro-batches, computed again and looked at.

[Note: computed again]
A step that is refused has not changed the parameters, and random numbers depend on the position alone, so its
micro-batches can be computed again, each on its own and with a look at every module's output. That costs nothing as
long as all is well. Every rank computes all of its own, because synchronised layers need the others. Only then do the
ranks tell each other what they found.

Where the engine can compute a micro-batch only with the sum over the ranks at its end, the gradients of this rank are
looked at on their way there. Where the parameters have been updated meanwhile, what is left is whether this rank's part
of the gradient was finite when it left, and the samples that it came from.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.comm.fully_shard import local_part, own_class
from lockstep.data.device import map_tensors
from lockstep.data.division import Division
from lockstep.data.loader import MicroBatch
from lockstep.data.order import GlobalOrder, cut
from lockstep.data.stream_reader import StreamOrder
from lockstep.train.passing import Passing, watching_gradients

Losses = list[Tensor]
"""Of one micro-batch: for each share of this process that has samples."""


class Clue(NamedTuple):
    """The first micro-batch of a rank whose loss or gradient is not finite.

    Args:
        rank: Which rank.
        micro: Which micro-batch, from 0; None: one of them, and ``samples`` are those of all.
        samples: Its samples: indices in the data set; of a stream, positions in the global batch.
        faulty: Those of them whose inputs are not finite.
        loss: In words, if it is not finite.
        module: The first one, in the order of computation, whose output is not finite.
        parameter: The first one, in the order of the model, whose gradient is not finite.
    """

    rank: int
    micro: int | None
    samples: list[int]
    faulty: list[int]
    loss: str | None
    module: str | None
    parameter: str | None


class Again(NamedTuple):
    """How a bad step is looked at.

    Args:
        compute: Computes a micro-batch, leaves its gradient in ``param.grad`` and returns the losses. Collective.
        sums: Whether that gradient is then the sum over the ranks.
        part_is_bad: Tells whether this rank's part of the last gradient was not finite, where that is known.
    """

    compute: Callable[[MicroBatch, int], Losses]
    sums: bool
    part_is_bad: Callable[[], bool]


class Traced(NamedTuple):
    """What computing a micro-batch again has shown."""

    losses: Losses
    module: str | None
    parameter: str | None
    has_gradients: bool


def trace(model: nn.Module, compute: Callable[[], Losses], *, summed: bool = False) -> Traced:
    """Compute a micro-batch and look at all that comes of it. Blocks. Collective where ``compute`` is.

    Args:
        model: The bare model; its gradients are None.
        compute: Runs forward and backward, leaves gradients in ``param.grad``, returns the losses.
        summed: Whether these are the sums over the ranks, of which this rank may have a part only.
    """
    passing: Passing | None
    with _watching(model) as found, watching_gradients(model) if summed else nullcontext() as passing:
        losses = compute()
    has_gradients = any(parameter.grad is not None for parameter in model.parameters())
    first = first_not_finite(model) if passing is None else passing.first
    return Traced(losses, found[0] if found else None, first, has_gradients)


def first_not_finite(model: nn.Module) -> str | None:
    """Return the name of the first parameter of ``model`` whose gradient, or this rank's part of it, is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _is_finite(local_part(parameter.grad)):
            return name
    return None


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[str]]:
    """Within, take note of the modules of ``model`` whose outputs are not finite, in the order of computation."""
    names = {id(module): f"{name} ({own_class(module).__name__})" for name, module in model.named_modules() if name}
    found: list[str] = []
    lock = threading.Lock()  # replicas compute in threads

    def look(module: nn.Module, _inputs: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is not None and not all(map(_is_finite, tensors_in(output))):
            with lock:
                found.append(name)

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        yield found
    finally:
        handle.remove()


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in any structure."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = tensor.detach()
    return bool(torch.isfinite(values.coalesce().values() if values.is_sparse else values).all())


def words_for(loss: Tensor) -> str | None:
    """Return what ``loss`` is, if it is not finite. Blocks."""
    value = float(loss)
    return None if math.isfinite(value) else str(value)


def make_clue(rank: int, index: int, shares: Sequence[Sequence[int]], micro: MicroBatch, seen: Traced) -> Clue | None:
    """Return what is wrong with micro-batch ``index`` of a rank, None if nothing is. Blocks.

    Args:
        rank: Which.
        index: Which.
        shares: The samples of each of its shares that has any.
        micro: With its inputs, if they are still there.
        seen: What came of it.
    """
    words = [words_for(loss) for loss in seen.losses]
    if seen.parameter is None and not any(words):
        return None
    wrong = list(range(len(shares)))
    if len(words) == len(shares) and any(words):
        wrong = [share for share, word in enumerate(words) if word is not None]
    samples = [sample for share in wrong for sample in shares[share]]
    faulty = [
        sample
        for share in wrong
        if share < len(micro.batches)
        for sample in _faulty_inputs(micro.batches[share], shares[share])
    ]
    return Clue(rank, index, samples, faulty, next(filter(None, words), None), seen.module, seen.parameter)


def clue_of_part(rank: int, shares: Sequence[Sequence[Sequence[int]]], micros: Sequence[MicroBatch]) -> Clue:
    """Return what is known of a rank whose part of the gradient was not finite, though its losses were. Blocks.

    Args:
        rank: Which.
        shares: By micro-batch, the samples of each of its shares that has any.
        micros: With their inputs, if they are still there.
    """
    faulty = [_faulty_in(micro, of_micro) for micro, of_micro in zip(micros, shares, strict=True)]
    which = next((index for index, found in enumerate(faulty) if found), 0 if len(micros) == 1 else None)
    looked_at = shares if which is None else [shares[which]]
    samples = [sample for of_micro in looked_at for share in of_micro for sample in share]
    return Clue(rank, which, samples, [] if which is None else faulty[which], None, None, None)


def _faulty_in(micro: MicroBatch, shares: Sequence[Sequence[int]]) -> list[int]:
    """Return those samples of a micro-batch whose inputs are not finite, as far as the inputs are still there."""
    pairs = zip(micro.batches, shares, strict=False)
    return [sample for batch, samples in pairs for sample in _faulty_inputs(batch, samples)]


def _faulty_inputs(batch: Any, samples: Sequence[int]) -> list[int]:
    """Return those ``samples`` for which a tensor of their ``batch``, stacked in this order, is not finite."""
    faulty: set[int] = set()
    for tensor in tensors_in(batch):
        if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.shape[:1] == (len(samples),):
            rows = torch.isfinite(tensor.detach().reshape(len(samples), -1)).all(dim=1)
            faulty |= {sample for sample, is_good in zip(samples, rows.tolist(), strict=True) if not is_good}
    return [sample for sample in samples if sample in faulty]


def samples_of(order: GlobalOrder | StreamOrder, division: Division, micro: MicroBatch, index: int) -> list[list[int]]:
    """Return the samples of micro-batch ``index`` that this process has read, for each share that has any."""
    shares = []
    batch = order.batch(micro.step).tolist() if isinstance(order, GlobalOrder) else list(range(micro.num_global))
    bad = {sample.sample for sample in micro.bad} if isinstance(order, GlobalOrder) else set()
    for number in micro.numbers:
        positions = division.positions(len(batch), number)
        part = cut(len(positions), division.accumulate, index)
        mine = batch[positions.start + part.start : positions.start + part.stop]
        shares.append([sample for sample in mine if sample not in bad])
    return shares
