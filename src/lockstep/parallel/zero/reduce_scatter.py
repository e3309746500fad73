"""Buckets of `DistributedDataParallel` that are reduce-scattered: each rank gets its slice of the mean gradients."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any, cast, final

import torch
from torch.futures import Future
from typing_extensions import override

from lockstep.comm.collectives import Group, Work, all_reduce_work, reduce_scatter_slices, wait_for
from lockstep.errors import ConfigurationError
from lockstep.parallel.compile import keep_out_of_graphs
from lockstep.parallel.ddp.buckets import Bucket, BucketSet
from lockstep.parallel.ddp.comm_hooks import AllReduceMean, BucketReduction
from lockstep.parallel.ddp.reducer import Event, Reducer, live_reducers
from lockstep.parallel.zero.partition import even_end


class _Works:
    """Several collectives as one, with the methods of a future that the reducer uses."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def done(self) -> bool:
        """Return whether all are complete."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Block until all are complete."""
        while self._works:
            wait_for(self._works[0], "reduce_scatter of gradients")
            del self._works[0]


@final
class ReduceScatterMean(BucketReduction):
    """The mean over ranks, of which each rank gets its slice; tail and remainder reach all.

    [Note: what is in param.grad]
    A bucket that was reduce-scattered holds the mean in this rank's slice, and this rank's own gradients elsewhere. The
    optimizer's ``step`` takes the slice and sets ``param.grad`` to None. A backward before that would add to both, of
    which no right sum can be made, so it is refused; see `SecondBackwardCheck`.

    In the first step, whose buckets are rebuilt when it is over, all of it reaches all ranks.

    Args:
        bucket_set: The buckets of the model.
        group: The ranks that take part.
    """

    leaves_whole = False

    def __init__(self, bucket_set: BucketSet, group: Group) -> None:
        self._bucket_set, self._group = bucket_set, group
        self._first_step = AllReduceMean(group)

    @override
    def start(self, bucket: Bucket, *, alone: bool) -> Future[Any]:
        if not self._bucket_set.is_rebuilt:
            return self._first_step.start(bucket, alone=alone)
        # All slices of a reduce-scatter are equal.
        end = even_end(bucket.gradients.numel(), self._group.size())
        works = [reduce_scatter_slices(bucket.payload[:end], group=self._group, alone=alone)] if end else []
        # The remainder has fewer elements than there are ranks; the tail behind it is what every rank must know.
        works.append(all_reduce_work(bucket.payload[end:], group=self._group, alone=alone))
        pending = _Works(works)
        if alone and bucket.payload.is_cpu:
            pending.wait()
        return cast("Future[Any]", pending)

    @override
    def finish(self, bucket: Bucket, future: Future[Any]) -> None:
        future.wait()


class SecondBackwardCheck:
    """Refuses to add to gradients of which a rank has only its slice.

    It watches one parameter of each bucket that was used, just before its gradient is added to ``param.grad``: a hook
    for each parameter would cost in every backward, and at the launch of a bucket it is no longer known whether
    ``param.grad`` was reset before.

    Args:
        reducer: Whose buckets are reduce-scattered.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._bucket_set = reducer.bucket_set
        self._reduced: set[int] = set()
        self._watched: set[int] = set()
        reducer.observers.append(self)

    def reset(self) -> None:
        """Note that the gradients have been used, or thrown away."""
        self._reduced.clear()

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Take note of an event of the reducer."""
        if kind is not Event.REDUCED or bucket is None:
            return
        if not self._bucket_set.is_rebuilt:  # the first step, whose gradients all ranks have
            return
        self._reduced.add(id(bucket))
        used = [parameter for parameter in bucket.parameters if parameter.grad is not None]
        if used and self._watched.isdisjoint(map(id, used)):
            self._watched.add(id(used[0]))
            used[0].register_hook(partial(self._before_gradient, bucket, used[0]))

    @keep_out_of_graphs
    def _before_gradient(self, bucket: Bucket, parameter: torch.nn.Parameter, _gradient: torch.Tensor) -> None:
        if id(bucket) not in self._reduced or parameter.grad is None:
            return
        # A gradient outside of the bucket is one that the script has set itself, and is whole.
        offset = parameter.grad.data_ptr() - bucket.gradients.data_ptr()
        if 0 <= offset < max(bucket.gradients.nbytes, 1):
            raise ConfigurationError(
                "A backward adds to gradients that were already reduced to each rank's slice.\n"
                "Call step() or zero_grad() first; run all but the last backward of a step in no_sync(), or leave "
                "shard_gradients out."
            )


def find_reducer(parameters: Sequence[torch.nn.Parameter]) -> Reducer:
    """Return the reducer of the `DistributedDataParallel` that averages the gradients of ``parameters``.

    Raises:
        ConfigurationError: There is none, or more than one, or it cannot reduce to slices.
    """
    given = {id(parameter) for parameter in parameters}

    def find_all() -> list[Reducer]:
        return [each for each in live_reducers() if not given.isdisjoint(map(id, each.bucket_set.parameters))]

    found = find_all()
    if len(found) > 1:
        gc.collect()  # a wrapper that is no longer used may be left in a cycle, on some ranks and not on others
        found = find_all()
    trained = {id(parameter) for each in found for parameter in each.bucket_set.parameters}
    if not found:
        problem = (
            "no lockstep.DistributedDataParallel averages these parameters' gradients.\n"
            "Wrap the model before the optimizer is made, or leave shard_gradients out."
        )
    elif len(found) > 1:
        problem = (
            f"{len(found)} live lockstep.DistributedDataParallel wrappers average gradients of these parameters, and "
            "only one can leave slices.\n"
            "Delete the wrappers that are no longer used, or leave shard_gradients out."
        )
    elif missing := trained - given:
        problem = (
            f"{len(missing)} of the {len(trained)} trained parameters of the DistributedDataParallel are not in this "
            "optimizer.\nGive it all of model.parameters(), or leave shard_gradients out."
        )
    elif any(bucket.spec.sparse for bucket in found[0].bucket_set.buckets):
        problem = (
            "the model has layers with sparse gradients.\n"
            "Build them with sparse=False, or train them with an optimizer of their own."
        )
    elif not isinstance(found[0].reduction, AllReduceMean):
        problem = (
            "the DistributedDataParallel has a communication hook, or another optimizer with shards.\n"
            "Use one or the other."
        )
    else:
        return found[0]
    raise ConfigurationError(f"shard_gradients=True, but {problem}")
