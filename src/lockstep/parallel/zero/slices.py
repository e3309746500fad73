"""Gradients that are reduced to slices: each rank gets its slice of the mean."""

import gc
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.comm import collectives
from lockstep.comm.collectives import Group, Started
from lockstep.errors import ConfigurationError
from lockstep.parallel.compile import keep_out_of_graphs
from lockstep.parallel.ddp.bucket_events import Event
from lockstep.parallel.ddp.buckets import Bucket
from lockstep.parallel.ddp.comm_hooks import AllReduceMean, BucketReduction, Pending
from lockstep.parallel.ddp.reducer import Reducer, live_reducers

# Operators of torch that return a norm or divide by one, of which the overload is not named.
_NORMS = {
    *("norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "_foreach_norm", "native_norm"),
    *("frobenius_norm", "nuclear_norm", "norm_except_dim", "normalize", "renorm", "renorm_"),
}


class _SlicedGradient(Tensor):
    """A gradient of which this rank has a slice: its norm is not that of the gradient, and so torch cannot clip it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0] in _NORMS:
            raise ConfigurationError(
                "A norm of a gradient, as for clipping and lockstep verify, needs all of it, but with "
                "shard_gradients=True this rank has a slice.\nCall clip_grad_norm_() of the optimizer, which returns "
                "the norm of all (max_norm=math.inf does not clip), or leave shard_gradients out."
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@final
class ReduceScatterMean(BucketReduction):
    """The mean over ranks; each rank gets its slice of it, and all ranks get the tail.

    The tails of all buckets are reduced together at the end of backward, in one collective.

    [Note: what is in param.grad]
    A reduce-scattered bucket holds the mean in this rank's slice, and anything elsewhere. The optimizer's ``step`` uses
    the slice. A backward before that would add to both, and the result could not be corrected, so it is refused. As an
    observer this class watches one used parameter of each bucket, just before its gradient is added to ``param.grad``.
    A hook for each parameter would cost time in every backward, and when a bucket is launched it is too late to see
    whether ``param.grad`` was reset before.

    In the first step, after which the buckets are rebuilt, all ranks get the whole mean.

    From backward to ``step``, gradients are of a class that refuses norms. Other operations are allowed: the script may
    change gradients element by element, as ``clip_grad_value_`` does.

    Args:
        reducer: The reducer of the buckets.
        group: The ranks that take part.
        optimizer: That which needs no more than its slices.

    Attributes:
        optimizer: A weak reference to it.
    """

    leaves_whole = False
    finishes_alone = False

    def __init__(self, reducer: Reducer, group: Group, optimizer: Optimizer) -> None:
        self._bucket_set, self._group = reducer.bucket_set, group
        self.optimizer = weakref.ref(optimizer)
        self._whole = AllReduceMean(group)
        self.takes_pieces = self._whole.takes_pieces
        # By position of a bucket, from `start` to `finish`: its tail, which is not reduced yet.
        self._tails: dict[int, tuple[Tensor, Started]] = {}
        self._reduced: set[int] = set()
        self._hooked: set[int] = set()
        self._refusing: list[Tensor] = []

    @override
    def start(self, bucket: Bucket, *, alone: bool) -> Pending:
        if not self._bucket_set.is_rebuilt:
            return self._whole.start(bucket, alone=alone)
        slices, tail = bucket.payload[: bucket.tail_start], bucket.payload[bucket.tail_start :]
        pieces = bucket.take_pieces() if self.takes_pieces else None
        work = collectives.reduce_scatter_slices(slices, group=self._group, alone=alone, pieces=pieces)
        pending = Started(work, slices, self._group)
        self._tails[bucket.position] = tail, pending
        return pending

    @override
    def finish(self, bucket: Bucket, future: Pending) -> None:
        if self._tails:  # all buckets are launched
            works = collectives.all_reduce_together([tail for tail, _ in self._tails.values()], group=self._group)
            for _, pending in self._tails.values():
                pending.works += works
            self._tails = {}
        collectives.wait_for(future, "reduce_scatter of gradients")

    def reset(self) -> None:
        """Record that the gradients have been used or discarded."""
        self._reduced.clear()
        self.allow_norms()

    def refuse_norms(self) -> None:
        """Refuse norms of the gradients until `allow_norms`."""
        self._refusing = [parameter.grad for parameter in self._bucket_set.parameters if type(parameter.grad) is Tensor]
        for gradient in self._refusing:
            gradient.__class__ = _SlicedGradient

    def allow_norms(self) -> None:
        """Give gradients torch's class again, with which operations on them take less time."""
        for gradient in self._refusing:
            gradient.__class__ = Tensor
        self._refusing = []

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Handle an event of the reducer."""
        if kind is Event.BACKWARD:
            self.allow_norms()
        elif kind is Event.CLOSED:
            self.refuse_norms()
        # After the first step all ranks have its gradients.
        elif kind is Event.REDUCED and bucket is not None and self._bucket_set.is_rebuilt:
            self._reduced.add(id(bucket))
            used = [parameter for parameter in bucket.parameters if parameter.grad is not None]
            if used and self._hooked.isdisjoint(map(id, used)):
                self._hooked.add(id(used[0]))
                used[0].register_hook(partial(self._before_gradient, bucket, used[0]))

    @keep_out_of_graphs
    def _before_gradient(self, bucket: Bucket, parameter: nn.Parameter, _gradient: Tensor) -> None:
        if id(bucket) not in self._reduced or parameter.grad is None:
            return
        # A gradient outside of the bucket was set by the script, and is whole.
        offset = parameter.grad.data_ptr() - bucket.gradients.data_ptr()
        if 0 <= offset < max(bucket.gradients.nbytes, 1):
            raise ConfigurationError(
                "A backward adds to gradients that were already reduced to each rank's slice.\n"
                "Call step() or zero_grad() first; run all but the last forward and backward of a step in no_sync(), "
                "or leave shard_gradients out."
            )


def find_reducer(parameters: Sequence[nn.Parameter]) -> Reducer:
    """Return the reducer of the `DistributedDataParallel` that averages the gradients of ``parameters``.

    Raises:
        ConfigurationError: There is none, or more than one, or it cannot reduce to slices.
    """
    ids = {id(parameter) for parameter in parameters}

    def find_all() -> list[Reducer]:
        return [reducer for reducer in live_reducers() if not ids.isdisjoint(map(id, reducer.bucket_set.parameters))]

    reducers = find_all()
    if len(reducers) > 1 or any(isinstance(reducer.reduction, ReduceScatterMean) for reducer in reducers):
        gc.collect()  # an unused wrapper or optimizer may still exist in a reference cycle, on some ranks only
        reducers = find_all()
    trained = {id(parameter) for reducer in reducers for parameter in reducer.bucket_set.parameters}
    if not reducers:
        problem = "no lockstep.DistributedDataParallel averages these parameters' gradients"
        advice = "Wrap the model before the optimizer is made"
    elif len(reducers) > 1:
        problem = f"{len(reducers)} live lockstep.DistributedDataParallel wrappers average these parameters' gradients"
        advice = "Only one can use shard_gradients: delete those that are no longer used"
    elif missing := trained - ids:
        problem = f"{len(missing)} of the {len(trained)} trained parameters of the wrapper are not in this optimizer"
        advice = "Give it all of model.parameters()"
    elif any(bucket.spec.sparse for bucket in reducers[0].bucket_set.buckets):
        problem = "the model has layers with sparse gradients"
        advice = "Build them with sparse=False, train them with an optimizer of their own"
    elif not _is_free(reducers[0]):
        problem = "the wrapper has compression, a communication hook, or another optimizer with shards"
        advice = "Use one or the other"
    else:
        return reducers[0]
    raise ConfigurationError(f"shard_gradients=True, but {problem}.\n{advice}, or leave shard_gradients out.")


def _is_free(reducer: Reducer) -> bool:
    """Return whether an optimizer can use slices: none does any more, and nothing else changes the reduction."""
    reduction = reducer.reduction
    is_left = isinstance(reduction, ReduceScatterMean) and reduction.optimizer() is None
    return is_left or isinstance(reduction, AllReduceMean)
