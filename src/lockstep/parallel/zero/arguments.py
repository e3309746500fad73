"""What callers may give as parameters, and whether all ranks gave the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.collectives import Group, all_gather_object
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.agreement import check_models_agree


def listed(params: Any) -> list[Any]:
    """Return ``params`` as a list of tensors, named tensors or param groups.

    Raises:
        TypeError: It is something else.
        ValueError: It is empty.
    """
    if isinstance(params, Tensor):
        raise TypeError(
            f"`params` argument should be an iterable of Tensors, but got {torch.typename(params)}.\n"
            "Give model.parameters()."
        )
    try:
        given = list(params)
    except TypeError as error:
        raise TypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got {torch.typename(params)}.\n"
            "Give model.parameters(), or a list of param groups."
        ) from error
    if not given:
        raise ValueError("ZeroRedundancyOptimizer got an empty parameter list.\nGive model.parameters().")
    for kind in (Tensor, dict, tuple):
        if all(isinstance(each, kind) for each in given):
            break
    else:
        raise TypeError("`params` argument should be an iterable of Tensors or dicts.\nGive model.parameters().")
    for each in given:
        if isinstance(each, dict) and "params" not in each:
            raise ValueError("A param group has no 'params' key.\nGive each group as {'params': [...], 'lr': ...}.")
    return given


def check_dense(parameters: Sequence[Tensor]) -> None:
    """Check that all parameters can lie in flat memory.

    Raises:
        ValueError: One is sparse.
    """
    for index, parameter in enumerate(parameters):
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"Parameter {index} is sparse, which ZeroRedundancyOptimizer cannot divide.\n"
                "Give it to an optimizer of its own."
            )


def check_ranks_agree(
    parameters: Sequence[Tensor], groups: Sequence[int], how: str, *, group: Group, device: torch.device
) -> None:
    """Check that all ranks divide the same parameters in the same way. Collective: every rank. Blocks.

    Args:
        parameters: By index.
        groups: By index, the param group.
        how: In words, what else must be the same.
        group: The ranks that take part.
        device: Where tensors lie that this group can send.

    Raises:
        ModelMismatch: On every rank: parameters differ; names the first.
        ConfigurationError: On every rank: param groups or arguments differ.
    """
    check_models_agree(
        [(f"{index} of the optimizer", each) for index, each in enumerate(parameters)], (), group=group, device=device
    )
    described = (
        f"{how}, param groups of {', '.join(str(groups.count(each)) for each in sorted(set(groups)))} parameters"
    )
    everybody: list[str] = all_gather_object(described, group=group, device=device)
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            raise ConfigurationError(
                f"The optimizers differ between ranks: rank 0 has {everybody[0]}; rank {rank} has {theirs}.\n"
                "Make the optimizer on every rank with the same arguments."
            )
