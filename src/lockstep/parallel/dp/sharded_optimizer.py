"""An optimizer divided among the replicas of a `DataParallel`: the same sharding as ZeRO-1's, in one process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigurationError, LockstepError
from lockstep.parallel.dp.owners import Owner, SliceOwner, WholeOwner
from lockstep.parallel.dp.slices import GradientSlices
from lockstep.parallel.flat import combine_norms, list_norms, multiply_
from lockstep.parallel.zero.partition import FlatBuffer, OptimizerFactory, ShardRange, assign_greedily, slices_of
from lockstep.parallel.zero.state_dict import FullEntries, ShardedEntries, make_state_shards

Run = Callable[[Sequence[Callable[[], None]]], object]
"""Calls function i in the thread of replica i, all of them at once; raises what the first failing one raised."""


class ShardedOptimizer(Optimizer):
    """Does what a bare optimizer would do, each replica in its own thread on its part of the parameters.

    The state lies on the replicas' devices, an equal part on each. Element-wise optimizers work on flat slices, so a
    step is a few kernels however many parameters there are, and parameters become views of flat buffers; of other
    optimizers each replica owns whole parameters. Gradients are those that `DataParallel.backward` leaves in
    ``param.grad``, or any others. `state_dict` is that of the bare optimizer, on the CPU, and they load each other's.

    Made by `DataParallel.shard_optimizer`.

    Args:
        optimizer: Which has not made a step yet; it is not used afterwards.
        devices: Of the replicas; parameters lie on the first. Empty: there is only the module, wherever it is.
        run: Calls functions in the replicas' threads.
        shard_gradients: Whether each replica gets only its slice of the gradients, see `DataParallel.shard_optimizer`.

    Attributes:
        slices: The gradients, if they are divided.

    Raises:
        ConfigurationError: It cannot be made anew from its class and its param groups, or cannot be divided.
    """

    def __init__(
        self, optimizer: Optimizer, devices: Sequence[torch.device], run: Run, *, shard_gradients: bool = False
    ) -> None:
        if optimizer.state:
            raise ConfigurationError(
                f"This {type(optimizer).__name__} has a state already, which would be lost.\n"
                "Divide it before its first step, then load its state_dict() into what shard_optimizer() returns."
            )
        self._recipe = OptimizerFactory.of(optimizer)
        if shard_gradients and not self._recipe.elementwise:
            raise ConfigurationError(
                f"shard_gradients=True needs an element-wise optimizer, which {type(optimizer).__name__} is not known "
                "to be.\nLeave it out."
            )
        self._shards_gradients = shard_gradients and len(devices) > 1
        self.slices: GradientSlices | None = None
        self._run = run
        self._devices = list(devices) or [optimizer.param_groups[0]["params"][0].device]
        self._owners: list[Owner] = []
        self._buffers: list[FlatBuffer] = []
        super().__init__([dict(group) for group in optimizer.param_groups], dict(optimizer.defaults))
        self._build()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:  # type: ignore[override]
        """Update the parameters; return what ``closure`` does, which computes loss and gradients anew.

        Raises:
            LockstepError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_sparse()
        present = self._present()
        for buffer in self._buffers:
            if not buffer.is_whole:
                buffer.take_back()
        options = self._options()
        for owner in self._owners:
            _set(owner.shard.optimizer, options)
        self._run([partial(owner.step, present, kwargs) for owner in self._owners])
        for buffer in self._buffers:  # autograd must notice that what it has saved has changed
            torch.autograd.graph.increment_version(buffer.parameters)
        self._adopt(self._owners[0].shard.optimizer)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of all gradients, or set to zero those that are not divided."""
        super().zero_grad(set_to_none)
        if self.slices is not None:
            self.slices.drop()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Cut the gradients to ``max_norm`` in place and return what their norm was, on the first device.

        As ``torch.nn.utils.clip_grad_norm_`` does with all parameters, which with ``shard_gradients`` sees nothing.
        """
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        if self.slices is not None:
            gradients = self.slices.tensors()
        norm = combine_norms(list_norms(gradients, norm_type), norm_type)
        multiply_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def lookup(self, module: nn.Module) -> Callable[[], GradientSlices | None]:
        """Return what returns the `slices` as long as this optimizer is used.

        Raises:
            ConfigurationError: A parameter is none of ``module``.
        """
        known = set(map(id, module.parameters()))
        if any(id(parameter) not in known for parameter in self._parameters):
            raise ConfigurationError(
                "shard_gradients=True, but the optimizer has parameters that are not the module's.\nLeave it out."
            )
        this = weakref.ref(self)

        def slices() -> GradientSlices | None:
            alive = this()
            return None if alive is None else alive.slices

        return slices

    def _present(self) -> list[bool]:
        """Return by parameter whether it has a gradient."""
        whole = [parameter.grad is not None for parameter in self._parameters]
        if self.slices is None:
            return whole
        if any(whole):
            raise LockstepError(
                f"Parameter {whole.index(True)} of the optimizer has a gradient in .grad, but with "
                "shard_gradients=True gradients come from DataParallel.backward only.\n"
                "Use it for all of the loss, or leave shard_gradients out."
            )
        return [self.slices.has(index) for index in range(len(whole))]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to those that are trained."""
        super().add_param_group(param_group)
        if self._owners:
            state = self._pieces()
            self._build()
            self._load(state.read)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, whole and on the CPU: that of the bare optimizer, which can load it."""
        return {**super().state_dict(), "state": self._pieces().whole()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state from here or from the bare optimizer.

        Raises:
            ValueError: It is of other parameters.
        """
        super().load_state_dict({**state_dict, "state": {}})
        self._load(FullEntries(state_dict["state"], self._parameters, flat=self._recipe.elementwise).read)

    def state_bytes(self) -> list[int]:
        """Return how many bytes of state each replica keeps."""
        return [
            sum(
                value.nbytes
                for _, entries in owner.shard.state()
                for value in entries.values()
                if isinstance(value, Tensor)
            )
            for owner in self._owners
        ]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _options(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]

    def _adopt(self, optimizer: Optimizer) -> None:
        for group, theirs in zip(self.param_groups, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in theirs.items() if name != "params"})

    def _pieces(self) -> ShardedEntries:
        pieces = [
            piece
            for owner in self._owners
            for piece in make_state_shards(owner.shard.state(), flat=self._recipe.elementwise)
        ]
        return ShardedEntries(pieces, self._parameters)

    def _load(self, read: Callable[[ShardRange], Mapping[str, Any] | None]) -> None:
        for owner in self._owners:
            owner.shard.load(read, self._options())

    def _build(self) -> None:
        places: list[tuple[nn.Parameter, ShardRange]] = []
        for index, group in enumerate(self.param_groups):
            places += [
                (parameter, ShardRange(len(places) + position, index, 0, parameter.numel()))
                for position, parameter in enumerate(group["params"])
            ]
        options, count = self._options(), len(self._devices)
        if self._recipe.elementwise:
            self._buffers = slices_of(places, count, _allocate)
            self.slices = GradientSlices(self._buffers, self._devices) if self._shards_gradients else None
            self._owners = [
                SliceOwner(number, device, self._buffers, self._recipe, options, self.slices)
                for number, device in enumerate(self._devices)
            ]
        else:
            whose = assign_greedily([span.numel for _, span in places], count)
            own = [[place for place, owner in zip(places, whose, strict=True) if owner == i] for i in range(count)]
            self._owners = [
                WholeOwner(device, [each for each, _ in mine], [span for _, span in mine], self._recipe, options)
                for device, mine in zip(self._devices, own, strict=True)
            ]
        self._adopt(self._owners[0].shard.optimizer)

    def _refuse_sparse(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise LockstepError(
                    f"Parameter {index} of the optimizer received a sparse gradient, which cannot be divided.\n"
                    "Build nn.Embedding and nn.EmbeddingBag with sparse=False, or give them an optimizer of their own."
                )


def _allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _set(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    for group, each in zip(optimizer.param_groups, options, strict=True):
        group.update(each)
