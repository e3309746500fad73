"""When each bucket is reduced, and what a backward leaves in ``param.grad``. Design: docs/design/ddp.md."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.futures import Future

from lockstep import activity
from lockstep.comm.collectives import Group, is_native
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError
from lockstep.parallel.compile import keep_out_of_graphs, refuse_absent, refuse_compiled_autograd
from lockstep.parallel.ddp.bucket_events import BucketStamps, LoggedTimes, Moment
from lockstep.parallel.ddp.buckets import Bucket, Buckets
from lockstep.parallel.ddp.comm_hooks import AllReduceMean, BucketReduction, CommHook, CommHookReduction
from lockstep.parallel.ddp.module_io import find_tensors
from lockstep.parallel.ddp.optimizer_overlap import take_over_optimizers
from lockstep.parallel.ddp.weighting import WeightMessage, Weights, find_carrier
from lockstep.telemetry import ranges

# Several wrappers in one backward.
#
# [Note: the last bucket]
# When it is complete, backward is over but for inputs. So it stays until the step closes, where its reduction need
# not be handed to another thread; where one backward runs through several wrappers, only until that is known, on all
# ranks.
#
# [Note: shared parameters]
# A wrapper may lie within another, and two may share a layer. Then both average the same gradients, and who gathers
# second must not find a bucket of the first that is on its way. So what is complete stays until backward is over, and
# they close one after the other: the mean of means that are equal on all ranks is that mean.

live_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
"""Those of all wrappers in this process."""


class Neighbours:
    """What one reducer knows of the others.

    Attributes:
        are_absent: Whether no backward so far has run through another wrapper as well; see [Note: the last bucket].
        sharers: Reducers that average some of the same parameters.
    """

    def __init__(self) -> None:
        self.are_absent = True
        self.sharers: weakref.WeakSet[Reducer] = weakref.WeakSet()

    def share_this_backward(self) -> bool:
        """Tell whether a reducer with some of the same parameters collects them too."""
        return any(sharer.is_collecting for sharer in self.sharers)


def introduce(reducer: Reducer) -> None:
    """Let a new reducer and those that live know of each other."""
    mine = {id(parameter) for parameter in reducer.row.parameters}
    for other in live_reducers:
        if any(id(parameter) in mine for parameter in other.row.parameters):
            other.neighbours.sharers.add(reducer)
            reducer.neighbours.sharers.add(other)
    live_reducers.add(reducer)


def look_for_others(reducer: Reducer) -> None:
    """Take notice, for all of them, of others that collect in the backward that now ends."""
    others = [each for each in live_reducers if each is not reducer and each.is_collecting]
    for each in [reducer, *others] if others else ():
        each.neighbours.are_absent = False


# Hooks on parameters: which gradient has arrived, and that one arrived which nobody averages.
#
# Hooks live as long as their model. They hold the listener by a weak reference, so as not to keep it alive with its
# buckets when the wrapper is gone.

Hook = Callable[[Tensor], None]


class Listener(Protocol):
    """What wants to know of gradients: the reducer."""

    @property
    def is_collecting(self) -> bool:
        """Whether a synchronised backward runs."""

    def on_gradient(self, index: int) -> None:
        """Take notice that the gradient of a parameter was accumulated."""


class ParameterHooks:
    """Calls ``listener.on_gradient(index)`` when a parameter has received a gradient, of those that `set` names."""

    def __init__(self, parameters: Sequence[nn.Parameter], listener: Listener) -> None:
        self._parameters = parameters
        self._listener = weakref.ref(listener)
        self._handles: dict[int, Any] = {}
        self._is_deaf = False

    def set(self, indices: Collection[int]) -> bool:
        """Hook these parameters and no others; new hooks run behind those of others. Return False after `stop`."""
        if self._is_deaf:
            return False
        for index in [index for index in self._handles if index not in indices]:
            self._unset(index)
        for index in indices:
            if index not in self._handles:
                self._handles[index] = _hook(self._parameters[index], self._make(index))
        return True

    def move_last(self) -> None:
        """Let our hooks run behind those that others have registered since."""
        for index, handle in self._handles.items():
            hooks = self._parameters[index]._post_accumulate_grad_hooks
            if next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)  # autograd sees no move_to_end

    def stop(self) -> None:
        """Remove all hooks, for good."""
        self.set(())
        self._is_deaf = True

    def _make(self, index: int) -> Hook:
        reference = self._listener

        @keep_out_of_graphs
        def on_gradient(_parameter: Tensor) -> None:
            target = reference()
            if target is not None:
                target.on_gradient(index)

        return on_gradient

    def _unset(self, index: int) -> None:
        self._handles.pop(index).remove()
        parameter = self._parameters[index]
        if not parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # or else autograd goes on to ask Python for hooks


def _hook(parameter: nn.Parameter, hook: Hook) -> Any:
    """Register ``hook``, also on a parameter that is frozen now, for the time when it is not."""
    requires_grad = parameter.requires_grad
    try:
        parameter.requires_grad_(True)  # only such parameters take hooks
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(requires_grad)


def watch_frozen(parameters: Mapping[str, nn.Parameter], listener: Listener) -> None:
    """Make a synchronised backward raise LockstepError when it reaches a parameter that is frozen now.

    Buckets are planned once, for the parameters that require a gradient at that time. The gradient of one that is
    unfrozen later would not be averaged: ranks would drift apart, and nobody would notice. It costs nothing as long
    as parameters stay frozen, since the hooks then never run. Backwards of other wrappers are left alone.
    """
    reference = weakref.ref(listener)
    for name, parameter in parameters.items():
        can_train = (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()
        if can_train and not parameter.requires_grad:
            _hook(parameter, _alarm(name, reference))


def _alarm(name: str, reference: weakref.ref[Listener]) -> Hook:
    @keep_out_of_graphs
    def on_gradient(_parameter: Tensor) -> None:
        listener = reference()
        if listener is not None and listener.is_collecting:
            raise LockstepError(
                f"Parameter {name} was frozen when the model was wrapped, but is trained now: its gradient would not "
                "be averaged over the ranks.\nUnfreeze before wrapping, or wrap again after unfreezing: "
                "model = DistributedDataParallel(model.module)."
            )

    return on_gradient


def second_gradient(rank: int, name: str) -> LockstepError:
    """Return the error about a gradient that comes when its bucket has left."""
    return LockstepError(
        f"Rank {rank}: parameter {name} received a second gradient in one backward, "
        "after its bucket had been sent.\nThis happens when a layer is checkpointed several times with "
        "use_reentrant=True in some steps but not in the first. Use use_reentrant=False."
    )


# Which gradients have arrived on this rank, and so which buckets are complete.
#
# [Note: hooks on few parameters]
# Calling a hook costs more than a microsecond a parameter, which is much for models of many small ones. In the usual
# loop it can be done without: where no parameter has a gradient as a backward begins, those that have one later are
# those that arrived. So after some steps of that kind only one parameter of each bucket keeps a hook, that which
# completed it in the step before; when it runs, the others of the bucket are looked at. If some are missing, the
# bucket leaves with a later one, or when the step closes; if that repeats, all parameters get their hooks back. They
# also get them back, even while a backward runs, as soon as a step is of another kind: gradients are there already
# (accumulation, gradients zeroed in place, several backwards), there are weights, outputs cannot be found, buckets
# are held back, or autograd makes a graph of the backward. After a number of usual steps, which grows each time, the
# hooks are taken away again.
#
# Each rank decides that for itself: it changes when a bucket leaves, not in which order.
#
# [Note: arrived unseen]
# While most parameters have no hook, gradients can come in a backward that nobody announced: through the bare module.
# The first of the few hooks that runs then, or the next step, gives all parameters their hooks back, and takes a
# gradient that the last step did not leave there for one that arrived. A gradient that autograd has added to in place
# counts too if a hook has told of that backward; if none has, it cannot be told from one that the script has changed,
# and does not.

_FIRST_PATIENCE, _GROWTH, _MOST_PATIENCE = 2, 8, 10_000
"""After how many usual steps hooks are taken away: at first, times this after each failure, at most."""
_MOST_LATE_STEPS = 2
"""After how many steps in a row in which a bucket left late the hooks come back."""


class _Hooked(Enum):
    NONE = "no parameter"
    EVERY = "every parameter"
    FEW = "one a bucket"


class Arrivals:
    """Notes the gradients that arrive on this rank.

    Args:
        row: The buckets.
        listener: What is told of gradients, and tells us.
        rank: This one.

    Attributes:
        used: By parameter, whether it received a gradient since the last synchronised step. Where few parameters are
            hooked it is brought up to date bucket by bucket, by `look`.
        order: Of the gradients in the first step.
    """

    def __init__(self, row: Buckets, listener: Listener, *, rank: int) -> None:
        self.used = bytearray(len(row.parameters))
        self._row = row
        self._rank = rank
        self._hooks = ParameterHooks(row.parameters, listener)
        self._hooked = _Hooked.NONE
        self._completed_by: list[int | None] = []
        self._last_completed_by: list[int | None] = []
        self._num_usual, self._patience, self._num_late = 0, _FIRST_PATIENCE, 0
        self._is_usual = False
        self._buckets = row.buckets
        self.restart()

    @property
    def is_listening(self) -> bool:
        """Whether gradients are noted: whether any parameter has a hook."""
        return self._hooked is not _Hooked.NONE

    def listen(self, *, has_begun: bool = False) -> None:
        """Hook every parameter, since something unusual comes; note what may have arrived unseen.

        Args:
            has_begun: Whether a backward is known to run, or to have run since the last step; see
                [Note: arrived unseen].
        """
        if self._hooked is _Hooked.FEW:
            even_in_place = has_begun or self._is_open
            for bucket in self._row.buckets:
                arrived = bucket.arrived(even_in_place=even_in_place)
                for index, has_arrived in zip(bucket.spec.parameters, arrived, strict=True):
                    self.used[index] |= has_arrived
            self._patience = min(self._patience * _GROWTH, _MOST_PATIENCE)
        self._num_usual = 0
        self._is_usual = False
        if self._hooked is not _Hooked.EVERY and self._hooks.set(range(len(self._row.parameters))):
            self._hooked = _Hooked.EVERY

    def stop(self) -> None:
        """Hook no parameter any more, for good."""
        self._hooks.stop()
        self._hooked = _Hooked.NONE

    # --- a step -----------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Forget what arrived in a step."""
        if self._buckets is not self._row.buckets:
            self._buckets = self._row.buckets
            if self._hooked is _Hooked.FEW:  # of the buckets that were
                self.listen()
        self.order: list[int] = []
        self._came = bytearray(len(self._row.parameters))
        self._missing = [len(bucket.parameters) for bucket in self._row.buckets]
        self._completed_by = [None] * len(self._missing)
        self._seen: set[int] = set()  # buckets that are complete
        self._incomplete: list[int] = []  # those that were not when their parameter with a hook got its gradient
        self._is_open = self._is_usual = False

    def open(self, *, is_usual: bool, has_begun: bool) -> None:
        """Begin a step.

        Args:
            is_usual: False: it is known already that all parameters must be hooked.
            has_begun: Whether gradients of this backward may have come before.
        """
        self._is_usual = is_usual and self._row.is_rebuilt and all(each.grad is None for each in self._row.parameters)
        if not self._is_usual:
            self.listen(has_begun=has_begun)
        if not has_begun:
            self._hooks.move_last()
        self._is_open = True

    def note(self, index: int) -> bool:
        """Take notice of a gradient in a step; return whether its bucket may be complete now."""
        if not self._row.is_rebuilt:
            self.order.append(index)
            return False
        position = self._row.position_of[index]
        if self._hooked is _Hooked.FEW:
            if not self._look(position):
                self._incomplete.append(position)
            return True
        if self._came[index]:
            return False
        self._came[index] = 1
        self._missing[position] -= 1
        if self._missing[position] == 0:
            self._completed_by[position] = index
        return self._missing[position] == 0

    def note_local(self) -> None:
        """Take notice of a gradient that stays on this rank for now."""
        if self._hooked is _Hooked.FEW:
            self.listen(has_begun=True)
        self._num_usual = 0

    def has_come(self, index: int) -> bool:
        """Tell whether a gradient of this parameter was noted in this step already."""
        return bool(self._came[index])

    def is_complete(self, position: int) -> bool:
        """Tell whether all gradients of a bucket have arrived in this step."""
        return self._look(position) if self._hooked is _Hooked.FEW else self._missing[position] == 0

    def _look(self, position: int) -> bool:
        if position in self._seen:
            return True
        bucket = self._row.buckets[position]
        if any(parameter.grad is None for parameter in reversed(bucket.parameters)):  # the last are missing longest
            return False
        for index in bucket.spec.parameters:
            self.used[index] = 1
        self._seen.add(position)
        return True

    def end(self, num_left: int) -> None:
        """Take notice that no more gradients come, when ``num_left`` buckets have left."""
        if self._hooked is not _Hooked.FEW:
            return
        self._check_intact(num_left)
        for position in range(num_left, len(self._row.buckets)):
            bucket = self._row.buckets[position]
            for index, parameter in zip(bucket.spec.parameters, bucket.parameters, strict=True):
                self.used[index] = parameter.grad is not None
        was_late = any(self._look(position) for position in self._incomplete)
        self._num_late = self._num_late + 1 if was_late else 0

    def unused_bytes(self) -> int:
        """Return the size of all parameters that received no gradient, when the step is at its end."""
        return sum(each.nbytes for each, used in zip(self._row.parameters, self.used, strict=True) if not used)

    def _check_intact(self, num_left: int) -> None:
        for bucket in self._row.buckets[:num_left]:
            for name, has_arrived in zip(bucket.names, bucket.arrived(even_in_place=True), strict=True):
                if has_arrived:
                    raise second_gradient(self._rank, name)

    @property
    def _are_simple(self) -> bool:
        """Whether one look at ``param.grad`` tells of a bucket: none on other devices, none sparse."""
        specs = [bucket.spec for bucket in self._row.buckets]
        return not any(spec.sparse or spec.device != specs[0].device for spec in specs)

    def close(self) -> None:
        """Take notice that the step has ended well; decide who is hooked in the next."""
        self.used = bytearray(len(self._row.parameters))
        if self._hooked is _Hooked.FEW:
            if self._num_late >= _MOST_LATE_STEPS:
                self.listen()
            return
        is_steady = (
            self._is_usual and self._completed_by == self._last_completed_by and self._buckets is self._row.buckets
        )
        self._num_usual = self._num_usual + 1 if is_steady else 0
        self._last_completed_by = self._completed_by
        if self._num_usual >= self._patience and self._are_simple:
            self._hooked, self._num_late = _Hooked.FEW, 0
            pairs = zip(self._completed_by, self._row.buckets, strict=True)
            self._hooks.set({bucket.spec.parameters[-1] if index is None else index for index, bucket in pairs})
            for bucket in self._row.buckets:
                bucket.seal()


