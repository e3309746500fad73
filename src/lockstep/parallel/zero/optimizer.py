"""``ZeroRedundancyOptimizer``: each rank keeps the state of its shard of the parameters and updates that shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.collectives import (
    Group,
    Join,
    Joinable,
    JoinHook,
    all_gather_object,
    all_reduce,
    default_group,
    empty_buffer,
    gather_states,
    has_reduce_scatter,
)
from lockstep.errors import ConfigurationError, LockstepError
from lockstep.parallel.compile import keep_out_of_graphs
from lockstep.parallel.consistency import check_models_agree
from lockstep.parallel.ddp.buckets import Bucket
from lockstep.parallel.flat import combine_norms, list_norms, multiply_
from lockstep.parallel.zero.partition import (
    FlatBuffer,
    FlatShard,
    OptimizerFactory,
    ParameterGather,
    ShardRange,
    WholeShard,
    buckets_of,
    regions_of,
    slices_of,
)
from lockstep.parallel.zero.reduce_scatter import ReduceScatterTransport, SecondBackward, find_reducer
from lockstep.parallel.zero.state_dict import (
    FullEntries,
    ShardedEntries,
    ShardedState,
    StateShard,
    check_shards,
    make_state_shards,
)

# What callers may give as parameters, and whether all ranks gave the same.


def as_param_list(params: Any) -> list[Any]:
    """Return ``params`` as a list of tensors, named tensors or param groups.

    Raises:
        TypeError: It is something else.
        ValueError: It is empty.
    """
    if isinstance(params, Tensor):
        raise TypeError(
            f"`params` argument should be an iterable of Tensors, but got {torch.typename(params)}.\n"
            "Give model.parameters()."
        )
    try:
        given = list(params)
    except TypeError as error:
        raise TypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got {torch.typename(params)}.\n"
            "Give model.parameters(), or a list of param groups."
        ) from error
    if not given:
        raise ValueError("ZeroRedundancyOptimizer got an empty parameter list.\nGive model.parameters().")
    for kind in (Tensor, dict, tuple):
        if all(isinstance(each, kind) for each in given):
            break
    else:
        raise TypeError("`params` argument should be an iterable of Tensors or dicts.\nGive model.parameters().")
    for each in given:
        if isinstance(each, dict) and "params" not in each:
            raise ValueError("A param group has no 'params' key.\nGive each group as {'params': [...], 'lr': ...}.")
    return given


def check_dense(parameters: Sequence[Tensor]) -> None:
    """Check that all parameters can lie in flat memory.

    Raises:
        ValueError: One is sparse.
    """
    for index, parameter in enumerate(parameters):
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"Parameter {index} is sparse, which ZeroRedundancyOptimizer cannot divide.\n"
                "Give it to an optimizer of its own."
            )


def check_ranks_agree(
    parameters: Sequence[Tensor], groups: Sequence[int], how: str, *, group: Group, device: torch.device
) -> None:
    """Check that all ranks divide the same parameters in the same way. Collective: every rank. Blocks.

    Args:
        parameters: By index.
        groups: By index, the param group.
        how: In words, what else must be the same.
        group: The ranks that take part.
        device: Where tensors lie that this group can send.

    Raises:
        ModelMismatch: On every rank: parameters differ; names the first.
        ConfigurationError: On every rank: param groups or arguments differ.
    """
    check_models_agree(
        [(f"{index} of the optimizer", each) for index, each in enumerate(parameters)], (), group=group, device=device
    )
    described = (
        f"{how}, param groups of {', '.join(str(groups.count(each)) for each in sorted(set(groups)))} parameters"
    )
    everybody: list[str] = all_gather_object(described, group=group, device=device)
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            raise ConfigurationError(
                f"The optimizers differ between ranks: rank 0 has {everybody[0]}; rank {rank} has {theirs}.\n"
                "Make the optimizer on every rank with the same arguments."
            )


# The norm of gradients of which each rank has a part.


def norm_of_shards(gradients: Sequence[Tensor], like: Tensor, norm_type: float = 2.0, *, group: Group) -> Tensor:
    """Return the norm of all ranks' ``gradients`` together, a 0-dimensional tensor; the same bits on every rank.

    Collective: every rank, one number. Blocks (on CUDA: the current stream waits).

    Args:
        gradients: This rank's part, maybe none.
        like: A parameter; the result is on its device, and in its dtype, or float32 if that is narrower.
        norm_type: Above 0; may be infinite.
        group: The ranks that take part.
    """
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    total = combine_norms(list_norms(gradients, norm_type), norm_type).to(like.device, wide)
    if math.isinf(norm_type):
        all_reduce(total, group=group, op="max")
    else:
        total = total**norm_type
        all_reduce(total, group=group)
        total = total ** (1.0 / norm_type)
    return total.to(torch.promote_types(like.dtype.to_real(), torch.float32))


def clip_shards_(
    gradients: Sequence[Tensor], like: Tensor, max_norm: float, norm_type: float, *, group: Group
) -> Tensor:
    """Cut all ranks' ``gradients`` together to ``max_norm`` in place; return what their norm was.

    Collective: every rank. Blocks (on CUDA: the current stream waits).
    """
    norm = norm_of_shards(gradients, like, norm_type, group=group)
    multiply_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


# How parameters are divided now: flat buffers, this rank's optimizer, and where its gradients come from.
#
# [Note: when buffers are laid]
# With ``shard_gradients`` buffers lie as the buckets of the `DistributedDataParallel` do, and these are built anew
# after the first backward. So they are laid at the first step, and what is loaded before is kept until then. Should
# buckets change later all the same, ranks exchange their states once and start from them.
#
# [Note: what is in param.grad]
# A bucket that was reduced to slices holds the mean in this rank's slice, and this rank's own gradients elsewhere.
# `step` takes the slice and sets ``param.grad`` to None. A backward before that would add to both, of which no right
# sum can be made, so it is refused; see `SecondBackward`.

Read = Callable[[ShardRange], Mapping[str, Any] | None]


class PartitionedParameters:
    """The parameters of ``param_groups`` divided among the ranks of ``group``.

    Args:
        recipe: Of the optimizer.
        param_groups: As optimizers have them, the same on every rank.
        group: The ranks.
        shard_gradients: Whether buckets are reduced to slices.

    Collective: the constructor, `collect_gradients` with ``shard_gradients``, `finish_step` and `add_group`.
    """

    def __init__(
        self, recipe: OptimizerFactory, param_groups: Sequence[dict[str, Any]], group: Group, *, shard_gradients: bool
    ) -> None:
        self._recipe, self._group, self._rank = recipe, group, group.rank()
        self._gather = ParameterGather(group)
        self._shard: FlatShard | WholeShard | None = None
        self._buffers: list[FlatBuffer] = []
        self._buckets: list[Bucket] = []
        self._row_buckets: list[Bucket] | None = None
        self._read: Read | None = None
        self._has_collected = False
        self._take(param_groups)
        self._reducer = None
        if shard_gradients and group.size() > 1:
            self._reducer = find_reducer(self._parameters, group)
            self._reducer.set_transport(ReduceScatterTransport(self._reducer.row, group))
            self._second_backward = SecondBackward(self._reducer)
        else:
            self._build()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of this rank's part."""
        return self._built.optimizer

    def options(self) -> list[dict[str, Any]]:
        """Return the optimizer's options, by param group."""
        if self._shard is None:  # not yet; what would it say?
            probe = self._recipe.build([[nn.Parameter(torch.empty(0))] for _ in self._options], self._options)
            return [_options_of(group) for group in probe.param_groups]
        return [_options_of(group) for group in self._shard.optimizer.param_groups]

    def set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer these options, by param group."""
        self._options = [dict(each) for each in options]
        if self._shard is not None:
            for group, each in zip(self._shard.optimizer.param_groups, options, strict=True):
                group.update(each)

    # --- a step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Let the optimizer have its gradients until `finish_step` or `forget_gradients`; once.

        Collective with ``shard_gradients``, when buckets have changed: every rank.

        Raises:
            LockstepError: A gradient is sparse.
        """
        if self._has_collected:
            return
        self._lay_anew_if_needed()
        shard = self._built
        if isinstance(shard, FlatShard):
            present = [parameter.grad is not None for parameter in self._parameters]
            self._refuse_sparse()
            shard.set_gradients([self._gradient_of(place) for place in range(len(self._buffers))], present)
        self._has_collected = True

    def local_gradients(self) -> list[Tensor]:
        """Return the gradients that were collected."""
        return self._built.gradients()

    def finish_step(self, *, overlap: bool) -> None:
        """Send the updated part to all ranks, and with ``overlap`` leave it to `wait` to receive theirs.

        Collective: every rank. Blocks, unless ``overlap``.
        """
        self.forget_gradients()
        if self._reducer is not None:  # see [Note: what is in param.grad]
            for parameter in self._reducer.row.parameters:
                parameter.grad = None
        trained = [each for each in self._buffers if any(parameter.requires_grad for parameter in each.parameters)]
        for buffer in trained:  # autograd must notice that what it has saved has changed
            torch.autograd.graph.increment_version(buffer.parameters)
        self._gather.start(trained, alone=not overlap)
        if not overlap:
            self._gather.wait()

    def forget_gradients(self) -> None:
        """Let go of gradients that were collected."""
        self._has_collected = False
        if self._reducer is not None:
            self._second_backward.allow()
        if isinstance(self._shard, FlatShard):
            self._shard.drop_gradients()

    def wait(self) -> None:
        """Block until all parameters are there."""
        self._gather.wait()

    # --- state -----------------------------------------------------------------------------------------------------

    def pieces(self) -> list[StateShard]:
        """Return what this rank keeps."""
        if self._shard is None:
            self._build()
        return make_state_shards(self._built.state(), flat=self._recipe.elementwise)

    def load(self, read: Read, options: Sequence[Mapping[str, Any]]) -> None:
        """Take over this rank's part of a state, and the options."""
        self.set_options(options)
        if self._shard is None:
            self._read = read
        else:
            self._shard.load(read, self._options)

    def add_group(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Divide anew, with one more group. Collective: every rank. Blocks."""
        had = self._shard is not None
        state = self._everybodys_state() if had else None
        self._take(param_groups)
        if state is not None:
            self._read = state
            self._build()

    def _everybodys_state(self) -> Read:
        states = gather_states(self.pieces(), group=self._group, device=self._parameters[0].device, to=None)
        assert states is not None
        return ShardedEntries([piece for pieces in states for piece in pieces], self._parameters).read

    # --- how it is laid --------------------------------------------------------------------------------------------

    @property
    def _built(self) -> FlatShard | WholeShard:
        if self._shard is None:
            self._build()
        assert self._shard is not None
        return self._shard

    def _take(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self._options = [_options_of(group) for group in param_groups]
        self._places: list[tuple[nn.Parameter, ShardRange]] = []
        for index, group in enumerate(param_groups):
            for parameter in group["params"]:
                self._places.append((parameter, ShardRange(len(self._places), index, 0, parameter.numel())))
        self._parameters = [parameter for parameter, _ in self._places]

    def _lay_anew_if_needed(self) -> None:
        """Follow buckets that were built anew, and parameters that were given other memory. Collective: every rank."""
        if self._shard is None:
            self._build()
        elif self._reducer is not None and self._row_buckets is not self._reducer.row.buckets:
            self._read = self._everybodys_state()
            self._build()
        elif moved := [buffer for buffer in self._buffers if not buffer.is_whole]:
            for buffer in moved:
                buffer.take_back()

    def _build(self) -> None:
        """Lay the buffers and make the optimizer. Collective: every rank."""
        how = (self._group.size(), self._allocate)
        rest = self._places
        self._buckets, self._row_buckets = [], None
        self._buffers = []
        if self._reducer is not None:
            self._row_buckets = self._reducer.row.buckets
            self._buckets = list(self._row_buckets)
            self._buffers = buckets_of(self._places, self._buckets, *how)
            inside = {id(parameter) for parameter in self._reducer.row.parameters}
            rest = [place for place in self._places if id(place[0]) not in inside]
        if self._recipe.elementwise:
            self._buffers += slices_of(rest, *how)
            self._shard = FlatShard(
                self._recipe,
                [buffer.slice_of(self._rank) for buffer in self._buffers],
                [buffer.spans_of(self._rank) for buffer in self._buffers],
                self._options,
            )
        else:
            self._buffers = regions_of(self._places, *how)
            spans = [span for buffer in self._buffers for span in buffer.spans_of(self._rank)]
            own = [self._parameters[span.parameter] for span in spans]
            self._shard = WholeShard(self._recipe, own, spans, self._options)
        if self._read is not None:
            self._shard.load(self._read, self._options)
            self._read = None

    def _gradient_of(self, place: int) -> Tensor:
        """Return this rank's slice of the gradients of a buffer."""
        buffer = self._buffers[place]
        if place < len(self._buckets):
            return buffer.slice_of(self._rank, self._buckets[place].gradients)
        out = torch.empty_like(buffer.slice_of(self._rank))
        buffer.gather_gradients(self._rank, out)
        return out

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return empty_buffer(numel, dtype=dtype, device=device, group=self._group)

    def _refuse_sparse(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise LockstepError(
                    f"Parameter {index} of the optimizer received a sparse gradient, which cannot be divided.\n"
                    "Build nn.Embedding and nn.EmbeddingBag with sparse=False, or give them an optimizer of their own."
                )


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


# ``ZeroRedundancyOptimizer``: each rank updates its part of the parameters. Design: docs/design/zero.md.


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Divide an optimizer's state and work among the ranks: each updates its part, and all get all parameters.

    A drop-in for ``torch.distributed.optim.ZeroRedundancyOptimizer``. The result is that of the bare optimizer, and
    all ranks hold the same bits. Element-wise optimizers (SGD, Adam, AdamW, Adamax, Adagrad, Adadelta, RMSprop, NAdam,
    RAdam, ASGD, Rprop, and those that say so) work on flat slices: each rank has an equal share of the state to the
    element, and a step is a few kernels, however many parameters there are. Parameters become views of flat buffers
    for that. Of other optimizers each rank owns whole parameters.

    Gradients are the same on all ranks when `step` is called, as after a backward of ``DistributedDataParallel``.
    With ``shard_gradients`` a rank gets only its slice of them, which saves half of what is sent before the step:
    between backward and `step`, ``param.grad`` then holds the mean in this rank's slice only; use `clip_grad_norm_`
    of this class. After `step` it is None.

    Collective: the constructor, `step`, `add_param_group`, `consolidate_state_dict` and `clip_grad_norm_`.

    Args:
        params: Parameters or param groups, the same on every rank.
        optimizer_class: The optimizer to divide.
        process_group: The ranks that take part. Default: all.
        parameters_as_bucket_view: Accepted; parameters are views of flat buffers in any case.
        overlap_with_ddp: Not supported; see ``shard_gradients``.
        elementwise: Whether ``optimizer_class`` updates each element by itself, so that it may work on flat slices.
            Default: known for torch's classes; others are asked for an attribute ``elementwise``.
        shard_gradients: Let the `lockstep.DistributedDataParallel` that these parameters are in, all of them, reduce
            gradients to each rank's slice only. Not with torch's ``GradScaler``.
        **defaults: What ``optimizer_class`` gets.

    Attributes:
        overlaps: Whether `step` returns while parameters of other ranks are still on their way. Whoever sets it calls
            `wait` before anybody reads a parameter.

    Raises:
        ModelMismatch, ConfigurationError: On every rank: parameters or arguments differ between ranks.
        TypeError, ValueError: ``params`` is nothing that can be divided.
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
        given = as_param_list(params)
        if overlap_with_ddp:
            raise ConfigurationError(
                "overlap_with_ddp=True is not supported.\n"
                "Leave it out; shard_gradients=True with lockstep.DistributedDataParallel is the faster way."
            )
        recipe = OptimizerFactory.make(optimizer_class, defaults, elementwise)
        if shard_gradients and not recipe.elementwise:
            raise ConfigurationError(
                f"shard_gradients=True needs an element-wise optimizer, which {optimizer_class.__name__} is not known "
                "to be.\nLeave it out, or say elementwise=True if its update of an element depends on nothing else."
            )
        self.initialized = False
        Optimizer.__init__(self, given, dict(defaults))
        Joinable.__init__(self)
        self.process_group: Group = default_group() if process_group is None else process_group
        self.world_size, self.rank = self.process_group.size(), self.process_group.rank()
        self.parameters_as_bucket_view, self.overlaps = parameters_as_bucket_view, False
        self._recipe, self._shard_gradients = recipe, shard_gradients
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._agree()
        self._division = PartitionedParameters(
            recipe, self.param_groups, self.process_group, shard_gradients=shard_gradients
        )
        self._adopt_options(self._division.options())
        self.initialized = True

    @property
    def optim(self) -> Optimizer:
        """The optimizer of this rank's part. Collective before the first step with ``shard_gradients``: every rank."""
        return self._division.optimizer

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's ``GradScaler`` asks for before each step.

        Raises:
            ConfigurationError: Gradients are in slices, of which it looks at one rank's only.
        """
        if self._shard_gradients and self.world_size > 1:
            raise ConfigurationError(
                "GradScaler looks for overflows in all gradients, but with shard_gradients=True a rank has a part.\n"
                "Leave shard_gradients out."
            )
        return False

    # --- a step ----------------------------------------------------------------------------------------------------

    @keep_out_of_graphs
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Update this rank's part of the parameters and give it to all ranks; return what ``closure`` does.

        Collective: every rank. Blocks until all parameters are there, unless `overlaps`.

        Args:
            closure: Computes loss and gradients anew, on every rank.
            **kwargs: What the optimizer's own ``step`` gets.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        Join.notify_join_context(self)
        return self._step(closure, kwargs)

    @torch.no_grad()
    def _step(self, closure: Callable[[], float] | None, kwargs: Mapping[str, Any]) -> float | None:
        self.wait()
        loss = None
        if closure is not None and self._recipe.elementwise:
            with torch.enable_grad():
                loss = closure()
            closure = None
        self._division.collect_gradients()
        self._division.set_options(self._options())
        if closure is None:
            self.optim.step(**kwargs)
        else:
            loss = self.optim.step(closure=closure, **kwargs)
        self._adopt_options(self._division.options())
        self._division.finish_step(overlap=self.overlaps)
        return loss

    def wait(self) -> None:
        """Block until the parameters that the last `step` updated are there (on CUDA: let the current stream wait)."""
        self._division.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self._division.forget_gradients()
        super().zero_grad(set_to_none=set_to_none)

    def local_gradients(self) -> list[Tensor]:
        """Return this rank's part of the gradients, which the next `step` uses; each element is in one rank's part.

        Collective the first time, with ``shard_gradients``: every rank.
        """
        self._division.collect_gradients()
        return self._division.local_gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Cut the gradients of all parameters together to ``max_norm``; return what their norm was.

        Collective: every rank. Needed with ``shard_gradients``, where torch's function sees a part only.
        """
        if not self._shard_gradients:
            return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm, norm_type)
        like = self._parameters[0]
        return clip_shards_(self.local_gradients(), like, max_norm, norm_type, group=self.process_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to those that are trained. Collective: every rank, with the same ones. Blocks."""
        super().add_param_group(param_group)
        if self.initialized:
            self.wait()
            self._agree()
            self._division.add_group(self.param_groups)
            self._adopt_options(self._division.options())

    # --- what is kept ----------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Send the state of all ranks to rank ``to``, whose `state_dict` has it then; None: to every rank.

        Collective: every rank. Blocks. The state lies on the CPU.
        """
        device = self._parameters[0].device
        self._division.set_options(self._options())
        states = gather_states(self._division.pieces(), group=self.process_group, device=device, to=to)
        if states is not None:
            self._consolidated = ShardedEntries(
                (piece for pieces in states for piece in pieces), self._parameters
            ).whole()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as it was consolidated last: that of the bare optimizer, which can load it.

        Raises:
            RuntimeError: It has not been consolidated on this rank.
        """
        if self._consolidated is None:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank.\n"
                f"Call consolidate_state_dict(to={self.rank}) on all ranks before, or use sharded_state_dict()."
            )
        return {**super().state_dict(), "state": dict(self._consolidated)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over this rank's part of a state that is whole, from here or from the bare optimizer.

        Every rank gets the same one; no communication.

        Raises:
            ValueError: It is of other parameters.
        """
        super().load_state_dict({**state_dict, "state": {}})
        state = FullEntries(state_dict["state"], self._parameters, flat=self._recipe.elementwise)
        self._division.load(state.read, self._options())

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps, on the CPU, for each rank to save in a file of its own; see `load_sharded`."""
        sharded = ShardedState(
            rank=self.rank,
            world_size=self.world_size,
            layout=[[list(each.shape), list(each.stride())] for each in self._parameters],
            param_groups=super().state_dict()["param_groups"],
            pieces=self._division.pieces(),
        )
        return dict(sharded)

    def load_sharded(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Take over this rank's part of what the ranks of another run kept, however many they were.

        Every rank gets all of it; files opened with ``torch.load(..., mmap=True)`` are read only where needed.

        Raises:
            ConfigurationError: It is not all there, or of parameters with another layout.
        """
        given = check_shards(states, self._parameters)
        super().load_state_dict({"state": {}, "param_groups": given[0]["param_groups"]})
        self.load_pieces(piece for each in given for piece in each["pieces"])

    def load_pieces(self, pieces: Iterable[StateShard]) -> None:
        """Take over the ``pieces`` that `sharded_state_dict` returned, of this rank at least, not its options."""
        self._division.load(ShardedEntries(pieces, self._parameters).read, self._options())

    # --- uneven inputs ---------------------------------------------------------------------------------------------

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """Return what a rank does in ``Join`` when its data is at an end: it goes on taking part in `step`."""
        return _StepJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._parameters[0].device

    @property
    def join_process_group(self) -> Group:
        """The ranks that take part."""
        return self.process_group

    # --- options and parameters ------------------------------------------------------------------------------------

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _options(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]

    def _adopt_options(self, options: list[dict[str, Any]]) -> None:
        for group, each in zip(self.param_groups, options, strict=True):
            group.update(each)

    def _agree(self) -> None:
        """Check that all ranks divide the same. Collective: every rank. Blocks."""
        check_dense(self._parameters)
        groups = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        how = self._recipe.optimizer_class.__name__ + ", shard_gradients" * self._shard_gradients
        device = self._parameters[0].device
        check_ranks_agree(self._parameters, groups, how, group=self.process_group, device=device)


class _StepJoinHook(JoinHook):
    """Takes part in the steps of ranks that still have data."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Take part in a step."""
        self._optimizer._step(None, {})  # not step(), which says that this rank has data


# A divided optimizer in the place of a bare one.


def shard_optimizer(optimizer: Optimizer, *, group: Group) -> ZeroRedundancyOptimizer:
    """Return an optimizer that does what ``optimizer``, which has made no step yet, would do; divided among the ranks.

    Its parameters' gradients are averaged by a `DistributedDataParallel`, in slices where that pays.

    Collective: every rank of ``group``. Blocks.

    Raises:
        ConfigurationError: It cannot be made anew from its class and its param groups, or cannot be divided.
    """
    recipe = OptimizerFactory.of(optimizer)
    device = optimizer.param_groups[0]["params"][0].device
    return ZeroRedundancyOptimizer(
        [dict(param_group) for param_group in optimizer.param_groups],
        type(optimizer),
        process_group=group,
        shard_gradients=recipe.elementwise and has_reduce_scatter(group, device),
        **recipe.defaults,
    )
