"""``ZeroRedundancyOptimizer``: each rank updates its part of the parameters. Design: docs/design/zero.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.comm.collectives import Group, default_group
from lockstep.comm.join import Join, Joinable, JoinHook
from lockstep.comm.slices import gather_states
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.dynamo import keep_out_of_graphs
from lockstep.parallel.zero.arguments import check_dense, check_ranks_agree, listed
from lockstep.parallel.zero.clip import clip_slices_
from lockstep.parallel.zero.division import Division
from lockstep.parallel.zero.recipe import Recipe
from lockstep.parallel.zero.states import Piece, Pieces, ShardedState, Whole, check_shards


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
        given = listed(params)
        if overlap_with_ddp:
            raise ConfigurationError(
                "overlap_with_ddp=True is not supported.\n"
                "Leave it out; shard_gradients=True with lockstep.DistributedDataParallel is the faster way."
            )
        recipe = Recipe.make(optimizer_class, defaults, elementwise)
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
        self._division = Division(recipe, self.param_groups, self.process_group, shard_gradients=shard_gradients)
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
        return clip_slices_(self.local_gradients(), like, max_norm, norm_type, group=self.process_group)

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
            self._consolidated = Pieces((piece for pieces in states for piece in pieces), self._parameters).whole()

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
        state = Whole(state_dict["state"], self._parameters, flat=self._recipe.elementwise)
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

    def load_pieces(self, pieces: Iterable[Piece]) -> None:
        """Take over the ``pieces`` that `sharded_state_dict` returned, of this rank at least, not its options."""
        self._division.load(Pieces(pieces, self._parameters).read, self._options())

    # --- uneven inputs ---------------------------------------------------------------------------------------------

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """Return what a rank does in ``Join`` when its data is at an end: it goes on taking part in `step`."""
        return _Steps(self)

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


class _Steps(JoinHook):
    """Takes part in the steps of ranks that still have data."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Take part in a step."""
        self._optimizer._step(None, {})  # not step(), which says that this rank has data