# The buckets that have left in one step, in the order of the row, until their gradients are the mean.
#
# [Note: reduced]
# A bucket is *reduced* when ``param.grad`` of its parameters is what the step leaves there. ``on_reduced`` is called
# then: once per step for each bucket that left, in the order in which they left, which is the same on every rank.
# That is when the step closes; with ``eager`` also during backward, when a later bucket leaves and an earlier one is
# done. With weights or a communication hook it is never during backward: only the end of the step shows what all
# ranks gave.

Departure = tuple[Bucket, "Future[Any]"]


class Departures:
    """Lets the buckets of ``row`` leave one after the other, and brings them home.

    Args:
        row: The buckets.
        group: The ranks that take part.
        weights: What the ranks weigh.
        times: What wants to know when communication begins.
        skip_unused: Do not reduce buckets without any gradient; only right if all ranks agree on which.

    Attributes:
        transport: How buckets travel. May be replaced between steps, on all ranks alike.
        divisor: What gradients are divided by before they are summed; the number of ranks.
        on_reduced: What to call with each bucket when it is reduced, see [Note: reduced].
        on_leaving: What to call with each bucket before it leaves, while it holds this rank's gradients only.
        eager: Whether to call it during backward where that is possible.
        num_left: How many buckets have left in this step, those that were skipped included.
        exposed_wait_s: How long the last step waited for communication after its own work was done, on the host.
        stamps: What wants to know when each bucket is ready and reduced, if anybody does.
    """

    def __init__(self, row: Buckets, group: Group, weights: Weights, times: LoggedTimes, *, skip_unused: bool) -> None:
        self.transport: BucketReduction = AllReduceMean(group)
        self.divisor = float(group.size())
        self.on_reduced: list[Callable[[Bucket], None]] = []
        self.on_leaving: list[Callable[[Bucket], None]] = []
        self.eager = False
        self.exposed_wait_s = 0.0
        self.stamps: BucketStamps | None = None
        self._row = row
        self._weights, self._times = weights, times
        self._skip_unused = skip_unused
        self._num_told = 0
        self._abandoned: list[Future[Any]] = []
        self._lane: torch.cuda.Stream | None = None
        self._under_way: list[Departure] = []
        self.reset()

    def reset(self) -> None:
        """Forget the buckets that have left: the step is over, or an exception cut it short."""
        self._abandoned += [future for _, future in self._under_way[self._num_told :]]
        self.num_left = 0
        self._under_way = []
        self._num_told = 0

    def wait_for_abandoned(self) -> None:
        """Block until nobody writes any more into buckets that left in a step which was cut short."""
        while self._abandoned:
            with suppress(RuntimeError):
                self._abandoned.pop().wait()

    @property
    def num_under_way(self) -> int:
        """How many buckets are reduced in this step; those that were skipped are not."""
        return len(self._under_way)

    @property
    def have_all_left(self) -> bool:
        """Whether no bucket of this step is to leave any more."""
        return self.num_left >= len(self._row.buckets)

    def launch_rest(self, used: bytearray) -> None:
        """Let all leave that have not, since backward is over; see `launch`. Blocks until complete at most."""
        self.exposed_wait_s = 0.0
        while not self.have_all_left:
            self.launch(used, alone=self.num_left == len(self._row.buckets) - 1)

    def launch(self, used: bytearray, *, alone: bool = False) -> None:
        """Gather the next bucket's gradients and start its reduction. Does not block. Collective: every rank.

        Args:
            used: By parameter, whether it received a gradient since the last synchronised step.
            alone: Whether nothing is left to do meanwhile; then it may block.
        """
        bucket = self._row.buckets[self.num_left]
        mine = [used[index] for index in bucket.spec.parameters]
        if self.stamps is not None:
            self.stamps.ready(self.num_left, bucket.spec.size_bytes)
        divisor = self.divisor if self.transport.takes_divided else None
        share = self._weights.share(bucket.spec.parameters, used, divisor)
        if not self._skip_unused or any(mine):
            bucket.gather(mine, share)
            refuse_absent(bucket)
            for look in self.on_leaving:
                look(bucket)
            self._times.mark(Moment.COMMUNICATION)
            self._under_way.append((bucket, self._start(bucket, self.num_left, alone=alone)))
        self.num_left += 1
        if self.eager:
            self._tell_early()

    def _start(self, bucket: Bucket, position: int, *, alone: bool = False) -> Future[Any]:
        if ranges.now is None:
            return self._start_stamped(bucket, position, alone=alone)
        with ranges.now.open(f"exchange/bucket {position}"):
            return self._start_stamped(bucket, position, alone=alone)

    def _start_stamped(self, bucket: Bucket, position: int, *, alone: bool) -> Future[Any]:
        if self.stamps is None:
            return self._send(bucket, position, alone=alone)
        self.stamps.sending()
        if alone:
            self.stamps.begin_wait()
        future = self._send(bucket, position, alone=alone)
        self.stamps.sent(future)
        return future

    def _send(self, bucket: Bucket, position: int, *, alone: bool) -> Future[Any]:
        if not alone:
            return self.transport.start(bucket, position, is_last=position == len(self._row.buckets) - 1)
        started_s = time.perf_counter()
        with self._naming(bucket, position):
            future = self.transport.start_alone(bucket, position)
        self.exposed_wait_s += time.perf_counter() - started_s
        return future

    @property
    def _may_tell_early(self) -> bool:
        return bool(self.on_reduced) and self._weights.window is None and self.transport.counts_in_tails

    def _tell_early(self) -> None:
        if not self._may_tell_early:
            return
        with self._beside_backward():
            while self._num_told < len(self._under_way):
                bucket, future = self._under_way[self._num_told]
                if not future.done() or (self._lane is not None and (bucket.absent or bucket.spec.sparse)):
                    return
                self._finish_next()

    def _beside_backward(self) -> AbstractContextManager[object]:
        """Return a context in which the device does not keep the rest of backward waiting."""
        if self._row.device.type != "cuda":
            return nullcontext()
        if self._lane is None:
            self._lane = torch.cuda.Stream(self._row.device)
        return torch.cuda.stream(self._lane)

    def _finish_next(self) -> None:
        self._finish(self._num_told, self._under_way)
        self._under_way[self._num_told][0].settle(None)
        self._tell_next()

    def _tell_next(self) -> None:
        bucket = self._under_way[self._num_told][0]
        self._num_told += 1
        for callback in self.on_reduced:
            callback(bucket)
        if self.on_reduced:
            bucket.seal()  # what they did to gradients was no gradient that came late

    def complete(self, used: bytearray, ballot: WeightMessage) -> None:
        """Block until all buckets that left are reduced.

        Collective: every rank, with buckets that left in the same order.

        Args:
            used: By parameter, whether it received a gradient on this rank.
            ballot: What this rank said of its weight when the buckets left.

        Raises:
            CollectiveError: Another rank ended or did not take part.
            ConfigurationError: On every rank: some ranks gave weights and others did not; names the latter.
        """
        if self.stamps is not None:
            self.stamps.begin_wait()
        if self._lane is not None:
            torch.cuda.current_stream(self._row.device).wait_stream(self._lane)
        while self._may_tell_early and self._num_told < len(self._under_way):  # while the next ones still travel
            self._finish_next()
        num_users = self._bring_home(self._under_way, used, ballot)
        while self._num_told < len(self._under_way):
            self._under_way[self._num_told][0].settle(num_users)
            self._tell_next()
        if self.stamps is not None:
            self.stamps.end_wait(self.exposed_wait_s)

    def complete_scratch(self, buckets: Sequence[Bucket]) -> None:
        """Take part in a step of the other ranks with ``buckets``, which nobody is told of; see `complete`."""
        left = [(bucket, self._send(bucket, position, alone=False)) for position, bucket in enumerate(buckets)]
        self._bring_home(left, bytearray(len(self._row.parameters)), WeightMessage())

    def _bring_home(self, left: Sequence[Departure], used: bytearray, ballot: WeightMessage) -> list[int] | None:
        """Return how many ranks used each parameter, unless the tails say it, when all ``left`` hold the mean."""
        for position in range(self._num_told, len(left)):
            self._finish(position, left)
        weights = self._weights
        counts = self.transport.count(used, weights.encode(ballot), weights.device)
        must_know = ballot != WeightMessage(is_missing=True)
        factor: float | None = None
        if counts is not None:
            factor = weights.conclude(counts.ballots, is_urgent=must_know)
        elif (carrier := find_carrier(left, self.transport.ballot_of)) is not None:
            factor = weights.conclude(*carrier, is_urgent=must_know)
        if factor is None:
            factor = weights.conclude_apart(ballot) if left else 1.0
        if factor != 1.0:
            for bucket, _ in left:
                bucket.scale(factor)
        return None if counts is None else counts.num_users

    def _finish(self, position: int, left: Sequence[Departure]) -> None:
        bucket, future = left[position]
        started_s = time.perf_counter()
        with self._naming(bucket, position):
            self.transport.finish(bucket, future)
        self.exposed_wait_s += time.perf_counter() - started_s

    @contextmanager
    def _naming(self, bucket: Bucket, position: int) -> Iterator[None]:
        """Name the bucket to the watchdog, and in the error of a reduction that fails inside."""
        activity.now.bucket = position, bucket.names
        waits = None if ranges.now is None else ranges.now.open(f"exchange/bucket {position} wait")
        try:
            yield
        except ConfigurationError:  # not the reduction's, but of who called for it
            raise
        except RuntimeError as error:
            raise CollectiveError(
                f"Rank {self._weights.rank}: the gradient reduction of bucket {position} "
                f"({bucket.names[0]} ... {bucket.names[-1]}) failed: {error}\n"
                "Another rank probably ended or ran no backward; look at the first error of the job."
            ) from error
        finally:
            activity.now.bucket = None
            if waits is not None:
                waits.close()


