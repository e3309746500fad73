"""Optimizers that step inside backward, each bucket as soon as it is reduced."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.comm.collectives import in_backward_hooks
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.buckets import Bucket

# An optimizer that steps a bucket at a time, as soon as each bucket is reduced.
#
# [Note: stepping during backward]
# A parameter's gradient is complete when all that backward computes with the parameter has run, so it may change
# while backward goes on. Where something else still needs its old value, autograd says so ("modified by an inplace
# operation").
#
# [Note: parts of a step]
# The optimizer gets ``param_groups`` that hold the bucket's parameters and copies of all else. So its state stays
# where it is, schedulers see nothing of it, and what a step counts in a group is counted once: it is written back
# when the step closes. Whatever treats each parameter on its own gives the same bits as one step over all.

_Plan = list[tuple[int, list[nn.Parameter]]]
"""Which parameters of which groups are stepped together."""


class BucketOptimizer:
    """Steps ``optimizer`` inside backward.

    Args:
        optimizer: Of parameters that the reducer holds, and maybe others: those are stepped when the step closes.
        reduced: The parameters that the reducer holds.

    Raises:
        ConfigurationError: The optimizer cannot step without being called with a closure.
    """

    def __init__(self, optimizer: Optimizer, reduced: Sequence[nn.Parameter]) -> None:
        name = type(optimizer).__name__
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigurationError(
                f"{name} computes the loss anew within its step, so it cannot step within backward.\n"
                "Call its step(closure) after backward."
            )
        self._optimizer = optimizer
        self._reduced = {id(parameter) for parameter in reduced}
        self._plans: weakref.WeakKeyDictionary[Bucket, _Plan] = weakref.WeakKeyDictionary()
        self._plan_outside: _Plan = []
        self._sizes: list[int] = []
        self._done: list[Bucket] = []
        self._changed: dict[int, dict[str, Any]] = {}
        self._is_stepping = False
        self._handle = optimizer.register_step_pre_hook(self._refuse_others)

    def remove(self) -> None:
        """Let the optimizer be stepped as before."""
        self._handle.remove()

    def on_reduced(self, bucket: Bucket) -> None:
        """Step the parameters of a bucket that is reduced now."""
        self._notice_new_parameters()
        plan = self._plans.get(bucket)
        if plan is None:
            plan = self._plans[bucket] = self._part({id(parameter) for parameter in bucket.parameters})
        self._step(plan)
        self._done.append(bucket)

    def on_closed(self, had_data: bool) -> None:
        """Step what no bucket had; take note of what the optimizer counts in its groups."""
        if had_data:
            self._notice_new_parameters()
            self._step(self._plan_outside)
            if sum(len(bucket.parameters) for bucket in self._done) < len(self._reduced):  # some buckets did not leave
                done = {id(parameter) for bucket in self._done for parameter in bucket.parameters}
                self._step(self._part(self._reduced - done))
            for place, values in self._changed.items():
                self._optimizer.param_groups[place].update(values)
        self._done, self._changed = [], {}

    def _notice_new_parameters(self) -> None:
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        if sizes != self._sizes:
            self._sizes = sizes
            self._plans.clear()
            everything = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
            self._plan_outside = self._part(everything - self._reduced)

    def _part(self, members: Set[int]) -> _Plan:
        """Return by place of a group which of ``members``, parameters by ``id``, are in it."""
        mine = [[each for each in group["params"] if id(each) in members] for group in self._optimizer.param_groups]
        return [(place, parameters) for place, parameters in enumerate(mine) if parameters]

    def _step(self, plan: _Plan) -> None:
        if not plan:
            return
        optimizer, whole = self._optimizer, self._optimizer.param_groups
        parts = [{**whole[place], "params": parameters} for place, parameters in plan]
        self._is_stepping = True
        optimizer.param_groups = parts
        try:
            optimizer.step()
        finally:
            self._is_stepping = False
            optimizer.param_groups = whole
        for (place, _), part in zip(plan, parts, strict=True):
            changed = {key: part[key] for key in part if key != "params" and part[key] is not whole[place].get(key)}
            if changed:
                self._changed.setdefault(place, {}).update(changed)

    def _refuse_others(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_stepping:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() was called, but it steps within backward since "
                "overlap_optimizer() was called.\nLeave the call out."
            )


# Optimizers that run inside backward, set up with ``torch.distributed.optim._apply_optimizer_in_backward``.


def take_over_optimizers(parameters: Iterable[nn.Parameter]) -> Callable[[], None] | None:
    """Return what runs the parameters' own optimizers and frees their gradients; None if they have none.

    Torch's hooks, which would step as soon as this rank's gradient is there, are removed: the optimizers are to be
    run when the gradients have been averaged.
    """
    ours = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    for parameter in ours:
        for handle in in_backward_hooks(parameter):
            handle.remove()

    def step() -> None:
        for parameter in ours:
            for optimizer in parameter._in_backward_optimizers:
                optimizer.step()
            parameter.grad = None

    return step if ours else None
