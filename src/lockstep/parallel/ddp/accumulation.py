"""Several micro-batches in one step, and what each of them counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lockstep.parallel.ddp.ballot import check_weight
from lockstep.parallel.ddp.join import UnevenInputs


class Accumulation(UnevenInputs):
    """The part of ``DistributedDataParallel`` that makes one gradient of many micro-batches."""

    require_backward_grad_sync: bool

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank alone: forwards inside the context are not synchronised.

        The first backward of a forward outside the context averages all that was accumulated.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def weight(self, n: float | Tensor) -> None:
        """Say what the next backward counts: how many samples or tokens its loss is the mean of.

        Call it once per micro-batch, on every rank, at any time before its backward. The gradients of the step are then
        the sum of weight times gradient over all ranks and all micro-batches since the last synchronised backward,
        divided by the sum of the weights: those of one process on the whole global batch. Losses stay plain means;
        do not divide them by the number of micro-batches. Without it, gradients are averaged over ranks.

        A micro-batch of weight 0 counts for nothing, even if its gradients are NaN. If all weights of a step are 0,
        its gradients are 0. Blocks if ``n`` is a tensor that an accelerator still computes.

        Args:
            n: A finite number, 0 or more, or a tensor with no dimensions.

        Raises:
            ConfigurationError: ``n`` is nothing of that kind. From ``backward``, on every rank: some ranks gave a
                weight and others did not; names the latter.
        """
        self._reducer.weigh(check_weight(n))
