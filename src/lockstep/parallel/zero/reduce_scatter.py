"""Buckets of `DistributedDataParallel` that are reduced to each rank's slice only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast, final

import torch
from torch.futures import Future
from typing_extensions import override

from lockstep.comm.collectives import Group, Waitable, all_reduce_work, reduce_scatter_slices, wait_for
from lockstep.errors import ConfigurationError
from lockstep.parallel.compile import keep_out_of_graphs
from lockstep.parallel.ddp.buckets import Bucket, Buckets
from lockstep.parallel.ddp.comm_hooks import AllReduceMean, BucketReduction
from lockstep.parallel.ddp.reducer import Reducer, live_reducers
from lockstep.parallel.zero.partition import even_end


class _Both:
    """Collectives as one, with the methods of a future that a transport's caller uses."""

    def __init__(self, works: Sequence[Waitable]) -> None:
        self._works = works

    def done(self) -> bool:
        """Tell whether all are complete."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Block until all are complete."""
        for work in self._works:
            wait_for(work)


@final
class ReduceScatterTransport(BucketReduction):
    """The mean over ranks, of which each rank gets its slice; tail and remainder reach all.

    In the first step, whose buckets are built anew when it is over, all of it reaches all ranks.

    Args:
        row: The buckets.
        group: The ranks that take part.
    """

    takes_divided = True
    counts_in_tails = True
    leaves_whole = False

    def __init__(self, row: Buckets, group: Group) -> None:
        self._row, self._group = row, group
        self._first_step = AllReduceMean(group)

    @override
    def start(self, bucket: Bucket, position: int, *, is_last: bool) -> Future[Any]:
        if not self._row.is_rebuilt:
            return self._first_step.start(bucket, position, is_last=is_last)
        return cast("Future[Any]", _Both(self._works(bucket, alone=False)))

    @override
    def start_alone(self, bucket: Bucket, position: int) -> Future[Any]:
        if not self._row.is_rebuilt or not bucket.payload.is_cpu:
            return self.start(bucket, position, is_last=True)
        for work in self._works(bucket, alone=True):
            wait_for(work)
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def _works(self, bucket: Bucket, *, alone: bool) -> list[Waitable]:
        """Start what a bucket needs."""
        end = even_end(bucket.gradients.numel(), self._group.size())
        rest = bucket.payload[end:]
        if not end:
            return [all_reduce_work(rest, group=self._group, alone=alone)]
        scattered = reduce_scatter_slices(bucket.payload[:end], group=self._group, alone=alone)
        return [scattered, all_reduce_work(rest, group=self._group, alone=alone)]

    @override
    def finish(self, bucket: Bucket, future: Future[Any]) -> None:
        future.wait()

    @override
    def count(self, used: Sequence[int], ballot: Sequence[float], device: torch.device) -> None:
        return None


class SecondBackward:
    """Refuses to add to gradients of which a rank has only its slice.

    Seen on one parameter of each bucket that is used, as its gradient is added to where the bucket holds it.

    Args:
        reducer: Whose buckets are reduced to slices.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._row = reducer.row
        self._reduced: dict[int, Bucket] = {}
        self._watched: dict[int, torch.nn.Parameter] = {}
        reducer.on_reduced.append(self._on_reduced)

    def allow(self) -> None:
        """Take notice that the gradients have been used, or thrown away."""
        self._reduced.clear()

    def _on_reduced(self, bucket: Bucket) -> None:
        if not self._row.is_rebuilt:  # the first step, whose gradients all ranks have
            return
        self._reduced[id(bucket)] = bucket
        used = [parameter for parameter in bucket.parameters if parameter.grad is not None]
        if used and not any(id(parameter) in self._watched for parameter in used):
            self._watched[id(used[0])] = used[0]
            used[0].register_hook(partial(self._before_gradient, bucket, used[0]))

    @keep_out_of_graphs
    def _before_gradient(self, bucket: Bucket, parameter: torch.nn.Parameter, _gradient: torch.Tensor) -> None:
        if id(bucket) not in self._reduced or parameter.grad is None:
            return
        offset = parameter.grad.data_ptr() - bucket.gradients.data_ptr()
        if 0 <= offset < max(bucket.gradients.nbytes, 1):
            raise ConfigurationError(
                "A backward adds to gradients that were already reduced to each rank's slice.\n"
                "Call step() or zero_grad() first; run all but the last backward of a step in no_sync(), or leave "
                "shard_gradients out."
            )


def find_reducer(parameters: Sequence[torch.nn.Parameter], group: Group) -> Reducer:
    """Return the reducer of the `DistributedDataParallel` that averages the gradients of ``parameters``.

    Raises:
        ConfigurationError: There is none, or it cannot reduce to slices.
    """
    given = {id(parameter) for parameter in parameters}
    for reducer in live_reducers:
        trained = {id(parameter) for parameter in reducer.row.parameters}
        if not trained & given:
            continue
        if missing := trained - given:
            raise ConfigurationError(
                f"shard_gradients=True, but {len(missing)} of the {len(trained)} trained parameters of the "
                "DistributedDataParallel are not in this optimizer.\n"
                "Give it all of model.parameters(), or leave shard_gradients out."
            )
        if any(bucket.spec.sparse for bucket in reducer.row.buckets):
            raise ConfigurationError(
                "shard_gradients=True, but the model has layers with sparse gradients.\n"
                "Build them with sparse=False, or train them with an optimizer of their own."
            )
        if not isinstance(reducer.departures.transport, AllReduceMean):
            raise ConfigurationError(
                "shard_gradients=True, but the DistributedDataParallel has a communication hook, or another optimizer "
                "with shards.\nUse one or the other."
            )
        return reducer
    raise ConfigurationError(
        "shard_gradients=True, but no lockstep.DistributedDataParallel averages these parameters' gradients.\n"
        "Wrap the model before the optimizer is made, or leave shard_gradients out."
    )
