"""Consistency checks between ranks: the same layout when a model is wrapped, the same bits later."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lockstep.comm.collectives import Group, all_gather, all_gather_object, broadcast
from lockstep.comm.fully_shard import is_sharded
from lockstep.errors import ModelMismatch, ReplicasDiffer
from lockstep.parallel.flat import flatten

# Do all ranks hold the same model? Checked once, when it is wrapped.

_ADVICE = (
    "Every rank must build the same model: check for code that depends on the rank, on local data (a vocabulary, "
    "a number of classes) or on a checkpoint that only some ranks found."
)


def check_models_agree(
    parameters: Iterable[tuple[str, Tensor]],
    buffers: Iterable[tuple[str, Tensor]],
    *,
    group: Group,
    device: torch.device,
) -> None:
    """Make sure that parameters and buffers have the same shapes, dtypes and strides on all ranks.

    Collective: every rank. Blocks until complete. Values are not compared, and names serve for messages only.

    Raises:
        ModelMismatch: On every rank; names the first difference, the rank and both sides.
    """
    mine = [_describe_layout("parameter", name, tensor) for name, tensor in parameters]
    mine += [_describe_layout("buffer", name, tensor) for name, tensor in buffers]
    layout = json.dumps([[kind, *rest] for kind, _, *rest in mine])
    digest = int.from_bytes(hashlib.sha256(layout.encode()).digest()[:7], "big")
    digests = [int(value) for value in all_gather(torch.tensor([digest], device=device), group=group)]
    if len(set(digests)) > 1:  # the same verdict on every rank, so that all take part in what follows
        raise ModelMismatch(explain_mismatch(all_gather_object(mine, group=group, device=device)))


def _describe_layout(kind: str, name: str, tensor: Tensor) -> list[Any]:
    strides = list(tensor.stride()) if tensor.layout is torch.strided else []
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [kind, name, list(tensor.shape), dtype, strides, kind == "parameter" and tensor.requires_grad]


def explain_mismatch(models: Sequence[Sequence[Sequence[Any]]]) -> str:
    """Say in words where the first model that differs from rank 0's does so; a pure function.

    Args:
        models: By rank, ``[kind, name, shape, dtype, strides, requires_grad]`` of every tensor, in order.
    """
    reference = models[0]
    rank = next(rank for rank, model in enumerate(models) if _layout(model) != _layout(reference))
    model = models[rank]
    for ours, theirs in zip(reference, model, strict=False):
        if _layout([ours]) != _layout([theirs]):
            return (
                f"The models differ between ranks: {ours[0]} {ours[1]} on rank 0 is {_text(ours)}, "
                f"but {theirs[0]} {theirs[1]} on rank {rank} is {_text(theirs)}.\n{_ADVICE}"
            )
    extra_rank, extra = (0, reference[len(model)]) if len(reference) > len(model) else (rank, model[len(reference)])
    return (
        f"The models differ between ranks: rank 0 has {len(reference)} parameters and buffers, rank {rank} has "
        f"{len(model)}; {extra[0]} {extra[1]} exists on rank {extra_rank} alone.\n{_ADVICE}"
    )


def _layout(model: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [[entry[0], *entry[2:]] for entry in model]


def _text(entry: Sequence[Any]) -> str:
    kind, _, shape, dtype, strides, requires_grad = entry
    frozen = " frozen" if kind == "parameter" and not requires_grad else ""
    return f"{dtype}{shape} with strides {strides}{frozen}"


# A checksum over the bits of tensors: fast, the same on every machine, and different whenever a single bit is.
#
# [Note: what it finds]
# The bits are read as numbers of 32 bits, whatever the dtype. Each is multiplied by an odd number of 64 bits that
# depends on its position, and the products are summed modulo 2^64. A flipped bit changes one product by an odd number
# times a power of two below 2^64, which is never zero: so it is always found, and so is everything that changes one
# number of 32 bits. Elements that changed places are found because their factors differ. Changes of several numbers
# cancel each other about once in 2^32 times at worst. The sums of chunks are weighed in the same way. Zero and minus
# zero differ, and so do NaNs of different bits.

_CHUNK_CPU, _CHUNK = 2**14, 2**22
"""Numbers that are worked on at once: on CPUs what stays in a core's cache, elsewhere what keeps a device busy."""

