"""What works on the gradients of whole buckets: their norms, checks of their values, an optimizer in backward."""

import ctypes
import inspect
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base.activity import format_ranks
from lockstep.comm.collectives import Group, all_gather
from lockstep.errors import ConfigurationError, NonFiniteGradient
from lockstep.parallel.ddp.bucket_events import Event
from lockstep.parallel.ddp.buckets import Bucket, BucketSet
from lockstep.parallel.ddp.comm_hooks import AllReduceMean
from lockstep.parallel.ddp.reducer import Reducer
from lockstep.parallel.flat import are_finite, combine_norms, flat_norm, list_norms, multiply_, total


class FlatGradients:
    """The gradients (``param.grad``) of all ``parameters``, in as few tensors as possible.

    A bucket is one tensor if every one of its parameters has its gradient in the bucket. If a parameter has none, or
    one outside of the bucket, the gradients of that bucket are taken one by one.

    Args:
        reducer: The reducer of the buckets.
        parameters: All parameters of the model, including those that are in no bucket.
    """

    def __init__(self, reducer: Reducer, parameters: Iterable[nn.Parameter]) -> None:
        self._reducer, self._parameters = reducer, list(parameters)
        self._outside_of: tuple[Sequence[Bucket], list[nn.Parameter]] = (), []
        self._norms: dict[Bucket, Tensor] = {}

    @property
    def _outside(self) -> list[nn.Parameter]:
        """The parameters that are in no bucket."""
        bucket_set = self._reducer.bucket_set
        if self._outside_of[0] is not bucket_set.buckets:
            outside = [parameter for parameter in self._parameters if id(parameter) not in bucket_set.index_of]
            self._outside_of = bucket_set.buckets, outside
        return self._outside_of[1]

    def expect_norm(self) -> None:
        """Compute the Euclidean norm of each bucket once it is reduced, while others are sent; for the next `norm`.

        On a device that is beside backward, on a stream of the reducer. Only for a loop in which nothing changes
        gradients in between.
        """
        if self not in self._reducer.observers:
            self._reducer.observers.append(self)
        self._reducer.finishes_early |= self._reducer.bucket_set.device.type != "cpu"

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Handle an event of the reducer."""
        if kind is Event.REDUCED and bucket is not None and not bucket.spec.sparse:
            with torch.no_grad():  # not around the many other events of a step
                self._norms[bucket] = flat_norm(bucket.gradients)

    @torch.no_grad()
    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients together, a 0-dimensional tensor; does not block."""
        early, self._norms = self._norms if norm_type == 2.0 else {}, {}  # used only once: gradients may change
        norms: list[Tensor] = []
        gradients = gradients_of(self._outside) if self._outside else []
        for bucket in self._reducer.bucket_set.buckets:
            if bucket.holds_all:
                norms.append(early[bucket] if bucket in early else flat_norm(bucket.gradients, norm_type))
            else:
                gradients += gradients_of(bucket.parameters)
        return combine_norms([*norms, *list_norms(gradients, norm_type)] if gradients else norms, norm_type)

    def is_finite(self, norm: Tensor) -> bool:
        """Return whether all gradients are finite. ``norm`` is their `norm` times a finite factor. Blocks."""
        return are_finite(self.tensors(), norm)

    def tensors(self) -> list[Tensor]:
        """Return tensors that together hold all gradients."""
        return gradients_of(self._outside) + self.reduced()

    def reduced(self) -> list[Tensor]:
        """Return tensors that together hold the gradients in buckets, which are equal on every rank."""
        buckets = self._reducer.bucket_set.buckets
        parts = ([bucket.gradients] if bucket.holds_all else gradients_of(bucket.parameters) for bucket in buckets)
        return list(chain.from_iterable(parts))

    def multiply_(self, factor: Tensor) -> None:
        """Multiply all gradients in place by a 0-dimensional tensor; do nothing if it is known to be 1."""
        multiply_(self.tensors(), factor)


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class LocalGradientMonitor:
    """Checks whether this rank's own gradients were finite in the last backward, before they were reduced.

    On a device, it sums a bucket on a stream of its own, beside backward, and has the all-reduce launched from that
    stream: it waits for the stream that launches it, and writes to what the sum reads. This rank's stream waits for the
    all-reduce, and so for the sum, when it finishes the bucket. Other reductions compute when they are launched, with
    memory of this rank's stream, so with these the sum is computed on this rank's stream.

    Args:
        reducer: Of the buckets.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._totals: list[Tensor] = []
        self._flags: list[ctypes.Array[ctypes.c_int32]] = []
        self._stream: torch.Stream | None = None
        self._inside = ExitStack()

    @torch.no_grad()
    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Handle an event of the reducer. Does not block."""
        # A reduced gradient does not show which rank's gradient was not finite.
        if kind in (Event.BACKWARD, Event.LAUNCHED):
            self._inside.close()
        if kind is Event.BACKWARD:
            self._totals, self._flags = [], []
        elif kind is not Event.GATHERED or bucket is None or bucket.spec.sparse:
            return
        elif bucket.pieces is not None:
            flag = (ctypes.c_int32 * 1)()
            bucket.pieces = bucket.pieces._replace(nonfinite=flag)
            self._flags.append(flag)
        else:  # one pass over the bucket; the result stays on the device until it is needed
            device = bucket.spec.device
            if device.type != "cpu" and isinstance(self._reducer.reduction, AllReduceMean):
                self._stream = self._stream or torch.Stream(device)
                self._stream.wait_stream(torch.accelerator.current_stream(device))
                self._inside.enter_context(self._stream)
            self._totals.append(total(bucket.gradients))

    def saw_nonfinite(self) -> bool:
        """Return whether a gradient was not finite. Blocks."""
        return any(flag[0] for flag in self._flags) or any(not bool(total.isfinite()) for total in self._totals)


