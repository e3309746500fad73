"""When each bucket is reduced, and what a backward leaves in ``param.grad``. Design: docs/design/ddp.md.

[Note: when a backward is synchronised]
``forward`` hooks the tensors it returns. The first such hook that autograd runs opens the step: at that moment we are
in the outermost graph task, so a callback queued there runs when the whole backward is over, whatever nested
backwards reentrant checkpointing starts. That callback closes the step. So each backward through an output of the
wrapper is one synchronised step, however many there are. ``prepare_for_backward`` also arms the reducer, as torch's
does, for outputs that we cannot find: then the first gradient opens the step.

[Note: parameters without a gradient]
A bucket that is complete is launched at once, in the order of the plan; closing the step launches the others, with
zeros for gradients that never came. The tail of each bucket counts the ranks on which each parameter received a
gradient since the last synchronised step. Only a rank that lacks a gradient reads its tail: a parameter that another
rank used takes the reduced gradient, one that nobody used keeps what it had, and None stays None.

[Note: the first step]
The first synchronised backward launches nothing before its end. It shows in which order gradients arrive and which
parameters receive several in one backward (a shared layer under reentrant checkpointing). All ranks agree on what
they saw, and the buckets are built anew, once. Parameters that received several gradients are reduced at the end of
backward from then on, since no arrival of theirs is known to be the last. Steps in which some rank may be without a
batch launch nothing before their end either: ``at_end`` is set then, and called first; see follow.py.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable
from torch.futures import Future

from lockstep.comm.collectives import Group, is_native
from lockstep.parallel.ddp.arrivals import Arrivals
from lockstep.parallel.ddp.ballot import Ballot
from lockstep.parallel.ddp.bucket import Bucket
from lockstep.parallel.ddp.bucket_row import BucketRow
from lockstep.parallel.ddp.departures import Departures
from lockstep.parallel.ddp.dynamo import keep_out_of_graphs, refuse_compiled_autograd
from lockstep.parallel.ddp.in_backward import take_over_optimizers
from lockstep.parallel.ddp.neighbours import Neighbours, introduce, look_for_others
from lockstep.parallel.ddp.outputs import find_tensors
from lockstep.parallel.ddp.parameter_hooks import second_gradient
from lockstep.parallel.ddp.step_times import Moment, StepTimes
from lockstep.parallel.ddp.transport import CommHook, HookTransport, Transport
from lockstep.parallel.ddp.weights import Weights


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

    def __init__(self, row: BucketRow, *, group: Group, skip_unused_buckets: bool = False) -> None:
        self.at_end: Callable[[], None] | None = None
        self.opened_s = 0.0
        self.on_closed: list[Callable[[bool], None]] = []
        self.post_backward: list[Future[Any]] = []  # waited for when the step closes
        self.row = row
        self._group = group
        self.weights = Weights(group, row.device)
        self.times = StepTimes(row.device)
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
        self.set_transport(HookTransport(self._group, hook, state))

    def set_transport(self, transport: Transport) -> None:
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
            self.weights.call_the_roll(Ballot())
        self.departures.complete_scratch(self.row.scratch())
        if not self.row.is_rebuilt:
            self.row.rebuild([], group=self._group)
        self._tell_closed(had_data=False)

    def _tell_closed(self, *, had_data: bool) -> None:
        for callback in self.on_closed:
            callback(had_data)
