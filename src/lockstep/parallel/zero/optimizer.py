"""``ZeroRedundancyOptimizer``: each rank keeps the state of its shard of the parameters and updates that shard.

[Note: copies of shards]
With `keep_copies`, rank r+1 has a second optimizer for the shard of rank r, with the same state, and makes the same
updates with the same gradients: rank r sends it the gradients of its shard before each update, after they are clipped.
So nothing is sent but one shard of gradients, and both states are of the same step at any moment but one.

    collect gradients   ->   send them to the next rank   ->   commit: a small all-reduce   ->   update   ->   gather
    (nothing has changed: a lost rank undoes the step)                            (each rank makes its update by itself)

Who leaves the commit knows that all ranks have entered it, so that each has all that its two updates need. If a rank is
lost in the commit, some ranks may have left it and others not. The others keep the update as *pending*. When the ranks
meet again they compare their numbers of updates: if one has made the update, the others make theirs now; if none
has, all forget it and the step is done again. An error in the gather does not end the step, as the update is made: it
is raised by the next operation that waits for parameters. Both updates are made in the rank's own buffers, into which a
gather, complete or not, brings the same bits. So a rank has the right parameters of its shard and of the copy at any
moment, which is why the ranks have no `CommonMemory` then.

What is left of the state is then divided again among the ranks of the new group, however many there are. It is in the
host memory of each while they create the buffers, and a rank that is lost then, or together with the next one, takes
state along: all restart.
"""

import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lockstep.base.accelerator import widest_dtype
from lockstep.base.containers import find_tensors
from lockstep.base.torch_internals import is_counted_step, optimizer_hooks
from lockstep.comm import collectives
from lockstep.comm.collectives import CommonMemory, Group, Join, Joinable, JoinHook
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError
from lockstep.parallel.compile import has_compiled, keep_out_of_graphs
from lockstep.parallel.consistency import check_arguments_agree, check_models_agree
from lockstep.parallel.ddp.buckets import Bucket
from lockstep.parallel.ddp.reducer import Reducer
from lockstep.parallel.ddp.uneven_inputs import StepJoinHook
from lockstep.parallel.flat import combine_norms, list_norms, multiply_
from lockstep.parallel.zero import partition
from lockstep.parallel.zero.partition import Entries, FlatBuffer, Member, Read, ShardOptimizer, ShardRange, options_of
from lockstep.parallel.zero.slices import ReduceScatterMean, find_reducer