_SALT_OF_CHUNKS = 1


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return 64 bits that depend on every bit of ``tensors``, on their order, and on nothing else. Blocks.

    Args:
        tensors: On any devices; how they are cut into tensors does not matter, but for the order of their sizes.
    """
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_device[tensor.device].append(tensor)
    total = 0
    for place, (device, group) in enumerate(by_device.items()):
        total += (2 * place + 1) * _of_device(group, device)
    return _signed(total)


@torch.no_grad()
def _of_device(tensors: Sequence[Tensor], device: torch.device) -> int:
    on_cpu = device.type == "cpu"
    size = _CHUNK_CPU if on_cpu else _CHUNK
    weights = _weights(size, device)
    sums = []
    for chunk in _chunks(tensors, size):
        factors = weights if chunk.numel() == size else weights[: chunk.numel()]
        # the dot product is for CPUs only; elsewhere one kernel converts and multiplies
        sums.append(torch.dot(chunk.long(), factors) if on_cpu else (chunk * factors).sum())
    if not sums:
        return 0
    together = torch.stack(sums)
    return int((together * _mixed(len(sums), _SALT_OF_CHUNKS).to(device)).sum())


def _chunks(tensors: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Return all bits as rows of at most ``size`` 32-bit numbers: large tensors in pieces, small ones together."""
    small: list[Tensor] = []
    num_small = 0
    for tensor in tensors:
        numbers = as_numbers(tensor)
        if numbers.numel() >= size:
            yield from numbers.split(size)
            continue
        if num_small + numbers.numel() > size:
            yield torch.cat(small)
            small, num_small = [], 0
        small.append(numbers)
        num_small += numbers.numel()
    if num_small:
        yield torch.cat(small)


def as_numbers(tensor: Tensor) -> Tensor:
    """Return the bits of a strided ``tensor`` as 32-bit numbers in a row, in the order in which they lie in memory."""
    flat = flatten(tensor.detach().resolve_conj().resolve_neg())
    if flat.nbytes % 4:
        return flat.view(torch.uint8).to(torch.int32)
    if flat.storage_offset() * flat.itemsize % 4:
        flat = flat.clone()
    return flat.view(torch.int32)


@lru_cache(maxsize=8)
def _weights(size: int, device: torch.device) -> Tensor:
    return _mixed(size, 0).to(device)


def _mixed(size: int, salt: int) -> Tensor:
    """Return odd numbers of 64 bits that look random: those of splitmix64, computed alike on every machine."""
    numbers = torch.arange(1, size + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15) + salt
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> shift)) * _signed(factor)
    return (numbers ^ (numbers >> 31)) | 1


def _signed(number: int) -> int:
    """Return ``number`` modulo 2^64 as a signed one."""
    return (number + 2**63) % 2**64 - 2**63


# What every rank should hold the same bits of: parameters, buffers and optimizer state, by name.
#
# [Note: what may differ]
# Left out is what each rank rightly has on its own:
#
# - buffers that are overwritten by rank 0's before each forward (``broadcast_buffers=True``): between two forwards they
#   hold what this rank's batch left there, and a difference is gone before anything reads it;
# - otherwise the running statistics of norm layers that see this rank's samples only;
# - what is divided among the ranks: DTensor, and the state of a ``ZeroRedundancyOptimizer``.

Buffers = Literal["healed", "own", "same"]
"""Whether rank 0's overwrite the others, norm layers keep each rank's own, or all are the same on all ranks."""


