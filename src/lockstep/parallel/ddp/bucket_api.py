"""What a script can ask of the gradients of whole buckets: norms, clipping, finite or not, an optimizer in backward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.collectives import all_gather
from lockstep.errors import ConfigurationError, NonFiniteGradient
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.parallel.ddp.buckets import Bucket
from lockstep.parallel.ddp.reducer import Event, Reducer
from lockstep.parallel.ddp.torch_compat import TorchCompat
from lockstep.parallel.flat import are_finite, combine_norms, flat_norm, list_norms, multiply_, total


class FlatGradients:
    """What lies in ``param.grad`` of all ``parameters``, in as few pieces as can be.

    A bucket counts as one piece if each of its parameters has its gradient there. Where one has none, or one of its
    own, those of that bucket are taken one by one.

    Args:
        reducer: Has the buckets.
        parameters: Of the model; those that are in no bucket, too.
    """

    def __init__(self, reducer: Reducer, parameters: Iterable[nn.Parameter]) -> None:
        self._reducer = reducer
        bucketed = set(map(id, reducer.bucket_set.parameters))
        self._outside = [parameter for parameter in parameters if id(parameter) not in bucketed]
        self._norms: dict[Bucket, Tensor] = {}

    def expect_norm(self) -> None:
        """Compute the Euclidean norm of each bucket when it is reduced, while others travel; for the next `norm`.

        Only for a loop in which nothing changes gradients in between.
        """
        if self not in self._reducer.observers:
            self._reducer.observers.append(self)

    @torch.no_grad()
    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Take note of an event of the reducer."""
        if kind is Event.REDUCED and bucket is not None and not bucket.spec.sparse:
            self._norms[bucket] = flat_norm(bucket.gradients)

    @torch.no_grad()
    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients together, a 0-dimensional tensor; does not block."""
        early, self._norms = self._norms, {}  # they hold once: gradients may be changed
        norms: list[Tensor] = []
        others = _gradients_of(self._outside) if self._outside else []
        for bucket in self._reducer.bucket_set.buckets:
            if not bucket.holds_all:
                others += _gradients_of(bucket.parameters)
            elif bucket in early and norm_type == 2.0:
                norms.append(early[bucket])
            else:
                norms.append(flat_norm(bucket.gradients, norm_type))
        if others:
            norms += list_norms(others, norm_type)
        return combine_norms(norms, norm_type)

    def is_finite(self, norm: Tensor) -> bool:
        """Return whether all gradients are finite, whose `norm` times something finite is ``norm``. Blocks on CUDA."""
        return math.isfinite(float(norm)) or are_finite(self.tensors(), norm)

    def tensors(self) -> list[Tensor]:
        """Return tensors that together hold all gradients."""
        return _gradients_of(self._outside) + self.reduced()

    def reduced(self) -> list[Tensor]:
        """Return tensors that together hold all gradients that are the same on every rank: those of the buckets."""
        tensors: list[Tensor] = []
        for bucket in self._reducer.bucket_set.buckets:
            tensors += [bucket.gradients] if bucket.holds_all else _gradients_of(bucket.parameters)
        return tensors

    def multiply_(self, factor: Tensor) -> None:
        """Multiply all gradients in place by a 0-dimensional tensor; not at all by one that is known to be 1."""
        multiply_(self.tensors(), factor)


def _gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class LocalGradientMonitor:
    """Whether this rank's own gradients were finite in the last backward, when their buckets were launched."""

    def __init__(self) -> None:
        self._totals: list[Tensor] = []

    @torch.no_grad()
    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Take note of an event of the reducer. Does not block."""
        if kind is Event.BACKWARD:
            self._totals = []
        elif kind is Event.GATHERED and bucket is not None and not bucket.spec.sparse:
            # A reduced gradient shows that it is not finite, but not by which rank: the part of this rank is
            # gone by then. One pass over the bucket, whose result stays on the device until it is needed.
            self._totals.append(total(bucket.gradients))

    def saw_nonfinite(self) -> bool:
        """Return whether one of them was not. Blocks."""
        return any(not bool(each.isfinite()) for each in self._totals)


class BucketOptimizer:
    """Steps ``optimizer`` a bucket at a time inside backward; an observer of the reducer.

    A parameter's gradient is complete when all that backward computes with the parameter has run, so it may change
    while backward goes on. Where something else still needs its old value, autograd raises ("modified by an inplace
    operation").

    Args:
        optimizer: Of parameters that the reducer holds, and maybe others: those are stepped when the step closes.

    Raises:
        ConfigurationError: The optimizer cannot step without being called with a closure.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigurationError(
                f"{name} computes the loss anew within its step, so it cannot step within backward.\n"
                "Call its step(closure) after backward."
            )
        self._optimizer = optimizer
        # The parameters that are still to be stepped, with the place of their group; None between two steps. It is made
        # anew in each, since parameters may be added to the optimizer.
        self._left: dict[nn.Parameter, int] | None = None
        self._changed: dict[int, dict[str, Any]] = {}  # by place of a group, what the steps changed in it
        self._is_stepping = False
        self._handle = optimizer.register_step_pre_hook(self._refuse_others)

    def remove(self) -> None:
        """Let the optimizer be stepped as before."""
        self._handle.remove()

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Take note of an event of the reducer."""
        if kind is Event.BACKWARD:
            self._left, self._changed = None, {}  # of a backward that failed
        elif kind is Event.REDUCED and bucket is not None:
            self._step(bucket.parameters)
        elif kind is Event.CLOSED:
            self._step(None)
            for place, values in self._changed.items():
                self._optimizer.param_groups[place].update(values)
            self._left, self._changed = None, {}

    def _step(self, parameters: Iterable[nn.Parameter] | None) -> None:
        """Step those of ``parameters`` that the optimizer has; None: all that are left."""
        optimizer, whole = self._optimizer, self._optimizer.param_groups
        if self._left is None:
            self._left = {each: place for place, group in enumerate(whole) for each in group["params"]}
        members: dict[int, list[nn.Parameter]] = {}
        for parameter in list(self._left) if parameters is None else parameters:
            place = self._left.pop(parameter, None)
            if place is not None:
                members.setdefault(place, []).append(parameter)
        if not members:
            return
        # The optimizer gets ``param_groups`` that hold these parameters and copies of all else. So its state stays
        # where it is, schedulers see nothing of it, and what a step counts in a group is counted once, when the step
        # closes. Whatever treats each parameter on its own gives the same bits as one step over all.
        parts = {place: {**whole[place], "params": part} for place, part in members.items()}
        self._is_stepping = True
        optimizer.param_groups = list(parts.values())
        try:
            optimizer.step()
        finally:
            self._is_stepping = False
            optimizer.param_groups = whole
        for place, part in parts.items():
            changed = {key: part[key] for key in part if key != "params" and part[key] is not whole[place].get(key)}
            self._changed.setdefault(place, {}).update(changed)

    def _refuse_others(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_stepping:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() was called, but it steps within backward since "
                "overlap_optimizer() was called.\nLeave the call out."
            )


class BucketApi(TorchCompat):
    """The part of ``DistributedDataParallel`` that works on the gradients of whole buckets."""

    # For `fit`: the gradients, a tensor for each bucket.
    flat_gradients: FlatGradients

    _monitor: LocalGradientMonitor | None

    def stamp_buckets(self, stamps: BucketStamps | None) -> None:
        """For whoever records steps: have the moments of buckets taken from now on, or with None not any more."""
        observers = self._reducer.observers
        observers[:] = [each for each in observers if not isinstance(each, BucketStamps)]
        if stamps is not None:
            observers.append(stamps)

    def _refuse_slices(self, method: str, how: str = "") -> None:
        if not self._reducer.reduction.leaves_whole:
            raise ConfigurationError(
                f"{method}() needs all gradients, but with shard_gradients=True each rank has a slice of them.\n"
                f"Call clip_grad_norm_() of the optimizer{how}."
            )

    def gradients_are_finite(self) -> bool:
        """Return whether no gradient is NaN or infinite: the same verdict on every rank, after the same backward.

        Not collective: NaN and infinity survive the sum over the ranks, all of which hold the same bits of it. So all
        can skip the same step without asking each other. Parameters that are not synchronised are left out. Blocks
        until backward is done.

        Raises:
            ConfigurationError: This rank has only a slice of the gradients.
        """
        self._refuse_slices("gradients_are_finite", " with max_norm=math.inf, which returns the norm of all")
        reduced = self.flat_gradients.reduced()
        return are_finite(reduced, combine_norms(list_norms(reduced)))

    def check_gradients(self) -> None:
        """Raise an error that names rank and parameter if a gradient is NaN or infinite.

        Call it between backward and ``optimizer.step()``. From the first call on each bucket is checked when it
        is launched, so the ranks are known in all steps behind the first. Blocks until backward is done.

        Collective if a gradient is not finite: every rank.

        Raises:
            NonFiniteGradient: On every rank.
            ConfigurationError: This rank has only a slice of the gradients.
        """
        was_monitored = self._monitor is not None
        saw_nonfinite = self.monitor_local_gradients()
        if self.gradients_are_finite():
            return
        buckets = self._reducer.bucket_set
        first = next(
            name
            for name, parameter in zip(buckets.names, buckets.parameters, strict=True)
            if not are_finite(_gradients_of([parameter]), torch.tensor(math.nan))
        )
        is_here = torch.tensor([int(was_monitored and saw_nonfinite())], device=self.device)
        ranks = [rank for rank, each in enumerate(all_gather(is_here, group=self.process_group)) if int(each)]
        where = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
        raise NonFiniteGradient(
            f"The gradient is not finite{where}: first that of parameter {first}.\n"
            "Look at the loss and the samples of this step there. To go on without the step, ask "
            "gradients_are_finite() and call optimizer.step() only if they are.",
            ranks=tuple(ranks),
        )

    def monitor_local_gradients(self) -> Callable[[], bool]:
        """For `fit`: check each bucket when it is launched, from now on.

        Returns:
            A function: whether this rank's part of the last backward was not finite. Blocks.
        """
        if self._monitor is None:
            self._monitor = LocalGradientMonitor()
            self._reducer.observers.append(self._monitor)
        return self._monitor.saw_nonfinite

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients down so that their norm is at most ``max_norm``; return the norm they had.

        As ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, but a bucket at a time, which takes far fewer
        kernels, and the norm is as accurate for large parameters as for small ones. Not collective: after a
        synchronised backward all ranks hold the same gradients and find the same norm. Does not block.

        Args:
            max_norm: The largest norm allowed.
            norm_type: The p of the p-norm; may be infinite.

        Raises:
            ConfigurationError: This rank has only a slice of the gradients.
        """
        self._refuse_slices("clip_grad_norm_")
        norm_type = float(norm_type)
        if norm_type <= 0:
            return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)
        norm = self.flat_gradients.norm(norm_type)
        self.flat_gradients.multiply_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def overlap_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Let ``optimizer`` step within backward from now on, each bucket as soon as it is reduced.

        Each synchronised backward then ends with the parameters updated, to the same bits as ``optimizer.step()`` after
        it would, for every optimizer that treats each parameter on its own and draws no random numbers. Gradients
        stay until they are zeroed. Nothing may read or change gradients in between: no clipping, no loss scaling.
        ``optimizer.step()`` raises as long as this holds; learning-rate schedulers step after backward as ever.

        With weights (`weight`) and with communication hooks all buckets are stepped when backward ends.

        Args:
            optimizer: Of this model's parameters.

        Returns:
            What ends it.

        Raises:
            ConfigurationError: The optimizer cannot step without a closure, or divides its work among the ranks.
        """
        reducer = self._reducer
        if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
            raise ConfigurationError(
                "overlap_optimizer() cannot be had with ZeroRedundancyOptimizer, which divides a step among ranks."
                "\nCall optimizer.step() after backward."
            )
        stepping = BucketOptimizer(optimizer)
        reducer.set_reduction(reducer.reduction)  # a rank alone begins to watch its gradients
        reducer.observers.append(stepping)
        reducer.finishes_early = True

        def end() -> None:
            reducer.observers.remove(stepping)
            stepping.remove()

        return end
