"""Consistency checks between ranks: the same layout when a model is wrapped, the same bits later."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.activity import format_ranks
from lockstep.base.containers import grouped
from lockstep.base.torch_internals import ORIGINAL, NormBase, own_buffers, own_parameters
from lockstep.comm.collectives import AnyDevice, Group, all_gather, all_gather_different, all_gather_object, broadcast
from lockstep.comm.fully_shard import is_sharded
from lockstep.errors import ConfigurationError, ModelMismatch, ReplicasDiffer
from lockstep.parallel.flat import flatten_like

# --- the same layout on every rank ------------------------------------------------------------------------------------

_ADVICE = (
    "Every rank must build the same model: check for code that depends on the rank, on local data (a vocabulary, "
    "a number of classes), on a checkpoint that only some ranks found, or on the order of a set or of os.listdir()."
)


Named = Iterable[tuple[str, Tensor]]


def check_models_agree(
    parameters: Named, buffers: Named, *, group: Group, device: torch.device, advice: str = _ADVICE
) -> None:
    """Make sure that parameters and buffers have the same names, shapes, dtypes and strides on all ranks.

    Collective: every rank. Blocks until complete. Values are not compared.

    Args:
        parameters: Their names; one that is shared has several, or one of them.
        buffers: Likewise.
        group: The ranks.
        device: Where the bytes lie while they travel.
        advice: What to do about another shape or number.

    Raises:
        ModelMismatch: On every rank; names the first difference, the rank and both sides.
    """
    layouts = [_describe_layout("parameter", *entry) for entry in _unique_tensors(parameters)]
    layouts += [_describe_layout("buffer", *entry) for entry in _unique_tensors(buffers)]
    models = all_gather_different(layouts, group=group, device=device)
    if len(models) > 1:
        raise ModelMismatch(_explain_mismatch(models, advice))


def check_arguments_agree(
    arguments: str, problem: str | None = None, *, group: Group, device: AnyDevice = "cpu"
) -> None:
    """Make sure that all ranks have the same arguments, and that no rank has found a problem with them.

    Collective: every rank. Blocks until complete.

    Args:
        arguments: In words, so that the same text is compared and reported.
        problem: What is wrong on this rank, and what to do.
        group: The ranks.
        device: Where the bytes lie while they travel.

    Raises:
        ConfigurationError: On every rank: the first rank's problem or difference.
    """
    ranks = all_gather_object([problem, arguments], group=group, device=device)
    for rank, (rank_problem, rank_arguments) in enumerate(ranks):
        if rank_problem is not None:
            raise ConfigurationError(rank_problem if rank == 0 else f"Rank {rank}: {rank_problem}")
        if rank_arguments != ranks[0][1]:
            raise ConfigurationError(
                f"The arguments differ between ranks: rank 0 has {ranks[0][1]}; rank {rank} has {rank_arguments}.\n"
                "Give the same arguments on every rank."
            )


def _unique_tensors(named: Named) -> list[tuple[str, Tensor]]:
    """Return each tensor once, by the first of its names in the alphabet: layers that share it come in any order.

    A rank may have compiled what others have not.
    """
    names = grouped(named, lambda entry: id(entry[1]))
    return [(min(name.replace(f"{ORIGINAL}.", "") for name, _ in entries), entries[0][1]) for entries in names.values()]


def _describe_layout(kind: str, name: str, tensor: Tensor) -> str:
    strides = list(tensor.stride()) if tensor.layout is torch.strided else []
    frozen = " frozen" if kind == "parameter" and not tensor.requires_grad else ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {name} of {dtype}{list(tensor.shape)} with strides {strides}{frozen}"


def _explain_mismatch(models: Sequence[Sequence[str]], advice: str) -> str:
    """Return the first difference to rank 0's model on any rank, given every rank's `_describe_layout`."""
    for rank, model in enumerate(models):
        for first, other in zip_longest(models[0], model, fillvalue="nothing more"):
            if first != other:
                return f"The models differ between ranks: rank 0 has {first}, where rank {rank} has {other}.\n{advice}"
    raise AssertionError("the models are alike")


# --- a checksum over bits ---------------------------------------------------------------------------------------------

# Numbers processed at once: on CPUs as many as fit in a core's cache, on other devices enough to keep them busy.
_CHUNK_CPU, _CHUNK = 2**14, 2**22


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> int:
    """Return 64 bits that depend only on the bits of ``tensors`` and on their order. Blocks.

    Args:
        tensors: On any devices.
    """
    # The bits are read as 32-bit numbers, whatever the dtype, so zero and minus zero differ, and so do different NaNs.
    # Each number is multiplied by an odd 64-bit number that depends on its position, and the products are summed modulo
    # 2^64. A change of one number changes one product, and so the sum: an odd factor times a nonzero difference below
    # 2^32 is never 0 modulo 2^64. Swapped elements are found because their factors differ. Changes of several numbers
    # cancel each other about once in 2^32 times. The sums of chunks are weighted in the same way.
    total = 0
    for place, (device, group) in enumerate(grouped(tensors, attrgetter("device")).items()):
        on_cpu = device.type == "cpu"
        size = _CHUNK_CPU if on_cpu else _CHUNK
        factors = _factors(size, device)
        sums = []
        for chunk in (chunk for tensor in group for chunk in _as_numbers(tensor).split(size)):
            part = factors[: chunk.numel()]
            # integer dot products exist on CPUs only; elsewhere one kernel converts and multiplies
            sums.append(torch.dot(chunk.long(), part) if on_cpu else (chunk * part).sum())
        if sums:
            total += (2 * place + 1) * int((torch.stack(sums) * _mixed(len(sums), salt=1).to(device)).sum())
    return _signed(total)


# Smaller tensors are put together, as each operation takes longer than their numbers do.
_SMALL, _ROW = 2**14, 256


@torch.no_grad()
def fold(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a number on ``device`` of the bits of ``tensors``, as `checksum` does, but much sooner. Does not block.

    Swapped numbers are found if they are in different rows of `_ROW` numbers.

    Args:
        tensors: On any devices.
        device: Of the result.
    """
    kinds: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for numbers in map(_as_numbers, tensors):
        kinds.setdefault(numbers.device, ([], []))[len(numbers) <= _SMALL].append(numbers)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for place, (own, (pieces, small)) in enumerate(kinds.items()):
        sums = []
        for numbers in [*pieces, torch.cat(small)] if small else pieces:
            num_rows = len(numbers) // _ROW
            numbers = numbers.clone() if numbers.storage_offset() % 2 else numbers
            # Two at a time, without a conversion, which takes longer than the sum.
            rows = numbers[: num_rows * _ROW].view(torch.int64).view(num_rows, _ROW // 2).sum(1)
            sums.append((rows * _odd(num_rows, own)).sum() - numbers[num_rows * _ROW :].sum())
        total += (2 * place + 1) * (torch.stack(sums) * _odd(len(sums), own)).sum().to(device, non_blocking=True)
    return total


def _odd(number: int, device: torch.device) -> Tensor:
    """Return so many odd factors."""
    return torch.arange(number, device=device) * 2 + 1


def _as_numbers(tensor: Tensor) -> Tensor:
    """Return the bits of a strided ``tensor`` as a flat tensor of 32-bit numbers, in memory order."""
    if tensor.dtype is torch.float32 and tensor.is_contiguous() and not tensor.is_neg():  # most are, and take less so
        return tensor.detach().view(-1).view(torch.int32)
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = flatten_like(plain, plain).contiguous()  # that of a view may have gaps
    if flat.nbytes % 4:
        return flat.view(torch.uint8).to(torch.int32)
    if flat.storage_offset() * flat.itemsize % 4:  # not aligned to 32 bits
        flat = flat.clone()
    return flat.view(torch.int32)


@lru_cache(maxsize=8)
def _factors(size: int, device: torch.device) -> Tensor:
    return _mixed(size, salt=0).to(device)


def _mixed(size: int, salt: int) -> Tensor:
    """Return pseudo-random odd 64-bit numbers: those of splitmix64, equal on every machine."""
    numbers = torch.arange(1, size + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15) + salt
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> shift)) * _signed(factor)
    return (numbers ^ (numbers >> 31)) | 1


