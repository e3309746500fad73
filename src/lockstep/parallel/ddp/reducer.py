"""When each bucket is reduced, and the contents of ``param.grad`` after a backward. Design: docs/design/ddp.md."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base import activity
from lockstep.base.accelerator import is_capturing
from lockstep.base.containers import hook_tensors
from lockstep.base.torch_internals import current_graph_task_id, in_backward_optimizers, queue_callback
from lockstep.comm.collectives import Group, all_gather_object, all_reduce, cpu_group, in_backward_hooks, is_native
from lockstep.comm.network import wait_for_call
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError, is_of_signal_handler, tells_of_others
from lockstep.health.heartbeat import num_calls
from lockstep.parallel.compile import keep_out_of_graphs
from lockstep.parallel.ddp.bucket_events import Event, Observer
from lockstep.parallel.ddp.buckets import Bucket, BucketSet
from lockstep.parallel.ddp.comm_hooks import AllReduceMean, BucketReduction
from lockstep.parallel.ddp.replicas import Replicas
from lockstep.parallel.ddp.shares import Scaling
from lockstep.parallel.ddp.updates import Updates, call_before_updates, leave_out_calls, refuse_outside, warn_if_idle
from lockstep.parallel.ddp.weighting import Weights, check_weight
from lockstep.telemetry import ranges

_NOTHING_LEARNED = (
    "The output of the model requires no gradient on any rank, so this step would train nothing.\nAll parameters that "
    "forward uses are frozen; or it runs under torch.no_grad(), or detaches the result (.detach(), .data, "
    ".numpy()); or no input of a checkpoint with use_reentrant=True requires a gradient: use use_reentrant=False."
)


def _nothing() -> None:
    """Stand for a dead reference."""


@dataclass(eq=False)
class Step:
    """One synchronised backward, from the first hook that autograd calls until its gradients are settled.

    `Reducer._step` is the only reference to it. If it fails, it stays there until the next forward or backward discards
    it, since the reductions in flight still write to their buckets.

    Attributes:
        callback: A weak reference to the function that closes the step when backward is over. Only autograd keeps the
            function, until it has run or the backward has failed. So the reference is dead if none can arrive any more.
        is_opened_by_output: Whether a hooked output opened it, so before any gradient had arrived.
        unsettled: A parameter that a hook of the script may still change after ours; -1: none.
        num_calls_before: The collectives until it began; None: there is no other wrapper.
        arrived: Parameters, in the order in which their gradients arrived, including repeats.
        received: The same, each once.
        num_awaited: The number of parameters in the inbox at which another bucket may be complete.
        num_launched: Of the buckets, in the order of the plan; includes those that were not reduced.
        in_flight: The buckets that were launched, in order.
        num_finished: Of these, those that are reduced and settled.
        carrier: The one of them whose tail has the weight message; see `Weights.carrier`.
        is_used: Whether some rank has a gradient for some parameter of the finished buckets.
    """

    callback: Callable[[], object] = _nothing
    is_opened_by_output: bool = True
    unsettled: int = -1
    num_calls_before: int | None = None
    arrived: list[int] = field(default_factory=list)
    received: set[int] = field(default_factory=set)
    num_awaited: int = 1
    num_launched: int = 0
    in_flight: list[Bucket] = field(default_factory=list)
    num_finished: int = 0
    carrier: Bucket | None = None
    is_used: bool = False


_missing_in = attrgetter("missing")
_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()


def live_reducers() -> list[Reducer]:
    """Return the reducers of all wrappers in this process."""
    return list(_reducers)


def _before_update(optimizer: Optimizer, loss: Any) -> None:
    warn_if_idle(optimizer)
    for reducer in live_reducers():
        reducer.before_update(optimizer, loss)


class Reducer:
    """Averages the gradients of ``bucket_set.parameters`` over the ranks of ``group`` during backward.

    [Note: when a backward is synchronised]
    ``forward`` hooks the tensors it returns. The first such hook that autograd runs opens the step. At that moment
    autograd is in the outermost graph task, so a callback queued there runs when the whole backward is over, even if
    reentrant checkpointing starts nested backwards. That callback closes the step. So each backward through an output
    of the wrapper is one synchronised step, however many there are, unless it runs for ``autograd.grad`` and adds to no
    gradient of ours (`BucketSet.accumulates`). Outputs that we cannot find have no hooks: for these, the forward arms
    the reducer, and the first gradient opens the step. If no output was found, it stays armed until the next forward.
    A step may lack gradients since the script computes a second loss of what the model has kept (``model.aux_loss``):
    these open a step, too, unless there is a forward in between.

    [Note: when a bucket is launched]
    A bucket is launched when all its gradients have arrived and all buckets before it are launched. So every rank
    launches buckets in the order of the plan, whatever the order in which gradients arrive. Closing the step launches
    the remaining buckets. These buckets always wait until the step closes:

    - the last bucket: when it is complete, backward is over except for inputs, and the closing thread can reduce it
      itself, which saves two thread switches. If one backward runs through several wrappers, this holds only the first
      time;
    - all buckets of the first step, which shows in which order gradients arrive and which parameters receive several in
      one backward (a shared layer under reentrant checkpointing). All ranks then agree on these observations, and the
      buckets are rebuilt, once;
    - buckets of parameters that received several gradients in that step, since the last arrival cannot be recognised;
    - a bucket with a gradient that a hook of the script may still change, see `_put_hooks_last`;
    - all buckets, if layers of the model run collectives in backward, see ``before_launch``, or if another wrapper
      averages some of the same gradients, see [Note: shared parameters].

    [Note: hooks of parameters]
    Each parameter has a hook that is called when its gradient is there. `_on_gradient` costs more than everything else
    that is done for a small parameter. So after the first step only the parameter that arrived last in its bucket is
    watched by it; the hooks of the others are the method ``append`` of the list `_inbox`, which no Python code runs in.
    If a bucket was complete later than expected, all its parameters are watched from then on. All parameters are
    watched if gradients may have to do more: if a step was not opened by an output, and with weights.

    [Note: parameters without a gradient]
    Missing gradients are sent as zeros. The tail of a bucket counts the ranks on which each parameter received a
    gradient since the last synchronised step. Only a rank that lacks a gradient reads the tail: a parameter that
    another rank used gets the reduced gradient, one that no rank used keeps its gradient, and None stays None.

    On a device, reading a tail means that the host waits until the device has nothing left to do. Assuming that the
    ranks use the same parameters as before would avoid this, but would be found wrong only when a rank's optimizer has
    already left out an update. So as long as some rank lacks gradients, the hosts exchange what they used over a CPU
    group, as soon as their backward has been queued: they wait for each other, but not for their devices. All ranks
    must take part in this exchange. So each rank sends with its weight message whether its last step lacked gradients,
    and all ranks decide by the same sum, which they read in a later step, see [Note: weight messages]. Only until then
    the tails are read.

    [Note: a backward that fails]
    autograd then drops the queued callback, so the step is not closed, and the reductions of launched buckets still
    write to them. The next forward or backward discards the step and waits for these reductions. The contents of
    ``param.grad`` are invalid, as after any backward that failed. If it failed on all ranks, training can go on. If it
    failed on some ranks, the others wait in their reductions until the group's timeout.

    [Note: shared parameters]
    A wrapper may lie within another, and two may share a layer. Then both average the same gradients, and the second
    must not gather from a bucket that the first is still reducing. So both launch nothing before backward is over, and
    close one after the other. Averaging a mean that is equal on all ranks does not change it.

    Args:
        bucket_set: The buckets, and the parameters whose gradients they hold.
        group: The ranks that take part.
        skip_unused_buckets: Do not reduce buckets without any gradient; only right if all ranks agree on which.

    Attributes:
        bucket_set: The buckets.
        reduction: How a bucket is reduced. Replaced by `set_reduction`.
        divisor: Gradients are divided by it before they are summed: the number of ranks.
        weights: The weights of the ranks.
        replicas: Finds out whether the ranks still hold the same model.
        observers: They get the events of a step.
        before_launch: Called at the end of backward before any bucket is launched. None: buckets are launched when they
            are complete. Set if some rank may be without a batch, see uneven_inputs.py.
        finishes_early: Whether reduced buckets are finished during backward, if possible.
        is_alone: Whether the group has one rank only.
        has_run: Whether there was a forward.
        is_anchored: Whether no output of the newest forward depended on a parameter.
        scaling: Of the gradients of the newest forward, if it is known which batch it was given.
        num_forwards: Number of forwards with a synchronised backward.
        num_backwards: Grows with each backward that an output of the wrapper has seen.
        trains_in_evaluation_mode: Whether the newest backward with a scaling was through a forward in that mode.
        num_steps: Number of synchronised backwards that have begun.
        only_step: The number of the one that ranks without data take part in now; None: they all have data.
        num_buckets_reduced: In the last step.
    """

    def __init__(self, bucket_set: BucketSet, *, group: Group, skip_unused_buckets: bool = False) -> None:
        self.bucket_set = bucket_set
        self.reduction: BucketReduction = AllReduceMean(group)
        self.divisor = float(group.size())
        self.weights = Weights(group, bucket_set.device)
        self.replicas = Replicas(group, bucket_set.device)
        self.weights.refuse_replicas = self.replicas.refuse_difference
        self.observers: list[Observer] = []
        self.before_launch: Callable[[], None] | None = None
        self.finishes_early = False
        self.has_run = self.is_anchored = False
        self.num_forwards = self.num_backwards = self.num_steps = self.num_buckets_reduced = 0
        self.only_step: int | None = None
        self.is_alone = group.size() == 1
        self._group = group
        self._skip_unused_buckets = skip_unused_buckets
        self._lock = threading.Lock()  # a model on several devices calls hooks from one autograd thread per device
        self._step: Step | None = None
        # Whether a forward has announced a synchronised backward: if no hooked output has opened a step before, the
        # first gradient does. Otherwise gradients stay on this rank (no_sync, the bare module).
        self._is_armed = self._stays_armed = False
        self._late: set[int] = set()  # parameters without a gradient in the last step, if there was no forward since
        self._learns = False  # whether some rank had a gradient in the last step
        self._has_graph = False  # whether a gradient was computed with a graph, through which no backward has come yet
        self._used: set[int] = set()  # parameters with a gradient since the last synchronised step, in no_sync() too
        self._updates = Updates(bucket_set, self.weights, group)
        self._finishing_stream: torch.Stream | None = None
        self._cpu_group: Group | None = None  # see [Note: parameters without a gradient]
        self.scaling: Scaling | None = None
        self.trains_in_evaluation_mode = False
        self._unscaled: Scaling | None = None  # `scaling`, if the outputs of the forward could not be found
        self._optimizers_in_backward: list[nn.Parameter] | None = None  # None: before the first forward
        self._hooks: list[Any] = []
        self._hook_dicts: list[dict[int, Any]] = []  # by parameter, these and those of others, as torch keeps them
        self._watched: set[int] = set()  # the parameters whose hook is `_on_gradient`
        self._inbox: list[Tensor] = []  # parameters whose gradients have arrived since `_drain`
        # What this has found, with the indices, by the id of the first parameter.
        self._drained: dict[int, tuple[Sequence[Tensor], Sequence[int]]] = {}
        self._may_hook = True
        self._launches_last_early = False
        self._sharers: weakref.WeakSet[Reducer] = weakref.WeakSet()  # reducers of some of the same parameters
        self._find_sharers()
        _reducers.add(self)
        # A single rank has nothing to reduce, but a process group written in Python may need to see the gradients.
        if not self.is_alone or not is_native(group):
            self._hook_parameters()

    # --- configuration, between steps -------------------------------------------------------------------------------

    def set_reduction(self, reduction: BucketReduction) -> None:
        """Use ``reduction`` for the buckets from now on; call it on every rank."""
        self.reduction = reduction
        self._hook_parameters()

    def begin_strict(self, observer: Observer) -> None:
        """Refuse each update with gradients that are not averaged, and notify ``observer``: the model is prepared."""
        self._updates.is_strict = True
        if observer not in self.observers and not self.is_alone:
            self.observers.append(observer)

    def set_weight(self, weight: float) -> None:
        """Set the weight of the next backward; all gradients of this step are then weighted; see weighting.py."""
        was_hooked = bool(self._hooks)
        self._hook_parameters()
        if self.weights.window is None:
            self._used.update(self._drain())
            self._watch(range(len(self._hooks)))
        self.weights.open_window(self.bucket_set.parameters, self._used).set_weight(weight)
        if not was_hooked:  # a single rank
            self.begin_forward(will_sync=False)

    def discard_weight(self) -> bool:
        """Forget a weight that no backward has used; return whether there was one."""
        return self.weights.window is not None and self.weights.window.discard_weight()

    def add_parameters(self, names: Sequence[str]) -> None:
        """Average the gradients of these parameters, too; see [Note: unfrozen parameters]."""
        if is_capturing(self.bucket_set.device):
            raise ConfigurationError(
                f"Parameter {names[0]} was unfrozen before a step that is captured in a CUDA graph.\n"
                "Run a step without capture after requires_grad_(True), and capture then."
            )
        if self.is_alone and not self._hooks:  # nothing is reduced
            return self.use_parameters({*self.bucket_set.names, *names}, None)
        self.bucket_set.append(names)
        self._hook_parameters()
        self._optimizers_in_backward = None
        self._find_sharers()
        self.weights.has_new = True

    def use_parameters(self, names: Collection[str], plan: Sequence[Any] | None) -> None:
        """Average the gradients of these parameters from now on, in the order of a plan. Collective with a plan."""
        was_hooked = bool(self._hooks)
        _remove(self._hooks)
        self._hook_dicts, self._watched, self._drained, self.weights.has_new = [], set(), {}, False
        self.bucket_set.number_anew(names)
        self.bucket_set.use_plan(plan, group=self._group)
        self._find_sharers()
        if was_hooked:
            self._hook_parameters()

    def _find_sharers(self) -> None:
        for other in live_reducers():
            if other is not self and not self.bucket_set.index_of.keys().isdisjoint(other.bucket_set.index_of):
                self._sharers.add(other)
                other._sharers.add(self)

    def _hook_parameters(self) -> None:
        """Put a hook on each parameter."""
        if len(self._hooks) < len(self.bucket_set.parameters) and self._may_hook:
            # Hooks live as long as their parameter, so they hold the reducer weakly: an unused wrapper is freed with
            # its buckets, and the model does not keep it.
            for parameter in self.bucket_set.parameters[len(self._hooks) :]:
                requires_grad = parameter.requires_grad
                parameter.requires_grad_(True)  # hooks require this, and the parameter may be frozen for a while
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._inbox.append))
                self._hook_dicts.append(self._hooks[-1].hooks_dict_ref())
                parameter.requires_grad_(requires_grad)
            self._watch(range(len(self._hooks)))
            call_before_updates(_before_update)
            weakref.finalize(self, _remove, self._hooks).atexit = False

    def _watch(self, indices: Iterable[int]) -> None:
        """Call `_on_gradient` for these parameters; see [Note: hooks of parameters]."""
        new = set(indices) - self._watched
        self._watched |= new
        for index in new:
            self._hook_dicts[index][self._hooks[index].id] = partial(Reducer._on_gradient, weakref.ref(self), index)

    def _watch_last(self, arrived: Sequence[int]) -> None:
        """Watch only the parameter of each bucket that arrived last, and all where none arrived."""
        position_of = self.bucket_set.position_of
        last = {position_of[index]: index for index in arrived}
        for index, (hooks, handle) in enumerate(zip(self._hook_dicts, self._hooks, strict=True)):
            if last.get(position_of[index], index) != index:
                hooks[handle.id] = self._inbox.append
                self._watched.discard(index)

    def _put_hooks_last(self, arrived: int | None) -> int:
        """Let our hooks run after those that the script has registered since, which may change the gradient.

        Args:
            arrived: The parameter whose hooks are running now.

        Returns:
            That parameter, if such a hook may still run for it; else -1. Its bucket waits until the step closes.
        """
        unsettled = -1
        for index, (hooks, handle) in enumerate(zip(self._hook_dicts, self._hooks, strict=True)):
            if next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)
                unsettled = index if index == arrived else unsettled
        return unsettled

    def _drain(self) -> Sequence[int]:
        """Return the indices of the parameters in the inbox, and empty it."""
        arrived = self._inbox[:]  # threads of other devices may append at any time
        del self._inbox[: len(arrived)]
        if not arrived:
            return ()
        before, indices = self._drained.get(id(arrived[0]), ((), ()))
        if len(arrived) != len(before) or not all(map(is_, arrived, before)):  # most steps are like the one before
            indices = list(map(self.bucket_set.index_of.__getitem__, map(id, arrived)))
            self._drained[id(arrived[0])] = arrived, indices
        return indices

    def _rebuild_buckets(self) -> bool:
        return False  # Accelerate and Lightning call it before a forward; ours are rebuilt after the first backward

    def remove_hooks(self) -> None:
        """Remove the hooks from the parameters permanently."""
        _remove(self._hooks)
        self._hook_dicts, self._may_hook = [], False

    # --- around forward ---------------------------------------------------------------------------------------------

    def begin_forward(self, *, will_sync: bool) -> None:
        """Record that a forward begins, and whether its backward will be synchronised."""
        self.has_run = True
        if self._optimizers_in_backward is None and self._hooks:
            # From ``torch.distributed.optim._apply_optimizer_in_backward``. torch's hooks would step as soon as a
            # gradient arrives, before it has been averaged.
            self._optimizers_in_backward = list(filter(in_backward_optimizers, self.bucket_set.parameters))
            for parameter in self._optimizers_in_backward:
                _remove(in_backward_hooks(parameter))
        self.num_forwards += will_sync
        self._updates.begin_forward(will_sync=will_sync, has_gradients=self.has_local_gradients)

    def begin_alone(self) -> bool:
        """Record a forward on a single rank; return False, and do nothing, if its gradients are watched."""
        if self._hooks or self.observers:
            return False
        self.has_run = True
        self.num_forwards += 1
        self._is_armed = True  # hooks may be added before its backward
        return True

    def disarm(self) -> None:
        """Forget an expected backward, or one that failed. Does nothing inside a backward.

        Blocks until reductions of a backward that failed are over; see [Note: a backward that fails].
        """
        # A forward within backward, as in checkpointing, is a part of the step.
        if current_graph_task_id() != -1:
            return
        if self._step is not None:  # it has failed, otherwise it would be closed
            self._abandon_step()
        elif self._is_armed and self._inbox:
            raise LockstepError(
                f"Rank {self._group.rank()}: the last backward reached no output of the model that can be found, so "
                "its gradients were not averaged.\nReturn all outputs as tensors, or in lists, dicts or dataclasses."
            )
        self._is_armed, self._stays_armed, self._late = False, False, set()
        if self.weights.window is not None:
            self.weights.window.on_forward()

    def prepare_for_backward(self, outputs: Any = ()) -> None:
        """Make the next backward, and every backward that reaches a tensor in ``outputs``, a synchronised step."""
        if self._step is None and not self._is_armed:
            self._is_armed = True
            self._used.update(self._drain())
        if self._hooks:
            num_hooked = hook_tensors(outputs, partial(self._on_output, scaling=self.scaling))
            self._unscaled = None if num_hooked else self.scaling
            self._stays_armed = not num_hooked

    def expect_accumulation(self, output: Any) -> None:
        """Record a forward without a synchronised backward, and its output."""
        # Else there is nothing to do before gradients arrive.
        if self.scaling is not None or self.weights.window is not None or self.weights.shares_batch:
            hook_tensors(output, partial(self._on_output, scaling=self.scaling, is_local=True))

    def before_update(self, optimizer: Optimizer, loss: Any) -> None:
        """Record that ``optimizer`` is about to step; refuse it if gradients of ours are not averaged yet.

        ``loss`` is what its closure has returned. Collective with LBFGS, see `Updates.refuse_search`.
        """
        index_of, step = self.bucket_set.index_of, self._step
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        updated = (index_of[id(parameter)] for parameter in parameters if id(parameter) in index_of)
        first = next(updated, None)  # in most steps no more are looked at
        if first is None or self.is_alone:
            return
        indices = chain((first,), updated)
        if self.replicas.before_update(optimizer, self.num_steps + 1) and self._updates.is_strict:
            refuse_outside(optimizer, set().union(*(other.bucket_set.index_of for other in live_reducers())))
        if self.is_collecting or (self._is_armed and current_graph_task_id() != -1):
            finished = [bucket.position for bucket in step.in_flight[: step.num_finished]] if step else []
            self._updates.refuse_early(optimizer, indices, finished)
        if step is not None:  # an optimizer in backward
            return
        if self.has_local_gradients and not self._sharers:  # another wrapper may have averaged them
            self._used.update(self._drain())
            updated_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            averaged = (each for each in live_reducers() if each.num_steps and not each.has_local_gradients)
            others_average = not all(updated_ids.isdisjoint(each.bucket_set.index_of) for each in averaged)
            self._updates.refuse_local(optimizer, indices, self._used, others_average=others_average)
        self._updates.count()
        self._updates.refuse_search(optimizer, loss)

    # --- a step opens -----------------------------------------------------------------------------------------------

    @property
    def has_local_gradients(self) -> bool:
        """Whether gradients have arrived since the last synchronised step."""
        return bool(self._used or self._inbox)

    @property
    def is_collecting(self) -> bool:
        """Whether a synchronised backward runs, and has not failed."""
        return self._step is not None and self._step.callback() is not None

    @keep_out_of_graphs
    def _on_output(
        self, functions: Any, gradient: Tensor, *, scaling: Scaling | None = None, is_local: bool = False
    ) -> Tensor | None:
        window = self.weights.window
        with self._lock:
            self.num_backwards += 1
            if scaling is not None:
                self.weights.parts.add(scaling.part)
                self.trains_in_evaluation_mode = not scaling.in_training_mode
                if window is not None and scaling.part.share == 0:
                    window.ignore_weight()
            if self.is_collecting or not self.bucket_set.accumulates(functions):
                pass
            elif not is_local:
                self._open_step()
            elif window is not None:
                window.begin_backward(self._used, accumulates=True)
        if torch.is_grad_enabled():  # a backward through its graph may reach no output, and any of the parameters
            self._watch(range(len(self._hooks)))
            self._has_graph |= not is_local
        replacement = None if window is None else window.masked(gradient)
        if scaling is None:
            return replacement
        has_weight = window is not None and window.has_weight
        return scaling.entering(gradient if replacement is None else replacement, has_weight=has_weight)

    def _open_step(self, arrived: int | None = None) -> None:
        """Begin a synchronised step, in autograd's thread.

        Args:
            arrived: The parameter whose gradient has arrived before any hooked output.
        """
        compiler = sys.modules.get("torch._dynamo.compiled_autograd")  # not imported if nothing is compiled
        if compiler is not None and compiler.in_compiled_autograd_region:  # it calls hooks late, and no callbacks
            raise ConfigurationError(
                "Compiled autograd does not work with DistributedDataParallel: gradients would not be averaged.\n"
                "Set torch._dynamo.config.compiled_autograd = False; the backward of what is compiled is compiled "
                "anyway."
            )
        if self._step is not None:
            self._abandon_step()
        if arrived is not None and self._unscaled is not None and self._unscaled.part.share != 1:
            raise ConfigurationError(
                "The backward reached no output of the model that can be found, so the gradients of a part with more "
                "or fewer samples than those of other ranks cannot be scaled.\n"
                "Return all outputs as tensors, or in lists, dicts or dataclasses."
            )
        if self.only_step not in (None, self.num_steps):
            raise ConfigurationError(
                f"Rank {self._group.rank()}: a second synchronised backward after one forward in join(), while other "
                "ranks have no data.\nRun all forwards and one backward, of the sum of the losses, in each step."
            )
        self.num_steps += 1
        self._used.update(self._drain())
        # A bound method is a new object each time. Only autograd will hold this one, and drops it if backward fails.
        close = self._close_step
        # After a backward through an output, another may come through the graph of a gradient (a gradient penalty).
        self._has_graph = self._has_graph and arrived is None
        self._is_armed = self._has_graph or self._stays_armed
        num_before = num_calls() if len(_reducers) > 1 else None
        self._step = Step(weakref.ref(close), is_opened_by_output=arrived is None, num_calls_before=num_before)
        queue_callback(close)
        if sum(map(len, self._hook_dicts)) > len(self._hooks):
            self._step.unsettled = self._put_hooks_last(arrived)
        self._notify(Event.BACKWARD)
        if self.replicas.taken or self.num_steps == self.replicas.next_due:
            # Ranks without data send no digest, and hooks of the script may keep replicas apart.
            may_send = self.only_step is None and self.reduction.sums_payloads
            is_compared = may_send and not is_capturing(self.bucket_set.device)
            self.weights.digest = self.replicas.digest(self.num_steps, is_compared=is_compared)
        self.weights.check_last_step()
        if self.weights.window is not None:
            self.weights.window.begin_backward(self._used, accumulates=False, arrived=arrived)

    # --- gradients arrive, buckets are launched ---------------------------------------------------------------------

    @staticmethod
    @keep_out_of_graphs
    def _on_gradient(reducer_ref: weakref.ref[Reducer], index: int, parameter: Tensor) -> None:
        """Record that a parameter's gradient was accumulated; launch the buckets that this completes."""
        self = reducer_ref()
        if self is None:
            return
        if self._step is None or self._step.callback() is None:  # not is_collecting, without a call
            with self._lock:
                if not self.is_collecting:  # unless another device's thread has opened the step in the meantime
                    if not self._is_armed and index in self._late:
                        self._unscaled = self.scaling
                    elif not self._is_armed:
                        self._used.update(self._drain(), (index,))
                        self._updates.on_local_gradient()
                        if self.weights.window is not None:
                            self.weights.window.on_local_gradient(index, self._used)
                        return
                    self._watch(range(len(self._hooks)))
                    self._open_step(arrived=index)
        step = self._step
        assert step is not None
        self._inbox.append(parameter)
        if len(self._inbox) >= step.num_awaited:
            with self._lock:
                self._launch_complete(step, index)

    def _note_arrivals(self, step: Step) -> None:
        """Record the gradients that have arrived since the last call."""
        arrived = self._drain()
        step.arrived += arrived
        step.received.update(arrived)
        self._used.update(arrived)
        if len(step.received) == len(step.arrived):
            return
        for index in arrived:
            # A second gradient: autograd has added it to the first, which is fine if that has not been launched.
            if self.bucket_set.position_of[index] < step.num_launched:
                raise LockstepError(
                    f"Rank {self._group.rank()}: parameter {self.bucket_set.names[index]} received a second "
                    "gradient in one backward, after its bucket had been sent.\nThis happens when a layer is "
                    "checkpointed several times with use_reentrant=True in some steps but not in the first. "
                    "Use use_reentrant=False."
                )

    def _launch_complete(self, step: Step, last: int) -> None:
        """Launch the complete buckets, up to the first that is incomplete or has to wait; ``last`` has just arrived."""
        self._note_arrivals(step)
        step.num_awaited = 1
        if self.before_launch is not None:  # buckets would disturb the order of collectives in layers
            return
        # Another wrapper may still launch the bucket that has one of these gradients.
        if self._sharers and any(other.is_collecting for other in self._sharers):
            return
        buckets = self.bucket_set.buckets if self.bucket_set.is_rebuilt else []  # the first step only observes
        for bucket in buckets[step.num_launched : len(buckets) - (not self._launches_last_early)]:
            num_missing = len(bucket.members - step.received)
            if num_missing:
                step.num_awaited = num_missing  # before that it cannot be complete
                return
            if bucket.spec.deferred or step.unsettled in bucket.members:
                break
            if last not in bucket.members:  # complete before, but unnoticed
                self._watch(bucket.members)
            self._launch(step, bucket)
            if self.finishes_early and self.weights.window is None and self.reduction.finishes_alone:
                self._finish_early(step)
        step.num_awaited = sys.maxsize  # the others wait until the step closes

    def _launch(
        self, step: Step, bucket: Bucket, *, message: Sequence[float] | None = None, alone: bool = False
    ) -> None:
        """Gather the gradients of the next bucket and start its reduction. Collective: every rank.

        Does not block, unless ``alone``: then there is nothing else to do, and it may block until complete.
        """
        step.num_launched += 1
        self._notify(Event.READY, bucket)
        all_used = len(self._used) == len(self.bucket_set.parameters) or bucket.members <= self._used
        if not all_used:
            bucket.check_missing(self._used)
        divisor = self.divisor if self.reduction.sums_payloads else None
        carrier = self.weights.carrier(step.carrier, bucket)
        message = (message or self.weights.message()) if carrier is bucket else None
        scale = self.weights.scale(bucket.spec.parameters, self._used, divisor, message)
        if self._skip_unused_buckets and bucket.members.isdisjoint(self._used):  # the caller: so it is on all ranks
            return
        step.carrier = carrier
        bucket.gather(None if all_used else self._used, scale, late=self.reduction.takes_pieces)
        self._notify(Event.GATHERED, bucket)
        # Also if not alone: on shm a call begins in this thread, and continues in it if no rank is late.
        bucket.future = self._wait_in(self.reduction.start, bucket, alone=alone, is_observed=alone)
        # From here on the reduction may write to the bucket until its future is done, even if this step fails.
        step.in_flight.append(bucket)
        self._notify(Event.LAUNCHED, bucket)

    # --- the step closes --------------------------------------------------------------------------------------------

    @keep_out_of_graphs
    def _close_step(self) -> None:
        """Launch the remaining buckets, wait for all, and settle the gradients that never arrived.

        Collective: every rank. autograd calls it when the whole backward is over; ``backward`` raises its errors.
        """
        with self._lock:
            step = self._step
            assert step is not None
            self._note_arrivals(step)
            self._notify(Event.BACKWARD_END)
            if len(_reducers) > 1:
                others = [other for other in live_reducers() if other is not self and other.is_collecting]
                for reducer in [self, *others] if others else ():  # one backward runs through several wrappers
                    reducer._launches_last_early = True
            step.callback = _nothing
            if self.before_launch is not None:
                self.before_launch()
            if not self.bucket_set.is_rebuilt:
                self.weights.agree_first(self.weights.message())
            message = self.weights.message()
            for bucket in self.bucket_set.buckets[step.num_launched :]:
                self._launch(step, bucket, message=message, alone=bucket.is_last)
            self._finish_all(step, message)
            has_new = self.weights.agree_on_new()
            if has_new:
                self._add_new(step, message)
            # Optimizers from `_apply_optimizer_in_backward` step now, and leave no gradients, as in torch.
            for parameter in self._optimizers_in_backward or ():
                for optimizer in in_backward_optimizers(parameter):
                    optimizer.step()
                parameter.grad = None
            # Now that gradients are settled, new buckets can adopt them.
            if not self.bucket_set.is_rebuilt or has_new:
                if not self.bucket_set.is_rebuilt:
                    self.bucket_set.rebuild(step.arrived, group=self._group)
                if step.is_opened_by_output and self.weights.window is None:
                    self._watch_last(step.arrived)
            if any(map(_missing_in, step.in_flight)):
                self._late = set(range(len(self._hooks))) - self._used
                self._watch(self._late)
            # A window of weights moves gradients away for a while.
            if self.num_steps + 1 == self.replicas.next_due and self.weights.window is None:
                self.replicas.after_step(self.bucket_set.parameters)
            self._used = set()
            self._updates.begin_count()
            if step.num_calls_before is not None:
                leave_out_calls(step.num_calls_before)
            self.num_buckets_reduced = len(step.in_flight)
            self._notify(Event.CLOSED)
            self._drop_step()
        # A model that chooses its layers may once choose none on all ranks.
        has_learned, self._learns = self._learns, step.is_used
        if self.is_anchored and not self._learns and not has_learned:
            raise ConfigurationError(_NOTHING_LEARNED)

    # [Note: how buckets are finished]
    # `_finish` is the one place where gradients are settled, in the order of launches: when backward is over for all
    # buckets (`_finish_all`), and within backward for those that are reduced by then (`_finish_early`). A rank without
    # data (`shadow_step`) has no gradients to settle, and only waits.

    def _finish_all(self, step: Step, message: Sequence[float]) -> None:
        """Finish all buckets that are in flight when backward is over. Collective: every rank. Blocks.

        Args:
            step: The step, which has launched all its buckets.
            message: This rank's weight message.
        """
        device = self.bucket_set.device
        # Which parameters any rank has used: needed for those without a gradient here. Usually the tails of the buckets
        # contain it. If some lacked gradients before, the hosts exchange it, as reading a tail would wait for a device.
        num_users = self._exchange_used() if self.weights.some_lack else None
        if self._finishing_stream is not None:  # the gradients of `_finish_early` are complete for what follows
            torch.accelerator.current_stream(device).wait_stream(self._finishing_stream)
        lacks = any(map(_missing_in, step.in_flight))
        self.weights.lacks_gradients = lacks and device.type != "cpu"
        if lacks and is_capturing(device):
            self._refuse_capture(step)
        if not step.in_flight and not self.weights.has_new:
            return
        unfinished = step.in_flight[step.num_finished :]
        # Without a sum of weights and separate counts, a bucket's own collective is enough.
        if self.weights.window is None and self.reduction.sums_payloads:
            self._finish(step, unfinished, num_users=num_users)
            self.weights.correction(step.carrier, None, message)  # raises if other ranks gave weights
            return
        factor, counts = self._correction(step.in_flight, step.carrier, message)
        if num_users is None and counts is not None and lacks:
            num_users = counts.tolist()
        self._finish(step, unfinished, factor, num_users)

    def _add_new(self, step: Step | None, message: Sequence[float]) -> None:
        """Add buckets for new parameters, and reduce their gradients; see [Note: unfrozen parameters].

        Collective: every rank. Blocks.

        Args:
            step: The step, whose other gradients are reduced; None: this rank has no data.
            message: This rank's weight message.

        Raises:
            ConfigurationError: On every rank: other parameters are new on other ranks.
        """
        buckets, device = self.bucket_set, self.bucket_set.device
        twice = [buckets.names[index] for index, count in Counter(step.arrived if step else ()).items() if count > 1]
        own = None if step is None else [buckets.names[buckets.num_planned :], twice]
        rows = [row for row in all_gather_object(own, group=self._group, device=device) if row is not None]
        names = rows[0][0]
        for others, _ in rows:
            if others != names:
                first = next((name for name in [*names, *others] if (name in names) != (name in others)), names[0])
                raise ConfigurationError(
                    f"Parameter {first} was frozen, and is trained now, but not on all ranks since the same forward.\n"
                    "Set requires_grad alike on all ranks, before the same step."
                )
        buckets.append(name for name in names if name in buckets.frozen)  # without data
        self._hook_parameters()
        repeated = set(chain.from_iterable(twice for _, twice in rows)).intersection(names)
        new = buckets.add_new(map(buckets.names.index, repeated), group=self._group)
        self.weights.has_new = False
        for bucket in new:
            if step is not None:
                self._launch(step, bucket)
            else:
                bucket.future = self._wait_in(self.reduction.start, bucket, alone=False)
        num_users = None
        if not self.reduction.sums_payloads:
            for bucket in new:
                self._wait_for(bucket)
            num_users = self.reduction.count_users(self._used_flags(), message, device)[0].tolist()
        if step is not None:
            new = step.in_flight[step.num_finished :]
            self._finish(step, new, num_users=num_users)
        for bucket in new:
            self._wait_for(bucket)

    def _refuse_capture(self, step: Step) -> NoReturn:
        """Raise an error: in a CUDA graph, which replays the same work, no host can decide about missing gradients."""
        # Not before the waits: a capture that has not joined the streams of the reductions ends with another error.
        for bucket in step.in_flight:
            self._wait_for(bucket)
        first = next(filter(_missing_in, step.in_flight))
        raise ConfigurationError(
            f"Parameter {first.names[min(first.missing)]} received no gradient in a step that is captured in a "
            "CUDA graph.\nFreeze what is not used (requires_grad_(False)) before wrapping, or train eagerly."
        )

    def _finish_early(self, step: Step) -> None:
        """Finish the first buckets in flight, as far as they are already reduced."""
        has_streams = self.bucket_set.device.type != "cpu"
        if has_streams and self._finishing_stream is None:  # a separate stream: backward must not wait for reductions
            self._finishing_stream = torch.Stream(self.bucket_set.device)

        with self._finishing_stream or nullcontext():
            for bucket in step.in_flight[step.num_finished :]:
                assert bucket.future is not None
                # Reading the tail would make the host wait for the device.
                if not bucket.future.done() or (has_streams and (bucket.missing or bucket.spec.sparse)):
                    break
                self._finish(step, [bucket])

    def _finish(
        self, step: Step, buckets: Iterable[Bucket], factor: float | Tensor = 1.0, num_users: list[int] | None = None
    ) -> None:
        """Wait for the next buckets in flight, one by one, and assign their gradients to the parameters.

        Args:
            step: Of the buckets.
            buckets: The next ones. Observers work on one while the next is under way.
            factor: The factor for the reduced gradients.
            num_users: By parameter, whether any rank used it; None: the reduction has counted them.
        """
        for bucket in buckets:
            self._wait_for(bucket)
            if isinstance(factor, Tensor) or factor != 1.0:
                bucket.scale(factor)
            step.is_used |= bucket.settle(num_users)
            step.num_finished += 1
            self._notify(Event.REDUCED, bucket)

    def _wait_for(self, bucket: Bucket) -> None:
        """Wait for ``bucket``, unless this has been done."""
        if bucket.future is not None:
            self._wait_in(self.reduction.finish, bucket, future=bucket.future)
            bucket.future = None

    def _wait_in(self, call: Callable[..., Any], bucket: Bucket, *, is_observed: bool = True, **arguments: Any) -> Any:
        """Make the call; report the bucket to the watchdog, to observers and in traces, and name it in errors."""
        activity.now.bucket = bucket.position, bucket.names
        if is_observed:
            self._notify(Event.WAIT, bucket)
        name = f"exchange/bucket {bucket.position}{' wait' * (bucket.future is not None)}" if ranges.now else ""
        try:
            with ranges.around(name):
                return call(bucket, **arguments)
        except ConfigurationError:  # an error of the caller, not of the reduction
            raise
        except RuntimeError as error:
            if is_of_signal_handler(error):
                raise
            raise CollectiveError(
                f"Rank {self._group.rank()}: the gradient reduction of bucket {bucket.position} "
                f"({bucket.names[0]} ... {bucket.names[-1]}) failed: {error}"
                + "\nAnother rank probably ended or ran no backward; look at the first error of the job."
                * (tells_of_others(error) == 2)
            ) from error
        finally:
            activity.now.bucket = None
            if is_observed:
                self._notify(Event.WAIT_END, bucket)

    def _correction(
        self, buckets: Sequence[Bucket], carrier: Bucket | None, message: Sequence[float]
    ) -> tuple[float | Tensor, Tensor | None]:
        """Return the factor for a weighted mean, and the number of ranks that used each parameter if tails lack it.

        Waits for those of ``buckets`` that are needed for this. Collective: every rank.

        Raises:
            ConfigurationError: On every rank: some ranks gave weights and others did not; names the latter.
        """
        counts = messages = None
        carrier = carrier if self.reduction.sums_payloads else None
        for bucket in buckets if carrier is None else [carrier]:
            self._wait_for(bucket)
        if not self.reduction.sums_payloads:
            counts, messages = self.reduction.count_users(self._used_flags(), message, self.weights.device)
        return self.weights.correction(carrier, messages, message), counts

    def _used_flags(self) -> list[bool]:
        return [index in self._used for index in range(self.bucket_set.num_planned)]

    def _exchange_used(self) -> list[int] | None:
        """Return by parameter whether any rank used it; None in a capture. Called if some rank lacked gradients before.

        Collective: every rank. See [Note: parameters without a gradient]. Blocks until all hosts are here.
        """
        if is_capturing(self.bucket_set.device):
            return None
        self._cpu_group = self._cpu_group or cpu_group(self._group)
        flags = torch.tensor(self._used_flags(), dtype=torch.uint8)
        all_reduce(flags, group=self._cpu_group, op="max")
        return cast("list[int]", flags.tolist())

    # --- a rank without data ----------------------------------------------------------------------------------------

    def shadow_step(self) -> None:
        """Take part in one step of the other ranks with zero gradients; ``param.grad`` does not change.

        A rank that still holds weighted gradients, because its data ended in ``no_sync()``, sends them instead.

        Collective: every rank that has data runs a synchronised backward. Blocks until complete.
        """
        window = self.weights.window
        if window is not None and window.holds_gradients(self._used):
            self.before_launch = None  # this rank has already taken part in all layers of the others
            self._step = Step()
            self._close_step()
            return
        self.weights.check_last_step()
        message = self.weights.encode()
        used, self._used = self._used, set()
        if not self.bucket_set.is_rebuilt:
            self.weights.agree_first(message)
        buckets = self.bucket_set.scratch()
        for bucket in buckets:
            bucket.future = self._wait_in(self.reduction.start, bucket, alone=False, is_observed=False)
        if self.weights.some_lack:
            self._exchange_used()
        self._correction(buckets, reduce(self.weights.carrier, buckets, None), message)
        for bucket in buckets:
            self._wait_for(bucket)
        if self.weights.agree_on_new(has_data=False):
            self._add_new(None, message)
        if not self.bucket_set.is_rebuilt:
            self.bucket_set.rebuild([], group=self._group)
        self._used, self.weights.num_updates = used, None

    # --- a step ends ------------------------------------------------------------------------------------------------

    def _abandon_step(self) -> None:
        """Discard a step that has failed; block until no reduction writes into its buckets any more."""
        step = self._step
        assert step is not None
        self._used.update(step.arrived, self._drain())  # the gradients stay
        self._drop_step()
        for bucket in step.in_flight[step.num_finished :]:
            if bucket.future is not None:
                with suppress(RuntimeError):  # it failed, too: nothing is written any more
                    wait_for_call(bucket.future)

    def _drop_step(self) -> None:
        self._step, self.weights.parts, self.weights.digest = None, set(), 0
        if self.weights.window is not None:
            self.weights.window.close()

    def _notify(self, kind: Event, bucket: Bucket | None = None) -> None:
        for observer in self.observers:
            observer.on_event(kind, bucket)


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def backward(loss: Tensor, *, mean_over: float | Tensor | None = None, count: float | Tensor | None = None) -> None:
    """Run ``loss.backward()`` with the weight ``mean_over`` for each wrapped model that it reaches.

    ``loss`` is a mean, unlike the ``total`` of a `lockstep.Loss`, which is a sum.

    It is short for ``model.mean_over(mean_over)`` on every ``DistributedDataParallel`` that takes part, and
    ``loss.backward()``; see `DistributedDataParallel.mean_over`. Call it once per micro-batch.

    Collective: every rank, if the backward is synchronised; it blocks as that backward does.

    Args:
        loss: A scalar: the mean loss of this rank's micro-batch; it may be scaled by a ``GradScaler``.
        mean_over: The number of samples or tokens that the loss is the mean of: a finite number, 0 or more, or a tensor
            with no dimensions.
        count: The former name of ``mean_over``.

    Raises:
        ConfigurationError: ``mean_over`` is not such a value, or the backward reached no wrapped model. On every rank,
            on a device from a later ``forward``: some ranks gave a weight and others did not; names the latter.
    """
    weight = check_weight(count if mean_over is None else mean_over)
    reducers = [reducer for reducer in live_reducers() if reducer.has_run]
    for reducer in reducers:
        reducer.set_weight(weight)
    try:
        loss.backward()
    finally:
        num_left_out = sum(reducer.discard_weight() for reducer in reducers)
    if num_left_out == len(reducers):
        raise ConfigurationError(
            "The backward reached no model that is wrapped in DistributedDataParallel, so mean_over had no effect.\n"
            "Compute the loss with the wrapped model, not with its .module, or call loss.backward()."
        )
