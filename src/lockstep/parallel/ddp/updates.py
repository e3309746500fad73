"""Refuses optimizer steps on gradients that were not averaged, and steps of ranks that are not in the same one."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lockstep.comm.collectives import Group, all_gather_object
from lockstep.errors import ConfigurationError
from lockstep.health.heartbeat import num_calls
from lockstep.parallel.compile import keep_out_of_graphs
from lockstep.parallel.ddp.buckets import BucketSet
from lockstep.parallel.ddp.weighting import Weights, all_zero

# Called with the optimizer, and with what its closure has returned; None without a closure.
BeforeUpdate = Callable[[Optimizer, Any], None]
_functions: dict[BeforeUpdate, None] = {}
_hooks: list[Any] = []  # of all optimizers, once in a process
# Of each optimizer, its steps without a gradient, 3 or more: it is not watched; and backwards of wrappers before.
_idle: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_num_backwards = 0
# The collectives of synchronised backwards, if there are several wrappers, and of all when the last of these ended.
_num_of_wrappers = _num_at_last_close = 0


def leave_out_calls(before: int) -> None:
    """Record that the collectives after the first ``before`` were called by a wrapper, not by the script."""
    global _num_of_wrappers, _num_at_last_close
    now = num_calls()
    _num_of_wrappers += now - max(before, _num_at_last_close)  # steps of two wrappers may overlap
    _num_at_last_close = now


def call_before_updates(function: BeforeUpdate) -> Callable[[], object]:
    """Call ``function`` before each update by an optimizer in this process: after its closure, if it is given one.

    Returns:
        A function that ends it.
    """

    @keep_out_of_graphs
    def before_update(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call_all(loss: Any = None) -> None:
            for callback in list(_functions):
                callback(optimizer, loss)

        closure = kwargs.get("closure", next(iter(args[1:]), None))
        if not callable(closure):
            return call_all()

        def call_closure() -> Any:
            loss = closure()
            call_all(loss)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": call_closure}
        return (args[0], call_closure, *args[2:]), kwargs

    _functions[function] = None
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(before_update))
    return partial(_functions.pop, function, None)


def refuse_outside(optimizer: Optimizer, prepared: Set[int]) -> None:
    """Refuse an optimizer over a trainable parameter that is in no prepared model.

    Args:
        optimizer: Of a prepared script.
        prepared: The ids of the parameters of prepared models.

    Raises:
        ConfigurationError: There is such a parameter.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in prepared:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} updates a parameter of shape {list(parameter.shape)}, in group "
                    f"{number}, that is in no prepared model: its gradients would not be averaged over the ranks.\n"
                    "Pass each trained model to prepare(), together with its optimizer or before."
                )


def warn_if_idle(optimizer: Optimizer) -> None:
    """Warn in the third step of an optimizer that had no gradient in any, each after a backward of a wrapped model."""
    num_idle, num_before = _idle.get(optimizer, (0, 0))
    if num_idle > 2 or num_before == _num_backwards:
        return
    parameters = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    # Without parameters it may be this rank's part of a ZeroRedundancyOptimizer.
    is_idle = bool(parameters) and all(parameter.grad is None for parameter in parameters)
    _idle[optimizer] = (num_idle + 1 if is_idle else 3), _num_backwards
    if is_idle and num_idle == 2:
        warnings.warn(
            f"{type(optimizer).__name__}.step() has updated nothing in 3 steps: none of its parameters had a "
            "gradient.\nGive it the parameters of the model that is wrapped, after that is copied or converted, and "
            "compute the loss from what the wrapped model returns, not detached.",
            stacklevel=2,
        )


