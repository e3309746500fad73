"""Sum sparse tensors: gather every rank's indices and values, and add them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.shm import kinds
from lockstep.comm.shm.calls import Call, Calls
from lockstep.errors import ConfigurationError


def reduce_sparse(calls: Calls, call: Call, tensors: Sequence[Tensor], op: Any) -> None:
    """Replace each sparse COO tensor by the sum over all ranks, in the thread whose turn it is. Collective: every rank.

    Raises:
        ConfigurationError: The tensors are of another layout, or shall not be summed.
    """
    for tensor in tensors:
        if tensor.layout != torch.sparse_coo or kinds.REDUCTIONS[kinds.reduction_of(op, tensor.dtype)] != "sum":
            raise ConfigurationError(
                f"The backend shm can sum sparse COO tensors, but not reduce {tensor.layout} with {op}."
            )
        mine = tensor.detach().coalesce()
        counts = _gather(calls, call, torch.tensor([mine._nnz()]), [1] * calls.member.size)
        lengths = [int(count) for count in counts]
        indices = _gather(calls, call, mine._indices().t().contiguous(), lengths)
        values = _gather(calls, call, mine._values().contiguous(), lengths)
        total = torch.sparse_coo_tensor(torch.cat(indices).t(), torch.cat(values), tensor.shape, check_invariants=False)
        tensor.copy_(total.coalesce())


def _gather(calls: Calls, call: Call, mine: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    outputs = [mine.new_empty((length, *mine.shape[1:])) for length in lengths]
    calls.exchange_now(call, kinds.ALL_GATHER, [mine] * len(lengths), outputs, same=True)
    return outputs
