"""What a communication hook sees of a bucket: the methods of torch's ``GradBucket``."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.parallel.ddp.bucket import Bucket
from lockstep.parallel.ddp.dense_bucket import cut_views


class GradBucket:
    """One bucket of gradients, as handed to a hook registered with ``register_comm_hook``.

    Source: the interface is that of ``torch.distributed.GradBucket``, so that torch's stock hooks work unchanged.
    """

    def __init__(self, bucket: Bucket, index: int, *, is_last: bool) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._replacement: Tensor | None = None

    def index(self) -> int:
        """Return the position of the bucket in the order of launches, from 0."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the gradients of this rank, not yet divided by anything: 1-D, or the sparse gradient."""
        return self._bucket.gradients if self._replacement is None else self._replacement

    def set_buffer(self, buffer: Tensor) -> None:
        """Let :meth:`buffer` return ``buffer`` from now on, which may be of another dtype (compressed)."""
        self._replacement = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views into :meth:`buffer`, in the order of :meth:`parameters`."""
        if self._replacement is None:
            return self._bucket.gradient_views()
        if self._bucket.spec.sparse:
            return [self._replacement]
        return cut_views(self._replacement, self._bucket.parameters)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients the bucket holds."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Tell whether this is the last bucket of the step."""
        return self._is_last