class Updates:
    """The optimizer steps over the parameters of one reducer.

    [Note: updates]
    An optimizer may step within backward, before a gradient is averaged, or with gradients that stayed on this rank:
    the last backward of a step ran in ``no_sync()``, or through the bare module. The reducer knows these parameters, so
    nothing is read unless there are some. Gradients that are all zero are in order, as in the first step of an
    optimizer that creates its state. If the script has called collectives since the last forward, it may have averaged
    the gradients itself, or it averages parameters (local SGD). So an error needs a script that accumulates gradients
    and has called none; one of the two is a warning, once.

    The reducer also counts the steps between two reductions, and the ranks compare the numbers in their weight
    messages: a rank that ran a backward less than the others has stepped once more since its last reduction, and one
    that ran a backward more, or left out a step, once less. Some optimizers call this hook twice a step (a subclass
    that calls ``super().step()``, a wrapper around another optimizer), depending on what the process has created
    before, and some never. So only the first step after a forward counts, and a number is known only if a step was
    counted before it.

    Args:
        bucket_set: The parameters.
        weights: They send the number of steps.
        group: The ranks.

    Attributes:
        is_strict: Whether such gradients are an error in any case: a prepared script averages none itself.
    """

    def __init__(self, bucket_set: BucketSet, weights: Weights, group: Group) -> None:
        self._bucket_set, self._weights, self._group = bucket_set, weights, group
        self._num_forwards = self._num_forwards_updated = 0  # with a synchronised backward; before the last step
        # Of collectives, before the last forward without a synchronised backward; None: it is not known.
        self._num_calls: int | None = None
        self._accumulates = self._has_warned = self._has_counted = self.is_strict = False

    def begin_forward(self, *, will_sync: bool, has_gradients: bool) -> None:
        """Record a forward, and whether there are gradients of this rank alone."""
        if will_sync:
            self._num_forwards += 1
            self._accumulates |= has_gradients and not self._has_warned
        else:
            self._num_calls = num_calls() - _num_of_wrappers

    def on_local_gradient(self) -> None:
        """Record a gradient that stays on this rank; it may come through the bare module, which has no forward here."""
        if self._num_calls is None and not self._num_forwards:  # else it may be of a term that is equal on all ranks
            self._num_calls = num_calls() - _num_of_wrappers

    def count(self) -> None:
        """Count a step, if it is the first after a forward."""
        if self._num_forwards > self._num_forwards_updated:
            self._num_forwards_updated, self._has_counted = self._num_forwards, True
            if self._weights.num_updates is not None:
                self._weights.num_updates += 1

    def begin_count(self) -> None:
        """Count anew after a reduction."""
        global _num_backwards
        _num_backwards += 1
        self._weights.num_updates = 0 if self._has_counted else None
        self._has_counted = False

    def refuse_early(self, optimizer: Optimizer, indices: Iterable[int], finished: Sequence[int]) -> None:
        """Refuse a step within backward over parameters that are not in a bucket of ``finished``.

        Raises:
            ConfigurationError: There is such a parameter.
        """
        for index in indices:
            if self._bucket_set.position_of[index] not in finished:
                raise ConfigurationError(
                    f"{self._name(optimizer)} was called within backward, before the gradient of parameter "
                    f"{self._bucket_set.names[index]} was averaged over the ranks.\n"
                    "Call it after backward, or leave it to model.overlap_optimizer(optimizer)."
                )

    def refuse_local(
        self, optimizer: Optimizer, indices: Iterable[int], used: Set[int], *, others_average: bool
    ) -> None:
        """Refuse a step over parameters with gradients that stayed on this rank, or warn; see [Note: updates].

        Args:
            optimizer: Steps.
            indices: Of its parameters.
            used: Those with gradients that stayed on this rank.
            others_average: Whether it also steps over those of another wrapper, which has averaged theirs.

        Raises:
            ConfigurationError: It is not likely that the script has averaged them itself.
        """
        local = {index: self._bucket_set.parameters[index].grad for index in indices if index in used}
        if all_zero(gradient for gradient in local.values() if gradient is not None):
            return
        message = (
            f"{self._name(optimizer)} uses gradients that were not averaged over the ranks, first that of parameter "
            f"{self._bucket_set.names[min(local)]}.\nRun the last forward and backward before a step outside of "
            "no_sync(), not through .module, and with a loss of tensors that forward returns."
            + " Train the model that prepare() has returned."
            * self.is_strict
        )
        may_be_averaged = self._num_calls is None or num_calls() - _num_of_wrappers > self._num_calls  # by the script
        if self.is_strict or ((self._accumulates or others_average) and not may_be_averaged):
            raise ConfigurationError(message)
        if not self._has_warned and (self._accumulates or not may_be_averaged):
            self._has_warned = True
            warnings.warn(message, stacklevel=2)

    def refuse_search(self, optimizer: Optimizer, loss: Any) -> None:
        """Refuse a line search on the loss of each rank: the ranks would take other steps, and pair other closures.

        Collective if the optimizer searches: every rank. Called after each evaluation of its closure.

        Raises:
            ConfigurationError: On every rank: the losses differ.
        """
        if not isinstance(optimizer, LBFGS) or optimizer.param_groups[0]["line_search_fn"] is None:
            return
        own, device = float(torch.as_tensor(loss).detach()), self._bucket_set.parameters[0].device
        losses = all_gather_object(own, group=self._group, device=device)
        if len(set(map(repr, losses))) > 1:  # as text: NaN differs from itself
            raise ConfigurationError(
                f"{self._name(optimizer)} searches along a line by the loss that its closure returns, which is "
                f"{losses[0]} on rank 0, and {next(loss for loss in losses if repr(loss) != repr(losses[0]))} on "
                "another rank: the ranks would take different steps.\n"
                "Return the mean over the ranks from the closure, after backward: loss = loss.detach(); "
                "torch.distributed.all_reduce(loss); return loss / world_size."
            )

    def _name(self, optimizer: Optimizer) -> str:
        return f"Rank {self._group.rank()}: {type(optimizer).__name__}.step()"
