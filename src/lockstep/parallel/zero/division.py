"""How parameters are divided now: flat buffers, this rank's optimizer, and where its gradients come from.

[Note: when buffers are laid]
With ``shard_gradients`` buffers lie as the buckets of the `DistributedDataParallel` do, and these are built anew after
the first backward. So they are laid at the first step, and what is loaded before is kept until then. Should buckets
change later all the same, ranks exchange their states once and start from them.

[Note: what is in param.grad]
A bucket that was reduced to slices holds the mean in this rank's slice, and this rank's own gradients elsewhere. `step`
takes the slice and sets ``param.grad`` to None. A backward before that would add to both, of which no right sum can be
made, so it is refused; see `SecondBackward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.comm.buffers import empty_buffer
from lockstep.comm.collectives import Group
from lockstep.comm.slices import gather_states
from lockstep.errors import LockstepError
from lockstep.parallel.ddp.bucket import Bucket
from lockstep.parallel.zero.exchange import ParameterGather
from lockstep.parallel.zero.flat import FlatBuffer
from lockstep.parallel.zero.layout import buckets_of, regions_of, slices_of
from lockstep.parallel.zero.recipe import Recipe
from lockstep.parallel.zero.reduction import SecondBackward, SliceTransport, find_reducer
from lockstep.parallel.zero.shard import FlatShard
from lockstep.parallel.zero.spans import Span
from lockstep.parallel.zero.states import Piece, Pieces, make_pieces
from lockstep.parallel.zero.whole_shard import WholeShard

Read = Callable[[Span], Mapping[str, Any] | None]


class Division:
    """The parameters of ``param_groups`` divided among the ranks of ``group``.

    Args:
        recipe: Of the optimizer.
        param_groups: As optimizers have them, the same on every rank.
        group: The ranks.
        shard_gradients: Whether buckets are reduced to slices.

    Collective: the constructor, `collect_gradients` with ``shard_gradients``, `finish_step` and `add_group`.
    """

    def __init__(
        self, recipe: Recipe, param_groups: Sequence[dict[str, Any]], group: Group, *, shard_gradients: bool
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
            self._reducer.set_transport(SliceTransport(self._reducer.row, group))
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

    def pieces(self) -> list[Piece]:
        """Return what this rank keeps."""
        if self._shard is None:
            self._build()
        return make_pieces(self._built.state(), flat=self._recipe.elementwise)

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
        return Pieces([piece for pieces in states for piece in pieces], self._parameters).read

    # --- how it is laid --------------------------------------------------------------------------------------------

    @property
    def _built(self) -> FlatShard | WholeShard:
        if self._shard is None:
            self._build()
        assert self._shard is not None
        return self._shard

    def _take(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self._options = [_options_of(group) for group in param_groups]
        self._places: list[tuple[nn.Parameter, Span]] = []
        for index, group in enumerate(param_groups):
            for parameter in group["params"]:
                self._places.append((parameter, Span(len(self._places), index, 0, parameter.numel())))
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