def _signed(number: int) -> int:
    """Return ``number`` modulo 2^64 as a signed number."""
    return (number + 2**63) % 2**64 - 2**63


# --- the same bits on every rank --------------------------------------------------------------------------------------

# healed: rank 0's overwrite the others; own: norm layers keep each rank's own; same: all are equal on all ranks.
Buffers = Literal["healed", "own", "same"]

# Tensors that should be equal on all ranks, by name, in the order in which they are searched for a difference.
Replica = Mapping[str, Tensor]


def replica_of(
    module: nn.Module, optimizer: Optimizer | None = None, *, buffers: Buffers, ignore: Collection[str] = ()
) -> Replica:
    """Return the tensors of this rank that should be equal on all ranks, without tensors that may differ.

    Args:
        module: The parameters of each layer come first, then its buffers.
        optimizer: Of these parameters.
        buffers: How buffers are synchronised, if at all.
        ignore: Names of parameters and buffers to leave out.
    """
    replica: dict[str, Any] = {}
    names: dict[Tensor, str] = {}
    for path, layer in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in own_parameters(layer).items():
            if parameter is not None and parameter not in names and prefix + name not in ignore:
                names[parameter] = f"parameter {prefix}{name}"
                replica[names[parameter]] = parameter
        # Buffers that rank 0's overwrite before each forward hold values of this rank's batch until then. Running
        # statistics are those of this rank's samples, unless the layer synchronises them.
        has_own = buffers == "own" and isinstance(layer, NormBase) and not isinstance(layer, nn.SyncBatchNorm)
        if buffers != "healed" and not has_own:
            for name, buffer in own_buffers(layer).items():
                if prefix + name not in ignore:
                    replica[f"buffer {prefix}{name}"] = buffer
    # Each rank has only a part of the state of a ZeroRedundancyOptimizer, ours or torch's.
    if optimizer is not None and all(cls.__name__ != "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        for index, parameter in enumerate(param for group in optimizer.param_groups for param in group["params"]):
            if names and parameter not in names:
                continue  # it may be this rank's own
            owner = names.get(parameter, f"the optimizer's parameter {index}")
            for name, value in optimizer.state.get(parameter, {}).items():
                replica[f"{name} of {owner}"] = value
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                replica[f"{name} of parameter group {number}"] = value
    for name, value in replica.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            replica[name] = torch.tensor(value, dtype=torch.float64)
    tensors = {name: value for name, value in replica.items() if isinstance(value, Tensor) and not is_sharded(value)}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta
    }