# When each bucket is reduced, and what a backward leaves in ``param.grad``. Design: docs/design/ddp.md.
#
# [Note: when a backward is synchronised]
# ``forward`` hooks the tensors it returns. The first such hook that autograd runs opens the step: at that moment we are
# in the outermost graph task, so a callback queued there runs when the whole backward is over, whatever nested
# backwards reentrant checkpointing starts. That callback closes the step. So each backward through an output of the
# wrapper is one synchronised step, however many there are. ``prepare_for_backward`` also arms the reducer, as torch's
# does, for outputs that we cannot find: then the first gradient opens the step.
#
# [Note: parameters without a gradient]
# A bucket that is complete is launched at once, in the order of the plan; closing the step launches the others, with
# zeros for gradients that never came. The tail of each bucket counts the ranks on which each parameter received a
# gradient since the last synchronised step. Only a rank that lacks a gradient reads its tail: a parameter that another
# rank used takes the reduced gradient, one that nobody used keeps what it had, and None stays None.
#
# [Note: the first step]
# The first synchronised backward launches nothing before its end. It shows in which order gradients arrive and which
# parameters receive several in one backward (a shared layer under reentrant checkpointing). All ranks agree on what
# they saw, and the buckets are built anew, once. Parameters that received several gradients are reduced at the end of
# backward from then on, since no arrival of theirs is known to be the last. Steps in which some rank may be without a
# batch launch nothing before their end either: ``at_end`` is set then, and called first; see follow.py.


