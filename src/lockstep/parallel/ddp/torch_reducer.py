"""The part of torch's C++ ``Reducer`` that programs call through ``ddp.reducer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.futures import Future

from lockstep.comm.collectives import Group, all_reduce_async
from lockstep.parallel.ddp.grad_bucket import GradBucket
from lockstep.parallel.ddp.reducer import Reducer


class TorchReducer:
    """Answers to torch's private names with our reducer. Used by Accelerate, Lightning and torch's own hooks."""

    def __init__(self, reducer: Reducer, group: Group) -> None:
        self._reducer = reducer
        self._group = group

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Make the next backward a synchronised step."""
        self._reducer.prepare_for_backward(outputs)

    def _rebuild_buckets(self) -> bool:
        return False  # ours are rebuilt at the end of the first synchronised backward

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Any]:
        return all_reduce_async(bucket.buffer(), group=self._group)

    def _install_post_backward_futures(self, futures: Sequence[Future[Any]]) -> None:
        self._reducer.post_backward += futures

    def _remove_autograd_hooks(self) -> None:
        self._reducer.remove_hooks()

    def _set_optimizer_in_backward(self) -> None:
        """Do nothing: gradients that a hook frees during backward are not put back."""

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if a synchronised backward did not run to its end."""
        self._reducer.check_finished()
