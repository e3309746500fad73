"""Do all ranks hold the same model? Checked once, when it is wrapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.collectives import Group, all_gather, all_gather_object
from lockstep.errors import ModelMismatch

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
    mine = [_describe("parameter", name, tensor) for name, tensor in parameters]
    mine += [_describe("buffer", name, tensor) for name, tensor in buffers]
    layout = json.dumps([[kind, *rest] for kind, _, *rest in mine])
    digest = int.from_bytes(hashlib.sha256(layout.encode()).digest()[:7], "big")
    digests = [int(value) for value in all_gather(torch.tensor([digest], device=device), group=group)]
    if len(set(digests)) > 1:  # the same verdict on every rank, so that all take part in what follows
        raise ModelMismatch(explain_mismatch(all_gather_object(mine, group=group, device=device)))


def _describe(kind: str, name: str, tensor: Tensor) -> list[Any]:
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