def refuse_nonfinite(buckets: BucketSet, is_here: bool, *, group: Group) -> NoReturn:
    """Raise an error that names the first gradient that is NaN or infinite, and ranks. Collective: every rank. Blocks.

    Args:
        buckets: Of the gradients.
        is_here: Whether this rank's part was not finite, as far as known.
        group: The ranks.
    """
    named = zip(buckets.names, map(gradients_of, zip(buckets.parameters)), strict=True)
    first = next(name for name, gradient in named if not are_finite(gradient))
    everywhere = all_gather(torch.tensor([int(is_here)], device=buckets.device), group=group)
    ranks = [rank for rank, flag in enumerate(everywhere) if int(flag)]
    ranks_text = f" on {format_ranks(ranks)}" if ranks else ""
    raise NonFiniteGradient(
        f"The gradient is not finite{ranks_text}: first that of parameter {first}.\n"
        "Look at the loss and the samples of this step there. To go on without the step, ask "
        "gradients_are_finite() and call optimizer.step() only if they are.",
        ranks=tuple(ranks),
    )


class BucketOptimizer:
    """Steps ``optimizer`` one bucket at a time within backward; an observer of the reducer.

    When a parameter's gradient is complete, backward has finished all computations with the parameter, so it may change
    while backward goes on. If some other computation still needs the old value, autograd raises ("modified by an
    inplace operation").

    Args:
        optimizer: Of the reducer's parameters, and maybe of others, which are stepped when the step closes.

    Attributes:
        remove: Restores the optimizer's ordinary ``step``.

    Raises:
        ConfigurationError: The optimizer cannot step without being called with a closure, or divides its work.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
            raise ConfigurationError(
                "overlap_optimizer() does not work with ZeroRedundancyOptimizer, which divides a step among ranks."
                "\nCall optimizer.step() after backward."
            )
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigurationError(
                f"{type(optimizer).__name__} computes the loss again in its step, so it cannot step during backward.\n"
                "Call its step(closure) after backward."
            )
        self._optimizer = optimizer
        # The parameters that are not stepped yet, with the index of their group. Created again in each step, since
        # parameters may be added to the optimizer, and a backward may have failed.
        self._left: dict[nn.Parameter, int] = {}
        self._changed: dict[int, dict[str, Any]] = {}  # by index of a group, the values that the steps changed in it
        self._is_stepping = False
        self.remove = optimizer.register_step_pre_hook(self._refuse_others).remove

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Handle an event of the reducer."""
        groups = self._optimizer.param_groups
        if kind is Event.BACKWARD:
            self._left = {parameter: place for place, group in enumerate(groups) for parameter in group["params"]}
            self._changed = {}
        elif kind is Event.REDUCED and bucket is not None:
            self._step(bucket.parameters)
        elif kind is Event.CLOSED:
            self._step(list(self._left))
            for place, values in self._changed.items():
                groups[place].update(values)

    def _step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Step those of ``parameters`` that the optimizer has."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        members: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            place = self._left.pop(parameter, None)
            if place is not None:
                members.setdefault(place, []).append(parameter)
        if not members:
            return
        # The optimizer temporarily gets ``param_groups`` with only these parameters and copies of everything else. So
        # its state is not moved, schedulers do not notice, and a counter in a group advances only once, when the step
        # closes. An optimizer that treats each parameter separately gives the same bits as in one step over all.
        parts = {place: {**groups[place], "params": part} for place, part in members.items()}
        self._is_stepping = True
        optimizer.param_groups = list(parts.values())
        try:
            optimizer.step()
        finally:
            self._is_stepping = False
            optimizer.param_groups = groups
        for place, part in parts.items():
            changed = {key: part[key] for key in part if key != "params" and part[key] is not groups[place].get(key)}
            self._changed.setdefault(place, {}).update(changed)

    def _refuse_others(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_stepping:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() was called, but overlap_optimizer() makes it step during "
                "backward.\nLeave the call out."
            )
