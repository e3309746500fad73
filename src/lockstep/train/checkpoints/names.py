"""Models without what is wrapped around them, and names of their state without what wrappers put into them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.parallel.data_parallel import DataParallel
from lockstep.parallel.distributed import DistributedDataParallel

_WRAPPERS = (DataParallel, DistributedDataParallel, nn.DataParallel, nn.parallel.DistributedDataParallel)
_COMPILED = "_orig_mod"
"""Where ``torch.compile`` keeps the module that it compiles."""


def bare(model: nn.Module) -> nn.Module:
    """Return the model in data-parallel wrappers and in what ``torch.compile`` returns."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # imported by whoever compiles
    while True:
        if isinstance(model, _WRAPPERS):
            model = model.module
        elif dynamo is not None and isinstance(model, dynamo.OptimizedModule):
            model = model.get_submodule(_COMPILED)
        else:
            return model


def plain_name(name: str) -> str:
    """Return a name of a model's state as if no part of the model were compiled."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state under the names that it has where nothing is compiled."""
    return {plain_name(name): value for name, value in state.items()}


def names_as_in(model_state: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` under the names that ``model_state`` has, whatever is compiled in either of them."""
    own = {plain_name(name): name for name in model_state}
    return {own.get(plain_name(name), name): value for name, value in state.items()}