# The groups of ranks that agree, the largest first; among equals, the one with the lowest rank first.
Sides = tuple[tuple[int, ...], ...]


def between(sides: Sides) -> str:
    """Return the text that says which ranks differ: the smaller sides from the largest, if there is one."""
    names = [format_ranks(side) for side in sides]
    if len(sides[0]) == len(sides[1]):
        return f"between {' and '.join(names)}"
    return f"on {' and on '.join(names[1:])} from that on {names[0]}"


def refuse_difference(replica: Replica, *, group: Group, device: torch.device, now: str, since: str) -> None:
    """Make sure that all ranks hold the same bits.

    Collective: every rank. Blocks; one exchange of 8 bytes if nothing differs.

    Args:
        replica: What this rank holds, see `replica_of`.
        group: The ranks.
        device: A device whose tensors the ranks can exchange.
        now: The time of this check, in words.
        since: When the ranks were last equal, as a sentence.

    Raises:
        ReplicasDiffer: On every rank; names the first tensor that differs, the ranks on each side and the elements.
    """
    total = torch.tensor([checksum(replica.values())], device=device)
    if len({int(value) for value in all_gather(total, group=group)}) == 1:
        return
    # Only now compute a checksum of each tensor, and compare the elements of the first one that differs.
    checksums = {name: [checksum([tensor]), list(tensor.shape), str(tensor.dtype)] for name, tensor in replica.items()}
    ranks: list[dict[str, Any]] = all_gather_object(checksums, group=group, device=device)
    names = list(dict.fromkeys(name for tensors in sorted(ranks, key=len, reverse=True) for name in tensors))
    different = [name for name in names if any(tensors.get(name) != ranks[0].get(name) for tensors in ranks)]
    different = different or names  # the same tensors in another order
    first = different[0]
    sides = sides_of([str(tensors.get(first)) for tensors in ranks])
    elements = ""
    if len(sides) > 1 and len({str(tensors.get(first, [None])[1:]) for tensors in ranks}) == 1:  # of the same shape
        elements = _describe_elements(replica[first], sides, group=group, device=device) + "\n"
    raise ReplicasDiffer(
        f"The ranks do not hold the same bits any more{now}: {first} differs {between(sides)}.\n{elements}"
        f"{len(different)} of {len(names)} tensors differ{'s' * (len(different) == 1)}. {since}\n"
        "Either code changed it on some ranks only (an if on the rank; another learning rate, clipping or number of "
        "updates; a checkpoint that one rank loaded; a buffer that nobody synchronises), or a device or its memory is "
        "faulty. Resume from an earlier checkpoint.",
        tensor=first,
        sides=sides,
    )


