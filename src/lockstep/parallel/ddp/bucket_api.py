"""What a script can ask of the gradients of whole buckets: norms, clipping, finite or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.parallel.ddp.buckets import Bucket
from lockstep.parallel.ddp.reducer import Reducer
from lockstep.parallel.flat import combine_norms, flat_norm, list_norms, multiply_


class Pieces(NamedTuple):
    """All gradients: the buckets whose parameters' gradients all lie in them, and the other gradients one by one."""

    buckets: list[Bucket]
    others: list[Tensor]


class FlatGradients:
    """What lies in ``param.grad`` of all ``parameters``, in as few pieces as can be.

    A bucket counts as one piece if each of its parameters has its gradient there. Where one has none, or one of its
    own, those of that bucket are taken one by one.

    Args:
        reducer: Has the buckets.
        parameters: Of the model; those that are in no bucket, too.
    """

    def __init__(self, reducer: Reducer, parameters: Iterable[nn.Parameter]) -> None:
        self._reducer = reducer
        bucketed = {id(parameter) for parameter in reducer.row.parameters}
        self._outside = [parameter for parameter in parameters if id(parameter) not in bucketed]
        self._norms: dict[Bucket, Tensor] = {}

    def compute_norms_early(self) -> None:
        """Compute the Euclidean norm of each bucket when it is reduced, while others travel; for the next `norm`.

        Only for a loop in which nothing changes gradients in between.
        """
        if self._note_reduced not in self._reducer.on_reduced:
            self._reducer.on_reduced.append(self._note_reduced)

    @torch.no_grad()
    def _note_reduced(self, bucket: Bucket) -> None:
        if not bucket.spec.sparse:
            self._norms[bucket] = flat_norm(bucket.gradients)

    def pieces(self) -> Pieces:
        """Return the gradients as they are now."""
        found = Pieces([], [parameter.grad for parameter in self._outside if parameter.grad is not None])
        for bucket in self._reducer.row.buckets:
            if bucket.holds_all:
                found.buckets.append(bucket)
            else:
                grads = [parameter.grad for parameter in bucket.parameters]
                found.others.extend(grad for grad in grads if grad is not None)
        return found

    @torch.no_grad()
    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients together, a 0-dimensional tensor; does not block."""
        pieces = self.pieces()
        known, self._norms = self._norms if norm_type == 2.0 else {}, {}  # they hold once: gradients may be changed
        norms = [
            known[bucket] if bucket in known else flat_norm(bucket.gradients, norm_type) for bucket in pieces.buckets
        ]
        return combine_norms(norms + list_norms(pieces.others, norm_type), norm_type)

    def tensors(self) -> list[Tensor]:
        """Return tensors that together hold all gradients."""
        pieces = self.pieces()
        return [bucket.gradients for bucket in pieces.buckets] + pieces.others

    def reduced(self) -> list[Tensor]:
        """Return tensors that together hold all gradients that are the same on every rank: those of the buckets."""
        pieces = self.pieces()
        num_outside = sum(parameter.grad is not None for parameter in self._outside)  # which come first
        return [bucket.gradients for bucket in pieces.buckets] + pieces.others[num_outside:]

    def multiply_(self, factor: Tensor) -> None:
        """Multiply all gradients in place by a 0-dimensional tensor; not at all by one that is known to be 1."""
        multiply_(self.tensors(), factor)
