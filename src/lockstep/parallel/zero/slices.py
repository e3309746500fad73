"""Gradients that are reduced to each rank's slice, and what becomes of those that the script reads."""

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.comm import collectives
from lockstep.comm.collectives import Group, Work
from lockstep.comm.network import wait_for_call
from lockstep.errors import ConfigurationError
from lockstep.parallel.compile import has_compiled, keep_out_of_graphs
from lockstep.parallel.ddp.bucket_events import Event
from lockstep.parallel.ddp.buckets import Bucket
from lockstep.parallel.ddp.comm_hooks import AllReduceMean, BucketReduction
from lockstep.parallel.ddp.reducer import Reducer, live_reducers
from lockstep.parallel.flat import gradient_of


class Mode(Enum):
    """Whether gradients are reduced to slices, see [Note: who reads gradients]."""

    ALWAYS = "always"  # shard_gradients=True: the script knows, and reads no other part
    LOOKING = "looking"  # whole gradients, in the first steps: does the script read them?
    SLICES = "slices"  # it did not on any rank; if it does now, they are made whole first
    WHOLE = "whole"  # it does


_NUM_LOOKS = 3

# Reads of these functions only find out whether there is something to reset.
_RESETS = {nn.Module.zero_grad.__code__, Optimizer.zero_grad.__code__}

_HINT = (
    "lockstep: ZeroRedundancyOptimizer sends whole gradients, half as many bytes again as it needs: the script reads\n"
    "gradients between backward and zero_grad(). Clip with the optimizer's clip_grad_norm_(), and pass "
    "shard_gradients=True,\nor pass shard_gradients=False, which ends this message."
)

_GRAD: Any = Tensor.grad  # torch's own attribute

# By id of a watched parameter: called before its gradient is read.
_readers: dict[int, Callable[[], None]] = {}


def _read_gradient(parameter: Tensor) -> Tensor | None:
    on_read, frame, gradient = _readers.get(id(parameter)), inspect.currentframe(), gradient_of(parameter)
    caller = frame and frame.f_back
    if on_read is None:  # a copy of a watched parameter
        parameter.__class__ = nn.Parameter
    elif gradient is not None and caller and caller.f_code not in _RESETS:
        on_read()
    return gradient