class _State(defaultdict[Any, Any]):
    """The ``state`` that a script sees: empty, as each rank has a part. What it removes here is removed from the part.

    Args:
        forget: Removes the state of a parameter; None: of all.
    """

    def __init__(self, forget: Callable[[Any], None]) -> None:
        super().__init__(dict)
        self._forget = forget

    @override
    def __missing__(self, key: Any) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        super().__setitem__(key, entries)
        return entries

    @override
    def __setitem__(self, key: Any, entries: Any) -> None:
        if not entries:
            self._forget(key)
        super().__setitem__(key, entries)

    @override
    def __delitem__(self, key: Any) -> None:
        self.pop(key, None)

    @override
    def pop(self, key: Any, *default: Any) -> Any:
        self._forget(key)
        return super().pop(key, *default)

    @override
    def clear(self) -> None:
        self._forget(None)
        super().clear()


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Shard an optimizer's state and work over the ranks: each updates its part, and all get all parameters.

    A drop-in for ``torch.distributed.optim.ZeroRedundancyOptimizer``. The result is that of the bare optimizer, and
    all ranks hold the same bits. Element-wise optimizers (SGD, Adam, AdamW, Adamax, Adagrad, Adadelta, RMSprop, NAdam,
    RAdam, ASGD, Rprop, and classes that declare it) work on flat slices: all ranks have equal shares of the state, up
    to 16 bytes, and a step is a few kernels, however many parameters there are. For this, parameters become views of
    flat buffers. With other optimizers each rank owns whole parameters.

    Gradients must be equal on all ranks when `step` is called, as after a backward of ``DistributedDataParallel``.
    With ``shard_gradients`` a rank gets only its slice of them, which halves the bytes sent before the step.

    Collective: the constructor, `step`, `add_param_group`, `consolidate_state_dict` and `clip_grad_norm_`.

    Args:
        params: Parameters or param groups, the same on every rank.
        optimizer_class: The optimizer to divide.
        process_group: The ranks that take part. Default: all.
        parameters_as_bucket_view: Accepted; parameters are views of flat buffers in any case.
        overlap_with_ddp: Not supported; see ``shard_gradients``.
        elementwise: Whether ``optimizer_class`` updates each element by itself, so that it may work on flat slices.
            Default: known for torch's classes; other classes may have an attribute ``elementwise``.
        shard_gradients: Reduce gradients to each rank's slice only. All parameters must be in one
            `lockstep.DistributedDataParallel`. Between backward and `step`, ``param.grad`` then holds the mean in this
            rank's slice, and anything elsewhere; after `step` it is None. Norms of it, as in torch's
            ``clip_grad_norm_``, raise ConfigurationError: use `clip_grad_norm_` of this class. Not with torch's
            ``GradScaler``.
        **defaults: Arguments of ``optimizer_class``.

    Attributes:
        has_state: Whether this rank holds its shard of the run's state, and not only that of a new run.
        is_elementwise: Whether ranks have slices of parameters; otherwise each parameter is on one rank.
        has_hooks: Whether an optimizer that it replaces had hooks of its steps, on any rank; None: it replaces none.
        overlaps: Whether `step` returns while parameters of other ranks are still being received. If set, call `wait`
            before reading a parameter.

    Raises:
        ModelMismatch, ConfigurationError: On every rank: parameters or arguments differ between ranks.
        TypeError, ValueError: ``params`` cannot be sharded.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: Group | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        elementwise: bool | None = None,
        shard_gradients: bool = False,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp:
            raise ConfigurationError(
                "overlap_with_ddp=True is not supported.\n"
                "Leave it out; shard_gradients=True with lockstep.DistributedDataParallel is the faster way."
            )
        self.is_elementwise = partition.works_on_slices(optimizer_class, elementwise)
        if shard_gradients and not self.is_elementwise:
            raise ConfigurationError(
                f"shard_gradients=True needs an element-wise optimizer, which {optimizer_class.__name__} is not known "
                "to be.\nLeave it out, or say elementwise=True if its update of an element depends on nothing else."
            )
        # torch's constructor calls add_param_group(), which is collective only afterwards.
        self.initialized = False
        Optimizer.__init__(self, params, dict(defaults))
        Joinable.__init__(self)
        self.process_group: Group = collectives.group_or_default(process_group)
        self.world_size, self.rank = self.process_group.size(), self.process_group.rank()
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlaps = False
        self.has_hooks: bool | None = None
        self._class, self._arguments, self._attributes = optimizer_class, defaults, dict[str, Any]()
        self._shard_gradients = shard_gradients
        self._has_gradients = False
        self._collected: tuple[Sequence[Tensor], Sequence[bool]] = [], []
        self._gathers: list[partition.Gather] = []  # parameters that are being received
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._loaded: Read | None = None
        # See [Note: copies of shards].
        self.has_state, self._keeps_copies, self._num_updates = True, False, 0
        self._copy: ShardOptimizer | None = None
        self._pending: Callable[[], None] | None = None
        self._failure: Exception | None = None  # of a gather
        # Before buffers are created: ranks that differ would exchange slices of different sizes.
        self._check_ranks_agree()
        self._use_reducer(find_reducer(self._parameters) if shard_gradients and self.world_size > 1 else None)
        self._build()
        self.initialized = True

    @property
    def optim(self) -> Optimizer:
        """The optimizer of this rank's shard."""
        return self._shard.optimizer

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Empty, since a rank has a part of the state; clearing or removing an entry has its usual effect.

        Raises:
            ConfigurationError: On assignment of a state that is not a new, empty one.
        """
        return self._state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        if self.initialized:
            if state or isinstance(state, _State):
                raise ConfigurationError(
                    "The state of ZeroRedundancyOptimizer is divided among the ranks, and cannot be assigned.\n"
                    "Use consolidate_state_dict(None), state_dict() and load_state_dict()."
                )
            self._forget(None)
        self._state: defaultdict[Any, Any] = _State(self._forget)

    def _forget(self, parameter: Tensor | None) -> None:
        """Drop the state of a parameter; None: of all. Not collective: call it on every rank."""
        indices = [index for index, one in enumerate(self._parameters) if parameter is None or one is parameter]
        for shard in self._shards:
            shard.forget(indices)
        if indices:
            self._loaded = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch's ``GradScaler`` before each step.

        Raises:
            ConfigurationError: Gradients are in slices, and ``GradScaler`` would check this rank's slice only.
        """
        if self._shard_gradients and self.world_size > 1:
            raise ConfigurationError(
                "GradScaler looks for overflows in all gradients, but with shard_gradients=True a rank has a part.\n"
                "Leave shard_gradients out."
            )
        return False

    # --- A step

    @keep_out_of_graphs
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Update this rank's shard of the parameters and send it to all ranks; return the result of ``closure``.

        Collective: every rank. Blocks until all parameters have arrived, unless `overlaps`.

        Args:
            closure: Computes loss and gradients again, on every rank.
            **kwargs: Arguments of the optimizer's own ``step``.

        Raises:
            LockstepError: A gradient is sparse.
        """
        Join.notify_join_context(self)
        return self._step(closure, kwargs)

    @torch.no_grad()
    def _step(self, closure: Callable[[], float] | None, kwargs: Mapping[str, Any]) -> float | None:
        hooks = any(optimizer_hooks(self, "step").values())
        if hooks and self.has_hooks is False:
            raise ConfigurationError(
                f"A hook was registered at {self._class.__name__} after the training began, but this rank has a part "
                "of the gradients only.\nRegister it in Task.optimizer, or use strategy ddp."
            )
        self.wait()  # the parameters of the last step must have arrived before they change again
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._collect_gradients()
        trained = [buffer for buffer in self._buffers if any(param.requires_grad for param in buffer.parameters)]
        common = any(buffer.common is not None for buffer in trained)
        update = partial(self._update, trained, kwargs)
        if self._copy is not None:
            self._exchange_gradients()
            update = self._pending = partial(self._update_both, update)
        if common or self._copy is not None:  # another rank may still read what this one is about to change
            self._await_all()
        update()
        try:
            if common:  # the writes of each rank are then visible to all
                self._await_all()
            # Buckets have the order of backward, and the next forward begins with the last.
            in_order = trained if self._laid_for is None else trained[::-1]
            self._gathers = partition.start_parameter_gather(in_order, self.process_group, alone=not self.overlaps)
            # The loaded state has been used: from now on the optimizer has its own.
            self._loaded = None
            if hooks or not self.overlaps:
                self.wait()
        except Exception as error:
            if self._copy is None:
                raise
            self._failure = error
        return loss

    def _update(self, trained: Sequence[FlatBuffer], kwargs: Mapping[str, Any]) -> None:
        """Update this rank's shard of the buffers."""
        # Schedulers and scripts change the options of these param groups, but the shard's optimizer has its own param
        # groups; and some optimizers change theirs.
        for shard in self._shards:
            for group, options in zip(shard.optimizer.param_groups, options_of(self.param_groups), strict=True):
                group.update(options)
        common = [(buffer.common, buffer.bounds[self.rank]) for buffer in trained if buffer.common is not None]
        for memory, bounds in common:
            memory.publish(*bounds)
        if self._copy is not None:  # see `Update.LEFT_OUT`, which sets these
            scaling = {name: value for name, value in vars(self.optim).items() if name in ("found_inf", "grad_scale")}
            vars(self._copy.optimizer).update(scaling)
        for shard in self._shards:
            shard.optimizer.step(**kwargs)
            shard.drop_gradients()
        self._adopt_options()
        self._has_gradients, self._collected = False, ([], [])  # a bucket gives memory that is still in use away
        if self._reducer is not None:  # see [Note: what is in param.grad]
            self._slices.reset()
            for parameter in self._reducer.bucket_set.parameters:
                parameter.grad = None
        for buffer in trained:  # autograd must notice that saved tensors have changed
            torch.autograd.graph.increment_version(buffer.parameters)
        for memory, _ in common:
            memory.forget_changes()

    def _exchange_gradients(self) -> None:
        """Send this rank's gradients to the next rank; receive those of the copy. Collective: every rank. Blocks."""
        size, works = self.world_size, []
        for outgoing, incoming in zip(self._collected[0], self._received, strict=True):
            sent = [outgoing.numel() if rank == (self.rank + 1) % size else 0 for rank in range(size)]
            received = [incoming.numel() if rank == (self.rank - 1) % size else 0 for rank in range(size)]
            sizes: dict[str, Any] = {"output_sizes": received, "input_sizes": sent}
            works.append(collectives.all_to_all_async(incoming, outgoing, **sizes, group=self.process_group))
        for work in filter(None, works):
            collectives.wait_for(work, "exchange of gradients for the copies of shards")

    def _update_both(self, update: Callable[[], None]) -> None:
        """Update this rank's shard and its copy of another, also when the gradients were dropped meanwhile."""
        gradients, present = self._collected
        for shard, shard_gradients in zip(self._shards, (gradients, self._received), strict=True):
            shard.set_gradients(shard_gradients, present)
        self._pending = None
        update()
        self._num_updates += 1

    def _await_all(self) -> None:
        """Return when all ranks have called this. Collective: every rank."""
        arrived = torch.ones(1, device=self.join_device)
        collectives.all_reduce(arrived, group=self.process_group)
        # A collective on a device that was aborted raises no error.
        if int(arrived) != self.world_size:
            raise CollectiveError("A rank was lost in the step of the optimizer.")

    def wait(self) -> None:
        """Block until the parameters of the last `step` have arrived (on CUDA: the current stream waits)."""
        if self._failure is not None:
            raise self._failure
        gathers, self._gathers = self._gathers, []
        for _, works in gathers:
            partition.wait_for_gather(works)

    def wait_late(self) -> AbstractContextManager[None]:
        """Return a context for a forward, in which operations wait for the parameters that they use; see `wait`."""
        # Compiled code checks the classes of parameters, and a class of their own has operations of its own.
        if has_compiled() or self._failure is not None or {nn.Parameter} != set(map(type, self._parameters)):
            self.wait()
        gathers, self._gathers = self._gathers, []
        return partition.wait_late(gathers, self.join_device) if gathers else nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self._has_gradients = False
        if type(self.optim).zero_grad is not Optimizer.zero_grad:
            self.optim.zero_grad(set_to_none=set_to_none)
        self._shard.drop_gradients()
        if self._reducer is not None:
            self._slices.reset()
        super().zero_grad(set_to_none=set_to_none)

    def local_gradients(self) -> list[Tensor]:
        """Return this rank's part of the gradients, for the next `step`; each element is in exactly one rank's part.

        Collective the first time, with ``shard_gradients``: every rank.
        """
        self._collect_gradients()
        return self._shard.gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients down so that their norm is at most ``max_norm``; return the norm they had.

        Collective: every rank. Needed with ``shard_gradients``, where torch's function sees only a part.
        """
        if not self._shard_gradients:
            return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm, norm_type)
        gradients = self.local_gradients()  # in the memory that the next step uses: they are not collected again
        norm = norm_of_shards(gradients, self._parameters[0], norm_type, group=self.process_group)
        multiply_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to optimize. Collective: every rank, with the same parameters. Blocks."""
        super().add_param_group(param_group)
        if self.initialized:
            self.wait()
            self._check_ranks_agree()
            self._rebuild()

    @torch.no_grad()
    def _collect_gradients(self) -> None:
        """Give the shard's optimizer its gradients, once per step.

        Collective with slices: every rank.

        Raises:
            LockstepError: A gradient is sparse.
        """
        if self._has_gradients:  # they may be clipped, and must not be collected again
            return
        if self._reducer is not None:
            self._slices.allow_norms()
            # After the buckets were rebuilt, at the end of the first backward, the list is a new one.
            if self._laid_for is not self._reducer.bucket_set.buckets:
                self._rebuild()
        self._take_back()
        if self.is_elementwise:
            present = [parameter.grad is not None for parameter in self._parameters]
            for index, parameter in enumerate(self._parameters):
                if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                    raise LockstepError(
                        f"Parameter {index} of the optimizer received a sparse gradient, which cannot be "
                        "divided among ranks.\nBuild nn.Embedding and nn.EmbeddingBag with sparse=False, or use a "
                        "separate optimizer for them."
                    )
            # Gradients are used in place in their bucket, unless the script has set others, which are copied into one.
            buckets: Sequence[Bucket] = self._laid_for or ()
            gradients = [
                buffer.shard_of(self.rank, bucket.gradients)
                if bucket is not None and bucket.holds_all
                else buffer.gradients_of(self.rank)
                for buffer, bucket in zip_longest(self._buffers, buckets)
            ]
            self._shard.set_gradients(gradients, present)
            self._collected = gradients, present
        self._has_gradients = True
        if self._reducer is not None:
            self._slices.refuse_norms()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block, parameters have the values that the ``eval()`` of the divided optimizer sets.

        Collective: every rank. Blocks. Needs host memory for all parameters.
        """
        self.wait()
        self._take_back()
        for buffer in self._buffers:
            if buffer.common is not None:
                buffer.common.publish(*buffer.bounds[self.rank])
        with torch.no_grad():
            trained = [parameter.detach().clone() for parameter in self._parameters]
            self._await_all()  # in common memory, the others have seen what this rank is about to change
            own = [entries[partition.VALUE] for _, entries in self._shard.values()]
            how: dict[str, Any] = {"flat": self.is_elementwise, "group": self.process_group, "to": None}
            with partition.in_eval_mode(self.optim, own):
                whole = partition.gather_full_state(self._shard.values(), self._parameters, **how)
            assert whole is not None
            try:
                for index, parameter in enumerate(self._parameters):
                    parameter.copy_(whole[index][partition.VALUE])
                yield
            finally:
                for parameter, value in zip(self._parameters, trained, strict=True):
                    parameter.copy_(value)

    # --- What is kept

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Send the state of all ranks to rank ``to``, for its `state_dict`; None: to every rank.

        Collective: every rank. Blocks. The state is on the CPU.
        """
        try:
            state = self._gather_state(to)
        except CollectiveError as error:
            text = "consolidate_state_dict is collective: call it on every rank, not behind `if rank == 0`."
            raise CollectiveError(f"{text}\n{error}") from error
        if state is not None:
            self._consolidated = state

    def state_dict(self) -> dict[str, Any]:
        """Return the last consolidated state, in the format of the bare optimizer, which can load it.

        Raises:
            RuntimeError: It has not been consolidated on this rank.
        """
        if self._consolidated is None:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank.\n"
                f"Call consolidate_state_dict(to={self.rank}) on all ranks before, or use lockstep.save()."
            )
        own_state, self._state = self._state, defaultdict(dict, self._consolidated)
        try:
            return super().state_dict()  # whose hooks get the whole state
        finally:
            self._state = own_state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's shard of a full state, from this class or from the bare optimizer.

        Every rank passes the same state; no communication.

        Raises:
            ValueError: It belongs to other parameters.
        """
        taken: dict[str, Any] = {}

        def take(_optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            taken.update(state)
            return {**state, "state": {}}

        with self.register_load_state_dict_pre_hook(take):  # after those of the script, which get the whole state
            self._load_options(dict(state_dict))
        self._load(partition.read_from_full(taken["state"], self._parameters, flat=self.is_elementwise))

    def local_shards(self) -> list[tuple[ShardRange, Entries]]:
        """Return this rank's state, by elements of a parameter, see `load_shards`. Copies nothing."""
        self._take_back()
        return list(self._shard.state())

    def local_ranges(self) -> list[ShardRange]:
        """Return which elements of which parameters this rank updates."""
        return [shard_range for buffer in self._buffers for shard_range in buffer.ranges_of_rank[self.rank]]

    def load_shards(self, read: Read, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's shard of a state.

        Args:
            read: Returns the state of a `ShardRange` in this rank's shard, or None if there is none. For an
                element-wise optimizer, entries per element are flat, in the memory order of the parameter. Called now,
                and with ``shard_gradients`` possibly again in the first `step`.
            param_groups: As in the bare optimizer's ``state_dict``.

        Raises:
            ValueError: They belong to other parameters.
        """
        self._load_options({"state": {}, "param_groups": list(param_groups)})
        self._load(read)

    def _load_options(self, state_dict: dict[str, Any]) -> None:
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups  # the same objects, which the script may hold

    def _take_back(self) -> None:
        # model.to(), or a script that sets ``param.data``, gives parameters other memory, and elements another order.
        for buffer in self._buffers:
            buffer.take_back()

    def _load(self, read: Read) -> None:
        self._take_back()
        # With buckets the buffers may be rebuilt before the first step, and then the state is read a second time.
        self._loaded = read if self._reducer is not None else None
        for shard in self._shards:
            shard.load(read, options_of(self.param_groups))

    def take_attached(self, optimizer: Optimizer) -> None:
        """Take over what a script has attached to ``optimizer``: hooks of steps, attributes, state and param groups.

        Raises:
            ConfigurationError: Something cannot be divided among ranks.
        """
        # The same objects: hooks and schedulers may hold ``optimizer``.
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        state_hooks = {**optimizer_hooks(optimizer, "state_dict"), **optimizer_hooks(optimizer, "load_state_dict")}
        step_hooks = optimizer_hooks(optimizer, "step")
        why = "has hooks of its state_dict, which no rank has as a whole" * any(state_hooks.values())
        if not all(isinstance(key, Tensor) for key in optimizer.state):
            why = "has state that belongs to no parameter"
        for name, value in vars(optimizer).items():
            if name in (*state_hooks, *step_hooks, "param_groups", "state") or is_counted_step(value):
                continue
            if hasattr(type(optimizer), name) and callable(value):
                why = f"has a {name} of its own, set on the object: define it in the class, or register a hook"
            elif not any(True for _ in find_tensors(value)):
                self._attributes[name] = value
            elif name not in vars(self.optim):  # else its constructor makes them, for the parameters of a shard
                why = f"has tensors in its attribute {name}"
        if why:
            kind = type(optimizer).__name__
            raise ConfigurationError(f"{kind} {why}; so it cannot be divided among ranks.\nUse strategy ddp.")
        vars(self).update(step_hooks)
        new = self._attributes.keys() - vars(self).keys() - set(dir(type(self)))
        vars(self).update({name: self._attributes[name] for name in new})
        for shard in self._shards:
            vars(shard.optimizer).update(self._attributes)
        if optimizer.state:
            self.load_state_dict(optimizer.state_dict())

    def _gather_state(self, to: int | None) -> dict[int, dict[str, Any]] | None:
        """Return the whole state on rank ``to`` or on all. Collective: every rank. Blocks."""
        flat, group = self.is_elementwise, self.process_group
        return partition.gather_full_state(self.local_shards(), self._parameters, flat=flat, group=group, to=to)

    # --- The layout

    def _use_reducer(self, reducer: Reducer | None) -> None:
        self._reducer = reducer
        if reducer is not None:
            if isinstance(reducer.reduction, ReduceScatterMean):  # of an optimizer that is gone
                reducer.reduction.reset()
                reducer.observers.remove(reducer.reduction)
            self._slices = ReduceScatterMean(reducer, self.process_group, self)
            reducer.set_reduction(self._slices)
            reducer.observers.append(self._slices)

    def _build(self) -> None:
        """Create the flat buffers and the shard's optimizer. Collective: every rank.

        [Note: when buffers are laid]
        Flat buffers are created in the constructor. With ``shard_gradients`` they have the layout of the buckets of the
        `DistributedDataParallel`, which are rebuilt once, after the first backward. So the first `step` creates them
        again, and reads a state that was loaded before a second time.
        """
        members: list[Member] = []
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                members.append((parameter, ShardRange(len(members), 0, parameter.numel(), number)))
        self._buffers: list[FlatBuffer] = []
        self._laid_for: Sequence[Bucket] | None = None
        member_of = {id(parameter): (parameter, shard_range) for parameter, shard_range in members}
        if self._reducer is not None:  # then it is element-wise
            if not self._reducer.bucket_set.index_of.keys() <= member_of.keys():
                raise ConfigurationError(
                    "Parameters are trained now that were frozen before and are not in this ZeroRedundancyOptimizer, "
                    "whose gradients are in slices.\nGive it all of model.parameters() when it is made, or call "
                    "add_param_group() before the next forward."
                )
            self._laid_for = self._reducer.bucket_set.buckets
            for bucket in self._laid_for:
                inside = [member_of.pop(id(parameter)) for parameter in bucket.parameters]
                self._buffers.append(FlatBuffer(inside, self._allocate, num_ranks=self.world_size))
        divide = partition.partition_evenly if self.is_elementwise else partition.partition_by_parameter
        self._buffers += divide(list(member_of.values()), self.world_size, self._allocate)
        options = options_of(self.param_groups)
        self._shard = ShardOptimizer(self._make, self._buffers, self.rank, options, elementwise=self.is_elementwise)
        self._copy = None
        if self._keeps_copies and self.world_size > 1:
            before = (self.rank - 1) % self.world_size
            self._copy = ShardOptimizer(self._make, self._buffers, before, options, elementwise=True)
            self._received = [torch.empty_like(buffer.shard_of(before)) for buffer in self._buffers]
        self._adopt_options()

    def _make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return an optimizer for the segments of a shard."""
        optimizer = self._class(groups, **self._arguments)
        held = [name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]
        own = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"}))
        if held or own:  # a state beside the one by parameter, which alone is known how to divide and save
            what = f"holds another optimizer as {held[0]}" if held else f"has {', '.join(own)} in its state_dict"
            raise ConfigurationError(
                f"{self._class.__name__} {what}, so its state cannot be divided among ranks.\n"
                "Use it as it is, without ZeroRedundancyOptimizer; with fit, strategy ddp."
            )
        vars(optimizer).update(self._attributes)
        return optimizer

    def _rebuild(self) -> None:
        """Create the buffers again, and keep the state. Collective: every rank. Blocks."""
        read = self._loaded
        if read is None:
            state = self._gather_state(to=None)
            assert state is not None
            read = partition.read_from_full(state, self._parameters, flat=self.is_elementwise)
        self._build()
        self._load(read)

    def _allocate(self, numel: int, like: nn.Parameter) -> Tensor | CommonMemory:
        placement: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "group": self.process_group}
        # Frozen parameters are never exchanged, so each rank keeps its own. An optimizer that is not element-wise
        # writes to the parameters themselves, and with a copy a rank writes to the shard of another.
        is_common = like.requires_grad and self.is_elementwise and not self._keeps_copies
        common = collectives.common_memory(numel, **placement) if is_common else None
        return collectives.empty_buffer(numel, **placement) if common is None else common

    @property
    def _shards(self) -> list[ShardOptimizer]:
        return [self._shard] if self._copy is None else [self._shard, self._copy]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _adopt_options(self) -> None:
        """Copy the options that the optimizer's constructor or step has set, such as defaults."""
        for group, options in zip(self.param_groups, options_of(self.optim.param_groups), strict=True):
            group.update(options)

    def _check_ranks_agree(self) -> None:
        """Check that all ranks partition the same parameters in the same way. Collective: every rank. Blocks.

        Raises:
            ValueError: A parameter is sparse.
            ModelMismatch: On every rank: parameters differ; names the first.
            ConfigurationError: On every rank: param groups or arguments differ.
        """
        for index, parameter in enumerate(self._parameters):
            if parameter.layout is not torch.strided:
                raise ValueError(
                    f"Parameter {index} is sparse, which ZeroRedundancyOptimizer cannot divide.\n"
                    "Use a separate optimizer for it."
                )
        named = [(f"{index} of the optimizer", parameter) for index, parameter in enumerate(self._parameters)]
        group, device = self.process_group, self._parameters[0].device
        check_models_agree(named, (), group=group, device=device)
        described = self._class.__name__ + ", shard_gradients" * bool(self._shard_gradients)
        sizes = ", ".join(str(len(group["params"])) for group in self.param_groups)
        check_arguments_agree(f"{described}, param groups of {sizes} parameters", group=group, device=device)

    # --- Recovery in place

    def keep_copies(self) -> tuple[int, int]:
        """From now on keep a copy of each rank's shard at the next rank; see [Note: copies of shards].

        Collective: every rank. Blocks.

        Returns:
            The bytes that a rank sends per step for its copy, and those of memory, without the copied state.

        Raises:
            ConfigurationError: The optimizer is not element-wise.
        """
        if not self.is_elementwise:
            raise ConfigurationError(
                f"redundancy=1 needs an element-wise optimizer, which {self._class.__name__} is not known to be.\n"
                "Use one of torch's, set its class attribute elementwise = True if its update of an element depends on "
                "nothing else, or omit redundancy."
            )
        common = [buffer for buffer in self._buffers if buffer.common is not None]
        num_shared = sum(buffer.flat.nbytes - buffer.shard_of(0).nbytes for buffer in common)
        self._keeps_copies = True
        self._rebuild()
        num_bytes = sum(gradient.nbytes for gradient in self._received) if self._copy is not None else 0
        return num_bytes, num_bytes + num_shared

    def reconnect(self, group: Group, reducer: Reducer) -> None:
        """Divide parameters and state among the ranks of a new group, from what the others have left.

        Collective: every rank of ``group``. Blocks. Needs host memory for the whole state while it lasts.

        Raises:
            LockstepError: A part of the state was lost.
        """
        partition.stop_waiting(self._parameters)
        self._gathers, self._failure, self._loaded = [], None, None
        own_row = [self._num_updates, self.rank, self.world_size, options_of(self.param_groups)]
        states = collectives.gather_states(own_row if self.has_state else None, group=group, device=self.join_device)
        rows = [row for row in states if row is not None]
        # All that have state have divided it in the same way.
        most, _, size, options = max(rows, key=itemgetter(0), default=(0, 0, 1, []))
        owners = {rank for _, rank, _, _ in rows}
        if len(owners | {(rank - 1) % size for rank in owners}) < size:
            why = (
                "A rank and the next one, which held the copy of its optimizer state, were lost at once, "
                "or a rank while the state was divided again"
            )
            if group.rank() == 0:  # the report names the rank that was lost
                print(f"lockstep: {why}: all ranks restart", file=sys.stderr, flush=True)
            raise LockstepError(f"{why}.\nThe ranks cannot go on in place; restart them from the newest checkpoint.")
        held: list[tuple[ShardRange, Entries]] = []
        if self.has_state:
            if self._num_updates < most:
                assert self._pending is not None, "a rank that has made the update knew that all could"
                self._pending()
            is_needed = (self.rank - 1) % size not in owners
            for shard in self._shards if is_needed else [self._shard]:
                held += [*shard.values(), *shard.state()]
        whole = partition.gather_full_state(held, self._parameters, flat=True, group=group, to=None)
        assert whole is not None
        # A rank that is lost until this one has the new buffers takes a part of the new division along.
        self.has_state, self._pending = False, None
        for param_group, group_options in zip(self.param_groups, options, strict=True):
            param_group.update(group_options)
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                parameter.copy_(whole[index].pop(partition.VALUE))
        self.process_group, self.world_size, self.rank = group, group.size(), group.rank()
        self._use_reducer(reducer if self._shard_gradients and self.world_size > 1 else None)
        self._build()
        state = {index: entries for index, entries in whole.items() if entries}
        self._load(partition.read_from_full(state, self._parameters, flat=True))
        self.has_state, self._num_updates = True, most

    # --- Uneven inputs

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """Return the hook for a rank without more data in ``Join``: it continues to take part in `step`."""
        return StepJoinHook(lambda: self._step(None, {}))  # not step(), which reports that this rank has data

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._parameters[0].device

    @property
    def join_process_group(self) -> Group:
        """The ranks that take part."""
        return self.process_group