class _Phase(Enum):
    IDLE = "idle"
    ARMED = "armed"  # the next gradient opens a step
    COLLECTING = "collecting"  # a synchronised backward runs


class Reducer:
    """Averages the gradients of ``parameters`` over the ranks of ``group`` during backward.

    Args:
        row: The buckets, and the parameters whose gradients they hold.
        group: The ranks that take part.
        skip_unused_buckets: Do not reduce buckets without any gradient; only right if all ranks agree on which.

    Attributes:
        row: The buckets.
        weights: What the ranks weigh.
        times: Of some steps.
        departures: The buckets that have left; what divides them and carries them, and who is told of them.
        at_end: What to do at the end of backward before any bucket leaves; None: they leave as they are complete.
        neighbours: The reducers of other wrappers.
        opened_s: When the last step was opened, on the host's clock.
        on_closed: What to call when a synchronised step of the group is over, also one that this rank
            had no data for; told whether it had.
    """

    def __init__(self, row: Buckets, *, group: Group, skip_unused_buckets: bool = False) -> None:
        self.at_end: Callable[[], None] | None = None
        self.opened_s = 0.0
        self.on_closed: list[Callable[[bool], None]] = []
        self.post_backward: list[Future[Any]] = []  # waited for when the step closes
        self.row = row
        self._group = group
        self.weights = Weights(group, row.device)
        self.times = LoggedTimes(row.device)
        self.departures = Departures(row, group, self.weights, self.times, skip_unused=skip_unused_buckets)
        self._lock = threading.Lock()  # a model on several devices calls hooks from one autograd thread per device
        self._arrivals = Arrivals(row, self, rank=group.rank())
        self._in_backward_step: Callable[[], None] | None = None
        self._has_taken_over = False
        self._phase = _Phase.IDLE
        self._closing: Callable[[], object] = lambda: None
        self.has_run = False
        self.companions: list[torch.nn.Parameter] = []
        self._reset_step()
        self.neighbours = Neighbours()
        introduce(self)
        if group.size() > 1 or not is_native(group):
            self._arrivals.listen()

    def set_comm_hook(self, hook: CommHook, state: object) -> None:
        """Let ``hook(state, bucket)`` reduce the buckets from now on."""
        self.set_transport(CommHookReduction(self._group, hook, state))

    def set_transport(self, transport: BucketReduction) -> None:
        """Let ``transport`` carry the buckets from now on; between steps, on every rank."""
        self.departures.transport = transport
        self._arrivals.listen()

    @property
    def on_reduced(self) -> list[Callable[[Bucket], None]]:
        """What to call with each bucket when it is reduced, see [Note: reduced] in departures.py."""
        return self.departures.on_reduced

    def weigh(self, weight: float) -> None:
        """Let the next backward's gradients, and all ranks' of this step, count by weight; see window.py."""
        was_listening = self._arrivals.is_listening
        self._arrivals.listen()
        self.weights.give(weight, [*self.row.parameters, *self.companions], self._arrivals.used)
        if not was_listening:  # a single rank
            self.on_forward()

    def withdraw(self) -> bool:
        """Forget a weight that no backward has used; return whether there was one."""
        return self.weights.window is not None and self.weights.window.withdraw()

    def on_forward(self, *, will_sync: bool = False) -> None:
        """Take notice that a forward begins; make optimizers that step inside backward wait for averaged gradients."""
        self.has_run = True
        if will_sync:
            self.times.begin()
        if self._arrivals.is_listening and not self._has_taken_over:
            self._in_backward_step = take_over_optimizers(self.row.parameters)
            self._has_taken_over = True

    def remove_hooks(self) -> None:
        """Stop watching the parameters."""
        self._arrivals.stop()

    @property
    def is_collecting(self) -> bool:
        """Whether a synchronised backward runs, and was not cut short by an exception."""
        return self._phase is _Phase.COLLECTING and self._closing() is not None

    def check_finished(self) -> None:
        """Raise RuntimeError if a synchronised backward has begun and not run to its end."""
        if self._phase is _Phase.COLLECTING:
            raise RuntimeError("A synchronised backward has not run to its end.")

    # --- a step opens -----------------------------------------------------------------------------------------------

    def prepare_for_backward(self, outputs: Sequence[Tensor] = ()) -> None:
        """Make the next backward a synchronised step, and every backward that reaches one of ``outputs``."""
        if self._phase is _Phase.IDLE:
            self._phase = _Phase.ARMED
        if not self._arrivals.is_listening:
            return
        watched = [output for output in outputs if output.grad_fn is not None]  # a hook on a leaf would stay for good
        for output in watched:
            output.register_hook(self._on_output)
        if not watched:
            self._arrivals.listen()

    def expect_accumulation(self, output: Any) -> None:
        """Take notice of a forward whose backward is not synchronised, and of what it returned."""
        if self._arrivals.is_listening:
            self._arrivals.listen()
        if self.weights.window is not None or self.weights.shares_batch:
            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_local_output)

    def disarm(self) -> None:
        """Forget that a backward was expected, or one that an exception cut short. Nothing happens inside backward."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self._phase is _Phase.COLLECTING:
            self._reset_step()
        self.departures.wait_for_abandoned()
        self._phase = _Phase.IDLE
        if self.weights.window is not None:
            self.weights.window.on_forward()

    @keep_out_of_graphs
    def _on_local_output(self, gradient: Tensor) -> Tensor | None:
        with self._lock:
            if self.weights.window is not None and not self.is_collecting:
                self.weights.window.enter(self._arrivals.used, accumulates=True)
        return self.weights.silenced(gradient)

    @keep_out_of_graphs
    def _on_output(self, gradient: Tensor) -> Tensor | None:
        with self._lock:
            if not self.is_collecting:
                self._open_step()
        return self.weights.silenced(gradient)

    def _open_step(self, arrived: int | None = None) -> None:
        refuse_compiled_autograd()
        if self._phase is _Phase.COLLECTING:  # a backward that an exception cut short
            self._reset_step()
            self.departures.wait_for_abandoned()
        self._phase = _Phase.COLLECTING
        self.opened_s = time.perf_counter()
        self.times.mark(Moment.BACKWARD)
        close = self._close_step
        self._closing = weakref.ref(close)  # autograd drops it with the backward, be that finished or failed
        Variable._execution_engine.queue_callback(close)
        self.weights.resolve_doubt()
        window = self.weights.window
        is_usual = arrived is None and window is None and self.at_end is None and not torch.is_grad_enabled()
        self._arrivals.open(is_usual=is_usual, has_begun=arrived is not None)
        if window is not None:
            window.enter(self._arrivals.used, accumulates=False, arrived=arrived)

    def _reset_step(self) -> None:
        self._phase = _Phase.IDLE
        self._arrivals.restart()
        self.departures.reset()
        if self.weights.window is not None:
            self.weights.window.close()

    # --- gradients arrive, buckets leave ----------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """Take notice that a parameter has received a gradient; launch the buckets that this completes."""
        with self._lock:
            arrivals = self._arrivals
            arrivals.used[index] = 1
            if self._phase is not _Phase.COLLECTING or self._closing() is None:  # is_collecting, without a call
                if self._phase is not _Phase.ARMED:
                    arrivals.note_local()
                    if self.weights.window is not None:
                        self.weights.window.on_arrival(index, arrivals.used)
                    return
                self._open_step(arrived=index)
            if arrivals.has_come(index) and self.row.position_of[index] < self.departures.num_left:
                raise second_gradient(self._group.rank(), self.row.names[index])
            if not arrivals.note(index) or self.at_end is not None or self.neighbours.share_this_backward():
                return
            while (ready := self.departures.num_left) < len(self.row.buckets) - self.neighbours.are_absent:
                if self.row.buckets[ready].spec.deferred or not arrivals.is_complete(ready):
                    return
                self.departures.launch(arrivals.used)

    # --- the step closes --------------------------------------------------------------------------------------------

    @keep_out_of_graphs
    def _close_step(self) -> None:
        """Launch what is left, wait for everything, and settle the gradients that never came."""
        with self._lock:
            try:
                self.times.mark(Moment.BACKWARD_END)
                look_for_others(self)
                if self.at_end is not None:
                    self.at_end()
                if not self.row.is_rebuilt:
                    self.weights.call_the_roll(self.weights.ballot())
                ballot = self.weights.ballot()
                self._arrivals.end(self.departures.num_left)
                self.departures.launch_rest(self._arrivals.used)
                self.departures.complete(self._arrivals.used, ballot)
                for future in self.post_backward:
                    future.wait()
                if self._in_backward_step is not None:
                    self._in_backward_step()
                if not self.row.is_rebuilt:
                    self.row.rebuild(self._arrivals.order, group=self._group)
                self.times.end(self.departures.num_under_way, self._arrivals.unused_bytes)
                self._arrivals.close()
                self._tell_closed(had_data=True)
            finally:
                self.post_backward = []
                self._reset_step()

    def shadow_step(self) -> None:
        """Take part in one step of the other ranks with zero gradients; ``param.grad`` stays as it is.

        A rank that still holds weighed gradients, because its data ended in ``no_sync()``, sends them instead.

        Collective: every rank that has data runs a synchronised backward. Blocks until complete.
        """
        window = self.weights.window
        if window is not None and window.holds_gradients(self._arrivals.used):
            self.at_end = None
            self._close_step()
            return
        if not self.row.is_rebuilt:
            self.weights.call_the_roll(WeightMessage())
        self.departures.complete_scratch(self.row.scratch())
        if not self.row.is_rebuilt:
            self.row.rebuild([], group=self._group)
        self._tell_closed(had_data=False)

    def _tell_closed(self, *, had_data: bool) -> None:
        for callback in self.on_closed:
            callback(had_data)


# A step that an exception has ended on this rank: the others wait in its collectives all the same.


def abort_step(model: Any) -> None:
    """Take part in what the other ranks still exchange in a step whose forward or backward failed here.

    To be called on a `DistributedDataParallel` after an exception in a synchronised forward or backward, or in a
    ``no_sync`` one before it. The gradients that this leaves are of no use on any rank.

    Collective: every rank that has data runs its synchronised backward. Blocks until complete.
    """
    reducer: Reducer = model._reducer
    try:
        reducer.check_finished()
    except RuntimeError:
        reducer._close_step()  # which autograd would have called; sends what has come, and zeros
    else:
        reducer.shadow_step()
    # As after a synchronised forward that came to its end: buffers are broadcast before the next one.
    model.require_forward_param_sync = True