def sides_of(values: Sequence[str]) -> Sides:
    """Return the ranks with equal values, the largest side first; among equals, the one with the lowest rank first."""
    sides = grouped(range(len(values)), values.__getitem__)
    return tuple(sorted(map(tuple, sides.values()), key=lambda side: (-len(side), side[0])))


def _describe_elements(tensor: Tensor, sides: Sides, *, group: Group, device: torch.device) -> str:
    """Return the elements of a tensor in which the second side differs from the first. Collective: every rank."""
    source_rank, other_rank = sides[0][0], sides[1][0]
    local = tensor.detach().contiguous()
    reference = local.to(device, copy=True)
    broadcast(reference, group=group, src=source_rank)
    text = describe_difference(local, reference.to(local.device), f"on rank {other_rank}", f"on rank {source_rank}")
    texts: list[str] = all_gather_object(text, group=group, device=device)
    return texts[other_rank]


def describe_difference(first: Tensor, second: Tensor, first_name: str, second_name: str) -> str:
    """Return how many elements differ in their bits, whether by a single bit, and the first one; empty if none differs.

    Args:
        first: Contiguous.
        second: Of the same shape and dtype.
        first_name: The name of ``first`` in the text.
        second_name: The name of ``second``.
    """
    bytes_of = [tensor.reshape(-1).view(torch.uint8).view(first.numel(), -1) for tensor in (first, second)]
    changed = torch.bitwise_xor(*bytes_of)
    places = changed.any(dim=1).nonzero().flatten()
    if not len(places):
        return ""
    flipped = changed[changed != 0].tolist()
    bits = ", by one bit" if len(flipped) == 1 and flipped[0].bit_count() == 1 else ""  # as a fault of memory does
    at = f" at {[int(index) for index in torch.unravel_index(places[0], first.shape)]}" if first.dim() else ""
    values = [tensor.reshape(-1)[places[0]].item() for tensor in (first, second)]
    return (
        f"{len(places)} of its {first.numel()} elements differ{'s' * (len(places) == 1)}{bits}: the first{at} is "
        f"{values[0]} {first_name} and {values[1]} {second_name}."
    )
