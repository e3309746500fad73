"""A copy of each rank's shard at the next rank, so that the state of the optimizer survives the loss of a rank.

[Note: copies of shards]
Rank r+1 holds a second optimizer for the shard of rank r, with the same state, and makes the same updates with the
same gradients: rank r sends it the gradients of its shard before each update, after they are clipped. So nothing is
sent but one shard of gradients, and both states are of the same step at any moment but one.

    collect gradients   ->   send them to the next rank   ->   commit: a small all-reduce   ->   update   ->   gather
    (nothing has changed: a lost rank undoes the step)                            (each rank makes its update by itself)

Who leaves the commit knows that all ranks have entered it, so that each has all that its two updates need. If a rank is
lost in the commit, some ranks may have left it and others not. Those keep the update as *pending*. When the ranks meet
again they compare their numbers of updates: if one of them has made the update, the others make theirs now; if none
has, all forget it and the step is done again. An error in the gather does not end the step, as the update is made: it
is raised by the next operation that waits for parameters. Parameters that a gather leaves half received do not matter:
in a recovery every rank gets each shard from its owner, or from the copy.

What is left of the state is then divided again among the ranks of the new group, however many there are. If a rank and
the one after it are lost at once, a shard is lost.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.comm.collectives import Group, all_to_all_async, wait_for
from lockstep.errors import LockstepError
from lockstep.parallel.zero.partition import (
    Entries,
    FlatBuffer,
    Make,
    Options,
    ShardOptimizer,
    ShardRange,
    with_offsets,
)

# The name of the parameter's own elements, beside the entries of the optimizer.
VALUE = "value of the parameter"

Held = Iterator[tuple[ShardRange, Entries]]


class ShardCopy:
    """The copy, on this rank, of the shard of the rank before it; see [Note: copies of shards].

    Args:
        make, options: As of `ShardOptimizer`; for an element-wise optimizer.
        buffers: Partitioned among the ranks of ``group``, at least two; whole, since the values are copied.
        group: The ranks.

    Attributes:
        owner: The rank whose shard this is.
        shard: The optimizer.
        gradients: By buffer, as received.
    """

    def __init__(self, make: Make, buffers: list[FlatBuffer], group: Group, options: Options) -> None:
        self._buffers, self._group = buffers, group
        self.owner = (group.rank() - 1) % group.size()
        self._values = [buffer.shard_of(self.owner).clone() for buffer in buffers]
        self.gradients = [torch.empty_like(values) for values in self._values]
        self.shard = ShardOptimizer(make, buffers, self.owner, options, elementwise=True, values=self._values)

    def receive(self, gradients: Sequence[Tensor]) -> None:
        """Send this rank's ``gradients`` to the next rank, and get those of the copy. Collective: every rank."""
        size = self._group.size()
        following, works = (self._group.rank() + 1) % size, []
        for buffer, values, mine, theirs in zip(self._buffers, self._values, gradients, self.gradients, strict=True):
            # A script may have changed parameters since the last step, in the same way on all ranks.
            values.copy_(buffer.shard_of(self.owner))
            sent = [mine.numel() if rank == following else 0 for rank in range(size)]
            received = [theirs.numel() if rank == self.owner else 0 for rank in range(size)]
            mine = mine.contiguous()
            work = all_to_all_async(theirs, mine, output_sizes=received, input_sizes=sent, group=self._group)
            works += [] if work is None else [(work, mine)]
        for work, _ in works:
            wait_for(work, "exchange of gradients for the copies of shards")

    def ranges(self) -> list[ShardRange]:
        """Return which elements of which parameters it holds."""
        return [each for buffer in self._buffers for each in buffer.ranges_of_rank[self.owner]]

    def held(self) -> Held:
        """Yield what it holds: values of the parameters, and the optimizer's state."""
        yield from held_values(self._buffers, self.owner, self._values)
        yield from self.shard.state()


def held_values(buffers: Sequence[FlatBuffer], rank: int, values: Sequence[Tensor]) -> Held:
    """Yield the ``values``, by buffer, of the parameters in the shard of ``rank``, by range."""
    for buffer, flat in zip(buffers, values, strict=True):
        for offset, each in with_offsets(buffer.ranges_of_rank[rank]):
            yield each, {VALUE: flat[offset : offset + each.numel]}


class Row(NamedTuple):
    """What a rank holds when the ranks meet again after a loss.

    Attributes:
        num_updates: Number of updates made.
        own, copied: The ranges of its shard, and of its copy.
    """

    num_updates: int
    own: list[ShardRange]
    copied: list[ShardRange]

    @classmethod
    def read(cls, row: list[Any]) -> "Row":
        """Return a row that was sent as JSON."""
        return cls(row[0], *([ShardRange(*each) for each in ranges] for ranges in row[1:]))


def check_complete(rows: Iterable[Row], sizes: Sequence[int]) -> None:
    """Check that the ranks together hold all elements of the parameters, which have these ``sizes``.

    Raises:
        LockstepError: Some were lost.
    """
    ends = dict.fromkeys(range(len(sizes)), 0)
    for each in sorted(each for row in rows for each in (*row.own, *row.copied)):
        if each.start <= ends[each.parameter]:
            ends[each.parameter] = max(ends[each.parameter], each.stop)
    if any(ends[index] < size for index, size in enumerate(sizes)):
        raise LockstepError(
            "A rank and the next one, which held the copy of its optimizer state, were lost at once.\n"
            "The ranks cannot go on in place; they are restarted from the newest checkpoint."
        )
