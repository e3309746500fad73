"""A bucket that holds one sparse gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from lockstep.parallel.ddp.bucket import Absent, Bucket, Share
from lockstep.parallel.ddp.bucket_plan import BucketSpec


@final
class SparseBucket(Bucket):
    """The gradient of one embedding with ``sparse=True``; it has no fixed size and so neither buffer nor tail."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        super().__init__(spec, parameters, names)
        self._gradient = self._empty()

    def _empty(self) -> Tensor:
        shape = self.parameters[0].shape
        make = torch.ops.aten._sparse_coo_tensor_with_dims  # public constructors warn about invariants in torch 2.11
        empty: Tensor = make(
            1, len(shape) - 1, shape, dtype=self.spec.dtype, layout=torch.sparse_coo, device=self.spec.device
        )
        return empty

    @property
    @override
    def gradients(self) -> Tensor:
        return self._gradient

    @gradients.setter
    def gradients(self, value: Tensor) -> None:
        self._gradient = value

    @property
    @override
    def payload(self) -> Tensor:
        return self._gradient

    @property
    @override
    def ballot(self) -> None:
        return None

    @override
    def gradient_views(self) -> list[Tensor]:
        return [self._gradient]

    @override
    def gather(self, used: Sequence[int], share: Share) -> None:
        gradient = self.parameters[0].grad
        if gradient is None:
            self._gradient = self._empty()
        else:
            factor = share.factor if used[0] else share.unused_factor
            self._gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).detach().coalesce() * factor
        self.absent = [] if gradient is not None and used[0] else [Absent(0, gradient)]

    @override
    def scale(self, factor: float) -> None:
        self._gradient = self._gradient * factor

    @override
    def settle(self, num_users: Sequence[int] | None) -> None:
        reduced, self._gradient = self._gradient.coalesce(), self._empty()
        if not self.absent or reduced._nnz() > 0:
            self.parameters[0].grad = reduced

    @override
    def adopt(self) -> None:
        """Do nothing: the parameter's gradient is a tensor of its own."""

    @override
    def arrived(self, *, even_in_place: bool) -> list[bool]:
        return [self.parameters[0].grad is not None]

    @property
    @override
    def holds_all(self) -> bool:
        return False

    @override
    def seal(self) -> None:
        """Do nothing: `arrived` does not remember."""