def norm_of_shards(gradients: Sequence[Tensor], like: Tensor, norm_type: float = 2.0, *, group: Group) -> Tensor:
    """Return the norm of all ranks' ``gradients`` together, a 0-dimensional tensor; the same bits on every rank.

    Collective: every rank, one number. Blocks (on CUDA: the current stream waits).

    Args:
        gradients: This rank's part, maybe none.
        like: A parameter. The result is on its device and in its dtype, or in float32 if that dtype is narrower.
        norm_type: Above 0; may be infinite.
        group: The ranks that take part.
    """
    # A sum of powers in the narrow dtype would overflow, or lose digits compared with one process.
    norms = list_norms(gradients, norm_type) or [torch.zeros((), device=like.device)]
    total = combine_norms(norms, norm_type).to(like.device, widest_dtype(like.device))
    if math.isinf(norm_type):
        collectives.all_reduce(total, group=group, op="max")
    else:
        total = total**norm_type
        collectives.all_reduce(total, group=group)
        total = total ** (1.0 / norm_type)
    return total.to(torch.promote_types(like.dtype.to_real(), torch.float32))


def shard_optimizer(optimizer: Optimizer, *, group: Group) -> ZeroRedundancyOptimizer:
    """Return a sharded optimizer with the same results as ``optimizer``, which has made no step yet.

    A `DistributedDataParallel` averages the gradients of its parameters, in slices if that is faster.

    Collective: every rank of ``group``. Blocks.

    Raises:
        ConfigurationError: It cannot be created again from its class and its param groups, or cannot be sharded.
    """
    kind = type(optimizer)
    first, *others = inspect.signature(kind).parameters.values()
    named = [param for param in others if param.kind not in (param.VAR_KEYWORD, param.VAR_POSITIONAL)]
    needed = [param.name for param in named if param.default is param.empty and param.name not in optimizer.defaults]
    if first.name != "params" or needed:
        raise ConfigurationError(
            f"{kind.__name__} cannot be created again for each rank's part: its constructor must take params first, "
            f"and then require nothing that its defaults lack; they lack {', '.join(needed) or 'nothing'}.\n"
            "Use strategy ddp, the optimizer inside it, or one that passes its arguments to Optimizer as defaults."
        )
    takes_any = any(param.kind is param.VAR_KEYWORD for param in others)
    accepted = optimizer.defaults if takes_any else {param.name for param in named}
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    device = optimizer.param_groups[0]["params"][0].device
    # Hooks read and change whole gradients; maybe on one rank only, for a log.
    has_hooks = torch.tensor([any(optimizer_hooks(optimizer, "step").values())], dtype=torch.int32, device=device)
    collectives.all_reduce(has_hooks, group=group, op="max")
    shards = partition.works_on_slices(kind) and collectives.has_reduce_scatter(group, device) and not int(has_hooks)
    sharded = ZeroRedundancyOptimizer(optimizer.param_groups, kind, group, shard_gradients=shards, **defaults)
    sharded.has_hooks = bool(has_hooks)
    sharded.take_attached(optimizer)
    return sharded