def quietly_read(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of those that have one; this does not count as a read by the script."""
    return [gradient for gradient in map(gradient_of, parameters) if gradient is not None]


class _WatchedParameter(nn.Parameter):
    """A parameter whose gradient somebody may read, in Python; autograd itself does not call this."""

    grad = property(_read_gradient, _GRAD.__set__, _GRAD.__delete__)


class _Works:
    """Several collectives as one, with the methods of a future that the reducer uses."""

    def __init__(self, works: list[Work]) -> None:
        self.works = works

    def done(self) -> bool:
        """Return whether all are complete."""
        return all(work.is_completed() for work in self.works)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` when the last of them is complete, which was started after the others."""
        self.works[-1].get_future().add_done_callback(callback)

    def wait(self) -> None:
        """Block until all are complete (on CUDA: the current stream waits)."""
        for work in self.works:
            collectives.wait_for(work, "reduce_scatter of gradients")


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

    [Note: who reads gradients]
    Scripts clip, log or unscale gradients between backward and ``step``, or log them after it. Unless the script has
    asked for slices, what it reads is right, or an error. From the end of backward until the next one, or until
    gradients are zeroed, parameters have a class that reports that ``grad`` is read. In the first steps, gradients are
    whole. If no rank has read any in these, the ranks agree to reduce to slices from then on. A read then makes the
    gradients whole: an all-gather, for which the other ranks may not be there yet. So each rank begins ``step`` with a
    small all-reduce: whether somebody wants the gather. A rank that reads calls the same all-reduce and waits for the
    others to get to their ``step``, or to read, too. After ``step``, nobody would answer, so a read raises an error. If
    gradients were made whole in two steps running, they stay whole.

    Args:
        reducer: The reducer of the buckets.
        group: The ranks that take part.
        mode: Whether the script has asked for slices.
        optimizer: That which needs no more than its slices.

    Attributes:
        optimizer: A weak reference to it.
    """

    finishes_alone = False

    def __init__(self, reducer: Reducer, group: Group, mode: Mode, optimizer: Optimizer) -> None:
        self._bucket_set, self._group, self.mode = reducer.bucket_set, group, mode
        self.optimizer = weakref.ref(optimizer)
        self.leaves_whole = mode is not Mode.ALWAYS
        self._whole = AllReduceMean(group)
        self.takes_pieces = self._whole.takes_pieces
        # By position of a bucket, from `start` to `finish`: its tail, which is not reduced yet.
        self._tails: dict[int, tuple[Tensor, _Works]] = {}
        self._reduced: set[int] = set()
        self._hooked: set[int] = set()
        self._cpu_group: Group | None = None
        self._num_looks = self._num_gathers = 0  # steps so far; steps running in which gradients were made whole
        self._was_read = self._was_gathered = self._is_used = False  # in LOOKING so far; in this step
        self._is_sliced = False  # whether gradients are slices now

    @override
    def start(self, bucket: Bucket, *, alone: bool) -> Future[Any]:
        if not self._bucket_set.is_rebuilt or self.mode in (Mode.LOOKING, Mode.WHOLE):
            return self._whole.start(bucket, alone=alone)
        slices, tail = bucket.payload[: bucket.tail_start], bucket.payload[bucket.tail_start :]
        pieces = bucket.take_pieces() if self.takes_pieces else None
        pending = _Works([collectives.reduce_scatter_slices(slices, group=self._group, alone=alone, pieces=pieces)])
        self._tails[bucket.position] = tail, pending
        return cast("Future[Any]", pending)

    @override
    def finish(self, bucket: Bucket, future: Future[Any]) -> None:
        if self._tails:  # all buckets are launched
            works = collectives.all_reduce_together([tail for tail, _ in self._tails.values()], group=self._group)
            for _, pending in self._tails.values():
                pending.works += works
            self._tails = {}
        wait_for_call(future)

    def reset(self) -> None:
        """Record that the gradients have been used or discarded."""
        self._reduced.clear()
        self._unwatch()

    def release(self, reducer: Reducer) -> None:
        """Let ``reducer`` reduce whole gradients again."""
        self.reset()
        reducer.observers.remove(self)
        reducer.set_reduction(self._whole)

    def release_whole(self, reducer: Reducer) -> None:
        """Do the same with the gradients of a step that are slices. Collective: every rank.

        Raises:
            ConfigurationError: The script has asked for slices.
        """
        if self.mode is Mode.ALWAYS:
            raise ConfigurationError(
                "Parameters are trained now that were frozen before and are not in this ZeroRedundancyOptimizer, whose "
                "gradients are in slices.\nGive it all of model.parameters() when it is made, or call "
                "add_param_group() before the next forward."
            )
        if self._is_sliced:
            self._gather()
        self.release(reducer)

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Handle an event of the reducer."""
        if kind is Event.BACKWARD:
            self._unwatch()
        elif kind is Event.CLOSED:
            self._is_sliced, self._is_used = self.mode is Mode.SLICES, False
            self._watch()
        # After the first step all ranks have its gradients.
        elif kind is Event.REDUCED and bucket is not None and self._bucket_set.is_rebuilt:
            self._reduced.add(id(bucket))
            used = [parameter for parameter in bucket.parameters if parameter.grad is not None]
            if used and self._hooked.isdisjoint(map(id, used)):
                self._hooked.add(id(used[0]))
                used[0].register_hook(partial(self._before_gradient, bucket, used[0]))

    @keep_out_of_graphs
    def _before_gradient(self, bucket: Bucket, parameter: nn.Parameter, _gradient: Tensor) -> None:
        self._unwatch()
        if id(bucket) not in self._reduced or parameter.grad is None or self.mode is Mode.WHOLE:
            return
        # A gradient outside of the bucket was set by the script, and is whole.
        offset = parameter.grad.data_ptr() - bucket.gradients.data_ptr()
        if not 0 <= offset < max(bucket.gradients.nbytes, 1):
            return
        if self.mode is Mode.LOOKING:
            self._was_read = True
        elif self._is_sliced or self.mode is Mode.ALWAYS:
            raise ConfigurationError(
                "A backward adds to gradients that were already reduced to each rank's slice.\n"
                "Call step() or zero_grad() first; run all but the last backward of a step in no_sync(), or "
                f"{'leave shard_gradients out' if self.mode is Mode.ALWAYS else 'pass shard_gradients=False'}."
            )

    # --- reads by the script

    def prepare_step(self) -> None:
        """Let the optimizer read the gradients. Collective in the last of the first steps, and with slices."""
        self._unwatch()
        if self.mode is Mode.LOOKING:
            self._num_looks += 1
            if self._num_looks == _NUM_LOOKS:
                self._set_mode(Mode.WHOLE if self._agree(self._was_read) else Mode.SLICES)
        elif self.mode is Mode.SLICES:
            while self._agree(False):
                self._gather()
            self._num_gathers = self._num_gathers + 1 if self._was_gathered else 0
            self._was_gathered = False
            if self._num_gathers > 1:
                self._set_mode(Mode.WHOLE)

    def end_use(self) -> None:
        """Record that the optimizer has what it needs: from now on, no other rank would answer to a read."""
        self._is_used = True
        self._watch()

    def _watch(self) -> None:
        if self.mode is Mode.LOOKING and has_compiled():  # compiled code would notice the other class
            self._was_read = True
        if self._is_sliced or (self.mode is Mode.LOOKING and not self._was_read):
            for parameter in self._bucket_set.parameters:
                parameter.__class__ = _WatchedParameter
                _readers[id(parameter)] = self._on_read

    def _unwatch(self) -> None:
        for parameter in self._bucket_set.parameters:
            if _readers.pop(id(parameter), None) is not None:
                parameter.__class__ = nn.Parameter

    def _on_read(self) -> None:
        if self.mode is Mode.LOOKING:
            self._was_read = True
            self._unwatch()
        elif self._is_used:
            raise ConfigurationError(
                "A gradient is read after the optimizer has used it: it was reduced to each rank's slice, since none "
                "was read in the first steps.\nRead it before step() and clip_grad_norm_() of the optimizer, or pass "
                "shard_gradients=False to ZeroRedundancyOptimizer."
            )
        else:
            self._agree(True)
            self._gather()

    def _agree(self, wants: bool) -> bool:
        """Return whether any rank wants something. Collective: every rank. Blocks until all hosts are here."""
        self._cpu_group = self._cpu_group or collectives.cpu_group(self._group)
        wanted = torch.full((7,), int(wants), dtype=torch.uint8)  # a size by which backends notice another message
        collectives.all_reduce(wanted, group=self._cpu_group, op="max")
        return bool(wanted[0])

    def _gather(self) -> None:
        """Make all gradients whole. Collective: every rank. Blocks (on CUDA: the current stream waits)."""
        self._unwatch()
        for bucket in self._bucket_set.buckets:
            work = collectives.all_gather_slices(bucket.payload[: bucket.tail_start], group=self._group)
            collectives.wait_for(work, "all_gather of gradients")
        self._is_sliced, self._was_gathered = False, True

    def _set_mode(self, mode: Mode) -> None:
        self.mode = mode
        if mode is Mode.WHOLE and self._group.rank() == 0:
            print(_HINT, file=sys.stderr, flush=True)


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


def find_reducer_on_all(parameters: Sequence[nn.Parameter], group: Group) -> Reducer | None:
    """Return what `find_reducer` does if all ranks can use slices without being asked to, else None.

    Collective: every rank. Blocks until complete.
    """
    device, reducer = parameters[0].device, None
    if {nn.Parameter} == set(map(type, parameters)) and collectives.has_reduce_scatter(group, device):
        with suppress(ConfigurationError):
            reducer = find_reducer(parameters)
    # Wrappers that are no longer used may still exist on some ranks only.
    finds = torch.tensor([reducer is not None], dtype=torch.int32, device=device)
    collectives.all_reduce(finds, group=group, op="min")
    return reducer if int(finds) else None