@dataclass
class Replica:
    """What a rank holds, in the order in which a difference is looked for.

    Args:
        tensors: By name.
        numbers: What optimizers keep as plain numbers, by name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def all(self) -> Iterator[tuple[str, Tensor]]:
        """Return everything as tensors, by name."""
        yield from self.tensors.items()
        for name, number in self.numbers.items():
            yield name, torch.tensor(number, dtype=torch.float64)


def replica_of(
    module: nn.Module, optimizer: Optimizer | None = None, *, buffers: Buffers, ignore: Collection[str] = ()
) -> Replica:
    """Return what this rank holds that all ranks should: see [Note: what may differ].

    Args:
        module: Its parameters come first, each layer's followed by its buffers.
        optimizer: Of these parameters.
        buffers: How they are kept alike, if at all.
        ignore: Names of parameters and buffers to leave out.
    """
    replica = Replica()
    names: dict[Tensor, str] = {}
    for path, layer in module.named_modules():
        for name, parameter in layer._parameters.items():
            full = f"{path}.{name}" if path else name
            if parameter is None or parameter in names or full in ignore:
                continue
            names[parameter] = full
            replica.tensors[f"parameter {full}"] = parameter
        for name, buffer in layer._buffers.items():
            full = f"{path}.{name}" if path else name
            if buffer is None or buffers == "healed" or full in ignore or (buffers == "own" and _sees_own(layer)):
                continue
            replica.tensors[f"buffer {full}"] = buffer
    if optimizer is not None and not _divides_state(optimizer):
        _add_state(replica, optimizer, names)
    replica.tensors = {name: each for name, each in replica.tensors.items() if _is_comparable(each)}
    return replica


def _add_state(replica: Replica, optimizer: Optimizer, names: dict[Tensor, str]) -> None:
    for index, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
        owner = f"parameter {names[parameter]}" if parameter in names else f"the optimizer's parameter {index}"
        for name, value in optimizer.state.get(parameter, {}).items():
            _add(replica, f"{name} of {owner}", value)
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            _add(replica, f"{name} of parameter group {number}", value)


def _add(replica: Replica, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        replica.tensors[name] = value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        replica.numbers[name] = float(value)


def _sees_own(layer: nn.Module) -> bool:
    return isinstance(layer, _NormBase) and not isinstance(layer, nn.SyncBatchNorm)


def _divides_state(optimizer: Optimizer) -> bool:
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)


def _is_comparable(tensor: Tensor) -> bool:
    return not is_sharded(tensor) and tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.is_meta


# Do all ranks still hold the same bits? If not: the first tensor that differs, where in it, and who is on which side.
#
# [Note: cost]
# All is one checksum, and the ranks exchange that number alone. Only if it differs does each tensor get a checksum of
# its own, to be compared by name, and only of the first one that differs are the elements exchanged.

Sides = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Difference:
    """What differs, the same on every rank.

    Args:
        name: The first tensor that does.
        sides: The ranks that agree on it, the largest side first; of equals, that of the first rank.
        where: The elements of it, in a sentence; None if shapes differ.
        num_different: How many tensors differ.
        num_all: How many were compared.
    """

    name: str
    sides: Sides
    where: str | None
    num_different: int
    num_all: int

    def error(self, *, now: str, since: str) -> ReplicasDiffer:
        """Return the error that names it.

        Args:
            now: When it was found, in words.
            since: When the ranks were alike, as a sentence.
        """
        number = f"{self.num_different} of {self.num_all} tensors differ{'s' * (self.num_different == 1)}."
        lines = [
            f"The ranks do not hold the same bits any more{now}: {self.name} differs {between(self.sides)}.",
            *([] if self.where is None else [self.where]),
            f"{number} {since}",
            "Either code changed it on some ranks only (an if on the rank, a buffer that nobody synchronises), or a "
            "device or its memory is faulty. Go on from a checkpoint that was written before.",
        ]
        return ReplicasDiffer("\n".join(lines), tensor=self.name, sides=self.sides)


def between(sides: Sides) -> str:
    """Return who differs from whom: the smaller sides from the largest, if there is one."""
    if len(sides) == 2 and len(sides[0]) == len(sides[1]):
        return f"between {_ranks(sides[0])} and {_ranks(sides[1])}"
    if len(sides[0]) == 1:
        return f"on all of ranks {_listed([rank for side in sides for rank in side])}"
    return f"on {' and on '.join(map(_ranks, sides[1:]))} from that on {_ranks(sides[0])}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def find_difference(replica: Replica, *, group: Group, device: torch.device) -> Difference | None:
    """Return what differs between the ranks, None if nothing does.

    Collective: every rank. Blocks; one exchange of 8 bytes if nothing differs.

    Args:
        replica: What this rank holds.
        group: The ranks.
        device: Where tensors lie that the ranks can exchange.
    """
    numbers = torch.tensor(list(replica.numbers.values()), dtype=torch.float64)
    total = checksum([*replica.tensors.values(), numbers] if replica.numbers else list(replica.tensors.values()))
    totals = [int(each) for each in all_gather(torch.tensor([total], device=device), group=group)]
    if len(set(totals)) == 1:
        return None
    mine = dict(replica.all())
    cards = {name: [checksum([tensor]), list(tensor.shape), str(tensor.dtype)] for name, tensor in mine.items()}
    ranks: list[dict[str, Any]] = all_gather_object(cards, group=group, device=device)
    names = list(dict.fromkeys(name for cards in sorted(ranks, key=len, reverse=True) for name in cards))
    different = [name for name in names if any(cards.get(name) != ranks[0].get(name) for cards in ranks)]
    if not different:  # the same tensors in another order
        different = names
    first = different[0]
    sides = sides_of([str(cards.get(first)) for cards in ranks])
    where = None
    if len({str(cards.get(first, [None, None])[1:]) for cards in ranks}) == 1:
        where = _describe_elements(mine[first], sides, group=group, device=device)
    return Difference(first, sides, where, len(different), len(names))


def sides_of(values: Sequence[str]) -> Sides:
    """Return the ranks with the same value, the largest side first; of equals, that of the first rank."""
    sides: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        sides.setdefault(value, []).append(rank)
    return tuple(sorted(map(tuple, sides.values()), key=lambda side: (-len(side), side[0])))


def _describe_elements(tensor: Tensor, sides: Sides, *, group: Group, device: torch.device) -> str | None:
    """Return where in a tensor the second side differs from the first. Collective: every rank."""
    if len(sides) < 2:
        return None
    mine = tensor.detach().contiguous()
    theirs = mine.to(device, copy=True)
    broadcast(theirs, group=group, src=sides[0][0])
    found: list[Mapping[str, Any]] = all_gather_object(
        compare(mine, theirs.to(mine.device)), group=group, device=device
    )
    other, one = sides[1][0], sides[0][0]
    seen = found[other]
    bits = ", by one bit" * seen["one_bit"]
    many = f"{seen['count']} of its {mine.numel()} elements differ{'s' * (seen['count'] == 1)}{bits}"
    at = f" at {seen['index']}" if mine.dim() else ""
    return f"{many}: the first{at} is {seen['mine']} on rank {other} and {seen['theirs']} on rank {one}."


def compare(mine: Tensor, theirs: Tensor) -> dict[str, Any]:
    """Return how many elements differ in their bits, whether it is a single bit, and the first of them.

    Args:
        mine: Contiguous.
        theirs: Of the same shape and dtype.
    """
    bytes_of = [each.reshape(-1).view(torch.uint8).view(mine.numel(), -1) for each in (mine, theirs)]
    changed = torch.bitwise_xor(*bytes_of)
    places = changed.any(dim=1).nonzero().flatten().tolist()
    first = places[0] if places else 0
    flipped = changed[changed != 0].tolist()
    index = torch.unravel_index(torch.tensor(first), mine.shape) if mine.dim() else ()
    return {
        "count": len(places),
        "one_bit": len(flipped) == 1 and flipped[0].bit_count() == 1,
        "index": [int(each) for each in index],
        "mine": str(mine.reshape(-1)[first].item()),
        "theirs": str(theirs.reshape(-1)[first].item()),
    }
